//! `--restart N`: a run whose process is killed goes on by itself from its last checkpoint, with the bits of one that lost nobody; and
//! what is not started again.

use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::place::{Place, QUICK, has, text};
use crate::ranks::until;

/// More steps than anybody waits for.
const LONG: &str = "--model mlp --data synthetic:8x8x3/10/4096 --batch 8 --epochs 1000 --checkpoint-every 2";

fn line(model: &str, steps: u64, way: &str) -> String {
    format!(
        "train --model {model} --data synthetic:32x32x3/10/1600 --batch 16 --epochs 3 --max-steps {steps} --threads 1 --calibrate off \
         --optimizer momentum --lr 0.01 --checkpoint-every 4 --quiet {way}"
    )
}

fn start(place: &Place, line: &str) -> Child {
    spawn(&mut place.command(line))
}

fn spawn(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The process that a launcher started as this rank.
fn rank(launcher: u32, rank: usize) -> Option<u32> {
    let child = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let parent: u32 = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
        let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        let is_rank = environment.split(|byte| *byte == 0).any(|word| word == format!("RANK={rank}").as_bytes());
        (parent == launcher && is_rank).then_some(pid)
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).find_map(child)
}

fn tell(pid: u32, signal: &str) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

fn count(place: &Place, run: &str, event: &str) -> usize {
    let text = std::fs::read_to_string(place.path(&format!("{run}/events/rank-0.jsonl"))).unwrap_or_default();
    text.matches(&format!("\"event\":\"{event}\"")).count()
}

/// Kills a rank once something is saved, and waits for the launcher.
fn kill(place: &Place, launcher: Child, run: &str, victim: usize) -> Output {
    let pid = until("the rank", || rank(launcher.id(), victim));
    until("a checkpoint", || (count(place, run, "checkpoint") > 0).then_some(()));
    tell(pid, "-KILL");
    launcher.wait_with_output().unwrap()
}

/// A rank is killed, and the run ends as one that lost nobody.
fn ends_with_the_same_bits(place: &Place, (model, steps): (&str, u64), way: &str, victims: &[usize]) {
    let line = line(model, steps, way);
    let name = format!("{model}-{}", way.replace(' ', ""));
    place.run(&format!("{line} --run {name}-straight"));
    for victim in victims {
        let run = format!("{name}-{victim}");
        let output = kill(place, start(place, &format!("{line} --restart 2 --run {run}")), &run, *victim);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{run}: {said}");
        assert_eq!(said.matches("starting again from step ").count(), 1, "{run}: {said}");
        assert!(said.contains(" (1 of 2)\n"), "{run}: {said}");
        assert_eq!(count(place, &run, "restarted"), 1, "{run}");
        assert!(
            place.weights(&run, steps) == place.weights(&format!("{name}-straight"), steps),
            "{run}: other weights"
        );
    }
}

#[test]
fn a_rank_that_is_killed_over_sockets_costs_no_bit() {
    if !has("kill", "a_rank_that_is_killed_over_sockets_costs_no_bit") {
        return;
    }
    let place = Place::new();
    ends_with_the_same_bits(&place, ("cnn5", 24), "--workers 2 --carry tcp", &[0, 1]);
    ends_with_the_same_bits(&place, ("lenet5", 120), "--workers 2 --carry tcp", &[0]);
}

#[test]
#[ignore = "cargo x ci: restart"]
fn a_rank_that_is_killed_in_shared_memory_costs_no_bit() {
    if !has("kill", "a_rank_that_is_killed_in_shared_memory_costs_no_bit") {
        return;
    }
    let place = Place::new();
    ends_with_the_same_bits(&place, ("cnn5", 24), "--workers 2 --carry shm", &[0]);
    ends_with_the_same_bits(&place, ("lenet5", 120), "--workers 2 --carry shm", &[1, 0]);
}

#[test]
#[ignore = "cargo x ci: restart"]
fn a_server_or_a_process_alone_that_is_killed_costs_no_bit() {
    if !has("kill", "a_server_or_a_process_alone_that_is_killed_costs_no_bit") {
        return;
    }
    let place = Place::new();
    // Two workers are ranks 0 and 1; the server is the last.
    ends_with_the_same_bits(&place, ("cnn5", 24), "--workers 2 --agree parameter-server --servers 1", &[2]);
    ends_with_the_same_bits(&place, ("lenet5", 120), "--workers 2 --agree parameter-server --servers 1", &[2, 0]);
    ends_with_the_same_bits(&place, ("lenet5", 120), "--workers 1", &[0]);
}

