//! dw = patches of x, transposed, times dy: a short and wide result over a very long depth.
#![allow(unsafe_code)]

use super::super::context::Context;
use super::super::gemm::pack::{Layout, Left, Strided};
use super::super::gemm::product::{Place, Product, multiply};
use super::super::gemm::{Epilogue, Matrix};
use super::axis::Axis;
use super::depthwise;
use super::patches::Patches;
use super::{Algorithm, ConvShape, winograd};
use crate::dtype::Float;

/// The gradient of the weight from the input and the gradient of the output.
///
/// # Panics
/// When a slice has another size than `shape` says.
pub fn conv2d_grad_weight<E: Float>(
    context: &mut Context<'_>,
    shape: &ConvShape,
    algorithm: Algorithm,
    x: &[E],
    dy: &[E],
    dw: &mut [f32],
) {
    shape.check(x.len(), dw.len(), dy.len());
    let axes = [0, 1].map(|dim| Axis::forward(&shape.conv, dim, shape.x[1 + dim], shape.y[1 + dim]));
    let (inputs, outputs) = (shape.x[3], shape.y[3]);
    let (layout, group_channels) = (Layout::AlongRows, shape.group_inputs());
    let patches = Patches { image: x, axes, channels: inputs, group_channels, layout };
    let pixels = Strided { matrix: Matrix::row_major(x, inputs).transposed(), batch_stride: 0 };
    let left: &dyn Left = match algorithm {
        Algorithm::Depthwise => return depthwise::grad_weight(context, shape, axes, x, dy, dw),
        Algorithm::Winograd => return winograd::grad_weight(context, shape, x, dy, dw),
        // A single channel has no rows side by side, and its patches are packed the same way.
        Algorithm::Pointwise if inputs > 1 => &pixels,
        Algorithm::Pointwise | Algorithm::Implicit => &patches,
    };
    let columns = shape.group_outputs();
    let product = Product {
        batch: shape.conv.groups,
        rows: shape.taps() * group_channels,
        columns,
        depth: shape.y[0] * shape.y[1] * shape.y[2],
        left,
        right: &Strided { matrix: Matrix::row_major(dy, outputs), batch_stride: columns },
        place: Place::Strided(columns, outputs),
        scale: 1.0,
        accumulate: false,
        epilogue: Epilogue::default(),
        bias_stride: 0,
    };
    // SAFETY: rows lie `outputs` apart and hold each group's columns side by side.
    unsafe { multiply(context, &product, dw) };
}
