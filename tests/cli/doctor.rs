//! `paceline doctor` on this machine, and between hosts that a stand-in for ssh reaches.

use std::os::unix::fs::PermissionsExt;

use crate::place::Place;

#[test]
fn this_machine_is_measured_and_the_advice_can_be_typed() {
    let place = Place::new();
    let found = place.json("doctor --json");
    let machine = &found["machines"][0];
    for name in ["sockets", "numa_nodes", "cores", "threads", "threads_allowed", "threads_usable", "memory_bytes"] {
        assert!(machine[name].as_u64().is_some_and(|count| count > 0), "{name}: {machine}");
    }
    let read = &machine["memory_bytes_per_s"];
    assert!(read["all_threads"].as_f64().unwrap() > 1e8 && read["one_thread"].as_f64().unwrap() > 1e8, "{machine}");
    assert!(machine["instruction_sets"].as_array().unwrap().iter().any(|isa| isa == "portable"), "{machine}");
    let links = found["links"].as_array().unwrap();
    let names: Vec<&str> = links.iter().map(|link| link["link"].as_str().unwrap()).collect();
    assert_eq!(names, ["loopback", "shared memory"]);
    for sockets in ["1", "2", "4", "8"] {
        assert!(links[0]["bytes_per_s"][sockets].as_f64().unwrap() > 1e7, "{}", links[0]);
    }
    assert!(links.iter().all(|link| link["latency_s"].as_f64().unwrap() < 0.1), "{links:?}");
    assert_eq!(found["gpus"]["library"], "libcuda.so.1");
    for command in found["advice"]["commands"].as_array().unwrap() {
        let command = command.as_str().unwrap().strip_prefix("paceline ").unwrap();
        let more = if command.starts_with("train ") { "--max-steps 1 --calibrate off --quiet" } else { "" };
        place.run(&format!("{command} {more}"));
    }
}

#[test]
fn hosts_measure_the_link_between_them() {
    let place = Place::new();
    // Runs its last argument here, as sshd would there.
    place.write("bin/ssh", "#!/bin/sh\nfor last; do :; done\nexec sh -c \"$last\"\n");
    std::fs::set_permissions(place.path("bin/ssh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", place.path("bin").display(), std::env::var("PATH").unwrap());
    let port = paceline::cluster::launch::local::free_port().unwrap();
    let mut command = place.command(&format!("doctor --hosts 127.0.0.1,127.0.0.2 --port {port}"));
    let output = command.env("PATH", path).output().unwrap();
    let (said, wrong) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{wrong}");
    for words in ["cores     ", "memory    ", "gpus      ", "links     ", "advice    "] {
        assert_eq!(said.lines().filter(|line| line.starts_with(words)).count(), 1, "`{words}`: {said}");
    }
    for words in ["127.0.0.1 [0] → 127.0.0.2 [1]", "127.0.0.2 [1] → 127.0.0.1 [0]", "paceline train --batch "] {
        assert!(said.contains(words), "`{words}` is missing: {said}");
    }
}

#[test]
fn links_without_two_ends_are_refused() {
    let place = Place::new();
    place.refuses("doctor --hosts alone", &["type two or more hosts"]);
    place.write("cluster.json", r#"{"worker": ["a:1", "b:1"]}"#);
    place.refuses("doctor --cluster cluster.json", &["type --job worker --task 0"]);
    place.refuses("doctor --cluster nowhere.json --job worker --task 0", &["cannot read nowhere.json"]);
}
