//! Measures a set-up: a few steps of `paceline train` itself with this change of the configuration, from its events. The data loader and
//! whatever else belongs to a step are in it, since it is the run that would be started.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::ValueEnum;

use crate::cluster::launch::{Ended, Output};
use crate::system::clock::{Clock, sleep};
use crate::system::disk::Disk;
use crate::system::phase::Phase;
use crate::system::signal::Stop;
use crate::system::threads;
use crate::train::Config;

use super::Request;
use super::setup::Setup;
use crate::failure::Failure;
use crate::run::timed::{self, Folders, Timed, TimedStep, Words};

/// How long a set-up is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Length {
    /// Steps that do not count: memory is touched for the first time, and messages are put in order.
    pub warm_up: usize,
    /// Steps that count, at least.
    pub steps: usize,
    /// Seconds of steps, if that many do not take longer.
    pub seconds: f64,
    /// Seconds in all, after which it is ended.
    pub most_s: f64,
}

/// What a set-up took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// The median step.
    pub step_s: f64,
    /// Both passes of it.
    pub compute_s: f64,
    /// Changing the weights.
    pub update_s: f64,
    /// The most memory that its processes held together.
    pub memory_bytes: u64,
    /// Seconds before the first step and behind the last one.
    pub around_s: f64,
}

/// Why there is no measurement.
pub enum Unmeasured {
    /// The user has asked for the end.
    Interrupted,
    /// It did not run; the sentence says why.
    Failed(String),
}

impl From<Failure> for Unmeasured {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure.into_error().to_string())
    }
}

