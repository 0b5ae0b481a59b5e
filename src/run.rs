//! A run from a Rust program: alone, by threads or processes that it starts itself, or as one of those that a launcher started.
//!
//! [`Run`] says what is trained, and [`Run::train`] does all that `paceline train` does, since the command does it through here: the others
//! are met, algorithms are measured, events are shown, logged and drawn, Ctrl-C saves. What it returns ([`Trained`]) predicts, saves
//! weights and exports.
//!
//! ```no_run
//! use paceline::prelude::*;
//!
//! # fn main() -> Result<(), TrainError> {
//! let config = Config { model: "resnet20".into(), data: "shapes".into(), workers: 2, epochs: 3, ..Config::default() };
//! let trained = Run::new(config).train()?;
//! println!("{:.1}%", 100.0 * trained.accuracy());
//! # Ok(())
//! # }
//! ```

pub mod calibrate;
pub(crate) mod elsewhere;
pub(crate) mod execute;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
mod others;
mod rank_threads;
pub(crate) mod split;
pub(crate) mod team;
pub(crate) mod timed;
mod trained;

use std::path::{Path, PathBuf};

use crate::cluster::Member;
use crate::data::OwnData;
use crate::nn::Model;
use crate::system::signal::Stop;
use crate::terminal::Style;
use crate::train::run::{ResumeFrom, read_config};
use crate::train::trainer::{Observer, Surroundings};
use crate::train::{Config, Registry, TrainError};
use calibrate::Calibrate;
use execute::{Begin, Execution, Part};
use others::Others;
use team::Meeting;

use crate::failure::Failure;
pub use trained::Trained;

type Change = Box<dyn Fn(&mut Config)>;

/// A run that is about to start.
///
/// # Which processes there are
///
/// | where | what happens |
/// |---|---|
/// | a launcher has set its variables (`torchrun`, `mpirun`, `srun`, `paceline launch`) | this process joins as the rank they say |
/// | `config.carry` is `Carry::THREAD`, or `config.agree` is for threads | this process has all ranks, each a thread; there is no other process |
/// | `config.workers` is above 1 | this process is rank 0 and starts the others, parameter servers included: the same program with the same arguments |
/// | otherwise | this process trains alone |
///
/// **Rank 0 returns from [`Run::train`]; every other rank ends inside of it**, with exit code 0, 1 or 2 as the command would. So what stands
/// behind the call runs once. What stands before it runs in every process, and must come to the same configuration, model and data: where
/// they differ, the run is refused. A program that trains several times by several processes starts those of each run with arguments that
/// lead to it: [`Run::arguments`].
///
/// ```no_run
/// use paceline::prelude::*;
///
/// fn model(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
///     let x = net.flatten(x)?;
///     net.linear("fc", x, classes)
/// }
///
/// # fn main() -> Result<(), TrainError> {
/// let halves = ((vec![0, 255], vec![0, 1]), (vec![255], vec![1]));
/// let config = Config { model: "mine".into(), data: "dots".into(), batch: 2, ..Config::default() };
/// let data = OwnData::images([1, 1, 1], halves.0, halves.1);
/// let trained = Run::new(config).model("mine", model).data("dots", data).folder("runs/dots").train()?;
/// trained.save_weights("dots.safetensors")?;
/// # Ok(())
/// # }
/// ```
pub struct Run {
    goal: Goal,
    registry: Registry,
    style: Option<Style>,
    calibrate: Calibrate,
    stop: Option<Stop>,
    arguments: Option<Vec<String>>,
    observers: Vec<Observer>,
}

/// A new run, or one that goes on.
enum Goal {
    New { config: Box<Config>, folder: Option<PathBuf> },
    Resume { from: PathBuf, change: Change },
}

impl Run {
    /// A new run, in a folder of its own under `runs`.
    pub fn new(config: Config) -> Self {
        Self::to(Goal::New { config: Box::new(config), folder: None })
    }

