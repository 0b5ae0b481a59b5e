//! One copy of a model, ready to be trained and evaluated: graphs, memory, optimizer state. It knows nothing of data,
//! files, and of other replicas only through an [`Agreement`].
//!
//! A step updates the weights during the backward pass, bucket by bucket as gradients become final, so that the gradients
//! never exist all at once. Where something has to look at all of them first (a norm to clip to, parts of a batch to be
//! summed) they are kept and the update follows at the end. The bits are the same.

mod agreed;
mod finite;
pub mod guard;
mod half;
mod joined;
mod on_gpu;
mod rescue;
pub(crate) mod room;

use std::ops::Range;
use std::sync::Arc;

use finite::{all_finite, is_finite};
use half::{Half, Planned, updates};
pub use on_gpu::Albums;
use on_gpu::OnGpu;
use paceline_data::batch::Batch;
use paceline_nn::optim::{self, Buffers, Moment, Rule, Segment, Tools};
use paceline_nn::{Input, Mode, Model, Network, Parameter, State};
use paceline_parallel::Agreement;
use paceline_system::limits::Limits;
use paceline_system::memory;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::{Cuda, CudaError};
use paceline_tensor::execute::{Profile, Turn};
use paceline_tensor::plan::{Bucket, Layout, Updates};
use paceline_tensor::{Buffer, Device, Executor, MemoryUse, Pass, Plan, Precision, Store, Wanted};
use rescue::Boundary;
use room::Sizes;

use crate::error::TrainError;
use crate::metrics::Tally;
use crate::phases::Phases;

/// Gradients travel in messages of at most this size: large enough to reach a link's bandwidth, small enough to overlap
/// with the backward pass (25 MiB is also what PyTorch's DDP found to work).
pub const BUCKET_BYTES_MAX: usize = 25 << 20;

/// Gradients that do not travel are applied in buckets of at most this size, while they are still in the caches: on two
/// cores of a Zen 4, the update of resnet50 took 8.6 ms with 4 MiB and 10.9 ms with 16 MiB.
const BUCKET_BYTES_LOCAL: usize = 4 << 20;

/// A matrix whose gradient is larger is applied in parts. They are large enough that the product writes past the caches:
/// the products of VGG's classifier took 52 ms with 32 MiB, 48 ms whole, and 140 ms in parts of 4 MiB.
const PART_BYTES_MAX: usize = 32 << 20;

const EVALUATES: &str = "a replica built for evaluation does not train";

/// How a replica is built.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaOptions {
    /// What one sample looks like.
    pub input: Input,
    /// Number of classes.
    pub classes: usize,
    /// Samples computed at once.
    pub micro_batch: usize,
    /// Parts of a batch, computed one after the other.
    pub accumulate: usize,
    /// Label smoothing of the training loss.
    pub smoothing: f32,
    /// Decides the initial weights and dropout.
    pub seed: u64,
    /// The update rule.
    pub rule: Rule,
    /// What activations are stored as.
    pub precision: Precision,
    /// Whether what is cheap to compute again is kept for the backward pass. Changes no bit, and nothing in an evaluation.
    pub memory: MemoryUse,
    /// Gradients are scaled down to this norm over all parameters. Infinity changes nothing, and keeps them to be looked at.
    pub clip_norm: Option<f64>,
    /// Whether batch normalisations take their statistics over all replicas.
    pub sync_batch_norm: bool,
}

/// What stopped a step: nothing was applied after it was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotFinite {
    /// The loss is not a number. The weights are unchanged.
    Loss,
    /// The gradient of this parameter is not. Parameters whose gradients were final before may have changed.
    Gradient(usize),
}

