//! A process that holds parameters: it computes nothing and applies what workers push. It sees no data; the first worker tells
//! it the little that follows from them, and the weights.

use paceline_comm::error::Party;
use paceline_comm::{CommError, Communicator};
use paceline_nn::optim::{self, Buffers, Moment, Rule, Segment, Tools};
use paceline_nn::schedule::{LearningRate, RunLength};
use paceline_nn::{Input, Model, zoo};
use paceline_parallel::agree::parameter_server::server::{Keeper, Push, Shape, hear, serve};
use paceline_parallel::agree::parameter_server::{Pace, Roles};
use paceline_parallel::agree::{BucketShape, Facts};
use paceline_system::limits::Limits;
use paceline_system::memory;
use paceline_tensor::Buffer;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::plan::Bucket;

use crate::config::{Config, SIDE_MAX};
use crate::error::TrainError;
use crate::replica::room::Sizes;
use crate::replica::{self, Replica, ReplicaOptions};
use crate::trainer::options;

/// Channels, tokens in a sequence and classes above which a worker is not believed.
const COUNT_MAX: u64 = 1 << 24;

/// What follows from the data and from where a run begins: all that a server has to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// Steps that were made before.
    pub step: u64,
    /// Updates in one epoch.
    pub steps_per_epoch: u64,
    /// What one sample looks like.
    pub input: Input,
    /// Number of classes.
    pub classes: usize,
}

impl Start {
    /// As numbers.
    pub fn facts(self) -> Facts {
        let Self { step, steps_per_epoch, input, classes } = self;
        let input = match input {
            Input::Image { size: [height, width], channels } => [0, height, width, channels],
            Input::Tokens { sequence } => [1, sequence, 0, 0],
        };
        let [kind, first, second, third] = input.map(|number| number as u64);
        [step, steps_per_epoch, kind, first, second, third, classes as u64, 0]
    }

    /// Of numbers that somebody told; none if they make no sense.
    pub fn from_facts(facts: Facts) -> Option<Self> {
        let [step, steps_per_epoch, kind, first, second, third, classes, _] = facts;
        let side = |number: u64| (1..=SIDE_MAX as u64).contains(&number).then_some(number as usize);
        let count = |number: u64| (1..=COUNT_MAX).contains(&number).then_some(number as usize);
        let input = match kind {
            0 => Input::Image { size: [side(first)?, side(second)?], channels: count(third)? },
            1 => Input::Tokens { sequence: count(first)? },
            _ => return None,
        };
        Some(Self { step, steps_per_epoch, input, classes: count(classes)? })
    }

    /// Hears of it from the first worker.
    ///
    /// # Errors
    /// When a worker, or the way to it, has failed, or says what makes no sense.
    pub fn hear(communicator: &mut Communicator) -> Result<Self, CommError> {
        let facts = hear(communicator)?;
        Self::from_facts(facts).ok_or_else(|| {
            let (rank, peer) = (communicator.rank(), Party::from(paceline_comm::Rank(0)));
            let what = format!("a run of samples that do not exist: {facts:?}");
            CommError::Protocol { rank, peer, phase: "parameter-server", what }
        })
    }
}

/// What an agreement has to know of a replica's buckets.
pub fn bucket_shapes(replica: &Replica) -> Vec<BucketShape> {
    shapes(replica.buckets())
}

