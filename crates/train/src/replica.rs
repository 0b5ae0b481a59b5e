//! One copy of a model, ready to be trained and evaluated: graphs, memory, optimizer state. It knows nothing of data,
//! files or other replicas.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use paceline_data::batch::Batch;
use paceline_nn::optim::{self, Buffers, Moment, Rule, Segment};
use paceline_nn::{Input, Mode, Model, Network, Parameter, State};
use paceline_system::host::Host;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::execute::Profile;
use paceline_tensor::{Device, Executor, Pass, Plan, Precision, Store, Value, Wanted};

use crate::error::TrainError;
use crate::metrics::Tally;

/// Gradients travel in messages of at most this size: large enough to reach a link's bandwidth, small enough to overlap
/// with the backward pass (25 MiB is also what PyTorch's DDP found to work).
pub const BUCKET_BYTES_MAX: usize = 25 << 20;

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
}

/// A graph on a device, with the names of its ends.
#[derive(Debug)]
struct Half {
    executor: Executor,
    x: Value,
    targets: Value,
    logits: Value,
    seed: Option<Value>,
}

/// One copy of a model.
#[derive(Debug)]
pub struct Replica {
    options: ReplicaOptions,
    device: Arc<Cpu>,
    /// None if it only evaluates.
    train: Option<Half>,
    eval: Half,
    /// Weights, gradients and running statistics.
    pub store: Store,
    /// What the parameters are.
    pub parameters: Vec<Parameter>,
    /// What the states are.
    pub states: Vec<State>,
    /// The optimizer's buffers.
    pub optimizer_state: Vec<Vec<f32>>,
    segments: Vec<Segment>,
    /// The sum of gradients over the parts of a batch; empty if there is one part.
    accumulated: Vec<f32>,
}

impl Replica {
    /// Builds and plans a model's graphs, takes their memory and starts the weights.
    ///
    /// # Errors
    /// When a layer does not fit the input, which the error names, or the plan does not fit the machine's memory.
    pub fn new(model: &dyn Model, options: ReplicaOptions, device: &Arc<Cpu>) -> Result<Self, TrainError> {
        let ReplicaOptions { input, classes, micro_batch, smoothing, .. } = options;
        let train = Network::new(model, Mode::Train, micro_batch, input, classes, smoothing)?;
        Self::assemble(model, options, device, Some(train))
    }

    /// As [`Replica::new`], without the memory that only training needs; it can only evaluate.
    ///
    /// # Errors
    /// As [`Replica::new`].
    pub fn for_evaluation(model: &dyn Model, options: ReplicaOptions, device: &Arc<Cpu>) -> Result<Self, TrainError> {
        Self::assemble(model, options, device, None)
    }

