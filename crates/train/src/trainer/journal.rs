//! What a run remembers and tells: its position, events, checkpoints and limits. No arithmetic of the model.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use paceline_comm::CommError;
use paceline_data::folder::Damage;
use paceline_nn::schedule::RunLength;
use paceline_parallel::agree::Votes;
use paceline_system::clock::{self, Clock};
use paceline_system::disk::{Disk, DiskError};
use paceline_system::event::{Event, EventLog, SCHEMA_VERSION};
use paceline_system::host::{self, Host};
use paceline_system::inbox::Inbox;
use paceline_system::phase::{Phase, PhaseTimes};
use paceline_system::printable::Shown;
use paceline_system::progress::Progress;
use paceline_system::shell::quote;
use paceline_system::signal::Stop;
use paceline_tensor::device::cuda::Cuda;

use super::gauge::Gauge;
use super::saving::{Saver, Written};
use super::{Observer, Reason, Restarts, Surroundings};
use crate::checkpoint::{Card, Checkpoints, Contents, Evaluated, Label, Others, Position, Purpose, hand_in};
use crate::config::Config;
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::rehearsal::Rehearsal;
use crate::replica::Replica;
use crate::run::{RunDir, read_id};

/// What a loss that is not a number usually calls for.
const LEARN_SLOWER: &str = "Try a smaller learning rate (--lr), a warm-up (--warmup-epochs) or --clip-norm 1";

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Save {
    /// Before the next step.
    Now,
    /// While steps go on.
    Beside,
}

pub(super) struct Journal {
    pub config: Config,
    pub clock: Clock,
    pub stop: Stop,
    pub progress: Progress,
    /// What other threads tell.
    inbox: Inbox,
    pub run: RunDir,
    pub checkpoints: Checkpoints,
    pub length: RunLength,
    pub position: Position,
    /// Where the run stood one step before.
    pub previous: Option<Position>,
    pub observers: Vec<Observer>,
    /// Only rank 0 saves.
    pub(super) rank: usize,
    worker: usize,
    disk: Disk,
    card: Card,
    log: EventLog,
    /// What the run's checkpoints are marked with.
    id: String,
    /// The position of the newest checkpoint.
    saved: Option<Position>,
    /// Writes checkpoints beside training.
    saver: Saver,
    /// Seconds after which to save, and when it was last done.
    save_every_s: Option<f64>,
    saved_at_s: f64,
    /// The file or folder that the weights came from, and the step at which they did.
    loaded: Option<(PathBuf, u64)>,
    /// How often the run was started again.
    restarts: Restarts,
    /// Damaged samples that were told of already.
    damage_told: usize,
    /// When it was last told what steps had missed.
    missed_told_s: f64,
    /// How long the run goes on, if it is made to be timed.
    rehearsal: Option<Rehearsal>,
    /// How the stages or parts compute together, to be told at the beginning.
    pub pipeline: Option<Event>,
    /// The name of the GPU, and what looks at it.
    gpu: Option<(String, Option<Gauge>)>,
}

impl Journal {
    pub fn open(
        config: Config,
        around: Surroundings,
        card: Card,
        run: RunDir,
        (length, samples): (RunLength, u64),
    ) -> Result<Self, TrainError> {
        let rank = around.rank();
        let Surroundings { disk, clock, stop, shard, progress, inbox, restarts, stage, part, rehearsal, .. } = around;
        let checkpoints = Checkpoints::new(&disk, run.checkpoints());
        // The folder is made, so this is no refusal any more.
        let log = EventLog::open(&disk, clock.clone(), run.path(), rank as u32).map_err(|source| {
            let (step, survivor, run) = (0, checkpoints.survivor(), run.path().to_owned());
            TrainError::EventNotWritten { step, source, survivor, run }
        })?;
        let (id, save_every_s) =
            (read_id(&disk, run.path()), config.checkpoint_seconds(shard.world * stage.world * part.world));
        Ok(Self {
            id: id.unwrap_or_default(),
            saver: Saver::default(),
            save_every_s,
            saved_at_s: clock.seconds(),
            loaded: config.weights.as_ref().map(|file| (PathBuf::from(file), 0)),
            config,
            clock,
            stop,
            progress,
            inbox,
            run,
            checkpoints,
            length,
            position: Position { samples, ..Position::default() },
            previous: None,
            observers: Vec::new(),
            rank,
            worker: shard.rank,
            disk,
            card,
            log,
            saved: None,
            restarts,
            damage_told: 0,
            missed_told_s: 0.0,
            gpu: None,
            pipeline: None,
            rehearsal,
        })
    }

