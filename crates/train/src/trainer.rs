//! The loop around the step: epochs, evaluation, checkpoints, and every way a run can end.

mod balancing;
mod gathered;
mod gauge;
mod journal;
mod saving;
mod setup;
mod stretches;
mod survivor;

use std::path::{Path, PathBuf};
use std::time::Duration;

use balancing::Speed;
use journal::{Journal, Save};
use paceline_comm::Communicator;
use paceline_data::DataError;
use paceline_data::batch::Batch;
use paceline_data::loader::Loader;
use paceline_nn::Model;
use paceline_nn::schedule::RunLength;
use paceline_parallel::Agreement;
use paceline_parallel::agree::RunIdentity;
use paceline_parallel::siblings::ReplicaLinks;
use paceline_system::disk::DiskError;
use paceline_system::event::Line;
use paceline_system::phase::Phase;
use paceline_system::shell::quote;

use crate::checkpoint::Checkpoints;
use crate::config::Config;
use crate::engine::guard::Limits;
use crate::error::TrainError;
use crate::evaluate::evaluate;
use crate::metrics::Tally;
use crate::portions::PortionCounter;
use crate::replica::{NotFinite, Replica, ReplicaOptions};
use crate::run::{ResumeFrom, RunDir, read_config, read_id};
use crate::serve::{ServerOptions, fingerprint};
use crate::step::{Rules, Stepped, step};

pub use setup::{
    Examined, FolderBroadcast, Prepared, Restarts, RunFolder, Surroundings, prepare, prepare_evaluation, prepare_with,
};
pub(crate) use setup::{options, slots};

/// Why a run ended without failing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// All epochs are done.
    Done,
    /// The validation accuracy had stopped rising.
    EarlyStop,
    /// The number of updates asked for is reached.
    MaxSteps,
    /// The time asked for is over.
    TimeLimit,
    /// Ctrl-C.
    Interrupted,
}

impl Reason {
    /// The word in the event log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::EarlyStop => "early-stop",
            Self::MaxSteps => "max-steps",
            Self::TimeLimit => "time-limit",
            Self::Interrupted => "interrupted",
        }
    }
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Why it ended.
    pub reason: Reason,
    /// Updates done in all.
    pub step: u64,
    /// The last evaluation, if there was one in this process.
    pub evaluation: Option<Tally>,
    /// The run's folder.
    pub run: PathBuf,
}

/// Hears of every event as it is logged.
pub type Observer = Box<dyn FnMut(&Line) -> Result<(), DiskError>>;

/// A run in progress.
pub struct Trainer {
    replica: Replica,
    train: Loader,
    val: Loader,
    journal: Journal,
    notes: Vec<String>,
    /// Who hands out portions of the data, and how many stretches of them were begun.
    portions: PortionCounter,
    stretches: u64,
    /// Steps that the first worker had made when this one came back, before its first step since.
    rejoined_after: Option<u64>,
}

impl Trainer {
    /// A new run of a zoo model in a new folder.
    ///
    /// # Errors
    /// When anything asked for cannot work: nothing was overwritten then.
    pub fn start(config: Config, around: Surroundings, asked: Option<PathBuf>) -> Result<Self, TrainError> {
        let prepared = prepare(&config, &around)?;
        let run = make(&around, asked.as_deref(), &config)?;
        Self::assemble(config, around, prepared, run)
    }

    /// A new run of a model of one's own; `config.model` is only its name.
    ///
    /// # Errors
    /// As [`Trainer::start`].
    pub fn start_with(
        model: &dyn Model,
        config: Config,
        around: Surroundings,
        asked: Option<PathBuf>,
    ) -> Result<Self, TrainError> {
        let prepared = prepare_with(model, &config, &around)?;
        let run = make(&around, asked.as_deref(), &config)?;
        Self::assemble(config, around, prepared, run)
    }

    /// Continues a run from its newest checkpoint, or from the start if it has none; or, if the path is that of a checkpoint, from that
    /// one: later ones get other names. `change` may lengthen it.
    ///
    /// # Errors
    /// When there is no run, or its checkpoint is damaged or does not fit.
    pub fn resume(path: PathBuf, around: Surroundings, change: impl FnOnce(&mut Config)) -> Result<Self, TrainError> {
        let reopened = reopen(&path, &around, change)?;
        let prepared = prepare(&reopened.without_weights(&around)?, &around)?;
        Self::assemble_resumed(reopened, around, prepared)
    }

