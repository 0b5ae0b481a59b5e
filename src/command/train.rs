//! `paceline train`: a configuration from defaults, a file and flags; then the run, its listeners and its report.

use std::cell::OnceCell;
use std::path::Path;
use std::process::ExitCode;

use crate::cluster::launch::child;
use crate::cluster::launch::group::Start;
use crate::cluster::spec::Variables;
use crate::comm::Token;
use crate::nn::schedule::WarmUp;
use crate::system::disk::Disk;
use crate::system::printable::Shown;
use crate::system::signal::Stop;
use crate::train::config::CONFIG_BYTES_MAX;
use crate::train::rehearsal::Rehearsal;
use crate::train::run::{self as run_folder, ResumeFrom};
use crate::train::together::Carry;
use crate::train::trainer::Surroundings;
use crate::train::{Config, Registry, TrainError};

use super::choose::{self, Auto};
use super::restart::{self, Requeue};
use super::team::{self, Meeting, Role};
use super::{Outcome, surroundings};
use crate::arguments::{Schedules, Train};
use crate::failure::Failure;
use crate::run::elsewhere::elsewhere;
use crate::run::execute::{Begin, Execution, check_launch};
use crate::run::{make_absolute, split};
use crate::terminal::Style;

/// Runs the command: alone, as the launcher of others, or as one of several.
pub fn run(arguments: Train, registry: &Registry) -> Outcome {
    let variables = team::variables();
    // One that is timed, and no member of a run, ends with whoever times it.
    child::tie(&variables)?;
    let arguments = restart::resumed(arguments, &variables)?;
    let requeue = Requeue::find(&arguments, &variables)?;
    let is_restarted = arguments.restarted.is_some();
    let place = Place { variables, stop: Stop::on_signals().map_err(Failure::failed)?, token: OnceCell::new() };
    let ended = take_part(&arguments, registry, requeue.as_ref(), &place);
    restart::answer(ended, is_restarted)
}

/// Where this process was started.
pub(super) struct Place {
    /// What its environment says, of its place among others too.
    pub variables: Variables,
    /// Asks for its end.
    pub stop: Stop,
    /// The run's secret, once this process has met the others: a launcher tells it once.
    pub token: OnceCell<Token>,
}

fn take_part(arguments: &Train, registry: &Registry, requeue: Option<&Requeue>, place: &Place) -> Outcome {
    let Place { variables, stop, .. } = place;
    check_replicas(arguments)?;
    let config = resolve(arguments)?;
    match choose::for_training((arguments, &config), registry, place)? {
        Auto::NotAsked => {}
        Auto::Interrupted(code) => return Ok(code),
        Auto::Words(words) => return take_part(&arguments.with(words)?, registry, requeue, place),
        Auto::Alone(words) => {
            let alone = Place { variables: Variables::new(), stop: stop.clone(), token: OnceCell::new() };
            return take_part(&arguments.with(words)?, registry, requeue, &alone);
        }
        Auto::Elsewhere => return Ok(ExitCode::SUCCESS),
    }
    let config = split::fit(config, registry, arguments.resume.is_some())?;
    let member = match team::role(arguments, &config, variables)? {
        Role::Launcher(starts) => return launch(arguments, (&config, registry), &starts, stop),
        Role::Alone => {
            if config.has_rank_threads() {
                let (folder, resumes) = (arguments.run.as_deref(), arguments.resume.is_some());
                check_launch(registry, &config, arguments.oversubscribe, (folder, resumes))?;
            }
            None
        }
        Role::Member(member) => Some(*member),
    };
    if arguments.restarted.is_some() && member.as_ref().is_some_and(|member| member.world == 1) {
        child::begin(variables, stop)?;
    }
    let change = |config: &mut Config| apply(arguments, config);
    let begin = match &arguments.resume {
        Some(run) => Begin::Resume(run.clone(), &change),
        None => Begin::New(arguments.run.clone()),
    };
    let (quiet, bind, tls) = (arguments.quiet, arguments.bind, arguments.tls.clone());
    let token = place.token.get().cloned();
    let meeting = Meeting { quiet, bind, tls, token, registry: registry.clone(), ..Meeting::default() };
    let restarts = restart::told(arguments, requeue);
    let rehearsal = arguments.rehearse.map(|(steps, seconds)| Rehearsal::new(steps, seconds));
    let elsewhere = elsewhere(arguments.tls.clone());
    let around = Surroundings { stop: stop.clone(), restarts, rehearsal, elsewhere, ..surroundings(registry) };
    let (calibrate, style) = (arguments.calibrate, Style::choose(arguments.quiet, arguments.json));
    let is_first = member.as_ref().is_none_or(|member| member.rank.0 == 0);
    let announced = config.clone();
    let announce = || {
        if is_first {
            restart::announce(requeue, arguments, &announced);
        }
    };
    let execution = Execution { begin, calibrate, style, observers: Vec::new(), meeting, around, met: &announce };
    match execution.take_part(member, config) {
        Ok(part) => Ok(part.exit_code(stop).into()),
        Err(failure) => restart::ask(requeue, failure),
    }
}