    /// Looks at the GPU that the run computes on, if it does, from now on.
    pub fn watch_gpu(&mut self, gpu: Option<&Cuda>) {
        self.gpu = gpu.map(|gpu| (gpu.name().to_owned(), Gauge::of_gpu(gpu.bus(), &self.clock)));
    }

    /// Loads the checkpoint that was asked for, or the newest, and keeps the configuration as it was changed; the run had so many epochs
    /// before. Returns what the user should know.
    pub fn resume(
        &mut self,
        replica: &mut Replica,
        chosen: Option<PathBuf>,
        epochs_before: u64,
    ) -> Result<Vec<String>, TrainError> {
        if self.rank == 0 {
            self.checkpoints.clean_up()?;
        }
        let (is_chosen, newest) = (chosen.is_some(), self.checkpoints.last()?);
        let mut notes = Vec::new();
        let mut named = None;
        if let Some(path) = chosen.or(newest) {
            self.load(&path, replica, epochs_before)?;
            named = self.checkpoints.run_of(&path);
            if named.is_none() {
                notes.push(format!("{} has no manifest, so nothing tells whether it is whole", path.display()));
            }
        }
        if self.position.step >= self.steps_total() && !self.awaits_evaluation() {
            let step = self.position.step;
            let flag = if step < self.length.total_steps { "--max-steps" } else { "--epochs" };
            return Err(TrainError::Refused(format!(
                "this run is done ({step} steps); type a higher {flag} to train it longer"
            )));
        }
        if self.rank > 0 {
            return Ok(Vec::new());
        }
        self.id = self.run.ensure_id(&self.disk, named)?;
        if is_chosen {
            let aside = self.checkpoints.set_aside_after(self.position.step)?;
            notes.extend(
                aside.iter().map(|path| {
                    format!("{} is kept and no longer used: the run goes on from before it", path.display())
                }),
            );
        }
        if let Some(best) = self.position.best() {
            self.checkpoints.mark_best(best.step)?;
        }
        self.disk.write(&self.run.config_path(), self.config.to_toml().as_bytes())?;
        Ok(notes)
    }

    fn load(&mut self, path: &Path, replica: &mut Replica, epochs_before: u64) -> Result<(), TrainError> {
        let samples = self.position.samples;
        self.position = self.checkpoints.load(path, replica)?;
        self.saved = Some(self.position.clone());
        self.loaded = Some((path.to_owned(), self.position.step));
        let (step, epochs) = (self.position.step, self.config.epochs.max(epochs_before));
        let most = epochs.saturating_mul(self.length.steps_per_epoch);
        if step > most {
            return Err(TrainError::Damaged {
                what: format!(
                    "{} is of step {step}, and the run that config.toml describes has {most}",
                    path.display()
                ),
                offer: self.checkpoints.offer(path, Purpose::Resume),
            });
        }
        if self.position.samples != samples {
            return Err(TrainError::Refused(format!(
                "{} had {} training samples when this run stopped and has {samples} now, so its order is another; \
                 restore the data, or start a new run: paceline train --weights {}",
                self.config.data,
                self.position.samples,
                quote(&self.run.path().display().to_string())
            )));
        }
        Ok(())
    }

    pub fn steps_total(&self) -> u64 {
        self.config.max_steps.unwrap_or(u64::MAX).min(self.length.total_steps)
    }

