//! Workers that step by themselves and exchange with a centre that servers hold.

use crate::place::{Place, text};

/// Eight steps an epoch.
const LENGTH: &str =
    "--batch 8 --epochs 2 --threads 1 --calibrate off --seed 3 --quiet --optimizer nesterov --lr 0.005 --workers 2";

const MODELS: [&str; 2] =
    ["--model lenet5 --data synthetic:32x32x1/10/64", "--model cnn5 --data synthetic:8x8x3/10/64"];

/// What the default run comes to, as it is typed: two workers, and the server that they need.
fn reaches_93(agreement: &str) {
    let place = Place::new();
    place.run(&format!("train --workers 2 {agreement} --quiet --run run"));
    let evaluated = place.json("evaluate run --json");
    let top1 = evaluated["top1"].as_f64().unwrap();
    assert!(top1 >= 0.93, "{agreement}: {top1}");
    let served = place.read_text("run/events/rank-2.jsonl");
    let served = served.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let told: u64 = served.filter(|event| event["event"] == "served").map(|event| updates(&event)).sum();
    assert!(told > 10, "{agreement}: the server tells of {told} updates");
}

/// How many updates a server's line tells of, whatever they had missed.
fn updates(event: &serde_json::Value) -> u64 {
    let workers = event["missed"].as_object().into_iter().flatten();
    workers.flat_map(|(_, counts)| counts.as_array().unwrap()).map(|count| count.as_u64().unwrap()).sum()
}

#[test]
#[ignore = "cargo x ci: agreements"]
fn the_default_run_reaches_93_percent_with_every_agreement() {
    for agreement in [
        "elastic",
        "elastic --staleness 0",
        "downpour",
        "downpour --fetch-every 4 --push-every 4",
        "dogwild",
        "shm-async",
        "shm-hybrid",
    ] {
        reaches_93(&format!("--agree {agreement}"));
    }
}

/// From the start over evaluations and checkpoints to a run that goes on and is evaluated.
#[test]
fn runs_begin_evaluate_save_and_go_on() {
    let place = Place::new();
    let ways = [
        ("shm", "elastic --period 3"),
        ("tcp", "elastic --period 2 --staleness 0 --servers 2"),
        ("shm", "downpour --fetch-every 2 --push-every 3 --server-adagrad 0.01 --warm-start 3"),
        ("tcp", "downpour"),
        ("shm", "dogwild --period 3 --servers 2"),
        ("shm", "shm-async --period 3"),
        ("tcp", "shm-async --period 2 --servers 2"),
    ];
    for (index, (carry, agreement)) in ways.into_iter().enumerate() {
        let (run, model) = (format!("run-{index}"), MODELS[index % 2]);
        let line = format!("train {model} {LENGTH} --carry {carry} --agree {agreement} --checkpoint-every 5");
        place.run(&format!("{line} --max-steps 11 --run {run}"));
        place.run(&format!("train --quiet --resume {run} --max-steps 16"));
        let events = place.events(&run);
        let evaluated = events.iter().filter(|event| event["event"] == "epoch" && event["val_top1"].is_number());
        assert_eq!(evaluated.count(), 2, "{run}");
        // Of 16 batches each worker computes its half, or whatever halves it comes to first.
        let made = |rank: usize| {
            let text = place.read_text(&format!("{run}/events/rank-{rank}.jsonl"));
            let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
            let steps = events.filter(|event| event["event"] == "step");
            steps.filter(|step| step["loss"].as_f64().is_some_and(f64::is_finite)).count()
        };
        assert_eq!(made(0) + made(1), 32, "{run}");
        assert!(place.json(&format!("evaluate {run} --json"))["loss"].as_f64().is_some_and(f64::is_finite), "{run}");
    }
}

/// Workers that step together have the same bits whether they were stopped or not: what is saved is what all go on with.
#[test]
fn a_synchronous_run_that_was_stopped_has_the_bits_of_one_that_was_not() {
    let place = Place::new();
    let line =
        format!("train {} {LENGTH} --agree elastic --period 2 --staleness 0 --checkpoint-every 5 --keep 9", MODELS[1]);
    place.run(&format!("{line} --run whole"));
    place.run(&format!("{line} --max-steps 5 --run stopped"));
    place.run("train --quiet --resume stopped --max-steps 16");
    for file in ["weights", "state"] {
        let numbers = |run: &str| {
            let bytes = place.read(&format!("{run}/checkpoints/step-00000016/{file}.safetensors"));
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            bytes[8 + header..].to_vec()
        };
        assert!(numbers("whole") == numbers("stopped"), "{file}");
    }
}

/// One worker has nobody to agree with, whatever the agreement: it needs no server, and makes the steps of any run.
#[test]
fn one_worker_alone_makes_the_steps_of_sgd() {
    let place = Place::new();
    let line = format!("train {} {LENGTH} --max-steps 8", MODELS[1]).replace("--workers 2", "--workers 1");
    let weights = |agreement: &str| {
        place.run(&format!("{line} --agree {agreement} --run {agreement}"));
        place.read(&format!("{agreement}/checkpoints/step-00000008/weights.safetensors"))
    };
    let alone = weights("all-reduce");
    assert!(["elastic", "downpour", "shm-async"].iter().all(|agreement| weights(agreement) == alone));
}

#[test]
fn what_does_not_go_together_is_refused_with_what_to_type() {
    let place = Place::new();
    let cases = [
        ("--agree elastic --sync-batch-norm", "--agree all-reduce"),
        ("--agree elastic --shard optimizer", "--shard none"),
        ("--agree downpour --squeeze bf16", "--squeeze none"),
        ("--agree elastic --checkpoint-minutes 5", "--checkpoint-every"),
        ("--agree elastic --elastic-rate 1.5", "--elastic-rate 0.45"),
        ("--agree elastic --fetch-every 4", "--agree downpour"),
        ("--agree elastic --split pipeline:2", "--agree all-reduce"),
        ("--agree downpour --period 4", "--agree local or --agree elastic or --agree dogwild"),
        ("--agree dogwild --push-rate 2", "--push-rate 0.5"),
        ("--agree dogwild --period 5000", "at most 1024"),
        ("--agree downpour --staleness 0", "--staleness with a number from 1"),
        ("--agree downpour --server-adagrad 0", "--server-adagrad 0.01"),
        ("--agree downpour --push-every 0", "--push-every"),
        ("--warm-start 4", "--agree downpour"),
        ("--agree elastic --box 127.0.0.1:29411", "--agree shm-async"),
        ("--agree shm-async --box here", "--box here:29411"),
        ("--agree shm-async --staleness 2", "--agree elastic"),
        ("--agree shm-async --group 2", "--agree shm-hybrid"),
        ("--agree shm-hybrid --elastic-rate 2", "--elastic-rate 0.45"),
    ];
    for (flags, typed) in cases {
        place.fails(&format!("train --workers 2 {flags}"), 2, &[typed]);
    }
    let help = text(&place.output("train --help").stdout);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("| elastic (steps of") && help.contains("| dogwild (steps of"), "{help}");
    let plan = place.output("plan --model cnn5 --workers 2");
    assert!(text(&plan.stdout).contains("elastic, 1 server on a machine of its own"), "{}", text(&plan.stdout));
}
