//! Sums in a fixed order: over the leading dims (per column) and over a row.
//!
//! A column sum cuts `[rows, columns]` into at most [`TASKS_MAX`] tasks, by the shape alone. Within a task, up to
//! [`RUN`] rows are added in f32, one accumulator per column, and then flushed into f64 partial sums, which are added in
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

/// Adds `value(inputs, parameters)` of every element of a strip to its column's sums. `inputs` are matrices of the
/// whole shape, `parameters` are per-column values as [`widen`] gives them.
#[inline(always)]
pub(super) fn add_rows<const N: usize, const P: usize, const K: usize>(
    strip: Strip,
    (inputs, parameters): ([&[f32]; N], [&[f32]; P]),
    sums: &mut Sums<K>,
    value: impl Fn([f32; N], [f32; P]) -> [f32; K],
) {
    let width = strip.width;
    assert!(width <= STRIP, "a strip fits its accumulators");
    let parameters = parameters.map(|parameter| &parameter[strip.column..strip.column + width]);
    let row = |index: usize| inputs.map(|input| &input[strip.start + index * strip.stride..][..width]);
    let fours = strip.rows / 4;
    for four in 0..fours {
        let rows = [row(4 * four), row(4 * four + 1), row(4 * four + 2), row(4 * four + 3)];
        for column in 0..width {
            let parameters = parameters.map(|parameter| parameter[column]);
            let values = rows.map(|row| value(row.map(|row| row[column]), parameters));
            for k in 0..K {
                sums[k][column] += (values[0][k] + values[1][k]) + (values[2][k] + values[3][k]);
            }
        }
    }
    for index in 4 * fours..strip.rows {
        let row = row(index);
        for column in 0..width {
            let parameters = parameters.map(|parameter| parameter[column]);
            let value = value(row.map(|row| row[column]), parameters);
            for k in 0..K {
                sums[k][column] += value[k];
            }
        }
    }
}

/// y[c] = Σ over rows of x[row, c]: the gradient of anything that repeats over leading dims.
pub fn sum_leading(pool: &Pool, x: &[f32], y: &mut [f32], scratch: &mut Vec<f64>) {
    assert!(!y.is_empty() && x.len().is_multiple_of(y.len()), "the sum's shape is a suffix of the input's");
    let shape = (x.len() / y.len(), y.len());
    let sums = sum_columns(pool, shape, scratch, |strip, sums| add_plain(x, strip, sums));
    y.iter_mut().zip(sums).for_each(|(y, &sum)| *y = sum as f32);
}

vectorized! {
    fn add_plain(x: &[f32], strip: Strip, sums: &mut Sums<1>) {
        add_rows(strip, ([x], []), sums, |[x], []| [x]);
    }
}

/// Lanes of a row sum: two of the widest vectors, so that two additions overlap.
const LANES: usize = 32;
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
        total += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
        segment = end;
    }
    total
}

/// The largest of a row, NaN not counted; −∞ for an empty one.
#[inline(always)]
pub(super) fn max_row(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
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
