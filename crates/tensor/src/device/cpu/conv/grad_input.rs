//! dx = dy ∗ w backwards, one product per stride phase.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::context::Context;
use super::super::gemm::pack::{How, Layout, Left, Right, Strided, pack_transposed, word};
use super::super::gemm::product::{Place, Product, multiply};
use super::super::gemm::{Epilogue, Matrix};
use super::axis::Axis;
use super::depthwise::{Sweep, sweep};
use super::patches::Patches;
use super::{Algorithm, ConvShape, winograd};
use crate::dtype::{DType, Float};

/// The gradient of the input from that of the output.
///
/// # Panics
/// When a slice has another size than `shape` says.
pub fn conv2d_grad_input<E: Float>(
    context: &mut Context<'_>,
    shape: &ConvShape,
    algorithm: Algorithm,
    dy: &[E],
    weight: &[f32],
    dx: &mut [E],
) {
    shape.check(dx.len(), weight.len(), dy.len());
    if algorithm == Algorithm::Winograd {
        return winograd::grad_input(context, shape, dy, weight, dx);
    }
    let [rows, columns] = shape.conv.stride;
    for phase in 0..rows * columns {
        let phases = [phase / columns, phase % columns];
        let axes = [0, 1].map(|dim| Axis::backward(&shape.conv, dim, phases[dim], shape.x[1 + dim], shape.y[1 + dim]));
        if algorithm == Algorithm::Depthwise {
            let (kernel_width, channels, epilogue) = (shape.conv.kernel[1], shape.x[3], Epilogue::default());
            let backward = Sweep { axes, source: dy, weight, kernel_width, channels, epilogue };
            sweep(context, &backward, shape.x, dx);
        } else {
            one_phase(context, shape, algorithm, axes, dy, weight, dx);
        }
    }
}

fn one_phase<E: Float>(
    context: &mut Context<'_>,
    shape: &ConvShape,
    algorithm: Algorithm,
    axes: [Axis; 2],
    dy: &[E],
    weight: &[f32],
    dx: &mut [E],
) {
    let (inputs, outputs) = (shape.x[3], shape.y[3]);
    let [_, height, width, _] = shape.x;
    let columns = shape.group_inputs();
    let (layout, group_channels) = (Layout::AlongDepth, shape.group_outputs());
    let patches = Patches { image: dy, axes, channels: outputs, group_channels, layout };
    let pixels = Strided { matrix: Matrix::row_major(dy, outputs), batch_stride: 0 };
    let left: &dyn Left = if algorithm == Algorithm::Pointwise { &pixels } else { &patches };
    let [down, across] = axes;
    let place = |group: usize, row: usize| {
        let (line, column) = (row / across.outputs, row % across.outputs);
        let (image, line) = (line / down.outputs, line % down.outputs);
        let pixel = (image * height + down.first + down.step * line) * width + across.first + across.step * column;
        pixel * inputs + group * columns
    };
    let product = Product {
        batch: shape.conv.groups,
        rows: shape.x[0] * down.outputs * across.outputs,
        columns,
        depth: down.taps * across.taps * group_channels,
        left,
        right: &TransposedTaps { weight, axes, shape: *shape },
        place: if (down.step, across.step) == (1, 1) {
            Place::Strided(columns, inputs)
        } else {
            Place::Scattered(&place)
        },
        scale: 1.0,
        accumulate: false,
        epilogue: Epilogue::default(),
        bias_stride: 0,
    };
    // SAFETY: each row is another pixel, and a pixel holds each group's columns side by side.
    unsafe { multiply(context, &product, dx) };
}

/// The weights of a phase's taps as a matrix (tap, output channel) × input channel.
struct TransposedTaps<'a> {
    weight: &'a [f32],
    axes: [Axis; 2],
    shape: ConvShape,
}

impl Right for TransposedTaps<'_> {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn pack(
        &self,
        how: How,
        group: usize,
        depth: Range<usize>,
        columns: Range<usize>,
        panel: &mut [f32],
        width: usize,
    ) {
        let (inputs, outputs) = (self.shape.group_inputs(), self.shape.group_outputs());
        let (stride, numbers) = (self.shape.y[3], how.words.numbers());
        let [down, across] = &self.axes;
        let weight = |tap: usize| {
            let tap = down.tap(tap / across.taps) * self.shape.conv.kernel[1] + across.tap(tap % across.taps);
            &self.weight[(tap * inputs + columns.start) * stride + group * outputs..]
        };
        if !outputs.is_multiple_of(numbers) {
            // Words that straddle two taps.
            for (index, line) in panel.chunks_exact_mut(width).take(depth.len().div_ceil(numbers)).enumerate() {
                line.fill(0.0);
                for (column, value) in line[..columns.len()].iter_mut().enumerate() {
                    let at = |step: usize| {
                        weight((depth.start + step) / outputs)[column * stride + (depth.start + step) % outputs]
                    };
                    *value = word(how.words, depth.len(), index, at);
                }
            }
            return;
        }
        let mut begin = depth.start;
        while begin < depth.end {
            let tap = begin / outputs;
            let end = depth.end.min((tap + 1) * outputs);
            let source = &weight(tap)[begin - tap * outputs..];
            let target = &mut panel[(begin - depth.start) / numbers * width..];
            pack_transposed(how, source, stride, end - begin, columns.len(), target, width);
            begin = end;
        }
    }
}
