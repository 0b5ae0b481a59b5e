//! From an operation to calls: one `match`. The arithmetic is in `kernels/*.cu`, cuDNN and cuBLASLt.

mod batch_norm;
mod convolution;
mod elementwise;
mod embedding;
mod fold;
mod layout;
mod lstm;
mod narrow;
mod pooling;
mod product;
mod rows;
mod stem;

use super::CudaError;
use super::program::{At, Builder};
use crate::op::Op;

pub(super) use batch_norm::relu_gradient;
pub(super) use elementwise::cast;
pub(super) use layout::permute;
pub(super) use rows::tally;
pub(super) use stem::{Stem, stem_gradient};

/// Appends the calls of a node.
pub(super) fn node(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    match &at.node().op {
        Op::Conv2d { .. } | Op::Conv2dGradInput { .. } | Op::Conv2dGradWeight { .. } => {
            convolution::convolution(builder, at)
        }
        Op::MatMul { .. } => product::product(builder, at),
        Op::BatchNorm(_) | Op::BatchNormInference(_) | Op::BatchNormAgain(_) | Op::BatchNormGrad(_) => {
            batch_norm::batch_norm(builder, at)
        }
        Op::Unary(_)
        | Op::UnaryGrad(_)
        | Op::Add
        | Op::Mul
        | Op::Scale(_)
        | Op::Cast(_)
        | Op::Dropout { .. }
        | Op::SumLeading { .. } => elementwise::elementwise(builder, at),
        Op::Pool2d(_) | Op::Pool2dGrad { .. } => pooling::pooling(builder, at),
        Op::Reshape(_) | Op::Slice { .. } | Op::Pad { .. } | Op::Concat { .. } | Op::Permute { .. } => {
            layout::layout(builder, at)
        }
        Op::Softmax { .. }
        | Op::SoftmaxGrad
        | Op::CrossEntropy { .. }
        | Op::CrossEntropyGrad { .. }
        | Op::LayerNorm { .. }
        | Op::LayerNormGrad => rows::rows(builder, at),
        Op::Embedding | Op::EmbeddingGrad { .. } => embedding::embedding(builder, at),
        Op::Lstm | Op::LstmGrad => lstm::lstm(builder, at),
        Op::Together(_) => {
            unreachable!("layers are computed by several parts on CPUs only, which is said before a plan comes here")
        }
    }
}
