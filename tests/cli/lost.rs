//! Workers that do not wait for each other: a slow one computes less, a lost one is missed, and every sample counts once. And workers
//! that do, with shares by their speed.

use std::collections::BTreeSet;

use paceline::system::process::{Tell, tell};
use serde_json::Value;

use crate::place::Place;
use crate::running::{PATIENCE, Running, within};

const MODELS: [&str; 2] =
    ["--model lenet5 --data synthetic:32x32x1/10/960", "--model cnn5 --data synthetic:8x8x3/10/960"];

/// Twenty steps an epoch.
const LENGTH: &str = "--batch 48 --threads 1 --pin off --calibrate off --seed 3 --optimizer sgd";

const APART: &str = "--agree parameter-server --staleness none";

/// Samples that a rank has computed in training.
fn samples(run: &Running<'_>, rank: usize) -> u64 {
    run.events(rank, "step").iter().filter_map(|event| event["portion"].as_u64()).sum()
}

#[test]
fn the_others_go_on_without_a_worker_that_is_killed() {
    let place = Place::new();
    let cases = [
        ("tcp", MODELS[0], APART),
        ("shm", MODELS[1], APART),
        ("shm", MODELS[0], "--agree elastic"),
        ("tcp", MODELS[1], "--agree downpour"),
        ("tcp", MODELS[0], "--agree dogwild"),
    ];
    for (carry, model, apart) in cases {
        let _ = std::fs::remove_dir_all(place.path("run"));
        let line =
            format!("train {model} {LENGTH} --epochs 12 {apart} --workers 3 --carry {carry} --silent 2s --run run");
        let mut run = Running::start(&place, &line);
        run.steps(20);
        tell(run.process_of(2), Tell::Kill);
        let status = run.ends(PATIENCE);
        assert_eq!(status.code(), Some(0), "{}", run.said());
        assert_eq!(run.said().matches("rank 2 on ").count(), 1, "it is told once:\n{}", run.said());
        assert!(run.said().contains("the others go on without it"), "{}", run.said());
        let lost = run.events(0, "lost");
        assert_eq!((lost.len(), lost[0]["lost_rank"].as_u64()), (1, Some(2)));
        // What it had taken and not finished is gone; nothing is computed twice.
        let portions = lost[0]["portions"].as_u64().unwrap();
        let all: u64 = (0..3).map(|rank| samples(&run, rank)).sum();
        assert!(portions <= 2 && (12 * 960 - 16 * portions..=12 * 960).contains(&all), "{all}, {portions} lost");
        // Each evaluation has all samples, whoever computes them.
        assert_eq!(run.events(0, "epoch").len(), 12, "{}", run.said());
        let evaluated = place.json("evaluate run --json");
        assert!(evaluated["loss"].as_f64().is_some_and(f64::is_finite), "{evaluated}");
    }
}

/// A synchronous server goes on with the mean over the samples that arrive.
#[test]
fn a_synchronous_server_goes_on_without_a_worker_that_is_killed() {
    let place = Place::new();
    for (carry, model) in ["shm", "tcp"].into_iter().zip(MODELS) {
        let _ = std::fs::remove_dir_all(place.path("run"));
        let line = format!(
            "train {model} {LENGTH} --epochs 12 --agree parameter-server --servers 2 --workers 3 --carry {carry} \
             --silent 2s --run run"
        );
        let mut run = Running::start(&place, &line);
        run.steps(20);
        tell(run.process_of(1), Tell::Kill);
        let status = run.ends(PATIENCE);
        assert_eq!(status.code(), Some(0), "{}", run.said());
        assert_eq!((run.events(0, "lost").len(), run.events(0, "epoch").len()), (1, 12), "{}", run.said());
        assert_eq!(run.events(0, "step").last().unwrap()["step"], 240);
    }
}

