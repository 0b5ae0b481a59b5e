//! The order in which the stages of a split model work through the micro-batches of a batch: plain values,
//! made before the first step.
//!
//! A stage has three passes over each micro-batch: forward, the gradients of its inputs, which the stage
//! before waits for, and the gradients of its weights, which nobody waits for. A [`Schedule`] lists them for
//! every stage; [`Schedule::forecast`] says how long they take together, and [`draw`] shows why. Every stage
//! runs each pass in the order of the micro-batches, by every kind of schedule, so gradients are added up in
//! one order and all kinds give the same bits.
//!
//! What is not here: where a model is cut, and the interpreter that runs the lists. Nothing here reads a
//! clock or talks to anyone; times are given, and ranks with the same times make the same lists.

mod draw;
mod execution;
mod forecast;
mod kind;
mod schedule;
mod verify;
mod zero_bubble;

#[cfg(test)]
mod tests;

pub use draw::draw;
pub use forecast::{Forecast, Span};
pub use kind::Kind;
pub use schedule::Schedule;

/// What a stage computes of a micro-batch at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Its activations, which the next stage waits for.
    Forward,
    /// The gradients of its inputs, which the stage before waits for; all gradients, where a schedule does
    /// not separate them.
    Backward,
    /// The gradients of its weights, where a schedule separates them.
    Weights,
}

impl Pass {
    /// The letter that drawings and messages have for it.
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::Weights => 'W',
        }
    }
}

/// A pass over a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Task {
    /// Which micro-batch.
    pub micro_batch: usize,
    /// Which pass.
    pub pass: Pass,
}

impl std::fmt::Display for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.pass.letter(), self.micro_batch)
    }
}

/// How long a stage takes for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTimes {
    /// The forward pass.
    pub forward_s: f64,
    /// The gradients of inputs; nothing in the first stage, where nobody wants the gradient of an image.
    pub inputs_s: f64,
    /// The gradients of weights.
    pub weights_s: f64,
}

impl StageTimes {
    /// Everything.
    pub fn total_s(&self) -> f64 {
        self.forward_s + self.inputs_s + self.weights_s
    }

    /// One pass, by a schedule that separates gradients or does not.
    pub(crate) fn pass_s(&self, pass: Pass, separates_gradients: bool) -> f64 {
        match pass {
            Pass::Forward => self.forward_s,
            Pass::Backward if separates_gradients => self.inputs_s,
            Pass::Backward => self.inputs_s + self.weights_s,
            Pass::Weights => self.weights_s,
        }
    }
}
