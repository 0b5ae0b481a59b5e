//! Functions of one element.

use serde::{Deserialize, Serialize};

/// A function applied to each element by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Unary {
    /// max(x, 0)
    Relu,
    /// min(max(x, 0), 6)
    Relu6,
    /// x·Φ(x), with the exact error function
    Gelu,
    /// The tanh approximation of GELU
    GeluTanh,
    /// 1/(1+e⁻ˣ)
    Sigmoid,
    /// tanh x
    Tanh,
}

impl Unary {
    /// Whether the gradient is computed from the output (true) or from the input (false).
    pub const fn saves_output(self) -> bool {
        matches!(self, Self::Relu | Self::Relu6 | Self::Sigmoid | Self::Tanh)
    }
}
