//! One of a replica's graphs, for training or for evaluation: its executor, and the values by which it is fed and
//! read, from a batch or from the stages before and behind it.

use std::borrow::Cow;

use paceline_data::batch::Batch;
use paceline_nn::StageNetwork;
use paceline_nn::stage::StageGradients;
use paceline_parallel::stage::Side;
use paceline_tensor::device::cuda::CudaError;
use paceline_tensor::plan::Updates;
use paceline_tensor::{Device, Executor, Plan, Precision, Value, Wanted};

use super::{Event, Halt, Listener};
use crate::metrics::Tally;
use crate::micro_batch::MicroBatch;
use crate::replica::{ReplicaOptions, early, wanted};

/// A network whose plan is made and whose memory is not yet taken.
pub(crate) struct Planned {
    pub plan: Plan,
    pub bindings: Bindings,
    /// Samples that it computes at once.
    pub samples: usize,
}

impl Planned {
    /// For the CPU or, if `on_gpu`, with the fusions that a GPU computes.
    pub fn new(
        network: impl Into<StageNetwork>,
        samples: usize,
        updates: Updates,
        options: &ReplicaOptions,
        on_gpu: bool,
    ) -> Self {
        let network = network.into();
        // A stage on a GPU is run node by node, with the host's buckets.
        let in_session = on_gpu && !options.is_staged();
        let bindings = Bindings::of(&network);
        let ReplicaOptions { precision, memory, sync_batch_norm, .. } = *options;
        // Gradients that pass through hosts have the buckets of a CPU's plan, on every device.
        let buckets = if in_session && options.hosted { self::updates(&network, options, false) } else { updates };
        let bucket_bytes_max = wanted(&network, buckets).bucket_bytes_max;
        let wanted = Wanted { bucket_bytes_max, ..wanted(&network, updates) };
        // In bf16 a step is faster with a pass for the statistics, which reads half as much
        // (docs/performance.md).
        let narrow = precision == Precision::Bf16;
        let moments_from = if on_gpu || narrow { usize::MAX } else { wanted.moments_from };
        // A GPU is given less to copy and to keep.
        let narrow_inputs = network.x.filter(|_| in_session).into_iter().collect();
        let (beside, shares_statistics) = (in_session, sync_batch_norm);
        let weights_last = options.separate_gradients;
        let wanted = Wanted {
            narrow_inputs,
            precision,
            memory,
            shares_statistics,
            moments_from,
            beside,
            weights_last,
            ..wanted
        };
        Self { plan: Plan::new(network.graph, &wanted), bindings, samples }
    }
}

/// When the gradients of a network are applied.
pub(crate) fn updates(network: &StageNetwork, options: &ReplicaOptions, on_gpu: bool) -> Updates {
    if on_gpu && !options.is_staged() {
        return Updates::FromArena;
    }
    let Some(gradients) = network.gradients.as_ref() else { return Updates::AtEnd };
    let all = network.graph.parameters().iter().all(|&parameter| gradients.of.of(parameter).is_some());
    // Gradients of several micro-batches are added up as they come, bucket by bucket, and applied later.
    let as_they_come = options.clip_norm.is_none() && options.overlap && !options.separate_gradients;
    if all && (options.gathers() && !on_gpu || as_they_come) {
        early(options.rule.needs_whole_tensors() || options.hosted)
    } else {
        Updates::AtEnd
    }
}

/// A graph on a device, for micro-batches of one size.
#[derive(Debug)]
pub(super) struct CompiledGraph {
    pub executor: Executor,
    pub bindings: Bindings,
    /// Samples that it computes at once.
    pub samples: usize,
    /// How long its messages to and from other stages are.
    pub lengths: CrossingLengths,
}

impl CompiledGraph {
    /// With memory of its own.
    pub fn new(planned: Planned, device: &Device) -> Result<Self, CudaError> {
        Ok(Self::of(Executor::new(device, planned.plan)?, planned.bindings, planned.samples))
    }

    /// To run in the memory of another.
    pub fn without_arena(planned: Planned, device: &Device) -> Self {
        Self::of(Executor::without_arena(device, planned.plan), planned.bindings, planned.samples)
    }

    fn of(executor: Executor, bindings: Bindings, samples: usize) -> Self {
        let lengths = bindings.lengths(&executor);
        Self { executor, bindings, samples, lengths }
    }
}

/// The values by which a graph is fed and read.
#[derive(Clone, Debug)]
pub(crate) struct Bindings {
    /// The images or tokens, where they are read.
    pub x: Option<Value>,
    /// The right classes and the answers, in the last stage.
    pub targets: Option<Value>,
    pub logits: Option<Value>,
    /// Of the loss.
    pub seed: Option<Value>,
    /// What comes from the stage before, and its gradients where it has such; one that is not computed is zero.
    pub received: Vec<Value>,
    pub leaving: Vec<(Value, Option<Value>)>,
    /// What goes to the stage behind, and inputs for its gradients.
    pub sent: Vec<Value>,
    pub arriving: Vec<Value>,
}

