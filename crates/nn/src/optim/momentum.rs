//! Momentum and Nesterov's momentum.
//!
//! PyTorch's form: v = μv + (g + λw), w −= ηv, and with Nesterov w −= η(g + λw + μv). The buffer holds gradients, so a
//! new η applies at once to all that was gathered. Caffe and Keras put η inside: v = μv + η(g + λw), w −= v; there a
//! drop of η leaves steps of the old size in v for 1/(1−μ) steps. Goyal et al. (2017) correct that by multiplying v by
//! η_new/η_old, which turns the second form into the first. `rescale` chooses: on is the first form, off the second.
//!
//! PyTorch starts v with the first gradient; a v of zeros does the same.

use paceline_tensor::device::cpu::update::Update;

use super::{Moment, Place};

/// The constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Momentum {
    /// μ
    pub momentum: f32,
    /// Steps at the beginning that keep nothing of the old direction.
    pub from_step: u64,
    /// Whether to look one step ahead.
    pub nesterov: bool,
    /// Whether a change of η rescales v.
    pub rescale: bool,
}

impl Momentum {
    /// μ at a moment.
    fn at(self, moment: Moment) -> f32 {
        if moment.step < self.from_step { 0.0 } else { self.momentum }
    }

    /// The weights w are x + μv′ with v′ = −`outside`·v of the form above: so x = w + μ·`outside`·v.
    pub fn look_ahead(self, moment: Moment) -> f32 {
        let outside = if self.rescale { moment.learning_rate } else { 1.0 };
        if self.nesterov { self.at(moment) * outside } else { 0.0 }
    }

    /// The arithmetic of one step.
    pub fn step(self, moment: Moment, place: Place) -> Update {
        let (inside, outside) = if self.rescale { (1.0, moment.learning_rate) } else { (moment.learning_rate, 1.0) };
        let (momentum, inside) = (self.at(moment), inside * place.rate);
        Update::Momentum { momentum, inside, outside, decay: place.decay, ahead: self.nesterov }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept_of_the_first_steps() {
        let rule = Momentum { momentum: 0.9, from_step: 3, nesterov: true, rescale: true };
        let of = |step: u64| {
            let moment = Moment { step, learning_rate: 0.5 };
            let Update::Momentum { momentum, .. } = rule.step(moment, Place { rate: 1.0, decay: 0.0 }) else {
                panic!("it is momentum")
            };
            (momentum, rule.look_ahead(moment))
        };
        assert_eq!([of(0), of(2), of(3), of(9)], [(0.0, 0.0), (0.0, 0.0), (0.9, 0.45), (0.9, 0.45)]);
    }
}