/// One copy of a model.
#[derive(Debug)]
pub struct Replica {
    options: ReplicaOptions,
    device: Arc<Cpu>,
    /// Where it computes, if not on the CPU.
    gpu: Option<OnGpu>,
    /// None if it only evaluates.
    train: Option<Half>,
    /// Runs in the arena of `train`, if there is one: they never run at the same time.
    eval: Half,
    /// Weights, running statistics and, where they are kept, gradients.
    pub store: Store,
    /// What the parameters are.
    pub parameters: Vec<Parameter>,
    /// What the states are.
    pub states: Vec<State>,
    /// The optimizer's buffers.
    pub optimizer_state: Vec<Buffer>,
    segments: Vec<Segment>,
    buckets: Vec<Bucket>,
    /// The sum of gradients over the parts of a batch; empty if there is one part.
    accumulated: Buffer,
    /// Working memory of the optimizer.
    sums: Vec<f64>,
    /// With the other replicas.
    agreement: Agreement,
    /// What this replica's gradient counts for.
    share: f32,
    /// The number of its first sample within the global batch of a step.
    first_sample: u64,
    /// The step whose gradients are not all applied.
    pending: Option<Moment>,
    /// Where the last step ended, for whoever survives when another replica is lost.
    boundary: Boundary,
    /// This replica's and then everybody's wishes.
    pub votes: Votes,
}

/// Reasons to end the run after the step, or to save it, counted over replicas, so that all do it after the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Votes {
    /// Somebody was asked to stop.
    pub interrupted: u32,
    /// Somebody's time is over.
    pub time_limit: u32,
    /// The first replica's run was not saved for too long.
    pub checkpoint: u32,
}

/// What the plan of a network's step has to provide.
pub fn wanted(network: &Network, updates: Updates) -> Wanted {
    let bucket_bytes_max = match updates {
        Updates::AtEnd | Updates::FromArena => BUCKET_BYTES_MAX,
        Updates::Early { .. } => BUCKET_BYTES_LOCAL,
    };
    Wanted { updates, ..network.wanted(bucket_bytes_max) }
}

/// Updates as soon as a gradient is final, of whole tensors where the rule needs them.
pub fn early(whole_tensors: bool) -> Updates {
    Updates::Early { part_bytes_max: (!whole_tensors).then_some(PART_BYTES_MAX) }
}

/// The plan of a training step, without its memory, and what its parameters are.
///
/// # Errors
/// When a layer does not fit the input, which the error names.
pub(crate) fn plan(model: &dyn Model, options: &ReplicaOptions) -> Result<(Plan, Vec<Segment>), TrainError> {
    let ReplicaOptions { input, classes, micro_batch, smoothing, .. } = *options;
    let network = Network::new(model, Mode::Train, micro_batch, input, classes, smoothing)?;
    let (updates, parameters) = (updates(&network, options, false), network.parameters.clone());
    let plan = Planned::new(network, updates, options, false).plan;
    let segments = segments(&parameters, plan.parameters());
    Ok((plan, segments))
}

fn segments(parameters: &[Parameter], layout: &Layout) -> Vec<Segment> {
    let both = parameters.iter().zip(layout.ranges());
    both.map(|(parameter, range)| Segment { range: range.clone(), decay: parameter.decay }).collect()
}

impl Replica {
    /// Builds and plans a model's graphs, takes their memory and starts the weights.
    ///
    /// # Errors
    /// When a layer does not fit the input, which the error names, or the plan does not fit the machine's memory.
    pub fn new(model: &dyn Model, options: ReplicaOptions, device: &Arc<Cpu>) -> Result<Self, TrainError> {
        let ReplicaOptions { input, classes, micro_batch, smoothing, .. } = options;
        let train = Network::new(model, Mode::Train, micro_batch, input, classes, smoothing)?;
        Self::assemble(model, options, (device, None), Some(train))
    }

    /// As [`Replica::new`], to compute on a GPU: weights and optimizer live there, and [`Replica::fetch`] brings them to the host.
    ///
    /// # Errors
    /// As [`Replica::new`], when the GPU's memory is too small or a layer cannot be computed there.
    pub fn on_gpu(
        model: &dyn Model,
        options: ReplicaOptions,
        device: &Arc<Cpu>,
        cuda: &Arc<Cuda>,
    ) -> Result<Self, TrainError> {
        let ReplicaOptions { input, classes, micro_batch, smoothing, .. } = options;
        let train = Network::new(model, Mode::Train, micro_batch, input, classes, smoothing)?;
        Self::assemble(model, options, (device, Some(cuda)), Some(train))
    }

