//! The gradient of a depthwise weight: for each tap and channel a sum over all pixels.
//!
//! Rows of output are shared out to tasks, each with sums of its own, which are added in order at the end.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::super::context::Context;
use super::super::super::gemm::product::add;
use super::super::super::scratch::{Buffers, Need};
use super::super::super::simd::{Simd, Vectorised};
use super::super::ConvShape;
use super::super::axis::Axis;

/// Most shares of the rows.
const SHARES: usize = 32;

/// Partial sums of one tap, so that four multiply-adds are under way at once.
const SUMS: usize = 4;

/// The gradient of the weight of a depthwise convolution, written to `dw` or added to it.
pub(in super::super) fn grad_weight(
    context: &mut Context<'_>,
    shape: &ConvShape,
    axes: [Axis; 2],
    x: &[f32],
    dy: &[f32],
    accumulate: bool,
    dw: &mut [f32],
) {
    let rows = shape.y[0] * shape.y[1];
    let per_share = rows.div_ceil(SHARES).max(1);
    let shares = rows.div_ceil(per_share);
    let need = Need { partial: shares * dw.len(), ..Need::default() };
    let Buffers { partial, .. } = context.scratch.take(context.pool.threads(), need);
    let (isa, length, channels) = (context.isa, dw.len(), shape.x[3]);
    if !accumulate {
        dw.fill(0.0);
    }
    if length == 0 {
        return;
    }
    context.pool.chunks(partial, length, |share, sums| {
        let rows = share * per_share..((share + 1) * per_share).min(rows);
        isa.run(Share { axes: &axes, kernel_width: shape.conv.kernel[1], channels, x, dy, rows, sums });
    });
    context.pool.chunks(dw, 4096, |index, target| {
        for share in 0..shares {
            add(target, &partial[share * length + index * 4096..]);
        }
    });
}

/// The sums over some rows of output.
struct Share<'a> {
    axes: &'a [Axis; 2],
    kernel_width: usize,
    channels: usize,
    x: &'a [f32],
    dy: &'a [f32],
    rows: Range<usize>,
    sums: &'a mut [f32],
}

impl Vectorised for Share<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let [down, across] = self.axes;
        for channel in (0..self.channels).step_by(S::LANES) {
            for tap in 0..down.taps * across.taps {
                let offset = (tap / across.taps * self.kernel_width + tap % across.taps) * self.channels + channel;
                // SAFETY: `sum` stays inside the images; lanes beyond the last channel are not written.
                unsafe {
                    let sum = self.sum::<S>(channel, tap / across.taps, tap % across.taps);
                    S::store_first(self.sums.as_mut_ptr().add(offset), sum, self.channels - channel);
                }
            }
        }
    }
}

impl Share<'_> {
    /// The sum of one tap over the rows, one vector of channels.
    #[inline(always)]
    unsafe fn sum<S: Simd>(&self, channel: usize, tap_row: usize, tap: usize) -> S::Vector {
        let ([down, across], channels) = (self.axes, self.channels);
        let (rows, columns) = (down.valid_outputs(tap_row), across.valid_outputs(tap));
        let (count, step) = (channels - channel, across.stride * channels);
        // SAFETY: rows and columns are those for which the tap reads inside the image; lanes beyond the last channel are
        // not read.
        unsafe {
            let load = |slice: &[f32], offset: usize| {
                debug_assert!(offset + count.min(S::LANES) <= slice.len());
                let source = slice.as_ptr().add(offset);
                if count >= S::LANES { S::load(source) } else { S::load_first(source, count) }
            };
            let mut sums = [S::splat(0.0); SUMS];
            for index in self.rows.clone().filter(|index| rows.contains(&(index % down.outputs))) {
                let (image, row) = (index / down.outputs, index % down.outputs);
                let line = image * down.size + (down.start(row) + (down.delta * tap_row) as isize) as usize;
                let pixel = (across.start(columns.start) + (across.delta * tap) as isize) as usize;
                let mut x = (line * across.size + pixel) * channels + channel;
                let mut dy = (index * across.outputs + columns.start) * channels + channel;
                let mut left = columns.len();
                while left >= SUMS {
                    for (p, sum) in sums.iter_mut().enumerate() {
                        *sum = S::mul_add(load(self.x, x + p * step), load(self.dy, dy + p * channels), *sum);
                    }
                    (x, dy, left) = (x + SUMS * step, dy + SUMS * channels, left - SUMS);
                }
                for sum in &mut sums[..left] {
                    *sum = S::mul_add(load(self.x, x), load(self.dy, dy), *sum);
                    (x, dy) = (x + step, dy + channels);
                }
            }
            S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]))
        }
    }
}