    /// As [`Trainer::resume`] for a model of one's own.
    ///
    /// # Errors
    /// As [`Trainer::resume`].
    pub fn resume_with(
        model: &dyn Model,
        path: PathBuf,
        around: Surroundings,
        change: impl FnOnce(&mut Config),
    ) -> Result<Self, TrainError> {
        let reopened = reopen(&path, &around, change)?;
        let prepared = prepare_with(model, &reopened.without_weights(&around)?, &around)?;
        Self::assemble_resumed(reopened, around, prepared)
    }

    fn assemble_resumed(reopened: Reopened, around: Surroundings, prepared: Prepared) -> Result<Self, TrainError> {
        let Reopened { run, config, checkpoint, epochs_before, notes } = reopened;
        let mut trainer = Self::assemble(config, around, Prepared { notes, ..prepared }, run)?;
        let told = trainer.journal.resume(&mut trainer.replica, checkpoint, epochs_before)?;
        trainer.notes.extend(told);
        Ok(trainer)
    }

    fn assemble(config: Config, around: Surroundings, prepared: Prepared, run: RunDir) -> Result<Self, TrainError> {
        let Prepared { mut replica, train, val, card, notes } = prepared;
        replica.slow = config.slow.factor(around.rank());
        let portions = around.portions.clone();
        let steps_per_epoch = train.steps() as u64;
        let total_steps = config.epochs.saturating_mul(steps_per_epoch);
        let length = RunLength { total_steps, steps_per_epoch, global_batch: config.batch };
        let samples = train.dataset().len() as u64;
        let mut journal = Journal::open(config, around, card, run, (length, samples))?;
        journal.watch_gpu(replica.engine.gpu().map(|gpu| &**gpu));
        Ok(Self { replica, train, val, journal, notes, portions, stretches: 0, rejoined_after: None })
    }

    /// Trains together with the other ranks from now on, and begins with the weights of rank 0.
    ///
    /// # Errors
    /// When another rank, or the way to it, has failed.
    pub fn agree(&mut self, agreement: Box<dyn Agreement>) -> Result<(), TrainError> {
        let mut shape = self.replica.shape();
        // Devices of different kinds have buckets of their own, where these do not travel.
        if !agreement.protocol().gradients_leave() && agreement.workers() > 1 {
            shape.buckets.clear();
        }
        let (step, identity) = (self.journal.position.step, self.identity(fingerprint(&shape)));
        self.replica.agree(agreement, &self.journal.clock)?;
        self.replica.report_to(&self.journal.progress);
        self.replica.begin_together(step, identity)
    }

    /// What all ranks have to know of the run, with a number that tells what they exchange.
    fn identity(&self, shape: u64) -> RunIdentity {
        let (step, steps_per_epoch) = (self.journal.position.step, self.journal.length.steps_per_epoch);
        let ReplicaOptions { input, classes, .. } = *self.replica.options();
        ServerOptions { step, steps_per_epoch, input, classes, shape }.identity()
    }

    /// Computes together with the other stages or parts of its worker from now on, which all call this at the same point.
    ///
    /// # Errors
    /// When another of them, or the way to it, has failed, or begins with another step, other data or another model.
    pub fn join_siblings(&mut self, mut links: ReplicaLinks) -> Result<(), TrainError> {
        self.replica.report_to(&self.journal.progress);
        // They have different tensors, and the same samples.
        links.siblings().identify(self.identity(self.journal.position.samples))?;
        self.replica.join_siblings(links)
    }

    /// Measures what a micro-batch takes in every stage, and makes the order of a step from it; what a step is expected to take then. Parts
    /// tell each other what they are. All stages or parts call this at the same point.
    ///
    /// # Errors
    /// When another stage or part, or the way to it, has failed.
    pub fn order_stages(&mut self) -> Result<Option<Duration>, TrainError> {
        if self.replica.stages() == 1 {
            self.journal.pipeline = self.replica.tell_parts(&self.journal.config.split)?;
            return Ok(None);
        }
        let (pipeline, forecast_s) = self.replica.order_stages(self.journal.config.schedule)?;
        self.journal.pipeline = Some(pipeline);
        Ok(Duration::try_from_secs_f64(forecast_s).ok())
    }

