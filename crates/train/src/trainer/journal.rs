//! What a run remembers and tells: its position, events, checkpoints and limits. No arithmetic of the model.

use paceline_data::folder::Damage;
use paceline_nn::schedule::RunLength;
use paceline_system::clock::{self, Clock};
use paceline_system::disk::Disk;
use paceline_system::event::{Event, EventLog, SCHEMA_VERSION};
use paceline_system::host::{self, Host};
use paceline_system::signal::Stop;
use paceline_tensor::device::cuda::Cuda;

use super::gauge::Gauge;
use super::{Observer, Reason, Surroundings, Watch};
use crate::checkpoint::{Card, Checkpoints, Position};
use crate::config::Config;
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::replica::{Replica, Votes};
use crate::run::RunDir;

pub(super) struct Journal {
    pub config: Config,
    pub clock: Clock,
    pub stop: Stop,
    pub watch: Watch,
    pub run: RunDir,
    pub checkpoints: Checkpoints,
    pub length: RunLength,
    pub position: Position,
    pub observers: Vec<Observer>,
    /// Only rank 0 saves.
    rank: usize,
    disk: Disk,
    card: Card,
    log: EventLog,
    /// The position of the newest checkpoint.
    saved: Option<Position>,
    /// Damaged samples that were told of already.
    damage_told: usize,
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
        let Surroundings { disk, clock, stop, shard, watch, .. } = around;
        let log = EventLog::open(&disk, clock.clone(), run.path(), shard.rank as u32)
            .map_err(|error| TrainError::Refused(format!("{error}; a run needs a folder that can be written")))?;
        let checkpoints = Checkpoints::new(&disk, run.checkpoints());
        Ok(Self {
            config,
            clock,
            stop,
            watch,
            run,
            checkpoints,
            length,
            position: Position { samples, ..Position::default() },
            observers: Vec::new(),
            rank: shard.rank,
            disk,
            card,
            log,
            saved: None,
            damage_told: 0,
            gpu: None,
        })
    }

    /// Looks at the GPU that the run computes on, if it does, from now on.
    pub fn watch_gpu(&mut self, gpu: Option<&Cuda>) {
        self.gpu = gpu.map(|gpu| (gpu.name().to_owned(), Gauge::of_gpu(gpu.bus(), &self.clock)));
    }

    /// Loads the newest checkpoint, and keeps the configuration as it was changed.
    pub fn resume(&mut self, replica: &mut Replica) -> Result<(), TrainError> {
        if let Some(path) = self.checkpoints.last()? {
            let samples = self.position.samples;
            self.position = self.checkpoints.load(&path, replica)?;
            self.saved = Some(self.position.clone());
            if self.position.samples != samples {
                return Err(TrainError::Refused(format!(
                    "{} had {} training samples when this run stopped and has {samples} now, so its order is another; \
                     restore the data, or start a new run: paceline train --weights {}",
                    self.config.data,
                    self.position.samples,
                    self.run.path().display()
                )));
            }
            if let Some(step) = self.position.best_step.filter(|_| self.rank == 0) {
                self.checkpoints.mark_best(step)?;
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
            return Ok(());
        }
        Ok(self.disk.write(&self.run.config_path(), self.config.to_toml().as_bytes())?)
    }

    pub fn steps_total(&self) -> u64 {
        self.config.max_steps.unwrap_or(u64::MAX).min(self.length.total_steps)
    }

    /// Logs an event and tells it to everybody who listens.
    pub fn tell(&mut self, event: Event) -> Result<(), TrainError> {
        let Self { log, observers, gpu, clock, .. } = self;
        let seen = gpu.iter().filter_map(|(_, gauge)| gauge.as_ref()).flat_map(Gauge::take);
        let seen = seen.map(|(time_s, seen)| (time_s, Event::Gpu(seen)));
        let told = seen.chain([(clock.seconds(), event)]).try_for_each(|(time_s, event)| {
            let line = log.write_at(time_s, event)?;
            observers.iter_mut().try_for_each(|observer| observer(&line))
        });
        told.map_err(|source| {
            let (step, survivor) = (self.position.step, self.checkpoints.survivor());
            TrainError::EventNotWritten { step, source, survivor, run: self.run.path().to_owned() }
        })
    }

    pub fn begin(&mut self, parameters: u64, notes: Vec<String>) -> Result<(), TrainError> {
        self.tell(Event::RunStarted {
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
        notes.into_iter().try_for_each(|message| self.tell(Event::Warning { message }))
    }

    pub fn end(&mut self, ended: &Result<(Reason, Option<Tally>), TrainError>) -> Result<(), TrainError> {
        let (reason, error) = match ended {
            Ok((reason, _)) => (reason.name(), None),
            Err(error) => ("failed", Some(error.to_string())),
        };
        self.tell(Event::RunFinished {
            step: self.position.step,
            reason: reason.to_owned(),
            error,
            seconds: self.clock.seconds(),
            peak_memory_bytes: host::peak_memory_bytes(),
        })
    }

    pub fn after_step(&mut self, event: Event, tally: &Tally) -> Result<(), TrainError> {
        self.position.step += 1;
        self.position.tally.merge(tally);
        if let Event::Step { seconds, phases, .. } = &event {
            self.position.epoch_s += seconds;
            self.position.data_wait_s += phases.get("data").copied().unwrap_or(0.0);
        }
        self.tell(event)
    }

    /// Tells the epoch's figures and starts the next one's; whether the accuracy is the best so far.
    pub fn end_epoch(&mut self, evaluation: Option<&Tally>) -> Result<bool, TrainError> {
        let Position { step, tally, epoch_s, data_wait_s, best_top1, .. } = self.position.clone();
        let samples = (self.length.steps_per_epoch * self.config.batch as u64) as f64;
        let top1 = evaluation.map(Tally::accuracy);
        let best = top1.is_some_and(|top1| best_top1.is_none_or(|best| top1 > best));
        self.tell(Event::Epoch {
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
            best_top1: if best { top1 } else { best_top1 },
            best_step: if best { Some(step) } else { self.position.best_step },
            stale_epochs: if best { 0 } else { self.position.stale_epochs + u64::from(top1.is_some()) },
            samples: self.position.samples,
            ..Position::default()
        };
        if data_wait_s > 0.1 * epoch_s {
            let epoch = step / self.length.steps_per_epoch;
            let message = format!(
                "training waited {data_wait_s:.1} s of {epoch_s:.1} s for data in epoch {epoch}; more --loader-threads may help"
            );
            self.tell(Event::Warning { message })?;
        }
        Ok(best)
    }

    /// Tells of damaged samples that were skipped since the last time.
    pub fn tell_damage(&mut self, damaged: &[Damage]) -> Result<(), TrainError> {
        for (index, damage) in damaged.iter().enumerate().skip(self.damage_told) {
            let (count, file, problem) = (index + 1, damage.file.display(), &damage.problem);
            self.tell(Event::Warning { message: format!("skipped {file}, damaged ({problem}); {count} so far") })?;
        }
        self.damage_told = self.damage_told.max(damaged.len());
        Ok(())
    }

    /// Whether an epoch is trained and not evaluated: where a run stands that was interrupted at just that moment.
    pub fn awaits_evaluation(&self) -> bool {
        self.position.tally.rows > 0 && self.position.step.is_multiple_of(self.length.steps_per_epoch)
    }

    /// Whether the epoch that is trained is one after which the run is evaluated and saved.
    pub fn is_evaluation_due(&self) -> bool {
        let step = self.position.step;
        let epoch = step / self.length.steps_per_epoch;
        epoch.is_multiple_of(self.config.evaluate_every) || step >= self.steps_total()
    }

    pub fn is_checkpoint_due(&self) -> bool {
        let at_epoch_end = self.position.step.is_multiple_of(self.length.steps_per_epoch);
        !at_epoch_end && self.config.checkpoint_every.is_some_and(|every| self.position.step.is_multiple_of(every))
    }

    /// Saves the run where it stands, unless that was done already.
    pub fn save(&mut self, replica: &mut Replica, best: bool) -> Result<(), TrainError> {
        let step = self.position.step;
        if self.saved.as_ref() == Some(&self.position) {
            return Ok(());
        }
        replica.fetch()?;
        if let Some(layer) = replica.spoiled_tensor() {
            let survivor = self.checkpoints.survivor();
            return Err(TrainError::NotANumber { step, layer, op: "parameter".to_owned(), survivor });
        }
        if self.rank > 0 {
            self.saved = Some(self.position.clone());
            return Ok(());
        }
        self.watch.enter("checkpoint", step);
        let start = self.clock.seconds();
        let card = Card { step, ..self.card.clone() };
        let path = self.checkpoints.save(replica, &self.position, &card, best, self.config.keep).map_err(|source| {
            let (survivor, run) = (self.checkpoints.survivor(), self.run.path().to_owned());
            TrainError::CheckpointNotSaved { step, source, survivor, run }
        })?;
        self.saved = Some(self.position.clone());
        let path = path.strip_prefix(self.run.path()).unwrap_or(&path).display().to_string();
        self.tell(Event::Checkpoint { step, path, best, seconds: self.clock.seconds() - start })
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

    /// What this rank would end the run for.
    pub fn votes(&self) -> Votes {
        let over = self.config.time_limit_s.is_some_and(|seconds| self.clock.seconds() >= seconds);
        Votes { interrupted: u32::from(self.stop.requested()), time_limit: u32::from(over) }
    }

    fn limit(&self, votes: Votes) -> Option<Reason> {
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
