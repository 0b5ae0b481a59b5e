//! Layers computed by several ranks together: the same training as by one process, files that are those of whole models, and faults that are
//! named.

use paceline::system::process::{Tell, tell};

use crate::place::Place;
use crate::ranks::{Run, all_end_well};
use crate::running::{PATIENCE, Running, Slowed, within};
use crate::split::{MODELS, close, saved};

/// With this seed no activation stands so near to the kink of a ReLU that rounding, which differs between a layer and its parts, decides on
/// which side it is: of cnn5, where one in a million does, gradients are a percent apart then, those of two tilings too.
const LEARNING: &str =
    "--optimizer momentum --lr 0.002 --seed 7 --augment none --quiet --calibrate off --threads 1 --oversubscribe";

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
        let place = Place::new();
        let ways = ["--clip-norm 0.1", "--accumulate 2", "--memory low", "--optimizer adam --lr 0.001"];
        for (number, way) in ways.iter().enumerate() {
            let adam = way.contains("adam");
            if adam && model.contains("cnn5") {
                // It divides rounding by rounding where a gradient is next to none.
                continue;
            }
            let line = if adam { line(model).replace("--optimizer momentum --lr 0.002", "") } else { line(model) };
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
            ("--sync-batch-norm", "--carry tcp"),
        ];
        for (number, (beside, way)) in ways.iter().enumerate() {
            if model.contains("lenet5") && *beside == "--sync-batch-norm" {
                continue;
            }
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
    let line = line(model);
    place.run(&format!("{line} --run one"));
    let whole = saved(&place, "one", 10);
    let more = "--quiet --calibrate off --threads 1 --oversubscribe --max-steps 10";
    let pipeline = format!("--split pipeline:2 --cuts {cut}");
    let ways =
        [("--split replicate", "whole"), ("--split channel:3", "three"), (&pipeline, "stages"), ("", "as before")];
    for (number, (way, what)) in ways.iter().enumerate() {
        let run = format!("run-{number}");
        place.run(&format!("{line} --split channel:2 --checkpoint-every 3 --keep 9 --max-steps 7 --run {run}"));
        assert!(place.path(&format!("{run}/checkpoints/step-00000003")).exists(), "inside an epoch");
        place.run(&format!("train --resume {run} {more} {way}"));
        close(&saved(&place, &run, 10), &whole, what);
    }
    let evaluated = |run: &str| place.json(&format!("evaluate {run} --json"));
    assert_eq!(evaluated("run-3")["top1"], evaluated("one")["top1"]);
    place.run("export run-3 --onnx model.onnx");
    let event = place.events("run-3").into_iter().rfind(|event| event["event"] == "epoch").unwrap();
    let alone = place.events("one").into_iter().rfind(|event| event["event"] == "epoch").unwrap();
    assert_eq!(event["val_top1"], alone["val_top1"], "evaluated inside the run");
    let told = place.events("run-3").into_iter().find(|event| event["event"] == "parts").unwrap();
    let parts = told["parts"].as_array().unwrap();
    assert!(told["split"] == "channel:2" && parts.len() == 2, "{told}");
    assert!(
        parts.iter().all(|part| part["exchanges"].as_u64() > Some(0) && part["sent_bytes"].as_u64() > Some(0)),
        "{told}"
    );
    // And the other way round.
    place.run(&format!("{line} --max-steps 7 --run begun"));
    place.run(&format!("train --resume begun {more} --split branch:2"));
    close(&saved(&place, "begun", 10), &whole, "begun whole");
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
        ("--split conv1=replicate:2 --accumulate 16", "1 sample at once is too few for 2 parts"),
    ] {
        let output = place.output(&format!("{line} {flags}"));
        let wrong = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags}: {wrong}");
        assert!(wrong.contains(words), "{flags}: {wrong}");
    }
    let rest = "train --model lenet5 --data synthetic:32x32x1/10/33 --batch 16 --epochs 1 --run run --split conv1=replicate,fc1=channel:2";
    place.fails(rest, 2, &["some batches have 1", "type --last-batch drop"]);
    assert!(!place.path("run").exists());
}

#[test]
fn plan_says_what_parts_have_and_exchange() {
    let place = Place::new();
    let asked = "plan --model lenet5 --split channel:2 --batch 16";
    let plan = place.json(&format!("{asked} --balance arithmetic --json"));
    let whole = place.json("plan --model lenet5 --batch 16 --calibrate off --json");
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or_else(|| panic!("a number: {plan}"));
    let parts = plan["parts"].as_array().unwrap();
    assert_eq!((parts.len(), &plan["processes"]), (2, &2.into()), "{plan}");
    let parameters = number(&plan["replicated"]["parameters"]);
    let held: u64 = parts.iter().map(|part| number(&part["parameters"])).sum();
    assert!(held >= parameters && held < parameters + 1000, "all weights, and little twice: {plan}");
    let flops: u64 = parts.iter().map(|part| number(&part["flops"])).sum();
    let all = whole["flops"].as_u64().unwrap_or(0);
    assert!(all == 0 || flops as f64 > 0.9 * all as f64, "{flops} of {all}");
    // Gradients of all weights, of which two workers send as much as there is.
    let replicated = number(&plan["replicated"]["all_reduce"]["sent_bytes"]);
    assert!((4 * parameters..4 * parameters + 1024).contains(&replicated), "{plan}");
    let layers = plan["layers"].as_array().unwrap();
    for pass in ["forward", "backward"] {
        let of = |what: &str| number(&parts[0][pass][what]);
        let by_layers = |what: &str| layers.iter().map(|layer| number(&layer[pass][what])).sum::<u64>();
        assert!(of("exchanges") > 0 && of("exchanges") == by_layers("exchanges"), "{plan}");
        assert_eq!(of("sent_bytes"), by_layers("sent_bytes"), "{plan}");
    }
    // A run tells the same.
    let line = "train --model lenet5 --data synthetic:28x28x1/10/32 --batch 16 --max-steps 1 --split channel:2 --calibrate off --quiet";
    place.run(&format!("{line} --run run"));
    let told = place.events("run").into_iter().find(|event| event["event"] == "parts").unwrap();
    for (part, told) in parts.iter().zip(told["parts"].as_array().unwrap()) {
        let sent = number(&part["forward"]["sent_bytes"]) + number(&part["backward"]["sent_bytes"]);
        let exchanges = number(&part["forward"]["exchanges"]) + number(&part["backward"]["exchanges"]);
        assert_eq!((&told["sent_bytes"], &told["exchanges"]), (&sent.into(), &exchanges.into()), "{plan} {told}");
        assert_eq!(told["parameters"], part["parameters"]);
    }
    let said = place.run(&format!("{asked} --calibrate off --workers 2 --link-bandwidth 1"));
    for words in
        ["2 workers × 2 parts = 4 processes", "replicated", "s a step", "go over links", "conv1", "its 2 workers"]
    {
        assert!(said.contains(words), "`{words}` is missing: {said}");
    }
    let slow = place.json(&format!("{asked} --calibrate off --link-latency 100000 --json"));
    assert!(slow["forecast_s"].as_f64().unwrap() > 0.3, "{slow}");
    place.refuses("plan --model lenet5 --split conv9=channel:2", &["conv9", "there are conv1"]);
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
