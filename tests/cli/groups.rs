//! Workers in groups, each of which steps as one worker: the same training as fewer workers, portions that its workers
//! share, and what the loss of one of them means.

use paceline::system::process::{Tell, tell};
use serde_json::Value;

use crate::place::Place;
use crate::running::{PATIENCE, Running};

const MODELS: [&str; 2] =
    ["--model lenet5 --data synthetic:32x32x1/10/960", "--model cnn5 --data synthetic:8x8x3/10/960"];

/// Twenty steps an epoch.
const LENGTH: &str =
    "--batch 48 --epochs 2 --threads 1 --pin off --calibrate off --seed 3 --optimizer momentum --quiet";

fn events(place: &Place, run: &str, rank: usize, kind: &str) -> Vec<Value> {
    let text = place.read_text(&format!("{run}/events/rank-{rank}.jsonl"));
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == kind).collect()
}

#[test]
fn groups_train_as_as_many_workers() {
    let place = Place::new();
    let line = format!("train {} {LENGTH} --agree elastic --staleness 0 --period 4", MODELS[0]);
    place.run(&format!("{line} --workers 2 --run workers"));
    let losses = |run: &str| {
        let steps = events(&place, run, 0, "step").into_iter().chain(events(&place, run, 0, "epoch"));
        let loss = |event: &Value| [&event["loss"], &event["val_loss"]].into_iter().find_map(Value::as_f64).unwrap();
        steps.map(|event| loss(&event)).collect::<Vec<f64>>()
    };
    let expected = losses("workers");
    for (workers, group, carry) in [(4, 2, "shm"), (6, 3, "tcp")] {
        let run = format!("groups-{group}");
        place.run(&format!("{line} --workers {workers} --group {group} --carry {carry} --run {run}"));
        let found = losses(&run);
        assert_eq!(found.len(), 42);
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5 * expected, "{run}: {found} for {expected}");
        }
    }
}

/// From the start over evaluations and checkpoints to a run that goes on and is evaluated; every sample counts once.
#[test]
fn groups_share_the_portions_that_they_take() {
    let place = Place::new();
    let ways = [
        ("shm", MODELS[1], "elastic --period 3"),
        ("tcp", MODELS[0], "downpour --fetch-every 2 --push-every 3 --staleness-aware"),
        ("tcp", MODELS[1], "dogwild --period 3 --servers 2"),
        ("shm", MODELS[0], "shm-hybrid --period 3"),
    ];
    for (index, (carry, model, agreement)) in ways.into_iter().enumerate() {
        let run = format!("run-{index}");
        let line = format!("train {model} {LENGTH} --workers 4 --group 2 --carry {carry} --agree {agreement}");
        place.run(&format!("{line} --checkpoint-every 15 --max-steps 23 --run {run}"));
        place.run(&format!("train --quiet --resume {run} --max-steps 40"));
        let steps: Vec<Vec<Value>> = (0..4).map(|rank| events(&place, &run, rank, "step")).collect();
        for group in steps.chunks(2) {
            let of = |rank: usize| group[rank].iter().map(|step| (&step["step"], &step["loss"])).collect::<Vec<_>>();
            assert_eq!(of(0), of(1), "workers of a group make the same steps: {agreement}");
        }
        let samples = steps.iter().flatten().filter_map(|step| step["portion"].as_u64()).sum::<u64>();
        assert_eq!(samples, 2 * 960, "{agreement}");
        assert_eq!(events(&place, &run, 0, "epoch").len(), 2, "{agreement}");
        assert!(place.json(&format!("evaluate {run} --json"))["loss"].as_f64().is_some_and(f64::is_finite));
    }
}

#[test]
fn a_worker_that_the_first_group_has_lost_ends_the_run() {
    let place = Place::new();
    let line = format!(
        "train {} {LENGTH} --epochs 500 --workers 4 --group 2 --agree downpour --checkpoint-every 10 --silent 2s --run run",
        MODELS[1]
    );
    let mut run = Running::start(&place, &line.replace("--epochs 2 ", ""));
    run.steps(20);
    tell(run.process_of(1), Tell::Kill);
    let status = run.ends(PATIENCE);
    assert_eq!(status.code(), Some(1), "{}", run.said());
    assert!(run.said().contains("rank 1 on ") && run.said().contains("paceline train --resume run"), "{}", run.said());
}

