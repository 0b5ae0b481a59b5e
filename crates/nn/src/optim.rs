//! Optimizers: how a gradient becomes a step.
//!
//! A rule works on flat `f32` buffers (all weights in one slice, all gradients in another) and is told which segments
//! of them to update, so a bucket of gradients can be applied as soon as it lands. Each rule is one file whose loop is
//! elementwise; this file cuts the work into pieces whose size never depends on the number of threads, so the bits do
//! not either. What is absent: the learning rate over time (`schedule.rs`), devices, and how replicas agree.
//!
//! The rules are PyTorch's, number for number; `tests/optimizers.rs` holds them to it.

mod adagrad;
mod adam;
mod hyper;
mod lars;
mod momentum;
mod norm;
mod piece;
mod sgd;

use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use hyper::{HyperParameterError, HyperParameters};
pub use norm::{clip_factor, global_norm, scale};
use piece::Piece;

/// Which rule, by the name that configs and the command line use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// w −= ηg
    Sgd,
    /// Steps along a decaying sum of gradients (Polyak's heavy ball).
    Momentum,
    /// Momentum that looks one step ahead (Nesterov, as Sutskever et al. wrote it).
    Nesterov,
    /// Divides by the root of all squared gradients so far.
    Adagrad,
    /// Divides a mean of gradients by the root of a mean of squared ones.
    Adam,
    /// Adam with weight decay applied to the weights, not to the gradient.
    AdamW,
    /// Momentum with one rate per layer, for very large batches.
    Lars,
}

impl Optimizer {
    /// All of them, in the order of the docs.
    pub const ALL: [Self; 7] =
        [Self::Sgd, Self::Momentum, Self::Nesterov, Self::Adagrad, Self::Adam, Self::AdamW, Self::Lars];

    /// The name in configs and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Momentum => "momentum",
            Self::Nesterov => "nesterov",
            Self::Adagrad => "adagrad",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
            Self::Lars => "lars",
        }
    }

    /// How many flat buffers the size of the weights the rule keeps from step to step. They start at zero.
    pub const fn state_slots(self) -> usize {
        match self {
            Self::Sgd => 0,
            Self::Momentum | Self::Nesterov | Self::Adagrad | Self::Lars => 1,
            Self::Adam | Self::AdamW => 2,
        }
    }

    /// The rule with its constants.
    ///
    /// # Errors
    /// When a constant is out of its range; the error says what to write.
    pub fn rule(self, hyper: &HyperParameters) -> Result<Rule, HyperParameterError> {
        hyper.check()?;
        let decay = hyper.weight_decay.unwrap_or(if self == Self::AdamW { 0.01 } else { 0.0 });
        let momentum = momentum::Momentum {
            momentum: hyper.momentum,
            nesterov: self == Self::Nesterov,
            rescale: hyper.rescale_momentum,
        };
        let formula = match self {
            Self::Sgd => Formula::Sgd(sgd::Sgd),
            Self::Momentum | Self::Nesterov => Formula::Momentum(momentum),
            Self::Adagrad => Formula::Adagrad(adagrad::Adagrad { epsilon: hyper.epsilon.unwrap_or(1e-10) }),
            Self::Adam | Self::AdamW => Formula::Adam(adam::Adam {
                betas: hyper.betas,
                epsilon: hyper.epsilon.unwrap_or(1e-8),
                decoupled: self == Self::AdamW,
            }),
            Self::Lars => Formula::Lars(lars::Lars { momentum, coefficient: hyper.lars_coefficient }),
        };
        Ok(Rule { optimizer: self, decay, formula })
    }
}

impl std::fmt::Display for Optimizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for Optimizer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|optimizer| optimizer.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("there is no optimizer `{text}`; write one of {names}")
        })
    }
}

/// The elements of one parameter within the flat buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where.
    pub range: Range<usize>,
    /// Whether weight decay applies, and LARS' own rate: not for biases and normalisation parameters.
    pub decay: bool,
}

/// When an update happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moment {
    /// Updates made before this one: 0 for the first.
    pub step: u64,
    /// η of this step.
    pub learning_rate: f32,
}

/// The flat buffers of a model: all of the same length.
#[derive(Debug)]
pub struct Buffers<'a> {
    /// Changed in place.
    pub weights: &'a mut [f32],
    /// Of this step; clipped and averaged already.
    pub gradients: &'a [f32],
    /// [`Optimizer::state_slots`] buffers, zero before the first step.
    pub state: &'a mut [Vec<f32>],
}

/// Runs `body(0)` … `body(tasks-1)`, in any order and on any threads: the caller's thread pool, or [`serial`].
pub type Runner<'a> = &'a dyn Fn(usize, &(dyn Fn(usize) + Sync));

/// A [`Runner`] without threads.
pub fn serial(tasks: usize, body: &(dyn Fn(usize) + Sync)) {
    (0..tasks).for_each(body);
}

/// An optimizer with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    optimizer: Optimizer,
    decay: f32,
    formula: Formula,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Formula {
    Sgd(sgd::Sgd),
    Momentum(momentum::Momentum),
    Adagrad(adagrad::Adagrad),
    Adam(adam::Adam),
    Lars(lars::Lars),
}

impl Rule {
    /// Which optimizer this is.
    pub const fn optimizer(&self) -> Optimizer {
        self.optimizer
    }

    /// Zeroed state for `elements` weights.
    pub fn new_state(&self, elements: usize) -> Vec<Vec<f32>> {
        vec![vec![0.0; elements]; self.optimizer.state_slots()]
    }

    /// Applies one step to `segments` of the buffers; the rest is untouched. Calls with different segments of one step
    /// may come in any order. Costs one pass over weights, gradients and state; LARS reads weights and gradients twice.
    ///
    /// # Panics
    /// When the buffers' lengths differ, or the segments overlap or are not in ascending order.
    pub fn update(&self, moment: Moment, segments: &[Segment], buffers: Buffers<'_>, run: Runner<'_>) {
        let rates = match &self.formula {
            Formula::Lars(lars) => lars.local_rates(segments, &buffers, self.decay, run),
            _ => vec![1.0; segments.len()],
        };
        let pieces = piece::cut(segments, &rates, self.decay, buffers, self.optimizer.state_slots());
        run(pieces.len(), &|index| {
            // Each task takes its own piece, so the lock is never waited for.
            let mut piece = pieces[index].lock().expect("a piece is taken once");
            match self.formula {
                Formula::Sgd(sgd) => sgd.step(moment, &mut piece),
                Formula::Momentum(momentum) => momentum.step(moment, &mut piece),
                Formula::Adagrad(adagrad) => adagrad.step(moment, &mut piece),
                Formula::Adam(adam) => adam.step(moment, &mut piece),
                Formula::Lars(lars) => lars.step(moment, &mut piece),
            }
        });
    }
}
