//! Stochastic gradient descent: w −= η(g + λw).

use paceline_tensor::device::cpu::update::Update;

use super::{Moment, Place};

/// The rule has no constants of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd;

impl Sgd {
    /// The arithmetic of one step.
    pub fn step(self, moment: Moment, place: Place) -> Update {
        Update::Descent { rate: moment.learning_rate, decay: place.decay }
    }
}
