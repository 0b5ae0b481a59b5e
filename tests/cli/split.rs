//! Models in stages: the same training as whole, files that are those of whole models, and faults that are named.

use std::collections::BTreeMap;
use std::process::Command;

use paceline::system::process::{Tell, tell};

use crate::place::{Place, has};
use crate::running::{PATIENCE, Running, Slowed, within};

/// How far weights may be from those of one process, in parts of a tensor's largest.
const TOLERANCE: f32 = 1e-5;

const LEARNING: &str =
    "--optimizer momentum --lr 0.01 --seed 4 --augment none --quiet --calibrate off --threads 1 --oversubscribe";

/// A batch-norm model and one without.
pub const MODELS: [(&str, &str); 2] = [
    ("--model cnn5 --data synthetic:16x16x3/10/160", "bn3"),
    ("--model lenet5 --data synthetic:32x32x1/10/160", "conv2"),
];

/// The tensors of a file.
fn tensors(bytes: &[u8]) -> BTreeMap<String, Vec<f32>> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let data = &bytes[8 + length..];
    let tensor = |place: &serde_json::Value| {
        let [start, end] = [0, 1].map(|at| place["data_offsets"][at].as_u64().unwrap() as usize);
        data[start..end].chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    header
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .map(|(name, place)| (name.clone(), tensor(place)))
        .collect()
}

/// Both files of a checkpoint.
pub fn saved(place: &Place, run: &str, step: u64) -> BTreeMap<String, Vec<f32>> {
    let file = |name: &str| tensors(&place.read(&format!("{run}/checkpoints/step-{step:08}/{name}.safetensors")));
    let mut all = file("weights");
    all.extend(file("state"));
    all
}

pub fn close(one: &BTreeMap<String, Vec<f32>>, other: &BTreeMap<String, Vec<f32>>, what: &str) {
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>(), "{what}");
    for (name, numbers) in one {
        let scale = numbers.iter().fold(1.0f32, |scale, x| scale.max(x.abs()));
        let apart = numbers.iter().zip(&other[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart <= TOLERANCE * scale, "{what}: {name} is {apart:e} apart");
    }
}

#[test]
fn two_stages_train_as_one_process_by_any_schedule_and_way() {
    for (model, cut) in MODELS {
        let place = Place::new();
        let line = format!("train {model} --batch 16 --epochs 1 {LEARNING}");
        place.run(&format!("{line} --accumulate 4 --run one"));
        let whole = saved(&place, "one", 10);
        let staged = format!("{line} --micro-batches 4 --split pipeline:2 --cuts {cut}");
        let ways =
            ["--schedule gpipe --carry shm", "--schedule 1f1b --carry tcp", "--schedule zero-bubble --carry shm"];
        for (number, way) in ways.iter().enumerate() {
            let run = format!("staged-{number}");
            place.run(&format!("{staged} {way} --run {run}"));
            close(&saved(&place, &run, 10), &whole, &format!("{model} {way}"));
            assert!(place.weights(&run, 10) == place.weights("staged-0", 10), "{way}: the same bits");
        }
        let event = place.events("staged-2").into_iter().find(|event| event["event"] == "pipeline").unwrap();
        assert_eq!(event["stages"].as_array().unwrap().len(), 2, "{event}");
        assert!(event["drawing"].as_str().unwrap().contains('W'), "{event}");
    }
}

#[test]
fn two_replicas_of_two_stages_train_as_two_workers() {
    for (model, cut) in MODELS {
        let place = Place::new();
        let line = format!("train {model} --batch 16 --epochs 1 {LEARNING} --workers 2");
        place.run(&format!("{line} --accumulate 2 --run two"));
        let ways = [
            "--carry shm",
            "--carry tcp",
            "--carry tcp --shard optimizer",
            "--carry shm --clip-norm 1000 --shard optimizer",
        ];
        for (number, way) in ways.iter().enumerate() {
            let run = format!("four-{number}");
            place.run(&format!("{line} --micro-batches 2 --split pipeline:2 --cuts {cut} {way} --run {run}"));
            close(&saved(&place, &run, 10), &saved(&place, "two", 10), &format!("{model} {way}"));
        }
    }
}

