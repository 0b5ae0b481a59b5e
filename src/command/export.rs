//! `paceline export`: a trained model as an ONNX file.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::process::ExitCode;

use crate::nn::weights::{Inventory, Slot};
use crate::nn::{Mode, Network, onnx, zoo};
use crate::system::disk::Disk;
use crate::system::printable::{Shown, printable};
use crate::train::checkpoint::{CheckedWeights, find_weights};

use super::{Outcome, check_target, print};
use crate::arguments::Export;
use crate::failure::Failure;

/// Runs the command.
pub fn run(arguments: &Export) -> Outcome {
    let disk = Disk::real();
    let file = CheckedWeights::open(&disk, &find_weights(&disk, &arguments.run)?)?;
    let card = file.card()?;
    check_target(&disk, &arguments.onnx, arguments.force)?;
    let entry = zoo::find(&card.model).map_err(Failure::refused)?;
    let input = card.input()?;
    let network = Network::new(entry, Mode::Eval, 1, input, card.class_names.len(), 0.0)?;
    let inventory = Inventory { parameters: &network.parameters, states: &network.states };
    let loaded = file.read(inventory, &[])?;
    let values = |slot: Slot| {
        let found = match slot {
            Slot::Parameter(index) => &loaded.parameters[index],
            Slot::State(index) => &loaded.states[index],
        };
        Cow::Borrowed(found.as_deref().expect("a strict load leaves nothing out"))
    };
    let metadata = BTreeMap::from([
        ("model".to_owned(), card.model.clone()),
        ("classes".to_owned(), card.class_names.join("\n")),
        ("preprocess".to_owned(), serde_json::to_string(&card.preprocess).expect("operations are JSON")),
    ]);
    let bytes = onnx::export(&network, &values, &metadata).map_err(Failure::refused)?;
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
