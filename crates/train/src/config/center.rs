//! The options of agreements in which workers exchange with a centre that servers hold; what was not said is the agreement's own choice.

use serde::{Deserialize, Serialize};

/// The table `[center]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Center {
    /// Workers that add up their gradients and step as one, where groups of them step by themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<usize>,
    /// Memory boxes that hold the centre, such as `10.0.0.1:29411`; the run's servers start their own without any.
    #[serde(rename = "box", skip_serializing_if = "Vec::is_empty")]
    pub boxes: Vec<String>,
    /// How much of what is between a worker and the centre both move in an exchange.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elastic_rate: Option<f64>,
    /// Steps between two fetches of the servers' weights, where workers step by themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetch_every: Option<u64>,
    /// Steps between two pushes of what a worker has changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub push_every: Option<u64>,
    /// How much of what is pushed the servers add; 1 divided by the number of workers if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub push_rate: Option<f64>,
    /// Whether an update counts less the more others it has missed: at the rate η / (1 + staleness).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub staleness_aware: bool,
    /// The rate of a step that servers make with Adagrad of what is pushed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_adagrad: Option<f64>,
    /// Steps at the beginning that one worker makes alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_start: Option<u64>,
    /// Changes of weights and gradients that servers keep, which tell of the curvature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<usize>,
}

impl Center {
    /// Whether nothing was said.
    pub fn is_silent(&self) -> bool {
        *self == Self::default()
    }
}
