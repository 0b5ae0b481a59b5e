//! `paceline bench step --check FILE`: what another framework needs in order to compute the same two steps, and what they
//! gave here. Nothing is timed. `tools/peer.py` reads the file; `cargo x versus` compares. On a GPU, the same steps are computed on the CPU
//! as well, and it is an error if they part by more than rounding.
//!
//! The file is a weights file (docs/weights.md) with two more tensors, `check.x` (images in the order N·H·W·C, or tokens)
//! and `check.targets`, both as f32. Dropout is left out: it is the only thing in a step that two frameworks cannot share.
//! Normalisations start with a shift that keeps most ReLUs open. With the usual start, a deep net magnifies rounding from
//! layer to layer until the losses of two correct programs differ: at resnet152 by 2e-4 in f32, by 2e-2 in bf16.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::ExitCode;

use crate::data::Batch;
use crate::nn::optim::Moment;
use crate::nn::parameter::ForeignLayout;
use crate::nn::weights::{self, Inventory, Slot};
use crate::nn::{Input, Model, Net, State};
use crate::system::disk::Disk;
use crate::system::printable::Shown;
use crate::tensor::{Precision, Shape, Value};
use crate::train::Registry;
use crate::train::compute::Compute;
use crate::train::replica::Replica;
use serde_json::json;

use super::super::{Outcome, plan, print, print_json};
use super::{on_gpu, random_batch, replica};
use crate::arguments::BenchStep;
use crate::failure::Failure;

/// How much the loss falls in the first step, to first order: enough to show a wrong gradient, and so little that rounding
/// does not grow into another path.
const DESCENT: f64 = 0.02;

/// Runs the command.
pub fn run(arguments: &BenchStep, file: &Path, registry: &Registry) -> Outcome {
    let &[batch_size] = &arguments.batch[..] else {
        return Err(Failure::refused("--check takes one batch size; type --batch 32"));
    };
    if Disk::real().is_taken(file) {
        return Err(Failure::refused(format!("{} is there already; type another name", Shown(file))));
    }
    let entry = &registry.find_model(&arguments.model)?;
    let input = plan::input(entry, arguments.size)?;
    let certain = |net: &mut Net, x: Value, classes: usize| {
        net.without_dropout();
        entry.build(net, x, classes)
    };
    let clip_norm = Some(f64::INFINITY);
    let mut made = replica(arguments, &certain, input, (batch_size, clip_norm))?;
    calm(&mut made);
    let batch = random_batch(input, batch_size, arguments.classes);
    write(file, &made, &batch, input)?;
    let found = Steps::compute(&mut made, &batch)?;
    drop(made);
    let cpu = match arguments.device {
        Compute::Cpu => None,
        _ => {
            let on_cpu = BenchStep { device: Compute::Cpu, ..arguments.clone() };
            let mut other = replica(&on_cpu, &certain, input, (batch_size, clip_norm))?;
            calm(&mut other);
            Some(Steps::compute(&mut other, &batch)?)
        }
    };
    found.show(arguments, file, cpu.as_ref());
    // Where products round their operands, f32 is no nearer than bf16.
    let precision = if arguments.tf32 { Precision::Bf16 } else { arguments.dtype };
    cpu.map_or(Ok(()), |cpu| found.compare(&cpu, precision))?;
    Ok(ExitCode::SUCCESS)
}

/// What two steps on the same batch found.
struct Steps {
    losses: [f64; 2],
    norms: [f64; 2],
    rate: f32,
}

impl Steps {
    fn compute(replica: &mut Replica, batch: &Batch) -> Result<Self, Failure> {
        if replica.engine.gpu().is_some() {
            return Self::compute_on_gpu(replica, batch);
        }
        let (loss, norm) = (replica.compute(batch, 0)?.mean_loss(), replica.clip(f64::INFINITY));
        let rate = rate(norm);
        replica.update(0, rate);
        let (next, next_norm) = (replica.compute(batch, 1)?.mean_loss(), replica.clip(f64::INFINITY));
        Ok(Self { losses: [loss, next], norms: [norm, next_norm], rate })
    }