#[test]
fn hosts_that_ssh_reaches_are_started_again() {
    if !has("kill", "hosts_that_ssh_reaches_are_started_again") {
        return;
    }
    let place = Place::new();
    // Runs its last argument here, as sshd would there.
    place.write("bin/ssh", "#!/bin/sh\nfor last; do :; done\nexec sh -c \"$last\"\n");
    std::fs::set_permissions(place.path("bin/ssh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", place.path("bin").display(), std::env::var("PATH").unwrap());
    let line = line("lenet5", 120, "--carry tcp");
    place.run(&format!("{line} --workers 2 --run straight"));
    let port = paceline::cluster::launch::local::free_port().unwrap();
    let hosts = format!("{line} --hosts 127.0.0.1:2 --port {port} --restart 1 --run run");
    let output = kill(&place, spawn(place.command(&hosts).env("PATH", path)), "run", 1);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains(" (1 of 1)\n"), "{said}");
    assert!(place.weights("run", 120) == place.weights("straight", 120), "other weights");
}

#[test]
fn a_run_that_fails_again_and_again_is_started_as_often_as_was_asked_for() {
    if !has("kill", "a_run_that_fails_again_and_again_is_started_as_often_as_was_asked_for") {
        return;
    }
    let place = Place::new();
    for (most, times) in [(0, ""), (1, "the run was started again once, "), (2, "the run was started again 2 times, ")]
    {
        let run = format!("run{most}");
        let launcher = start(&place, &format!("train {LONG} --workers 2 --restart {most} --quiet --run {run}"));
        for number in 0..=most {
            until("the next start", || (count(&place, &run, "run_started") > number).then_some(()));
            let pid = until("the rank", || rank(launcher.id(), number % 2));
            tell(pid, "-KILL");
        }
        let output = launcher.wait_with_output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(said.matches("starting again from step ").count(), most, "{said}");
        assert!(said.contains(times), "{said}");
    }
}

#[test]
fn an_interrupt_ends_a_run_that_may_be_started_again() {
    if !has("kill", "an_interrupt_ends_a_run_that_may_be_started_again") {
        return;
    }
    let place = Place::new();
    for workers in [1, 2] {
        let run = format!("run{workers}");
        let launcher = start(&place, &format!("train {LONG} --workers {workers} --restart 3 --quiet --run {run}"));
        until("a checkpoint", || (count(&place, &run, "checkpoint") > 0).then_some(()));
        tell(launcher.id(), "-INT");
        let output = launcher.wait_with_output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{said}");
        assert!(!said.contains("starting again"), "{said}");
    }
}

#[test]
fn what_would_fail_again_is_not_started_again() {
    let place = Place::new();
    for workers in [1, 2] {
        let spoiled =
            format!("train {QUICK} --optimizer sgd --lr 1e30 --workers {workers} --restart 2 --run nan{workers}");
        let output = place.output(&spoiled);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("not a number") && !said.contains("starting again"), "{said}");
        // Refused by the processes, which nobody had named a folder for.
        let output = place.output(&format!("train --data folder:nothing --workers {workers} --restart 2"));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(!said.contains("starting again"), "{said}");
    }
    assert_eq!(std::fs::read_dir(place.path("runs")).map_or(0, Iterator::count), 0, "nothing is left behind");
    place.refuses(&format!("train {QUICK} --workers 9 --oversubscribe --restart 1"), &["--batch"]);
    let alone = format!("train {QUICK} --restart 1 --run run");
    let output = place.command(&alone).env("RANK", "0").env("WORLD_SIZE", "1").output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("leave --restart out"), "{said}");
}

#[test]
fn a_run_that_nobody_named_is_found_again_and_a_limit_on_time_counts_all_of_it() {
    let test = "a_run_that_nobody_named_is_found_again_and_a_limit_on_time_counts_all_of_it";
    if !has("kill", test) {
        return;
    }
    let place = Place::new();
    let (begun, launcher) =
        (Instant::now(), start(&place, &format!("train {LONG} --workers 2 --restart 1 --time-limit 4s")));
    let run = until("the run", || std::fs::read_dir(place.path("runs")).ok()?.next()?.ok());
    let run = format!("runs/{}", run.file_name().to_string_lossy());
    until("a checkpoint", || (count(&place, &run, "checkpoint") > 0).then_some(()));
    until("a time that counts", || (begun.elapsed() > Duration::from_millis(1500)).then_some(()));
    tell(until("the rank", || rank(launcher.id(), 1)), "-KILL");
    let output = launcher.wait_with_output().unwrap();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("2 workers × 1 thread") && said.contains("stopped: the time is over"), "{said}");
    assert_eq!(std::fs::read_dir(place.path("runs")).unwrap().count(), 1);
    assert!(place.read_text(&format!("{run}/report.html")).contains("started it again once after a failure"));
    let last = place.events(&run).pop().unwrap();
    assert!(last["seconds"].as_f64().unwrap() < 4.0, "the time before counts: {last}");
}
