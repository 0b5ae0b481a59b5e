//! The part of one rank in a run: it trains alone, trains with others, or serves parameters. The command `train` and [`super::Run`] both
//! come here.

use std::path::{Path, PathBuf};

use crate::cluster::Member;
use crate::cluster::launch::child;
use crate::comm;
use crate::data::DataError;
use crate::lab::{TensorBoard, report};
use crate::system::clock;
use crate::system::disk::Disk;
use crate::system::host::Host;
use crate::system::memory;
use crate::system::shell::resume_line;
use crate::system::signal::Stop;
use crate::tensor::device::cuda;
use crate::train::checkpoint::Checkpoints;
use crate::train::compute::Compute;
use crate::train::run as run_folder;
use crate::train::together::Carry;
use crate::train::trainer::{Observer, Surroundings};
use crate::train::{Config, Outcome, Reason, Registry, TrainError, Trainer, gpus};

use super::calibrate::{Calibrate, calibrate, tell};
use super::team::{self, Meeting, Team, room};
use super::{rank_threads, split, surroundings};
use crate::failure::Failure;
use crate::terminal::{Style, Terminal};

/// A new run, in a folder if one was named; or one that goes on, with a change.
pub enum Begin<'a> {
    /// In this folder, or in one of its own.
    New(Option<PathBuf>),
    /// From here.
    Resume(PathBuf, &'a dyn Fn(&mut Config)),
}

/// How this process does its part.
pub struct Execution<'a> {
    /// A new run, or one that goes on.
    pub begin: Begin<'a>,
    /// How algorithms are chosen.
    pub calibrate: Calibrate,
    /// What is shown.
    pub style: Style,
    /// Who else hears of events.
    pub observers: Vec<Observer>,
    /// How the others are met.
    pub meeting: Meeting,
    /// The world around it, as far as it is known before the others are met.
    pub around: Surroundings,
    /// Called when they have been met.
    pub met: &'a dyn Fn(),
}

/// What a process has done.
#[derive(Debug)]
pub enum Part {
    /// It has trained.
    Trained(Outcome),
    /// It has held parameters.
    Served,
}

impl Part {
    /// What a process that did it answers.
    pub fn exit_code(&self, stop: &Stop) -> u8 {
        match self {
            Self::Trained(outcome) if outcome.reason == Reason::Interrupted => stop.signal().exit_code(),
            _ => 0,
        }
    }

    /// What training came to.
    ///
    /// # Panics
    /// Where the process served; rank 0 never does.
    pub fn expect_outcome(self) -> Outcome {
        match self {
            Self::Trained(outcome) => outcome,
            Self::Served => panic!("rank 0 trains"),
        }
    }
}

/// Refuses, once for all ranks, a run that this machine cannot start: all ranks of a configuration, `insisted` on or not, in a new folder or
/// resumed.
pub fn check_launch(
    registry: &Registry,
    config: &Config,
    insisted: bool,
    (folder, resumes): (Option<&Path>, bool),
) -> Result<(), Failure> {
    config.check()?;
    config.check_world(config.workers)?;
    room::cores_suffice(config.ranks(), insisted)?;
    room::fits(registry, config, (config.workers, config.ranks()), resumes)?;
    if config.device != Compute::Cpu {
        let found = cuda::count();
        let seen = *found.as_ref().unwrap_or(&usize::MAX);
        let shares = !config.sums_on_devices();
        gpus::enough(config.device, (config.workers, shares), seen).map_err(Failure::refused)?;
        found.map_err(Failure::refused)?;
    }
    folder.map_or(Ok(()), |folder| Ok(run_folder::check_free(&surroundings().disk, folder)?))
}