    fn assemble(
        model: &dyn Model,
        options: ReplicaOptions,
        device: &Arc<Cpu>,
        train: Option<Network>,
    ) -> Result<Self, TrainError> {
        let ReplicaOptions { input, classes, micro_batch, .. } = options;
        let eval = Network::new(model, Mode::Eval, micro_batch, input, classes, 0.0)?;
        let (parameters, states) = (eval.parameters.clone(), eval.states.clone());
        let trains = train.is_some();
        let plan = |network| Planned::new(network, options.precision);
        let (train, eval) = (train.map(plan), plan(eval));
        let elements = eval.plan.parameters().length();
        let slots =
            if trains { 2 + options.rule.optimizer().state_slots() + usize::from(options.accumulate > 1) } else { 1 };
        let arenas = eval.plan.arena_bytes() + train.as_ref().map_or(0, |train| train.plan.arena_bytes());
        check_memory((arenas + slots * elements * size_of::<f32>()) as u64, Host::look().memory_bytes)?;
        let mut store = Store::new(train.as_ref().map_or(&eval.plan, |train| &train.plan));
        for (index, parameter) in parameters.iter().enumerate() {
            parameter.init.fill(options.seed, &parameter.name, &parameter.shape, store.parameter_mut(index));
        }
        for (index, state) in states.iter().enumerate() {
            store.state_mut(index).fill(state.start);
        }
        let segments = parameters.iter().zip(store.layout().ranges());
        let segments =
            segments.map(|(parameter, range)| Segment { range: range.clone(), decay: parameter.decay }).collect();
        Ok(Self {
            optimizer_state: if trains { options.rule.new_state(elements) } else { Vec::new() },
            accumulated: if trains && options.accumulate > 1 { vec![0.0; elements] } else { Vec::new() },
            options,
            device: Arc::clone(device),
            train: train.map(|train| Half::new(train, device)),
            eval: Half::new(eval, device),
            store,
            parameters,
            states,
            segments,
        })
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

    /// Forward and backward pass over a whole batch: leaves the gradient of the mean loss in the store.
    ///
    /// # Panics
    /// When the batch has another size than planned.
    pub fn compute(&mut self, batch: &Batch, step: u64) -> Tally {
        let ReplicaOptions { accumulate: parts, micro_batch, seed, .. } = self.options;
        let mut tally = Tally::default();
        for part in 0..parts {
            let train = self.train.as_mut().expect(EVALUATES);
            train.fill(batch, part, micro_batch, 1.0 / parts as f32);
            train.executor.run(&mut self.store, Pass { seed, step: step * parts as u64 + part as u64 });
            tally.merge(&train.tally(batch, part));
            if parts > 1 {
                self.accumulate(part == 0, part + 1 == parts);
            }
        }
        tally
    }

    /// As one part of [`Replica::compute`], timing every node.
    ///
    /// # Panics
    /// When the replica was built for evaluation.
    pub fn profile(&mut self, batch: &Batch, step: u64) -> Profile {
        let ReplicaOptions { micro_batch, seed, .. } = self.options;
        let train = self.train.as_mut().expect(EVALUATES);
        train.fill(batch, 0, micro_batch, 1.0);
        train.executor.profile(&mut self.store, Pass { seed, step })
    }

    /// The layer and operation whose result is not finite for this batch, looking at each in order.
    ///
    /// # Panics
    /// When the replica was built for evaluation.
    pub fn find_non_finite(&mut self, batch: &Batch, step: u64) -> Option<(String, &'static str)> {
        let ReplicaOptions { accumulate: parts, micro_batch, seed, .. } = self.options;
        let train = self.train.as_mut().expect(EVALUATES);
        (0..parts).find_map(|part| {
            train.fill(batch, part, micro_batch, 1.0);
            let pass = Pass { seed, step: step * parts as u64 + part as u64 };
            train.executor.find_non_finite(&mut self.store, pass)
        })
    }

    /// Whether every gradient is a number: one pass over memory, a thousandth of a step.
    pub fn gradients_are_finite(&self) -> bool {
        const CHUNK: usize = 1 << 16;
        let gradients = &self.store.gradients;
        let spoiled = AtomicBool::new(false);
        self.device.pool().run(gradients.len().div_ceil(CHUNK), |task, _| {
            let end = gradients.len().min((task + 1) * CHUNK);
            if !is_finite(&gradients[task * CHUNK..end]) {
                spoiled.store(true, Ordering::Relaxed);
            }
        });
        !spoiled.into_inner()
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
        let pool = self.device.pool();
        let run = |tasks: usize, body: &(dyn Fn(usize) + Sync)| pool.run(tasks, |task, _| body(task));
        let norm = optim::global_norm(&self.store.gradients, &self.segments, &run);
        if let Some(factor) = optim::clip_factor(norm, norm_max) {
            optim::scale(&mut self.store.gradients, &self.segments, factor);
        }
        norm
    }

    /// One optimizer update from the gradients in the store.
    pub fn update(&mut self, step: u64, learning_rate: f32) {
        let buffers = Buffers {
            weights: &mut self.store.parameters,
            gradients: &self.store.gradients,
            state: &mut self.optimizer_state,
        };
        let pool = self.device.pool();
        let run = |tasks: usize, body: &(dyn Fn(usize) + Sync)| pool.run(tasks, |task, _| body(task));
        self.options.rule.update(Moment { step, learning_rate }, &self.segments, buffers, &run);
    }

    /// The logits of a batch in evaluation mode, for its `size` samples; it may be smaller than planned.
    pub fn evaluate(&mut self, batch: &Batch) -> (Vec<f32>, Tally) {
        self.eval.fill(batch, 0, self.options.micro_batch, 1.0);
        self.eval.executor.run(&mut self.store, Pass::default());
        let logits = self.eval.executor.read::<f32>(self.eval.logits);
        let mut tally = Tally::default();
        let columns = logits.len() / self.eval.rows();
        let logits = logits[..batch.targets.len() * columns].to_vec();
        tally.count(&logits, &batch.targets);
        (logits, tally)
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

/// A network whose plan is made and whose memory is not yet taken.
struct Planned {
    plan: Plan,
    ends: (Value, Value, Value, Option<Value>),
}

impl Planned {
    fn new(network: Network, precision: Precision) -> Self {
        let seed = network.gradients.as_ref().map(|(seed, _)| *seed);
        let ends = (network.x, network.targets, network.logits, seed);
        let wanted = Wanted { precision, ..network.wanted(BUCKET_BYTES_MAX) };
        Self { plan: Plan::new(network.graph, &wanted), ends }
    }
}

impl Half {
    fn new(planned: Planned, device: &Arc<Cpu>) -> Self {
        let (x, targets, logits, seed) = planned.ends;
        Self { executor: Executor::new(&Device::Cpu(Arc::clone(device)), planned.plan), x, targets, logits, seed }
    }

    /// Rows of logits.
    fn rows(&self) -> usize {
        self.executor.plan().graph().shape(self.logits)[0]
    }

    /// Rows of logits that one part of a batch has: fewer than planned at the end of an evaluation.
    fn part<'a, T>(&self, data: &'a [T], part: usize, planned: usize) -> &'a [T] {
        let start = (part * planned).min(data.len());
        &data[start..(start + planned).min(data.len())]
    }

    /// Writes part `part` of a batch into the inputs, with zeros where the batch is smaller than planned.
    fn fill(&mut self, batch: &Batch, part: usize, micro_batch: usize, grad_seed: f32) {
        let elements = self.executor.plan().graph().shape(self.x).elements();
        assert_eq!(elements % micro_batch, 0, "an input holds whole samples");
        if batch.tokens.is_empty() {
            let images = padded(self.part(&batch.images, part, elements), elements);
            self.executor.write(self.x, &images);
        } else {
            let tokens = padded(self.part(&batch.tokens, part, elements), elements);
            self.executor.write(self.x, &tokens);
        }
        let rows = self.rows();
        let targets = padded(self.part(&batch.targets, part, rows), rows);
        self.executor.write(self.targets, &targets);
        if let Some(seed) = self.seed {
            self.executor.write(seed, &[grad_seed]);
        }
    }

    fn tally(&self, batch: &Batch, part: usize) -> Tally {
        let logits = self.executor.read::<f32>(self.logits);
        let targets = self.part(&batch.targets, part, self.rows());
        let columns = logits.len() / self.rows();
        let mut tally = Tally::default();
        tally.count(&logits[..targets.len() * columns], targets);
        tally
    }
}

/// A plan is known before it runs, so a step that cannot fit is refused instead of being killed half-way. A machine that
/// does not tell its memory is trusted.
fn check_memory(needed_bytes: u64, memory_bytes: u64) -> Result<(), TrainError> {
    if memory_bytes == 0 || needed_bytes <= memory_bytes {
        return Ok(());
    }
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    Err(TrainError::Refused(format!(
        "a step needs {:.1} GB of memory and this machine has {:.1} GB; \
         type a smaller --batch or --size, or compute the batch in parts with --accumulate 4",
        gigabytes(needed_bytes),
        gigabytes(memory_bytes)
    )))
}

fn is_finite(values: &[f32]) -> bool {
    // Without a branch per element, so that it runs at the speed of memory: the exponent of a number is not all ones.
    values.iter().fold(true, |finite, value| finite & value.is_finite())
}

/// `data`, with zeros up to `length`.
fn padded<T: Copy + Default>(data: &[T], length: usize) -> std::borrow::Cow<'_, [T]>
where
    [T]: ToOwned<Owned = Vec<T>>,
{
    if data.len() == length {
        return data.into();
    }
    let mut copy = data.to_vec();
    copy.resize(length, T::default());
    copy.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_larger_than_the_memory_is_refused() {
        assert!(check_memory(10, 10).is_ok() && check_memory(10, 0).is_ok());
        let error = check_memory(20_000_000_000, 16_000_000_000).unwrap_err();
        assert!(
            error.to_string().starts_with("a step needs 20.0 GB of memory and this machine has 16.0 GB"),
            "{error}"
        );
    }
}
