//! A rank that is killed: the lowest that is left saves the last whole step, where it has one, and says so; the run goes on from
//! there with the same losses.

use std::process::{Child, Output};

use paceline::system::random::Random;

use crate::place::{Place, text};
use crate::ranks::{Run, until};

/// A network with batch-norm, whose gradients travel in one message, and one without.
const MODELS: [&str; 2] = ["cnn5", "lenet5"];

fn line(model: &str, way: &str) -> String {
    format!(
        "train --model {model} --data synthetic:32x32x3/10/640 --batch 16 --epochs 2 --max-steps 60 --threads 1 --calibrate off \
         --optimizer momentum --lr 0.01 --quiet {way}"
    )
}

/// The losses of a run by step, of whichever rank was left to tell them.
fn losses(place: &Place, run: &str, rank: usize) -> Vec<(u64, f64)> {
    let Ok(text) = std::fs::read_to_string(place.path(&format!("{run}/events/rank-{rank}.jsonl"))) else {
        return Vec::new();
    };
    let events = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let steps = events.filter(|event| event["event"] == "step");
    steps.map(|event| (event["step"].as_u64().unwrap(), event["loss"].as_f64().unwrap())).collect()
}

/// Starts a run, kills a rank once so many steps are done, and waits for the others: what the lowest that is left says.
fn kill(place: &Place, (model, way, run): (&str, &str, &str), (victim, step): (usize, u64)) -> Output {
    let ranks = Run::new(if way.contains("server") { 3 } else { 2 }, &line(model, &format!("{way} --run {run}")));
    let mut children: Vec<Child> = (0..ranks.world).map(|rank| ranks.rank(place, rank).spawn().unwrap()).collect();
    until("steps", || losses(place, run, victim).last().filter(|(done, _)| *done >= step).map(drop));
    children[victim].kill().unwrap();
    let mut outputs: Vec<Output> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    outputs.swap_remove(usize::from(victim == 0))
}

/// Goes on with a run whose rank was lost, and compares it with one that lost none.
fn goes_on(place: &Place, (model, run): (&str, &str), (said, survivor): (&str, usize)) {
    let saved = said.split_once("; step ").and_then(|(_, rest)| rest.split_once(" is saved"));
    let step: u64 = saved.unwrap_or_else(|| panic!("nothing was saved: {said}")).0.parse().unwrap();
    assert!(said.contains("type: paceline train --resume ") && said.contains(run), "{said}");
    assert!(place.path(&format!("{run}/checkpoints/step-{step:08}/manifest.json")).exists(), "{said}");
    let before = losses(place, run, survivor);
    assert!(before.iter().any(|(done, _)| *done == step), "step {step} was done");
    place.run(&format!("train --resume {run} --workers 2 --calibrate off --quiet"));
    let straight = losses(place, &format!("straight-{model}"), 0);
    // The same events go on, so those that were made again are the last.
    let resumed = losses(place, run, 0);
    let resumed = &resumed[resumed.len() - (60 - step as usize)..];
    assert_eq!(resumed, &straight[step as usize..], "the same losses after step {step}");
}

#[test]
fn the_last_whole_step_is_saved_when_a_rank_is_killed() {
    let place = Place::new();
    let mut random = Random::new(&[7, 40]);
    for model in MODELS {
        place.run(&line(model, &format!("--workers 2 --carry tcp --run straight-{model}")));
        for victim in [0, 1] {
            let run = format!("{model}-{victim}");
            let step = 1 + random.below(30) as u64;
            let output = kill(&place, (model, "--carry tcp", &run), (victim, step));
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            goes_on(&place, (model, &run), (&said, usize::from(victim == 0)));
        }
    }
}

/// Gradients that are clipped are applied at the end of a step. The rank is killed when the last step of an epoch is done: the
/// others are about to evaluate, and no later step has begun.
#[test]
fn a_step_whose_gradients_were_clipped_is_saved_as_the_step_it_is() {
    let place = Place::new();
    let clipped = "--carry tcp --clip-norm 1";
    place.run(&line("cnn5", &format!("--workers 2 {clipped} --run straight-cnn5")));
    for (number, step) in [40, 11].into_iter().enumerate() {
        let run = format!("clipped-{number}");
        let output = kill(&place, ("cnn5", clipped, &run), (1, step));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        goes_on(&place, ("cnn5", &run), (&said, 0));
    }
}

#[test]
fn one_copy_of_the_weights_is_saved_if_it_is_whole_and_otherwise_the_last_checkpoint_is_named() {
    let place = Place::new();
    place.run(&line("cnn5", "--workers 2 --run straight-cnn5"));
    for number in 0..3 {
        let run = format!("shared-{number}");
        let output = kill(&place, ("cnn5", "--carry shm --checkpoint-every 4", &run), (1, 5 + number));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        if said.contains(" is saved") {
            goes_on(&place, ("cnn5", &run), (&said, 0));
        } else {
            assert!(said.contains("nothing was saved") && said.contains("step-000000"), "{said}");
            place.run(&format!("train --resume {run} --quiet"));
        }
    }
}

#[test]
fn where_servers_have_the_optimizer_the_last_checkpoint_is_named() {
    let place = Place::new();
    let output = kill(&place, ("cnn5", "--agree parameter-server --servers 1 --checkpoint-every 4", "run"), (0, 9));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nothing was saved") && said.contains("step-000000"), "{said}");
    place.run("train --resume run --quiet");
}