/// Half of all workers are lost one after the other, and the run ends with all samples but those that they had taken.
#[test]
fn three_of_six_workers_go_on_without_the_others() {
    let place = Place::new();
    for (agreement, carry) in
        [("elastic", "shm"), ("downpour", "tcp"), ("parameter-server --staleness none", "shm"), ("shm-async", "tcp")]
    {
        let _ = std::fs::remove_dir_all(place.path("run"));
        let line = format!(
            "train {} {LENGTH} --epochs 30 --agree {agreement} --workers 6 --carry {carry} --silent 2s --run run",
            MODELS[1]
        );
        let mut run = Running::start(&place, &line);
        for (count, rank) in [5, 1, 3].into_iter().enumerate() {
            run.steps(10 * (count + 1));
            tell(run.process_of(rank), Tell::Kill);
            let told = |run: &Running<'_>| run.events(0, "lost").len() == count + 1;
            within(PATIENCE, "a loss is told of", || told(&run), || run.said());
        }
        let status = run.ends(PATIENCE);
        assert_eq!(status.code(), Some(0), "{agreement}: {}", run.said());
        let lost = run.events(0, "lost");
        let portions: u64 = lost.iter().filter_map(|event| event["portions"].as_u64()).sum();
        let ranks: BTreeSet<u64> = lost.iter().filter_map(|event| event["lost_rank"].as_u64()).collect();
        assert_eq!(ranks, BTreeSet::from([1, 3, 5]));
        let all: u64 = (0..6).map(|rank| samples(&run, rank)).sum();
        // Each had taken two at most: one that it computed, and one that its loader made ready.
        assert!(portions <= 6 && (30 * 960 - 8 * portions..=30 * 960).contains(&all), "{all}, {portions} lost");
        assert_eq!(run.events(0, "epoch").len(), 30, "{agreement}: {}", run.said());
    }
}

/// Servers have what nobody else has: a run ends with one, says which it was, and goes on from its checkpoint.
#[test]
fn a_server_that_is_killed_is_named_and_ends_the_run() {
    let place = Place::new();
    let cases = [
        ("elastic", "shm", MODELS[1]),
        ("downpour --servers 2", "tcp", MODELS[0]),
        ("shm-async", "shm", MODELS[1]),
        ("dogwild", "tcp", MODELS[1]),
        ("parameter-server --staleness none", "shm", MODELS[0]),
        ("parameter-server", "tcp", MODELS[1]),
    ];
    for (agreement, carry, model) in cases {
        let _ = std::fs::remove_dir_all(place.path("run"));
        let line = format!(
            "train {model} {LENGTH} --epochs 400 --agree {agreement} --workers 2 --carry {carry} --silent 2s \
             --checkpoint-every 10 --run run"
        );
        let mut run = Running::start(&place, &line);
        within(PATIENCE, "a checkpoint", || !run.events(0, "checkpoint").is_empty(), || run.said());
        let steps = run.events(0, "step").len();
        run.steps(steps + 5);
        tell(run.process_of(2), Tell::Kill);
        run.fails_once(PATIENCE, &["rank 2 on ", "; to go on, type: paceline train --resume run"]);
        let kept = run.events(0, "checkpoint").last().unwrap()["step"].as_u64().unwrap();
        place.run(&format!("train --quiet --resume run --max-steps {}", kept + 20));
        let last = run.events(0, "checkpoint").last().unwrap()["step"].as_u64();
        assert_eq!(last, Some(kept + 20), "{agreement}");
    }
}

/// A worker that stands still is lost once it has been silent for long enough, and ended when the others are through.
#[test]
fn the_others_go_on_without_a_worker_that_is_stopped() {
    let place = Place::new();
    let line =
        format!("train {} {LENGTH} --epochs 400 {APART} --workers 3 --silent 2s --time-limit 8s --run run", MODELS[1]);
    let mut run = Running::start(&place, &line);
    run.steps(20);
    tell(run.process_of(1), Tell::Stop);
    let status = run.ends(PATIENCE);
    assert_eq!(status.code(), Some(0), "{}", run.said());
    assert_eq!(run.events(0, "lost").len(), 1, "{}", run.said());
}

#[test]
fn the_first_worker_ends_the_run_with_it() {
    let place = Place::new();
    let line = format!("train {} {LENGTH} --epochs 400 {APART} --workers 3 --checkpoint-every 10 --run run", MODELS[1]);
    let mut run = Running::start(&place, &line);
    run.steps(30);
    tell(run.process_of(0), Tell::Kill);
    run.fails_once(PATIENCE, &["rank 0 on ", "; to go on, type: "]);
}

