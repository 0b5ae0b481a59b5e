//! Sums in a fixed order: over the leading dims (per column) and over a row.
//!
//! A column sum cuts `[rows, columns]` into at most `TASKS_MAX` tasks, by the shape alone. Within a task, up to
//! `RUN` rows are added in f32, one accumulator per column, and then flushed into f64 partial sums, which are added in
//! the order of the tasks. Narrow matrices are seen as wider ones (several rows side by side), so that vectors are full
//! whatever the number of channels. One read of every input; the bound is memory bandwidth.
#![allow(unsafe_code)]

use super::context::Context;
use super::pool::Pool;
use super::rows::{Body, Lanes, Rows, take, walk};
use super::simd::Simd;
use crate::dtype::Float;

/// Columns accumulated together: 2 KiB per accumulator, so that all of them stay in the first-level cache.
pub(super) const STRIP: usize = 512;
/// Rows added in f32 before a flush to f64.
const RUN: usize = 128;
/// More tasks would balance no better and cost more partial sums.
const TASKS_MAX: usize = 64;
/// Elements below which a task is not worth handing out.
const TASK_ELEMENTS_MIN: usize = 1 << 15;

/// How many values per-column ones become when they are repeated, for kernels that walk several narrow rows at once.
pub(super) fn wide_length(columns: usize) -> usize {
    columns * (STRIP / columns).max(1)
}

/// Repeats per-column values until they fill `wide`, which has their [`wide_length`].
pub(super) fn widen<E: Float>(columns: &[E], wide: &mut [f32]) {
    for wide in wide.chunks_exact_mut(columns.len()) {
        wide.iter_mut().zip(columns).for_each(|(wide, column)| *wide = column.to_f32());
    }
}

/// Some rows of one strip of columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip {
    /// The elements.
    pub rows: Rows,
    /// The first column, where the strip's per-column values begin.
    pub column: usize,
}

/// The accumulators of a strip: `K` sums per column.
pub(super) type Sums<const K: usize> = [[f32; STRIP]; K];

/// Adds up `K` quantities per column of a matrix with `columns` columns. `add` adds a strip's rows to the accumulators
/// (see [`add_to`]). Returns the `K·columns` sums, kept at the front of `scratch`. Starts with the last rows, which are
/// the likeliest to be in a cache still; a pass that follows finds the first ones there.
pub(super) fn sum_columns<'a, const K: usize>(
    pool: &Pool,
    (rows, columns): (usize, usize),
    scratch: &'a mut Vec<f64>,
    add: impl Fn(Strip, &mut Sums<K>) + Sync,
) -> &'a [f64] {
    let times = (STRIP / columns).max(1);
    let (wide_rows, wide_columns, rest) = (rows / times, columns * times, rows % times);
    let (strips, folded) = (wide_columns.div_ceil(STRIP), columns.min(STRIP));
    let block = (wide_rows * strips).div_ceil(TASKS_MAX).max(TASK_ELEMENTS_MIN.div_ceil(wide_columns.min(STRIP)));
    let blocks = wide_rows.div_ceil(block).max(1);
    scratch.clear();
    scratch.resize(K * columns + blocks * strips * K * folded, 0.0);
    let (totals, partials) = scratch.split_at_mut(K * columns);
    pool.chunks_backwards(partials, K * folded, |task, partial| {
        let (first, column) = (task / strips * block, task % strips * STRIP);
        let width = STRIP.min(wide_columns - column);
        let mut run = |first: usize, rows: usize, width: usize| {
            let mut sums = [[0.0; STRIP]; K];
            let rows = Rows { start: first * wide_columns + column, count: rows, stride: wide_columns, width };
            add(Strip { rows, column }, &mut sums);
            for (partial, sums) in partial.chunks_exact_mut(folded).zip(&sums) {
                for row in sums[..width].chunks(folded) {
                    partial.iter_mut().zip(row).for_each(|(partial, &sum)| *partial += f64::from(sum));
                }
            }
        };
        let end = (first + block).min(wide_rows);
        (first..end).step_by(RUN).for_each(|row| run(row, RUN.min(end - row), width));
        if rest > 0 && end == wide_rows {
            run(wide_rows, 1, rest * columns);
        }
    });
    for (task, partial) in partials.chunks_exact(K * folded).enumerate() {
        let column = task % strips * STRIP;
        let width = folded.min(columns - column);
        for (total, partial) in totals.chunks_exact_mut(columns).zip(partial.chunks_exact(folded)) {
            total[column..column + width].iter_mut().zip(partial).for_each(|(total, partial)| *total += partial);
        }
    }
    totals
}

/// Rows that are added together before they are added to the accumulators, which are then loaded and stored less often.
pub(super) const GROUP: usize = 4;

/// Adds the sum of some rows to the accumulators of their columns.
///
/// # Safety
/// The machine has `S`; `column` is that of a vector within a strip.
#[inline(always)]
pub(super) unsafe fn add_to<S: Simd>(sums: &mut [f32; STRIP], column: usize, sum: S::Vector) {
    debug_assert!(column + S::LANES <= STRIP && STRIP.is_multiple_of(S::LANES));
    // SAFETY: a strip is whole vectors long, so even its last one lies inside.
    unsafe {
        let place = sums.as_mut_ptr().add(column);
        S::store(place, S::add(S::load(place), sum));
    }
}

