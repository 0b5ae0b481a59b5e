//! Momentum and Nesterov's momentum.
//!
//! PyTorch's form: v = μv + (g + λw), w −= ηv, and with Nesterov w −= η(g + λw + μv). The buffer holds gradients, so a
//! new η applies at once to all that was gathered. Caffe and Keras put η inside: v = μv + η(g + λw), w −= v; there a
//! drop of η leaves steps of the old size in v for 1/(1−μ) steps. Goyal et al. (2017) correct that by multiplying v by
//! η_new/η_old, which turns the second form into the first. `rescale` chooses: on is the first form, off the second.
//!
//! PyTorch starts v with the first gradient; a v of zeros does the same.

use super::{Moment, Piece};

/// The constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Momentum {
    /// μ
    pub momentum: f32,
    /// Whether to look one step ahead.
    pub nesterov: bool,
    /// Whether a change of η rescales v.
    pub rescale: bool,
}

impl Momentum {
    /// One step of one piece.
    pub fn step(self, moment: Moment, piece: &mut Piece<'_>) {
        let (inside, outside) = if self.rescale { (1.0, moment.learning_rate) } else { (moment.learning_rate, 1.0) };
        let (inside, momentum, decay) = (inside * piece.rate, self.momentum, piece.decay);
        let [velocities, _] = &mut piece.state;
        let elements = piece.weights.iter_mut().zip(piece.gradients).zip(velocities.iter_mut());
        if self.nesterov {
            for ((weight, &gradient), velocity) in elements {
                let gradient = inside * (gradient + decay * *weight);
                *velocity = momentum * *velocity + gradient;
                *weight -= outside * (gradient + momentum * *velocity);
            }
        } else {
            for ((weight, &gradient), velocity) in elements {
                *velocity = momentum * *velocity + inside * (gradient + decay * *weight);
                *weight -= outside * *velocity;
            }
        }
    }
}
