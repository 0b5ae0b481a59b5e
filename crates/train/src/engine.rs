//! What computes a replica's steps: graphs, memory, weights and optimizer state of the part of the model that
//! is here, on one device.
//!
//! An engine knows nothing of ranks, messages or data sets. In both passes it tells a [`Listener`] what
//! others may want to know: a bucket of gradients is final; parameters are about to be read, or may be
//! changed; numbers have to be summed now. What came back for a bucket is applied through the [`Target`] that
//! comes with the event, wherever the weights are.
//!
//! A `slot` is one micro-batch's activations. Steps update the weights during the backward pass, bucket by
//! bucket as gradients become final, so that gradients never exist all at once. Where something has to look
//! at all of them first (a norm to clip to, parts of a batch to be summed, messages that wait for the end of
//! the pass) they are kept and the update follows in
//! [`Engine::close`]. The bits are the same.

mod chunks;
pub(crate) mod compiled;
mod cpu;
mod cuda;
pub(crate) mod finite;
pub mod guard;
mod nccl;
mod null;
mod shared;
pub(crate) mod sizes;
mod update;

use std::ops::Range;
use std::sync::Arc;

pub use compiled::CrossingLengths;
pub(crate) use compiled::{Planned, updates};
pub use cuda::Albums;
use paceline_data::batch::Batch;
use paceline_nn::optim::{Moment, Segment};
use paceline_parallel::split::StageTimes;
use paceline_parallel::stage::Side;
use paceline_parallel::{Agreement, Ownership};
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::Cuda;
use paceline_tensor::device::null::CostModel;
use paceline_tensor::execute::Profile;
use paceline_tensor::plan::{Bucket, Layout};
use paceline_tensor::{Buffer, Device, Pass, Plan, Store};

pub use self::cpu::CpuEngine;
pub use self::cuda::CudaEngine;
pub use self::null::NullEngine;
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::micro_batch::MicroBatch;
use crate::replica::{NotFinite, ReplicaOptions};

/// Where a replica computes.
#[derive(Clone, Debug)]
pub enum Place {
    /// On the cores of this machine.
    Cpu(Arc<Cpu>),
    /// On a GPU; the cores do what the host has to.
    Cuda(Arc<Cpu>, Arc<Cuda>),
    /// Nowhere: steps take the time that a cost model says.
    Null(Arc<Cpu>, CostModel),
}

/// What computes.
#[derive(Debug)]
pub enum Engine {
    /// On the cores of this machine.
    Cpu(Box<CpuEngine>),
    /// On a GPU.
    Cuda(Box<CudaEngine>),
    /// Nowhere.
    Null(Box<NullEngine>),
}

/// Weights, running statistics and the optimizer's state, as the host has them.
#[derive(Debug)]
pub struct Weights {
    /// Parameters, states and, where they are kept, gradients.
    pub store: Store,
    /// The optimizer's buffers.
    pub optimizer: Vec<Buffer>,
    /// What of all parameters they are the state of.
    pub owned: Ownership,
    /// What the agreement keeps of its own, each buffer as long as the parameters; devices know nothing of it.
    pub kept: Vec<Vec<f32>>,
}

/// One micro-batch's activations, by number: an engine has as many as a schedule keeps alive at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot(pub usize);

/// What a forward pass computes.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// A whole batch.
    pub batch: &'a Batch,
    /// Which samples of it.
    pub micro_batch: MicroBatch,
    /// Decides dropout.
    pub pass: Pass,
    /// The gradient of the loss with respect to itself: what this micro-batch counts for in the step.
    pub seed: f32,
    /// The step that it belongs to.
    pub moment: Moment,
}

