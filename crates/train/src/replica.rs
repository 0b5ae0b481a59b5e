//! One copy of a model, ready to be trained and evaluated: graphs, memory, optimizer state. It knows nothing of data,
//! files or other replicas.

use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_nn::optim::{self, Buffers, Moment, Rule, Segment};
use paceline_nn::{Input, Mode, Model, Network, Parameter, State};
use paceline_system::host::Host;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::execute::Profile;
use paceline_tensor::{Device, Executor, Pass, Plan, Store, Value, Wanted};

use crate::error::TrainError;
use crate::metrics::Tally;

/// Gradients travel in messages of at most this size: large enough to reach a link's bandwidth, small enough to overlap
/// with the backward pass (25 MiB is also what PyTorch's DDP found to work).
pub const BUCKET_BYTES_MAX: usize = 25 << 20;

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
}

/// A graph on a device, with the names of its ends.
#[derive(Debug)]
struct Half {
    executor: Executor,
    x: Value,
    targets: Value,
    logits: Value,
    loss: Value,
    seed: Option<Value>,
}

/// One copy of a model.
#[derive(Debug)]
pub struct Replica {
    options: ReplicaOptions,
    device: Arc<Cpu>,
    train: Half,
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
        let eval = Network::new(model, Mode::Eval, micro_batch, input, classes, 0.0)?;
        let (parameters, states) = (train.parameters.clone(), train.states.clone());
        let train = Half::new(train, device)?;
        let eval = Half::new(eval, device)?;
        let mut store = Store::new(train.executor.plan());
        for (index, parameter) in parameters.iter().enumerate() {
            parameter.init.fill(options.seed, &parameter.name, &parameter.shape, store.parameter_mut(index));
        }
        for (index, state) in states.iter().enumerate() {
            store.state_mut(index).fill(state.start);
        }
        let segments = parameters.iter().zip(store.layout().ranges());
        let segments =
            segments.map(|(parameter, range)| Segment { range: range.clone(), decay: parameter.decay }).collect();
        let elements = store.parameters.len();
        Ok(Self {
            optimizer_state: options.rule.new_state(elements),
            accumulated: if options.accumulate > 1 { vec![0.0; elements] } else { Vec::new() },
            options,
            device: Arc::clone(device),
            train,
            eval,
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

    /// The plan of the training step.
    pub fn plan(&self) -> &Plan {
        self.train.executor.plan()
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
        let parts = self.options.accumulate;
        let mut tally = Tally::default();
        for part in 0..parts {
            self.train.fill(batch, part, self.options.micro_batch, 1.0 / parts as f32);
            let pass = Pass { seed: self.options.seed, step: step * parts as u64 + part as u64 };
            self.train.executor.run(&mut self.store, pass);
            tally.merge(&self.train.tally(batch, part));
            if parts > 1 {
                self.accumulate(part == 0, part + 1 == parts);
            }
        }
        tally
    }

    /// As one part of [`Replica::compute`], timing every node.
    pub fn profile(&mut self, batch: &Batch, step: u64) -> Profile {
        self.train.fill(batch, 0, self.options.micro_batch, 1.0);
        self.train.executor.profile(&mut self.store, Pass { seed: self.options.seed, step })
    }

    /// The layer and operation whose result is not finite for this batch, looking at each in order.
    pub fn find_non_finite(&mut self, batch: &Batch, step: u64) -> Option<(String, &'static str)> {
        (0..self.options.accumulate).find_map(|part| {
            self.train.fill(batch, part, self.options.micro_batch, 1.0);
            let pass = Pass { seed: self.options.seed, step: step * self.options.accumulate as u64 + part as u64 };
            self.train.executor.find_non_finite(&mut self.store, pass)
        })
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

    /// The mean training loss that the last part's graph computed, label smoothing included.
    pub fn graph_loss(&self) -> f32 {
        self.train.executor.read::<f32>(self.train.loss)[0]
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

impl Half {
    fn new(network: Network, device: &Arc<Cpu>) -> Result<Self, TrainError> {
        let (seed, gradients) = match &network.gradients {
            None => (None, Vec::new()),
            Some((seed, gradients)) => {
                (Some(*seed), network.graph.parameters().iter().map(|&parameter| gradients.of(parameter)).collect())
            }
        };
        let outputs = vec![network.logits, network.loss];
        let wanted = Wanted { outputs, gradients, bucket_bytes_max: BUCKET_BYTES_MAX, unfused: false };
        let plan = Plan::new(network.graph, &wanted);
        check_memory(plan.arena_bytes() as u64, Host::look().memory_bytes)?;
        let executor = Executor::new(&Device::Cpu(Arc::clone(device)), plan);
        Ok(Self { executor, x: network.x, targets: network.targets, logits: network.logits, loss: network.loss, seed })
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
