//! The commands around training, on a run that was made a moment ago.

use serde_json::Value;

use crate::place::{Place, QUICK};

#[test]
fn a_run_is_evaluated_predicted_with_and_exported() {
    let place = Place::new();
    place
        .run("train --model lenet5 --data shapes --batch 100 --epochs 1 --optimizer adam --lr 0.003 --run run --quiet");
    let epoch = place.events("run").into_iter().find(|event| event["event"] == "epoch").unwrap();
    for target in ["run", "run/checkpoints/step-00000080", "run/checkpoints/step-00000080/weights.safetensors"] {
        let found = place.json(&format!("evaluate {target} --json"));
        assert_eq!((&found["top1"], &found["top5"]), (&epoch["val_top1"], &epoch["val_top5"]), "{target}");
        assert_eq!((&found["loss"], &found["samples"]), (&epoch["val_loss"], &2000.into()));
    }
    assert!(epoch["val_top1"].as_f64().unwrap() > 0.2, "it learnt something: {epoch}");
    assert!(place.run("evaluate run").contains("lenet5 on shapes: top-1 "));

    place.write_png("square.png", 48, 1, 3);
    let guessed = place.json("predict run square.png --top 3 --json");
    let guesses = guessed["guesses"].as_array().unwrap();
    let sure: Vec<f64> = guesses.iter().map(|guess| guess["probability"].as_f64().unwrap()).collect();
    assert!(sure.len() == 3 && sure[0] >= sure[1] && sure[1] >= sure[2] && sure.iter().sum::<f64>() <= 1.0 + 1e-9);
    let said = place.run("predict run square.png square.png");
    assert_eq!(said.matches("square.png\n").count(), 2, "{said}");
    assert_eq!(said.matches('%').count(), 10, "{said}");

    assert!(place.run("export run --onnx model.onnx").contains("lenet5 of step 80 written to model.onnx"));
    let first = place.read("model.onnx");
    assert!(first.len() > 83_126 * 4, "the weights are inside");
    place.run("export run --onnx model.onnx --force");
    assert!(place.read("model.onnx") == first, "the same run is the same file");
}

#[test]
fn a_model_for_grey_images_predicts_colour_files() {
    let place = Place::new();
    place.run("train --model lenet5 --data synthetic:28x28x1/10/64 --batch 8 --epochs 1 --run run --quiet");
    place.write_png("square.png", 48, 1, 3);
    assert_eq!(place.json("predict run square.png --json")["guesses"].as_array().unwrap().len(), 5);
}

#[test]
fn a_report_is_written_again() {
    let place = Place::with_run();
    let before = place.read_text("run/report.html");
    std::fs::remove_file(place.path("run/report.html")).unwrap();
    assert_eq!(place.run("report run"), "run/report.html\n");
    assert_eq!(place.read_text("run/report.html"), before);
    assert!(before.contains("mlp") && !before.contains("<script src") && !before.contains("http://"));
}

#[test]
fn a_plan_of_resnet50_has_the_published_parameters() {
    let place = Place::new();
    let said = place.run("plan --model resnet50 --batch 32");
    for word in ["resnet50 at 224×224×3, batch 32", "25,557,032", "arena", "bucket"] {
        assert!(said.contains(word), "`{word}` is missing: {said}");
    }
    assert!(place.run("plan --model lenet5 --nodes").contains("nodes, in order"));
    let plan = place.json("plan --model resnet50 --batch 32 --json");
    assert_eq!((&plan["model"], &plan["batch"]), (&"resnet50".into(), &32.into()));
    assert!(plan["arena_bytes"].as_u64().unwrap() > 1 << 30 && plan["flops"].as_u64().unwrap() > 700_000_000_000);
    let half = place.json("plan --model resnet50 --batch 16 --json");
    assert!(half["arena_bytes"].as_u64() < plan["arena_bytes"].as_u64());
    let eval = place.json("plan --model resnet50 --batch 32 --eval --json");
    assert!(eval["arena_bytes"].as_u64() < half["arena_bytes"].as_u64());
}