/// What happens in a pass.
pub enum Event<'a> {
    /// The answers of a whole batch are there.
    Forwarded {
        /// How good they are.
        tally: Tally,
    },
    /// Parameters are about to be read for the first time in this step: what came late of the step before is
    /// applied now.
    BeforeRead {
        /// Whose parameters.
        bucket: usize,
        /// Where to apply it.
        target: &'a mut dyn Target,
    },
    /// Gradients are final.
    Final {
        /// Which.
        bucket: usize,
        /// None on a device without memory.
        gradients: &'a [f32],
    },
    /// The optimizer may update these parameters: no node reads them any more in this step.
    MayApply {
        /// Which.
        bucket: usize,
        /// This replica's own gradients, the first time.
        gradients: Option<&'a mut [f32]>,
        /// Where to apply what came back.
        target: &'a mut dyn Target,
    },
    /// All gradients are kept: what comes back for these has to be there before the update.
    Settle {
        /// Which.
        bucket: usize,
        /// Where to put it.
        target: &'a mut dyn Target,
    },
    /// The sums of this replica's chunks of a bucket are looked at, or changed, before the step is made with them.
    InspectSums {
        /// Which.
        bucket: usize,
        /// Looks at them.
        target: &'a mut dyn Target,
    },
    /// A norm over this replica's chunks that becomes the norm over all replicas'.
    Norm {
        /// Which.
        norm: &'a mut f64,
    },
    /// The passes of a step are over, and the steps of this replica's chunks are to be made.
    StepChunks {
        /// Of which bucket.
        bucket: usize,
        /// Where to make them.
        target: &'a mut dyn Target,
    },
    /// Numbers of this replica's that become the sum of all replicas', in place, before the pass goes on.
    Sum {
        /// Which.
        numbers: &'a mut [f32],
    },
    /// Numbers of a neighbouring stage are needed now: activations of the one before, gradients of the one behind.
    Receive {
        /// Whose.
        from: Side,
        /// Where to put them.
        numbers: &'a mut [f32],
    },
    /// Numbers for a neighbouring stage are there.
    Send {
        /// For which.
        to: Side,
        /// Which.
        numbers: &'a [f32],
    },
    /// Numbers of this part become the sum of all parts', in place, before the pass goes on.
    SumParts {
        /// Which.
        numbers: &'a mut [f32],
    },
    /// This part has its piece of some numbers, and needs those of all parts before the pass goes on.
    GatherParts {
        /// All of them, one piece behind the other.
        numbers: &'a mut [f32],
        /// How long each part's piece is.
        lengths: &'a [usize],
    },
    /// The sum of squares of this engine's gradients becomes that of the whole model's: a norm is taken of it.
    Squares {
        /// The sum.
        sum: &'a mut f64,
    },
    /// The step is computed; its tally becomes that of all replicas.
    Total {
        /// This replica's.
        tally: &'a mut Tally,
    },
    /// The optimizer begins to update all parameters.
    UpdateBegins,
    /// It has.
    UpdateEnds,
}

/// Hears what happens in a pass.
pub trait Listener {
    /// Hears of it.
    ///
    /// # Errors
    /// What ends the pass.
    fn on(&mut self, event: Event<'_>) -> Result<(), Halt>;
}

/// Nobody listens, and every step is made with this replica's own gradients: for measurements of one replica.
#[derive(Debug)]
pub struct Unheard(pub Moment);

impl Listener for Unheard {
    fn on(&mut self, event: Event<'_>) -> Result<(), Halt> {
        match event {
            Event::MayApply { bucket, gradients: Some(gradients), target } => {
                target.apply(self.0, (bucket, 0..gradients.len()), gradients, None)
            }
            Event::Forwarded { tally } if !tally.loss.is_finite() => Err(Halt::NotFinite(NotFinite::Loss)),
            _ => Ok(()),
        }
    }
}

/// Parameters that may be changed now.
pub trait Target {
    /// Makes the optimizer's step of a range of a bucket: on weights that ranks share, if given, or on the
    /// engine's own.
    ///
    /// # Errors
    /// When a gradient is not a number: nothing was changed then; or when the device fails.
    fn apply(
        &mut self,
        moment: Moment,
        at: (usize, Range<usize>),
        gradients: &mut [f32],
        shared: Option<&mut [f32]>,
    ) -> Result<(), Halt>;

