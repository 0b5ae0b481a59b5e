//! A worker that is lost comes back by the command that it was started with, and takes portions with the present weights; nobody
//! else is let in with its rank, and nobody with one that is still there.

use std::process::{Child, Output};

use paceline::system::process::{Tell, tell};
use serde_json::Value;

use crate::place::{Place, text};
use crate::ranks::{Run, until};

const MODELS: [&str; 2] =
    ["--model lenet5 --data synthetic:32x32x1/10/960", "--model cnn5 --data synthetic:8x8x3/10/960"];

/// Twenty steps an epoch; the run ends by the clock, which is long enough for a process to start.
const LENGTH: &str = "--batch 48 --threads 1 --pin off --calibrate off --seed 3 --optimizer sgd --epochs 100000 --evaluate-every 20 --silent 2s --quiet --run run";

const WORKERS: usize = 3;

/// A run whose processes were started by hand: three workers and a server behind them.
struct ByHand<'a> {
    place: &'a Place,
    run: Run,
    children: Vec<Child>,
}

impl<'a> ByHand<'a> {
    fn start(place: &'a Place, line: &str) -> Self {
        let _ = std::fs::remove_dir_all(place.path("run"));
        let run = Run::new(WORKERS + 1, line);
        let children = (0..=WORKERS).map(|rank| run.rank(place, rank).spawn().unwrap()).collect();
        Self { place, run, children }
    }

    /// A rank's events of a kind.
    fn events(&self, rank: usize, kind: &str) -> Vec<Value> {
        let path = self.place.path(&format!("run/events/rank-{rank}.jsonl"));
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|event| event["event"] == kind).collect()
    }

    /// Waits until a rank has logged so many events of a kind.
    fn logs(&self, rank: usize, kind: &str, count: usize) {
        until(kind, || (self.events(rank, kind).len() >= count).then_some(()));
    }

    /// Kills a worker, and starts it again by the same command once the others go on without it.
    fn kill_and_start_again(&mut self, rank: usize, times: usize) {
        tell(self.children[rank].id(), Tell::Kill);
        self.children[rank].wait().unwrap();
        self.logs(0, "lost", times);
        self.children[rank] = self.run.rank(self.place, rank).spawn().unwrap();
        self.logs(0, "returned", times);
        let steps = self.events(rank, "step").len();
        self.logs(rank, "step", steps + 5);
    }

    /// A process that says it is a rank of this run, until it has ended.
    fn stranger(&self, rank: usize) -> Output {
        self.run.rank(self.place, rank).output().unwrap()
    }

    /// All end well; the number of the last step.
    fn end(&mut self) -> u64 {
        for child in std::mem::take(&mut self.children) {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        }
        self.events(0, "run_finished").last().unwrap()["step"].as_u64().unwrap()
    }

    /// Samples that all have computed in training, in all of their lives.
    fn samples(&self) -> u64 {
        let steps = (0..WORKERS).flat_map(|rank| self.events(rank, "step"));
        steps.filter_map(|event| event["portion"].as_u64()).sum()
    }
}

impl Drop for ByHand<'_> {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Every portion that was not under way in a worker that was lost counts once, whoever computes it.
fn every_sample_counts_once(run: &ByHand<'_>, steps: u64) {
    let lost: u64 = run.events(0, "lost").iter().filter_map(|event| event["portions"].as_u64()).sum();
    let all = run.samples();
    assert!((steps * 48 - 16 * lost..=steps * 48).contains(&all), "{all} samples of {steps} steps, {lost} lost");
}

fn comes_back(model: &str, agreement: &str) {
    let place = Place::new();
    let mut run = ByHand::start(&place, &format!("train {model} {LENGTH} {agreement} --carry tcp --time-limit 12s"));
    run.logs(2, "step", 20);
    run.kill_and_start_again(2, 1);
    let steps = run.end();
    let returned = run.events(0, "returned");
    assert_eq!((returned.len(), returned[0]["returned_rank"].as_u64()), (1, Some(2)));
    assert!(returned[0]["step"].as_u64().unwrap() < steps);
    every_sample_counts_once(&run, steps);
    // Its second life begins where the run is, and ends with it.
    let begun = run.events(2, "run_started");
    assert!(begun.len() == 2 && run.events(2, "run_finished").last().unwrap()["step"] == steps, "{begun:?}");
    // What it has learnt from is no other model than the others': it is as good as they are.
    let evaluated = place.json("evaluate run --json");
    assert!(evaluated["loss"].as_f64().is_some_and(|loss| loss.is_finite() && loss < 3.0), "{evaluated}");
}

#[test]
fn a_worker_comes_back_to_an_asynchronous_server() {
    comes_back(MODELS[0], "--agree parameter-server --staleness none --servers 1");
}

#[test]
fn a_worker_comes_back_to_a_server_that_bounds_staleness() {
    comes_back(MODELS[1], "--agree parameter-server --staleness 2 --servers 1");
}

#[test]
fn a_worker_comes_back_to_a_centre() {
    comes_back(MODELS[1], "--agree elastic --servers 1");
    comes_back(MODELS[0], "--agree downpour --servers 1");
}

#[test]
#[ignore = "cargo x ci: agreements"]
fn a_worker_comes_back_to_a_centre_that_streams_or_bounds_staleness() {
    comes_back(MODELS[0], "--agree dogwild --servers 1");
    comes_back(MODELS[0], "--agree elastic --staleness 4 --servers 1");
    comes_back(MODELS[1], "--agree shm-async --servers 1");
}

/// It is lost again, and comes back again; whoever takes a rank that is there is refused, with a sentence, and the run goes on.
#[test]
fn a_worker_comes_back_twice_and_nobody_takes_a_rank_that_is_there() {
    let place = Place::new();
    let agreement = "--agree parameter-server --staleness none --servers 1";
    let line = format!("train {} {LENGTH} {agreement} --carry tcp --time-limit 15s", MODELS[1]);
    let mut run = ByHand::start(&place, &line);
    run.logs(0, "step", 20);
    let stranger = run.stranger(1);
    let said = text(&stranger.stderr);
    assert_eq!(stranger.status.code(), Some(2), "{said}");
    assert!(said.contains("rank 1 is still in the run"), "{said}");
    run.kill_and_start_again(1, 1);
    run.kill_and_start_again(1, 2);
    let steps = run.end();
    assert_eq!((run.events(0, "lost").len(), run.events(0, "returned").len()), (2, 2));
    every_sample_counts_once(&run, steps);
}

/// Where nobody can come back, it is said what to type, and the others go on.
#[test]
fn where_a_worker_cannot_come_back_it_is_told_what_to_type() {
    let place = Place::new();
    let cases = [("--staleness none --carry shm", "--carry tcp"), ("--staleness 0 --carry tcp", "--staleness none")];
    for (flags, typed) in cases {
        let line = format!("train {} {LENGTH} --agree parameter-server --servers 1 {flags} --time-limit 6s", MODELS[1]);
        let mut run = ByHand::start(&place, &line);
        run.logs(0, "step", 20);
        tell(run.children[2].id(), Tell::Kill);
        run.logs(0, "lost", 1);
        let late = run.stranger(2);
        let said = text(&late.stderr);
        assert_eq!(late.status.code(), Some(2), "{said}");
        assert!(said.contains(typed) && said.contains("--resume"), "{said}");
        run.children.remove(2).wait().unwrap();
        run.end();
    }
}