#[test]
fn a_run_in_stages_is_used_and_goes_on_whole_and_in_others() {
    let (model, cut) = MODELS[0];
    let place = Place::new();
    let line = format!("train {model} --batch 16 --epochs 2 --accumulate 4 {LEARNING}");
    place.run(&format!("{line} --run one"));
    let whole = saved(&place, "one", 20);
    let more = "--quiet --calibrate off --threads 1 --oversubscribe --epochs 2 --max-steps 20";
    let ways = [("--split replicate", "whole"), ("--split pipeline:3 --cuts bn1,bn3", "three"), ("", "as before")];
    for (number, (way, what)) in ways.iter().enumerate() {
        let run = format!("run-{number}");
        place.run(&format!("{line} --split pipeline:2 --cuts {cut} --max-steps 7 --run {run}"));
        place.run(&format!("train --resume {run} {more} {way}"));
        close(&saved(&place, &run, 20), &whole, what);
    }
    let accuracy = |run: &str| place.json(&format!("evaluate {run} --json"))["top1"].as_f64();
    assert_eq!(accuracy("run-2"), accuracy("one"));
    place.run("export run-2 --onnx model.onnx");
    // And the other way round.
    place.run(&format!("{line} --max-steps 7 --run begun"));
    place.run(&format!("train --resume begun {more} --split pipeline:2 --cuts {cut} --schedule zero-bubble"));
    close(&saved(&place, "begun", 20), &whole, "begun whole");
}

#[test]
fn without_cuts_stages_are_balanced_and_config_says_where() {
    let place = Place::new();
    let line = format!("train {} --batch 16 --epochs 1 {LEARNING} --split pipeline:3", MODELS[0].0);
    place.run(&format!("{line} --run run"));
    let config = place.read_text("run/config.toml");
    assert!(config.contains("split = \"pipeline:3\"") && config.contains("cuts = ["), "{config}");
    assert!(config.contains("accumulate = 8"), "eight micro-batches: {config}");
}

#[test]
fn what_cannot_be_split_is_refused_with_what_to_type() {
    let place = Place::new();
    let line = "train --model cnn5 --data synthetic:16x16x3/10/64 --batch 16 --epochs 1 --run run";
    let refused = [
        ("--split pipeline:1", "with 2 to"),
        ("--split pipeline:2 --cuts bn1,bn2", "--cuts names 2"),
        ("--cuts bn1", "type --split pipeline:2"),
        ("--split pipeline:2 --agree parameter-server", "type --agree all-reduce"),
        ("--split pipeline:2 --stage-devices cpu", "--stage-devices names 1"),
        ("--split pipeline:2 --carry nccl --device cuda", "--carry nccl"),
        ("--memory-limit 12", "such as 600MB"),
    ];
    for (flags, words) in refused {
        let output = place.output(&format!("{line} {flags}"));
        let wrong = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags}: {wrong}");
        assert!(wrong.contains(words), "{flags}: {wrong}");
    }
    place.fails(&format!("{line} --split pipeline:2 --cuts bn9"), 2, &["no such layer", "there are conv1"]);
}

