//! Adagrad (Duchi et al., 2011): s += g², w −= ηg/(√s + ε), with g including λw.

use super::{Moment, Piece};

/// The constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    /// ε
    pub epsilon: f32,
}

impl Adagrad {
    /// One step of one piece.
    pub fn step(self, moment: Moment, piece: &mut Piece<'_>) {
        let (rate, epsilon, decay) = (moment.learning_rate, self.epsilon, piece.decay);
        let [sums, _] = &mut piece.state;
        for ((weight, &gradient), sum) in piece.weights.iter_mut().zip(piece.gradients).zip(sums.iter_mut()) {
            let gradient = gradient + decay * *weight;
            *sum += gradient * gradient;
            *weight -= rate * gradient / (sum.sqrt() + epsilon);
        }
    }
}
