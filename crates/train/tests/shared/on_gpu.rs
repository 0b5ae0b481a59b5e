//! What the tests on a GPU share: the GPU, if there is one, how replicas are built, and batches that teach them something.

use std::io::Write;
use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_nn::optim::{HyperParameters, Optimizer};
use paceline_nn::{Input, Model};
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::{self, Cuda, Options};
use paceline_tensor::{MemoryUse, Precision};
use paceline_train::engine::Place;
use paceline_train::replica::{Replica, ReplicaOptions};

const CLASSES: usize = 10;
pub const BATCH: usize = 16;

pub fn gpu(test: &str) -> Option<Arc<Cuda>> {
    if cuda::count().is_ok_and(|count| count > 0) {
        let options = Options { tf32: false, deterministic: true, tune: false };
        return Some(Arc::new(Cuda::new(0, options).unwrap_or_else(|error| panic!("{error}"))));
    }
    let _ = writeln!(std::io::stderr(), "skipped: {test}: no GPU");
    None
}

pub fn options(optimizer: Optimizer, precision: Precision) -> ReplicaOptions {
    ReplicaOptions {
        input: Input::Image { size: [32, 32], channels: 3 },
        classes: CLASSES,
        micro_batch: BATCH,
        other_sizes: Default::default(),
        accumulate: 1,
        smoothing: 0.1,
        seed: 3,
        rule: optimizer.rule(&HyperParameters::default()).unwrap(),
        precision,
        memory: MemoryUse::Normal,
        sync_batch_norm: false,
        overlap: true,
        hosted: false,
        separate_gradients: false,
        slots: 0,
        shard: None,
        clip_norm: None,
    }
}

/// Images whose brightness tells their class, so that there is something to learn.
pub fn batch(step: u64) -> Batch {
    let mut random = Random::new(&[7, step]);
    let targets: Vec<i32> = (0..BATCH).map(|_| random.below(CLASSES) as i32).collect();
    let images = targets.iter().enumerate().flat_map(|(index, &target)| {
        let mut noise = Random::new(&[9, step, index as u64]);
        (0..32 * 32 * 3).map(move |_| 0.3 * noise.normal() + target as f32 / 5.0 - 1.0)
    });
    Batch { size: BATCH, images: images.collect(), targets, ..Batch::default() }
}

/// A replica on the GPU.
#[allow(dead_code)]
pub fn replica(model: &dyn Model, options: ReplicaOptions, cpu: &Arc<Cpu>, cuda: &Arc<Cuda>) -> Replica {
    Replica::at(model, options, &Place::Cuda(Arc::clone(cpu), Arc::clone(cuda))).unwrap()
}