#[test]
fn a_scaling_is_compared_with_processes_apart_in_the_same_turns() {
    let place = Place::new();
    let bench = "bench scaling --workers 2 --threads 1 --model lenet5 --batch 4 --steps 2 --repeats 2 --carry shm";
    let said = place.run(&format!("{bench} --json"));
    let rows: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kinds: Vec<&str> = rows.iter().map(|row| row["setup"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["one", "one-replica", "replicas", "together", "apart"]);
    for row in &rows {
        assert_eq!(row["images_per_s"]["turns"].as_array().unwrap().len(), 2, "{row}");
    }
    let number = |row: usize, key: &str, turn: usize| rows[row][key]["turns"][turn].as_f64().unwrap();
    for turn in [0, 1] {
        for row in 1..4 {
            let ratio = number(row, "images_per_s", turn) / number(4, "images_per_s", turn);
            assert!((number(row, "of_apart", turn) - ratio).abs() < 1e-9);
            let efficiency = number(0, "step_s", turn) / number(row, "step_s", turn);
            assert!((number(row, "efficiency", turn) - efficiency).abs() < 1e-9);
        }
    }
    let said = place.run(&bench.replace("--repeats 2", "--repeats 1"));
    let lines = [
        "1 process × 1 thread",
        "1 replica × 2 threads",
        "2 replicas × 1 thread",
        "2 workers × 1 thread",
        "2 apart × 1 thread",
    ];
    for word in lines {
        assert!(said.contains(word), "`{word}` is missing: {said}");
    }
}

#[test]
fn a_collective_is_compared_with_as_many_bytes_that_are_only_moved() {
    let place = Place::new();
    let bench = "bench collectives --carry shm,tcp --workers 2 --bytes 100000 --algorithm direct";
    let found = place.json(&format!("{bench} --json"));
    let bounds: Vec<&str> =
        found["rows"].as_array().unwrap().iter().map(|row| row["bound"].as_str().unwrap()).collect();
    assert_eq!(bounds, ["copy", "copy", "stream"]);
    let said = place.run(bench);
    assert!(said.contains("% of a copy at ") && said.contains("% of a stream at "), "{said}");
}

#[test]
fn a_step_is_measured_as_json() {
    let place = Place::new();
    let found = place.json("bench step --model lenet5 --batch 16 --steps 3 --dtype f32 --json");
    for key in ["images_per_s", "gflops", "peak_bytes", "step_s"] {
        assert!(found[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {found}");
    }
    let rate = 16.0 / found["step_s"].as_f64().unwrap();
    assert!((found["images_per_s"].as_f64().unwrap() / rate - 1.0).abs() < 1e-9);
    let said = place.run("bench step --model lenet5 --batch 4 --steps 1 --profile");
    assert!(said.contains("conv2d") && said.contains("bound ms") && said.contains("slowest nodes"), "{said}");
    let found = place.json("bench step --model lenet5 --batch 4 --steps 1 --profile --json");
    let profile = &found["profile"];
    let operations = profile["operations"].as_array().unwrap();
    let sum: f64 = operations.iter().map(|operation| operation["seconds"].as_f64().unwrap()).sum();
    assert!((sum / profile["seconds"].as_f64().unwrap() - 1.0).abs() < 1e-9 && profile["bound_s"].as_f64() > Some(0.0));
}

#[test]
fn several_batch_sizes_are_measured_in_turn() {
    let place = Place::new();
    let said = place.run("bench step --model lenet5 --batch 1,4 --steps 1 --json");
    let batches: Vec<serde_json::Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(batches.iter().map(|found| found["batch"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 4]);
}

#[test]
fn a_step_is_written_for_another_framework_to_repeat() {
    let place = Place::new();
    let found = place.json("bench step --model resnet20 --size 16 --batch 8 --check step.safetensors --json");
    let loss = |step: usize| found["losses"][step].as_f64().unwrap();
    assert!((loss(0) - loss(1) - 0.02).abs() < 0.005, "the step is chosen to lower the loss by 0.02: {found}");
    let bytes = place.read("step.safetensors");
    let header = String::from_utf8_lossy(&bytes[8..][..u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize]);
    for entry in [r#""check.x":{"#, r#""check.targets":{"#, r#""shape":[8,16,16,3]"#, r#""fc.weight":{"#] {
        assert!(header.contains(entry), "{entry} is missing: {header}");
    }
    place.refuses("bench step --model lenet5 --check step.safetensors", &["step.safetensors is there already"]);
    place.refuses("bench step --model lenet5 --batch 1,2 --check other", &["one batch size"]);
}

#[test]
fn a_closed_pipe_is_no_crash() {
    let place = Place::new();
    let shell = format!("{} models | head -1", env!("CARGO_BIN_EXE_paceline"));
    let output = std::process::Command::new("sh").args(["-c", &shell]).current_dir(place.path("")).output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_configuration_is_replayed_bit_for_bit() {
    let place = Place::new();
    place.run(&format!("train {QUICK} --epochs 1 --optimizer adamw --lr 0.001 --schedule cosine --run one --quiet"));
    place.run("train one/config.toml --run two --quiet");
    assert_eq!(place.read_text("one/config.toml"), place.read_text("two/config.toml"));
    assert!(place.weights("one", 8) == place.weights("two", 8));
    place.run("train one/config.toml --seed 2 --run three --quiet");
    assert!(place.weights("one", 8) != place.weights("three", 8));
}

#[test]
fn every_optimizer_and_schedule_trains() {
    let place = Place::new();
    for optimizer in ["sgd", "momentum", "nesterov", "adagrad", "adam", "adamw", "lars"] {
        place.run(&format!("train {QUICK} --max-steps 3 --lr 0.001 --optimizer {optimizer} --quiet"));
    }
    for schedule in ["constant", "cosine", "step:1", "milestones:1,2", "poly:2"] {
        let extra = "--warmup-epochs 0.5 --scale-lr --clip-norm 1 --label-smoothing 0.1 --weight-decay 0.01";
        place.run(&format!("train {QUICK} --epochs 2 --schedule {schedule} {extra} --quiet"));
    }
    assert_eq!(std::fs::read_dir(place.path("runs")).unwrap().count(), 12, "each run has a folder of its own");
}

#[test]
fn limits_end_a_run() {
    let place = Place::new();
    let said = place.run(&format!("train {QUICK} --max-steps 3"));
    assert!(said.contains("stopped at step 3 as asked") && said.contains("paceline train --resume runs/"), "{said}");
    let said = place.run(&format!("train {QUICK} --epochs 1000000 --time-limit 0.3s"));
    assert!(said.contains("stopped: the time is over"), "{said}");
    let said = place.run(&format!("train {QUICK} --epochs 1000 --early-stop 2 --lr 1e-9"));
    assert!(said.contains("stopped early") && said.contains("Epoch 3/1000") && !said.contains("Epoch 4/"), "{said}");
}
