//! Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019).
//!
//! m = β₁m + (1−β₁)g, v = β₂v + (1−β₂)g², w −= η·m̂/(√v̂ + ε) with m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ) for the t-th step.
//! Adam adds λw to g; AdamW multiplies w by 1−ηλ instead, so that the decay is not divided by √v̂.

use super::{Moment, Piece};

/// The constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// β₁ and β₂
    pub betas: [f64; 2],
    /// ε
    pub epsilon: f32,
    /// Whether the decay leaves the gradient alone: AdamW.
    pub decoupled: bool,
}

impl Adam {
    /// One step of one piece.
    pub fn step(self, moment: Moment, piece: &mut Piece<'_>) {
        let count = (moment.step + 1) as f64;
        let [correction_1, correction_2] = self.betas.map(|beta| 1.0 - beta.powf(count));
        let rate = (f64::from(moment.learning_rate) / correction_1) as f32;
        let root = (1.0 / correction_2.sqrt()) as f32;
        let [beta_1, beta_2] = self.betas.map(|beta| beta as f32);
        let [rest_1, rest_2] = self.betas.map(|beta| (1.0 - beta) as f32);
        let epsilon = self.epsilon;
        let (added, kept) = if self.decoupled {
            (0.0, (1.0 - f64::from(moment.learning_rate) * f64::from(piece.decay)) as f32)
        } else {
            (piece.decay, 1.0)
        };
        let [means, squares] = &mut piece.state;
        let moments = means.iter_mut().zip(squares.iter_mut());
        for ((weight, &gradient), (mean, square)) in piece.weights.iter_mut().zip(piece.gradients).zip(moments) {
            let gradient = gradient + added * *weight;
            *mean = beta_1 * *mean + rest_1 * gradient;
            *square = beta_2 * *square + rest_2 * gradient * gradient;
            *weight = kept * *weight - rate * *mean / (square.sqrt() * root + epsilon);
        }
    }
}