    /// Makes the optimizer's step of a chunk of a bucket, and leaves the new weights in place of the gradients'
    /// sums; sums that are no numbers stay. Targets without chunks leave whatever is there.
    ///
    /// # Errors
    /// When the device fails.
    fn step_chunk(&mut self, moment: Moment, at: (usize, Range<usize>), values: &mut [f32]) -> Result<(), Halt> {
        self.apply(moment, at, values, None)
    }

    /// Replaces the weights of a bucket.
    ///
    /// # Errors
    /// When the device fails, or a chunk could not be stepped.
    fn replace(&mut self, bucket: usize, weights: &[f32]) -> Result<(), Halt>;
}

/// What ends a pass early.
#[derive(Debug)]
pub enum Halt {
    /// Another rank, the way to it, or a device has failed.
    Failed(TrainError),
    /// The step would spoil the weights.
    NotFinite(NotFinite),
    /// Another rank has found that it would.
    RefusedElsewhere {
        /// With the gradients of this bucket.
        bucket: usize,
    },
}

impl<E: Into<TrainError>> From<E> for Halt {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// A step that is computed: how good the answers were, and what kept it from being applied.
#[derive(Clone, Copy, Debug)]
pub struct StepOutput {
    /// Of all replicas.
    pub tally: Tally,
    /// Whether the weights were updated, or will be when the last gradients come back.
    pub updated: Result<(), NotFinite>,
}

/// Which gradients a backward pass computes: a pipeline sends those of inputs on before it computes those of
/// weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gradients {
    /// All.
    #[default]
    All,
    /// Those on the way to the inputs.
    Inputs,
    /// The others, which nothing but the optimizer waits for.
    Weights,
}

/// Calls a method of whichever engine it is.
macro_rules! each {
    ($engine:expr, $name:ident => $call:expr) => {
        match $engine {
            Engine::Cpu($name) => $call,
            Engine::Cuda($name) => $call,
            Engine::Null($name) => $call,
        }
    };
}

impl Place {
    /// Whether the graphs are those of a GPU.
    pub const fn is_gpu(&self) -> bool {
        matches!(self, Self::Cuda(..))
    }

    /// The engine there.
    pub(crate) fn engine(&self, parts: Parts) -> Result<Engine, TrainError> {
        Ok(match self {
            Self::Cpu(cpu) => Engine::Cpu(Box::new(CpuEngine::on(parts, cpu, &Device::Cpu(Arc::clone(cpu)))?)),
            // A stage's passes are asked for one by one, which a session cannot do.
            Self::Cuda(cpu, cuda) if parts.options.is_staged() => {
                Engine::Cpu(Box::new(CpuEngine::on(parts, cpu, &Device::Cuda(Arc::clone(cuda)))?))
            }
            Self::Cuda(cpu, cuda) => Engine::Cuda(Box::new(CudaEngine::new(parts, cpu, cuda)?)),
            Self::Null(cpu, cost) => Engine::Null(Box::new(NullEngine::new(parts, cpu, *cost)?)),
        })
    }
}

impl Engine {
    /// Computes the answers to a micro-batch.
    ///
    /// # Errors
    /// What the listener gives, or when a device fails.
    ///
    /// # Panics
    /// When the replica was built for evaluation.
    pub fn forward(&mut self, slot: Slot, inputs: &Inputs<'_>, on: &mut dyn Listener) -> Result<(), Halt> {
        each!(self, engine => engine.forward(slot, inputs, on))
    }

    /// Computes the gradients of the micro-batch whose answers are in the slot.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    ///
    /// # Panics
    /// As [`Engine::forward`].
    pub fn backward(&mut self, slot: Slot, which: Gradients, on: &mut dyn Listener) -> Result<(), Halt> {
        each!(self, engine => engine.backward(slot, which, on))
    }

    /// Whether it takes the next batch ahead of its turn.
    pub fn prefetches(&self) -> bool {
        if let Self::Cuda(engine) = self { engine.prefetches() } else { false }
    }

