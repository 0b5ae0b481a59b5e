//! What each operand of an operation may be made of: one table, which graphs are checked by, precision is chosen by
//! (`mixed.rs`), and devices choose kernels by.

use super::{Op, ReluMask, Together};
use crate::window::PoolKind;

/// The types that an input or output may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// A type that all operands of this kind of a node share: activations and their gradients. What only moves elements
    /// takes any type here, the rest floating-point ones.
    Common,
    /// Always `f32`: parameters and their gradients, statistics, losses.
    Full,
    /// Any floating-point type, whatever the others have.
    Free,
    /// Class numbers, tokens, positions.
    Integer,
}

use Operand::{Common, Free, Full, Integer};

impl Op {
    /// What input `index` may be.
    pub(crate) fn operand(&self, index: usize) -> Operand {
        match self {
            Self::Conv2d { .. } | Self::Conv2dGradInput { .. } if index > 0 => Full,
            Self::MatMul { .. } => [Free, Free, Full][index],
            Self::BatchNorm(norm) | Self::BatchNormInference(norm) | Self::BatchNormAgain(norm) => {
                if (1..norm.inputs_fixed()).contains(&index) { Full } else { Common }
            }
            Self::BatchNormGrad(norm) => match index.checked_sub(2) {
                None => Common,
                Some(index) if index == 2 + usize::from(norm.scale) && norm.mask == ReluMask::FromOutput => Common,
                Some(_) => Full,
            },
            Self::LayerNorm { .. } if index > 0 => Full,
            Self::LayerNormGrad if index > 1 => Full,
            Self::Cast(_) => Free,
            Self::Pool2dGrad { .. } if index == 1 => Integer,
            Self::CrossEntropy { .. } => [Full, Integer][index],
            Self::CrossEntropyGrad { .. } => [Full, Full, Integer][index],
            Self::Embedding => [Integer, Full][index],
            Self::EmbeddingGrad { .. } => [Free, Integer][index],
            Self::Lstm | Self::LstmGrad => Full,
            // What travels between parts is not rounded.
            Self::Together(Together::Sum | Together::Gather(_)) => Full,
            _ => Common,
        }
    }

    /// What output `index` may be.
    pub(crate) fn result(&self, index: usize) -> Operand {
        match self {
            Self::Conv2dGradWeight { .. } | Self::SumLeading { .. } | Self::EmbeddingGrad { .. } => Full,
            Self::MatMul { .. } | Self::Embedding | Self::Cast(_) => Free,
            Self::BatchNormGrad(norm) => {
                if (1..2 + usize::from(norm.scale)).contains(&index) {
                    Full
                } else {
                    Common
                }
            }
            Self::Conv2d { .. } | Self::BatchNorm(_) | Self::LayerNorm { .. } | Self::LayerNormGrad if index > 0 => {
                Full
            }
            Self::Pool2d(pool) if index > 0 && pool.kind == PoolKind::Max => Integer,
            Self::CrossEntropy { .. } | Self::CrossEntropyGrad { .. } | Self::Lstm | Self::LstmGrad => Full,
            Self::Together(Together::Sum | Together::Gather(_)) => Full,
            _ => Common,
        }
    }
}
