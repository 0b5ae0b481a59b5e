//! Stochastic gradient descent: w −= η(g + λw).

use super::{Moment, Piece};

/// The rule has no constants of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd;

impl Sgd {
    /// One step of one piece.
    pub fn step(self, moment: Moment, piece: &mut Piece<'_>) {
        let (rate, decay) = (moment.learning_rate, piece.decay);
        for (weight, &gradient) in piece.weights.iter_mut().zip(piece.gradients) {
            *weight -= rate * (gradient + decay * *weight);
        }
    }
}
