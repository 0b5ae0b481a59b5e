//! Which algorithm computes each pass of each convolution: by the rule of [`ConvShape::algorithm`], or by measurement.
//!
//! A device starts without measurements and follows the rule, which is a function of the shapes alone. [`Cpu::calibrate`]
//! looks at a plan and times the candidates of each pass that has more than one, on numbers of its own; from then on the
//! device takes the fastest. Algorithms differ in the last bits of their results, so measured choices belong into a file
//! ([`Choices`]) and are taken from there the next time: the same choices, the same bits. The number of threads is not
//! part of what a choice depends on, so that results do not depend on it either.

mod file;
#[cfg(test)]
mod tests;
mod winograd;

use std::collections::{BTreeMap, HashMap};
use std::sync::PoisonError;

use paceline_system::clock::Clock;
use serde::{Deserialize, Serialize};

use super::Cpu;
use super::context::Context;
use super::conv::{Algorithm, ConvPass, ConvShape};
use super::isa::Isa;
use super::trial::{Kernel, Trial};
use crate::dtype::DType;
use crate::plan::Plan;
pub use file::ChoicesError;
pub use winograd::Winograd;

/// A pass that takes less arithmetic than this stays with the rule: a tenth of a millisecond on one core, less than can be
/// told from noise, and nothing that a step would show.
const TINY_FLOPS: u64 = 10_000_000;

/// A pass is measured on so few images that one run takes at most about this for each thread, or on one image.
const TRIAL_FLOPS: u64 = 2_000_000_000;

/// How long the candidates of one pass are run in turns.
const TRIAL_SECONDS: f64 = 0.03;

/// Another algorithm than the rule's must be faster by this factor: noise should not decide about bits.
const WORTHWHILE: f64 = 1.03;

/// What a choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The convolution.
    #[serde(flatten)]
    pub shape: ConvShape,
    /// Its pass.
    pub pass: ConvPass,
    /// The type of its images.
    pub dtype: DType,
    /// The instructions.
    pub isa: Isa,
}

/// The fastest algorithm, and what all of them took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// The fastest.
    pub algorithm: Algorithm,
    /// Seconds of each candidate, on the images that were measured.
    pub seconds: BTreeMap<Algorithm, f64>,
    /// The threads that it was measured with.
    pub threads: usize,
}

/// Everything measured on one kind of processor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choices {
    /// The processor's name.
    pub processor: String,
    choices: HashMap<Key, Choice>,
}

impl Choices {
    /// Nothing yet, on this processor.
    pub fn new(processor: &str) -> Self {
        Self { processor: processor.into(), choices: HashMap::new() }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.choices.is_empty()
    }

    /// Adds what another table has and this one has not.
    pub fn merge(&mut self, other: Self) {
        for (key, choice) in other.choices {
            self.choices.entry(key).or_insert(choice);
        }
    }
}

/// The choices in force on a device.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    measured: HashMap<(ConvShape, ConvPass, DType), Algorithm>,
    winograd: Winograd,
}

impl Chosen {
    /// The algorithm of a pass: measured, or by rule.
    pub(super) fn of(&self, shape: &ConvShape, pass: ConvPass, dtype: DType) -> Algorithm {
        let measured = if self.measured.is_empty() { None } else { self.measured.get(&(*shape, pass, dtype)) };
        let algorithm = measured.copied().unwrap_or_else(|| shape.algorithm(pass));
        if self.permits(algorithm, dtype) { algorithm } else { shape.direct() }
    }

    fn permits(&self, algorithm: Algorithm, dtype: DType) -> bool {
        algorithm != Algorithm::Winograd || self.winograd.allows(dtype)
    }
}

/// What a calibration did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Calibration {
    /// Passes whose choice was known.
    pub known: usize,
    /// Passes that were measured.
    pub measured: usize,
    /// Passes with a choice that was neither, so that the rule holds.
    pub by_rule: usize,
    /// What the measurements took.
    pub seconds: f64,
}

impl Cpu {
    /// Says which convolutions may go by tiles from now on, whatever the rule and measurements say.
    pub fn allow_winograd(&self, winograd: Winograd) {
        self.chosen.write().unwrap_or_else(PoisonError::into_inner).winograd = winograd;
    }