    /// Adds up gradients with the other ranks' GPUs by NCCL from now on; before [`Trainer::agree`].
    ///
    /// # Errors
    /// When the GPUs cannot train together (a refusal), or another rank, or the way to it, has failed.
    ///
    /// # Panics
    /// When the run does not compute on a GPU.
    pub fn join_gpus(
        &mut self,
        communicator: Option<&mut Communicator>,
        hosts: &[String],
        limits: &Limits,
    ) -> Result<(), TrainError> {
        self.replica.engine.cuda_mut().expect("a replica on a GPU").join_gpus(communicator, hosts, limits)
    }

    /// Adds a listener to the events of the run.
    pub fn observe(&mut self, observer: Observer) {
        self.journal.observers.push(observer);
    }

    /// The run's folder.
    pub fn run_dir(&self) -> &RunDir {
        &self.journal.run
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.journal.config
    }

    /// Updates in one epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.journal.length.steps_per_epoch
    }

    /// Updates done so far: not 0 in a resumed run.
    pub fn steps_done(&self) -> u64 {
        self.journal.position.step
    }

    /// Updates until the end, `max-steps` included.
    pub fn steps_total(&self) -> u64 {
        self.journal.steps_total()
    }

    /// The model being trained.
    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Trains until the run ends, one way or another. A run that ends well leaves a last checkpoint.
    ///
    /// # Errors
    /// When the run fails; the event log then says so too.
    pub fn run(&mut self) -> Result<Outcome, TrainError> {
        let parameters = self.replica.whole_parameter_count() as u64;
        if self.replica.world() == 1 {
            self.replica.engine.weights_mut().kept.clear();
        }
        let begun = self.journal.begin(parameters, std::mem::take(&mut self.notes));
        let ended = begun.and_then(|()| self.epochs());
        // Whatever ended the run, what was under way to the disk arrives there.
        let written = self.journal.take_written(true);
        let ended = ended.and_then(|ended| written.map(|()| ended));
        let told = self.journal.end(&ended);
        self.journal.progress.enter(Phase::Done, self.journal.position.step);
        let (reason, evaluation) = ended?;
        told?;
        Ok(Outcome { reason, step: self.steps_done(), evaluation, run: self.run_dir().path().to_owned() })
    }

    fn epochs(&mut self) -> Result<(Reason, Option<Tally>), TrainError> {
        let mut evaluation = None;
        loop {
            let ended = if self.journal.awaits_evaluation() { None } else { self.epoch()? };
            self.journal.record_damage(&self.train.dataset().damaged())?;
            self.settle()?;
            // Workers that step by themselves may hear here of one that stopped elsewhere in the epoch.
            let ended = ended.or_else(|| self.journal.ends_inside_epoch(self.replica.votes()));
            if let Some(reason) = ended {
                return self.end_between(reason, evaluation);
            }
            if !self.journal.is_evaluation_due() {
                self.journal.end_epoch(None)?;
                // All decide by the wishes of all, which they had cast before they met.
                self.replica.vote(self.journal.votes());
                self.replica.total(Tally::default())?;
                match self.journal.ends_after_epoch(self.replica.votes()) {
                    None => continue,
                    Some(reason) => return self.end_between(reason, evaluation),
                }
            }
            let Some(tally) = self.evaluate()? else {
                // The epoch's end is saved, and a resumed run evaluates first.
                self.journal.save(&mut self.replica, false)?;
                return Ok((Reason::Interrupted, evaluation));
            };
            let best = self.journal.end_epoch(Some(&tally))?;
            evaluation = Some(tally);
            self.journal.save(&mut self.replica, best)?;
            if let Some(reason) = self.journal.ends_after_epoch(self.replica.votes()) {
                return Ok((reason, evaluation));
            }
        }
    }

    /// Ends a run that does not stand at an evaluation. One that a limit ends is evaluated there; it is saved before, since whoever set
    /// the limit may not wait for that.
    fn end_between(
        &mut self,
        reason: Reason,
        evaluation: Option<Tally>,
    ) -> Result<(Reason, Option<Tally>), TrainError> {
        self.journal.save(&mut self.replica, false)?;
        if !matches!(reason, Reason::MaxSteps | Reason::TimeLimit) || self.journal.is_rehearsal() {
            return Ok((reason, evaluation));
        }
        let Some(tally) = self.evaluate()? else { return Ok((Reason::Interrupted, evaluation)) };
        let best = self.journal.end_between(&tally)?;
        self.journal.save(&mut self.replica, best)?;
        Ok((reason, Some(tally)))
    }

    /// Evaluates, together with the other ranks; none if somebody was asked to stop meanwhile: half an evaluation is no evaluation.
    fn evaluate(&mut self) -> Result<Option<Tally>, TrainError> {
        let stop = self.journal.stop.clone();
        self.journal.progress.enter(Phase::Evaluate, self.journal.position.step);
        if self.evaluates_portions() {
            return self.evaluate_in_portions();
        }
        let mirrored = self.journal.config.evaluate_mirrored;
        let tally = match evaluate(&mut self.replica, &mut self.val, mirrored, |_, _| !stop.requested()) {
            Err(TrainError::Data(DataError::Interrupted { .. })) => Tally::default(),
            tally => tally?,
        };
        self.replica.vote(self.journal.votes());
        let tally = self.replica.total(tally)?;
        Ok((self.replica.votes().interrupted == 0).then_some(tally))
    }

    /// Trains to the end of the current epoch; a reason says that the run ends inside it.
    fn epoch(&mut self) -> Result<Option<Reason>, TrainError> {
        if self.takes_portions() {
            return if self.replica.gathers() { self.epoch_gathered() } else { self.epoch_in_portions() };
        }
        let Self { replica, train, val, journal, .. } = self;
        let (learning_rate, clock) = (journal.config.learning_rate.clone(), journal.clock.clone());
        let progress = journal.progress.clone();
        let rules = Rules {
            learning_rate: &learning_rate,
            length: journal.length,
            clock: &clock,
            progress: &progress,
            repeats: false,
        };
        let per_epoch = journal.length.steps_per_epoch;
        let done = journal.position.step;
        let mut epoch = train.epoch(done / per_epoch, (done % per_epoch) as usize);
        let mut speed = Speed::default();
        loop {
            replica.vote(journal.votes());
            let stepped = match step(replica, &mut epoch, journal.position.step, &rules) {
                // Ctrl-C while the data did not come: the position is that of the last whole step.
                Err(TrainError::Data(DataError::Interrupted { .. })) => return Ok(Some(Reason::Interrupted)),
                stepped => stepped?,
            };
            let Some(stepped) = stepped else { return Ok(None) };
            let Stepped { event, tally, own, not_finite, .. } = stepped;
            if let Some((batch, what)) = not_finite {
                journal.record(event)?;
                drop(epoch);
                let batch = train.with_images(done / per_epoch, batch)?;
                return Err(not_a_number(replica, &batch, what, journal));
            }
            speed.add(&event, own);
            journal.after_step(event, &tally)?;
            if replica.is_alone() {
                replica.vote(journal.votes());
            }
            if let Some(reason) = journal.ends_inside_epoch(replica.votes()) {
                return Ok(Some(reason));
            }
            if let Some(how) = journal.checkpoint_due(replica.votes()) {
                settle(replica, journal)?;
                match how {
                    Save::Now => journal.save(replica, false)?,
                    Save::Beside => journal.save_beside(replica)?,
                }
                if let Some(reason) = journal.ends_inside_epoch(replica.votes()) {
                    return Ok(Some(reason));
                }
            }
            let done = journal.position.step;
            if let Some(shares) = speed.shares(&journal.config, done, replica)? {
                journal.balanced(&shares)?;
                drop(epoch);
                train.share_by(&shares.samples);
                if val.batch() == train.batch() {
                    val.share_by(&shares.samples);
                }
                epoch = train.epoch((done - 1) / per_epoch, ((done - 1) % per_epoch) as usize + 1);
            }
        }
    }
}

