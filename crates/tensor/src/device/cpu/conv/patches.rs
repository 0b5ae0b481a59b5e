//! The patches of an image as a matrix: a row per output pixel, a column per (tap, channel). It exists only in panels.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::gemm::pack::{How, Layout, Left, copy};
use super::super::simd::{Simd, Vectorised};
use super::axis::Axis;
use crate::dtype::{DType, Float};

/// Pixels whose coordinates are worked out at a time.
const CHUNK: usize = 32;

/// The patch matrix of one sweep. With `AlongDepth` rows are pixels, with `AlongRows` it is the transpose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patches<'a, E> {
    pub image: &'a [E],
    pub axes: [Axis; 2],
    /// Channels of the image, and how many of them belong to one group.
    pub channels: usize,
    pub group_channels: usize,
    pub layout: Layout,
}

/// Where a pixel's patch begins.
#[derive(Clone, Copy, Default)]
struct Corner {
    image: usize,
    row: isize,
    column: isize,
}

impl<E: Float> Left for Patches<'_, E> {
    fn dtype(&self) -> DType {
        E::DTYPE
    }

    fn layout(&self) -> Layout {
        self.layout
    }

    fn pack(&self, how: How, group: usize, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32], stride: usize) {
        let (pixels, features) = match self.layout {
            Layout::AlongDepth => (rows, depth),
            Layout::AlongRows => (depth, rows),
        };
        how.isa.run(Gather {
            patches: self,
            how,
            channel: group * self.group_channels,
            pixels,
            features,
            panel,
            stride,
        });
    }
}

/// The copy of a block of patches: pixel after pixel, `stride` apart.
struct Gather<'a, E> {
    patches: &'a Patches<'a, E>,
    how: How,
    /// The group's first channel.
    channel: usize,
    pixels: Range<usize>,
    features: Range<usize>,
    panel: &'a mut [f32],
    stride: usize,
}

impl<E: Float> Vectorised for Gather<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let mut corners = [Corner::default(); CHUNK];
        for start in self.pixels.clone().step_by(CHUNK) {
            let count = CHUNK.min(self.pixels.end - start);
            self.patches.corners(start, &mut corners[..count]);
            // SAFETY: the caller's promise.
            unsafe { self.gather::<S>(&corners[..count], (start - self.pixels.start) * self.stride) };
        }
    }
}

impl<E: Float> Patches<'_, E> {
    fn corners(&self, first: usize, corners: &mut [Corner]) {
        let [rows, columns] = [self.axes[0].outputs, self.axes[1].outputs];
        let (mut column, line) = (first % columns, first / columns);
        let (mut row, mut image) = (line % rows, line / rows);
        for corner in corners {
            *corner = Corner { image, row: self.axes[0].start(row), column: self.axes[1].start(column) };
            column += 1;
            if column == columns {
                (column, row) = (0, row + 1);
            }
            if row == rows {
                (row, image) = (0, image + 1);
            }
        }
    }
}

impl<E: Float> Gather<'_, E> {
    /// Copies the features of the pixels at `corners` to the panel from `offset` on.
    ///
    /// # Safety
    /// The machine has the instructions of `S`.
    #[inline(always)]
    unsafe fn gather<S: Simd>(&mut self, corners: &[Corner], offset: usize) {
        let Patches { image, axes: [down, across], channels, group_channels, .. } = *self.patches;
        // Taps side by side in the image are one run, if all channels are taken.
        let merged = across.delta == 1 && group_channels == channels;
        let (taps, runs_per_row) = if merged { (across.taps, 1) } else { (1, across.taps) };
        let length = taps * group_channels;
        let mut begin = self.features.start;
        while begin < self.features.end {
            let run = begin / length;
            let end = self.features.end.min((run + 1) * length);
            let part = begin - run * length..end - run * length;
            let (tap_row, tap_column) = (run / runs_per_row, run % runs_per_row);
            for (index, corner) in corners.iter().enumerate() {
                let target = offset + index * self.stride + begin - self.features.start;
                let target = &mut self.panel[target..][..part.len()];
                let row = corner.row + (tap_row * down.delta) as isize;
                let column = corner.column + (tap_column * across.delta) as isize;
                if row < 0 || row >= down.size as isize {
                    target.fill(0.0);
                    continue;
                }
                let line = (corner.image * down.size + row as usize) * across.size;
                if column >= 0 && column as usize + taps <= across.size {
                    let source = (line + column as usize) * channels + self.channel + part.start;
                    // SAFETY: the caller's promise.
                    unsafe { copy::<S, E>(self.how.words, &image[source..], target) };
                } else {
                    let run = Clipped { line, column, taps, channel: self.channel, part: part.clone() };
                    self.patches.copy_clipped(self.how, run, target);
                }
            }
            begin = end;
        }
    }
}

/// Part of a run of taps of which some lie outside the image row that begins at pixel `line`.
struct Clipped {
    line: usize,
    column: isize,
    taps: usize,
    channel: usize,
    part: Range<usize>,
}

impl<E: Float> Patches<'_, E> {
    /// Copies what lies in the image and writes zeros for the rest.
    fn copy_clipped(&self, how: How, Clipped { line, column, taps, channel, part }: Clipped, target: &mut [f32]) {
        let low = column.min(0).unsigned_abs().min(taps) * self.group_channels;
        let high = (self.axes[1].size as isize - column).clamp(0, taps as isize) as usize * self.group_channels;
        let (low, high) = (low.clamp(part.start, part.end), high.clamp(part.start, part.end));
        if low >= high {
            target.fill(0.0);
            return;
        }
        // More than one tap means that a pixel is all its channels, so the run is contiguous from its first tap on.
        let start = ((line as isize + column) * self.channels as isize + (channel + low) as isize) as usize;
        target[..low - part.start].fill(0.0);
        how.words.copy(&self.image[start..], &mut target[low - part.start..high - part.start]);
        target[high - part.start..].fill(0.0);
    }
}