/// Starts the processes of a run and waits for them, after whatever can be refused once.
fn launch(arguments: &Train, (config, registry): (&Config, &Registry), starts: &[Start], stop: &Stop) -> Outcome {
    if arguments.hosts.is_none() {
        let (folder, resumes) = (arguments.run.as_deref(), arguments.resume.is_some());
        check_launch(registry, config, arguments.oversubscribe, (folder, resumes))?;
    } else {
        config.check()?;
        let workers = starts.len().saturating_sub(if starts.len() > 1 { config.server_count() } else { 0 });
        config.check_world(workers / config.ranks_per_worker())?;
        if let (true, Some(run), None) = (restart::is_asked(arguments), &arguments.run, &arguments.resume) {
            // What is there already would be taken for this run when it is started again.
            run_folder::check_free(&surroundings(registry).disk, run)?;
        }
    }
    if restart::is_asked(arguments) { restart::launch(arguments, config) } else { team::launch_until(starts, stop) }
}

/// Refuses what says something else than `--replicas`, which is short for `--workers N --carry thread`.
fn check_replicas(arguments: &Train) -> Result<(), Failure> {
    let Some(replicas) = arguments.replicas else { return Ok(()) };
    let carry = arguments.carry.filter(|carry| *carry != Carry::THREAD);
    let sentence = if let Some(workers) = arguments.workers {
        format!(
            "--replicas {replicas} are threads of one process, and --workers {workers} are processes; \
             type --replicas {replicas} or --workers {workers} alone"
        )
    } else if arguments.hosts.is_some() || arguments.cluster.is_some() {
        format!(
            "--replicas {replicas} are threads of one process on one machine; \
             leave --replicas out to train on several, where --hosts a:{replicas} starts {replicas} processes on a"
        )
    } else if let Some(carry) = carry.map(Carry::name) {
        format!(
            "--replicas {replicas} share the memory of one process, and --carry {carry} is for several; \
             type --replicas {replicas} alone, or --workers {replicas} --carry {carry}"
        )
    } else {
        return Ok(());
    };
    Err(Failure::refused(sentence))
}

/// The configuration that was asked for, of a new run or of one that goes on.
pub fn resolve(arguments: &Train) -> Result<Config, Failure> {
    let disk = Disk::real();
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
    let told = arguments.accumulate.or(arguments.micro_batches).is_some() || arguments.resume.is_some();
    if !told {
        split::cut_batch(&mut config);
    }
    Ok(config)
}

/// The configuration before flags: a file's, or the default.
fn base(disk: &Disk, file: Option<&Path>) -> Result<Config, Failure> {
    let Some(file) = file else { return Ok(Config::default()) };
    let text = disk
        .read_text_within(file, CONFIG_BYTES_MAX)
        .map_err(|error| Failure::refused(format!("{error}; recipes/ has configurations to start from")))?;
    Config::from_toml(&text).map_err(|error: TrainError| Failure::refused(format!("{}: {error}", Shown(file))))
}

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

/// Flags override what the configuration says.
fn apply(arguments: &Train, config: &mut Config) {
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
    set(&mut config.last_batch, &arguments.last_batch);
    set(&mut config.epochs, &arguments.epochs);
    set_some(&mut config.max_steps, &arguments.max_steps);
    set_some(&mut config.time_limit_s, &arguments.time_limit);
    set_some(&mut config.early_stop, &arguments.early_stop);
    set(&mut config.optimizer, &arguments.optimizer);
    set(&mut config.seed, &arguments.seed);
    set(&mut config.workers, &arguments.workers);
    apply_split(arguments, config);
    apply_agreement(arguments, config);
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
    set(&mut config.deadlines.late, &arguments.late);
    set(&mut config.deadlines.silent, &arguments.silent);
    set(&mut config.deadlines.gather, &arguments.gather);
    set_some(&mut config.clip_norm, &arguments.clip_norm);
    set(&mut config.label_smoothing, &arguments.label_smoothing.map(|value| value as f32));
    apply_learning_rate(arguments, config);
}

