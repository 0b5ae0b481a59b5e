//! The constants of the rules, as a config spells them, with the frameworks' defaults.

use serde::{Deserialize, Serialize};

/// The constants of every rule. A rule reads those it knows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct HyperParameters {
    /// Share of the old direction that is kept (`momentum`, `nesterov`, `lars`).
    pub momentum: f32,
    /// Steps at the beginning of a run that keep nothing of it.
    #[serde(skip_serializing_if = "is_zero")]
    pub momentum_from: u64,
    /// Whether a change of the learning rate rescales the momentum gathered so far (Goyal et al., 2017). On, the buffer
    /// holds gradients and the rate multiplies it when it is used: PyTorch's form. Off, it holds steps that keep
    /// the rate they were made with: Caffe's and Keras' form.
    pub rescale_momentum: bool,
    /// Shares of the old means of gradients and of squared gradients that are kept (`adam`, `adamw`). In f64, because
    /// 1 − 0.999 in f32 has lost three digits.
    pub betas: [f64; 2],
    /// Added to the denominator; 1e-10 for `adagrad` and 1e-8 for `adam` and `adamw` if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epsilon: Option<f32>,
    /// λ of weight decay; 0.01 for `adamw` and 0 for the others if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f32>,
    /// c of the layers' own rates c‖w‖/(‖g‖+λ‖w‖) (`lars`).
    pub lars_coefficient: f32,
}

impl Default for HyperParameters {
    fn default() -> Self {
        Self {
            momentum: 0.9,
            momentum_from: 0,
            rescale_momentum: true,
            betas: [0.9, 0.999],
            epsilon: None,
            weight_decay: None,
            lars_coefficient: 0.001,
        }
    }
}

// Serde hands a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(steps: &u64) -> bool {
    *steps == 0
}

/// A constant out of its range: the message says what to write.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} = {value} does not work; write {range}")]
pub struct HyperParameterError {
    /// Its name in the config.
    pub name: &'static str,
    /// What was written.
    pub value: f64,
    /// What can be written.
    pub range: &'static str,
}

impl HyperParameters {
    /// Whether every constant is in its range.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), HyperParameterError> {
        let share = "a number from 0 to below 1";
        let positive = "a number above 0";
        let [beta_1, beta_2] = self.betas;
        let (epsilon, decay) = (self.epsilon.unwrap_or(1.0), self.weight_decay.unwrap_or(0.0));
        let shares = [("momentum", f64::from(self.momentum)), ("betas", beta_1), ("betas", beta_2)];
        let checks = shares.map(|(name, value)| (name, value, share, (0.0..1.0).contains(&value))).into_iter().chain([
            ("epsilon", f64::from(epsilon), positive, epsilon > 0.0 && epsilon.is_finite()),
            ("weight-decay", f64::from(decay), "0 or a number above", decay >= 0.0 && decay.is_finite()),
            (
                "lars-coefficient",
                f64::from(self.lars_coefficient),
                positive,
                self.lars_coefficient > 0.0 && self.lars_coefficient.is_finite(),
            ),
        ]);
        for (name, value, range, fits) in checks {
            if !fits {
                return Err(HyperParameterError { name, value, range });
            }
        }
        Ok(())
    }
}