    /// Logs an event and tells it to everybody who listens.
    pub fn record(&mut self, event: Event) -> Result<(), TrainError> {
        let Self { log, observers, gpu, clock, inbox, .. } = self;
        let now = clock.seconds();
        let seen = gpu.iter().filter_map(|(_, gauge)| gauge.as_ref()).flat_map(Gauge::take);
        let seen = seen.map(|(time_s, seen)| (time_s, Event::Gpu(seen)));
        let others = inbox.take().into_iter().map(|(age_s, event)| ((now - age_s).max(0.0), event));
        let told = seen.chain(others).chain([(now, event)]).try_for_each(|(time_s, event)| {
            let line = log.write_at(time_s, event)?;
            observers.iter_mut().try_for_each(|observer| observer(&line))
        });
        told.map_err(|source| {
            let (step, survivor) = (self.position.step, self.checkpoints.survivor());
            let run = self.run.path().to_owned();
            self.gone(&source).unwrap_or(TrainError::EventNotWritten { step, source, survivor, run })
        })
    }

    /// The error for a folder that was taken away, if that is what happened: the disk is not to blame then.
    fn gone(&self, error: &DiskError) -> Option<TrainError> {
        if error.source.kind() != ErrorKind::NotFound {
            return None;
        }
        let folders = [self.run.path().to_owned(), self.run.path().join("events"), self.run.checkpoints()];
        let gone = folders.into_iter().find(|folder| !self.disk.is_dir(folder));
        Some(TrainError::Gone { path: gone.unwrap_or_else(|| error.path.clone()), step: self.position.step })
    }

    /// The error for a result that is not a number. Right behind weights that came from a file, the file is to be looked at first.
    pub fn not_a_number(&self, step: u64, layer: String, op: &str) -> TrainError {
        let advice = match &self.loaded {
            Some((file, at)) if step <= at + 1 => format!(
                "It is the first step after {} was loaded, so look at that file and at the data before anything else",
                file.display()
            ),
            _ => LEARN_SLOWER.to_owned(),
        };
        TrainError::NotANumber { step, layer, op: op.to_owned(), survivor: self.checkpoints.survivor(), advice }
    }

    pub fn begin(&mut self, parameters: u64, notes: Vec<String>) -> Result<(), TrainError> {
        self.record(Event::RunStarted {
            schema: SCHEMA_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            unix_s: clock::unix_seconds(),
            model: self.config.model.clone(),
            data: self.config.data.clone(),
            parameters,
            resumed_step: self.position.step,
            steps_total: self.steps_total(),
            host: Host { gpu: self.gpu.as_ref().map(|(name, _)| name.clone()), ..Host::look() },
            config: self.config.to_toml(),
        })?;
        if let Some(event) = self.pipeline.take() {
            self.record(event)?;
        }
        let (step, Restarts { number, most, .. }) = (self.position.step, self.restarts);
        if number > 0 {
            self.record(Event::Restarted { step, number, most })?;
        }
        notes.into_iter().try_for_each(|message| self.record(Event::Warning { message }))
    }

    pub fn end(&mut self, ended: &Result<(Reason, Option<Tally>), TrainError>) -> Result<(), TrainError> {
        let (reason, error) = match ended {
            Ok((reason, _)) => (reason.name(), None),
            Err(error) => ("failed", Some(error.to_string())),
        };
        self.record(Event::RunFinished {
            step: self.position.step,
            reason: reason.to_owned(),
            error,
            seconds: self.clock.seconds(),
            peak_memory_bytes: host::peak_memory_bytes(),
        })
    }

    pub fn after_step(&mut self, event: Event, tally: &Tally) -> Result<(), TrainError> {
        self.previous = Some(self.position.clone());
        self.position.step += 1;
        self.position.tally.merge(tally);
        if let Some(rehearsal) = &mut self.rehearsal {
            rehearsal.stepped(self.clock.seconds());
        }
        if let Event::Step { seconds, phases, .. } = &event {
            self.position.epoch_s += seconds;
            self.position.data_wait_s += phases.get(Phase::Data).unwrap_or(0.0);
        }
        self.record(event)?;
        self.take_written(false)
    }

