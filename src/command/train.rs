//! `paceline train`: a configuration from defaults, a file and flags; then the run, its listeners and its report.

use std::path::Path;
use std::process::ExitCode;

use crate::cluster::launch::{Start, child};
use crate::comm;
use crate::data::DataError;
use crate::lab::{TensorBoard, report};
use crate::nn::schedule::WarmUp;
use crate::system::clock;
use crate::system::disk::Disk;
use crate::system::host::Host;
use crate::system::memory;
use crate::system::printable::Shown;
use crate::system::shell::resume_line;
use crate::system::signal::Stop;
use crate::tensor::device::cuda;
use crate::train::checkpoint::Checkpoints;
use crate::train::compute::Compute;
use crate::train::config::CONFIG_BYTES_MAX;
use crate::train::run::{self as run_folder, ResumeFrom};
use crate::train::together::Carry;
use crate::train::trainer::Surroundings;
use crate::train::{Config, Outcome as TrainOutcome, Reason, TrainError, Trainer, gpus};

use super::calibrate::{Calibrate, calibrate, tell};
use super::restart::{self, Requeue};
use super::team::{self, Role, Team, room};
use super::{Outcome, surroundings};
use crate::arguments::Train;
use crate::failure::Failure;
use crate::terminal::{Style, Terminal};

/// Runs the command: alone, as the launcher of others, or as one of several.
pub fn run(arguments: Train) -> Outcome {
    let variables = team::variables();
    let arguments = restart::resumed(arguments, &variables)?;
    let requeue = Requeue::find(&arguments, &variables)?;
    let is_restarted = arguments.restarted.is_some();
    let ended = take_part(arguments, requeue.as_ref());
    restart::answer(ended, is_restarted)
}

fn take_part(arguments: Train, requeue: Option<&Requeue>) -> Outcome {
    let config = resolve(&arguments)?;
    match team::role(&arguments, &config, &team::variables())? {
        Role::Launcher(starts) => start_others(&arguments, &config, &starts),
        Role::Alone => {
            if arguments.resume.is_some() {
                room::fits(&config, 1, 1, true)?;
            }
            let stop = Stop::on_signals().map_err(Failure::failed)?;
            train(&arguments, config, Surroundings { stop, ..surroundings() }, None)
        }
        Role::Member(member) => {
            let config = Config { workers: member.workers(), ..config };
            let stop = Stop::on_signals().map_err(Failure::failed)?;
            config.check()?;
            if member.world == 1 {
                if arguments.restarted.is_some() {
                    child::begin(&team::variables(), &stop)?;
                }
                let around = Surroundings { stop, restarts: restart::told(&arguments, requeue), ..surroundings() };
                let ended = train(&arguments, config, around, None);
                return ended.or_else(|failure| restart::ask(requeue, failure.for_all(true)));
            }
            // A launcher on this machine has looked already, for all.
            if !team::variables().contains_key(child::PARENT) {
                config.check_world(config.workers)?;
                room::member_fits(&member, &config, arguments.resume.is_some())?;
            }
            let is_first = member.rank.0 == 0;
            let met = Team::meet(*member, &arguments, &config, &stop);
            let team = match met {
                Ok(team) => team,
                Err(failure) => return restart::ask(requeue, failure.for_all(is_first)),
            };
            if team.speaks() {
                restart::announce(requeue, &arguments, &config);
            }
            if team.serves() {
                return team.serve(&config);
            }
            let (shard, local, watch) = (team.shard(), team.local(), team.watch());
            let around = Surroundings {
                stop,
                shard,
                local,
                watch,
                folder: team.folder(),
                hosted: team.is_hosted(),
                restarts: restart::told(&arguments, requeue),
                ..surroundings()
            };
            let ended = train(&arguments, config, around, Some(team));
            ended.or_else(|failure| restart::ask(requeue, failure))
        }
    }
}

/// Looks whether the run can be, and starts its processes.
fn start_others(arguments: &Train, config: &Config, starts: &[Start]) -> Outcome {
    config.check()?;
    config.check_world(config.workers)?;
    if arguments.hosts.is_none() {
        room::cores_suffice(starts.len(), arguments.oversubscribe)?;
        room::fits(config, config.workers, starts.len(), arguments.resume.is_some())?;
    }
    if arguments.hosts.is_none() && config.device != Compute::Cpu {
        let found = cuda::count();
        let seen = *found.as_ref().unwrap_or(&usize::MAX);
        let shares = !config.sums_on_devices();
        gpus::enough(config.device, (config.workers, shares), seen).map_err(Failure::refused)?;
        found.map_err(Failure::refused)?;
    }
    if let (Some(run), None) = (&arguments.run, &arguments.hosts) {
        // Refused once, and not by every process.
        run_folder::check_free(&surroundings().disk, run)?;
    }
    if restart::is_asked(arguments) { restart::launch(arguments, config) } else { team::launch(starts) }
}

