//! The copies behind packing: runs of numbers that become words, side by side, in pairs or transposed.
#![allow(unsafe_code)]
// Closures of `Option::map` are not always inlined into functions compiled for one instruction set.
#![allow(clippy::manual_map)]

use super::super::simd::{Simd, Vectorised, is_f32};
use super::kernel::Words;
use super::pack::How;
use crate::bf16::Bf16;
use crate::dtype::Float;

/// Where lines of numbers go: they are cut into panels of `height` numbers, `size` words apart; in each a line of the next depth
/// step follows after `stride` words, which are whole vectors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub height: usize,
    pub stride: usize,
    pub size: usize,
}

impl Grid {
    /// One panel of `width` columns.
    pub const fn panel(width: usize) -> Self {
        Self { height: width, stride: width, size: 0 }
    }

    /// Lines of any length, `stride` words apart.
    pub const fn lines(stride: usize) -> Self {
        Self { height: usize::MAX, stride, size: 0 }
    }
}

/// The word `index` of `count` numbers along the depth.
pub(crate) fn word<E: Float>(words: Words, count: usize, index: usize, at: impl Fn(usize) -> E) -> f32 {
    let rounded = |step: usize| if step < count { Bf16::from_f32(at(step).to_f32()) } else { Bf16::default() };
    match words {
        Words::Plain => at(index).to_f32(),
        Words::Rounded => rounded(index).to_f32(),
        Words::Pairs => {
            let half = |step: usize| u32::from(rounded(step).to_bits());
            f32::from_bits(half(2 * index) | half(2 * index + 1) << 16)
        }
    }
}

/// The numbers of a vector as words of `f32`.
#[inline(always)]
unsafe fn rounded<S: Simd, E: Float>(words: Words, vector: S::Vector) -> S::Vector {
    // SAFETY: the caller has the instructions of `S`.
    if is_f32::<E>() && words == Words::Rounded { unsafe { S::round(vector) } } else { vector }
}

/// Copies numbers that follow each other in the depth to the start of `target`.
pub(crate) fn copy<E: Float>(how: How, source: &[E], target: &mut [f32]) {
    how.isa.run(Copy { words: how.words, source, target });
}

struct Copy<'a, E> {
    words: Words,
    source: &'a [E],
    target: &'a mut [f32],
}

impl<E: Float> Vectorised for Copy<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { words, source, target } = self;
        assert!(source.len() <= target.len() * words.numbers());
        // SAFETY: the caller's promise; the target has room.
        unsafe {
            copy_words::<S, E>(words, source, target.as_mut_ptr(), 0);
            if words == Words::Pairs && !source.len().is_multiple_of(2) {
                target.as_mut_ptr().cast::<Bf16>().add(source.len()).write(Bf16::default());
            }
        }
    }
}

/// Copies numbers along the depth to number `at` of the line at `target`. Runs are often short (a tap of a few channels), so this
/// is not a call of `memcpy`.
///
/// # Safety
/// The machine has the instructions of `S`; the line has room.
#[inline(always)]
pub(crate) unsafe fn copy_words<S: Simd, E: Float>(words: Words, source: &[E], target: *mut f32, at: usize) {
    let (from, count, mut done) = (source.as_ptr(), source.len(), 0);
    // SAFETY: no more than `count` numbers are read or written.
    unsafe {
        if words == Words::Pairs {
            let target = target.cast::<Bf16>().add(at);
            // A vector of words is two of numbers, and bf16 are copied as they are.
            while !is_f32::<E>() && done + 2 * S::LANES <= count {
                S::store(target.add(done).cast(), S::load(from.add(done).cast()));
                done += 2 * S::LANES;
            }
            while done + S::LANES <= count {
                S::store_bf16(target.add(done), S::read(from.add(done)));
                done += S::LANES;
            }
            if done < count {
                S::store_first_bf16(target.add(done), S::read_first(from.add(done), count - done), count - done);
            }
        } else {
            let target = target.add(at);
            while done + S::LANES <= count {
                S::store(target.add(done), rounded::<S, E>(words, S::read(from.add(done))));
                done += S::LANES;
            }
            if done < count {
                let rest = rounded::<S, E>(words, S::read_first(from.add(done), count - done));
                S::store_first(target.add(done), rest, count - done);
            }
        }
    }
}