    /// Tells the epoch's figures and starts the next one's; whether the accuracy is the best so far.
    pub fn end_epoch(&mut self, evaluation: Option<&Tally>) -> Result<bool, TrainError> {
        let Position { step, tally, epoch_s, data_wait_s, best_top1, .. } = self.position.clone();
        let whole = self.length.steps_per_epoch * self.config.batch as u64;
        let samples = whole.min(self.position.samples) as f64;
        let top1 = evaluation.map(Tally::accuracy);
        let rises = top1.is_some_and(|top1| best_top1.is_none_or(|best| top1 > best));
        let best = top1.is_some_and(|top1| self.position.is_best(top1));
        self.record(Event::Epoch {
            epoch: step / self.length.steps_per_epoch - 1,
            step,
            train_loss: tally.mean_loss(),
            train_accuracy: tally.accuracy(),
            val_loss: evaluation.map(Tally::mean_loss),
            val_top1: top1,
            val_top5: evaluation.map(Tally::top5_accuracy),
            seconds: epoch_s,
            samples_per_s: samples / epoch_s.max(1e-9),
            data_wait_s,
        })?;
        self.position = Position {
            step,
            best_top1: if rises { top1 } else { best_top1 },
            best_step: if rises { Some(step) } else { self.position.best_step },
            best_between: self.position.best_between,
            stale_epochs: if rises { 0 } else { self.position.stale_epochs + u64::from(top1.is_some()) },
            samples: self.position.samples,
            ..Position::default()
        };
        // Of an epoch that is over at once there is nothing to gain.
        if data_wait_s > 0.1 * epoch_s && data_wait_s > 0.5 {
            let epoch = step / self.length.steps_per_epoch;
            let message = format!(
                "training waited {data_wait_s:.1} s of {epoch_s:.1} s for data in epoch {epoch}; more --loader-threads may help"
            );
            self.record(Event::Warning { message })?;
        }
        Ok(best)
    }

    /// Tells of an evaluation where a limit ends the run between those of epochs; whether the accuracy is the best so far. The epoch's
    /// figures go on from here when the run does.
    pub fn end_between(&mut self, evaluation: &Tally) -> Result<bool, TrainError> {
        let (step, top1) = (self.position.step, evaluation.accuracy());
        self.record(Event::Evaluated {
            epoch: step.saturating_sub(1) / self.length.steps_per_epoch,
            step,
            val_loss: evaluation.mean_loss(),
            val_top1: top1,
            val_top5: evaluation.top5_accuracy(),
        })?;
        let best = self.position.is_best(top1);
        if best {
            self.position.best_between = Some(Evaluated { top1, step });
        }
        Ok(best)
    }

    /// Tells what this worker's own steps had missed since the last time, where it can tell.
    pub fn record_missed(&mut self, counts: Vec<u64>) -> Result<(), TrainError> {
        if counts.is_empty() {
            return Ok(());
        }
        let seconds = self.clock.seconds() - self.missed_told_s;
        self.missed_told_s += seconds;
        self.record(Event::Served {
            step: self.position.step,
            seconds,
            phases: PhaseTimes::default(),
            waited: BTreeMap::new(),
            missed: BTreeMap::from([(self.worker.to_string(), counts)]),
        })
    }

    /// Tells of damaged samples that were skipped since the last time.
    pub fn record_damage(&mut self, damaged: &[Damage]) -> Result<(), TrainError> {
        for (index, damage) in damaged.iter().enumerate().skip(self.damage_told) {
            let (count, file, problem) = (index + 1, Shown(&damage.file), &damage.problem);
            self.record(Event::Warning { message: format!("skipped {file}, damaged ({problem}); {count} so far") })?;
        }
        self.damage_told = self.damage_told.max(damaged.len());
        Ok(())
    }

    /// Whether the run is started again by itself after a failure.
    pub fn starts_again(&self) -> bool {
        self.restarts.number < self.restarts.most
    }

