//! `paceline bench step --check FILE`: what another framework needs in order to compute the same two steps, and what they
//! gave here. Nothing is timed. `tools/peer.py` reads the file; `cargo x versus` compares.
//!
//! The file is a weights file (docs/weights.md) with two more tensors, `check.x` (images in the order N·H·W·C, or tokens)
//! and `check.targets`, both as f32. Dropout is left out: it is the only thing in a step that two frameworks cannot share.
//! Normalisations start with a shift that keeps most ReLUs open. With the usual start, a deep net magnifies rounding from
//! layer to layer until the losses of two correct programs differ: at resnet152 by 2e-4 in f32, by 2e-2 in bf16.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::ExitCode;

use paceline::data::Batch;
use paceline::nn::parameter::ForeignLayout;
use paceline::nn::weights::{self, Inventory, Slot};
use paceline::nn::{Input, Model, Net, State, zoo};
use paceline::system::disk::Disk;
use paceline::tensor::{Shape, Value};
use paceline::train::replica::Replica;
use serde_json::json;

use super::super::{Outcome, plan, print};
use super::{random_batch, replica};
use crate::cli::BenchStep;
use crate::failure::Failure;

/// How much the loss falls in the first step, to first order: enough to show a wrong gradient, and so little that rounding
/// does not grow into another path.
const DESCENT: f64 = 0.02;

/// Runs the command.
pub fn run(arguments: &BenchStep, file: &Path) -> Outcome {
    let &[batch_size] = &arguments.batch[..] else {
        return Err(Failure::refused("--check takes one batch size; type --batch 32"));
    };
    if Disk::real().exists(file) {
        return Err(Failure::refused(format!("{} is there already; type another name", file.display())));
    }
    let entry = zoo::find(&arguments.model).map_err(Failure::refused)?;
    let input = plan::input(entry, arguments.size)?;
    let certain = |net: &mut Net, x: Value, classes: usize| {
        net.without_dropout();
        entry.build(net, x, classes)
    };
    let mut replica = replica(arguments, &certain, input, (batch_size, Some(f64::INFINITY)))?;
    calm(&mut replica);
    let batch = random_batch(input, batch_size, arguments.classes);
    write(file, &replica, &batch, input)?;
    let (loss, norm) = (replica.compute(&batch, 0).mean_loss(), replica.clip(f64::INFINITY));
    let rate = (DESCENT / (norm * norm)) as f32;
    replica.update(0, rate);
    let (next, next_norm) = (replica.compute(&batch, 1).mean_loss(), replica.clip(f64::INFINITY));
    if arguments.json {
        let found = json!({
            "model": arguments.model, "batch": batch_size, "dtype": arguments.dtype, "learning_rate": rate,
            "losses": [loss, next], "gradient_norms": [norm, next_norm],
        });
        print(&format!("{found}\n"));
    } else {
        print(&format!("losses {loss:.6} then {next:.6}, norms of the gradient {norm:.6} then {next_norm:.6}\n"));
        print(&format!("learning rate of the step between them: {rate:e}\n"));
        print(&format!("weights and batch are in {}\n", file.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Scales and shifts every normalised value to a mean of two deviations above zero.
fn calm(replica: &mut Replica) {
    let places: HashMap<String, usize> =
        replica.parameters.iter().enumerate().map(|(index, parameter)| (parameter.name.clone(), index)).collect();
    let normalised = replica.states.iter().filter_map(|state| state.name.strip_suffix(".running_mean"));
    for (kind, start) in [("weight", 0.5), ("bias", 1.0)] {
        for layer in normalised.clone() {
            if let Some(&index) = places.get(&format!("{layer}.{kind}")) {
                replica.store.parameter_mut(index).fill(start);
            }
        }
    }
}

/// Writes the weights and the batch.
fn write(file: &Path, replica: &Replica, batch: &Batch, input: Input) -> Result<(), Failure> {
    let extra = |name: &str, shape: Shape| State { name: name.into(), shape, start: 0.0, layout: ForeignLayout::Same };
    let shape = match input {
        Input::Image { size: [height, width], channels } => Shape::from([batch.size, height, width, channels]),
        Input::Tokens { sequence } => Shape::from([batch.size, sequence]),
    };
    let kept = replica.states.len();
    let mut states = replica.states.clone();
    states.push(extra("check.x", shape));
    states.push(extra("check.targets", Shape::from([batch.targets.len()])));
    let numbers = |integers: &[i32]| Cow::Owned(integers.iter().map(|&integer| integer as f32).collect::<Vec<_>>());
    let values = |slot: Slot| match slot {
        Slot::Parameter(index) => Cow::Borrowed(replica.store.parameter(index)),
        Slot::State(index) if index < kept => Cow::Borrowed(replica.store.state(index)),
        Slot::State(index) if index > kept => numbers(&batch.targets),
        Slot::State(_) if batch.images.is_empty() => numbers(&batch.tokens),
        Slot::State(_) => Cow::Borrowed(&batch.images[..]),
    };
    let inventory = Inventory { parameters: &replica.parameters, states: &states };
    weights::write(&Disk::real(), file, inventory, &values, &BTreeMap::new()).map_err(Failure::failed)
}
