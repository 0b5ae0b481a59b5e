//! `--checkpoint-minutes`: a run is saved by the clock, beside training, and the training is the same.

use crate::place::{Place, QUICK};

/// 128 steps in one epoch, saved whenever the last checkpoint is on the disk.
const RUN: &str = "train --model lenet5 --data synthetic:28x28x1/10/1024 --batch 8 --epochs 1 --quiet --seed 5";

/// The steps inside the epoch at which a run was saved.
fn saved(place: &Place, run: &str) -> Vec<u64> {
    let events = place.events(run);
    let saved = events.iter().filter(|event| event["event"] == "checkpoint");
    saved.map(|event| event["step"].as_u64().unwrap()).filter(|&step| step != 128).collect()
}

#[test]
fn a_run_is_saved_by_the_clock_and_trains_as_without() {
    let place = Place::new();
    for (name, way) in [
        ("alone", ""),
        ("shm", "--workers 2"),
        ("tcp", "--workers 2 --carry tcp"),
        ("servers", "--workers 2 --agree parameter-server"),
        ("clipped", "--workers 2 --clip-norm 1"),
    ] {
        place.run(&format!("{RUN} {way} --run {name}-straight"));
        place.run(&format!("{RUN} {way} --run {name} --checkpoint-minutes 0.00001"));
        assert!(saved(&place, &format!("{name}-straight")).is_empty());
        let steps = saved(&place, name);
        // As often as the disk is through: one that others use too may take as long as the rest of the run.
        assert!(!steps.is_empty() && steps.is_sorted(), "{name}: {steps:?}");
        assert!(place.weights(name, 128) == place.weights(&format!("{name}-straight"), 128), "{name}: the same bits");
        // The one that was written while steps went on is whole, and goes on to the same end.
        let step = *steps.last().unwrap();
        let from = format!("{name}/checkpoints/step-{step:08}");
        place.run(&format!("train --resume {from} --checkpoint-minutes 0 --quiet"));
        assert!(place.weights(name, 128) == place.weights(&format!("{name}-straight"), 128), "{name} from {step}");
    }
}

#[test]
fn workers_that_step_apart_are_not_saved_by_the_clock() {
    let place = Place::new();
    let apart = "--workers 2 --agree parameter-server --staleness 2";
    let words = ["--checkpoint-minutes needs workers that are at the same step", "type --checkpoint-every"];
    place.refuses(&format!("train {QUICK} {apart} --checkpoint-minutes 1"), &words);
    for value in ["-1", "x"] {
        place.refuses(&format!("train {QUICK} --checkpoint-minutes {value}"), &["--checkpoint-minutes", "type "]);
    }
}
