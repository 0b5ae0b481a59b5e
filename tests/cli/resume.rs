//! A process that dies at any moment loses only the steps since its last checkpoint: resumed, it ends with the same bits.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::place::{Place, has, text};

/// An epoch of 100 steps and the beginning of another, with augmentation, on two threads.
const RUN: &str = "--model lenet5 --data shapes --batch 80 --max-steps 120 --epochs 2 --checkpoint-every 3 --lr 0.02";

/// Starts a run and waits until its first step is done.
fn start(place: &Place, run: &str) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut command = place.command(&format!("train {RUN} --run {run} --json"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("\"step\"") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the run ended before its first step");
    }
    (child, lines)
}

#[test]
fn a_run_killed_at_any_moment_ends_with_the_same_bits() {
    let place = Place::new();
    let began = std::time::Instant::now();
    place.run(&format!("train {RUN} --run straight --quiet"));
    let whole = began.elapsed();
    let seed = UNIX_EPOCH.elapsed().unwrap_or_default().subsec_nanos();
    println!("moments from seed {seed}; a whole run takes {whole:?}");
    assert!(SystemTime::now() > UNIX_EPOCH);
    let mut random = paceline::system::random::Random::new(&[u64::from(seed)]);
    for number in 0..3 {
        let run = format!("killed-{number}");
        let (mut child, lines) = start(&place, &run);
        // The run is past its start by now, and so is surely alive for half of the time it takes.
        let moment = whole.mul_f64(0.5 * random.below(1000) as f64 / 1000.0);
        std::thread::sleep(moment);
        child.kill().unwrap();
        drop(lines);
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "killed after {moment:?} (seed {seed}), not ended: {status}");
        assert!(!place.path(&format!("{run}/report.html")).exists());
        place.run(&format!("train --resume {run} --quiet"));
        assert!(place.weights(&run, 120) == place.weights("straight", 120), "killed after {moment:?}, seed {seed}");
        let started = place.events(&run).iter().filter(|event| event["event"] == "run_started").count();
        assert_eq!(started, 2);
    }
}

#[test]
fn an_interrupt_finishes_the_step_saves_and_says_how_to_resume() {
    if !has("kill", "an_interrupt_finishes_the_step") {
        return;
    }
    let place = Place::new();
    place.run(&format!("train {RUN} --threads 1 --run straight --quiet"));
    let mut command = place.command(&format!("train {RUN} --threads 2 --run run"));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let checkpoints = place.path("run/checkpoints");
    while !std::fs::read_dir(&checkpoints).is_ok_and(|entries| entries.count() > 0) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}{}", text(&output.stderr));
    assert!(said.contains("interrupted at step") && said.contains("paceline train --resume run"), "{said}");
    let events = place.events("run");
    let (last, before) = (&events[events.len() - 1], &events[events.len() - 2]);
    assert_eq!(last["reason"], "interrupted");
    assert_eq!((&before["event"], &before["step"]), (&"checkpoint".into(), &last["step"]));
    assert!(last["step"].as_u64().unwrap() < 120, "it was interrupted before its end");
    place.run("train --resume run --quiet");
    // One thread and two, stopped and not: the same bits.
    assert!(place.weights("run", 120) == place.weights("straight", 120));
}
