//! How a run's model is split: whether it has to be, into how many stages, and behind which layers.

use std::sync::Arc;

use crate::data::{Info, OpenOptions};
use crate::nn::Input;
use crate::system::limits::{Limits, in_words};
use crate::tensor::Device;
use crate::tensor::device::cpu::Cpu;
use crate::train::balance::Balanced;
use crate::train::compute::Compute;
use crate::train::room::{Candidate, Processes};
use crate::train::together::Split;
use crate::train::{Config, Registry, TrainError, sizing};

use super::calibrate::{Calibrate, calibrate};
use super::surroundings;
use super::team::{Team, variables};
use crate::cluster::spec::from_environment;
use crate::failure::Failure;
use crate::output::note;

/// Micro-batches of a pipeline, if nobody says otherwise: stages wait for an eighth of a step at most, for each stage before them.
const MICRO_BATCHES: usize = 8;

/// The most stages that are tried where a model does not fit.
const STAGES_MAX: usize = 8;

/// Cuts the batch of a pipeline into micro-batches, where nobody has said how many.
pub fn cut_batch(config: &mut Config) {
    let may_split = config.stages() > 1;
    if may_split && config.accumulate == 1 {
        config.accumulate = MICRO_BATCHES.min(config.batch / config.workers.max(1)).max(1);
    }
}

/// What the data of a run look like, where that can be known before it is opened.
pub fn outline(config: &Config, registry: &Registry) -> Option<(Input, usize, usize, Info)> {
    let around = surroundings();
    let options = OpenOptions { data_home: around.data_home, sequence: config.sequence, ..OpenOptions::default() };
    let model = registry.find_model(&config.model).ok()?;
    let found = registry.outline(&config.data, &options, &around.disk)?;
    let fitted = sizing::fit(&model, &found.info, config.size).ok()?;
    let classes = config.classes.unwrap_or(found.info.classes);
    Some((fitted.input, classes, found.held_bytes, found.info))
}

/// Splits a model into as few stages as fit, where it may be split and does not fit whole; says so.
pub fn fit(mut config: Config, registry: &Registry, resumes: bool) -> Result<Config, Failure> {
    let asked = config.split == Split::Auto || config.memory_limit.is_some() && config.split == Split::Replicate;
    if !asked || config.device != Compute::Cpu || config.agree.recipe().has_servers() {
        return Ok(config);
    }
    config.split = Split::Replicate;
    let (Some((input, classes, held_bytes, _)), Ok(model)) =
        (outline(&config, registry), registry.find_model(&config.model))
    else {
        return Ok(config);
    };
    let fits = |config: &Config| {
        let (workers, model) = (config.workers, &model);
        let here = Processes::here(config, workers, config.ranks());
        let candidate = Candidate { model, config, input, classes, held_bytes, workers, here, resumes, hosted: false };
        candidate.check(&Limits::look()).map(|()| candidate.bytes())
    };
    let Err(refusal) = fits(&config) else { return Ok(config) };
    let Some((staged, bytes)) = fewest_stages(&config, |staged| fits(staged)?) else { return Err(refusal.into()) };
    let why = refusal.to_string();
    let why = why.split(';').next().unwrap_or_default();
    let quiet = std::env::args().any(|word| word == "--quiet" || word == "-q");
    // Of processes that a launcher has started, each comes to the same.
    if !quiet && !matches!(from_environment(&variables()), Ok(Some(member)) if member.rank.0 > 0) {
        note(&format!(
            "{why}; so {} is trained in {} stages, each a process, which take {} in all",
            config.model,
            staged.stages(),
            in_words(bytes)
        ));
    }
    Ok(staged)
}

/// As few stages as fit, and what fits said of them.
pub fn fewest_stages<T>(config: &Config, fits: impl Fn(&Config) -> Result<T, TrainError>) -> Option<(Config, T)> {
    (2..=STAGES_MAX).find_map(|stages| {
        let mut staged = Config { split: Split::Pipeline(stages), ..config.clone() };
        cut_batch(&mut staged);
        fits(&staged).ok().map(|found| (staged, found))
    })
}

/// Finds out where to cut, where nobody has said it: rank 0 measures, and tells the others.
pub fn settle_cuts(config: Config, registry: &Registry, team: &Team, how: Calibrate) -> Result<Config, Failure> {
    if config.stages() == 1 || !config.cuts.is_empty() {
        return Ok(config);
    }
    let found =
        if team.speaks() { team.guard(measured_cuts(&config, registry, team, how))?.join("\n") } else { String::new() };
    let told = team.broadcast(&found)?;
    Ok(Config { cuts: told.lines().map(str::to_owned).collect(), ..config })
}

fn measured_cuts(config: &Config, registry: &Registry, team: &Team, how: Calibrate) -> Result<Vec<String>, TrainError> {
    let model = &registry.find_model(&config.model)?;
    let Some((input, classes, held_bytes, _)) = outline(config, registry) else {
        return Err(TrainError::Refused(format!(
            "what {} holds is not known before it is opened, so nothing tells where to cut; type --cuts with names of layers",
            config.data
        )));
    };
    let (workers, local) = (config.workers, team.local().world);
    let here = Processes::here(config, workers, config.ranks());
    let candidate =
        Candidate { model, config, input, classes, held_bytes, workers, here, resumes: false, hosted: false };
    let cpu = Arc::new(Cpu::placed(config.compute_threads_among(local), config.pin));
    cpu.allow_winograd(config.winograd);
    let choose = |plan: &crate::tensor::Plan| {
        calibrate(&cpu, [plan].into_iter(), how);
    };
    let Balanced { cuts, .. } = candidate.measured_cuts(config, &Device::Cpu(Arc::clone(&cpu)), &choose)?;
    Ok(cuts)
}
