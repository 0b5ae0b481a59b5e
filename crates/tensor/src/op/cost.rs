//! What an operation costs by arithmetic: floating-point operations, a multiply-add counting as two.

use super::Op;
use crate::shape::Shape;

impl Op {
    /// Floating-point operations for these shapes.
    pub(crate) fn flops(&self, inputs: &[&Shape], outputs: &[&Shape]) -> u64 {
        let elements = |shape: &Shape| shape.elements() as u64;
        let y = outputs.first().map_or(0, |shape| elements(shape));
        match self {
            // Each output element is a dot product over the taps and the channels of its group.
            Self::Conv2d { .. } => 2 * y * elements(inputs[1]) / inputs[1].last() as u64,
            Self::Conv2dGradInput { .. } => 2 * elements(inputs[0]) * elements(inputs[1]) / inputs[1].last() as u64,
            Self::Conv2dGradWeight { .. } => 2 * elements(inputs[1]) * y / outputs[0].last() as u64,
            Self::MatMul { trans_a, .. } => {
                let a = inputs[0];
                2 * y * if *trans_a { a[a.len() - 2] } else { a.last() } as u64
            }
            Self::Lstm => lstm_flops(inputs[0], inputs[1], inputs[2]),
            Self::LstmGrad => 2 * lstm_flops(inputs[1], inputs[2], inputs[3]),
            Self::BatchNorm(norm) => {
                if norm.moments {
                    4 * y
                } else {
                    8 * y
                }
            }
            Self::LayerNorm { .. } => 8 * y,
            Self::BatchNormAgain(_) => 4 * y,
            Self::BatchNormGrad(_) | Self::LayerNormGrad => 10 * y,
            Self::Reshape(_) | Self::Slice { .. } | Self::Pad { .. } | Self::Concat { .. } | Self::Permute { .. } => 0,
            Self::Embedding | Self::Together(_) => 0,
            Self::SumLeading { .. } | Self::Pool2d(_) => elements(inputs[0]),
            _ => y,
        }
    }

    /// Whether the arithmetic is multiply-adds of a convolution or matrix product: what "GMACs" counts.
    pub(crate) const fn is_product(&self) -> bool {
        matches!(
            self,
            Self::Conv2d { .. }
                | Self::Conv2dGradInput { .. }
                | Self::Conv2dGradWeight { .. }
                | Self::MatMul { .. }
                | Self::Lstm
                | Self::LstmGrad
        )
    }
}

fn lstm_flops(x: &Shape, w_ih: &Shape, w_hh: &Shape) -> u64 {
    2 * (x[0] * x[1]) as u64 * (w_ih.elements() + w_hh.elements()) as u64
}
