//! Where a process is in its work: what heartbeats carry and what a fault is named with.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// The part of a step that a process is in, in the order in which a step meets them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Before the first step: reading data, planning, connecting.
    #[default]
    Setup,
    /// Waiting for a batch.
    Data,
    /// Forward and backward pass.
    Compute,
    /// Waiting for other ranks.
    Exchange,
    /// Changing the weights.
    Update,
    /// Measuring on the validation set.
    Evaluate,
    /// Saving.
    Checkpoint,
    /// Through with all steps.
    Done,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 8] = [
        Self::Setup,
        Self::Data,
        Self::Compute,
        Self::Exchange,
        Self::Update,
        Self::Evaluate,
        Self::Checkpoint,
        Self::Done,
    ];

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Setup => "setup",
            Self::Data => "data",
            Self::Compute => "compute",
            Self::Exchange => "exchange",
            Self::Update => "update",
            Self::Evaluate => "evaluate",
            Self::Checkpoint => "checkpoint",
            Self::Done => "done",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// How far a process is. Of two ranks in lockstep the one with the smaller position is the one that others wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// Updates done.
    pub step: u64,
    /// The part of the next one.
    pub phase: Phase,
}

/// The position of this process, written by the training loop and read by the thread that sends heartbeats. Cheap to
/// clone and to write: one atomic word.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Bits of the phase in the word.
    const PHASE_BITS: u32 = 3;

    /// Says where the process is now.
    pub fn enter(&self, phase: Phase, step: u64) {
        self.0.store(step << Self::PHASE_BITS | phase as u64, Ordering::Relaxed);
    }

    /// Where it is.
    pub fn position(&self) -> Position {
        let word = self.0.load(Ordering::Relaxed);
        let phase = Phase::ALL[(word & ((1 << Self::PHASE_BITS) - 1)) as usize];
        Position { step: word >> Self::PHASE_BITS, phase }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read_as_it_was_written() {
        let progress = Progress::default();
        assert_eq!(progress.position(), Position::default());
        for phase in Phase::ALL {
            progress.enter(phase, 1 << 40);
            assert_eq!(progress.position(), Position { step: 1 << 40, phase });
        }
        assert!(Phase::ALL.is_sorted() && Phase::ALL.iter().enumerate().all(|(index, phase)| *phase as usize == index));
    }
}
