//! Optimizers: how a gradient becomes a step.
//!
//! A rule works on flat `f32` buffers (weights in one slice, gradients in another) and is told which segments lie in
//! them, so a bucket of gradients can be applied as soon as it is final. Each rule is one file: it says which
//! arithmetic with which constants, and the device does it. What is absent: the learning rate over time
//! (`schedule.rs`), the loops (`tensor/src/device/cpu/update.rs`), and how replicas agree.
//!
//! The rules are PyTorch's, number for number; `tests/optimizers.rs` holds them to it.

mod adagrad;
mod adam;
mod hyper;
mod lars;
mod momentum;
mod norm;
mod sgd;

use std::ops::Range;
use std::str::FromStr;

use paceline_tensor::Buffer;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cpu::update::{self, Tensor};
use serde::{Deserialize, Serialize};

pub use hyper::{HyperParameterError, HyperParameters};
pub use norm::{clip_factor, global_norm, scale, squares};

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
            from_step: hyper.momentum_from,
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
    /// Its elements in every flat buffer: parameters, gradients, optimizer state.
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

/// A stretch of a model's flat buffers: slices of the same length.
#[derive(Debug)]
pub struct Buffers<'a> {
    /// Where the stretch begins, in elements of the whole.
    pub start: usize,
    /// Changed in place.
    pub weights: &'a mut [f32],
    /// Of this step; clipped and averaged already.
    pub gradients: &'a [f32],
    /// [`Optimizer::state_slots`] slices, zero before the first step; the others are empty.
    pub state: [&'a mut [f32]; 2],
}

/// The elements `range` of an optimizer's state, as [`Buffers`] wants them.
pub fn state_of(state: &mut [Buffer], range: Range<usize>) -> [&mut [f32]; 2] {
    let mut slots = state.iter_mut().map(|slot| &mut slot[range.clone()]);
    [slots.next().unwrap_or_default(), slots.next().unwrap_or_default()]
}

/// What does the work.
#[derive(Debug)]
pub struct Tools<'a> {
    /// The device.
    pub cpu: &'a Cpu,
    /// For sums; kept from call to call, so that it is taken once.
    pub sums: &'a mut Vec<f64>,
}

/// What a rule is told of a segment.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// λ of weight decay, 0 where the segment is left out.
    decay: f32,
    /// What multiplies the learning rate: LARS' own rate of the layer, 1 for every other rule.
    rate: f32,
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

    /// Whether the rule looks at a tensor as a whole, so that a tensor must not come in parts.
    pub const fn needs_whole_tensors(&self) -> bool {
        self.layer_coefficient().is_some()
    }

    /// c of LARS, whose layers have rates of their own: with [`Rule::constants`], what a device needs that applies the rule itself.
    pub const fn layer_coefficient(&self) -> Option<f32> {
        match self.formula {
            Formula::Lars(lars) => Some(lars.coefficient),
            _ => None,
        }
    }

    /// Zeroed state for `elements` weights.
    ///
    /// # Panics
    /// As [`Buffer::zeroed_for`].
    pub fn new_state(&self, elements: usize) -> Vec<Buffer> {
        (0..self.optimizer.state_slots()).map(|_| Buffer::zeroed_for("the optimizer's state", elements)).collect()
    }

    /// Applies one step to what lies of `segments` in the buffers; the rest is untouched. Calls with different segments
    /// of one step may come in any order. Costs one pass over weights, gradients and state; LARS reads weights and
    /// gradients twice.
    ///
    /// # Panics
    /// When the buffers' lengths differ.
    pub fn update(&self, moment: Moment, segments: &[Segment], buffers: Buffers<'_>, tools: &mut Tools<'_>) {
        let Buffers { start, weights, gradients, state: [first, second] } = buffers;
        assert_eq!(weights.len(), gradients.len(), "one gradient for each weight");
        let end = start + weights.len();
        let fits = |slot: &[f32], number: usize| {
            slot.len() == if number < self.optimizer.state_slots() { weights.len() } else { 0 }
        };
        assert!(fits(first, 0) && fits(second, 1), "one state for each weight, in the optimizer's number of slots");
        for segment in segments {
            let range = segment.range.start.clamp(start, end) - start..segment.range.end.clamp(start, end) - start;
            if range.is_empty() {
                continue;
            }
            let (weights, gradients) = (&mut weights[range.clone()], &gradients[range.clone()]);
            let mut place = Place { decay: if segment.decay { self.decay } else { 0.0 }, rate: 1.0 };
            if let (Formula::Lars(lars), true) = (self.formula, segment.decay) {
                assert_eq!(range.len(), segment.range.len(), "LARS takes whole tensors");
                place.rate = lars.local_rate(weights, gradients, self.decay, tools);
            }
            let state = [&mut *first, &mut *second].map(|slot| slot.get_mut(range.clone()).unwrap_or_default());
            update::update(tools.cpu, self.step(moment, place), Tensor { weights, gradients, state });
        }
    }

    /// How far the weights stand ahead of where the optimizer is, in its first buffer of state: Nesterov's keeps the point that it
    /// looks at, x + v of the paper, and v is minus so many times the buffer. 0 for every other rule.
    pub fn look_ahead(&self, moment: Moment) -> f32 {
        match self.formula {
            Formula::Momentum(momentum) => momentum.look_ahead(moment),
            _ => 0.0,
        }
    }

    /// The arithmetic of one step for tensors that decay or do not, without LARS' own rates: what a device needs that applies the rule itself.
    pub fn constants(&self, moment: Moment, decays: bool) -> update::Update {
        self.step(moment, Place { decay: if decays { self.decay } else { 0.0 }, rate: 1.0 })
    }

    fn step(&self, moment: Moment, place: Place) -> update::Update {
        match self.formula {
            Formula::Sgd(sgd) => sgd.step(moment, place),
            Formula::Momentum(momentum) => momentum.step(moment, place),
            Formula::Adagrad(adagrad) => adagrad.step(moment, place),
            Formula::Adam(adam) => adam.step(moment, place),
            Formula::Lars(lars) => lars.momentum.step(moment, place),
        }
    }
}
