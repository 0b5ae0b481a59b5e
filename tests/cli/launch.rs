//! `paceline launch` as a person types it: local processes, a stand-in for ssh, and what is written for schedulers.

use std::os::unix::fs::PermissionsExt;

use crate::place::Place;

#[test]
fn local_processes_print_with_their_rank_in_front() {
    let place = Place::new();
    let said = place.run("launch --workers 2 -- models");
    let of = |rank: &str| said.lines().filter(|line| line.starts_with(rank)).count();
    assert!(of("[0] ") > 10 && of("[0] ") == of("[1] "), "{said}");
    assert_eq!(of("[0] ") + of("[1] "), said.lines().count());
}

#[test]
fn the_exit_code_of_a_launcher_is_that_of_its_processes() {
    let place = Place::new();
    let output = place.output("launch --workers 2 -- report nowhere");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line.contains("] error: nowhere has no events")), "{said}");
}

#[test]
fn hosts_are_reached_over_ssh_in_the_same_folder() {
    let place = Place::new();
    // Runs its last argument here, as sshd would there.
    place.write("fake-ssh", "#!/bin/sh\nfor last; do :; done\nexec sh -c \"$last\"\n");
    std::fs::set_permissions(place.path("fake-ssh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let fake = place.path("fake-ssh");
    let said = place.run(&format!("launch --hosts a,b:2 --ssh {} -- models", fake.display()));
    assert!(["[0] ", "[1] ", "[2] "].iter().all(|rank| said.contains(rank)), "{said}");
    let environment = place.run(&format!("launch --hosts a,b --ssh {} --program env -- sh -c env", fake.display()));
    for words in ["[1] RANK=1", "[1] WORLD_SIZE=2", "[0] MASTER_ADDR=a", "[1] PACELINE_TOKEN=stdin"] {
        assert!(environment.contains(words), "`{words}` is missing: {environment}");
    }
}

#[test]
fn scripts_and_manifests_are_printed() {
    let place = Place::new();
    let script = place.run("launch --slurm --nodes 2 --workers 8 --cores 4 --time 1:00:00 -- train --model mlp");
    for words in ["#!/bin/bash", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=4", "srun", "train --model mlp"] {
        assert!(script.contains(words), "`{words}` is missing: {script}");
    }
    let manifest = place.run("launch --kubernetes --image x/y:1 --workers 3 -- train --model mlp");
    for words in ["completionMode: Indexed", "completions: 3", "image: \"x/y:1\"", "- \"--model\""] {
        assert!(manifest.contains(words), "`{words}` is missing: {manifest}");
    }
}

#[test]
fn what_cannot_be_launched_is_refused() {
    let place = Place::new();
    for (arguments, words) in [
        ("launch -- train", "type --workers N, or --hosts A,B"),
        ("launch --workers 2", "COMMAND"),
        ("launch --hosts a,a -- train", "for two processes there, type a:2"),
        ("launch --hosts a --workers 2 -- train", "leave --workers away"),
        ("launch --kubernetes --workers 2 -- train", "--image"),
        ("launch --slurm --nodes 2 --workers 3 -- train", "do not share 2 nodes evenly"),
    ] {
        let output = place.output(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {said}");
        assert!(said.contains(words), "{arguments}: {said}");
    }
}
