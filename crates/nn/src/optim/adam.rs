//! Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019).
//!
//! m = β₁m + (1−β₁)g, v = β₂v + (1−β₂)g², w −= η·m̂/(√v̂ + ε) with m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ) for the t-th step.
//! Adam adds λw to g; AdamW multiplies w by 1−ηλ instead, so that the decay is not divided by √v̂.

use paceline_tensor::device::cpu::update::Update;

use super::{Moment, Place};

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
    /// The arithmetic of one step.
    pub fn step(self, moment: Moment, place: Place) -> Update {
        let count = (moment.step + 1) as f64;
        let [correction_1, correction_2] = self.betas.map(|beta| 1.0 - beta.powf(count));
        let (decay, kept) = if self.decoupled {
            (0.0, (1.0 - f64::from(moment.learning_rate) * f64::from(place.decay)) as f32)
        } else {
            (place.decay, 1.0)
        };
        Update::Adam {
            rate: (f64::from(moment.learning_rate) / correction_1) as f32,
            root: (1.0 / correction_2.sqrt()) as f32,
            betas: self.betas.map(|beta| beta as f32),
            rests: self.betas.map(|beta| (1.0 - beta) as f32),
            epsilon: self.epsilon,
            decay,
            kept,
        }
    }
}