    /// As [`Replica::new`], without the memory that only training needs; it can only evaluate, on the CPU or on a GPU.
    ///
    /// # Errors
    /// As [`Replica::new`] and [`Replica::on_gpu`].
    pub fn for_evaluation(
        model: &dyn Model,
        options: ReplicaOptions,
        (device, cuda): (&Arc<Cpu>, Option<&Arc<Cuda>>),
    ) -> Result<Self, TrainError> {
        Self::assemble(model, options, (device, cuda), None)
    }

    fn assemble(
        model: &dyn Model,
        options: ReplicaOptions,
        place: (&Arc<Cpu>, Option<&Arc<Cuda>>),
        train: Option<Network>,
    ) -> Result<Self, TrainError> {
        memory::caught(|| Self::take_memory(model, options, place, train))?
    }

    fn take_memory(
        model: &dyn Model,
        options: ReplicaOptions,
        (device, cuda): (&Arc<Cpu>, Option<&Arc<Cuda>>),
        train: Option<Network>,
    ) -> Result<Self, TrainError> {
        let ReplicaOptions { input, classes, micro_batch, .. } = options;
        let eval = Network::new(model, Mode::Eval, micro_batch, input, classes, 0.0)?;
        let (parameters, states) = (eval.parameters.clone(), eval.states.clone());
        let train = train.map(|network| {
            let updates = updates(&network, &options, cuda.is_some());
            Planned::new(network, updates, &options, cuda.is_some())
        });
        let eval = Planned::new(eval, Updates::AtEnd, &options, cuda.is_some());
        let plan = train.as_ref().map_or(&eval.plan, |train| &train.plan);
        let (elements, trains) = (plan.parameters().length(), train.is_some());
        let sizes = Sizes::of(train.as_ref().map(|train| &train.plan), &eval.plan, &options, cuda.is_some());
        sizes.check(&Limits::look())?;
        let mut store = Store::new(plan);
        let mut optimizer_state = if trains { options.rule.new_state(elements) } else { Vec::new() };
        let given = [&mut store.parameters, &mut store.gradients].into_iter().chain(&mut optimizer_state);
        given.for_each(|buffer| device.pool().touch(buffer));
        for (index, parameter) in parameters.iter().enumerate() {
            parameter.init.fill(options.seed, &parameter.name, &parameter.shape, store.parameter_mut(index));
        }
        for (index, state) in states.iter().enumerate() {
            store.state_mut(index).fill(state.start);
        }
        let segments = segments(&parameters, store.layout());
        let gpu = cuda.map(|cuda| OnGpu::new(cuda, train.as_ref(), &eval, (&segments, &options))).transpose()?;
        let place = cuda.map_or_else(|| Device::Cpu(Arc::clone(device)), |cuda| Device::Cuda(Arc::clone(cuda)));
        let borrows = trains || cuda.is_some();
        Ok(Self {
            optimizer_state,
            accumulated: Buffer::zeroed_for(
                "the gradients",
                if trains && options.accumulate > 1 { elements } else { 0 },
            ),
            options,
            device: Arc::clone(device),
            buckets: plan.buckets().to_vec(),
            eval: if borrows { Half::without_arena(eval, &place) } else { Half::new(eval, &place)? },
            train: train
                .map(|train| match cuda {
                    Some(_) => Ok(Half::without_arena(train, &place)),
                    None => Half::new(train, &place),
                })
                .transpose()?,
            gpu,
            store,
            parameters,
            states,
            segments,
            sums: Vec::new(),
            agreement: Agreement::alone(),
            share: 1.0,
            first_sample: 0,
            pending: None,
            boundary: Boundary::default(),
            votes: Votes::default(),
        })
    }

    /// The buckets of gradients.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The options it was built with.
    pub fn options(&self) -> &ReplicaOptions {
        &self.options
    }

    /// The plan of the training step, or of an evaluation if it only evaluates.
    pub fn plan(&self) -> &Plan {
        self.train.as_ref().unwrap_or(&self.eval).executor.plan()
    }

    /// Every plan that it may run: of the training step, if it trains, and of an evaluation.
    pub fn plans(&self) -> impl Iterator<Item = &Plan> {
        self.train.iter().chain([&self.eval]).map(|half| half.executor.plan())
    }

    /// Where it runs.
    pub fn device(&self) -> &Arc<Cpu> {
        &self.device
    }

