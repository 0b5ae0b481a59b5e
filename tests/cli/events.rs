//! What a run tells while it runs: the event log, standard output in its four styles, and TensorBoard's file.

use serde_json::Value;

use crate::place::{Place, QUICK, has, text};

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["event"].as_str().unwrap()).collect()
}

#[test]
fn json_prints_the_lines_of_the_event_log() {
    let place = Place::new();
    let said = place.run(&format!("train {QUICK} --epochs 2 --run run --json"));
    assert_eq!(said, place.read_text("run/events/rank-0.jsonl"));
    let events = place.events("run");
    // A machine that is busy may warn that data was waited for.
    let kinds: Vec<&str> = kinds(&events).into_iter().filter(|&kind| kind != "warning").collect();
    assert_eq!((kinds[0], kinds[kinds.len() - 1]), ("run_started", "run_finished"));
    assert_eq!((kinds[9], kinds[10]), ("epoch", "checkpoint"));
    let steps: Vec<_> = events.iter().filter(|event| event["event"] == "step").collect();
    let numbers: Vec<_> = steps.iter().map(|event| event["step"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=16).collect::<Vec<_>>());
    assert!(steps.iter().all(|event| event["loss"].is_f64() && event["phases"]["backward"].is_f64()));
    let times: Vec<_> = events.iter().map(|event| event["time_s"].as_f64().unwrap()).collect();
    assert!(times.is_sorted());
    assert_eq!(events[0]["schema"], 1);
}

#[test]
fn a_resumed_run_continues_its_log_and_its_report() {
    let place = Place::new();
    place.run(&format!("train {QUICK} --max-steps 5 --run run --quiet"));
    place.run("train --resume run --max-steps 9 --quiet");
    let events = place.events("run");
    let steps: Vec<_> = events.iter().filter(|event| event["event"] == "step").map(|event| &event["step"]).collect();
    assert_eq!(steps, (1..=9).collect::<Vec<_>>());
    assert_eq!(kinds(&events).iter().filter(|kind| **kind == "run_started").count(), 2);
    place.run("report run");
}

#[test]
fn quiet_prints_nothing_and_leaves_everything() {
    let place = Place::new();
    let output = place.output(&format!("train {QUICK} --epochs 1 --run run --quiet"));
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty());
    for name in ["config.toml", "report.html", "checkpoints/step-00000008/weights.safetensors"] {
        assert!(place.path("run").join(name).exists(), "{name}");
    }
    let entries = std::fs::read_dir(place.path("run")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let board: Vec<_> = names.filter(|name| name.starts_with("events.out.tfevents.")).collect();
    assert_eq!(board.len(), 1);
    assert!(place.read(&format!("run/{}", board[0])).len() > 500);
}

#[test]
fn a_pipe_gets_one_plain_line_an_epoch() {
    let place = Place::new();
    let said = place.run(&format!("train {QUICK} --epochs 2"));
    let lines: Vec<_> = said.lines().filter(|line| line.starts_with("Epoch ")).collect();
    assert_eq!(lines.len(), 2, "{said}");
    assert!(lines[0].starts_with("Epoch 1/2  8/8  "), "{said}");
    for word in ["images/s", "loss: ", "accuracy: ", "val_loss: ", "val_accuracy: "] {
        assert!(lines[1].contains(word), "{said}");
    }
    assert!(!said.contains('\u{1b}') && !said.contains('\r'), "no colours, no moving cursor: {said:?}");
    assert!(said.contains("done, accuracy ") && said.contains("report  runs/"), "{said}");
}

#[test]
fn a_terminal_gets_a_bar() {
    if !has("script", "a_terminal_gets_a_bar") {
        return;
    }
    let place = Place::new();
    let inner = format!("{} train {QUICK} --epochs 3 --run run", env!("CARGO_BIN_EXE_paceline"));
    let mut script = std::process::Command::new("script");
    script.args(["-qec", &inner, "/dev/null"]).current_dir(place.path("")).env("TERM", "xterm");
    script.env("PACELINE_CACHE", place.cache());
    let output = script.stdin(std::process::Stdio::null()).output().unwrap();
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(said.contains('━') && said.contains("eta ") && said.contains("Epoch 3/3"), "{said:?}");
}