/// Measures a set-up once.
pub fn measure(
    setup: &Setup,
    (request, config): (&Request<'_>, &Config),
    length: Length,
) -> Result<Measured, Unmeasured> {
    let folders = Folders::new("choose", 1)?;
    let place = &folders.paths()[0];
    let (file, run) = (place.join("set-up.toml"), place.join("run"));
    let disk = Disk::real();
    let written =
        disk.create_dir(place).and_then(|()| disk.write(&file, to_be_timed(setup, config).to_toml().as_bytes()));
    written.map_err(Failure::from)?;
    let words = words(setup, request, length, (&file, &run));
    let (clock, said) = (Clock::real(), Words::default());
    let ending = Ending::after(length.most_s, request.stop)?;
    let ended = timed::run(vec![Timed { words, cores: Vec::new() }], &ending.stop, &Output::to(said.clone()))?;
    let took_s = clock.seconds();
    match ended {
        _ if request.stop.requested() => return Err(Unmeasured::Interrupted),
        Ended::Done => {}
        Ended::Interrupted { .. } => {
            return Err(Unmeasured::Failed(format!("it took more than {:.0} s", length.most_s)));
        }
        Ended::Failed { .. } => {
            let sentence = said.last().unwrap_or_else(|| "it failed without a word".into());
            return Err(Unmeasured::Failed(sentence));
        }
    }
    let all = timed::steps(&run, 0)?;
    let stepped_s: f64 = all.iter().map(|step| step.seconds).sum();
    let ranks = setup.ranks(config);
    let memory_bytes = timed::peak_memory_bytes(&run, ranks, setup.in_one_process);
    let mut measured = medians(&all, length.warm_up);
    if !config.steps_together() {
        // A step in which weights are exchanged is none that the median shows.
        measured.step_s = stepped_s / all.len() as f64;
    }
    Ok(Measured { memory_bytes, around_s: (took_s - stepped_s).max(0.0), ..measured })
}

/// The medians of the steps that count.
fn medians(all: &[TimedStep], warm_up: usize) -> Measured {
    // Where steps are many, the first tenth of them is warm-up too.
    let counted = &all[warm_up.max(all.len() / 10).min(all.len() - 1)..];
    let median = |of: &dyn Fn(&TimedStep) -> f64| {
        let mut found: Vec<f64> = counted.iter().map(of).collect();
        super::median(&mut found)
    };
    let phase = |step: &TimedStep, phase| step.phases.get(phase).unwrap_or(0.0);
    let compute =
        |step: &TimedStep| [Phase::Forward, Phase::Backward, Phase::Compute].map(|one| phase(step, one)).iter().sum();
    Measured {
        step_s: median(&|step| step.seconds),
        compute_s: median(&compute),
        update_s: median(&|step| phase(step, Phase::Update)),
        ..Measured::default()
    }
}

/// The configuration of a run that is only timed: it does not end by itself and starts from weights that are there.
fn to_be_timed(setup: &Setup, config: &Config) -> Config {
    let mut timed = setup.change(config);
    timed.epochs = u64::from(u32::MAX);
    (timed.max_steps, timed.time_limit_s, timed.early_stop) = (None, None, None);
    (timed.weights, timed.weights_except) = (None, Vec::new());
    (timed.checkpoint_every, timed.checkpoint_minutes) = (None, Some(0.0));
    // Nothing is learned here, and nothing grows beyond all numbers.
    timed.learning_rate.base = 1e-9;
    timed
}

fn words(setup: &Setup, request: &Request<'_>, length: Length, (file, run): (&Path, &Path)) -> Vec<String> {
    let steps = length.warm_up + length.steps;
    let mut words = vec!["train".to_owned(), file.display().to_string(), "--run".into(), run.display().to_string()];
    let calibrate = request.calibrate.to_possible_value().map(|value| format!("--calibrate={}", value.get_name()));
    words.extend(calibrate);
    words.extend([format!("--rehearse={steps}:{}", length.seconds), "--quiet".into()]);
    let tls = request.tls.map(|files| if files.is_empty() { "--tls".into() } else { format!("--tls={files}") });
    words.extend(tls);
    // A file cannot say that one part is what was meant.
    words.extend(setup.turns.as_ref().map(|turns| format!("--micro-batches={}", turns.micro_batches)));
    words
}

/// Asks for an end after a time, unless it is dropped before.
struct Ending {
    stop: Stop,
    over: Arc<AtomicBool>,
}

impl Ending {
    fn after(seconds: f64, stop: &Stop) -> Result<Self, Failure> {
        let (stop, over) = (stop.child(), Arc::new(AtomicBool::new(false)));
        let (asked, ended) = (stop.clone(), Arc::clone(&over));
        let watch = move || {
            let clock = Clock::real();
            while !ended.load(Ordering::SeqCst) && clock.seconds() < seconds {
                sleep(Duration::from_millis(20));
            }
            if !ended.load(Ordering::SeqCst) {
                asked.request();
            }
        };
        threads::spawn("paceline-choose", watch).map_err(Failure::failed)?;
        Ok(Self { stop, over })
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use crate::choose::apply::Said;
    use crate::run::calibrate::Calibrate;
    use crate::system::phase::PhaseTimes;
    use crate::terminal::Style;
    use crate::train::Registry;

    use super::*;

    #[test]
    fn the_first_steps_do_not_count() {
        let step = |seconds| TimedStep { seconds, phases: PhaseTimes::default() };
        let few: Vec<TimedStep> = [9.0, 8.0, 1.0, 3.0, 2.0].into_iter().map(step).collect();
        assert_eq!(medians(&few, 2).step_s, 2.0);
        assert_eq!(medians(&few[..1], 2).step_s, 9.0, "one step is better than none");
    }

    #[test]
    fn what_encrypts_a_run_encrypts_it_while_it_is_timed() {
        let (config, registry, stop) = (Config::default(), Registry::new(), Stop::new());
        let request = |tls| Request {
            config: &config,
            said: Said::default(),
            registry: &registry,
            calibrate: Calibrate::Off,
            tls,
            budget_s: 1.0,
            again: false,
            stop: &stop,
            style: Style::Quiet,
        };
        let length = Length { warm_up: 1, steps: 1, seconds: 0.1, most_s: 1.0 };
        let said = |tls, word: &str| {
            let words = words(&Setup::threads(1), &request(tls), length, (Path::new("file"), Path::new("run")));
            words.iter().any(|said| said == word)
        };
        assert!(said(Some(""), "--tls") && said(Some("a,b,c"), "--tls=a,b,c") && !said(None, "--tls"));
    }

    #[test]
    fn a_run_that_is_timed_differs_in_nothing_that_takes_time() {
        let config = Config { weights: Some("a".into()), max_steps: Some(3), batch: 8, ..Config::default() };
        let timed = to_be_timed(&Setup::threads(2), &config);
        assert!(timed.check().is_ok());
        assert_eq!((timed.batch, timed.threads, timed.max_steps, timed.weights), (8, Some(2), None, None));
    }
}
