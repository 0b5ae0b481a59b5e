//! What a server tells: its position for heartbeats, and its own event file, with a line about once a second.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use paceline_parallel::agree::Missed;
use paceline_system::clock::{self, Clock};
use paceline_system::disk::Disk;
use paceline_system::event::{Event, EventLog, SCHEMA_VERSION};
use paceline_system::host::{self, Host};
use paceline_system::phase::{Phase, PhaseTimes};
use paceline_system::progress::Progress;

use crate::config::Config;
use crate::error::TrainError;
use crate::run::RunDir;
use crate::trainer::RunFolder;

/// Between two lines.
const EVERY_S: f64 = 1.0;

type Waited = dyn Fn() -> BTreeMap<u32, Duration> + Send;

/// Tells of one server.
#[derive(Default)]
pub struct ServerJournal {
    progress: Progress,
    target: Option<Target>,
    /// Updates that the parameters contain.
    step: u64,
    /// Spent on them since the last line.
    updated_s: f64,
    /// How many steps of each worker had missed so many updates, since the last line.
    missed: BTreeMap<usize, Missed>,
}

/// Where lines go.
struct Target {
    log: EventLog,
    clock: Clock,
    config: Config,
    waited: Box<Waited>,
    /// What was waited in all when the last line was written, and when that was.
    told: BTreeMap<u32, Duration>,
    told_at_s: f64,
}

impl fmt::Debug for ServerJournal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerJournal").field("step", &self.step).finish_non_exhaustive()
    }
}

impl ServerJournal {
    /// For heartbeats alone.
    pub fn new(progress: &Progress) -> Self {
        Self { progress: progress.clone(), ..Self::default() }
    }

    /// And for the event file of this rank in the run's folder; `waited` knows how long it has waited for whom.
    ///
    /// # Errors
    /// When the folder holds another run, or cannot be made. Where only the file cannot be written, nothing is.
    pub fn write_to(
        mut self,
        (disk, folder): (&Disk, &RunFolder),
        rank: u32,
        config: &Config,
        waited: impl Fn() -> BTreeMap<u32, Duration> + Send + 'static,
    ) -> Result<Self, TrainError> {
        let run = RunDir::join_run(disk, &folder.path, &folder.id)?;
        let (clock, waited) = (Clock::real(), Box::new(waited));
        // As in `write`: workers do not wait for a server's log.
        let Ok(log) = EventLog::open(disk, clock.clone(), run.path(), rank) else { return Ok(self) };
        let (config, told) = (config.clone(), BTreeMap::new());
        self.target = Some(Target { log, clock, config, waited, told, told_at_s: 0.0 });
        Ok(self)
    }

    /// The server is ready for its first push.
    pub(super) fn begin(&mut self, parameters: u64, step: u64) {
        self.step = step;
        self.progress.enter(Phase::Exchange, step);
        self.write(|target| Event::RunStarted {
            schema: SCHEMA_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            unix_s: clock::unix_seconds(),
            model: target.config.model.clone(),
            data: target.config.data.clone(),
            parameters,
            resumed_step: step,
            steps_total: target.config.max_steps.unwrap_or(0),
            host: Host::look(),
            config: target.config.to_toml(),
        });
    }

    /// Changes weights in the step after so many.
    pub(super) fn update<T>(&mut self, step: u64, update: impl FnOnce() -> T) -> T {
        self.progress.enter(Phase::Update, step);
        let now = || self.target.as_ref().map_or(0.0, |target| target.clock.seconds());
        let start = now();
        let done = update();
        let end = now();
        self.step = self.step.max(step + 1);
        self.updated_s += end - start;
        self.progress.enter(Phase::Exchange, step);
        if self.target.as_ref().is_some_and(|target| end - target.told_at_s >= EVERY_S) {
            self.tell();
        }
        done
    }

    /// A worker's step is applied, which had missed so many updates.
    pub(super) fn stepped(&mut self, worker: usize, missed: u64) {
        if self.target.is_some() {
            self.missed.entry(worker).or_default().count(missed);
        }
    }

    /// The server is through, or could not go on.
    pub(super) fn end(&mut self, error: Option<String>) {
        self.tell();
        self.progress.enter(Phase::Done, self.step);
        let step = self.step;
        self.write(|target| Event::RunFinished {
            step,
            reason: if error.is_some() { "failed" } else { "done" }.to_owned(),
            error,
            seconds: target.clock.seconds(),
            peak_memory_bytes: host::peak_memory_bytes(),
        });
    }

    fn tell(&mut self) {
        let (step, updated_s) = (self.step, std::mem::take(&mut self.updated_s));
        let told = std::mem::take(&mut self.missed).into_iter();
        let missed = told.map(|(worker, mut missed)| (worker.to_string(), missed.take())).collect();
        self.write(|target| {
            let (now, waited) = (target.clock.seconds(), (target.waited)());
            let seconds = now - std::mem::replace(&mut target.told_at_s, now);
            let before = std::mem::replace(&mut target.told, waited.clone());
            let since = |(rank, all): (u32, Duration)| {
                let new = all.saturating_sub(before.get(&rank).copied().unwrap_or_default());
                (!new.is_zero()).then(|| (rank.to_string(), new.as_secs_f64()))
            };
            let phases = [(Phase::Exchange, (seconds - updated_s).max(0.0)), (Phase::Update, updated_s)];
            let phases: PhaseTimes = phases.into_iter().collect();
            Event::Served { step, seconds, phases, waited: waited.into_iter().filter_map(since).collect(), missed }
        });
    }

    /// Writes a line. A disk that refuses ends the lines and not the run, whose story the workers' files tell.
    fn write(&mut self, event: impl FnOnce(&mut Target) -> Event) {
        let Some(target) = &mut self.target else { return };
        let event = event(target);
        if target.log.write(event).is_err() {
            self.target = None;
        }
    }
}
