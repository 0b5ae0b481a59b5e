//! `paceline report`: the HTML page of a run, written again from its events.

use std::process::ExitCode;

use paceline::lab::report;
use paceline::system::disk::Disk;
use paceline::system::printable::Shown;

use super::{Outcome, print};
use crate::cli::Report;

/// Runs the command.
pub fn run(arguments: &Report) -> Outcome {
    let page = report::write(&Disk::real(), &arguments.run)?;
    print(&format!("{}\n", Shown(&page)));
    Ok(ExitCode::SUCCESS)
}
