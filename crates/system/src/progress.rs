//! How far a process is: what its training thread writes, and its heartbeats carry.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::phase::Phase;

/// What a process waits for while it is in the phase [`Phase::Exchange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// What all ranks begin with.
    Opening,
    /// Gradients or weights of a bucket.
    Bucket(u16),
    /// How good all workers' answers were in a step, and their votes.
    Report,
    /// The numbers of a batch-norm over all workers.
    BatchNormSums,
    /// Running statistics.
    Statistics,
    /// All weights.
    Weights,
    /// The optimizer's state.
    Optimizer,
    /// What the stage before has computed.
    Activations,
    /// Gradients of the stage behind.
    Gradients,
    /// What the other parts of a layer have computed.
    Parts,
}

impl Message {
    /// Numbers from 1; 0 stands for none.
    const fn code(self) -> u64 {
        match self {
            Self::Opening => 1,
            Self::Bucket(number) => 2 | (number as u64) << KIND_BITS,
            Self::Report => 3,
            Self::BatchNormSums => 4,
            Self::Statistics => 5,
            Self::Weights => 6,
            Self::Optimizer => 7,
            Self::Activations => 8,
            Self::Gradients => 9,
            Self::Parts => 10,
        }
    }

    const fn from_code(code: u64) -> Option<Self> {
        Some(match code & ((1 << KIND_BITS) - 1) {
            1 => Self::Opening,
            2 => Self::Bucket((code >> KIND_BITS) as u16),
            3 => Self::Report,
            4 => Self::BatchNormSums,
            5 => Self::Statistics,
            6 => Self::Weights,
            7 => Self::Optimizer,
            8 => Self::Activations,
            9 => Self::Gradients,
            10 => Self::Parts,
            _ => return None,
        })
    }

    /// The message of a bucket; beyond 65,535 they are not told apart.
    pub fn bucket(number: usize) -> Self {
        Self::Bucket(u16::try_from(number).unwrap_or(u16::MAX))
    }
}

impl fmt::Display for Message {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Bucket(number) => return write!(out, "bucket {number}"),
            Self::Opening => "what the run begins with",
            Self::Report => "the report of a step",
            Self::BatchNormSums => "batch-norm sums",
            Self::Statistics => "running statistics",
            Self::Weights => "the weights",
            Self::Optimizer => "the optimizer's state",
            Self::Activations => "the activations of the stage before",
            Self::Gradients => "the gradients of the stage behind",
            Self::Parts => "what other parts of the layer compute",
        })
    }
}

/// How far a process is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Updates done.
    pub step: u64,
    /// The part of the next one.
    pub phase: Phase,
    /// What it waits for, in an exchange.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<Message>,
}

impl fmt::Display for Position {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, phase, message } = self;
        match message {
            Some(message) => write!(out, "in phase {phase} ({message}) after step {step}"),
            None => write!(out, "in phase {phase} after step {step}"),
        }
    }
}

const PHASE_BITS: u32 = 4;
const KIND_BITS: u32 = 4;
const MESSAGE_BITS: u32 = KIND_BITS + 16;
/// What is left for steps: 2⁴⁰ of them.
const STEP_SHIFT: u32 = PHASE_BITS + MESSAGE_BITS;

/// The position of this process, written by the thread that makes steps and read by the one that sends heartbeats. Cheap
/// to clone and to write: one word.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Says which phase the process is in now, after so many updates.
    pub fn enter(&self, phase: Phase, step: u64) {
        self.set(Position { step, phase, message: None });
    }

    /// Says that the process is in another phase of the same step, and gives where it was, for [`Progress::set`].
    pub fn switch(&self, phase: Phase, message: Option<Message>) -> Position {
        let before = self.position();
        self.set(Position { step: before.step, phase, message });
        before
    }

    /// Says where the process is.
    pub fn set(&self, Position { step, phase, message }: Position) {
        let message = message.map_or(0, Message::code);
        self.0.store(step << STEP_SHIFT | message << PHASE_BITS | phase as u64, Ordering::Relaxed);
    }

    /// Where it is.
    pub fn position(&self) -> Position {
        let word = self.0.load(Ordering::Relaxed);
        let phase = Phase::ALL.get((word & ((1 << PHASE_BITS) - 1)) as usize).copied().unwrap_or_default();
        let message = Message::from_code(word >> PHASE_BITS & ((1 << MESSAGE_BITS) - 1));
        Position { step: word >> STEP_SHIFT, phase, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read_as_it_was_written() {
        let progress = Progress::default();
        assert_eq!(progress.position(), Position::default());
        let messages = [Message::Opening, Message::Report, Message::BatchNormSums, Message::Statistics];
        let stages = [Message::Activations, Message::Gradients, Message::Parts];
        let others = [Message::Weights, Message::Optimizer, Message::Bucket(65_535)];
        let messages = messages.into_iter().chain(stages).chain(others);
        for message in messages.map(Some).chain([None]) {
            for phase in Phase::ALL {
                let position = Position { step: (1 << 40) - 1, phase, message };
                progress.set(position);
                assert_eq!(progress.position(), position);
            }
        }
    }

    #[test]
    fn an_exchange_inside_of_a_pass_ends_where_it_began() {
        let progress = Progress::default();
        progress.enter(Phase::Backward, 7);
        let before = progress.switch(Phase::Exchange, Some(Message::bucket(1 << 20)));
        assert_eq!(progress.position().to_string(), "in phase exchange (bucket 65535) after step 7");
        progress.set(before);
        assert_eq!(progress.position().to_string(), "in phase backward after step 7");
    }
}