/// Elements of the messages of a micro-batch, by what they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CrossingLengths {
    /// Activations from the stage before.
    pub received: Vec<usize>,
    /// Activations to the stage behind.
    pub sent: Vec<usize>,
    /// Gradients from the stage behind.
    pub arriving: Vec<usize>,
    /// Gradients to the stage before.
    pub leaving: Vec<usize>,
}

impl CrossingLengths {
    /// There are no messages.
    pub(super) const NONE: &Self =
        &Self { received: Vec::new(), sent: Vec::new(), arriving: Vec::new(), leaving: Vec::new() };
}

impl Bindings {
    fn of(network: &StageNetwork) -> Self {
        let StageNetwork { x, head, received, sent, gradients, .. } = network;
        let none = StageGradients::default();
        let StageGradients { seed, arriving, leaving, .. } = gradients.as_ref().unwrap_or(&none);
        let leaving = received.iter().zip(leaving).filter_map(|(&value, leaving)| Some((value, (*leaving)?)));
        Self {
            x: *x,
            targets: head.map(|head| head.targets),
            logits: head.map(|head| head.logits),
            seed: *seed,
            leaving: leaving.collect(),
            received: received.clone(),
            sent: sent.clone(),
            arriving: arriving.iter().copied().flatten().collect(),
        }
    }

    /// How long its messages are.
    pub fn lengths(&self, executor: &Executor) -> CrossingLengths {
        let elements = |value: &Value| executor.plan().graph().shape(*value).elements();
        CrossingLengths {
            received: self.received.iter().map(elements).collect(),
            sent: self.sent.iter().map(elements).collect(),
            arriving: self.arriving.iter().map(elements).collect(),
            leaving: self.leaving.iter().map(|(value, _)| elements(value)).collect(),
        }
    }

    /// Writes samples of a batch into the inputs, with zeros where there are fewer than planned.
    pub fn fill(
        &self,
        executor: &mut Executor,
        batch: &Batch,
        samples: MicroBatch,
        grad_seed: f32,
    ) -> Result<(), CudaError> {
        match self.x {
            Some(x) if batch.tokens.is_empty() => executor.write_first(x, samples.slice(&batch.images))?,
            Some(x) => executor.write_first(x, samples.slice(&batch.tokens))?,
            None => {}
        }
        if let Some(targets) = self.targets {
            executor.write_first(targets, samples.slice(&batch.targets))?;
        }
        if let Some(seed) = self.seed {
            executor.write(seed, &[grad_seed])?;
        }
        Ok(())
    }

    /// The logits of the rows that samples of a batch have, and how good they are; none but in the last stage.
    pub fn answers<'a>(
        &self,
        executor: &'a Executor,
        batch: &Batch,
        samples: MicroBatch,
    ) -> Result<(Cow<'a, [f32]>, Tally), CudaError> {
        let Some(answers) = self.logits else { return Ok((Cow::Borrowed(&[]), Tally::default())) };
        let logits = match executor.view::<f32>(answers) {
            Some(logits) => Cow::Borrowed(logits),
            None => Cow::Owned(executor.read::<f32>(answers)?),
        };
        let rows = executor.plan().graph().shape(answers)[0];
        let targets = samples.slice(&batch.targets);
        let length = targets.len() * (logits.len() / rows);
        let logits = match logits {
            Cow::Borrowed(logits) => Cow::Borrowed(&logits[..length]),
            Cow::Owned(mut logits) => {
                logits.truncate(length);
                Cow::Owned(logits)
            }
        };
        let mut tally = Tally::default();
        tally.count(&logits, targets);
        Ok((logits, tally))
    }

    /// Takes the activations of the stage before into the inputs.
    pub fn receive(&self, executor: &mut Executor, on: &mut dyn Listener) -> Result<(), Halt> {
        self.received.iter().try_for_each(|&value| {
            executor.fill(value, |numbers| on.on(Event::Receive { from: Side::Before, numbers }))
        })
    }

    /// Gives the activations for the stage behind away.
    pub fn send(&self, executor: &Executor, on: &mut dyn Listener) -> Result<(), Halt> {
        self.sent
            .iter()
            .try_for_each(|&value| executor.look(value, |numbers| on.on(Event::Send { to: Side::Behind, numbers })))
    }

    /// Takes the gradients of the stage behind into the inputs.
    pub fn receive_gradients(&self, executor: &mut Executor, on: &mut dyn Listener) -> Result<(), Halt> {
        self.arriving.iter().try_for_each(|&value| {
            executor.fill(value, |numbers| on.on(Event::Receive { from: Side::Behind, numbers }))
        })
    }

    /// Gives the gradients for the stage before away.
    pub fn send_gradients(&self, executor: &Executor, on: &mut dyn Listener) -> Result<(), Halt> {
        self.leaving.iter().try_for_each(|&(value, gradient)| match gradient {
            Some(gradient) => executor.look(gradient, |numbers| on.on(Event::Send { to: Side::Before, numbers })),
            // Nothing here depends on it.
            None => {
                let zeros = vec![0.0; executor.plan().graph().shape(value).elements()];
                on.on(Event::Send { to: Side::Before, numbers: &zeros })
            }
        })
    }
}
