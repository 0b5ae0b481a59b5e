//! y = x ∗ w + bias.
#![allow(unsafe_code)]

use super::super::batch_norm;
use super::super::context::Context;
use super::super::gemm::pack::{Layout, Left, Strided};
use super::super::gemm::product::{Place, Product, multiply};
use super::super::gemm::{Epilogue, Matrix};
use super::axis::Axis;
use super::depthwise::{Sweep, sweep};
use super::patches::Patches;
use super::{Algorithm, ConvShape, winograd};
use crate::dtype::Float;

/// What a convolution whose statistics are wanted writes.
#[derive(Debug)]
pub struct WithMoments<'a, E> {
    /// The result.
    pub y: &'a mut [E],
    /// Its mean per channel.
    pub mean: &'a mut [f32],
    /// Its variance per channel, over n.
    pub variance: &'a mut [f32],
}

/// As [`conv2d_forward`], and takes the mean and the variance of every channel of y.
///
/// # Panics
/// When a slice has another size than `shape` says.
pub fn conv2d_forward_with_moments<E: Float>(
    context: &mut Context<'_>,
    shape: &ConvShape,
    algorithm: Algorithm,
    x: &[E],
    weight: &[f32],
    epilogue: Epilogue<'_>,
    output: WithMoments<'_, E>,
) {
    let WithMoments { y, mean, variance } = output;
    if conv2d_forward(context, shape, algorithm, x, weight, epilogue.with_moments(), y) {
        context.scratch.moments.finish((context.pool, context.isa), mean, variance);
    } else {
        batch_norm::statistics(context, y, mean, variance);
    }
}

/// Convolves `x` with `weight` into `y`, adds the bias and applies the ReLU if asked. The answer says whether moments were taken.
///
/// # Panics
/// When a slice has another size than `shape` says.
pub fn conv2d_forward<E: Float>(
    context: &mut Context<'_>,
    shape: &ConvShape,
    algorithm: Algorithm,
    x: &[E],
    weight: &[f32],
    epilogue: Epilogue<'_>,
    y: &mut [E],
) -> bool {
    shape.check(x.len(), weight.len(), y.len());
    let axes = [0, 1].map(|dim| Axis::forward(&shape.conv, dim, shape.x[1 + dim], shape.y[1 + dim]));
    let (inputs, outputs) = (shape.x[3], shape.y[3]);
    let patches =
        Patches { image: x, axes, channels: inputs, group_channels: shape.group_inputs(), layout: Layout::AlongDepth };
    let pixels = Strided { matrix: Matrix::row_major(x, inputs), batch_stride: 0 };
    let left: &dyn Left = match algorithm {
        Algorithm::Depthwise => {
            let (kernel_width, channels) = (shape.conv.kernel[1], inputs);
            let forward = Sweep { axes, source: x, weight, kernel_width, channels, epilogue };
            return sweep(context, &forward, shape.y, y);
        }
        Algorithm::Winograd => return winograd::forward(context, shape, x, weight, epilogue, y),
        Algorithm::Pointwise => &pixels,
        Algorithm::Implicit => &patches,
    };
    let columns = shape.group_outputs();
    let product = Product {
        batch: shape.conv.groups,
        rows: shape.y[0] * shape.y[1] * shape.y[2],
        columns,
        depth: shape.taps() * shape.group_inputs(),
        left,
        right: &Strided { matrix: Matrix::row_major(weight, outputs), batch_stride: columns },
        place: Place::Strided(columns, outputs),
        scale: 1.0,
        accumulate: false,
        epilogue,
        bias_stride: columns,
    };
    // SAFETY: pixels lie `outputs` apart and hold each group's columns side by side.
    unsafe { multiply(context, &product, y) }
}