    /// A GPU's step has the update in it: the first is made twice, once to learn how far it may go.
    fn compute_on_gpu(replica: &mut Replica, batch: &Batch) -> Result<Self, Failure> {
        let mut step = |step, learning_rate| -> Result<(f64, f64), Failure> {
            if step == 0 {
                replica.engine.load();
                on_gpu(replica).fill_once(batch, 1.0)?;
            }
            on_gpu(replica).start(Moment { step, learning_rate })?;
            let found = on_gpu(replica).session().finish().map_err(Failure::failed)?;
            Ok((found.loss / batch.targets.len() as f64, found.norm))
        };
        let rate = rate(step(0, 0.0)?.1);
        let ((loss, norm), (next, next_norm)) = (step(0, rate)?, step(1, 0.0)?);
        Ok(Self { losses: [loss, next], norms: [norm, next_norm], rate })
    }

    fn show(&self, arguments: &BenchStep, file: &Path, cpu: Option<&Self>) {
        let &Self { losses: [loss, next], norms: [norm, next_norm], rate } = self;
        if arguments.json {
            let mut found = json!({
                "model": arguments.model, "batch": arguments.batch[0], "dtype": arguments.dtype, "learning_rate": rate,
                "losses": [loss, next], "gradient_norms": [norm, next_norm],
            });
            if let Some(cpu) = cpu {
                found["cpu"] = json!({ "losses": cpu.losses, "gradient_norms": cpu.norms });
            }
            print_json(&found);
            return;
        }
        let line = |steps: &Self| {
            let Self { losses: [loss, next], norms: [norm, next_norm], .. } = steps;
            format!("losses {loss:.6} then {next:.6}, norms of the gradient {norm:.6} then {next_norm:.6}\n")
        };
        print(&line(self));
        if let Some(cpu) = cpu {
            print(&format!("on the CPU: {}", line(cpu)));
        }
        print(&format!("learning rate of the step between them: {rate:e}\n"));
        print(&format!("weights and batch are in {}\n", Shown(file)));
    }

    /// Refuses numbers that part from the CPU's by more than rounding: as much as `cargo x versus` allows.
    fn compare(&self, cpu: &Self, precision: Precision) -> Result<(), Failure> {
        let (of_loss, of_norm) = match precision {
            Precision::F32 => (1e-4, 1e-3),
            Precision::Bf16 => (5e-3, 2e-2),
        };
        let compared = [("loss", self.losses, cpu.losses, of_loss), ("norm", self.norms, cpu.norms, of_norm)];
        for (what, ours, theirs, most) in compared {
            for (step, (ours, theirs)) in ours.into_iter().zip(theirs).enumerate() {
                let apart = (ours - theirs).abs() / theirs.abs();
                if apart.is_nan() || apart > most {
                    let text = format!("{what} of step {}: {ours} on the GPU, {theirs} on the CPU", step + 1);
                    return Err(Failure::failed(format!("{text}; at most {most:e} is rounding")));
                }
            }
        }
        Ok(())
    }
}

/// By which the first step lowers the loss as far as it should.
fn rate(norm: f64) -> f32 {
    (DESCENT / (norm * norm)) as f32
}

/// Scales and shifts every normalised value to a mean of two deviations above zero.
fn calm(replica: &mut Replica) {
    let places: HashMap<String, usize> =
        replica.parameters.iter().enumerate().map(|(index, parameter)| (parameter.name.clone(), index)).collect();
    let names: Vec<String> = replica.states.iter().map(|state| state.name.clone()).collect();
    let normalised = names.iter().filter_map(|name| name.strip_suffix(".running_mean"));
    for (kind, start) in [("weight", 0.5), ("bias", 1.0)] {
        for layer in normalised.clone() {
            if let Some(&index) = places.get(&format!("{layer}.{kind}")) {
                replica.store_mut().parameter_mut(index).fill(start);
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
        Slot::Parameter(index) => Cow::Borrowed(replica.store().parameter(index)),
        Slot::State(index) if index < kept => Cow::Borrowed(replica.store().state(index)),
        Slot::State(index) if index > kept => numbers(&batch.targets),
        Slot::State(_) if batch.images.is_empty() => numbers(&batch.tokens),
        Slot::State(_) => Cow::Borrowed(&batch.images[..]),
    };
    let inventory = Inventory { parameters: &replica.parameters, states: &states };
    weights::write(&Disk::real(), file, inventory, &values, &BTreeMap::new()).map_err(Failure::failed)?;
    Ok(())
}
