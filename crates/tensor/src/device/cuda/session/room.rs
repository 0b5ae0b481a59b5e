//! Whether a model fits the GPU: known before memory is taken, up to the working memory, which is known once every call is prepared.

use super::Blueprint;
use crate::device::cuda::join::Joins;
use crate::device::cuda::{Cuda, CudaError};
use crate::plan::{Plan, SHARED_ALIGNMENT_BYTES};

/// Of the memory that is free, what a batch that is proposed takes: the rest is for working memory and for batches on their way.
const SHARE: f64 = 0.95;

/// What a model needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Bytes of the arena.
    pub arena: usize,
    /// Where the evaluation's part of it begins: behind the gradients, if they stand there.
    pub eval_start: usize,
    /// Bytes of gradients that do not stand in the arena.
    pub gradients: usize,
    /// Bytes of what ReLUs let pass.
    pub gates: usize,
    /// Bytes of weights, optimizer, states and those gradients, which do not grow with the batch.
    fixed: usize,
    /// Bytes of the sum of gradients, which is taken with the first part of a batch.
    sums: usize,
    batch: usize,
}

impl Room {
    /// Counts, and refuses what cannot fit.
    pub fn new(cuda: &Cuda, blueprint: &Blueprint<'_>) -> Result<Self, CudaError> {
        let (plan, bindings) = *blueprint.train.first().unwrap_or(&blueprint.eval);
        let words = plan.parameters().length() * 4;
        let shared = plan.arena_has_gradients();
        let plans = || blueprint.train.iter().map(|(plan, _)| *plan);
        let eval_start = if shared { words.next_multiple_of(SHARED_ALIGNMENT_BYTES) } else { 0 };
        let gradients = if plans().any(|plan| !plan.arena_has_gradients()) { words } else { 0 };
        let room = Self {
            arena: plans().map(Plan::arena_bytes).max().unwrap_or(0).max(eval_start + blueprint.eval.0.arena_bytes()),
            eval_start,
            gradients,
            gates: plans().map(|plan| Joins::new(plan).gate_bytes).max().unwrap_or(0),
            fixed: words * (1 + blueprint.slots) + words / 2 + gradients + plan.states().length() * 4,
            sums: if blueprint.parts { words } else { 0 },
            batch: plan.graph().shape(bindings.x)[0],
        };
        room.check(0, cuda.context().memory()?)?;
        Ok(room)
    }

    /// Refuses working memory that does not fit beside the rest, which is taken except for the sum of gradients.
    pub fn check_working(&self, cuda: &Cuda, working: usize) -> Result<(), CudaError> {
        let (free, total) = cuda.context().memory()?;
        self.check(working, (free + self.arena + self.gates + self.fixed, total))
    }

    fn check(&self, working: usize, (free, total): (usize, usize)) -> Result<(), CudaError> {
        // Gradients in the arena do not grow, though what shares their bytes does: the batch that is proposed fits in any case.
        let grows = self.arena - self.eval_start + self.gates + working;
        let fixed = self.eval_start + self.fixed + self.sums;
        if grows + fixed <= free {
            return Ok(());
        }
        let gigabytes = |bytes: usize| bytes as f64 / 1e9;
        let left = SHARE * free as f64 - fixed as f64;
        let advice = match (left / grows as f64 * self.batch as f64) as usize {
            0 => "not even one sample would fit".into(),
            fits => format!("a batch of about {fits} would fit"),
        };
        Err(CudaError(format!(
            "a step with a batch of {} needs {:.2} GB of GPU memory; {:.2} of {:.2} GB are free: {advice}",
            self.batch,
            gigabytes(grows + fixed),
            gigabytes(free),
            gigabytes(total)
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_does_not_fit_is_refused_with_a_batch_that_does() {
        let (arena, gates, fixed) = (9_000_000_000, 1_000_000_000, 500_000_000);
        let room = Room { arena, eval_start: 0, gradients: 0, gates, fixed, sums: 0, batch: 1000 };
        let all = 12_000_000_000;
        assert_eq!(room.check(0, (10_500_000_000, all)), Ok(()));
        let refusal = |working, free| room.check(working, (free, all)).unwrap_err().to_string();
        assert_eq!(
            refusal(0, 10_000_000_000),
            "a step with a batch of 1000 needs 10.50 GB of GPU memory; 10.00 of 12.00 GB are free: \
             a batch of about 900 would fit"
        );
        assert!(refusal(2_000_000_000, 10_500_000_000).contains("needs 12.50 GB"), "with working memory");
        let in_parts = Room { sums: 100_000_000, ..room };
        assert_eq!(in_parts.check(0, (10_600_000_000, all)), Ok(()));
        assert!(in_parts.check(0, (10_500_000_000, all)).unwrap_err().to_string().contains("needs 10.60 GB"));
        assert!(refusal(0, 400_000_000).ends_with("not even one sample would fit"));
        let shared = Room { eval_start: 4_000_000_000, ..room };
        assert_eq!(shared.check(0, (10_500_000_000, all)), Ok(()));
        let advice = shared.check(0, (10_000_000_000, all)).unwrap_err().to_string();
        assert!(advice.contains("needs 10.50 GB") && advice.ends_with("a batch of about 833 would fit"), "{advice}");
        assert!(
            shared.check(0, (4_000_000_000, all)).unwrap_err().to_string().ends_with("not even one sample would fit")
        );
    }
}