/// A vector of words from numbers side by side at `low` and, in pairs, from those of the next depth step.
///
/// # Safety
/// The machine has the instructions of `S`; both may be read for `count` numbers.
#[inline(always)]
unsafe fn across<S: Simd, E: Float>(words: Words, low: *const E, high: Option<*const E>, count: usize) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe {
        match (words, high) {
            (Words::Pairs, Some(high)) if count >= S::LANES => S::read_pair(low, high),
            (Words::Pairs, Some(high)) => S::pair(S::read_first(low, count), S::read_first(high, count)),
            (Words::Pairs, None) => S::pair(S::read_first(low, count), S::splat(0.0)),
            _ if count >= S::LANES => rounded::<S, E>(words, S::read(low)),
            _ => rounded::<S, E>(words, S::read_first(low, count)),
        }
    }
}

/// The sources of a line of words: numbers side by side and, in pairs, those of the next depth step. Both may be read for `readable`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line<E> {
    pub low: *const E,
    pub high: Option<*const E>,
    pub readable: usize,
}

/// Copies `count` numbers of a line to panels of `grid` whose lines are `V` vectors, from lane `lane` of the one at `target` on.
///
/// # Safety
/// The machine has the instructions of `S`; the panels have room. A panel that is filled from its first number on may be
/// overwritten with anything behind the last, to the end of the line.
#[inline(always)]
pub(crate) unsafe fn scatter<S: Simd, E: Float, const V: usize>(
    words: Words,
    line: Line<E>,
    count: usize,
    (mut target, lane): (*mut f32, usize),
    grid: Grid,
) {
    let Line { low, high, readable } = line;
    let (mut done, width) = (0, V * S::LANES);
    // SAFETY: the caller's promise.
    unsafe {
        if lane > 0 {
            done = (grid.height - lane).min(count);
            for offset in (0..done).step_by(S::LANES) {
                let high = if let Some(high) = high { Some(high.add(offset)) } else { None };
                let vector = across::<S, E>(words, low.add(offset), high, done - offset);
                S::store_first(target.add(lane + offset), vector, (done - offset).min(S::LANES));
            }
            target = target.wrapping_add(grid.size);
        }
        // Panels whose lines can be read to the end of their last vector.
        let whole = (count - done).div_ceil(grid.height);
        let whole = if readable < done + width { 0 } else { whole.min((readable - done - width) / grid.height + 1) };
        if let (Words::Pairs, Some(high)) = (words, high) {
            for _ in 0..whole {
                for v in 0..V {
                    let at = done + v * S::LANES;
                    S::store(target.add(v * S::LANES), S::read_pair(low.add(at), high.add(at)));
                }
                (done, target) = (done + grid.height, target.wrapping_add(grid.size));
            }
        } else if words != Words::Pairs {
            for _ in 0..whole {
                for v in 0..V {
                    let vector = S::read(low.add(done + v * S::LANES));
                    S::store(target.add(v * S::LANES), rounded::<S, E>(words, vector));
                }
                (done, target) = (done + grid.height, target.wrapping_add(grid.size));
            }
        }
        while done < count {
            let high = if let Some(high) = high { Some(high.add(done)) } else { None };
            fill::<S, E>(words, Line { low: low.add(done), high, readable: readable - done }, target, width);
            (done, target) = (done + grid.height, target.wrapping_add(grid.size));
        }
    }
}

/// Fills `width` words, whole vectors of them: with zeros behind what can be read.
///
/// # Safety
/// The machine has the instructions of `S`, and the target room.
#[inline(always)]
unsafe fn fill<S: Simd, E: Float>(words: Words, line: Line<E>, target: *mut f32, width: usize) {
    for offset in (0..width).step_by(S::LANES) {
        // SAFETY: the caller's promise; nothing is read behind the line.
        unsafe {
            if offset < line.readable {
                let high = line.high.map(|high| high.add(offset));
                let vector = across::<S, E>(words, line.low.add(offset), high, line.readable - offset);
                S::store(target.add(offset), vector);
            } else {
                S::store(target.add(offset), S::splat(0.0));
            }
        }
    }
}

/// Packs numbers that lie side by side across the depth: `depth` lines of `count`, `stride` apart in `source`, with zeros to the end
/// of the last panel's lines.
pub(super) fn pack_lines<E: Float>(
    how: How,
    source: &[E],
    stride: usize,
    depth: usize,
    count: usize,
    panel: &mut [f32],
    grid: Grid,
) {
    if depth == 0 || count == 0 {
        return;
    }
    let (steps, lanes) = (depth.div_ceil(how.words.numbers()), how.isa.lanes());
    assert!(grid.stride == lanes || grid.stride == 2 * lanes, "a line is one vector or two");
    let end = (count - 1) / grid.height * grid.size + steps * grid.stride;
    assert!(source.len() >= (depth - 1) * stride + count && panel.len() >= end, "a block lies outside its operand");
    how.isa.run(Lines { words: how.words, source, stride, depth, count, panel, grid });
}