    /// Goes on with the run in a folder from its last checkpoint, or from the checkpoint whose folder this is. `change` may lengthen it, or
    /// change how many processes there are.
    ///
    /// ```no_run
    /// # use paceline::prelude::*;
    /// let trained = Run::resume("runs/dots", |config| config.epochs = 20).train()?;
    /// # Ok::<(), TrainError>(())
    /// ```
    pub fn resume(run: impl Into<PathBuf>, change: impl Fn(&mut Config) + 'static) -> Self {
        Self::to(Goal::Resume { from: run.into(), change: Box::new(change) })
    }

    fn to(goal: Goal) -> Self {
        Self {
            goal,
            registry: Registry::new(),
            style: None,
            calibrate: Calibrate::On,
            stop: None,
            arguments: None,
            observers: Vec::new(),
        }
    }

    /// Brings a model: `config.model` finds it by this name.
    pub fn model(self, name: &str, model: impl Model + Send + Sync + 'static) -> Self {
        Self { registry: self.registry.model(name, model), ..self }
    }

    /// Brings data: `config.data` finds them by this name.
    pub fn data(self, name: &str, data: OwnData) -> Self {
        Self { registry: self.registry.data(name, data), ..self }
    }

    /// Brings all models and data of a program, in place of those that were named before.
    pub fn registry(self, registry: Registry) -> Self {
        Self { registry, ..self }
    }

    /// The folder of a new run, which must be empty if it is there.
    ///
    /// # Panics
    /// Of a run that goes on, which has one.
    pub fn folder(self, run: impl Into<PathBuf>) -> Self {
        let Goal::New { config, .. } = self.goal else { panic!("a run that goes on has its folder") };
        Self { goal: Goal::New { config, folder: Some(run.into()) }, ..self }
    }

    /// Shows nothing; otherwise a bar at a terminal, or a line for every epoch.
    pub fn quiet(self) -> Self {
        Self { style: Some(Style::Quiet), ..self }
    }

    /// How the algorithms of convolutions are chosen; otherwise they are measured once on each machine.
    pub fn calibrate(self, calibrate: Calibrate) -> Self {
        Self { calibrate, ..self }
    }

    /// What asks for an end; otherwise SIGINT, SIGTERM and SIGHUP do, from the start of the run until the process ends.
    pub fn stop(self, stop: Stop) -> Self {
        Self { stop: Some(stop), ..self }
    }

    /// The arguments with which this program starts the other ranks; otherwise its own. They have to lead to this very run.
    pub fn arguments(self, words: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { arguments: Some(words.into_iter().map(Into::into).collect()), ..self }
    }

    /// Adds a listener to the events of the run. It is called in rank 0.
    pub fn observe(mut self, observer: Observer) -> Self {
        self.observers.push(observer);
        self
    }

    /// Trains, together with the others if there are any, until the run ends: because it is done, or because of Ctrl-C, in which case it is
    /// saved and the outcome says so.
    ///
    /// # Errors
    /// When anything asked for cannot work, in which case nothing was started; or when the run fails: one rank says why.
    pub fn train(self) -> Result<Trained, TrainError> {
        let registry = self.registry.clone();
        let outcome = self.outcome().map_err(Failure::into_error)?;
        Ok(Trained::new(outcome, registry))
    }

    fn outcome(self) -> Result<crate::train::Outcome, Failure> {
        self.registry.check()?;
        let config = self.config()?;
        let member = team::from_launcher(&config, &team::variables())?;
        team::check_threads(&config, member.as_ref())?;
        let stop = match &self.stop {
            Some(stop) => stop.clone(),
            None => Stop::on_signals().map_err(Failure::failed)?,
        };
        match member {
            Some(member) if member.rank.index() > 0 => leave(self.take_part(Some(member), config, &stop, None), &stop),
            Some(member) => self.take_part(Some(member), config, &stop, None),
            None if config.has_rank_threads() => self.start_threads(config, &stop),
            None if config.ranks() < 2 => self.take_part(None, config, &stop, None),
            None => self.start_others(config, &stop),
        }
        .map(Part::expect_outcome)
    }

