//! `paceline report`: the HTML page of a run, written again from its events.

use std::process::ExitCode;

use crate::lab::report;
use crate::system::disk::Disk;
use crate::system::printable::Shown;

use super::{Outcome, print};
use crate::arguments::Report;

/// Runs the command.
pub fn run(arguments: &Report) -> Outcome {
    let page = report::write(&Disk::real(), &arguments.run)?;
    print(&format!("{}\n", Shown(&page)));
    Ok(ExitCode::SUCCESS)
}