/// The same of a plan's buckets.
pub fn shapes(buckets: &[Bucket]) -> Vec<BucketShape> {
    let shape = |bucket: &Bucket| BucketShape {
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
/// When the model does not exist or fit, or a worker has failed.
pub fn serve_parameters(
    config: &Config,
    mut communicator: Communicator,
    (roles, pace): (Roles, Pace),
) -> Result<Vec<u64>, TrainError> {
    config.check()?;
    config.check_world(roles.workers)?;
    let entry = zoo::find(&config.model).map_err(|error| TrainError::Refused(error.to_string()))?;
    let start = Start::hear(&mut communicator)?;
    let options = options(config, roles.workers, (start.input, start.classes))?;
    let cpu = Cpu::placed(config.compute_threads(), config.pin);
    let steps_per_epoch = start.steps_per_epoch;
    let total_steps = config.epochs.saturating_mul(steps_per_epoch);
    let length = RunLength { total_steps, steps_per_epoch, global_batch: config.batch };
    serve_model(entry, (&options, cpu), communicator, (roles, pace), (&config.learning_rate, length, start.step))
}

/// As [`serve_parameters`], after [`Start::hear`], for a model of one's own: the learning rate over a run of this length, from a step on.
///
/// # Errors
/// When a layer does not fit the input, or a worker has failed.
pub fn serve_model(
    model: &dyn Model,
    (options, cpu): (&ReplicaOptions, Cpu),
    communicator: Communicator,
    (roles, pace): (Roles, Pace),
    (learning_rate, length, first_step): (&LearningRate, RunLength, u64),
) -> Result<Vec<u64>, TrainError> {
    let (plan, segments) = replica::plan(model, options)?;
    let (parameters, slots) = (plan.parameters().length(), options.rule.optimizer().state_slots());
    // A server computes nothing, so it has no arena, and its workers keep the gradients.
    let sizes = Sizes::of(Some(&plan), &plan, options, true);
    Sizes { gradients: 0, ..sizes }.check(&Limits::look())?;
    let buckets = plan.buckets().to_vec();
    let shape = Shape { roles, pace, buckets: shapes(&buckets), parameters, states: plan.states().length(), slots };
    let (rule, optimizer_state, sums) =
        (options.rule, memory::caught(|| options.rule.new_state(parameters))?, Vec::new());
    let mut holder = Holder { rule, cpu, segments, buckets, optimizer_state, sums, learning_rate, length, first_step };
    Ok(memory::caught(|| serve(communicator, shape, &mut holder))??)
}

/// Applies pushes: the optimizer of a run and its state.
struct Holder<'a> {
    rule: Rule,
    cpu: Cpu,
    segments: Vec<Segment>,
    buckets: Vec<Bucket>,
    optimizer_state: Vec<Buffer>,
    /// Working memory of the optimizer.
    sums: Vec<f64>,
    learning_rate: &'a LearningRate,
    length: RunLength,
    /// Of this process: a resumed run goes on from a later one.
    first_step: u64,
}

impl Keeper for Holder<'_> {
    fn apply(&mut self, push: Push<'_>) {
        let Push { bucket, start, step, gradients, weights } = push;
        let step = self.first_step + step;
        let moment = Moment { step, learning_rate: self.learning_rate.rate(step, self.length) };
        let state = optim::state_of(&mut self.optimizer_state, start..start + weights.len());
        let buffers = Buffers { start, weights, gradients, state };
        let segments = &self.segments[self.buckets[bucket].parameters.clone()];
        self.rule.update(moment, segments, buffers, &mut Tools { cpu: &self.cpu, sums: &mut self.sums });
    }

    fn resume(&mut self, slot: usize, state: &[f32]) {
        self.optimizer_state[slot].copy_from_slice(state);
    }

    fn state(&mut self, slot: usize) -> &mut [f32] {
        &mut self.optimizer_state[slot]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_is_told_is_what_it_hears() {
        for input in [Input::Image { size: [32, 48], channels: 3 }, Input::Tokens { sequence: 128 }] {
            let start = Start { step: 7, steps_per_epoch: 781, input, classes: 10 };
            assert_eq!(Start::from_facts(start.facts()), Some(start));
        }
    }

    #[test]
    fn samples_that_do_not_exist_are_not_believed() {
        let image =
            Start { step: 0, steps_per_epoch: 1, input: Input::Image { size: [8, 8], channels: 3 }, classes: 10 };
        let spoiled = [(2, 2), (3, 0), (4, 1 << 20), (5, 0), (6, 0), (6, 1 << 30)];
        for (index, value) in spoiled {
            let mut facts = image.facts();
            facts[index] = value;
            assert_eq!(Start::from_facts(facts), None, "{facts:?}");
        }
    }
}
