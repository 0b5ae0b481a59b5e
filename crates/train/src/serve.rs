//! A process that holds parameters: it prepares the run as a worker does, computes nothing, and applies what workers push.

use paceline_comm::Communicator;
use paceline_nn::optim::{self, Buffers, Moment, Tools};
use paceline_nn::schedule::{LearningRate, RunLength};
use paceline_parallel::agree::BucketShape;
use paceline_parallel::agree::parameter_server::server::{Keeper, Push, Shape, serve};
use paceline_parallel::agree::parameter_server::{Pace, Roles};

use crate::config::Config;
use crate::error::TrainError;
use crate::replica::Replica;
use crate::trainer::{Prepared, Surroundings, prepare};

/// What an agreement has to know of a replica's buckets.
pub fn bucket_shapes(replica: &Replica) -> Vec<BucketShape> {
    shapes(replica.buckets())
}

/// The same of a plan's buckets.
pub fn shapes(buckets: &[paceline_tensor::plan::Bucket]) -> Vec<BucketShape> {
    let shape = |bucket: &paceline_tensor::plan::Bucket| BucketShape {
        start: bucket.elements.start,
        elements: bucket.elements.len(),
        ready_after: bucket.ready_after,
        needed_before: bucket.needed_before,
    };
    buckets.iter().map(shape).collect()
}

/// Serves the workers of a run until all have ended; how often a step ended so many steps ahead of the slowest other worker.
///
/// # Errors
/// When the run cannot be prepared, or a worker has failed.
pub fn serve_parameters(
    config: &Config,
    around: &Surroundings,
    communicator: Communicator,
    (roles, pace): (Roles, Pace),
) -> Result<Vec<u64>, TrainError> {
    let Prepared { mut replica, train, .. } = prepare(config, around)?;
    let steps_per_epoch = train.steps() as u64;
    let total_steps = config.epochs.saturating_mul(steps_per_epoch);
    let length = RunLength { total_steps, steps_per_epoch, global_batch: config.batch };
    drop(train);
    serve_replica(&mut replica, communicator, (roles, pace), (&config.learning_rate, length))
}

/// As [`serve_parameters`], with a replica that is ready.
///
/// # Errors
/// When a worker has failed.
pub fn serve_replica(
    replica: &mut Replica,
    communicator: Communicator,
    (roles, pace): (Roles, Pace),
    (learning_rate, length): (&LearningRate, RunLength),
) -> Result<Vec<u64>, TrainError> {
    let shape = Shape {
        roles,
        pace,
        buckets: bucket_shapes(replica),
        parameters: replica.store.parameters.len(),
        states: replica.store.states.len(),
        slots: replica.optimizer_state.len(),
    };
    Ok(serve(communicator, shape, &mut Holder { replica, learning_rate, length, first_step: 0 })?)
}

/// Applies pushes with the optimizer of a replica that does not train.
struct Holder<'a> {
    replica: &'a mut Replica,
    learning_rate: &'a LearningRate,
    length: RunLength,
    /// Of this process: a resumed run goes on from a later one.
    first_step: u64,
}

impl Keeper for Holder<'_> {
    fn begin(&mut self, step: u64) {
        self.first_step = step;
    }

    fn apply(&mut self, push: Push<'_>) {
        let Push { bucket, start, step, gradients, weights } = push;
        let step = self.first_step + step;
        let moment = Moment { step, learning_rate: self.learning_rate.rate(step, self.length) };
        self.replica.apply_push(moment, bucket, start, gradients, weights);
    }

    fn resume(&mut self, slot: usize, state: &[f32]) {
        self.replica.optimizer_state[slot].copy_from_slice(state);
    }

    fn state(&mut self, slot: usize) -> &mut [f32] {
        &mut self.replica.optimizer_state[slot]
    }
}

impl Replica {
    fn apply_push(&mut self, moment: Moment, bucket: usize, start: usize, gradients: &[f32], weights: &mut [f32]) {
        let (rule, numbers) = (self.options().rule, self.buckets()[bucket].parameters.clone());
        let device = std::sync::Arc::clone(self.device());
        let (segments, sums, state) = self.optimizer_parts();
        let state = optim::state_of(state, start..start + weights.len());
        let buffers = Buffers { start, weights, gradients, state };
        rule.update(moment, &segments[numbers], buffers, &mut Tools { cpu: &device, sums });
    }
}