    /// The configuration that was asked for.
    fn config(&self) -> Result<Config, Failure> {
        match &self.goal {
            Goal::New { config, .. } => {
                let mut config = (**config).clone();
                make_absolute(&mut config);
                Ok(config)
            }
            Goal::Resume { from, change } => {
                let disk = surroundings().disk;
                let mut config = read_config(&disk, &ResumeFrom::find(&disk, from).run)?;
                change(&mut config);
                Ok(config)
            }
        }
    }

    /// Refuses what this machine has no room for, before another rank is started.
    fn check_launch(&self, config: &Config) -> Result<(), Failure> {
        let folder = if let Goal::New { folder, .. } = &self.goal { folder.as_deref() } else { None };
        let resumes = matches!(self.goal, Goal::Resume { .. });
        execute::check_launch(&self.registry, config, false, (folder, resumes))
    }

    /// Takes part as every rank.
    fn start_threads(self, config: Config, stop: &Stop) -> Result<Part, Failure> {
        self.check_launch(&config)?;
        self.take_part(None, config, stop, None)
    }

    /// Starts the other ranks and takes part as rank 0.
    fn start_others(self, config: Config, stop: &Stop) -> Result<Part, Failure> {
        let mut starts = others::starts(&config, self.arguments.as_deref())?;
        self.check_launch(&config)?;
        let first = starts.remove(0);
        let member = others::first_member(&first, &config)?;
        let others = Others::start(starts, stop)?;
        let pinned = others::Pinned::to(&first.cores);
        let ended = self.take_part(Some(member), config, stop, Some((&first.token, &others)));
        drop(pinned);
        others.end(ended)
    }

    /// Does this process's part.
    fn take_part(
        self,
        member: Option<Member>,
        config: Config,
        stop: &Stop,
        started: Option<(&crate::comm::Token, &Others)>,
    ) -> Result<Part, Failure> {
        let style = self.style.unwrap_or_else(|| Style::choose(false, false));
        let begin = match &self.goal {
            Goal::New { folder, .. } => Begin::New(folder.clone()),
            Goal::Resume { from, change } => Begin::Resume(from.clone(), change),
        };
        let (token, interrupt) = started.map(|(token, others)| (token.clone(), others.absent())).unzip();
        let meeting = Meeting {
            quiet: style == Style::Quiet,
            starts_others: token.is_some(),
            token,
            interrupt,
            registry: self.registry.clone(),
            ..Meeting::default()
        };
        let around = Surroundings { stop: stop.clone(), registry: self.registry, ..surroundings() };
        let met = || started.iter().for_each(|(_, others)| others.met());
        let (calibrate, observers) = (self.calibrate, self.observers);
        Execution { begin, calibrate, style, observers, meeting, around, met: &met }.take_part(member, config)
    }
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run").field("registry", &self.registry).finish_non_exhaustive()
    }
}

/// The real world, without Ctrl-C.
pub(crate) fn surroundings() -> Surroundings {
    let data_home = std::env::var_os("PACELINE_DATA").map(PathBuf::from);
    let elsewhere = elsewhere::elsewhere(None);
    Surroundings { data_home, elsewhere, cache: calibrate::folder(), ..Surroundings::default() }
}

/// A run can be resumed from any folder, so the paths in its configuration do not depend on this one.
pub(crate) fn make_absolute(config: &mut Config) {
    let absolute = |path: &str| {
        std::path::absolute(Path::new(path)).map_or_else(|_| path.to_owned(), |path| path.display().to_string())
    };
    if let Some((kind @ ("cifar10" | "mnist" | "folder" | "text"), path)) = config.data.split_once(':') {
        config.data = format!("{kind}:{}", absolute(path));
    }
    config.weights = config.weights.as_deref().map(absolute);
}

/// Ends a process that is not rank 0: nothing behind the run is for it. All that the run has opened is closed by now.
#[expect(clippy::disallowed_methods, reason = "the caller's code must not go on in this process")]
fn leave(ended: Result<Part, Failure>, stop: &Stop) -> ! {
    let code = match ended {
        Ok(part) => part.exit_code(stop),
        Err(failure) => {
            let code = failure.code();
            let _ = failure.report();
            code
        }
    };
    std::process::exit(code.into())
}
