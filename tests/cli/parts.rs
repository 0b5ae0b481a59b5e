//! Layers computed by several ranks together: the same training as by one process, files that are those of whole models, and faults that are
//! named.

use paceline::system::process::{Tell, tell};

use crate::place::Place;
use crate::ranks::{Run, all_end_well};
use crate::running::{PATIENCE, Running, Slowed, within};
use crate::split::{LEARNING, MODELS, close, saved};

/// What of the models above is computed how, where layers differ: a batch-norm by samples is refused.
const HYBRIDS: [&str; 2] = ["channel,fc=replicate:2", "conv1=replicate,conv2=replicate,fc1=channel,fc2=channel:2"];

fn line(model: &str) -> String {
    format!("train {model} --batch 16 --epochs 1 {LEARNING}")
}

#[test]
fn two_parts_train_as_one_process_over_every_carry() {
    for ((model, _), hybrid) in MODELS.iter().zip(HYBRIDS) {
        let (place, line) = (Place::new(), line(model));
        place.run(&format!("{line} --run one"));
        let whole = saved(&place, "one", 10);
        let ways = [
            "--split channel:2 --carry shm".to_owned(),
            "--split channel:2 --carry tcp".to_owned(),
            "--split channel:2 --carry thread".to_owned(),
            "--split channel:3 --carry shm".to_owned(),
            "--split branch:2".to_owned(),
            format!("--split {hybrid}"),
        ];
        for (number, way) in ways.iter().enumerate() {
            let run = format!("parts-{number}");
            place.run(&format!("{line} {way} --run {run}"));
            close(&saved(&place, &run, 10), &whole, &format!("{model} {way}"));
        }
    }
}

#[test]
fn parts_go_with_what_a_step_has_beside_it() {
    for (model, _) in MODELS {
        let (place, line) = (Place::new(), line(model));
        let ways =
            ["--clip-norm 0.1", "--accumulate 2", "--optimizer adam --lr 0.001", "--memory low", "--last-batch keep"];
        for (number, way) in ways.iter().enumerate() {
            let (whole, parts) = (format!("whole-{number}"), format!("parts-{number}"));
            place.run(&format!("{line} {way} --run {whole}"));
            place.run(&format!("{line} {way} --split channel:2 --run {parts}"));
            close(&saved(&place, &parts, 10), &saved(&place, &whole, 10), &format!("{model} {way}"));
        }
    }
}

#[test]
fn two_workers_of_two_parts_train_as_two_workers() {
    for (model, _) in MODELS {
        let (place, line) = (Place::new(), format!("{} --workers 2", line(model)));
        let ways = [
            ("", "--carry shm"),
            ("", "--carry tcp"),
            ("", "--carry tcp --shard optimizer"),
            ("--clip-norm 0.1", "--carry shm"),
            ("--clip-norm 0.1", "--carry tcp --shard optimizer"),
            ("--accumulate 2", "--carry thread"),
        ];
        for (number, (beside, way)) in ways.iter().enumerate() {
            let (two, four) = (format!("two-{number}"), format!("four-{number}"));
            place.run(&format!("{line} {beside} --run {two}"));
            place.run(&format!("{line} {beside} {way} --split channel:2 --run {four}"));
            close(&saved(&place, &four, 10), &saved(&place, &two, 10), &format!("{model} {beside} {way}"));
        }
        // Half the bits of gradients: near, and not the same.
        place.run(&format!("{line} --carry tcp --squeeze bf16 --split channel:2 --run squeezed"));
        let last =
            |run: &str| place.events(run).iter().rfind(|event| event["event"] == "step").unwrap()["loss"].as_f64();
        let (squeezed, whole) = (last("squeezed").unwrap(), last("two-0").unwrap());
        assert!((squeezed / whole - 1.0).abs() < 0.05 && squeezed != whole, "{model}: {squeezed} for {whole}");
    }
}

#[test]
fn a_run_in_parts_is_used_and_goes_on_whole_and_split_otherwise() {
    let (model, cut) = MODELS[0];
    let place = Place::new();
    let line = format!("train {model} --batch 16 --epochs 2 {LEARNING}");
    place.run(&format!("{line} --run one"));
    let whole = saved(&place, "one", 20);
    let more = "--quiet --calibrate off --threads 1 --oversubscribe --epochs 2 --max-steps 20";
    let pipeline = format!("--split pipeline:2 --cuts {cut}");
    let ways =
        [("--split replicate", "whole"), ("--split channel:3", "three"), (&pipeline, "stages"), ("", "as before")];
    for (number, (way, what)) in ways.iter().enumerate() {
        let run = format!("run-{number}");
        place.run(&format!("{line} --split channel:2 --checkpoint-every 3 --keep 9 --max-steps 7 --run {run}"));
        assert!(place.path(&format!("{run}/checkpoints/step-00000003")).exists(), "inside an epoch");
        place.run(&format!("train --resume {run} {more} {way}"));
        close(&saved(&place, &run, 20), &whole, what);
    }
    let evaluated = |run: &str| place.json(&format!("evaluate {run} --json"));
    assert_eq!(evaluated("run-3")["top1"], evaluated("one")["top1"]);
    place.run("export run-3 --onnx model.onnx");
    let event = place.events("run-3").into_iter().rfind(|event| event["event"] == "epoch").unwrap();
    let alone = place.events("one").into_iter().rfind(|event| event["event"] == "epoch").unwrap();
    assert_eq!(event["val_top1"], alone["val_top1"], "evaluated inside the run");
    // And the other way round.
    place.run(&format!("{line} --max-steps 7 --run begun"));
    place.run(&format!("train --resume begun {more} --split branch:2"));
    close(&saved(&place, "begun", 20), &whole, "begun whole");
}