    /// Whether an epoch is trained and not evaluated: where a run stands that was interrupted at just that moment.
    pub fn awaits_evaluation(&self) -> bool {
        self.position.tally.rows > 0 && self.position.step.is_multiple_of(self.length.steps_per_epoch)
    }

    /// Whether the run is made to be timed: it is neither evaluated nor saved.
    pub fn is_rehearsal(&self) -> bool {
        self.rehearsal.is_some()
    }

    /// Whether the epoch that is trained is one after which the run is evaluated and saved.
    pub fn is_evaluation_due(&self) -> bool {
        if self.is_rehearsal() {
            return false;
        }
        let step = self.position.step;
        let epoch = step / self.length.steps_per_epoch;
        epoch.is_multiple_of(self.config.evaluate_every) || step >= self.steps_total()
    }

    /// Whether the run is to be saved after a step that is not an epoch's last, and how.
    pub fn checkpoint_due(&self, votes: Votes) -> Option<Save> {
        let step = self.position.step;
        if step.is_multiple_of(self.length.steps_per_epoch) {
            return None;
        }
        let counted = self.config.checkpoint_every.is_some_and(|every| step.is_multiple_of(every));
        if counted { Some(Save::Now) } else { (votes.checkpoint > 0).then_some(Save::Beside) }
    }

    /// Saves the run where it stands, unless that was done already.
    pub fn save(&mut self, replica: &mut Replica, best: bool) -> Result<(), TrainError> {
        self.take_written(true)?;
        if self.is_rehearsal() || !self.begins_to_save(replica)? {
            return Ok(());
        }
        let (start, label) = (self.clock.seconds(), self.label(best));
        let collected = replica.with_siblings(|replica, links| {
            let others = Others::new(links);
            let folder = self.checkpoints.save(&Contents::of_all(replica, &others), &label);
            others.failure().map_or(Ok(folder), Err)
        });
        let folder = match collected {
            Some(collected) => collected?,
            None => self.checkpoints.save(&Contents::of(replica), &label),
        };
        let seconds = self.clock.seconds() - start;
        self.record_written(Written { position: label.position, best, folder, seconds })
    }