fn apply_agreement(arguments: &Train, config: &mut Config) {
    set(&mut config.agree, &arguments.agree);
    set(&mut config.squeeze, &arguments.squeeze);
    set(&mut config.overlap, &arguments.overlap);
    set(&mut config.shard, &arguments.shard);
    set(&mut config.carry, &arguments.carry);
    if let Some(replicas) = arguments.replicas {
        (config.workers, config.carry) = (replicas, Carry::THREAD);
    }
    set(&mut config.sockets, &arguments.sockets);
    set_some(&mut config.algorithm, &arguments.algorithm);
    set(&mut config.servers, &arguments.servers);
    set_some(&mut config.staleness, &arguments.staleness);
    set(&mut config.slow, &arguments.unequal.slow);
    set(&mut config.balance, &arguments.unequal.balance);
    set(&mut config.balance_every, &arguments.unequal.balance_every);
    set_some(&mut config.center.group, &arguments.rounds.group);
    set_some(&mut config.period, &arguments.rounds.period);
    set_some(&mut config.node_period, &arguments.rounds.node_period);
    set_some(&mut config.fragments, &arguments.rounds.fragments);
    set_some(&mut config.post_local, &arguments.rounds.post_local);
    set_some(&mut config.outer_rate, &arguments.rounds.outer_rate);
    set_some(&mut config.outer_momentum, &arguments.rounds.outer_momentum);
    set_some(&mut config.herds, &arguments.rounds.herds);
    if !arguments.center.boxes.is_empty() {
        config.center.boxes.clone_from(&arguments.center.boxes);
    }
    set_some(&mut config.center.elastic_rate, &arguments.center.elastic_rate);
    set_some(&mut config.center.fetch_every, &arguments.center.fetch_every);
    set_some(&mut config.center.push_every, &arguments.center.push_every);
    set_some(&mut config.center.push_rate, &arguments.center.push_rate);
    config.center.staleness_aware |= arguments.center.staleness_aware;
    set_some(&mut config.center.server_adagrad, &arguments.center.server_adagrad);
    set_some(&mut config.center.warm_start, &arguments.center.warm_start);
    set_some(&mut config.center.history, &arguments.center.history);
    config.sync_batch_norm |= arguments.sync_batch_norm;
}

fn apply_split(arguments: &Train, config: &mut Config) {
    config.split = arguments.split.clone().unwrap_or_else(|| config.split.clone());
    if !arguments.cuts.is_empty() {
        config.cuts.clone_from(&arguments.cuts);
    } else if arguments.split.is_some() {
        // Of another number of stages, those of the run before are none.
        config.cuts.clear();
    }
    config.memory_limit = arguments.memory_limit.or(config.memory_limit);
    if !arguments.stage_devices.is_empty() {
        config.stage_devices.clone_from(&arguments.stage_devices);
    }
    config.accumulate = arguments.micro_batches.unwrap_or(config.accumulate);
}

fn apply_learning_rate(arguments: &Train, config: &mut Config) {
    let rate = &mut config.learning_rate;
    rate.base = arguments.lr.unwrap_or(rate.base);
    rate.scale_with_batch |= arguments.scale_lr;
    for schedule in &arguments.schedule {
        match schedule {
            Schedules::LearningRate(schedule) => rate.schedule = schedule.clone(),
            Schedules::Pipeline(kind) => config.schedule = *kind,
        }
    }
    if let Some(epochs) = arguments.warmup_epochs {
        rate.warm_up = WarmUp::Epochs(epochs);
    }
    let hyper = &mut config.hyper_parameters;
    hyper.momentum = arguments.momentum.map_or(hyper.momentum, |momentum| momentum as f32);
    hyper.momentum_from = arguments.momentum_from.unwrap_or(hyper.momentum_from);
    hyper.weight_decay = arguments.weight_decay.map(|decay| decay as f32).or(hyper.weight_decay);
}
