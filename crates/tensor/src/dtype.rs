//! Element types, and the one generic that crosses crate boundaries: [`Element`] on host slices.

use serde::{Deserialize, Serialize};

use crate::bf16::Bf16;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 32-bit floating point.
    F32,
    /// The upper half of an `f32`: its range with 8 bits of precision.
    Bf16,
    /// 32-bit integers: class numbers, tokens, positions of maxima.
    I32,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Whether a gradient can flow through elements of this type.
    pub const fn is_float(self) -> bool {
        !matches!(self, Self::I32)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
        })
    }
}

/// A host type that a tensor can be read from or written into. Sealed: one Rust type per [`DType`].
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// The matching tensor type.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for i32 {
    const DTYPE: DType = DType::I32;
}

impl Element for Bf16 {
    const DTYPE: DType = DType::Bf16;
}

/// An element that kernels compute with: read as an `f32`, written rounded to the type.
pub trait Float: Element {
    /// The number.
    fn to_f32(self) -> f32;
    /// The nearest number of this type.
    fn from_f32(value: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Float for Bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
    impl Sealed for super::Bf16 {}
}
