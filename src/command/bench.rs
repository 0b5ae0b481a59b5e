//! `paceline bench`: measurements on random data. Every result is checked before it is timed.

mod bound;
mod check;
mod collectives;
mod gpu_step;
mod kernels;
mod memory;
mod profile;
mod scaling;
mod step;

use std::sync::Arc;

use crate::data::Batch;
use crate::nn::optim::{HyperParameters, Optimizer};
use crate::nn::{Input, Model};
use crate::system::disk::Disk;
use crate::system::random::Random;
use crate::system::threads;
use crate::tensor::device::cpu::Cpu;
use crate::tensor::device::cuda::Options;
use crate::tensor::device::cuda::kept::Kept;
use crate::train::Registry;
use crate::train::compute::Compute;
use crate::train::engine::{CudaEngine, Place};
use crate::train::replica::{Replica, ReplicaOptions};

use super::calibrate::{Calibrate, calibrate, folder, tell};
use super::{Outcome, note};
use crate::arguments::{Bench, BenchCommand, BenchStep};
use crate::failure::Failure;

/// The learning rate of every measured step: small enough that random data stays finite.
const LEARNING_RATE: f32 = 0.001;

/// Runs the command.
pub fn run(arguments: &Bench, registry: &Registry) -> Outcome {
    match &arguments.command {
        BenchCommand::Step(arguments) => match &arguments.check {
            Some(file) => check::run(arguments, file, registry),
            None if arguments.device != Compute::Cpu => gpu_step::run(arguments, registry),
            None => step::run(arguments, registry),
        },
        BenchCommand::Kernels(arguments) => kernels::run(arguments, registry),
        BenchCommand::Scaling(arguments) => scaling::run(arguments),
        BenchCommand::Collectives(arguments) => collectives::run(arguments),
        BenchCommand::Memory(arguments) => memory::run(arguments),
        BenchCommand::CollectivesRank(arguments) => collectives::rank::run(arguments),
    }
}

/// A replica to measure: momentum, one part per batch, the same weights every time. With a norm to clip to, gradients are kept.
fn replica(
    arguments: &BenchStep,
    model: &dyn Model,
    input: Input,
    (batch, clip_norm): (usize, Option<f64>),
) -> Result<Replica, Failure> {
    let rule = Optimizer::Momentum.rule(&HyperParameters::default()).map_err(Failure::refused)?;
    let options = ReplicaOptions {
        input,
        classes: arguments.classes,
        micro_batch: batch,
        other_sizes: Default::default(),
        accumulate: 1,
        smoothing: 0.0,
        seed: 1,
        rule,
        precision: arguments.dtype,
        memory: arguments.memory,
        clip_norm,
        sync_batch_norm: false,
        overlap: true,
        hosted: false,
        separate_gradients: false,
        slots: 0,
        shard: None,
    };
    let cpu = Arc::new(Cpu::placed(arguments.threads.unwrap_or_else(threads::available), arguments.pin));
    cpu.allow_winograd(arguments.winograd);
    if let Compute::Cuda(number) = arguments.device {
        let tune = arguments.calibrate == Calibrate::On;
        let options_of_gpu = Options { tf32: arguments.tf32, deterministic: arguments.deterministic, tune };
        let folder = folder().filter(|_| arguments.calibrate != Calibrate::Off);
        let number = number.unwrap_or(0);
        let gpu = Kept::open(&Disk::real(), folder.as_deref(), number, options_of_gpu).map_err(Failure::refused)?;
        gpu.warning.iter().for_each(|warning| note(&format!("warning: {warning}")));
        let replica = Replica::at(model, options, &Place::Cuda(cpu, Arc::clone(&gpu.cuda)))?;
        match gpu.keep() {
            Ok(0) => {}
            Ok(new) => note(&format!("chose the engines of {new} convolution passes")),
            Err(error) => note(&format!("warning: what was chosen is not kept: {error}")),
        }
        return Ok(replica);
    }
    let replica = Replica::new(model, options, &cpu)?;
    tell(&calibrate(&cpu, replica.plans(), arguments.calibrate));
    Ok(replica)
}

/// The engine of a replica on a GPU.
fn on_gpu(replica: &mut Replica) -> &mut CudaEngine {
    replica.engine.cuda_mut().expect("it is on a GPU")
}

/// Normally distributed images or uniform tokens, and uniform targets.
fn random_batch(input: Input, size: usize, classes: usize) -> Batch {
    let mut random = Random::new(&[1]);
    let mut batch = Batch { size, ..Batch::default() };
    let rows = match input {
        Input::Image { size: [height, width], channels } => {
            batch.images = (0..size * height * width * channels).map(|_| random.normal()).collect();
            size
        }
        Input::Tokens { sequence } => {
            batch.tokens = (0..size * sequence).map(|_| random.below(classes) as i32).collect();
            size * sequence
        }
    };
    batch.targets = (0..rows).map(|_| random.below(classes) as i32).collect();
    batch
}