    /// Chooses the algorithm of every pass of the plan's convolutions that leaves a choice: what `known` says, or if
    /// `measure` is set, the fastest, which is added to `known`. Tiny layers stay with the rule.
    ///
    /// # Panics
    /// When a kernel panics.
    pub fn calibrate(&self, plan: &Plan, known: &mut Choices, measure: bool) -> Calibration {
        let clock = Clock::real();
        let mut calibration = Calibration::default();
        for (kernel, _) in Kernel::all(plan.graph()) {
            let mut candidates = kernel.candidates();
            let Kernel::Convolution { shape, pass, dtype } = kernel else { continue };
            let chosen = self.chosen.read().unwrap_or_else(PoisonError::into_inner);
            candidates.retain(|&candidate| chosen.permits(candidate, dtype));
            drop(chosen);
            if candidates.len() < 2 || kernel.flops() < TINY_FLOPS {
                continue;
            }
            let key = Key { shape, pass, dtype, isa: self.isa() };
            let algorithm = match known.choices.get(&key) {
                Some(choice) if candidates.contains(&choice.algorithm) => {
                    calibration.known += 1;
                    choice.algorithm
                }
                _ if measure => {
                    calibration.measured += 1;
                    let choice = self.choose(kernel, shape.algorithm(pass), &candidates);
                    let algorithm = choice.algorithm;
                    known.choices.insert(key, choice);
                    algorithm
                }
                _ => {
                    calibration.by_rule += 1;
                    continue;
                }
            };
            let mut chosen = self.chosen.write().unwrap_or_else(PoisonError::into_inner);
            chosen.measured.insert((shape, pass, dtype), algorithm);
        }
        calibration.seconds = clock.seconds();
        calibration
    }

    /// Holds every pass of the plan's convolutions to the algorithm that `pick` takes of its candidates, to compare them.
    pub fn hold_to(&self, plan: &Plan, pick: impl Fn(&[Algorithm]) -> Algorithm) {
        let mut chosen = self.chosen.write().unwrap_or_else(PoisonError::into_inner);
        for (kernel, _) in Kernel::all(plan.graph()) {
            if let Kernel::Convolution { shape, pass, dtype } = kernel {
                chosen.measured.insert((shape, pass, dtype), pick(&kernel.candidates()));
            }
        }
    }

    /// The algorithm that a pass is computed with, and whether it was chosen by measurement.
    pub fn algorithm(&self, shape: &ConvShape, pass: ConvPass, dtype: DType) -> (Algorithm, bool) {
        let chosen = self.chosen.read().unwrap_or_else(PoisonError::into_inner);
        let algorithm = chosen.of(shape, pass, dtype);
        (algorithm, chosen.measured.get(&(*shape, pass, dtype)) == Some(&algorithm))
    }

    /// The least seconds of each candidate of a kernel (of a product, its own), run in turns for about `seconds`.
    ///
    /// # Panics
    /// When two candidates do not compute the same: a time would mean nothing.
    pub fn time(&self, kernel: Kernel, seconds: f64) -> Vec<f64> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut context = Context { pool: self.pool(), isa: self.isa(), scratch: &mut scratch };
        let (mut trial, candidates) = (Trial::new(kernel), kernel.candidates());
        if let (Kernel::Convolution { dtype, .. }, [first, others @ ..]) = (kernel, &candidates[..]) {
            trial.run(&mut context, Some(*first));
            let expected = trial.result();
            for &other in others {
                trial.run(&mut context, Some(other));
                assert!(is_close(&trial.result(), &expected, dtype), "{other:?} does not compute {kernel}");
            }
        }
        trial.time(&mut context, &candidates, seconds)
    }

    /// Times the candidates; `rule` is one of them.
    fn choose(&self, kernel: Kernel, rule: Algorithm, candidates: &[Algorithm]) -> Choice {
        let threads = self.pool().threads();
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut context = Context { pool: self.pool(), isa: self.isa(), scratch: &mut scratch };
        let mut trial = Trial::new(kernel.shortened(TRIAL_FLOPS * threads as u64));
        let seconds = trial.time(&mut context, candidates, TRIAL_SECONDS);
        let seconds: BTreeMap<Algorithm, f64> = candidates.iter().copied().zip(seconds).collect();
        Choice { algorithm: fastest(&seconds, rule), seconds, threads }
    }
}

/// The fastest algorithm, unless it is hardly faster than the rule's.
fn fastest(seconds: &BTreeMap<Algorithm, f64>, rule: Algorithm) -> Algorithm {
    let least = seconds.iter().min_by(|a, b| a.1.total_cmp(b.1));
    match (least, seconds.get(&rule)) {
        (Some((&algorithm, &least)), Some(&by_rule)) if least * WORTHWHILE < by_rule => algorithm,
        _ => rule,
    }
}

/// Whether results are the same up to rounding, relative to the largest.
fn is_close(result: &[f32], expected: &[f32], dtype: DType) -> bool {
    let tolerance = if dtype == DType::F32 { 1e-4 } else { 0.05 };
    let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    result.iter().zip(expected).all(|(result, expected)| (result - expected).abs() <= tolerance * largest)
}