/// `y[c]` = Σ over rows of `x[row, c]`: the gradient of anything that repeats over leading dims.
pub fn sum_leading<E: Float>(context: &mut Context<'_>, x: &[E], y: &mut [f32]) {
    assert!(!y.is_empty() && x.len().is_multiple_of(y.len()), "the sum's shape is a suffix of the input's");
    let (shape, isa) = ((x.len() / y.len(), y.len()), context.isa);
    let sums = sum_columns(context.pool, shape, &mut context.scratch.sums, |strip, [sums]: &mut Sums<1>| {
        walk::<GROUP>(isa, strip.rows, x.len(), Plain { x: x.as_ptr(), sums });
    });
    y.iter_mut().zip(sums).for_each(|(y, &sum)| *y = sum as f32);
}

struct Plain<'a, E> {
    x: *const E,
    sums: &'a mut [f32; STRIP],
}

impl<E: Float> Body for Plain<'_, E> {
    #[inline(always)]
    unsafe fn vector<S: Simd, const R: usize>(
        &mut self,
        column: usize,
        starts: [usize; R],
        ahead: usize,
        lanes: Lanes,
    ) {
        // SAFETY: `walk` has seen that the elements lie in x, and a strip's columns are those of its accumulators.
        unsafe {
            let mut sum = S::splat(0.0);
            for start in starts {
                sum = S::add(sum, take::<S, E>(self.x, start + column, ahead, lanes));
            }
            add_to::<S>(self.sums, column, sum);
        }
    }
}

/// Lanes of a row sum: one of the widest vectors. Twice as many made the compiler tear them apart, and rows of 64 took
/// three times as long.
const LANES: usize = 16;
/// Elements of a row added in f32 before a flush to f64.
const SEGMENT: usize = 4096;

/// Σ value(a, b, c) over rows of equal length (one given twice costs nothing); f32 lanes within segments, f64 across them.
#[inline(always)]
pub(super) fn sum_row<A: Float, B: Float, C: Float>(
    (a, b, c): (&[A], &[B], &[C]),
    value: impl Fn(f32, f32, f32) -> f32,
) -> f64 {
    let length = a.len();
    let (b, c) = (&b[..length], &c[..length]);
    let mut total = 0.0;
    let mut segment = 0;
    while segment < length {
        let end = (segment + SEGMENT).min(length);
        let mut lanes = [0.0f32; LANES];
        let mut start = segment;
        while start + LANES <= end {
            let (a, b, c) = (&a[start..start + LANES], &b[start..start + LANES], &c[start..start + LANES]);
            for lane in 0..LANES {
                lanes[lane] += value(a[lane].to_f32(), b[lane].to_f32(), c[lane].to_f32());
            }
            start += LANES;
        }
        let (a, b, c) = (&a[start..end], &b[start..end], &c[start..end]);
        for lane in 0..end - start {
            lanes[lane] += value(a[lane].to_f32(), b[lane].to_f32(), c[lane].to_f32());
        }
        total += f64::from(fold(lanes, |a, b| a + b));
        segment = end;
    }
    total
}

/// The largest of a row, NaN not counted; −∞ for an empty one.
#[inline(always)]
pub(super) fn max_row<E: Float>(row: &[E]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane].to_f32());
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, value.to_f32());
    }
    fold(lanes, larger)
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// Folds lanes in halves, which vectorises.
#[inline(always)]
fn fold(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = join(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::check::{assert_close, numbers, same_bits};

    #[test]
    fn column_sums_follow_f64_for_narrow_and_wide_matrices() {
        for (rows, columns) in
            [(1, 1), (100_003, 1), (70_000, 3), (9_999, 17), (64, 1000), (3000, 257), (5, 4096), (0, 4)]
        {
            let x: Vec<f32> = numbers(1, rows * columns).iter().map(|x| x + 3.0).collect();
            let mut expected = vec![0.0; columns];
            for (index, &x) in x.iter().enumerate() {
                expected[index % columns] += f64::from(x);
            }
            let sums = same_bits(|context| {
                let mut y = vec![f32::NAN; columns];
                sum_leading(context, &x, &mut y);
                y
            });
            assert_close(&sums, &expected, 1e-6);
        }
    }

    #[test]
    fn row_sums_and_maxima_see_every_element() {
        for length in [1, 3, 31, 32, 33, 4095, 4097, 10_000] {
            let x = numbers(2, length);
            let expected: f64 = x.iter().map(|&x| f64::from(x * x)).sum();
            assert!((sum_row((&x, &x, &x), |a, b, _| a * b) - expected).abs() < 1e-5 * expected);
            assert_eq!(max_row(&x), x.iter().copied().fold(f32::MIN, f32::max));
        }
        assert_eq!(max_row::<f32>(&[]), f32::NEG_INFINITY);
    }
}
