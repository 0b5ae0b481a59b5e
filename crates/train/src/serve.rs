//! A process that holds parameters: it computes nothing and applies what workers push. It sees no data; the
//! first worker tells it the little that follows from them, and the weights.

mod journal;

use std::time::Duration;

pub use journal::ServerJournal;
use paceline_comm::error::Party;
use paceline_comm::memory_box::Lending;
use paceline_comm::{CommError, Communicator};
use paceline_data::order;
use paceline_nn::optim::{self, Buffers, Moment, Rule, Segment, Tools};
use paceline_nn::schedule::{LearningRate, RunLength};
use paceline_nn::{Input, Model};
use paceline_parallel::agree::{
    self, Join, Push, Recipe, Roles, RunIdentity, ServerShard, Shape, Steps, receive_identity,
};
use paceline_system::clock::Clock;
use paceline_system::limits::Limits;
use paceline_system::memory;
use paceline_system::random;
use paceline_tensor::Buffer;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::plan::Bucket;

use crate::config::{Config, SIDE_MAX};
use crate::engine::sizes::Sizes;
use crate::error::TrainError;
use crate::micro_batch::MicroBatchSizes;
use crate::registry::Registry;
use crate::replica::{self, ReplicaOptions};
use crate::stage::ModelStage;
use crate::trainer::options;

/// Channels, tokens in a sequence and classes above which a worker is not believed.
const COUNT_MAX: u64 = 1 << 24;

/// What follows from the data and from where a run begins: all that a server has to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerOptions {
    /// Steps that were made before.
    pub step: u64,
    /// Updates in one epoch.
    pub steps_per_epoch: u64,
    /// What one sample looks like.
    pub input: Input,
    /// Number of classes.
    pub classes: usize,
    /// Tells models apart whose gradients would not fit together: see [`fingerprint`].
    pub shape: u64,
}

/// A number of 40 bits that differs where two ranks would send different buckets.
pub fn fingerprint(shape: &Shape) -> u64 {
    let buckets = shape.buckets.iter().flat_map(|bucket| [bucket.start as u64, bucket.elements as u64]);
    let all: Vec<u64> =
        buckets.chain([shape.parameters, shape.states, shape.slots].map(|count| count as u64)).collect();
    random::key(&all) >> 24
}

impl ServerOptions {
    /// As numbers.
    pub fn identity(self) -> RunIdentity {
        let Self { step, steps_per_epoch, input, classes, shape } = self;
        let input = match input {
            Input::Image { size: [height, width], channels } => [0, height, width, channels],
            Input::Tokens { sequence } => [1, sequence, 0, 0],
        };
        let [kind, first, second, third] = input.map(|number| number as u64);
        [step, steps_per_epoch, kind, first, second, third, classes as u64, shape]
    }

    /// Of numbers that somebody told; none if they make no sense.
    pub fn from_identity(identity: RunIdentity) -> Option<Self> {
        let [step, steps_per_epoch, kind, first, second, third, classes, shape] = identity;
        let side = |number: u64| (1..=SIDE_MAX as u64).contains(&number).then_some(number as usize);
        let count = |number: u64| (1..=COUNT_MAX).contains(&number).then_some(number as usize);
        let input = match kind {
            0 => Input::Image { size: [side(first)?, side(second)?], channels: count(third)? },
            1 => Input::Tokens { sequence: count(first)? },
            _ => return None,
        };
        Some(Self { step, steps_per_epoch, input, classes: count(classes)?, shape })
    }

    /// Receives it from the first worker.
    ///
    /// # Errors
    /// When a worker, or the way to it, has failed, or says what makes no sense.
    pub fn receive(communicator: &mut Communicator) -> Result<Self, CommError> {
        let identity = receive_identity(communicator)?;
        let what = || format!("a run of samples that do not exist: {identity:?}");
        Self::from_identity(identity).ok_or_else(|| violation(communicator, what()))
    }
}

fn violation(communicator: &Communicator, what: String) -> CommError {
    let (rank, peer) = (communicator.rank(), Party::from(paceline_comm::Rank(0)));
    CommError::Protocol { rank, peer, phase: "serve", what }
}

/// Whom a server serves, and how long it waits for them.
#[derive(Debug)]
pub struct Serving {
    /// How workers agree, with its options.
    pub recipe: &'static dyn Recipe,
    /// Its options.
    pub options: agree::Options,
    /// Which ranks do what.
    pub roles: Roles,
    /// To all of them.
    pub communicator: Communicator,
    /// Where memory boxes are, for agreements that use them.
    pub lending: Option<Lending>,
    /// How long to wait for an answer.
    pub deadline: Duration,
    /// What times are read from.
    pub clock: Clock,
    /// What the server tells.
    pub journal: ServerJournal,
}