struct Lines<'a, E> {
    words: Words,
    source: &'a [E],
    stride: usize,
    depth: usize,
    count: usize,
    panel: &'a mut [f32],
    grid: Grid,
}

impl<E: Float> Vectorised for Lines<'_, E> {
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

impl<E: Float> Lines<'_, E> {
    /// # Safety
    /// The machine has the instructions of `S`, and what [`pack_lines`] asserts; a line is `V` vectors.
    #[inline(always)]
    unsafe fn sweep<S: Simd, const V: usize>(self, words: Words) {
        let Self { source, stride, depth, count, panel, grid, .. } = self;
        for (index, step) in (0..depth).step_by(words.numbers()).enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let low = source.as_ptr().add(step * stride);
                let high = if words == Words::Pairs && step + 1 < depth { Some(low.add(stride)) } else { None };
                let target = panel.as_mut_ptr().add(index * V * S::LANES);
                scatter::<S, E, V>(words, Line { low, high, readable: count }, count, (target, 0), grid);
            }
        }
    }
}

/// Packs a right operand whose depth is contiguous: `columns` runs of `depth` numbers, `stride` apart in `source`.
pub(crate) fn pack_transposed<E: Float>(
    how: How,
    source: &[E],
    stride: usize,
    depth: usize,
    columns: usize,
    panel: &mut [f32],
    width: usize,
) {
    if depth == 0 || columns == 0 {
        return;
    }
    let steps = depth.div_ceil(how.words.numbers());
    assert!(source.len() > (columns - 1) * stride + depth - 1 && panel.len() >= steps * width && columns <= width);
    how.isa.run(Transpose { words: how.words, source, stride, depth, columns, panel, width });
}

struct Transpose<'a, E> {
    words: Words,
    source: &'a [E],
    stride: usize,
    depth: usize,
    columns: usize,
    panel: &'a mut [f32],
    width: usize,
}

impl<E: Float> Vectorised for Transpose<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { words, source, stride, depth, columns, panel, width } = self;
        let (steps, whole) = (depth.div_ceil(words.numbers()), depth / words.numbers() / S::LANES * S::LANES);
        let whole_columns = columns / S::LANES * S::LANES;
        for column in (0..whole_columns).step_by(S::LANES) {
            for step in (0..whole).step_by(S::LANES) {
                // SAFETY: both blocks lie inside their slices, by the assertion of `pack_transposed`.
                unsafe {
                    let from = source.as_ptr().add(column * stride + step * words.numbers());
                    transpose::<S, E>(words, from, stride, panel.as_mut_ptr().add(step * width + column), width);
                }
            }
        }
        let element = |step: usize, column: usize| word(words, depth, step, |step| source[column * stride + step]);
        for step in whole..steps {
            for column in 0..whole_columns {
                panel[step * width + column] = element(step, column);
            }
        }
        if whole_columns < width {
            for step in 0..steps {
                for column in whole_columns..columns {
                    panel[step * width + column] = element(step, column);
                }
                panel[step * width + columns..(step + 1) * width].fill(0.0);
            }
        }
    }
}

/// Transposes a block of `LANES` columns and as many words of the depth.
///
/// # Safety
/// The machine has the instructions of `S`, and the blocks lie inside their operands.
#[inline(always)]
unsafe fn transpose<S: Simd, E: Float>(
    words: Words,
    source: *const E,
    stride: usize,
    target: *mut f32,
    target_stride: usize,
) {
    let same = if is_f32::<E>() { words == Words::Plain } else { words == Words::Pairs };
    // SAFETY: the caller's promise; sixteen is the largest number of lanes.
    unsafe {
        if same {
            return S::transpose(source.cast(), stride * size_of::<E>(), target, target_stride);
        }
        let mut block = [0.0f32; 256];
        for row in 0..S::LANES {
            let (from, to) = (source.add(row * stride), block.as_mut_ptr().add(row * S::LANES));
            if words == Words::Pairs {
                S::store_bf16_twice(to.cast(), [S::read(from), S::read(from.add(S::LANES))], false);
            } else {
                S::store(to, rounded::<S, E>(words, S::read(from)));
            }
        }
        S::transpose(block.as_ptr().cast(), S::LANES * size_of::<f32>(), target, target_stride);
    }
}
