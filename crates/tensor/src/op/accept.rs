//! What an operation accepts before its shapes are compared: how many inputs, of which kind, none of them empty. The
//! shape rules in `infer.rs` rely on it and look at their inputs without asking again whether they are there.

use super::{BatchNormGrad, Op, Operand, ReluMask, Together};
use crate::dtype::DType;
use crate::shape::Shape;
use crate::window::PoolKind;

impl Op {
    /// Refuses what no shape rule should see.
    pub(super) fn accept(&self, inputs: &[(&Shape, DType)]) -> Result<(), String> {
        let needed = self.inputs_needed();
        match (needed, inputs.len()) {
            (None, 0) => return Err("no inputs given, at least 1 needed".into()),
            (Some(needed), given) if needed != given => return Err(format!("{given} inputs given, {needed} needed")),
            _ => {}
        }
        for (index, (shape, dtype)) in inputs.iter().enumerate() {
            if is_empty(shape) {
                return Err(format!("input {index} has no elements (shape `{shape}`)"));
            }
            if shape.checked_elements().is_none() {
                return Err(too_many(&format!("input {index}"), shape));
            }
            match self.operand(index) {
                Operand::Integer if *dtype != DType::I32 => {
                    return Err(format!("input {index} must be numbers of type i32, not {dtype}"));
                }
                Operand::Integer => {}
                _ if !dtype.is_float() && !self.only_moves() => {
                    return Err(format!("input {index} must be floating-point, not {dtype}"));
                }
                Operand::Full if *dtype != DType::F32 => {
                    return Err(format!("input {index} must be of type f32, not {dtype}"));
                }
                _ => {}
            }
        }
        let mut common = inputs.iter().enumerate().filter(|(index, _)| self.operand(*index) == Operand::Common);
        let first = common.next().map(|(_, input)| input.1);
        match common.find(|(_, input)| Some(input.1) != first) {
            Some((_, other)) => Err(format!("the types {} and {} do not mix", inputs[0].1, other.1)),
            None => Ok(()),
        }
    }

    /// How many inputs there are; none where any number above zero will do.
    fn inputs_needed(&self) -> Option<usize> {
        Some(match self {
            Self::Conv2d { bias, .. } | Self::MatMul { bias, .. } => 2 + usize::from(*bias),
            Self::BatchNorm(norm) | Self::BatchNormInference(norm) | Self::BatchNormAgain(norm) => {
                norm.inputs_fixed() + usize::from(norm.residual)
            }
            Self::BatchNormGrad(BatchNormGrad { scale, mask, .. }) => {
                4 + usize::from(*scale) + usize::from(*mask != ReluMask::None)
            }
            Self::Pool2dGrad { pool, .. } => 1 + usize::from(pool.kind == PoolKind::Max),
            Self::Conv2dGradInput { .. } | Self::Conv2dGradWeight { .. } => 2,
            Self::UnaryGrad(_) | Self::Add | Self::Mul | Self::SoftmaxGrad => 2,
            Self::CrossEntropy { .. } | Self::Embedding | Self::EmbeddingGrad { .. } => 2,
            Self::LayerNorm { .. } | Self::CrossEntropyGrad { .. } => 3,
            Self::LayerNormGrad | Self::Lstm => 5,
            Self::LstmGrad => 7,
            Self::Unary(_) | Self::Scale(_) | Self::Cast(_) | Self::SumLeading { .. } | Self::Pool2d(_) => 1,
            Self::Reshape(_) | Self::Slice { .. } | Self::Pad { .. } | Self::Permute { .. } => 1,
            Self::Dropout { .. } | Self::Softmax { .. } => 1,
            Self::Together(_) => 1,
            Self::Concat { .. } => return None,
        })
    }

    /// Whether elements are copied and not computed with, so that any type will do.
    pub(crate) const fn only_moves(&self) -> bool {
        matches!(
            self,
            Self::Reshape(_)
                | Self::Slice { .. }
                | Self::Pad { .. }
                | Self::Concat { .. }
                | Self::Permute { .. }
                | Self::Together(Together::Fork)
        )
    }
}

/// The refusal of a shape whose elements nobody could count.
pub(super) fn too_many(what: &str, shape: &Shape) -> String {
    format!("{what} has {shape} elements, more than this machine can address")
}

/// Whether a shape holds nothing or, lacking dims altogether, is none.
pub(super) fn is_empty(shape: &Shape) -> bool {
    shape.is_empty() || shape.contains(&0)
}
