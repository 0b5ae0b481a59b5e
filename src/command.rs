//! One file per command: lifts what was typed into checked values, calls the library, prints.

pub mod bench;
pub mod choose;
pub mod data;
pub mod doctor;
pub mod evaluate;
pub mod export;
pub mod launch;
pub mod models;
pub mod plan;
pub mod predict;
pub mod report;
pub mod restart;
pub mod serve;
pub mod train;

use std::path::Path;
use std::process::ExitCode;

use crate::system::disk::Disk;
use crate::system::printable::Shown;
use crate::train::Registry;
use crate::train::trainer::Surroundings;

use crate::failure::Failure;
pub use crate::output::{grouped, note, print, print_json};
pub use crate::run::calibrate;
pub(crate) use crate::run::team;

/// What a command returns.
pub type Outcome = Result<ExitCode, Failure>;

/// The real world, without Ctrl-C, and what the program brings to it.
pub fn surroundings(registry: &Registry) -> Surroundings {
    Surroundings { registry: registry.clone(), ..crate::run::surroundings() }
}

/// Refuses to replace a file unasked.
pub fn check_target(disk: &Disk, path: &Path, force: bool) -> Result<(), Failure> {
    if force || !disk.is_taken(path) {
        return Ok(());
    }
    let target = Shown(path);
    Err(Failure::refused(format!("{target} is there already; type another name, or --force to replace it")))
}
