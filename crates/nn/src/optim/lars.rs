//! LARS (You et al., 2017): momentum in which each layer has a rate of its own.
//!
//! A layer's rate is c‖w‖/(‖g‖ + λ‖w‖), so that a step changes every layer by about the same share of its length and a
//! very large batch does not tear the first layers apart. Biases and normalisation parameters are left out: no decay
//! and rate 1. A layer whose weights or gradients are all zero has rate 1 too.

use super::Tools;
use super::momentum::Momentum;
use super::norm::squares;

/// The constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lars {
    /// What happens once the layer's rate is known.
    pub momentum: Momentum,
    /// c
    pub coefficient: f32,
}

impl Lars {
    /// The own rate of a layer whose weights decay by `decay`.
    pub fn local_rate(self, weights: &[f32], gradients: &[f32], decay: f32, tools: &mut Tools<'_>) -> f32 {
        let [weights, gradients] = [weights, gradients].map(|values| squares(values, tools).sqrt());
        if weights == 0.0 || gradients == 0.0 {
            return 1.0;
        }
        (f64::from(self.coefficient) * weights / (gradients + f64::from(decay) * weights)) as f32
    }
}
