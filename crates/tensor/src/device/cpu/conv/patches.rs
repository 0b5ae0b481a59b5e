//! The patches of an image as a matrix: a row per output pixel, a column per (tap, channel). It exists only in panels.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::gemm::kernel::DEPTH_MAX;
use super::super::gemm::pack::{Grid, How, Layout, Left, Words, copy_words, scatter};
use super::super::simd::{Simd, Vectorised};
use super::axis::Axis;
use crate::dtype::{DType, Float};

/// Pixels whose coordinates are worked out at a time: whole pairs.
const CHUNK: usize = 32;

/// Most features of a block: no block of rows is larger, nor the numbers in a block of the depth.
const FEATURES: usize = 2 * DEPTH_MAX;

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

    fn pack(&self, how: How, group: usize, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32], grid: Grid) {
        let (words, channel) = (how.words, group * self.group_channels);
        match self.layout {
            Layout::AlongDepth => {
                how.isa.run(Gather { patches: self, words, channel, pixels: rows, features: depth, panel, grid });
            }
            Layout::AlongRows => {
                let panels = rows.len().div_ceil(grid.height);
                assert!(rows.len() <= FEATURES && panel.len() >= panels * grid.size, "a block too large");
                how.isa.run(Zip { patches: self, words, channel, pixels: depth, features: rows, panel, grid });
            }
        }
    }
}

/// The copy of a block of patches, pixel after pixel.
struct Gather<'a, E> {
    patches: &'a Patches<'a, E>,
    words: Words,
    /// The group's first channel.
    channel: usize,
    pixels: Range<usize>,
    features: Range<usize>,
    panel: &'a mut [f32],
    grid: Grid,
}

impl<E: Float> Vectorised for Gather<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { patches, words, channel, pixels, features, panel, grid } = self;
        let mut corners = [Corner::default(); CHUNK];
        let end = features.len().div_ceil(words.numbers());
        for start in pixels.clone().step_by(CHUNK) {
            let corners = &mut corners[..CHUNK.min(pixels.end - start)];
            patches.corners(start, corners);
            let lines = panel[(start - pixels.start) * grid.stride..].chunks_mut(grid.stride);
            for (corner, line) in corners.iter().zip(lines) {
                let line = &mut line[..end];
                // An odd depth ends with half a word.
                if let Some(last) = line.last_mut() {
                    *last = 0.0;
                }
                for run in patches.runs(channel, features.clone()) {
                    // SAFETY: the line has room for all features.
                    unsafe {
                        patches.with(corner, &run, |numbers| {
                            copy_words::<S, E>(words, &numbers[..run.length], line.as_mut_ptr(), run.at);
                        });
                    }
                }
            }
        }
    }
}

/// The transposed copy: a line of words for every pixel, or for two.
struct Zip<'a, E> {
    patches: &'a Patches<'a, E>,
    words: Words,
    channel: usize,
    pixels: Range<usize>,
    features: Range<usize>,
    panel: &'a mut [f32],
    grid: Grid,
}

impl<E: Float> Vectorised for Zip<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { patches, words, channel, pixels, features, panel, grid } = self;
        let mut corners = [Corner::default(); CHUNK];
        let mut target = panel.as_mut_ptr();
        for start in pixels.clone().step_by(CHUNK) {
            let corners = &mut corners[..CHUNK.min(pixels.end - start)];
            patches.corners(start, corners);
            for pair in corners.chunks(words.numbers()) {
                for run in patches.runs(channel, features.clone()) {
                    let scatter = |low: &[E], high: Option<&[E]>| {
                        let readable = high.map_or(low.len(), |high| high.len().min(low.len()));
                        let sources = (low.as_ptr(), high.map(<[E]>::as_ptr));
                        // SAFETY: the panels have room for all features and lines; a run begins where the last one ended.
                        unsafe { scatter::<S, E>(words, sources, (run.at, run.length, readable), target, grid) };
                    };
                    patches.with(&pair[0], &run, |low| match pair.get(1) {
                        None => scatter(low, None),
                        Some(corner) => patches.with(corner, &run, |high| scatter(low, Some(high))),
                    });
                }
                target = target.wrapping_add(grid.stride);
            }
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

/// Features that lie side by side in the image: the channels of a tap, or of a row of taps.
struct Run {
    /// The first of them in the block, and how many.
    at: usize,
    length: usize,
    /// The first tap.
    down: isize,
    across: isize,
    taps: usize,
    /// Where in the taps' channels it begins, and in the pixel's.
    skip: usize,
    channel: usize,
}

impl<E: Float> Patches<'_, E> {
    /// Cuts features of the group that begins at `channel` into runs.
    #[inline(always)]
    fn runs(&self, channel: usize, features: Range<usize>) -> impl Iterator<Item = Run> {
        let Self { axes: [down, across], channels, group_channels, .. } = *self;
        // Taps side by side in the image are one run, if all channels are taken.
        let merged = across.delta == 1 && group_channels == channels;
        let (taps, runs_per_row) = if merged { (across.taps, 1) } else { (1, across.taps) };
        let length = taps * group_channels;
        let (mut begin, mut run) = (features.start, features.start.checked_div(length).unwrap_or(0));
        std::iter::from_fn(move || {
            if begin >= features.end {
                return None;
            }
            let end = features.end.min((run + 1) * length);
            let (tap_row, tap_column) =
                if runs_per_row == 1 { (run, 0) } else { (run / runs_per_row, run % runs_per_row) };
            let found = Run {
                at: begin - features.start,
                length: end - begin,
                down: (tap_row * down.delta) as isize,
                across: (tap_column * across.delta) as isize,
                taps,
                skip: begin - run * length,
                channel,
            };
            (begin, run) = (end, run + 1);
            Some(found)
        })
    }

    /// Calls `use_numbers` with the numbers of a run for the pixel at `corner`: those of the image and whatever follows them in it, or as many
    /// as the run has with zeros for what lies outside.
    #[inline(always)]
    fn with(&self, corner: &Corner, run: &Run, use_numbers: impl FnOnce(&[E])) {
        let Self { axes: [down, across], channels, group_channels, .. } = *self;
        let (row, column) = (corner.row + run.down, corner.column + run.across);
        let inside = row >= 0 && row < down.size as isize;
        let line = (corner.image * down.size) as isize + row;
        let first = ((line * across.size as isize + column) * channels as isize) + (run.channel + run.skip) as isize;
        if inside && column >= 0 && column as usize + run.taps <= across.size {
            return use_numbers(&self.image[first as usize..]);
        }
        let mut numbers = [MaybeUninit::<E>::uninit(); FEATURES];
        let numbers = &mut numbers[..run.length];
        numbers.fill(MaybeUninit::new(E::default()));
        // SAFETY: they have just been written.
        let numbers = unsafe { &mut *(std::ptr::from_mut(numbers) as *mut [E]) };
        if inside {
            // More than one tap means that a pixel is all its channels, so the run is contiguous from its first tap on.
            let low = column.min(0).unsigned_abs().min(run.taps) * group_channels;
            let high = (across.size as isize - column).clamp(0, run.taps as isize) as usize * group_channels;
            let part = low.clamp(run.skip, run.skip + run.length)..high.clamp(run.skip, run.skip + run.length);
            if part.start < part.end {
                let source = (first + (part.start - run.skip) as isize) as usize;
                numbers[part.start - run.skip..part.end - run.skip]
                    .copy_from_slice(&self.image[source..][..part.len()]);
            }
        }
        use_numbers(numbers);
    }
}