#[test]
fn parts_are_started_by_launch_and_by_variables() {
    let (place, line) = (Place::new(), line(MODELS[1].0));
    place.run(&format!("{line} --run one"));
    place.run(&format!("launch --workers 2 --oversubscribe -- {line} --split channel:2 --run launched"));
    close(&saved(&place, "launched", 10), &saved(&place, "one", 10), "launched");
    let run = Run::new(4, &format!("{line} --split channel:2 --carry tcp --run described"));
    all_end_well((0..4).map(|rank| run.rank(&place, rank).spawn().unwrap()).collect());
    close(&saved(&place, "described", 10), &saved(&place, "one", 10), "two workers of two parts");
    let odd = Run::new(3, &format!("{line} --split channel:2 --run odd"));
    let output = odd.rank(&place, 0).output().unwrap();
    let wrong = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && wrong.contains("not replicas of 2 parts each; start 2 or 4"), "{wrong}");
}

#[test]
fn what_cannot_be_computed_in_parts_is_refused_with_what_to_type() {
    let place = Place::new();
    let line = "train --model cnn5 --data synthetic:16x16x3/10/64 --batch 16 --epochs 1 --run run";
    for (flags, words) in [
        ("--split channel:1", "2 to 256 parts"),
        ("--split rows:2", "`rows` is not a form"),
        ("--split replicate:2", "type --workers 2"),
        ("--split channel:2 --agree parameter-server", "type --agree all-reduce"),
        ("--split channel:2 --cuts bn1", "type --split pipeline:2"),
        ("--split channel:2 --optimizer lars", "--optimizer momentum or another"),
        ("--split channel:2 --device cuda", "type --device cpu"),
        ("--split channel:2 --shard optimizer", "type --workers 2 or more"),
        ("--split conv1=channel,conv9=channel:2", "conv9"),
        ("--split conv1=replicate,bn1=replicate:2", "bn1"),
    ] {
        let output = place.output(&format!("{line} {flags}"));
        let wrong = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags}: {wrong}");
        assert!(wrong.contains(words), "{flags}: {wrong}");
    }
    assert!(!place.path("run").exists());
}

/// Endless steps in two parts.
fn endless(model: &str, carry: &str, more: &str) -> String {
    let data = if model == "lenet5" { "synthetic:28x28x1/10/4800" } else { "synthetic:32x32x3/10/4800" };
    format!(
        "train --model {model} --data {data} --batch 12 --epochs 1000 --evaluate-every 1000 --threads 1 --carry {carry} \
         --oversubscribe --calibrate off --split channel:2 --run run {more}"
    )
}

#[test]
fn a_part_that_dies_is_named_and_nobody_waits() {
    for (model, carry, rank) in [("cnn5", "shm", 1), ("lenet5", "tcp", 0)] {
        let place = Place::new();
        let mut run = Running::start(&place, &endless(model, carry, ""));
        within(PATIENCE, "steps", || run.events(1 - rank, "step").len() >= 3, || run.said());
        tell(run.process_of(rank), Tell::Kill);
        let sentence = run.fails_once(PATIENCE, &[&format!("rank {rank} on ")]);
        assert!(sentence.contains("the weights of its part are lost with it"), "{sentence}");
    }
}

#[test]
fn a_slow_part_is_named_late_and_the_run_goes_on() {
    let place = Place::new();
    let mut run = Running::start(&place, &endless("lenet5", "shm", "--late 300ms --time-limit 12s"));
    run.steps(3);
    let slowed = Slowed::new(run.process_of(1));
    let late = || run.said().lines().any(|line| line.starts_with("rank 1 on ") && line.contains(" is late: "));
    within(PATIENCE, "late", late, || run.said());
    drop(slowed);
    assert_eq!(run.ends(PATIENCE).code(), Some(0), "{}", run.said());
}

#[test]
fn ctrl_c_saves_a_run_in_parts() {
    for carry in ["shm", "thread"] {
        let place = Place::new();
        let mut run = Running::start(&place, &endless("cnn5", carry, ""));
        run.steps(3);
        tell(run.pid(), Tell::Interrupt);
        assert_eq!(run.ends(PATIENCE).code(), Some(130), "{}", run.said());
        assert!(run.events(0, "checkpoint").len() == 1, "{}", run.said());
    }
}