/// Every portion of every step is computed once, most by those that are fast; what is resumed goes on where it was.
#[test]
fn a_slow_worker_computes_less_and_every_sample_counts_once() {
    let place = Place::new();
    let line = format!("train {} {LENGTH} --epochs 3 {APART} --workers 3 --slow 1=6 --run run", MODELS[1]);
    let mut run = Running::start(&place, &format!("{line} --max-steps 47 --checkpoint-every 15"));
    assert_eq!(run.ends(PATIENCE).code(), Some(0), "{}", run.said());
    let shares = [0, 1, 2].map(|rank| samples(&run, rank));
    assert_eq!(shares.iter().sum::<u64>(), 47 * 48, "{shares:?}");
    // On busy cores one of the fast ones may not come to much either.
    assert!(2 * shares[1] < shares[0] + shares[2], "{shares:?}");
    let steps: BTreeSet<u64> =
        (0..3).flat_map(|rank| run.events(rank, "step")).filter_map(|event| event["step"].as_u64()).collect();
    assert_eq!(steps, (1..=47).collect());
    let mut run = Running::start(&place, "train --resume run --max-steps 60");
    assert_eq!(run.ends(PATIENCE).code(), Some(0), "{}", run.said());
    assert_eq!((0..3).map(|rank| samples(&run, rank)).sum::<u64>(), 60 * 48);
    // Nobody waits in a stretch of the data for one that has none left of it.
    place.run(&format!(
        "train {} {LENGTH} --epochs 2 --agree parameter-server --staleness 1 --workers 3 --slow 1=3 --quiet",
        MODELS[0]
    ));
}

/// Shares by speed are another division of the same batch.
#[test]
fn shares_follow_the_speed_and_the_steps_are_the_same() {
    let place = Place::new();
    // A maximum that is nearly two can fall the other way, and statistics of few numbers make more of that from step to step.
    for (model, more, close) in [(MODELS[0], "", 1e-5), (MODELS[1], "--sync-batch-norm", 1e-4)] {
        let line = format!("train {model} {LENGTH} --lr 0.001 --epochs 2 --quiet");
        place.run(&format!("{line} --run one"));
        for carry in ["shm", "tcp"] {
            let flags = format!("--workers 2 --carry {carry} --slow 1=4 --balance speed --balance-every 6 {more}");
            place.run(&format!("{line} {flags} --run many"));
            let events = |run: &str, kind: &str| -> Vec<Value> {
                let text = place.read_text(&format!("{run}/events/rank-0.jsonl"));
                let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
                lines.filter(|event| event["event"] == kind).collect()
            };
            let balanced = events("many", "balanced");
            // On busy cores one measurement or another may find the fast one held up; an even share is 24.
            let of_fast: Vec<u64> = balanced.iter().map(|event| event["samples"][0].as_u64().unwrap()).collect();
            let mean = of_fast.iter().sum::<u64>() / of_fast.len() as u64;
            assert!(of_fast.len() >= 6 && mean >= 27, "{of_fast:?} of 48");
            let losses = |run: &str| -> Vec<f64> {
                events(run, "step").iter().map(|event| event["loss"].as_f64().unwrap()).collect()
            };
            for (one, many) in losses("one").into_iter().zip(losses("many")) {
                assert!((one / many - 1.0).abs() < close, "{model} over {carry}: {one} and {many}");
            }
            let _ = std::fs::remove_dir_all(place.path("many"));
        }
        let _ = std::fs::remove_dir_all(place.path("one"));
    }
}

#[test]
fn what_does_not_go_together_is_refused_with_what_to_type() {
    let place = Place::new();
    let cases = [
        (format!("{APART} --balance speed"), "leave it out"),
        ("--agree local --balance speed".into(), "--agree all-reduce"),
        ("--balance speed --accumulate 2".into(), "leave one of them out"),
        ("--balance speed --batch 97".into(), "64 or 96"),
        ("--slow 5=2".into(), "ranks that compute are 0 to 1"),
        ("--slow 1=0.5".into(), "type for example 1=4"),
    ];
    for (flags, typed) in cases {
        place.fails(&format!("train --workers 2 {flags}"), 2, &[typed]);
    }
}
