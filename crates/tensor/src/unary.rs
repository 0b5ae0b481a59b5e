//! The functions of one number that a graph knows, shared by the operations and every device.

use serde::{Deserialize, Serialize};

/// A function applied to every element by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unary {
    /// max(x, 0).
    Relu,
    /// min(max(x, 0), 6).
    Relu6,
    /// x·Φ(x), Φ being the normal distribution's cumulative function: the exact form, not its tanh approximation.
    Gelu,
    /// The tanh approximation of GELU, as GPT-2 used it.
    GeluTanh,
    /// 1 / (1 + e⁻ˣ).
    Sigmoid,
    /// Hyperbolic tangent.
    Tanh,
}

impl Unary {
    /// Every function.
    pub const ALL: [Self; 6] = [Self::Relu, Self::Relu6, Self::Gelu, Self::GeluTanh, Self::Sigmoid, Self::Tanh];

    /// Whether the gradient is computed from the output (so that the input's buffer may be reused) or from the input.
    pub const fn saves_output(self) -> bool {
        !matches!(self, Self::Gelu | Self::GeluTanh)
    }
}