    /// The number of trained elements.
    pub fn parameter_count(&self) -> usize {
        self.parameters.iter().map(|parameter| parameter.shape.elements()).sum()
    }

    /// One step: forward and backward pass over a whole batch, and an update of the weights unless it would spoil them. The tally
    /// is of all replicas.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed.
    ///
    /// # Panics
    /// When the replica was built for evaluation.
    pub fn step(&mut self, batch: &Batch, moment: Moment, phases: &mut Phases) -> Result<Stepped, TrainError> {
        self.step_before(batch, moment, phases, &mut || None)
    }

    /// As [`Replica::step`]; a GPU asks for the `next` batch while it computes, and has it copied. [`Replica::take_coming`] gives it back.
    ///
    /// # Errors
    /// As [`Replica::step`].
    ///
    /// # Panics
    /// As [`Replica::step`].
    pub fn step_before(
        &mut self,
        batch: &Batch,
        moment: Moment,
        phases: &mut Phases,
        next: &mut dyn FnMut() -> Option<Batch>,
    ) -> Result<Stepped, TrainError> {
        if self.gpu.is_some() {
            return self.step_on_gpu(batch, moment, phases, next);
        }
        let _bound = self.device.pool().enter();
        self.begin_step(moment.step);
        match (self.world(), self.plan().stores_gradients()) {
            (1, true) => self.step_at_end(batch, moment, phases),
            (1, false) => self.step_early(batch, moment, phases),
            (_, true) => self.step_together(batch, moment, phases),
            (_, false) => self.step_overlapped(batch, moment, phases),
        }
    }

    fn step_at_end(&mut self, batch: &Batch, moment: Moment, phases: &mut Phases) -> Result<Stepped, TrainError> {
        let tally = phases.time("compute", || self.compute(batch, moment.step))?;
        Ok(self.finish_step(tally, moment, phases))
    }

    /// Clips and applies the gradients in the store.
    fn finish_step(&mut self, tally: Tally, moment: Moment, phases: &mut Phases) -> Stepped {
        let norm = self.options.clip_norm.map(|norm_max| phases.time("clip", || self.clip(norm_max)));
        if !tally.loss.is_finite() {
            return (tally, Err(NotFinite::Loss));
        }
        let finite = norm.map_or_else(|| all_finite(self.device.pool(), &self.store.gradients), f64::is_finite);
        if !finite {
            let spoiled = |&index: &usize| !is_finite(self.store.gradient(index));
            let parameter = (0..self.parameters.len()).find(spoiled).unwrap_or(0);
            return (tally, Err(NotFinite::Gradient(parameter)));
        }
        phases.time("update", || self.update(moment.step, moment.learning_rate));
        (tally, Ok(()))
    }

