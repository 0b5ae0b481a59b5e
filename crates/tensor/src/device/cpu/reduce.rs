//! Sums in a fixed order: over the leading dims (per column) and over a row.
//!
//! A column sum cuts `[rows, columns]` into at most `TASKS_MAX` tasks, by the shape alone. Within a task, up to
//! `RUN` rows are added in f32, one accumulator per column, and then flushed into f64 partial sums, which are added in
//! the order of the tasks. Narrow matrices are seen as wider ones (several rows side by side), so that vectors are full
//! whatever the number of channels. One read of every input; the bound is memory bandwidth.

use super::pool::Pool;
use super::vectorize::vectorized;
use std::borrow::Cow;

/// Columns accumulated together: 2 KiB per accumulator, so that all of them stay in the first-level cache.
pub(super) const STRIP: usize = 512;
/// Rows added in f32 before a flush to f64.
const RUN: usize = 128;
/// More tasks would balance no better and cost more partial sums.
const TASKS_MAX: usize = 64;
/// Elements below which a task is not worth handing out.
const TASK_ELEMENTS_MIN: usize = 1 << 15;

/// Repeats per-column values until they fill a strip, for kernels that walk several narrow rows at once.
pub(super) fn widen(columns: &[f32]) -> Cow<'_, [f32]> {
    match STRIP / columns.len() {
        0 | 1 => Cow::Borrowed(columns),
        times => Cow::Owned(columns.repeat(times)),
    }
}

/// Some rows of one strip of columns, as offsets into the matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip {
    start: usize,
    rows: usize,
    stride: usize,
    column: usize,
    width: usize,
}

/// The accumulators of a strip: `K` sums per column.
pub(super) type Sums<const K: usize> = [[f32; STRIP]; K];

/// Adds up `K` quantities per column of a matrix with `columns` columns. `add` adds a strip's rows to the accumulators
/// (see [`add_rows`]). Returns the `K·columns` sums, kept at the front of `scratch`.
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
    pool.chunks(partials, K * folded, |task, partial| {
        let (first, column) = (task / strips * block, task % strips * STRIP);
        let width = STRIP.min(wide_columns - column);
        let mut run = |first: usize, rows: usize, width: usize| {
            let mut sums = [[0.0; STRIP]; K];
            add(Strip { start: first * wide_columns + column, rows, stride: wide_columns, column, width }, &mut sums);
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

/// Adds `value(inputs, parameter)` of every element of a strip to its column's sums. The three inputs are matrices of the
/// whole shape (one given twice costs nothing), the parameter is a per-column value as [`widen`] gives it.
#[inline(always)]
pub(super) fn add_rows<const K: usize>(
    strip: Strip,
    (inputs, parameter): ([&[f32]; 3], &[f32]),
    sums: &mut Sums<K>,
    value: impl Fn([f32; 3], f32) -> [f32; K],
) {
    let width = strip.width;
    assert!(width <= STRIP, "a strip fits its accumulators");
    let parameter = &parameter[strip.column..strip.column + width];
    let row = |index: usize| inputs.map(|input| &input[strip.start + index * strip.stride..][..width]);
    let fours = strip.rows / 4;
    // Four rows at a time, so that the accumulators are loaded and stored a quarter as often. Each slice has a name
    // of its own because the vectoriser does not see through arrays of slices.
    for four in 0..fours {
        let ([a0, b0, c0], [a1, b1, c1]) = (row(4 * four), row(4 * four + 1));
        let ([a2, b2, c2], [a3, b3, c3]) = (row(4 * four + 2), row(4 * four + 3));
        for column in 0..width {
            let first = value([a0[column], b0[column], c0[column]], parameter[column]);
            let second = value([a1[column], b1[column], c1[column]], parameter[column]);
            let third = value([a2[column], b2[column], c2[column]], parameter[column]);
            let fourth = value([a3[column], b3[column], c3[column]], parameter[column]);
            for k in 0..K {
                sums[k][column] += (first[k] + second[k]) + (third[k] + fourth[k]);
            }
        }
    }
    for index in 4 * fours..strip.rows {
        let [a, b, c] = row(index);
        for column in 0..width {
            let value = value([a[column], b[column], c[column]], parameter[column]);
            for k in 0..K {
                sums[k][column] += value[k];
            }
        }
    }
}

/// `y[c]` = Σ over rows of `x[row, c]`: the gradient of anything that repeats over leading dims.
pub fn sum_leading(pool: &Pool, x: &[f32], y: &mut [f32], scratch: &mut Vec<f64>) {
    assert!(!y.is_empty() && x.len().is_multiple_of(y.len()), "the sum's shape is a suffix of the input's");
    let shape = (x.len() / y.len(), y.len());
    let sums = sum_columns(pool, shape, scratch, |strip, sums| add_plain(x, strip, sums));
    y.iter_mut().zip(sums).for_each(|(y, &sum)| *y = sum as f32);
}

vectorized! {
    fn add_plain(x: &[f32], strip: Strip, sums: &mut Sums<1>) {
        add_rows(strip, ([x; 3], x), sums, |[x, ..], _| [x]);
    }
}

/// Lanes of a row sum: one of the widest vectors. Twice as many made the compiler tear them apart, and rows of 64 took
/// three times as long.
const LANES: usize = 16;
/// Elements of a row added in f32 before a flush to f64.
const SEGMENT: usize = 4096;

/// Σ value(i) over a row given as equally long slices; f32 lanes within segments, f64 across them.
#[inline(always)]
pub(super) fn sum_row<const N: usize>(row: [&[f32]; N], value: impl Fn([f32; N]) -> f32) -> f64 {
    let length = row[0].len();
    let row = row.map(|part| &part[..length]);
    let mut total = 0.0;
    let mut segment = 0;
    while segment < length {
        let end = (segment + SEGMENT).min(length);
        let mut lanes = [0.0f32; LANES];
        let mut start = segment;
        while start + LANES <= end {
            let chunk = row.map(|part| &part[start..start + LANES]);
            for lane in 0..LANES {
                lanes[lane] += value(chunk.map(|part| part[lane]));
            }
            start += LANES;
        }
        let rest = row.map(|part| &part[start..end]);
        for lane in 0..end - start {
            lanes[lane] += value(rest.map(|part| part[lane]));
        }
        total += f64::from(fold(lanes, |a, b| a + b));
        segment = end;
    }
    total
}

/// The largest of a row, NaN not counted; −∞ for an empty one.
#[inline(always)]
pub(super) fn max_row(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, value);
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
            let sums = same_bits(|pool| {
                let mut y = vec![f32::NAN; columns];
                sum_leading(pool, &x, &mut y, &mut Vec::new());
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
            assert!((sum_row([&x, &x], |[a, b]| a * b) - expected).abs() < 1e-5 * expected);
            assert_eq!(max_row(&x), x.iter().copied().fold(f32::MIN, f32::max));
        }
        assert_eq!(max_row(&[]), f32::NEG_INFINITY);
    }
}
