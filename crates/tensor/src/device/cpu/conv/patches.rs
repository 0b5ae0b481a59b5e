//! The patches of an image as a matrix: a row per output pixel, a column per (tap, channel). It exists only in panels.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::gemm::kernel::DEPTH_MAX;
use super::super::gemm::pack::{Ahead, Gap, Grid, How, Layout, Left, Line, Words, copy_words, scatter};
use super::super::simd::{Simd, Vectorised, is_f32};
use super::axis::Axis;
use crate::bf16::Bf16;
use crate::dtype::{DType, Float};

/// Pixels whose coordinates are worked out at a time: whole pairs.
const CHUNK: usize = 32;

/// Most features of a block: no block of rows is larger, nor the numbers in a block of the depth.
const FEATURES: usize = 2 * DEPTH_MAX;

/// Runs of fewer features are put together before they are cut into panels.
const SHORT: usize = 64;

/// Pixels, whole pairs of them, whose features are put together at a time, and room for the features of one and a vector more.
const TOGETHER: usize = 8;
const LINE: usize = FEATURES + 32;

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

    fn ahead(&self, group: usize, rows: Range<usize>, depth: Range<usize>) -> Ahead {
        let (pixels, features) = if self.layout == Layout::AlongDepth { (rows, depth) } else { (depth, rows) };
        let [down, across] = &self.axes;
        if pixels.is_empty() || features.is_empty() {
            return Ahead::NOTHING;
        }
        let bytes = |pixels: usize| pixels * self.channels * size_of::<E>();
        let mut corner = [Corner::default()];
        self.corners(pixels.start, &mut corner);
        let at = |offset: isize| self.image.as_ptr().wrapping_offset(corner[0].origin + offset).cast();
        let every = across.outputs;
        if (down.taps, across.taps) == (1, 1) {
            // The pixels that the tap meets. Lines of them are a fixed distance apart, from image to image too where the stride divides
            // the height.
            let (stride, run) = (bytes(across.stride), features.len() * size_of::<E>());
            let between = bytes(down.stride * across.size).wrapping_sub(every * stride);
            let gap = (between != 0).then_some(Gap { first: every - pixels.start % every, every, bytes: between });
            let start = at((group * self.group_channels + features.start) as isize);
            return Ahead { start, lines: pixels.len(), stride, run, gap };
        }
        if self.group_channels != self.channels {
            return Ahead::NOTHING;
        }
        // Whole stretches of the image's lines: those of the taps under the pixels, or those of the pixels under the first tap.
        let taps = across.taps * self.group_channels;
        let (first, last) = (features.start / taps, (features.end - 1) / taps);
        let start = at((first * down.delta * across.size * self.channels) as isize);
        if self.layout == Layout::AlongDepth {
            let run = bytes((pixels.len() - 1) * across.stride + (across.taps - 1) * across.delta + 1);
            return Ahead { start, lines: last - first + 1, stride: bytes(down.delta * across.size), run, gap: None };
        }
        let lines = (pixels.start % every + pixels.len()).div_ceil(every);
        Ahead { start, lines, stride: bytes(down.stride * across.size), run: bytes(across.size), gap: None }
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
        let needed = features.len().div_ceil(words.numbers()) + S::LANES - 1;
        assert!(lines == 0 || grid.stride >= needed && panel.len() >= (lines - 1) * grid.stride + needed);
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
        if self.patches.run_length() < SHORT {
            // SAFETY: the caller's promise.
            return unsafe { self.sweep_short::<S, V>(words) };
        }
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

impl<E: Float> Zip<'_, E> {
    /// As [`Zip::sweep`], where a run would end in the middle of panel after panel: the features of a few pixels are put together first.
    ///
    /// # Safety
    /// As [`Zip::sweep`].
    #[inline(always)]
    unsafe fn sweep_short<S: Simd, const V: usize>(self, words: Words) {
        let Self { patches, channel, pixels, features, panel, grid, .. } = self;
        let mut corners = [Corner::default(); TOGETHER];
        let mut lines = [E::default(); TOGETHER * LINE];
        // Numbers stay as they are.
        let raw = if is_f32::<E>() { Words::Plain } else { Words::Pairs };
        let mut target = panel.as_mut_ptr();
        for start in pixels.clone().step_by(TOGETHER) {
            let corners = &mut corners[..TOGETHER.min(pixels.end - start)];
            patches.corners(start, corners);
            for run in patches.runs(channel, features.clone()) {
                for (line, corner) in lines.chunks_exact_mut(LINE).zip(&*corners) {
                    // SAFETY: a line has room for every feature, and for a vector more.
                    unsafe { patches.copy::<S>(corner, &run, raw, line.as_mut_ptr().cast()) };
                }
            }
            for pair in lines[..corners.len() * LINE].chunks(words.numbers() * LINE) {
                let low = pair.as_ptr();
                let high = if pair.len() == 2 * LINE { Some(low.wrapping_add(LINE)) } else { None };
                let line = Line { low, high, readable: LINE };
                // SAFETY: there is a line of words for every pixel or pair, with room for all features.
                unsafe { scatter::<S, E, V>(words, line, features.len(), (target, 0), grid) };
                target = target.wrapping_add(V * S::LANES);
            }
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

    /// Taps and features of a run: taps side by side in the image are one run, if all channels are taken.
    #[inline(always)]
    fn run_taps(&self) -> usize {
        let across = &self.axes[1];
        if across.delta == 1 && self.group_channels == self.channels { across.taps } else { 1 }
    }

    #[inline(always)]
    fn run_length(&self) -> usize {
        self.run_taps() * self.group_channels
    }

    /// Cuts features of the group that begins at `channel` into runs.
    #[inline(always)]
    fn runs(&self, channel: usize, features: Range<usize>) -> impl Iterator<Item = Run> {
        let Self { axes: [down, across], channels, .. } = *self;
        let (taps, length) = (self.run_taps(), self.run_length());
        let runs_per_row = across.taps.checked_div(taps).unwrap_or(1);
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
            if part.len() == run.length && self.spill::<S>(source, run, words, line) {
                return;
            }
            copy_words::<S, E>(words, &self.image[source..][..part.len()], line, run.at + part.start);
        }
    }

    /// Copies a run to its line in whole vectors, if the image has them and words are its numbers. What lands behind the run is overwritten
    /// by the next one, or lies behind the last.
    ///
    /// # Safety
    /// The machine has the instructions of `S`; the line has room for the run and 15 words more.
    #[inline(always)]
    unsafe fn spill<S: Simd>(&self, source: usize, run: &Run, words: Words, line: *mut f32) -> bool {
        let same = if is_f32::<E>() { words == Words::Plain } else { words == Words::Pairs };
        let vector = S::LANES * size_of::<f32>() / size_of::<E>();
        let vectors = run.length.div_ceil(vector);
        if !same || source + vectors * vector > self.image.len() {
            return false;
        }
        // SAFETY: the caller's promise; the image has the numbers.
        unsafe {
            let (from, to) = (self.image.as_ptr().add(source), line.cast::<E>().add(run.at));
            for at in (0..vectors * vector).step_by(vector) {
                S::store(to.add(at).cast(), S::load(from.add(at).cast()));
            }
        }
        true
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