    fn step_early(&mut self, batch: &Batch, moment: Moment, phases: &mut Phases) -> Result<Stepped, TrainError> {
        let pass = self.pass(moment.step, 0);
        let (Half { executor, ends }, store, mut updates) = split(self);
        let tally = phases.time("compute", || {
            ends.fill(executor, batch, 0, 1.0)?;
            executor.forward(store, pass)?;
            Ok::<_, CudaError>(ends.answers(executor, batch, 0).1)
        })?;
        if !tally.loss.is_finite() {
            return Ok((tally, Err(NotFinite::Loss)));
        }
        let (mut result, mut update_s, clock) = (Ok(()), 0.0, phases.clock().clone());
        let mut turn = |turn: Turn<'_>| {
            let Turn::Apply { bucket, gradients, parameters } = turn else { return true };
            let start = clock.seconds();
            result = updates.apply(moment, (bucket, 0..gradients.len()), gradients, parameters);
            update_s += clock.seconds() - start;
            result.is_ok()
        };
        phases.time("compute", || executor.backward(store, pass, &mut turn))?;
        phases.shift("compute", "update", update_s);
        Ok((tally, result))
    }

    /// Forward and backward pass over a whole batch: leaves the gradient of the mean loss in the store. For replicas that
    /// keep their gradients; [`Replica::step`] is for all.
    ///
    /// # Errors
    /// When a GPU does not answer.
    ///
    /// # Panics
    /// When the replica was built for evaluation or applies gradients as they come.
    pub fn compute(&mut self, batch: &Batch, step: u64) -> Result<Tally, TrainError> {
        self.compute_with(batch, step, &mut |_| Ok(()))
    }

    /// As [`Replica::compute`]; `add` adds up numbers over all replicas.
    fn compute_with<E: From<CudaError>>(
        &mut self,
        batch: &Batch,
        step: u64,
        add: &mut dyn FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<Tally, E> {
        assert!(self.plan().stores_gradients(), "gradients are applied as they come; ask for a clip_norm to keep them");
        let parts = self.options.accumulate;
        let mut tally = Tally::default();
        for part in 0..parts {
            let pass = self.pass(step, part);
            let Half { executor, ends } = self.train.as_mut().expect(EVALUATES);
            ends.fill(executor, batch, part, self.share / parts as f32)?;
            let mut turn = |turn: Turn<'_>| if let Turn::Sum { numbers, .. } = turn { add(numbers) } else { Ok(()) };
            executor.forward_with(&mut self.store, pass, &mut turn)?;
            let mut result = Ok(());
            executor.backward(&mut self.store, pass, &mut |at| {
                result = turn(at);
                result.is_ok()
            })?;
            result?;
            tally.merge(&ends.answers(executor, batch, part).1);
            if parts > 1 {
                self.accumulate(part == 0, part + 1 == parts);
            }
        }
        Ok(tally)
    }

    /// As one part of a step, timing every node and applying nothing.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the replica was built for evaluation.
    pub fn profile(&mut self, batch: &Batch, step: u64) -> Result<Profile, CudaError> {
        if let Some(gpu) = &mut self.gpu {
            return gpu.profile();
        }
        let pass = self.pass(step, 0);
        let Half { executor, ends } = self.train.as_mut().expect(EVALUATES);
        ends.fill(executor, batch, 0, 1.0)?;
        executor.profile(&mut self.store, pass)
    }

    /// What decides the dropout of a part of a step's batch.
    fn pass(&self, step: u64, part: usize) -> Pass {
        let ReplicaOptions { seed, micro_batch, .. } = self.options;
        Pass { seed, step, first_sample: self.first_sample + (part * micro_batch) as u64, samples: micro_batch }
    }

    /// Where a step went wrong, as layer and operation: the first result that is not finite for this batch. Where later
    /// layers have changed since, there may be none any more; then it is the gradient that was seen.
    ///
    /// # Panics
    /// When the replica was built for evaluation.
    pub fn find_non_finite(&mut self, batch: &Batch, step: u64, seen: NotFinite) -> (String, &'static str) {
        // With a GPU that does not answer, nothing can be computed again.
        let parts = if self.fetch().is_ok() { self.options.accumulate } else { 0 };
        let found = (0..parts).find_map(|part| {
            let pass = self.pass(step, part);
            let Half { executor, ends } = self.train.as_mut().expect(EVALUATES);
            ends.fill(executor, batch, part, 1.0).ok()?;
            executor.find_non_finite(&mut self.store, pass).ok().flatten()
        });
        found.unwrap_or_else(|| match seen {
            NotFinite::Loss => ("loss".into(), "cross_entropy"),
            NotFinite::Gradient(index) => {
                let name = &self.parameters[index].name;
                (name.rsplit_once('.').map_or(name.as_str(), |(layer, _)| layer).to_owned(), "gradient")
            }
        })
    }

    /// The first tensor that holds something that is not a number: a parameter, a state or a buffer of the optimizer.
    pub fn spoiled_tensor(&self) -> Option<String> {
        let named = |index: usize| self.parameters[index].name.clone();
        let parameter = (0..self.parameters.len()).find(|&index| !is_finite(self.store.parameter(index)));
        let state = || (0..self.states.len()).find(|&index| !is_finite(self.store.state(index)));
        let slot = || {
            let spoiled =
                |range: &Range<usize>| self.optimizer_state.iter().any(|slot| !is_finite(&slot[range.clone()]));
            self.store.layout().ranges().iter().position(spoiled)
        };
        parameter
            .map(named)
            .or_else(|| state().map(|index| self.states[index].name.clone()))
            .or_else(|| slot().map(named))
    }

    /// Scales the gradients down to a norm over all parameters, and returns the norm they had.
    pub fn clip(&mut self, norm_max: f64) -> f64 {
        let mut tools = Tools { cpu: &self.device, sums: &mut self.sums };
        let norm = optim::global_norm(&self.store.gradients, &self.segments, &mut tools);
        if let Some(factor) = optim::clip_factor(norm, norm_max) {
            optim::scale(&mut self.store.gradients, factor, &tools);
        }
        norm
    }

    /// One optimizer update from the gradients in the store.
    pub fn update(&mut self, step: u64, learning_rate: f32) {
        let Store { parameters: weights, gradients, .. } = &mut self.store;
        let state = optim::state_of(&mut self.optimizer_state, 0..weights.len());
        let buffers = Buffers { start: 0, weights, gradients, state };
        let tools = &mut Tools { cpu: &self.device, sums: &mut self.sums };
        self.options.rule.update(Moment { step, learning_rate }, &self.segments, buffers, tools);
    }

    /// The logits of a batch in evaluation mode, for its `size` samples; it may be smaller than planned.
    ///
    /// # Errors
    /// When a GPU does not answer.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<(Vec<f32>, Tally), TrainError> {
        if let Some(gpu) = &mut self.gpu {
            return Ok(gpu.evaluate(batch, &self.store, &self.optimizer_state)?);
        }
        let Self { train, eval: Half { executor, ends }, store, .. } = self;
        let mut run = |executor: &mut Executor| {
            ends.fill(executor, batch, 0, 1.0)?;
            executor.run(store, Pass::default())?;
            let (logits, tally) = ends.answers(executor, batch, 0);
            Ok((logits.to_vec(), tally))
        };
        match train {
            Some(train) => train.executor.lend_arena(executor, run),
            None => run(executor),
        }
    }

    fn accumulate(&mut self, first: bool, last: bool) {
        if first {
            self.accumulated.copy_from_slice(&self.store.gradients);
        } else {
            let gradients = &self.store.gradients;
            const CHUNK: usize = 1 << 16;
            self.device.pool().chunks(&mut self.accumulated, CHUNK, |index, sums| {
                sums.iter_mut().zip(&gradients[index * CHUNK..]).for_each(|(sum, gradient)| *sum += gradient);
            });
        }
        if last {
            self.store.gradients.copy_from_slice(&self.accumulated);
        }
    }
}

