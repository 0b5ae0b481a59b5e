//! The patches of an image as a matrix: a row per output pixel, a column per (tap, channel). It exists only in panels.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::gemm::kernel::DEPTH_MAX;
use super::super::gemm::pack::{Grid, How, Layout, Left, Line, Words, copy_words, scatter};
use super::super::simd::{Simd, Vectorised};
use super::axis::Axis;
use crate::bf16::Bf16;
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

/// Where a pixel's patch begins: its first tap, which may lie outside, and how far that is from the first image's first number.
#[derive(Clone, Copy, Default)]
struct Corner {
    row: isize,
    column: isize,
    origin: isize,
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
        let lines = pixels.len();
        assert!(panel.len() >= lines.saturating_sub(1) * grid.stride + features.len().div_ceil(words.numbers()));
        for start in pixels.clone().step_by(CHUNK) {
            let corners = &mut corners[..CHUNK.min(pixels.end - start)];
            patches.corners(start, corners);
            let target = panel[(start - pixels.start) * grid.stride..].as_mut_ptr();
            for run in patches.runs(channel, features.clone()) {
                for (index, corner) in corners.iter().enumerate() {
                    // SAFETY: by the assertion there is a line for every pixel, with room for all features.
                    unsafe { patches.copy::<S>(corner, &run, words, target.add(index * grid.stride)) };
                }
            }
            if words == Words::Pairs && !features.len().is_multiple_of(2) {
                for index in 0..corners.len() {
                    // SAFETY: as above; the last word is half full.
                    unsafe { zero(words, target.add(index * grid.stride), features.len(), 1) };
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
        // A loop for each kind of words and width of a line, which are then known in it.
        // SAFETY: the caller's promise.
        unsafe {
            match (self.words, self.grid.stride == 2 * S::LANES) {
                (Words::Plain, false) => self.sweep::<S, 1>(Words::Plain),
                (Words::Plain, true) => self.sweep::<S, 2>(Words::Plain),
                (Words::Rounded, false) => self.sweep::<S, 1>(Words::Rounded),
                (Words::Rounded, true) => self.sweep::<S, 2>(Words::Rounded),
                (Words::Pairs, false) => self.sweep::<S, 1>(Words::Pairs),
                (Words::Pairs, true) => self.sweep::<S, 2>(Words::Pairs),
            }
        }
    }
}

impl<E: Float> Zip<'_, E> {
    /// # Safety
    /// The machine has the instructions of `S`; the panels have room for all lines, of `V` vectors.
    #[inline(always)]
    unsafe fn sweep<S: Simd, const V: usize>(self, words: Words) {
        let Self { patches, channel, pixels, features, panel, grid, .. } = self;
        let (mut corners, mut clipped) = ([Corner::default(); CHUNK], [Clipped::new(), Clipped::new()]);
        let mut base = panel.as_mut_ptr();
        for start in pixels.clone().step_by(CHUNK) {
            let corners = &mut corners[..CHUNK.min(pixels.end - start)];
            patches.corners(start, corners);
            for run in patches.runs(channel, features.clone()) {
                let (panel, lane) = (run.at / grid.height, run.at % grid.height);
                for (index, pair) in corners.chunks(words.numbers()).enumerate() {
                    let [first, second] = &mut clipped;
                    let low = patches.numbers(&pair[0], &run, first);
                    let high = if pair.len() == 2 { Some(patches.numbers(&pair[1], &run, second)) } else { None };
                    let readable = high.map_or(low.len(), |high| high.len().min(low.len()));
                    let line = Line { low: low.as_ptr(), high: high.map(<[E]>::as_ptr), readable };
                    let target = base.wrapping_add(index * V * S::LANES + panel * grid.size);
                    // SAFETY: there is a line for every pixel or pair, with room for all features; what is written behind a run
                    // is overwritten by the next one.
                    unsafe { scatter::<S, E, V>(words, line, run.length, (target, lane), grid) };
                }
            }
            base = base.wrapping_add(corners.len().div_ceil(words.numbers()) * V * S::LANES);
        }
    }
}

/// Features that lie side by side in the image: the channels of a tap, or of a row of taps.
struct Run {
    /// The first of them in the block, and how many.
    at: usize,
    length: usize,
    /// The first tap, and how many.
    down: isize,
    across: isize,
    taps: usize,
    /// How far the first feature lies from the first tap's first channel, and from the patch's corner.
    skip: usize,
    offset: isize,
}

impl<E: Float> Patches<'_, E> {
    fn corners(&self, first: usize, corners: &mut [Corner]) {
        let [down, across] = &self.axes;
        let (mut column, line) = (first % across.outputs, first / across.outputs);
        let (mut row, mut image) = (line % down.outputs, line / down.outputs);
        for corner in corners {
            let (top, left) = (down.start(row), across.start(column));
            let pixel = ((image * down.size) as isize + top) * across.size as isize + left;
            *corner = Corner { row: top, column: left, origin: pixel * self.channels as isize };
            column += 1;
            if column == across.outputs {
                (column, row) = (0, row + 1);
            }
            if row == down.outputs {
                (row, image) = (0, image + 1);
            }
        }
    }

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
            let (down, right, skip) = (tap_row * down.delta, tap_column * across.delta, begin - run * length);
            let found = Run {
                at: begin - features.start,
                length: end - begin,
                down: down as isize,
                across: right as isize,
                taps,
                skip,
                offset: ((down * across.size + right) * channels + channel + skip) as isize,
            };
            (begin, run) = (end, run + 1);
            Some(found)
        })
    }

    /// The part of a run that lies in the image for the pixel at `corner`, and where it begins there.
    #[inline(always)]
    fn part(&self, corner: &Corner, run: &Run) -> (Range<usize>, usize) {
        let [down, across] = &self.axes;
        let (row, column) = (corner.row + run.down, corner.column + run.across);
        let first = corner.origin + run.offset;
        if row < 0 || row >= down.size as isize {
            return (0..0, 0);
        }
        if column >= 0 && column as usize + run.taps <= across.size {
            return (0..run.length, first as usize);
        }
        // More than one tap means that a pixel is all its channels, so the run is contiguous from its first tap on.
        let low = column.min(0).unsigned_abs().min(run.taps) * self.group_channels;
        let high = (across.size as isize - column).clamp(0, run.taps as isize) as usize * self.group_channels;
        let end = high.saturating_sub(run.skip).min(run.length);
        let start = low.saturating_sub(run.skip).min(end);
        (start..end, if start < end { (first + start as isize) as usize } else { 0 })
    }

    /// Copies a run for the pixel at `corner` to its line, with zeros for what lies outside the image.
    ///
    /// # Safety
    /// The machine has the instructions of `S`, and the line has room for the run.
    #[inline(always)]
    unsafe fn copy<S: Simd>(&self, corner: &Corner, run: &Run, words: Words, line: *mut f32) {
        let (part, source) = self.part(corner, run);
        // SAFETY: the caller's promise.
        unsafe {
            if part.len() < run.length {
                zero(words, line, run.at, part.start);
                zero(words, line, run.at + part.end, run.length - part.end);
            }
            copy_words::<S, E>(words, &self.image[source..][..part.len()], line, run.at + part.start);
        }
    }

    /// The numbers of a run for the pixel at `corner`: those of the image and whatever follows them in it, or as many as the run has
    /// with zeros for what lies outside.
    #[inline(always)]
    fn numbers<'b>(&'b self, corner: &Corner, run: &Run, clipped: &'b mut Clipped<E>) -> &'b [E] {
        let (part, source) = self.part(corner, run);
        if part.len() == run.length {
            return &self.image[source..];
        }
        let numbers = clipped.zeros(run.length);
        numbers[part.clone()].copy_from_slice(&self.image[source..][..part.len()]);
        numbers
    }
}

/// Writes `count` zeros at number `at` of a line.
///
/// # Safety
/// The line has room.
#[inline(always)]
unsafe fn zero(words: Words, line: *mut f32, at: usize, count: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match words {
            Words::Plain | Words::Rounded => line.add(at).write_bytes(0, count),
            Words::Pairs => line.cast::<Bf16>().add(at).write_bytes(0, count),
        }
    }
}

/// Room for a run of which some lies outside the image.
struct Clipped<E>([MaybeUninit<E>; FEATURES]);

impl<E: Float> Clipped<E> {
    #[inline(always)]
    fn new() -> Self {
        Self([MaybeUninit::uninit(); FEATURES])
    }

    #[inline(always)]
    fn zeros(&mut self, count: usize) -> &mut [E] {
        let numbers = &mut self.0[..count];
        numbers.fill(MaybeUninit::new(E::default()));
        // SAFETY: they have just been written.
        unsafe { &mut *(std::ptr::from_mut(numbers) as *mut [E]) }
    }
}