    /// Begins to bring the next batch to the device, while this one is computed.
    pub fn prefetch(&mut self, next: Option<&Batch>) {
        if let Self::Cuda(engine) = self {
            engine.prefetch(next);
        }
    }

    /// Ends the step: waits for what is computed, and updates the weights where all gradients are looked at
    /// first.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn close(&mut self, moment: Moment, on: &mut dyn Listener) -> Result<StepOutput, Halt> {
        each!(self, engine => engine.close(moment, on))
    }

    /// The logits of a batch in evaluation mode, for its `size` samples; it may be smaller than planned. A stage that is not the last has
    /// none.
    ///
    /// # Errors
    /// What the listener gives, or when a device fails.
    pub fn evaluate(&mut self, batch: &Batch, on: &mut dyn Listener) -> Result<(Vec<f32>, Tally), Halt> {
        match self {
            Self::Cpu(engine) => engine.evaluate(batch, on),
            Self::Cuda(engine) => Ok(engine.evaluate(batch)?),
            Self::Null(engine) => Ok(engine.evaluate(batch)?),
        }
    }

    /// How long the messages to and from other stages are for a micro-batch that is computed as so many samples.
    pub fn lengths(&self, samples: usize) -> &CrossingLengths {
        if let Self::Cpu(engine) = self { engine.lengths(samples) } else { CrossingLengths::NONE }
    }

    /// Whether all gradients are looked at before any is applied.
    pub fn keeps_gradients(&self) -> bool {
        match self {
            Self::Cpu(engine) => engine.keeps_gradients(),
            Self::Cuda(engine) => engine.plan().stores_gradients(),
            Self::Null(engine) => engine.keeps_gradients(),
        }
    }

    /// What a micro-batch takes, measured; computes on whatever is there, and changes nothing that is kept.
    ///
    /// # Errors
    /// When a device fails.
    pub fn stage_times(&mut self) -> Result<StageTimes, TrainError> {
        if let Self::Cpu(engine) = self { engine.stage_times() } else { Ok(StageTimes::default()) }
    }

    /// How long they are in an evaluation.
    pub fn evaluation_lengths(&self) -> &CrossingLengths {
        if let Self::Cpu(engine) = self { engine.evaluation_lengths() } else { CrossingLengths::NONE }
    }

