//! One turn of one set-up: starts its processes, each a whole `paceline train`, and reads from their events how fast they were.

use std::path::{Path, PathBuf};

use crate::cluster::launch::{Ended, Output, local};
use crate::system::phase::Phase;
use crate::system::process;

use super::Plan;
use crate::arguments::BenchScaling;
use crate::failure::Failure;
use crate::run::timed::{self, Folders, Timed};

/// Steps that are not counted: caches and links are warmed up and messages put in order.
const WARM_UP: usize = 5;

/// What is measured in turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// One process, on the cores that one of the most would have.
    One,
    /// One replica with the threads and the batch of so many.
    OneReplica(usize),
    /// So many replicas in one process.
    Replicas(usize),
    /// So many processes that train together.
    Together(usize),
    /// So many processes that know nothing of each other, at the same time.
    Apart(usize),
}

/// What a turn came to.
pub struct Measured {
    /// Of all processes.
    pub images_per_s: f64,
    /// The mean of a step: what disturbed single steps counts as it does in a training.
    pub step_s: f64,
    /// Of that, waiting for others.
    pub wait_s: f64,
}

impl Setup {
    /// For programs.
    pub fn kind(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::OneReplica(_) => "one-replica",
            Self::Replicas(_) => "replicas",
            Self::Together(_) => "together",
            Self::Apart(_) => "apart",
        }
    }

    /// Replicas, compute threads of each, and samples of all in a step.
    pub fn shape(self, plan: &Plan<'_>) -> (usize, usize, usize) {
        let batch = plan.arguments.batch;
        match self {
            Self::One => (1, plan.threads, batch),
            Self::OneReplica(count) => (1, count * plan.threads, count * batch),
            Self::Replicas(count) | Self::Together(count) | Self::Apart(count) => (count, plan.threads, count * batch),
        }
    }

    /// For people.
    pub fn name(self, plan: &Plan<'_>) -> String {
        let (workers, threads, _) = self.shape(plan);
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let threads = format!("{threads} thread{}", plural(threads));
        match self {
            Self::One => format!("1 process × {threads}"),
            Self::OneReplica(_) => format!("1 replica × {threads}"),
            Self::Replicas(_) => format!("{workers} replicas × {threads}"),
            Self::Together(_) => format!("{workers} workers × {threads}"),
            Self::Apart(_) => format!("{workers} apart × {threads}"),
        }
    }
}

/// Has the algorithms measured that the set-ups use, by single steps that are not counted.
pub fn warm_up(plan: &Plan<'_>, several: &[usize]) -> Result<(), Failure> {
    for setup in std::iter::once(Setup::One).chain(several.iter().map(|&count| Setup::OneReplica(count))) {
        let runs = Folders::new("scaling", 1)?;
        start(plan, setup, &runs, (1, "on"))?;
    }
    Ok(())
}

/// One turn.
pub fn measure(plan: &Plan<'_>, setup: Setup) -> Result<Measured, Failure> {
    let runs = Folders::new("scaling", if let Setup::Apart(workers) = setup { workers } else { 1 })?;
    start(plan, setup, &runs, (plan.arguments.steps + WARM_UP, "known"))?;
    let (workers, _, batch) = setup.shape(plan);
    let batch = if let Setup::Apart(_) = setup { batch / workers } else { batch } as f64;
    let mut found = Vec::new();
    for folder in runs.paths() {
        found.push(steps(folder)?);
    }
    let mean = |of: fn(&(f64, f64)) -> f64| found.iter().map(of).sum::<f64>() / found.len() as f64;
    let images_per_s = found.iter().map(|(step_s, _)| batch / step_s).sum();
    Ok(Measured { images_per_s, step_s: mean(|found| found.0), wait_s: mean(|found| found.1) })
}

/// Runs the processes of a set-up to their end.
fn start(plan: &Plan<'_>, setup: Setup, runs: &Folders, (steps, calibrate): (usize, &str)) -> Result<(), Failure> {
    let cores = process::cores();
    // Those that train together share the cores by themselves, in the same way.
    let shares = match setup {
        Setup::One => local::share(&cores, plan.most).into_iter().take(1).collect(),
        Setup::Apart(workers) => local::share(&cores, workers),
        Setup::OneReplica(_) | Setup::Replicas(_) | Setup::Together(_) => vec![Vec::new()],
    };
    let timed = |(cores, folder): (Vec<usize>, &PathBuf)| Timed {
        words: words(plan, setup, (steps, calibrate), folder),
        cores,
    };
    let all = shares.into_iter().zip(runs.paths()).map(timed).collect();
    let ended = timed::run(all, &plan.stop, &Output::to(std::io::stderr()));
    let name = setup.name(plan);
    match ended {
        Ok(Ended::Done) => Ok(()),
        Ok(Ended::Failed { .. }) => Err(Failure::failed(format!("{name} failed; its sentence is above"))),
        Ok(Ended::Interrupted { .. }) => Err(Failure::failed(format!("interrupted while {name} was measured"))),
        Err(failure) => Err(Failure::failed(format!("{name}: {}", failure.into_error()))),
    }
}

/// What a process is started with.
fn words(plan: &Plan<'_>, setup: Setup, (steps, calibrate): (usize, &str), folder: &Path) -> Vec<String> {
    let BenchScaling { model, size, agree, carry, oversubscribe, .. } = plan.arguments;
    let (workers, threads, batch) = setup.shape(plan);
    let (ranks, batch) = if let Setup::Apart(_) = setup { (1, batch / workers) } else { (workers, batch) };
    let flag = if let Setup::Replicas(_) = setup { "--replicas" } else { "--workers" };
    // An epoch that does not end before, and so has one small evaluation, after the last step.
    let samples = (steps + 1) * batch;
    let line = format!(
        "train --model {model} --data synthetic:{size}x{size}x3/10/{samples} --augment none --batch {batch} --optimizer momentum \
         --lr 0.001 --max-steps {steps} {flag} {ranks} --calibrate {calibrate} --checkpoint-minutes 0 --quiet --run"
    );
    let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    words.push(folder.display().to_string());
    words.extend(["--threads".to_owned(), threads.to_string()]);
    if let Setup::Replicas(_) | Setup::Together(_) = setup {
        words.extend(agree.iter().flat_map(|agree| ["--agree".to_owned(), agree.name().to_owned()]));
    }
    if let Setup::Together(_) = setup {
        words.extend(carry.iter().flat_map(|carry| ["--carry".to_owned(), carry.name().to_owned()]));
    }
    words.extend(oversubscribe.then(|| "--oversubscribe".to_owned()));
    words
}

/// The mean step of a run, and how long it waited for others, without the first steps.
fn steps(folder: &Path) -> Result<(f64, f64), Failure> {
    let found: Vec<(f64, f64)> = timed::steps(folder, WARM_UP)?
        .iter()
        .map(|step| (step.seconds, step.phases.get(Phase::Exchange).unwrap_or(0.0)))
        .collect();
    let mean = |of: fn(&(f64, f64)) -> f64| found.iter().map(of).sum::<f64>() / found.len() as f64;
    Ok((mean(|step| step.0), mean(|step| step.1)))
}
