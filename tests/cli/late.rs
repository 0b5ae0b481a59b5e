//! Ranks that are late, silent or dead, in runs of the real binary: who is named, how often, and what becomes of the run.

use std::time::{Duration, Instant};

use paceline::system::process::{Tell, tell};
use serde_json::Value;

use crate::place::Place;
use crate::running::{PATIENCE, Running, Slowed, within};

/// A fault shows within a second; the rest is for a busy machine.
const SOON: Duration = Duration::from_secs(1 + 4);

/// Endless steps of a few milliseconds.
fn command(model: &str, carry: &str, more: &str) -> String {
    let data = if model == "lenet5" { "synthetic:28x28x1/10/4800" } else { "synthetic:32x32x3/10/4800" };
    format!(
        "train --model {model} --data {data} --batch 12 --epochs 1000 --evaluate-every 1000 --threads 1 --carry {carry} \
         --oversubscribe --run run {more}"
    )
}

/// The lines on standard error that name a rank as late, or as not late any more.
fn named(said: &str, words: &str) -> Vec<String> {
    said.lines().filter(|line| line.contains(words)).map(str::to_owned).collect()
}

/// A worker at a tenth of its processor is named, catches up when it has its processor again, and the run ends well.
fn slow_worker(model: &str, carry: &str) {
    let place = Place::new();
    let mut run = Running::start(&place, &command(model, carry, "--workers 2 --late 300ms --time-limit 15s"));
    run.steps(3);
    let slowed = Slowed::new(run.process_of(1));
    within(PATIENCE, "late", || !named(&run.said(), " is late: ").is_empty(), || run.said());
    drop(slowed);
    within(PATIENCE, "caught up", || !named(&run.said(), " has caught up: ").is_empty(), || run.said());
    assert_eq!(run.ends(PATIENCE).code(), Some(0), "{}", run.said());
    let said = run.said();
    let late = &named(&said, " is late: ")[0];
    assert!(late.starts_with("rank 1 on ") && late.contains("others have waited "), "{said}");
    assert!(late.contains(" s ") && late.contains("; it is in phase ") && late.contains(" after step "), "{said}");
    let about = |kind: &str| -> Vec<Value> {
        run.events(0, kind).into_iter().filter(|event| event["late_rank"] == 1).collect()
    };
    let (late, caught_up) = (about("late"), about("caught_up"));
    assert!(late[0]["waited_s"].as_f64().unwrap() >= 0.3 && late[0]["phase"].is_string(), "{late:?}");
    assert!(caught_up[0]["waited_s"].as_f64().unwrap() >= 0.3, "{caught_up:?}");
    assert!(late[0]["time_s"].as_f64() < caught_up[0]["time_s"].as_f64(), "{late:?} {caught_up:?}");
    assert_eq!(named(&said, "error: "), [""; 0], "{said}");
    let page = String::from_utf8(std::fs::read(place.path("run/report.html")).unwrap()).unwrap();
    assert!(page.contains("Late ranks"), "the report shows it");
}

#[test]
fn a_worker_at_a_tenth_of_its_processor_is_named_over_sockets() {
    slow_worker("cnn5", "tcp");
}

#[test]
#[ignore = "cargo x ci: late"]
fn a_worker_at_a_tenth_of_its_processor_is_named_where_ranks_share_memory() {
    slow_worker("lenet5", "shm");
}

#[test]
fn a_healthy_run_names_nobody() {
    let place = Place::new();
    let said = place.output(&command("cnn5", "tcp", "--workers 3 --max-steps 40"));
    let wrong = String::from_utf8(said.stderr).unwrap();
    assert!(said.status.success() && named(&wrong, "late").is_empty(), "{wrong}");
}

#[test]
#[ignore = "cargo x ci: late"]
fn a_stop_of_eight_seconds_ends_no_run() {
    for carry in ["tcp", "shm"] {
        let place = Place::new();
        let mut run = Running::start(&place, &command("cnn5", carry, "--workers 2"));
        run.steps(3);
        let pid = run.process_of(1);
        tell(pid, Tell::Stop);
        let stopped = Instant::now();
        within(SOON, "late", || !named(&run.said(), "rank 1 on ").is_empty(), || run.said());
        // The length of the stop is what is tested.
        std::thread::sleep(Duration::from_secs(8).saturating_sub(stopped.elapsed()));
        tell(pid, Tell::Continue);
        let steps = run.events(0, "step").len();
        run.steps(steps + 10);
        within(PATIENCE, "caught up", || !named(&run.said(), " has caught up: ").is_empty(), || run.said());
        tell(run.pid(), Tell::Interrupt);
        assert_eq!(run.ends(PATIENCE).code(), Some(130), "{}", run.said());
    }
}

