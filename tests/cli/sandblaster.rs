//! L-BFGS with the gradient of the whole training set: one step an epoch, whoever computes which portion.

use paceline::system::process::{Tell, tell};
use serde_json::Value;

use crate::place::{Place, text};
use crate::running::{PATIENCE, Running, within};

const MODELS: [&str; 2] =
    ["--model lenet5 --data synthetic:32x32x1/10/192", "--model cnn5 --data synthetic:8x8x3/10/192"];

/// What twelve epochs leave of the loss of each, at most: cnn5 comes to 0.005 of it, lenet5 begins on a plateau (0.94).
const LEFT: [f64; 2] = [0.97, 0.2];

/// Eight steps an epoch.
const LENGTH: &str = "--agree sandblaster --batch 24 --threads 1 --pin off --calibrate off --seed 3";

/// Events of a run in this folder.
fn events(place: &Place, run: &str, rank: usize, kind: &str) -> Vec<Value> {
    let text = place.read_text(&format!("{run}/events/rank-{rank}.jsonl"));
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|event| event["event"] == kind).collect()
}

/// The training losses of its epochs, each the value of one function.
fn losses(place: &Place, run: &str) -> Vec<f64> {
    events(place, run, 0, "epoch").iter().map(|epoch| epoch["train_loss"].as_f64().unwrap()).collect()
}

/// Samples whose gradients count, by what ranks tell of them.
fn samples(place: &Place, run: &str, ranks: usize) -> u64 {
    let of = |rank| events(place, run, rank, "step");
    (0..ranks).flat_map(of).filter_map(|event| event["portion"].as_u64()).sum()
}

/// From the start over evaluations and checkpoints to a run that goes on and is evaluated.
#[test]
fn the_loss_falls_from_epoch_to_epoch_and_a_resumed_run_goes_on() {
    let place = Place::new();
    for (index, (carry, workers, more)) in
        [("shm", 2, "--history 4"), ("tcp", 3, "--servers 2 --slow 1=3"), ("tcp", 2, "--accumulate 2")]
            .into_iter()
            .enumerate()
    {
        let (run, model) = (format!("run-{index}"), MODELS[index % 2]);
        let line = format!("train {model} {LENGTH} --workers {workers} --carry {carry} {more} --quiet --run {run}");
        place.run(&format!("{line} --epochs 12"));
        place.run(&format!("train --quiet --resume {run} --epochs 20"));
        let losses = losses(&place, &run);
        assert_eq!(losses.len(), 20, "{run}");
        let lowest = |losses: &[f64]| losses.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(lowest(&losses[..12]) < LEFT[index % 2] * losses[0], "{run}: {losses:?}");
        // The point that was saved is where it goes on.
        assert!(losses[12] < 1.3 * lowest(&losses[..12]) && lowest(&losses[12..]) < losses[12], "{run}: {losses:?}");
        // Every sample counts once in every epoch, whoever has computed it.
        assert_eq!(samples(&place, &run, workers), 20 * 192, "{run}");
        assert!(place.json(&format!("evaluate {run} --json"))["loss"].as_f64().is_some_and(f64::is_finite), "{run}");
    }
}

/// The order of an epoch, its augmentation and its masks are those of the first, so that a value is compared with one of the
/// same function, whoever computes it.
#[test]
fn the_losses_do_not_depend_on_who_computes_what() {
    let place = Place::new();
    let line = format!("train {} {LENGTH} --workers 3 --epochs 4 --augment standard --quiet", MODELS[0]);
    place.run(&format!("{line} --carry shm --run one"));
    place.run(&format!("{line} --carry tcp --slow 0=3 --servers 2 --run other"));
    for (one, other) in losses(&place, "one").into_iter().zip(losses(&place, "other")) {
        assert!((one / other - 1.0).abs() < 1e-3, "{one} and {other}");
    }
}

