//! Depthwise convolution: every channel by itself, vectors across channels.
//!
//! Forward and the gradient of the input are one [`sweep`]. Outputs are computed four pixels at a time, so that a weight is
//! loaded once for four multiply-adds; for these pixels the loop runs along the channels, which lie side by side in memory,
//! and not along the row, where pixels of many channels would fall into the same few cache sets.
#![allow(unsafe_code)]

mod grad_weight;

pub(super) use grad_weight::grad_weight;

use std::ops::Range;

use super::super::context::Context;
use super::super::gemm::Epilogue;
use super::super::moments::{self, BlockSums};
use super::super::pool::SendPointer;
use super::super::rows::Lanes;
use super::super::simd::{Simd, Vectorised, is_f32};
use super::axis::Axis;
use crate::dtype::Float;

/// Pixels computed together.
const PIXELS: usize = 4;

/// A depthwise convolution seen from the side that is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sweep<'a, E> {
    pub axes: [Axis; 2],
    pub source: &'a [E],
    pub weight: &'a [f32],
    /// Taps in a row of the kernel.
    pub kernel_width: usize,
    pub channels: usize,
    pub epilogue: Epilogue<'a>,
}

/// Least pixels of a block whose moments are taken together.
const BLOCK_PIXELS: usize = 128;

/// Runs `sweep` into the image `target` of `shape`. The answer says whether moments were taken.
pub(super) fn sweep<E: Float>(
    context: &mut Context<'_>,
    sweep: &Sweep<'_, E>,
    shape: [usize; 4],
    target: &mut [E],
) -> bool {
    let [down, _] = &sweep.axes;
    let line = shape[2] * shape[3];
    assert!(target.len() == shape.iter().product::<usize>() && shape[3] == sweep.channels);
    if let Some(bias) = sweep.epilogue.bias {
        assert_eq!(bias.len(), sweep.channels, "a bias has one value per channel");
    }
    let (isa, base, lines) = (context.isa, SendPointer(target.as_mut_ptr()), shape[0] * down.outputs);
    let taken = sweep.epilogue.moments && !target.is_empty();
    let together = if taken { BLOCK_PIXELS.div_ceil(shape[2]) } else { 1 };
    let block = |task: usize| task * together..((task + 1) * together).min(lines);
    let tasks = lines.div_ceil(together);
    let blocks = taken
        .then(|| context.scratch.moments.begin(sweep.channels, (0..tasks).map(|task| block(task).len() * shape[2])));
    context.pool.run(tasks, |task, _| {
        let moments = blocks.map(|blocks| blocks.at(task, 0));
        for index in block(task) {
            let (image, row) = (index / down.outputs, index % down.outputs);
            let offset = (image * shape[1] + down.first + down.step * row) * line;
            // SAFETY: an image row inside `target`, and each task has others.
            let target = unsafe { std::slice::from_raw_parts_mut(base.get().add(offset), line) };
            isa.run(Row { sweep, image, row, target, moments, begins: index == block(task).start });
        }
    });
    taken
}

/// One row of outputs.
struct Row<'a, E> {
    sweep: &'a Sweep<'a, E>,
    image: usize,
    row: usize,
    target: &'a mut [E],
    moments: Option<BlockSums>,
    /// Whether what comes next is the first of its block.
    begins: bool,
}

impl<E: Float> Vectorised for Row<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let [down, across] = &self.sweep.axes;
        let (rows, begins) = (down.valid_taps(self.row), self.begins);
        // Whole blocks come first: a block's moments begin with more than one value where they can.
        let whole = blocks(across).filter(|&(_, count, _)| count == PIXELS);
        let single = blocks(across).filter(|&(_, count, _)| count != PIXELS);
        for (index, (column, count, taps)) in whole.chain(single).enumerate() {
            self.begins = begins && index == 0;
            for channel in (0..self.sweep.channels).step_by(S::LANES) {
                // SAFETY: `valid_taps` keeps the rows inside the image, and `blocks` the taps, for every pixel of a block.
                unsafe {
                    if count == PIXELS {
                        self.pixels::<S, PIXELS>(channel, column, rows.clone(), taps.clone());
                    } else {
                        self.pixels::<S, 1>(channel, column, rows.clone(), taps.clone());
                    }
                }
            }
        }
    }
}