/// The configuration that was asked for, of a new run or of one that goes on.
fn resolve(arguments: &Train) -> Result<Config, Failure> {
    let disk = surroundings().disk;
    let mut config = match &arguments.resume {
        Some(path) => run_folder::read_config(&disk, &ResumeFrom::find(&disk, path).run)?,
        None => base(&disk, arguments.config.as_deref())?,
    };
    apply(arguments, &mut config);
    if arguments.resume.is_none() {
        make_absolute(&mut config);
    }
    // Without any argument it shows what the project is for.
    if std::env::args_os().len() == 2 {
        config.workers = 2;
    }
    Ok(config)
}

/// Trains, as one of a team if there is one.
fn train(arguments: &Train, config: Config, around: Surroundings, team: Option<Team>) -> Outcome {
    let (disk, stop) = (around.disk.clone(), around.stop.clone());
    let begun = whole(|| match &arguments.resume {
        Some(run) => Trainer::resume(run.clone(), around, |config| apply(arguments, config)),
        None => Trainer::start(config, around, arguments.run.clone()),
    });
    let mut trainer = match &team {
        Some(team) => team.guard(begun)?,
        None => begun?,
    };
    // From here on the run has begun: what goes wrong is a failure.
    if let Some(team) = &team {
        team.join(&mut trainer).map_err(Failure::after_start)?;
    } else if trainer.config().carry == Carry::NCCL {
        let joined = trainer.join_gpus(None, &[], &team::gpu_limits(&comm::Stop::new()));
        joined.map_err(|error| Failure::from(error).after_start())?;
    }
    let how = if trainer.replica().engine.gpu().is_some() { Calibrate::Off } else { arguments.calibrate };
    let calibration = calibrate(trainer.replica().device(), trainer.replica().plans(), how);
    let run = trainer.run_dir().path().to_owned();
    if team.as_ref().is_some_and(|team| !team.speaks()) {
        let ended = whole(|| trainer.run());
        return end(team, trainer, ended).map(|outcome| exit_code(&outcome, &stop));
    }
    if !arguments.quiet && !arguments.json {
        tell(&calibration);
    }
    let board = TensorBoard::create(&disk, &run, clock::unix_seconds(), &Host::look().name);
    let mut board = board.map_err(|error| Failure::from(error).after_start())?;
    trainer.observe(Box::new(move |line| board.record(line)));
    let terminal = Terminal::new(Style::choose(arguments.quiet, arguments.json), &trainer);
    trainer.observe(terminal.observer());
    let ended = whole(|| trainer.run());
    terminal.close();
    // A report is worth having of a failed run too; if it cannot be written, the run's own end matters more. Where memory has ended,
    // there is none for a report.
    let page = if out_of_memory(&ended) { None } else { report::write(&disk, &run).ok() };
    let outcome = end(team, trainer, ended)?;
    terminal.finish(&outcome, page.as_deref());
    Ok(exit_code(&outcome, &stop))
}

/// What a part of a run came to, memory that was refused in the middle of it included: the others are told of that as of any failure.
fn whole<T>(part: impl FnOnce() -> Result<T, TrainError>) -> Result<T, TrainError> {
    memory::caught(part)?
}

fn out_of_memory<T>(ended: &Result<T, TrainError>) -> bool {
    matches!(ended, Err(TrainError::Memory(_) | TrainError::Data(DataError::Memory(_))))
}

fn exit_code(outcome: &TrainOutcome, stop: &Stop) -> ExitCode {
    if outcome.reason == Reason::Interrupted { stop.signal().exit_code().into() } else { ExitCode::SUCCESS }
}

