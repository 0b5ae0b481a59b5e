//! LARS (You et al., 2017): momentum in which each layer has a rate of its own.
//!
//! A layer's rate is c‖w‖/(‖g‖ + λ‖w‖), so that a step changes every layer by about the same share of its length and a
//! very large batch does not tear the first layers apart. Biases and normalisation parameters are left out: no decay
//! and rate 1. A layer whose weights or gradients are all zero has rate 1 too.

use super::momentum::Momentum;
use super::norm::squares;
use super::{Buffers, Moment, Piece, Runner, Segment};

/// The constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lars {
    /// What happens once the layer's rate is known.
    pub momentum: Momentum,
    /// c
    pub coefficient: f32,
}

impl Lars {
    /// The own rate of each segment.
    pub fn local_rates(self, segments: &[Segment], buffers: &Buffers<'_>, decay: f32, run: Runner<'_>) -> Vec<f32> {
        let ranges: Vec<_> =
            segments.iter().map(|segment| if segment.decay { segment.range.clone() } else { 0..0 }).collect();
        let weights = squares(buffers.weights, &ranges, run);
        let gradients = squares(buffers.gradients, &ranges, run);
        let rate = |(weights, gradients): (f64, f64)| {
            if weights == 0.0 || gradients == 0.0 {
                return 1.0;
            }
            let (weights, gradients) = (weights.sqrt(), gradients.sqrt());
            (f64::from(self.coefficient) * weights / (gradients + f64::from(decay) * weights)) as f32
        };
        weights.into_iter().zip(gradients).map(rate).collect()
    }

    /// One step of one piece.
    pub fn step(self, moment: Moment, piece: &mut Piece<'_>) {
        self.momentum.step(moment, piece);
    }
}