/// Cuts a row of outputs into blocks (first, count, taps that lie inside the image for all of them): [`PIXELS`] outputs where
/// every tap does, single ones at the edges and for what is left.
#[inline(always)]
fn blocks(across: &Axis) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
    let inside = match across.taps {
        0 => 0..across.outputs,
        taps => across.valid_outputs(0).start..across.valid_outputs(taps - 1).end,
    };
    let mut column = 0;
    std::iter::from_fn(move || {
        let first = column;
        if first >= across.outputs {
            return None;
        }
        if inside.contains(&first) && first + PIXELS <= inside.end {
            column += PIXELS;
            Some((first, PIXELS, 0..across.taps))
        } else {
            column += 1;
            Some((first, 1, across.valid_taps(first)))
        }
    })
}

/// A vector of channels from `offset` on, when `count` channels are left.
///
/// # Safety
/// The machine has `S`, and `slice` has the floats.
#[inline(always)]
unsafe fn load<S: Simd, E: Float>(slice: &[E], offset: usize, count: usize) -> S::Vector {
    debug_assert!(offset + count.min(S::LANES) <= slice.len());
    // SAFETY: lanes beyond `count` are not read.
    unsafe {
        let source = slice.as_ptr().add(offset);
        if count >= S::LANES { S::read(source) } else { S::read_first(source, count) }
    }
}

impl<E: Float> Row<'_, E> {
    /// `P` outputs from `column` on, one vector of channels.
    ///
    /// # Safety
    /// The machine has `S`; every tap of `rows` × `columns` lies inside the image for each of the outputs.
    #[inline(always)]
    unsafe fn pixels<S: Simd, const P: usize>(
        &mut self,
        channel: usize,
        column: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) {
        let Sweep { axes: [down, across], source, weight, kernel_width, channels, epilogue } = self.sweep;
        let (count, step) = (channels - channel, across.stride * channels);
        // SAFETY: lanes beyond the last channel are not touched; the rest lies inside the slices by the promise above.
        unsafe {
            let mut sums = [S::splat(0.0); P];
            for tap_row in rows {
                let line = self.image * down.size + (down.start(self.row) + (down.delta * tap_row) as isize) as usize;
                let taps = down.tap(tap_row) * kernel_width;
                for tap in columns.clone() {
                    let pixel = (across.start(column) + (across.delta * tap) as isize) as usize;
                    let weight = load::<S, _>(weight, (taps + across.tap(tap)) * channels + channel, count);
                    let first = (line * across.size + pixel) * channels + channel;
                    for (p, sum) in sums.iter_mut().enumerate() {
                        *sum = S::mul_add(load::<S, _>(source, first + p * step, count), weight, *sum);
                    }
                }
            }
            let lanes = if count >= S::LANES { Lanes::All } else { Lanes::First(count) };
            let mut group = [S::splat(0.0); P];
            for (p, &sum) in sums.iter().enumerate() {
                let offset = (across.first + across.step * (column + p)) * channels + channel;
                let mut sum = sum;
                if let Some(bias) = epilogue.bias {
                    sum = S::add(sum, load::<S, _>(bias, channel, count));
                }
                let sum = if epilogue.relu { S::relu(sum) } else { sum };
                if self.moments.is_some() {
                    group[p] = if is_f32::<E>() { sum } else { S::round(sum) };
                }
                let target = self.target.as_mut_ptr().add(offset);
                if count >= S::LANES { S::write(target, sum) } else { S::write_first(target, sum, count) }
            }
            if let Some(block) = self.moments {
                moments::count::<S>(block, channel, lanes, self.begins, &group);
            }
        }
    }
}