/// Ends a run, together with the others if there are any. A run that failed and has a checkpoint says how to go on.
fn end(
    team: Option<Team>,
    mut trainer: Trainer,
    ended: Result<TrainOutcome, TrainError>,
) -> Result<TrainOutcome, Failure> {
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

/// The configuration before flags: a file's, or the default.
fn base(disk: &Disk, file: Option<&Path>) -> Result<Config, Failure> {
    let Some(file) = file else { return Ok(Config::default()) };
    let text = disk
        .read_text_within(file, CONFIG_BYTES_MAX)
        .map_err(|error| Failure::refused(format!("{error}; recipes/ has configurations to start from")))?;
    Config::from_toml(&text).map_err(|error: TrainError| Failure::refused(format!("{}: {error}", Shown(file))))
}

/// A run can be resumed from any folder, so the paths in its configuration do not depend on this one.
fn make_absolute(config: &mut Config) {
    let absolute =
        |path: &str| std::path::absolute(path).map_or_else(|_| path.to_owned(), |path| path.display().to_string());
    if let Some((kind @ ("cifar10" | "mnist" | "folder" | "text"), path)) = config.data.split_once(':') {
        config.data = format!("{kind}:{}", absolute(path));
    }
    config.weights = config.weights.as_deref().map(absolute);
}

/// Flags override what the configuration says.
fn apply(arguments: &Train, config: &mut Config) {
    fn set<T: Clone>(target: &mut T, value: &Option<T>) {
        if let Some(value) = value {
            target.clone_from(value);
        }
    }
    fn set_some<T: Clone>(target: &mut Option<T>, value: &Option<T>) {
        if value.is_some() {
            target.clone_from(value);
        }
    }
    set(&mut config.model, &arguments.model);
    set(&mut config.data, &arguments.data);
    set_some(&mut config.size, &arguments.size);
    set(&mut config.sequence, &arguments.sequence);
    set_some(&mut config.classes, &arguments.classes);
    set(&mut config.augment, &arguments.augment);
    set_some(&mut config.mean, &arguments.mean);
    set_some(&mut config.std, &arguments.std);
    set(&mut config.damaged_max, &arguments.damaged_max);
    set_some(&mut config.weights, &arguments.weights);
    if !arguments.except.is_empty() {
        config.weights_except.clone_from(&arguments.except);
    }
    set(&mut config.batch, &arguments.batch);
    set(&mut config.accumulate, &arguments.accumulate);
    set(&mut config.epochs, &arguments.epochs);
    set_some(&mut config.max_steps, &arguments.max_steps);
    set_some(&mut config.time_limit_s, &arguments.time_limit);
    set_some(&mut config.early_stop, &arguments.early_stop);
    set(&mut config.optimizer, &arguments.optimizer);
    set(&mut config.seed, &arguments.seed);
    set(&mut config.workers, &arguments.workers);
    set(&mut config.agree, &arguments.agree);
    set(&mut config.squeeze, &arguments.squeeze);
    set(&mut config.overlap, &arguments.overlap);
    set(&mut config.carry, &arguments.carry);
    set(&mut config.sockets, &arguments.sockets);
    set_some(&mut config.algorithm, &arguments.algorithm);
    set(&mut config.servers, &arguments.servers);
    set(&mut config.staleness, &arguments.staleness);
    config.sync_batch_norm |= arguments.sync_batch_norm;
    set(&mut config.dtype, &arguments.dtype);
    set(&mut config.device, &arguments.device);
    set(&mut config.tf32, &arguments.tf32);
    set(&mut config.deterministic, &arguments.deterministic);
    set(&mut config.memory, &arguments.memory);
    set(&mut config.winograd, &arguments.winograd);
    set_some(&mut config.threads, &arguments.threads);
    set(&mut config.pin, &arguments.pin);
    set(&mut config.loader_threads, &arguments.loader_threads);
    set(&mut config.evaluate_every, &arguments.evaluate_every);
    config.evaluate_mirrored |= arguments.evaluate_mirrored;
    set_some(&mut config.checkpoint_every, &arguments.checkpoint_every);
    set_some(&mut config.checkpoint_minutes, &arguments.checkpoint_minutes);
    set(&mut config.keep, &arguments.keep);
    set_some(&mut config.clip_norm, &arguments.clip_norm);
    set(&mut config.label_smoothing, &arguments.label_smoothing.map(|value| value as f32));
    apply_learning_rate(arguments, config);
}

fn apply_learning_rate(arguments: &Train, config: &mut Config) {
    let rate = &mut config.learning_rate;
    rate.base = arguments.lr.unwrap_or(rate.base);
    rate.scale_with_batch |= arguments.scale_lr;
    if let Some(schedule) = &arguments.schedule {
        rate.schedule = schedule.clone();
    }
    if let Some(epochs) = arguments.warmup_epochs {
        rate.warm_up = WarmUp::Epochs(epochs);
    }
    let hyper = &mut config.hyper_parameters;
    hyper.momentum = arguments.momentum.map_or(hyper.momentum, |momentum| momentum as f32);
    hyper.weight_decay = arguments.weight_decay.map(|decay| decay as f32).or(hyper.weight_decay);
}