/// What a step came to: how good the answers were, and what kept it from being applied.
pub type Stepped = (Tally, Result<(), NotFinite>);

/// What applies gradients.
struct Updating<'a> {
    options: &'a ReplicaOptions,
    device: &'a Cpu,
    optimizer_state: &'a mut [Buffer],
    segments: &'a [Segment],
    buckets: &'a [Bucket],
    sums: &'a mut Vec<f64>,
}

/// The parts of a replica that a step uses at the same time.
fn split(replica: &mut Replica) -> (&mut Half, &mut Store, Updating<'_>) {
    let Replica { options, device, store, optimizer_state, segments, buckets, sums, train, .. } = replica;
    (train.as_mut().expect(EVALUATES), store, Updating { options, device, optimizer_state, segments, buckets, sums })
}

impl Updating<'_> {
    /// Changes parameters, some of a bucket's, unless their gradients would spoil them.
    fn apply(
        &mut self,
        moment: Moment,
        (bucket, range): (usize, Range<usize>),
        gradients: &mut [f32],
        parameters: &mut [f32],
    ) -> Result<(), NotFinite> {
        let Self { options, device, optimizer_state, segments, buckets, sums } = self;
        let Bucket { parameters: numbers, elements, .. } = &buckets[bucket];
        let start = elements.start + range.start;
        if all_finite(device.pool(), gradients) {
            let state = optim::state_of(optimizer_state, start..elements.start + range.end);
            let buffers = Buffers { start, weights: parameters, gradients, state };
            options.rule.update(moment, &segments[numbers.clone()], buffers, &mut Tools { cpu: device, sums });
            return Ok(());
        }
        let spoiled = start + gradients.iter().position(|x| !x.is_finite()).unwrap_or(0);
        let parameter = numbers.clone().find(|&number| segments[number].range.contains(&spoiled));
        Err(NotFinite::Gradient(parameter.unwrap_or(numbers.start)))
    }
}
