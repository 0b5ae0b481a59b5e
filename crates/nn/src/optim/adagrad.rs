//! Adagrad (Duchi et al., 2011): s += g², w −= ηg/(√s + ε), with g including λw.

use paceline_tensor::device::cpu::update::Update;

use super::{Moment, Place};

/// The constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    /// ε
    pub epsilon: f32,
}

impl Adagrad {
    /// The arithmetic of one step.
    pub fn step(self, moment: Moment, place: Place) -> Update {
        Update::Adagrad { rate: moment.learning_rate, epsilon: self.epsilon, decay: place.decay }
    }
}