#[test]
fn the_others_go_on_without_a_worker_that_is_killed() {
    let place = Place::new();
    for (index, carry) in ["tcp", "shm"].into_iter().enumerate() {
        let model = MODELS[index];
        let _ = std::fs::remove_dir_all(place.path("run"));
        let line = format!("train {model} {LENGTH} --epochs 15 --workers 3 --carry {carry} --silent 2s --run run");
        let mut run = Running::start(&place, &line);
        within(PATIENCE, "steps of rank 2", || run.events(2, "step").len() >= 6, || run.said());
        tell(run.process_of(2), Tell::Kill);
        let status = run.ends(PATIENCE);
        assert_eq!(status.code(), Some(0), "{}", run.said());
        let lost = run.events(0, "lost");
        assert_eq!((lost.len(), lost[0]["lost_rank"].as_u64()), (1, Some(2)));
        // What it had computed of its last epoch was computed again; of an evaluation it had two portions at most.
        assert!(lost[0]["portions"].as_u64() <= Some(2), "{lost:?}");
        let all = samples(&place, "run", 3);
        assert!((15 * 192..17 * 192).contains(&all), "{all}");
        let losses = losses(&place, "run");
        assert_eq!(losses.len(), 15, "{}", run.said());
        assert!(losses.iter().copied().fold(f64::INFINITY, f64::min) < LEFT[index] * losses[0], "{losses:?}");
    }
}

/// What was computed of an epoch counts for nothing when the run is interrupted inside of it.
#[test]
fn an_interrupted_run_is_saved_where_its_last_epoch_ended() {
    let place = Place::new();
    let line = format!("train {} {LENGTH} --workers 2 --epochs 4000 --slow 1=2 --run run", MODELS[1]);
    let mut run = Running::start(&place, &line);
    within(PATIENCE, "epochs", || run.events(0, "epoch").len() >= 2, || run.said());
    tell(run.pid(), Tell::Interrupt);
    assert_eq!(run.ends(PATIENCE).code(), Some(130), "{}", run.said());
    let finished = run.events(0, "run_finished");
    let (step, epochs) = (finished[0]["step"].as_u64().unwrap(), run.events(0, "epoch").len() as u64);
    assert!(step.is_multiple_of(8) && step.abs_diff(8 * epochs) <= 8, "{step} steps in {epochs} epochs");
    place.run(&format!("train --quiet --resume run --epochs {}", step / 8 + 2));
    assert!(place.json("evaluate run --json")["loss"].as_f64().is_some_and(f64::is_finite));
}

/// A run that is shorter than an epoch is one batch, what is left of an epoch is another, and none is cut short.
#[test]
fn a_run_that_ends_inside_of_an_epoch_goes_on_with_the_rest_of_it() {
    let place = Place::new();
    place.run(&format!("train {} {LENGTH} --workers 2 --epochs 9 --max-steps 3 --quiet --run run", MODELS[1]));
    let last = || place.events("run").last().unwrap()["step"].as_u64();
    assert_eq!((last(), samples(&place, "run", 2)), (Some(3), 3 * 24));
    place.run("train --quiet --resume run --max-steps 30");
    assert_eq!((last(), samples(&place, "run", 2)), (Some(24), 24 * 24));
    assert!(place.json("evaluate run --json")["loss"].as_f64().is_some_and(f64::is_finite));
}

#[test]
fn what_does_not_go_together_is_refused_with_what_to_type() {
    let place = Place::new();
    let cases = [
        ("--workers 2 --agree sandblaster --checkpoint-every 7", "each epoch is saved"),
        ("--workers 1 --agree sandblaster", "--workers 2"),
        ("--workers 2 --agree sandblaster --clip-norm 1", "leave it out"),
        ("--workers 2 --agree sandblaster --weight-decay 1e-4", "leave it out"),
        ("--workers 2 --agree sandblaster --squeeze bf16", "--squeeze none"),
        ("--workers 2 --agree sandblaster --period 3", "--agree local"),
        ("--workers 2 --history 3", "--agree sandblaster"),
        ("--workers 2 --agree sandblaster --history 5000", "--history 10"),
    ];
    for (flags, typed) in cases {
        place.fails(&format!("train {flags}"), 2, &[typed]);
    }
    let help = text(&place.output("train --help").stdout);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("| sandblaster (L-BFGS with"), "{help}");
}