    /// As [`Journal::save`] when other ranks are lost and nothing more is trained; or why it was not saved. Another rank than 0 takes over
    /// the folder, if the run is kept here too.
    pub fn save_after_loss(&mut self, replica: &mut Replica) -> Result<Result<(), &'static str>, TrainError> {
        let step = self.position.step;
        if self.rank > 0 && !self.run.take_over(&self.disk) {
            return Ok(Err("the run is not kept on this machine, or rank 0 still holds it"));
        }
        if self.checkpoints.list()?.iter().any(|(saved, _)| *saved == step) {
            return Ok(Ok(()));
        }
        if replica.spoiled_tensor().is_some() {
            return Ok(Err("the weights are not numbers"));
        }
        self.id = read_id(&self.disk, self.run.path()).unwrap_or_default();
        let (start, label) = (self.clock.seconds(), self.label(false));
        let folder = self.checkpoints.save(&Contents::of(replica), &label);
        let seconds = self.clock.seconds() - start;
        self.record_written(Written { position: label.position, best: false, folder, seconds })?;
        Ok(Ok(()))
    }

    /// As [`Journal::save`], while training goes on.
    pub fn save_beside(&mut self, replica: &mut Replica) -> Result<(), TrainError> {
        // No stage or part has a copy of the others' tensors; chunks of the optimizer's state are gathered as they are written, which all replicas
        // wait for.
        if replica.whole.is_some() || replica.has_shard() {
            return self.save(replica, false);
        }
        // By rank 0's vote none is under way; on the other ranks none ever is.
        self.take_written(true)?;
        if !self.begins_to_save(replica)? {
            return Ok(());
        }
        let label = self.label(false);
        match self.saver.begin(&self.checkpoints, replica, label, &self.clock) {
            Ok(()) => Ok(()),
            // Without memory or a thread for it, it is written here.
            Err(_) => self.save(replica, false),
        }
    }

    /// Whether there is anything to save, and whether this rank does it: a look at every number comes first.
    fn begins_to_save(&mut self, replica: &mut Replica) -> Result<bool, TrainError> {
        if self.saved.as_ref() == Some(&self.position) {
            return Ok(false);
        }
        let step = self.position.step;
        replica.engine.fetch()?;
        if let Some(layer) = replica.spoiled_tensor() {
            return Err(self.not_a_number(step, layer, "parameter"));
        }
        self.progress.enter(Phase::Checkpoint, step);
        if self.rank > 0 {
            self.saved = Some(self.position.clone());
            // The first worker's other stages or parts have some of what is saved; others may have chunks of the optimizer's state.
            if self.worker == 0 {
                replica.with_siblings(hand_in).transpose()?;
            } else {
                replica.give_optimizer()?;
            }
            return Ok(false);
        }
        self.saved_at_s = self.clock.seconds();
        Ok(true)
    }

    fn label(&self, best: bool) -> Label {
        let card = Card { step: self.position.step, ..self.card.clone() };
        Label { run: self.id.clone(), position: self.position.clone(), card, best, keep: self.config.keep }
    }

    /// Tells of a checkpoint that was written beside training, if there is one by now, or waits for it.
    pub fn take_written(&mut self, wait: bool) -> Result<(), TrainError> {
        self.saver.take(wait).map_or(Ok(()), |written| self.record_written(written))
    }

    fn record_written(&mut self, written: Written) -> Result<(), TrainError> {
        let Written { position, best, folder, seconds } = written;
        let step = position.step;
        let path = folder.map_err(|mut source| {
            // A tensor that another rank did not give is no fault of the disk.
            source.source = match source.source.downcast::<CommError>() {
                Ok(error) => return error.into(),
                Err(source) => source,
            };
            let (survivor, run) = (self.checkpoints.survivor(), self.run.path().to_owned());
            self.gone(&source).unwrap_or(TrainError::CheckpointNotSaved { step, source, survivor, run })
        })?;
        self.saved = Some(position);
        let path = path.strip_prefix(self.run.path()).unwrap_or(&path).display().to_string();
        self.record(Event::Checkpoint { step, path, best, seconds })
    }

    /// Whether the run ends after a step that is not an epoch's last.
    pub fn ends_inside_epoch(&self, votes: Votes) -> Option<Reason> {
        let at_epoch_end = self.position.step.is_multiple_of(self.length.steps_per_epoch);
        self.limit(votes).filter(|reason| !at_epoch_end || *reason == Reason::Interrupted)
    }

    /// Whether the run ends after an epoch and its evaluation.
    pub fn ends_after_epoch(&self, votes: Votes) -> Option<Reason> {
        if self.position.step >= self.length.total_steps {
            return Some(Reason::Done);
        }
        let stale = self.config.early_stop.is_some_and(|patience| self.position.stale_epochs >= patience);
        if stale { Some(Reason::EarlyStop) } else { self.limit(votes) }
    }

    /// What this rank would end the run for, or save it.
    pub fn votes(&self) -> Votes {
        let spent_s = self.restarts.spent_s + self.clock.seconds();
        let rehearsed = |rehearsal: &Rehearsal| rehearsal.is_over(self.position.step, self.clock.seconds());
        let over = self.config.time_limit_s.is_some_and(|seconds| spent_s >= seconds)
            || self.rehearsal.as_ref().is_some_and(rehearsed);
        let unsaved_s = self.clock.seconds() - self.saved_at_s;
        let due = self.rank == 0 && !self.saver.is_busy() && self.save_every_s.is_some_and(|most| unsaved_s >= most);
        let interrupted = self.stop.requested();
        Votes { interrupted: interrupted.into(), time_limit: over.into(), checkpoint: due.into() }
    }

    pub(super) fn limit(&self, votes: Votes) -> Option<Reason> {
        if votes.interrupted > 0 {
            Some(Reason::Interrupted)
        } else if self.position.step >= self.steps_total() {
            Some(Reason::MaxSteps)
        } else if votes.time_limit > 0 {
            Some(Reason::TimeLimit)
        } else {
            None
        }
    }
}