#[test]
fn a_model_that_is_too_large_is_split_by_itself() {
    let place = Place::new();
    let line = "train --model resnet20 --data synthetic:64x64x3/10/128 --batch 64 --max-steps 1 --epochs 1 --calibrate off --threads 1";
    // What the sentence says that one process needs.
    let sentence = place.fails(&format!("{line} --memory-limit 20MB --run none"), 2, &["--memory-limit allows"]);
    assert!(sentence.contains("a process needs "), "{sentence}");
    let needed: f64 = sentence.split("a process needs ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let (needed, unit) = if sentence.contains(&format!("{needed} GB")) { (needed, 1e9) } else { (needed, 1e6) };
    let limit = (0.75 * needed * unit / 1e6) as u64;
    let output = place.output(&format!("{line} --memory-limit {limit}MB --run run"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("stages, each a process"), "{said}");
    for rank in 0..2 {
        let text = place.read_text(&format!("run/events/rank-{rank}.jsonl"));
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        let peak = last["peak_memory_bytes"].as_u64().unwrap();
        assert!(peak < limit * 1_000_000, "rank {rank} took {peak} of {limit} MB");
    }
}

/// Endless steps in two stages.
fn endless(model: &str, carry: &str, more: &str) -> String {
    let data = if model == "lenet5" { "synthetic:28x28x1/10/4800" } else { "synthetic:32x32x3/10/4800" };
    format!(
        "train --model {model} --data {data} --batch 12 --micro-batches 3 --epochs 1000 --evaluate-every 1000 --threads 1 \
         --carry {carry} --oversubscribe --calibrate off --split pipeline:2 --run run {more}"
    )
}

#[test]
fn a_stage_that_dies_is_named_and_nobody_waits() {
    for (model, carry, rank) in [("cnn5", "shm", 1), ("lenet5", "tcp", 0)] {
        let place = Place::new();
        let mut run = Running::start(&place, &endless(model, carry, ""));
        if rank == 0 {
            // The one that tells of steps.
            within(PATIENCE, "steps", || run.events(1, "step").len() >= 3, || run.said());
        } else {
            run.steps(3);
        }
        tell(run.process_of(rank), Tell::Kill);
        let sentence = run.fails_once(PATIENCE, &[&format!("rank {rank} on ")]);
        assert!(sentence.contains("the weights of its stage are lost with it"), "{sentence}");
    }
}

#[test]
fn a_slow_stage_is_named_late_and_the_run_goes_on() {
    let place = Place::new();
    let mut run = Running::start(&place, &endless("cnn5", "shm", "--late 300ms --time-limit 12s"));
    run.steps(3);
    let slowed = Slowed::new(run.process_of(1));
    let late = || run.said().lines().any(|line| line.starts_with("rank 1 on ") && line.contains(" is late: "));
    within(PATIENCE, "late", late, || run.said());
    drop(slowed);
    assert_eq!(run.ends(PATIENCE).code(), Some(0), "{}", run.said());
}

#[test]
fn a_stage_out_of_memory_ends_the_run_with_the_reason() {
    let test = "a_stage_out_of_memory_ends_the_run_with_the_reason";
    if !has("prlimit", test) {
        return;
    }
    let place = Place::new();
    let data = "--data synthetic:64x64x3/10/8000 --batch 8 --checkpoint-every 50 --epochs 1000";
    let mut run = Running::start(
        &place,
        &format!("train --model mlp {data} --threads 1 --oversubscribe --calibrate off --split pipeline:2 --run run"),
    );
    run.steps(3);
    // The limit falls below what the first stage has: its next checkpoint finds no memory.
    let lowered = ["--pid", &run.process_of(0).to_string(), "--as=1000000"];
    assert!(Command::new("prlimit").args(lowered).status().unwrap().success());
    assert_eq!(run.ends(PATIENCE).code(), Some(1), "{}", run.said());
    let said = run.said();
    assert!(said.contains("error: no memory for ") && said.contains("fewer --workers"), "{said}");
}

#[test]
fn ctrl_c_saves_a_run_in_stages() {
    let place = Place::new();
    let mut run = Running::start(&place, &endless("cnn5", "shm", ""));
    run.steps(3);
    tell(run.pid(), Tell::Interrupt);
    assert_eq!(run.ends(PATIENCE).code(), Some(130), "{}", run.said());
    assert!(run.events(0, "checkpoint").len() == 1, "{}", run.said());
}
