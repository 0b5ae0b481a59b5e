//! A process that dies at any moment loses only the steps since its last checkpoint: resumed, it ends with the same bits.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use crate::place::{Place, has, text};
use crate::ranks::until;

/// An epoch of 100 steps and the beginning of another, with augmentation, on two threads.
const RUN: &str = "--model lenet5 --data shapes --batch 80 --max-steps 120 --epochs 2 --checkpoint-every 3 --lr 0.02";

/// Starts a run, waits until `step` is done, and kills the process `after` that.
fn kill(place: &Place, run: &str, step: usize, after: Duration) -> ExitStatus {
    // Besides every third step, it is saved beside training all the time.
    let mut command = place.command(&format!("train {RUN} --checkpoint-minutes 0.00001 --run {run} --json"));
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let done = format!("\"event\":\"step\",\"step\":{step},");
    assert!(lines.any(|line| line.unwrap().contains(&done)), "the run ended before step {step}");
    // The fault itself: the moment between two steps, or within one, at which it dies.
    std::thread::sleep(after);
    child.kill().unwrap();
    child.wait().unwrap()
}

#[test]
fn a_run_killed_at_any_moment_ends_with_the_same_bits() {
    killed_at_any_moment(1);
}

#[test]
#[ignore = "cargo x ci: cli"]
fn runs_killed_at_any_moment_end_with_the_same_bits() {
    killed_at_any_moment(3);
}

/// Draws the moments of this test again: every failure names the number to set it to.
const SEED: &str = "PACELINE_TEST_SEED";

fn seed() -> u64 {
    let from_clock = || u64::from(UNIX_EPOCH.elapsed().unwrap().subsec_nanos());
    std::env::var(SEED).map_or_else(|_| from_clock(), |text| text.parse().expect(SEED))
}

fn killed_at_any_moment(runs: usize) {
    let place = Place::new();
    place.run(&format!("train {RUN} --run straight --quiet"));
    let seed = seed();
    let mut random = paceline::system::random::Random::new(&[seed]);
    for number in 0..runs {
        let run = format!("killed-{number}");
        let (step, after) = (1 + random.below(105), Duration::from_micros(random.below(20_000) as u64));
        let moment = format!("killed {after:?} after step {step} (again with {SEED}={seed})");
        println!("{moment}");
        let status = kill(&place, &run, step, after);
        assert_eq!(status.signal(), Some(9), "{moment}: {status}");
        assert!(!place.path(&format!("{run}/report.html")).exists(), "{moment}: it was not over");
        place.run(&format!("train --resume {run} --quiet"));
        assert!(place.weights(&run, 120) == place.weights("straight", 120), "{moment}");
        let text = place.read_text(&format!("{run}/events/rank-0.jsonl"));
        assert_eq!(text.matches("\"event\":\"run_started\"").count(), 2, "{moment}");
    }
}

#[test]
fn an_interrupt_finishes_the_step_saves_and_says_how_to_resume() {
    if !has("kill", "an_interrupt_finishes_the_step") {
        return;
    }
    let place = Place::new();
    // It is interrupted after the first checkpoint, so it need not be long.
    let short = RUN.replace("--max-steps 120", "--max-steps 40");
    place.run(&format!("train {short} --threads 1 --run straight --quiet"));
    let mut command = place.command(&format!("train {short} --threads 2 --run run"));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let checkpoints = place.path("run/checkpoints");
    until("a checkpoint", || std::fs::read_dir(&checkpoints).ok()?.next().map(drop));
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(130), "{said}{}", text(&output.stderr));
    assert!(said.contains("interrupted at step") && said.contains("paceline train --resume run"), "{said}");
    let events = place.events("run");
    let (last, before) = (&events[events.len() - 1], &events[events.len() - 2]);
    assert_eq!(last["reason"], "interrupted");
    assert_eq!((&before["event"], &before["step"]), (&"checkpoint".into(), &last["step"]));
    assert!(last["step"].as_u64().unwrap() < 40, "it was interrupted before its end");
    place.run("train --resume run --quiet");
    // One thread and two, stopped and not: the same bits.
    assert!(place.weights("run", 40) == place.weights("straight", 40));
}

/// A limit ends a run inside an epoch: it is evaluated there, once, and goes on as if it had never stopped.
#[test]
fn a_run_that_a_limit_ends_is_evaluated_and_goes_on_with_the_same_bits() {
    let place = Place::new();
    for (model, workers) in [("cnn5", 1), ("lenet5", 2), ("cnn5", 2)] {
        let line = format!(
            "train --model {model} --data synthetic:32x32x3/10/160 --batch 16 --epochs 3 --workers {workers} --threads 1 \
             --calibrate off --lr 0.01 --checkpoint-every 5"
        );
        let (straight, run) = (format!("straight-{model}{workers}"), format!("{model}{workers}"));
        place.run(&format!("{line} --max-steps 25 --quiet --run {straight}"));
        let said = place.run(&format!("{line} --max-steps 15 --run {run}"));
        assert!(
            said.contains("\nStep 15  val_loss: ") && said.contains("stopped at step 15 as asked, accuracy "),
            "{said}"
        );
        let kinds = |run: &str| -> Vec<String> {
            let kinds = ["epoch", "evaluated"];
            let events = place.events(run).into_iter().filter(|event| kinds.iter().any(|kind| event["event"] == *kind));
            events.map(|event| format!("{} {}", event["event"].as_str().unwrap(), event["step"])).collect()
        };
        assert_eq!(kinds(&run), ["epoch 10", "evaluated 15"]);
        place.run(&format!("train --resume {run} --max-steps 25 --calibrate off --quiet"));
        assert_eq!(kinds(&run), ["epoch 10", "evaluated 15", "epoch 20", "evaluated 25"]);
        assert_eq!(kinds(&straight), ["epoch 10", "epoch 20", "evaluated 25"]);
        assert!(place.weights(&run, 25) == place.weights(&straight, 25), "{run}: other weights");
        let evaluated = |run: &str| place.events(run).into_iter().rfind(|event| event["event"] == "evaluated").unwrap();
        assert_eq!(evaluated(&run)["val_loss"], evaluated(&straight)["val_loss"]);
        let epoch = |run: &str| place.events(run).into_iter().rfind(|event| event["event"] == "epoch").unwrap();
        assert_eq!(
            epoch(&run)["train_loss"],
            epoch(&straight)["train_loss"],
            "the epoch's figures are of all its steps"
        );
        let alone = place.json(&format!("evaluate {run}/checkpoints/step-00000025 --json"));
        assert_eq!(alone["top1"], evaluated(&run)["val_top1"], "{alone}");
    }
}
