//! Samples count, and not ranks: any batch with any number of workers, and whatever an epoch leaves for its last batch, is the step of one
//! process.

use crate::place::Place;

/// How far a run of several may be from one process, in parts of the loss.
const TOLERANCE: f64 = 1e-5;

const LEARNING: &str = "--optimizer momentum --lr 0.005 --seed 4 --augment none --quiet --calibrate off";

/// The losses of a run's steps, and of its evaluations, in order.
fn losses(place: &Place, run: &str) -> Vec<f64> {
    let loss = |event: &serde_json::Value| match event["event"].as_str() {
        Some("step") => event["loss"].as_f64(),
        Some("epoch") => event["val_loss"].as_f64(),
        _ => None,
    };
    place.events(run).iter().filter_map(loss).collect()
}

/// Trains as one process and as three, and compares every loss.
fn compare(place: &Place, line: &str, ways: &[&str]) {
    place.run(&format!("train {line} {LEARNING} --run one"));
    let expected = losses(place, "one");
    assert!(expected.len() > 2 && expected.iter().all(|loss| loss.is_finite()), "{expected:?}");
    for (number, way) in ways.iter().enumerate() {
        let run = format!("three-{number}");
        place.run(&format!("train {line} {LEARNING} --workers 3 --threads 1 --oversubscribe {way} --run {run}"));
        let found = losses(place, &run);
        assert_eq!(found.len(), expected.len(), "{line} {way}");
        for (found, expected) in found.iter().zip(&expected) {
            let apart = (found - expected).abs() / expected;
            assert!(apart < TOLERANCE, "{line} {way}: loss {found} for {expected}, {apart:.1e} apart");
        }
    }
}

#[test]
fn sixty_four_samples_over_three_workers_are_one_process() {
    let line = "--model cnn5 --data synthetic:8x8x3/10/192 --batch 64 --epochs 2";
    compare(&Place::new(), line, &["--sync-batch-norm --carry shm", "--sync-batch-norm --carry tcp"]);
    let line = "--model lenet5 --data synthetic:32x32x1/10/192 --batch 64 --epochs 2";
    compare(&Place::new(), line, &["--carry shm", "--carry tcp", "--agree parameter-server"]);
}

#[test]
fn an_epochs_last_batch_counts_for_its_samples_even_where_a_worker_has_none() {
    // Six samples are left, and then two for three workers.
    for samples in [70, 34] {
        // Two samples of 8×8 pixels would be two values a channel in the last batch-norm: plus and minus one, whatever they were.
        let line = format!("--model cnn5 --data synthetic:16x16x3/10/{samples} --batch 16 --epochs 2");
        compare(&Place::new(), &line, &["--sync-batch-norm --carry shm", "--sync-batch-norm --carry tcp"]);
        let line = format!("--model lenet5 --data synthetic:32x32x1/10/{samples} --batch 16 --epochs 2");
        compare(&Place::new(), &line, &["--carry shm", "--carry tcp --clip-norm 100", "--agree parameter-server"]);
    }
}

#[test]
fn parts_of_a_batch_need_not_be_equal() {
    let line = "--model lenet5 --data synthetic:32x32x1/10/41 --batch 18 --epochs 2 --accumulate 4";
    compare(&Place::new(), line, &["--carry shm", "--carry tcp"]);
    let place = Place::new();
    place.run(&format!("train {} {LEARNING} --run parts", line));
    place.run(&format!("train {} {LEARNING} --run whole", line.replace("--accumulate 4", "")));
    for (parts, whole) in losses(&place, "parts").iter().zip(losses(&place, "whole")) {
        assert!((parts - whole).abs() / whole < TOLERANCE, "{parts} for {whole}");
    }
}

#[test]
fn a_last_batch_is_kept_or_dropped_and_a_run_goes_on_as_it_began() {
    let place = Place::new();
    let line = format!("train --model cnn5 --data synthetic:8x8x3/10/70 --batch 16 --epochs 2 {LEARNING}");
    let steps = |run: &str| place.events(run).iter().filter(|event| event["event"] == "step").count();
    let samples = |run: &str| -> u64 {
        let events = place.events(run);
        events.iter().filter(|event| event["event"] == "step").map(|event| event["samples"].as_u64().unwrap()).sum()
    };
    place.run(&format!("{line} --run kept"));
    assert_eq!((steps("kept"), samples("kept")), (10, 140));
    place.run(&format!("{line} --last-batch drop --run dropped"));
    assert_eq!((steps("dropped"), samples("dropped")), (8, 128));
    // Stopped right before the last batch of an epoch, and inside the next.
    for stop in [4, 7] {
        let run = format!("stopped-{stop}");
        place.run(&format!("{line} --max-steps {stop} --run {run}"));
        place.run(&format!("train --resume {run} --max-steps 10 --quiet --calibrate off"));
        assert!(place.weights(&run, 10) == place.weights("kept", 10), "stopped at {stop}");
    }
    place.fails("train --resume dropped --epochs 3 --last-batch keep", 2, &["--last-batch cannot change"]);
    // A run of a version that did not say it had dropped it.
    let config = place.read_text("dropped/config.toml").replace("last-batch = \"drop\"\n", "");
    place.write("dropped/config.toml", config);
    place.run("train --resume dropped --epochs 3 --quiet --calibrate off");
    assert_eq!(steps("dropped"), 12);
    // More than there are: an epoch is one step of all.
    let line = line.replace("--batch 16", "--batch 100");
    place.run(&format!("{line} --run large"));
    assert_eq!((steps("large"), samples("large")), (2, 140));
    place.fails(&format!("{line} --last-batch drop --run none"), 2, &["type --batch 70 or smaller"]);
}
