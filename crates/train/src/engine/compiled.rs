//! One of a replica's two graphs, for training or for evaluation: its executor, and the values by which it is
//! fed and read.

use paceline_data::batch::Batch;
use paceline_nn::Network;
use paceline_tensor::device::cuda::CudaError;
use paceline_tensor::plan::Updates;
use paceline_tensor::{Device, Executor, Plan, Precision, Value, Wanted};

use crate::metrics::Tally;
use crate::micro_batch::MicroBatch;
use crate::replica::{ReplicaOptions, early, wanted};

/// A network whose plan is made and whose memory is not yet taken.
pub(crate) struct Planned {
    pub plan: Plan,
    pub bindings: Bindings,
}

impl Planned {
    /// For the CPU or, if `on_gpu`, with the fusions that a GPU computes.
    pub fn new(network: Network, updates: Updates, options: &ReplicaOptions, on_gpu: bool) -> Self {
        let seed = network.gradients.as_ref().map(|(seed, _)| *seed);
        let bindings = Bindings { x: network.x, targets: network.targets, logits: network.logits, seed };
        let ReplicaOptions { precision, memory, sync_batch_norm, .. } = *options;
        // Gradients that pass through hosts have the buckets of a CPU's plan, on every device.
        let buckets = if on_gpu && options.hosted { self::updates(&network, options, false) } else { updates };
        let bucket_bytes_max = wanted(&network, buckets).bucket_bytes_max;
        let wanted = Wanted { bucket_bytes_max, ..wanted(&network, updates) };
        // In bf16 a step is faster with a pass for the statistics, which reads half as much
        // (docs/performance.md).
        let narrow = precision == Precision::Bf16;
        let moments_from = if on_gpu || narrow { usize::MAX } else { wanted.moments_from };
        // A GPU is given less to copy and to keep.
        let narrow_inputs = if on_gpu { vec![network.x] } else { Vec::new() };
        let (beside, shares_statistics) = (on_gpu, sync_batch_norm);
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
        Self { plan: Plan::new(network.graph, &wanted), bindings }
    }
}

/// When the gradients of a network are applied.
pub(crate) fn updates(network: &Network, options: &ReplicaOptions, on_gpu: bool) -> Updates {
    if on_gpu {
        return Updates::FromArena;
    }
    let Some((_, gradients)) = network.gradients.as_ref() else { return Updates::AtEnd };
    let all = network.graph.parameters().iter().all(|&parameter| gradients.of(parameter).is_some());
    if options.clip_norm.is_none() && options.accumulate == 1 && options.overlap && !options.separate_gradients && all {
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
}

impl CompiledGraph {
    /// With memory of its own.
    pub fn new(planned: Planned, device: &Device) -> Result<Self, CudaError> {
        Ok(Self { executor: Executor::new(device, planned.plan)?, bindings: planned.bindings })
    }

    /// To run in the memory of another.
    pub fn without_arena(planned: Planned, device: &Device) -> Self {
        Self { executor: Executor::without_arena(device, planned.plan), bindings: planned.bindings }
    }
}

impl CompiledGraph {
    /// Samples that it computes at once.
    pub fn samples(&self) -> usize {
        self.executor.plan().graph().shape(self.bindings.x)[0]
    }
}

/// The values by which a graph is fed and read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bindings {
    pub x: Value,
    pub targets: Value,
    pub logits: Value,
    pub seed: Option<Value>,
}

impl Bindings {
    /// Writes samples of a batch into the inputs, with zeros where there are fewer than planned.
    pub fn fill(
        &self,
        executor: &mut Executor,
        batch: &Batch,
        samples: MicroBatch,
        grad_seed: f32,
    ) -> Result<(), CudaError> {
        if batch.tokens.is_empty() {
            executor.write_first(self.x, samples.slice(&batch.images))?;
        } else {
            executor.write_first(self.x, samples.slice(&batch.tokens))?;
        }
        executor.write_first(self.targets, samples.slice(&batch.targets))?;
        if let Some(seed) = self.seed {
            executor.write(seed, &[grad_seed])?;
        }
        Ok(())
    }

    /// The logits of the rows that samples of a batch have, and how good they are.
    pub fn answers<'a>(&self, executor: &'a Executor, batch: &Batch, samples: MicroBatch) -> (&'a [f32], Tally) {
        let logits = executor.view::<f32>(self.logits).expect("the CPU has memory");
        let rows = self.rows(executor);
        let targets = samples.slice(&batch.targets);
        let logits = &logits[..targets.len() * (logits.len() / rows)];
        let mut tally = Tally::default();
        tally.count(logits, targets);
        (logits, tally)
    }

    /// Rows of logits.
    fn rows(&self, executor: &Executor) -> usize {
        executor.plan().graph().shape(self.logits)[0]
    }
}