/// A group that has lost one cannot step: all of it is lost, whoever it was, and the others go on.
#[test]
fn the_others_go_on_without_a_group_that_has_lost_a_worker() {
    let place = Place::new();
    for (killed, carry, agreement) in [
        (3, "shm", "shm-hybrid"),
        (2, "tcp", "shm-hybrid"),
        (2, "shm", "downpour --group 2"),
        (3, "tcp", "elastic --group 2"),
    ] {
        let _ = std::fs::remove_dir_all(place.path("run"));
        let line = format!(
            "train {} {LENGTH} --epochs 30 --workers 4 --agree {agreement} --carry {carry} --silent 2s --run run",
            MODELS[usize::from(killed == 2)]
        );
        let mut run = Running::start(&place, &line.replace("--epochs 2 ", ""));
        run.steps(20);
        tell(run.process_of(killed), Tell::Kill);
        let status = run.ends(PATIENCE);
        assert_eq!(status.code(), Some(0), "{agreement}: {}", run.said());
        let lost = run.events(0, "lost");
        let mut ranks: Vec<u64> = lost.iter().filter_map(|event| event["lost_rank"].as_u64()).collect();
        ranks.sort_unstable();
        assert_eq!(ranks, [2, 3], "{agreement}: {}", run.said());
        let portions: u64 = lost.iter().filter_map(|event| event["portions"].as_u64()).sum();
        let all: u64 = (0..4)
            .flat_map(|rank| events(&place, "run", rank, "step"))
            .filter_map(|step| step["portion"].as_u64())
            .sum();
        // A group's portion has 24 samples; it had taken three at most, of which one of the two had finished the first.
        assert!(portions <= 3 && (30 * 960 - 24 * portions..=30 * 960).contains(&all), "{all}, {portions} lost");
        assert_eq!(run.events(0, "epoch").len(), 30, "{agreement}: {}", run.said());
    }
}

/// Two workers of `shm-hybrid` are two groups: one of them goes on without the other.
#[test]
#[ignore = "cargo x ci: agreements"]
fn one_of_two_goes_on() {
    let place = Place::new();
    for agreement in ["shm-hybrid", "shm-async"] {
        let _ = std::fs::remove_dir_all(place.path("run"));
        let line = format!("train --workers 2 --agree {agreement} --seed 1 --silent 2s --quiet --run run");
        let mut run = Running::start(&place, &line);
        run.steps(20);
        tell(run.process_of(1), Tell::Kill);
        // A whole training, on cores that others have too.
        let status = run.ends(4 * PATIENCE);
        assert_eq!(status.code(), Some(0), "{agreement}: {}", run.said());
        assert_eq!((run.events(0, "lost").len(), run.events(0, "epoch").len()), (1, 4), "{}", run.said());
        let evaluated = place.json("evaluate run --json");
        assert!(evaluated["top1"].as_f64().is_some_and(|top1| top1 >= 0.93), "{agreement}: {evaluated}");
    }
}

#[test]
fn what_does_not_go_together_is_refused_with_what_to_type() {
    let place = Place::new();
    let cases = [
        ("--agree elastic --workers 4 --group 3", "--workers 6 --group 3 --agree elastic"),
        ("--agree elastic --workers 4 --group 4", "--workers 8 --group 4"),
        ("--agree all-reduce --workers 4 --group 2", "type --agree elastic or --agree downpour or --agree dogwild"),
        ("--agree downpour --workers 4 --group 2 --clip-norm 1", "leave one of them out"),
        ("--agree downpour --workers 4 --group 2 --warm-start 5", "leave one of them out"),
    ];
    for (flags, what) in cases {
        place.fails(&format!("train {flags}"), 2, &[what]);
    }
}