impl Trainer {
    fn settle(&mut self) -> Result<(), TrainError> {
        settle(&mut self.replica, &mut self.journal)
    }
}

/// Waits for the last gradients of all ranks, and tells what the steps until here had missed.
fn settle(replica: &mut Replica, journal: &mut Journal) -> Result<(), TrainError> {
    journal.record_missed(replica.take_missed())?;
    replica.settle()?.map_err(|seen| {
        let layer = match seen {
            NotFinite::Loss => "loss".to_owned(),
            NotFinite::Gradient(index) => replica.parameters[index].name.clone(),
        };
        journal.not_a_number(journal.position.step, layer, "gradient")
    })
}

/// The folder of a new run: rank 0 makes it and says where it is, the others join.
fn make(around: &Surroundings, asked: Option<&Path>, config: &Config) -> Result<RunDir, TrainError> {
    if around.rank() == 0 {
        let run = RunDir::create(&around.disk, asked, config)?;
        let id = read_id(&around.disk, run.path()).unwrap_or_default();
        around.folder.send(&RunFolder { path: run.path().to_owned(), id })?;
        return Ok(run);
    }
    match (around.folder.receive()?, asked) {
        (Some(RunFolder { path, id }), _) => RunDir::join_run(&around.disk, &path, &id),
        (None, Some(path)) => RunDir::join(&around.disk, path),
        (None, None) => {
            Err(TrainError::Refused("a rank above 0 does not know the folder of the run; give all the same one".into()))
        }
    }
}