/// Serves the workers of a run until all have ended. `hosted` says whether some of them compute on GPUs.
///
/// # Errors
/// When the model does not exist or fit, or a worker has failed.
pub fn serve_parameters(
    config: &Config,
    registry: &Registry,
    mut serving: Serving,
    hosted: bool,
) -> Result<(), TrainError> {
    let workers = serving.roles.workers;
    config.check()?;
    config.check_world(workers)?;
    let model = registry.find_model(&config.model)?;
    let told = ServerOptions::receive(&mut serving.communicator)?;
    // Of the plan only buckets and parameters matter here, and they are those of any share.
    let sizes = MicroBatchSizes::of(config, order::Shard { rank: 0, world: workers }, None);
    let sizes = MicroBatchSizes { others: Default::default(), ..sizes };
    let options = options(config, sizes, (workers, hosted), (told.input, told.classes))?;
    let cpu = Cpu::placed(config.compute_threads(), config.pin);
    let steps_per_epoch = told.steps_per_epoch;
    let total_steps = config.epochs.saturating_mul(steps_per_epoch);
    let length = RunLength { total_steps, steps_per_epoch, global_batch: config.batch };
    let rates = Rates { learning_rate: &config.learning_rate, length, first_step: told.step };
    serve_model(&model, (&options, cpu), serving, (told, rates))
}

/// The learning rate over a run of this length, from a step on.
#[derive(Clone, Copy, Debug)]
pub struct Rates<'a> {
    /// Over time.
    pub learning_rate: &'a LearningRate,
    /// The run's length.
    pub length: RunLength,
    /// Of this process: a resumed run goes on from a later one.
    pub first_step: u64,
}

/// As [`serve_parameters`], after [`ServerOptions::receive`], for a model of one's own.
///
/// # Errors
/// When a layer does not fit the input, or a worker has failed or another model.
pub fn serve_model(
    model: &dyn Model,
    (options, cpu): (&ReplicaOptions, Cpu),
    serving: Serving,
    (told, rates): (ServerOptions, Rates<'_>),
) -> Result<(), TrainError> {
    let (plan, parameters, segments) = replica::plan(ModelStage::whole(model), options)?;
    let (elements, slots) = (plan.parameters().length(), options.rule.optimizer().state_slots());
    // A server computes nothing, so it has no arena, and its workers keep the gradients.
    let sizes = Sizes::of(Some(&plan), &plan, options, true);
    Sizes { gradients: 0, ..sizes }.check(&Limits::look())?;
    let mut shape = replica::shape(&plan, &parameters, slots);
    let Serving { recipe, options: agreement, roles, communicator, lending, deadline, clock, mut journal } = serving;
    let protocol = recipe.protocol(&shape, &agreement);
    // As in `Trainer::agree`: buckets that do not travel are each device's own.
    if !protocol.gradients_leave() {
        shape.buckets.clear();
    }
    if fingerprint(&shape) != told.shape {
        return Err(violation(&communicator, "another model than this server has".into()).into());
    }
    let buckets = plan.buckets().to_vec();
    let held = if protocol.steps == Steps::Servers { elements } else { 0 };
    let (rule, optimizer_state, sums) = (options.rule, memory::caught(|| options.rule.new_state(held))?, Vec::new());
    journal.begin(elements as u64, told.step);
    let mut shard = Shard { rule, cpu, segments, buckets, optimizer_state, sums, rates, journal };
    let join = Join {
        communicator,
        urgent: None,
        group: None,
        memory: None,
        lending,
        roles,
        shape: &shape,
        options: agreement,
        deadline,
        clock,
    };
    let served = memory::caught(|| recipe.serve(join, &mut shard));
    let served = served.map_err(TrainError::from).and_then(|served| served.map_err(TrainError::from));
    shard.journal.end(served.as_ref().err().map(ToString::to_string));
    served
}

/// Applies pushes: the optimizer of a run and its state.
struct Shard<'a> {
    rule: Rule,
    cpu: Cpu,
    segments: Vec<Segment>,
    buckets: Vec<Bucket>,
    optimizer_state: Vec<Buffer>,
    /// Working memory of the optimizer.
    sums: Vec<f64>,
    rates: Rates<'a>,
    journal: ServerJournal,
}

impl ServerShard for Shard<'_> {
    fn apply(&mut self, push: Push<'_>) {
        let Push { bucket, start, step, rate_share, gradients, weights } = push;
        let Rates { learning_rate, length, first_step } = self.rates;
        let step = first_step + step;
        let moment = Moment { step, learning_rate: rate_share * learning_rate.rate(step, length) };
        let state = optim::state_of(&mut self.optimizer_state, start..start + weights.len());
        let buffers = Buffers { start, weights, gradients, state };
        let segments = &self.segments[self.buckets[bucket].parameters.clone()];
        let Self { rule, cpu, sums, journal, .. } = self;
        journal.update(step, || rule.update(moment, segments, buffers, &mut Tools { cpu, sums }));
    }

    fn change(&mut self, steps: u64, change: &mut dyn FnMut()) {
        self.journal.update(steps, change);
    }

    fn stepped(&mut self, worker: usize, missed: u64) {
        self.journal.stepped(worker, missed);
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
            let start = ServerOptions { step: 7, steps_per_epoch: 781, input, classes: 10, shape: 5 };
            assert_eq!(ServerOptions::from_identity(start.identity()), Some(start));
        }
    }

    #[test]
    fn samples_that_do_not_exist_are_not_believed() {
        let image = ServerOptions {
            step: 0,
            steps_per_epoch: 1,
            input: Input::Image { size: [8, 8], channels: 3 },
            classes: 10,
            shape: 5,
        };
        let spoiled = [(2, 2), (3, 0), (4, 1 << 20), (5, 0), (6, 0), (6, 1 << 30)];
        for (index, value) in spoiled {
            let mut facts = image.identity();
            facts[index] = value;
            assert_eq!(ServerOptions::from_identity(facts), None, "{facts:?}");
        }
    }
}
