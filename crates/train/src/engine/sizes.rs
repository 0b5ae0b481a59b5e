//! What a replica takes of a machine's memory, by plan. [`crate::room`] adds what a process takes beside it.

use paceline_nn::Mode;
use paceline_system::limits::{Limits, in_words};
use paceline_tensor::Plan;
use paceline_tensor::plan::Updates;

use super::compiled::{Planned, updates};
use crate::error::TrainError;
use crate::replica::ReplicaOptions;
use crate::stage::ModelStage;

/// Bytes of a process that does nothing yet, of code, stacks and small things: from 12 to 32 MB were
/// measured.
pub(crate) const BASE: u64 = 32 << 20;

/// Bytes of a rank that is a thread, beside [`BASE`] of its process: its stacks and small things, and those of
/// its loader and its connections. From 6 to 9 MB were measured.
pub(crate) const RANK: u64 = 12 << 20;

/// Bytes of a thread's panels and stack: 1.4 MB were measured.
const THREAD: u64 = 2 << 20;

/// The most that the working memory of kernels takes for weights in another order.
const REORDERED_MAX: u64 = 64 << 20;

/// The bytes of a replica's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Activations, and gradients that live only until they are applied.
    pub arena: u64,
    /// One copy of all parameters.
    pub parameters: u64,
    /// The largest parameter.
    pub largest: u64,
    /// One copy of all states.
    pub states: u64,
    /// Copies of the parameters that the optimizer keeps, on all replicas together where each has a part.
    pub slots: u64,
    /// The optimizer's buffers here.
    pub optimizer: u64,
    /// Copies of the parameters that hold gradients beside the arena.
    pub gradients: u64,
    /// Whether a step can be made with some elements by themselves, so that ranks can share one copy of the
    /// weights.
    pub by_elements: bool,
}

impl Sizes {
    /// Those of a replica that trains by the first plan, if there is one, and evaluates by the other. On a
    /// GPU the arena is there.
    pub fn of(train: Option<&Plan>, eval: &Plan, options: &ReplicaOptions, on_gpu: bool) -> Self {
        let (plan, bytes) = (train.unwrap_or(eval), |elements: usize| (elements * size_of::<f32>()) as u64);
        // Every micro-batch that is alive has an arena.
        let arena = if on_gpu { 0 } else { (options.slots.max(1) * plan.arena_bytes()).max(eval.arena_bytes()) };
        let slots = if train.is_some() { options.rule.optimizer().state_slots() } else { 0 };
        let kept = match train {
            Some(_) if plan.stores_gradients() => 1 + usize::from(options.accumulate > 1),
            Some(_) => usize::from(options.gathers()),
            None => 0,
        };
        Self {
            arena: arena as u64,
            parameters: bytes(plan.parameters().length()),
            largest: bytes(plan.parameters().ranges().iter().map(ExactSizeIterator::len).max().unwrap_or(0)),
            states: bytes(plan.states().length()),
            slots: slots as u64,
            optimizer: slots as u64 * bytes(options.ownership(plan).length()),
            gradients: kept as u64,
            by_elements: options.steps_by_elements(plan),
        }
    }

    /// Those of a model that is trained on the CPU, without taking them.
    ///
    /// # Errors
    /// When a layer does not fit the input, which the error names.
    pub fn plan(stage: ModelStage<'_>, options: &ReplicaOptions) -> Result<Self, TrainError> {
        let micro_batch = options.micro_batch;
        let train = stage.network(Mode::Train, micro_batch, options)?;
        let applied = updates(&train, options, false);
        let eval = stage.network(Mode::Eval, micro_batch, options)?;
        let train = Planned::new(train, micro_batch, applied, options, false).plan;
        let eval = Planned::new(eval, micro_batch, Updates::AtEnd, options, false).plan;
        Ok(Self::of(Some(&train), &eval, options, false))
    }

    /// All buffers of a replica by itself.
    pub fn buffers(&self) -> u64 {
        self.arena + (1 + self.gradients) * self.parameters + self.optimizer + self.states
    }

    /// What kernels take while they run: panels of every thread, statistics, weights in another order.
    /// Kernels decide when they run, so this is a bound on what was measured for the models of the zoo.
    pub fn working(&self, threads: usize) -> u64 {
        THREAD * threads as u64 + self.arena / 32 + REORDERED_MAX.min(4 * self.largest)
    }

    /// A plan is known before it runs, so a replica that cannot fit is refused instead of being killed
    /// half-way. A machine that does not tell its memory is trusted.
    pub fn check(&self, limits: &Limits) -> Result<(), TrainError> {
        let needed = self.buffers() + BASE;
        let Some(limit) = limits.memory().filter(|limit| needed > limit.bytes) else { return Ok(()) };
        Err(TrainError::Refused(format!(
            "a step needs {} of memory and {} {}; \
             type a smaller --batch or --size, --memory low, or compute the batch in parts with --accumulate 4",
            in_words(needed),
            limit.source,
            in_words(limit.bytes)
        )))
    }
}

#[cfg(test)]
mod tests {
    use paceline_system::limits::{Memory, Source};

    use super::*;

    #[test]
    fn a_step_larger_than_the_memory_is_refused() {
        let sizes = Sizes {
            arena: 20_000_000_000,
            parameters: 0,
            largest: 0,
            states: 0,
            slots: 2,
            optimizer: 0,
            gradients: 1,
            by_elements: true,
        };
        let limits = |bytes| Limits { shared: Some(Memory { bytes, source: Source::Machine }), ..Limits::default() };
        assert!(sizes.check(&limits(20_000_000_000 + BASE)).is_ok() && sizes.check(&Limits::default()).is_ok());
        let error = sizes.check(&limits(16_000_000_000)).unwrap_err().to_string();
        assert!(error.starts_with("a step needs 20.0 GB of memory and this machine has 16.0 GB; type"), "{error}");
    }
}