/// A run that goes on.
struct Reopened {
    run: RunDir,
    config: Config,
    /// The checkpoint to go on from, if not the newest.
    checkpoint: Option<PathBuf>,
    /// As the run's configuration had it.
    epochs_before: u64,
    notes: Vec<String>,
}

impl Reopened {
    /// The configuration to prepare the run with: its checkpoint holds the weights, so the file that it started from need not be there
    /// any more.
    fn without_weights(&self, around: &Surroundings) -> Result<Config, TrainError> {
        let saved = Checkpoints::new(&around.disk, self.run.checkpoints()).last()?.is_some();
        let weights = self.config.weights.clone().filter(|_| !saved);
        Ok(Config { weights, ..self.config.clone() })
    }
}

/// Opens a run's folder and applies a change to its configuration that does not move the ground under its checkpoint.
fn reopen(path: &Path, around: &Surroundings, change: impl FnOnce(&mut Config)) -> Result<Reopened, TrainError> {
    let ResumeFrom { run: path, checkpoint } = ResumeFrom::find(&around.disk, path);
    let path = path.as_path();
    let (run, before) = match around.rank() {
        0 => {
            let opened = RunDir::open(&around.disk, path)?;
            // Workers know it already; servers do not.
            let id = read_id(&around.disk, path).unwrap_or_default();
            around.folder.send(&RunFolder { path: path.to_owned(), id })?;
            opened
        }
        _ => (RunDir::join(&around.disk, path)?, read_config(&around.disk, path)?),
    };
    let mut config = before.clone();
    change(&mut config);
    let changed = [
        ("--model", config.model != before.model),
        ("--data", config.data != before.data),
        ("--size", config.size != before.size),
        ("--sequence", config.sequence != before.sequence),
        ("--classes", config.classes != before.classes),
        ("--batch", config.batch != before.batch),
        ("--accumulate", config.accumulate != before.accumulate),
        ("--last-batch", config.last_batch != before.last_batch),
        ("--augment", config.augment != before.augment),
        ("--mean or --std", config.mean != before.mean || config.std != before.std),
        ("--label-smoothing", config.label_smoothing != before.label_smoothing),
        ("--seed", config.seed != before.seed),
        ("--optimizer", config.optimizer != before.optimizer),
        ("--weights", config.weights != before.weights),
        ("--except", config.weights_except != before.weights_except),
    ];
    if let Some((flag, _)) = changed.iter().find(|(_, changed)| *changed) {
        return Err(TrainError::Refused(format!(
            "{flag} cannot change in the middle of a run; leave it out, or start a new run: paceline train --weights {}",
            quote(&path.display().to_string())
        )));
    }
    let learning = |config: &Config| (config.learning_rate.clone(), config.hyper_parameters, config.clip_norm);
    let mut notes = Vec::new();
    if learning(&config) != learning(&before) {
        let note = "the learning rate, momentum, weight decay or clipping changed here; config.toml has the new ones";
        notes.push(note.to_owned());
    }
    if config.dtype != before.dtype {
        notes.push(format!("activations are {} from here on, and were {}", config.dtype, before.dtype));
    }
    Ok(Reopened { run, config, checkpoint, epochs_before: before.epochs, notes })
}

fn not_a_number(replica: &mut Replica, batch: &Batch, seen: NotFinite, journal: &Journal) -> TrainError {
    let step = journal.position.step;
    let (layer, op) = replica.find_non_finite(batch, step, seen);
    journal.not_a_number(step + 1, layer, op)
}