    /// Applies what came back for buckets of the last step, between steps.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn settle(&mut self, on: &mut dyn Listener) -> Result<(), Halt> {
        each!(self, engine => engine.settle(on))
    }

    /// Brings the host's copy of weights, states and optimizer up to date.
    ///
    /// # Errors
    /// When a device fails.
    pub fn fetch(&mut self) -> Result<(), TrainError> {
        if let Self::Cuda(engine) = self { engine.fetch() } else { Ok(()) }
    }

    /// Says that the host's copy was changed: the device loads it before it computes again.
    pub fn load(&mut self) {
        if let Self::Cuda(engine) = self {
            engine.load();
        }
    }

    /// The host's copy of the weights.
    pub fn weights(&self) -> &Weights {
        each!(self, engine => &engine.weights)
    }

    /// The host's copy, to be changed; [`Engine::load`] follows.
    pub fn weights_mut(&mut self) -> &mut Weights {
        each!(self, engine => &mut engine.weights)
    }

    /// How good this replica's own answers of the step so far are.
    pub fn tally(&self) -> Tally {
        each!(self, engine => engine.tally)
    }

    /// The plan of the training step, or of an evaluation if it only evaluates.
    pub fn plan(&self) -> &Plan {
        each!(self, engine => engine.plan())
    }

    /// The plan of an evaluation.
    pub fn evaluation_plan(&self) -> &Plan {
        each!(self, engine => engine.evaluation_plan())
    }

    /// The cores that do the host's part.
    pub fn cpu(&self) -> &Arc<Cpu> {
        each!(self, engine => engine.cpu())
    }

    /// The GPU it computes on, if it does.
    pub fn gpu(&self) -> Option<&Arc<Cuda>> {
        if let Self::Cuda(engine) = self { Some(engine.gpu()) } else { None }
    }

    /// What is special about an engine on the CPU.
    pub fn cpu_mut(&mut self) -> Option<&mut CpuEngine> {
        if let Self::Cpu(engine) = self { Some(engine) } else { None }
    }

    /// What is special about an engine on a GPU.
    pub fn cuda_mut(&mut self) -> Option<&mut CudaEngine> {
        if let Self::Cuda(engine) = self { Some(engine) } else { None }
    }

    /// Has gradients pass through the host's memory from now on, so that others can be sent them.
    ///
    /// # Errors
    /// When a device has no memory for it.
    pub fn stage_gradients(&mut self) -> Result<(), TrainError> {
        if let Self::Cuda(engine) = self { engine.stage_gradients() } else { Ok(()) }
    }

    /// Works on weights that all replicas of this machine map, where an agreement has such.
    pub fn share_weights(&mut self, agreement: &mut dyn Agreement) {
        if let Self::Cpu(engine) = self {
            engine.share_weights(agreement);
        }
    }

    /// Whether the weights can be fetched when others have failed: they cannot where a GPU waits for others
    /// inside of a step.
    pub fn answers_without_others(&self) -> bool {
        if let Self::Cuda(engine) = self { !engine.sums_inside() } else { true }
    }

    /// Whether a step is one graph, whose passes, sums and update cannot be told apart from outside.
    pub fn is_one_graph(&self) -> bool {
        if let Self::Cuda(engine) = self { engine.is_one_graph() } else { false }
    }

    /// The cores that the thread of a step is to be bound to.
    pub fn bound(&self) -> Option<Arc<Cpu>> {
        if let Self::Cpu(engine) = self { Some(Arc::clone(engine.cpu())) } else { None }
    }

    /// Whether a step can be made with some elements of a bucket by themselves, on weights that ranks share.
    pub fn steps_by_elements(&self) -> bool {
        if let Self::Cpu(engine) = self { engine.steps_by_elements() } else { false }
    }

    /// Takes the time of another cost model from now on, where nothing is computed.
    pub fn set_cost(&mut self, cost: CostModel) {
        if let Self::Null(engine) = self {
            engine.set_cost(cost);
        }
    }

    /// As one part of a step, timing every node and applying nothing.
    ///
    /// # Errors
    /// When a device fails.
    pub fn profile(&mut self, inputs: &Inputs<'_>) -> Result<Profile, TrainError> {
        each!(self, engine => engine.profile(inputs))
    }

    /// The layer and operation of the first result that is not finite for a batch, on the host; none if there
    /// is none any more.
    pub fn find_non_finite(&mut self, inputs: &Inputs<'_>) -> Option<(String, &'static str)> {
        each!(self, engine => engine.find_non_finite(inputs))
    }
}

/// Where each parameter stands among all, and whether it decays.
pub(crate) fn segments(parameters: &[paceline_nn::Parameter], layout: &Layout) -> Vec<Segment> {
    let both = parameters.iter().zip(layout.ranges());
    both.map(|(parameter, range)| Segment { range: range.clone(), decay: parameter.decay }).collect()
}

/// The parameter whose gradient holds an element, of those of a bucket.
fn parameter_of(bucket: &Bucket, segments: &[Segment], element: usize) -> usize {
    let found = bucket.parameters.clone().find(|&number| segments[number].range.contains(&element));
    found.unwrap_or(bucket.parameters.start)
}

/// What all engines are made of.
pub(crate) struct Parts {
    pub options: ReplicaOptions,
    /// For micro-batches of every size, the largest first; none if it only evaluates.
    pub train: Vec<Planned>,
    pub eval: Planned,
    pub weights: Weights,
    pub segments: Vec<Segment>,
    /// Which of them count here in a norm over the whole model: where several ranks have a tensor, one of them counts it.
    pub counted: Vec<bool>,
}
