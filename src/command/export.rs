//! `paceline export`: a trained model as an ONNX file.

use std::process::ExitCode;

use crate::system::disk::Disk;
use crate::system::printable::{Shown, printable};
use crate::train::Registry;
use crate::train::checkpoint::find_weights;
use crate::train::export::to_onnx;

use super::{Outcome, check_target, print};
use crate::arguments::Export;

/// Runs the command.
pub fn run(arguments: &Export, registry: &Registry) -> Outcome {
    let disk = Disk::real();
    let weights = find_weights(&disk, &arguments.run)?;
    check_target(&disk, &arguments.onnx, arguments.force)?;
    let (card, bytes) = to_onnx(&disk, &weights, registry)?;
    disk.write(&arguments.onnx, &bytes)?;
    let megabytes = bytes.len() as f64 / 1e6;
    print(&format!(
        "{} of step {} written to {} ({megabytes:.1} MB)\n",
        printable(&card.model),
        card.step,
        Shown(&arguments.onnx)
    ));
    Ok(ExitCode::SUCCESS)
}
