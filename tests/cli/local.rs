//! `--agree local`: steps of each worker's own, and rounds after which all go on from the same weights.

use crate::place::{Place, text};

const MODELS: [(&str, &str); 2] = [
    ("lenet5", "--model lenet5 --data synthetic:32x32x1/10/64"),
    ("cnn5", "--model cnn5 --data synthetic:8x8x3/10/64"),
];

/// Eight steps an epoch.
const LENGTH: &str =
    "--batch 8 --epochs 3 --threads 1 --calibrate off --seed 3 --quiet --optimizer momentum --lr 0.005";

/// A round ends at a checkpoint, and what is saved is what all go on with: stopped there or not, the bits are the same.
#[test]
fn a_run_that_was_stopped_has_the_bits_of_one_that_was_not() {
    let place = Place::new();
    for (name, model) in MODELS {
        let ways = [
            ("shm", "", ""),
            ("tcp", "--outer-rate 0.7 --outer-momentum 0.9", ""),
            ("tcp", "--outer-rate 0.7 --outer-momentum 0.9", "--fragments 3"),
        ];
        for (carry, outer, fragments) in ways {
            let line = format!(
                "train {model} {LENGTH} --workers 2 --carry {carry} --agree local --period 3 --post-local 2 {outer} {fragments} \
                 --checkpoint-every 10 --keep 9"
            );
            let whole = format!("{name}-{carry}-{}", fragments.len());
            let stopped = format!("{whole}-stopped");
            place.run(&format!("{line} --run {whole}"));
            place.run(&format!("{line} --max-steps 10 --run {stopped}"));
            place.run(&format!("train --quiet --resume {stopped} --max-steps 24"));
            for file in ["weights", "state"] {
                let of = |run: &str| place.read(&format!("{run}/checkpoints/step-00000024/{file}.safetensors"));
                let numbers = |bytes: Vec<u8>| {
                    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
                    bytes[8 + header..].to_vec()
                };
                assert!(numbers(of(&whole)) == numbers(of(&stopped)), "{whole}: {file}");
            }
        }
    }
}

/// From one agreement to another and back: what only one of them keeps is let go of.
#[test]
fn a_run_goes_on_with_another_agreement() {
    let place = Place::new();
    let (_, model) = MODELS[1];
    let outer = "--agree local --period 3 --outer-rate 0.7 --outer-momentum 0.9";
    place.run(&format!("train {model} {LENGTH} --workers 2 {outer} --max-steps 8 --run run"));
    place.run("train --quiet --resume run --workers 1 --max-steps 10");
    let kept = |step: u64| {
        let state = place.read(&format!("run/checkpoints/step-{step:08}/state.safetensors"));
        String::from_utf8_lossy(&state[..state.len().min(1 << 16)]).contains("kept_slots")
    };
    assert!(kept(8) && !kept(10), "one worker has no velocity");
    place.run("train --quiet --resume run --workers 2 --max-steps 12");
    assert!(kept(12), "and two have one again");
    let evaluated = place.json("evaluate run --json");
    assert!(evaluated["loss"].as_f64().is_some_and(f64::is_finite), "{evaluated}");
}

/// Stages and parts of a worker step together, and workers by themselves.
#[test]
fn stages_and_parts_step_by_themselves_too() {
    let place = Place::new();
    let (_, model) = MODELS[0];
    let line = format!("train {model} {LENGTH} --workers 2 --agree local --period 3 --max-steps 10");
    place.run(&format!("{line} --accumulate 2 --run whole"));
    place.run(&format!("{line} --split pipeline:2 --micro-batches 2 --run stages"));
    place.run(&format!("{line} --run one"));
    place.run(&format!("{line} --split channel:2 --run parts"));
    for (run, whole) in [("stages", "whole"), ("parts", "one")] {
        let loss = |run: &str| place.json(&format!("evaluate {run} --json"))["loss"].as_f64().unwrap();
        let (found, expected) = (loss(run), loss(whole));
        assert!((found / expected - 1.0).abs() < 1e-4, "{run}: loss {found} for {expected}");
    }
}

#[test]
fn what_does_not_go_together_is_refused_with_what_to_type() {
    let place = Place::new();
    let cases = [
        ("--agree local --staleness 2", "--agree parameter-server"),
        ("--agree local --sync-batch-norm", "--agree all-reduce"),
        ("--agree local --shard optimizer", "--shard none"),
        ("--agree local --squeeze bf16", "--squeeze none"),
        ("--agree local --checkpoint-minutes 5", "--checkpoint-every"),
        ("--agree local --period 10 --node-period 4", "--node-period 4 --period 16"),
        ("--agree local --period 0", "--period"),
        ("--agree local --outer-momentum 1", "--outer-momentum 0.9"),
        ("--period 4", "--agree local"),
        ("--agree parameter-server --outer-rate 0.7", "--agree local"),
    ];
    for (flags, typed) in cases {
        place.fails(&format!("train --workers 2 {flags}"), 2, &[typed]);
    }
    let help = text(&place.output("train --help").stdout);
    assert!(help.split_whitespace().collect::<Vec<_>>().join(" ").contains("| local (steps of"));
}