/// A worker that is killed is named at once, in one sentence that says how to go on.
fn killed(model: &str, carry: &str, rank: usize) {
    let place = Place::new();
    let mut run = Running::start(&place, &command(model, carry, "--workers 3 --checkpoint-every 5"));
    run.steps(11);
    let struck = Instant::now();
    tell(run.process_of(rank), Tell::Kill);
    within(SOON, "named", || !named(&run.said(), "error: ").is_empty(), || run.said());
    let after = struck.elapsed();
    let gone = format!("error: rank {rank} on ");
    let sentence = run.fails_once(PATIENCE, &[&gone, " is gone ", "paceline train --resume "]);
    assert!(sentence.contains("; it was last in phase "), "{sentence}");
    eprintln!("{carry}: rank {rank} was named after {:.2} s", after.as_secs_f64());
}

#[test]
fn a_killed_worker_is_named_once() {
    killed("cnn5", "tcp", 1);
    killed("lenet5", "shm", 2);
}

#[test]
fn a_killed_first_worker_is_named_once() {
    killed("lenet5", "tcp", 0);
    killed("cnn5", "shm", 0);
}

#[test]
fn a_silent_worker_ends_the_run_when_asked_to_and_is_named_once() {
    let place = Place::new();
    let mut run = Running::start(&place, &command("cnn5", "shm", "--workers 2 --late 500ms --silent 2s"));
    run.steps(3);
    tell(run.process_of(1), Tell::Stop);
    let sentence = run.fails_once(PATIENCE, &[" is stalled: silent for 2."]);
    assert!(sentence.starts_with("error: rank 1 on "), "{sentence}");
}

#[test]
fn a_worker_that_fails_by_itself_is_told_of_once() {
    let place = Place::new();
    let mut run = Running::start(&place, &command("lenet5", "tcp", "--workers 2"));
    run.steps(3);
    // Its event file is one that cannot be written any more.
    let pid = run.process_of(1);
    let limited = std::process::Command::new("prlimit").args(["--fsize=1", "--pid", &pid.to_string()]).status();
    if !limited.is_ok_and(|status| status.success()) {
        return crate::place::skip("a_worker_that_fails_by_itself_is_told_of_once", "needs `prlimit`");
    }
    let sentence = run.fails_once(PATIENCE, &["error: rank 1 on "]);
    assert!(sentence.contains("rank-1.jsonl") || sentence.contains("is gone"), "{sentence}");
}

#[test]
fn a_slow_worker_of_parameter_servers_is_named_and_servers_write_events() {
    let place = Place::new();
    let more = "--agree parameter-server --workers 2 --late 300ms";
    let mut run = Running::start(&place, &command("lenet5", "tcp", more));
    run.steps(3);
    let slowed = Slowed::new(run.process_of(1));
    within(PATIENCE, "late", || !named(&run.said(), "rank 1 on ").is_empty(), || run.said());
    let served = || run.events(2, "served").iter().any(|event| event["waited"]["1"].as_f64() > Some(0.3));
    within(PATIENCE, "served", served, || format!("{:?}", run.events(2, "served")));
    drop(slowed);
    let steps = run.events(0, "step").len();
    run.steps(steps + 5);
    tell(run.process_of(2), Tell::Kill);
    run.fails_once(PATIENCE, &["error: rank 2 on ", " is gone "]);
    assert_eq!(run.events(2, "run_started").len(), 1);
    place.run("report run");
    assert!(place.read_text("run/report.html").contains("Servers"));
}

#[test]
fn deadlines_that_cannot_be_are_refused() {
    let place = Place::new();
    place.refuses("train --workers 2 --silent 500ms", &["type a longer --silent"]);
    place.refuses("train --late soon", &["500ms, 90s, 10m or 2h"]);
    place.write("deadlines.toml", "[deadlines]\nbatch = \"1ms\"\n");
    place.refuses("train deadlines.toml", &["`batch` of 1ms", "at least 100ms"]);
}