impl Execution<'_> {
    fn resumes(&self) -> bool {
        matches!(self.begin, Begin::Resume(..))
    }

    /// Does this process's part, or this thread's: all of a run, or that of one member.
    pub fn take_part(self, member: Option<Member>, config: Config) -> Result<Part, Failure> {
        if config.has_rank_threads() && member.as_ref().is_none_or(|member| member.world == 1) {
            return rank_threads::take_part(self, config);
        }
        let registry = self.around.registry.clone();
        let Some(member) = member else {
            if self.resumes() {
                room::fits(&registry, &config, (1, 1), true)?;
            }
            return self.train(config, None).map(Part::Trained);
        };
        let each = config.ranks_per_worker();
        if !member.workers().is_multiple_of(each) {
            let (processes, fewer) = (member.workers(), member.workers() / each * each);
            let what = if config.parts() > 1 { "parts" } else { "stages" };
            return Err(Failure::refused(format!(
                "{processes} processes are not replicas of {each} {what} each; start {} or {}",
                fewer.max(each),
                fewer + each
            )));
        }
        let device = config.device_of(member.rank.index());
        let config = Config { workers: member.workers() / each, device, ..config };
        config.check()?;
        if member.world == 1 {
            return self.train(config, None).map(Part::Trained).map_err(|failure| failure.for_all(true));
        }
        // A launcher on this machine has looked already, for all; so has a program that starts the others itself.
        if !self.meeting.starts_others && !team::variables().contains_key(child::PARENT) {
            config.check_world(config.workers)?;
            room::member_fits(&registry, &member, &config, self.resumes())?;
        }
        let is_first = member.rank.0 == 0;
        let met = Team::meet(member, &self.meeting, &config, &self.around.stop);
        let team = met.map_err(|failure| failure.for_all(is_first))?;
        (self.met)();
        if team.serves() {
            return team.serve(&config).map(|_| Part::Served);
        }
        let (shard, local, progress, inbox) = (team.shard(), team.local(), team.progress(), team.inbox());
        let (folder, hosted, shares_memory) = (team.folder(), team.is_hosted(), team.shares_memory());
        let (stage, part, portions) = (team.stage(), team.part(), team.portions(&config));
        let config = split::settle_cuts(config, &registry, &team, self.calibrate)?;
        let around = Surroundings {
            shard,
            stage,
            part,
            local,
            progress,
            inbox,
            folder,
            portions,
            hosted,
            shares_memory,
            ..self.around
        };
        Self { around, ..self }.train(config, Some(team)).map(Part::Trained)
    }

    /// Trains, as one of a team if there is one.
    fn train(self, config: Config, team: Option<Team>) -> Result<Outcome, Failure> {
        let Self { begin, around, style, .. } = self;
        let (disk, stop) = (around.disk.clone(), around.stop.clone());
        let begun = whole(|| match begin {
            Begin::Resume(run, change) => {
                let cuts = config.cuts.clone();
                Trainer::resume(run, around, |config| {
                    change(config);
                    config.cuts = cuts;
                })
            }
            Begin::New(folder) => Trainer::start(config, around, folder),
        });
        let mut trainer = match &team {
            Some(team) => team.guard(begun)?,
            None => begun?,
        };
        // From here on the run has begun: what goes wrong is a failure.
        if let Some(team) = &team {
            team.join(&mut trainer).map_err(Failure::after_start)?;
        } else if trainer.config().carry == Carry::NCCL {
            let joined =
                trainer.join_gpus(None, &[], &team::gpu_limits(&trainer.config().deadlines, &comm::Stop::new()));
            joined.map_err(|error| Failure::from(error).after_start())?;
        }
        let how = if trainer.replica().engine.gpu().is_some() { Calibrate::Off } else { self.calibrate };
        let calibration = calibrate(trainer.replica().device(), trainer.replica().plans(), how);
        if let Some(team) = &team {
            let ordered = trainer.order_stages();
            let step = team.guard(ordered).map_err(Failure::after_start)?;
            step.into_iter().for_each(|step| team.expect_waits(step));
        }
        if let Some(team) = team.as_ref().filter(|team| team.is_back()) {
            team.rejoin(&mut trainer, &stop).map_err(Failure::after_start)?;
        }
        let run = trainer.run_dir().path().to_owned();
        if team.as_ref().is_some_and(|team| !team.speaks()) {
            let ended = whole(|| trainer.run());
            return end(team, trainer, ended);
        }
        if matches!(style, Style::Bar | Style::Plain) {
            tell(&calibration);
        }
        let board = TensorBoard::create(&disk, &run, clock::unix_seconds(), &Host::look().name);
        let mut board = board.map_err(|error| Failure::from(error).after_start())?;
        trainer.observe(Box::new(move |line| board.record(line)));
        let notes = team.as_ref().map(Team::notes).unwrap_or_default();
        let terminal = Terminal::new(style, &trainer, notes);
        trainer.observe(terminal.observer());
        self.observers.into_iter().for_each(|observer| trainer.observe(observer));
        let ended = whole(|| trainer.run());
        terminal.close();
        // A report is worth having of a failed run too; if it cannot be written, the run's own end matters more. Where memory has ended,
        // there is none for a report.
        let page = if out_of_memory(&ended) { None } else { report::write(&disk, &run).ok() };
        let outcome = end(team, trainer, ended)?;
        terminal.finish(&outcome, page.as_deref());
        Ok(outcome)
    }
}

/// What a part of a run came to, memory that was refused in the middle of it included: the others are told of that as of any failure.
fn whole<T>(part: impl FnOnce() -> Result<T, TrainError>) -> Result<T, TrainError> {
    memory::caught(part)?
}

fn out_of_memory<T>(ended: &Result<T, TrainError>) -> bool {
    matches!(ended, Err(TrainError::Memory(_) | TrainError::Data(DataError::Memory(_))))
}

/// Ends a run, together with the others if there are any. A run that failed and has a checkpoint says how to go on.
fn end(team: Option<Team>, mut trainer: Trainer, ended: Result<Outcome, TrainError>) -> Result<Outcome, Failure> {
    let run = trainer.run_dir().path().to_owned();
    let checkpoints = Checkpoints::new(&Disk::real(), trainer.run_dir().checkpoints());
    let speaks = team.as_ref().is_none_or(Team::speaks);
    let failed = |failure: Failure| {
        let saved = checkpoints.last().is_ok_and(|last| last.is_some());
        let failure = failure.after_start();
        // Once is enough: of several ranks the one that tells the user about the run.
        if !saved || !speaks || failure.says("--resume") {
            return failure;
        }
        failure.and(&format!("; to go on from the last checkpoint, type: {}", resume_line(&run)))
    };
    let Some(team) = team else { return ended.map_err(|error| failed(error.into())) };
    let outcome = ended.map_err(|error| failed(team.fail(error, &mut trainer)))?;
    // Servers hear of the end from the thread that carries messages.
    drop(trainer);
    team.finish().map_err(Failure::after_start)?;
    Ok(outcome)
}
