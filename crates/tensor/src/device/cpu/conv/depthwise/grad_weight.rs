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
use super::{PIXELS, blocks, load};
use crate::dtype::Float;

/// Most shares of the rows.
const SHARES: usize = 32;

/// The gradient of the weight of a depthwise convolution.
pub(in super::super) fn grad_weight<E: Float>(
    context: &mut Context<'_>,
    shape: &ConvShape,
    axes: [Axis; 2],
    x: &[E],
    dy: &[E],
    dw: &mut [f32],
) {
    let rows = shape.y[0] * shape.y[1];
    let per_share = rows.div_ceil(SHARES).max(1);
    let shares = rows.div_ceil(per_share);
    let need = Need { partial: shares * dw.len(), ..Need::default() };
    let Buffers { partial, .. } = context.scratch.take(context.pool.threads(), need);
    let (isa, length, channels) = (context.isa, dw.len(), shape.x[3]);
    dw.fill(0.0);
    if length == 0 {
        return;
    }
    context.pool.chunks(partial, length, |share, sums| {
        let rows = share * per_share..((share + 1) * per_share).min(rows);
        isa.run(Share { axes: &axes, channels, x, dy, rows, sums });
    });
    context.pool.chunks(dw, 4096, |index, target| {
        for share in 0..shares {
            add(target, &partial[share * length + index * 4096..]);
        }
    });
}

/// The sums over some rows of output.
struct Share<'a, E> {
    axes: &'a [Axis; 2],
    channels: usize,
    x: &'a [E],
    dy: &'a [E],
    rows: Range<usize>,
    sums: &'a mut [f32],
}

impl<E: Float> Vectorised for Share<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let [down, across] = self.axes;
        self.sums.fill(0.0);
        for row in self.rows.clone() {
            let rows = down.valid_taps(row % down.outputs);
            for (column, count, taps) in blocks(across) {
                for channel in (0..self.channels).step_by(S::LANES) {
                    // SAFETY: the taps lie inside the image for every pixel of a block.
                    unsafe {
                        if count == PIXELS {
                            self.pixels::<S, PIXELS>(channel, row, column, rows.clone(), taps.clone());
                        } else {
                            self.pixels::<S, 1>(channel, row, column, rows.clone(), taps.clone());
                        }
                    }
                }
            }
        }
    }
}

impl<E: Float> Share<'_, E> {
    /// Adds `P` pixels from `column` of output row `row` on to the sums of every tap given, one vector of channels.
    ///
    /// # Safety
    /// The machine has `S`; every tap of `rows` × `columns` lies inside the image for each of the pixels.
    #[inline(always)]
    unsafe fn pixels<S: Simd, const P: usize>(
        &mut self,
        channel: usize,
        row: usize,
        column: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) {
        let ([down, across], channels) = (self.axes, self.channels);
        let (image, row_in_image) = (row / down.outputs, row % down.outputs);
        let (count, step) = (channels - channel, across.stride * channels);
        // SAFETY: lanes beyond the last channel are not touched; the rest lies inside the slices by the promise above.
        unsafe {
            let mut gradients = [S::splat(0.0); P];
            for (p, gradient) in gradients.iter_mut().enumerate() {
                *gradient = load::<S, _>(self.dy, (row * across.outputs + column + p) * channels + channel, count);
            }
            for tap_row in rows {
                let line = (down.start(row_in_image) + (down.delta * tap_row) as isize) as usize + image * down.size;
                for tap in columns.clone() {
                    let pixel = (across.start(column) + (across.delta * tap) as isize) as usize;
                    let first = (line * across.size + pixel) * channels + channel;
                    let offset = (tap_row * across.taps + tap) * channels + channel;
                    let mut sum = load::<S, _>(self.sums, offset, count);
                    for (p, &gradient) in gradients.iter().enumerate() {
                        sum = S::mul_add(load::<S, _>(self.x, first + p * step, count), gradient, sum);
                    }
                    let target = self.sums.as_mut_ptr().add(offset);
                    if count >= S::LANES { S::store(target, sum) } else { S::store_first(target, sum, count) }
                }
            }
        }
    }
}
