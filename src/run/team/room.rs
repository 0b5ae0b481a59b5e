//! Whether the processes of a run fit this machine, before any is started: its memory, and its cores.

use crate::cluster::Member;
use crate::data::OpenOptions;
use crate::system::limits::Limits;
use crate::system::threads;
use crate::train::room::{Candidate, Processes};
use crate::train::{Config, Registry, sizing};

use crate::failure::Failure;
use crate::run::surroundings;

/// More processes than this on a core are refused: they would mostly wait for each other.
const PROCESSES_PER_CORE_MAX: usize = 16;

/// Refuses a run of which so many processes, of so many workers in all, do not fit this machine's memory. What only the processes
/// themselves find out, such as data that is not there, is left to them.
pub fn fits(
    registry: &Registry,
    config: &Config,
    (workers, processes): (usize, usize),
    resumes: bool,
) -> Result<(), Failure> {
    let around = surroundings();
    let options = OpenOptions { data_home: around.data_home, sequence: config.sequence, ..OpenOptions::default() };
    let Ok(model) = registry.find_model(&config.model) else { return Ok(()) };
    let Some(found) = registry.outline(&config.data, &options, &around.disk) else { return Ok(()) };
    let Ok(fitted) = sizing::fit(&model, &found.info, config.size) else { return Ok(()) };
    let (input, classes) = (fitted.input, config.classes.unwrap_or(found.info.classes));
    let here = Processes::here(config, workers, processes);
    let held_bytes = found.held_bytes;
    // What others compute on is known when they have met.
    let hosted = false;
    let model = &model;
    Ok(Candidate { model, config, input, classes, held_bytes, workers, here, resumes, hosted }.check(&Limits::look())?)
}

/// As [`fits`], for a process that another launcher has started: as far as it knows who else is on its machine. The rendezvous tells
/// the rest.
pub fn member_fits(registry: &Registry, member: &Member, config: &Config, resumes: bool) -> Result<(), Failure> {
    fits(
        registry,
        config,
        (member.workers() / config.ranks_per_worker(), member.local.map_or(1, |local| local.world)),
        resumes,
    )
}

/// Refuses more processes than the cores of this machine can be shared by, unless the user insists.
pub fn cores_suffice(processes: usize, oversubscribe: bool) -> Result<(), Failure> {
    let (cores, most) = (threads::available(), PROCESSES_PER_CORE_MAX * threads::available());
    if oversubscribe || processes <= most {
        return Ok(());
    }
    let cores = if cores == 1 { "1 core".to_owned() } else { format!("{cores} cores") };
    Err(Failure::refused(format!(
        "{processes} processes on {cores} are more than {PROCESSES_PER_CORE_MAX} for each; \
         type --workers {most} or fewer, or --oversubscribe to start them all the same"
    )))
}
