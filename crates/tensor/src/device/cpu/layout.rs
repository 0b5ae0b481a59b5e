//! Kernels that move elements and compute nothing: slice, pad, concat, permute.
//!
//! A tensor cut along one dim is seen as `[outer, size, inner]`, so that slices and pads copy runs of `inner` times the
//! slice's length. Any element type will do. The gradient of a slice is a pad, of a concat its slices, of a permutation the inverse one.

use super::context::Context;
use super::elementwise::GRAIN;
use crate::dtype::Element;
use crate::op::DIMS_MAX;

/// A range along one dim of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Product of the dims before.
    pub outer: usize,
    /// Length of the dim in the larger tensor.
    pub size: usize,
    /// Product of the dims after.
    pub inner: usize,
    /// First index of the range.
    pub start: usize,
    /// Length of the range.
    pub length: usize,
}

impl Window {
    /// `start..start + length` along `dim` of a tensor of `shape`.
    pub fn new(shape: &[usize], dim: usize, start: usize, length: usize) -> Self {
        let window = Self {
            outer: shape[..dim].iter().product(),
            size: shape[dim],
            inner: shape[dim + 1..].iter().product(),
            start,
            length,
        };
        assert!(start + length <= window.size, "a slice lies within its dim");
        window
    }

    fn check(&self, whole: usize, part: usize) {
        assert_eq!(whole, self.outer * self.size * self.inner, "the larger tensor has the window's shape");
        assert_eq!(part, self.outer * self.length * self.inner, "the smaller tensor has the range's shape");
    }

    /// The range's elements within the larger tensor's run number `outer`.
    fn range(&self, outer: usize) -> std::ops::Range<usize> {
        let start = (outer * self.size + self.start) * self.inner;
        start..start + self.length * self.inner
    }
}

/// Runs of `length` elements that make up a task.
fn runs_per_task(length: usize) -> usize {
    GRAIN.div_ceil(length.max(1))
}

/// y = the window of x.
pub fn slice<T: Element>(context: &Context<'_>, window: Window, x: &[T], y: &mut [T]) {
    window.check(x.len(), y.len());
    let run = window.length * window.inner;
    if run == 0 {
        return;
    }
    let runs = runs_per_task(run);
    context.pool.chunks(y, runs * run, |task, y| {
        for (index, y) in y.chunks_exact_mut(run).enumerate() {
            y.copy_from_slice(&x[window.range(task * runs + index)]);
        }
    });
}

/// y = zeros around x, which becomes the window of y.
pub fn pad<T: Element>(context: &Context<'_>, window: Window, x: &[T], y: &mut [T]) {
    window.check(y.len(), x.len());
    if y.is_empty() {
        return;
    }
    let (run, part) = (window.size * window.inner, window.length * window.inner);
    let runs = runs_per_task(run);
    context.pool.chunks(y, runs * run, |task, y| {
        for (index, y) in y.chunks_exact_mut(run).enumerate() {
            let outer = task * runs + index;
            let before = window.start * window.inner;
            y[..before].fill(T::default());
            y[before..before + part].copy_from_slice(&x[outer * part..(outer + 1) * part]);
            y[before + part..].fill(T::default());
        }
    });
}

/// The window of y = x; the rest of y stays. A concatenation is one such copy per part.
pub fn place<T: Element>(context: &Context<'_>, window: Window, x: &[T], y: &mut [T]) {
    window.check(y.len(), x.len());
    let (run, part) = (window.size * window.inner, window.length * window.inner);
    if part == 0 {
        return;
    }
    let (runs, before) = (runs_per_task(part), window.start * window.inner);
    context.pool.chunks(y, runs * run, |task, y| {
        let x = x[task * runs * part..].chunks_exact(part);
        y.chunks_exact_mut(run).zip(x).for_each(|(y, x)| y[before..before + part].copy_from_slice(x));
    });
}

/// Rows of y that are made together: a cache line of x holds 16 floats, so that many rows share what was fetched.
const TILE: usize = 16;

/// y's dim i is x's dim `order[i]`.
pub fn permute<T: Element>(context: &Context<'_>, (x, shape): (&[T], &[usize]), order: &[usize], y: &mut [T]) {
    assert!(x.len() == y.len() && x.len() == shape.iter().product::<usize>(), "a permutation keeps the elements");
    assert!(shape.len() == order.len() && (0..shape.len()).all(|dim| order.contains(&dim)), "each dim is named once");
    if y.is_empty() {
        return;
    }
    let mut kept = [(1, 1); DIMS_MAX];
    let count = merge(shape, order, &mut kept);
    let (dims, (size, stride)) = match kept[..count].split_last() {
        Some((last, dims)) => (dims, *last),
        None => (&[][..], (1, 1)),
    };
    let tiles = GRAIN.div_ceil(TILE * size);
    context.pool.chunks(y, tiles * TILE * size, |task, y| {
        for (tile, y) in y.chunks_mut(TILE * size).enumerate() {
            let first = (task * tiles + tile) * TILE;
            let mut starts = [0; TILE];
            starts.iter_mut().enumerate().for_each(|(row, start)| *start = offset(dims, first + row));
            if stride == 1 {
                y.chunks_exact_mut(size).zip(starts).for_each(|(y, start)| y.copy_from_slice(&x[start..start + size]));
                continue;
            }
            let neighbours = starts.iter().enumerate().all(|(row, &start)| start == starts[0] + row);
            if neighbours && y.len() == TILE * size {
                transpose(&x[starts[0]..], stride, y);
                continue;
            }
            for column in (0..size).step_by(TILE) {
                let end = (column + TILE).min(size);
                for (y, start) in y.chunks_exact_mut(size).zip(starts) {
                    (column..end).for_each(|column| y[column] = x[start + column * stride]);
                }
            }
        }
    });
}

/// y `[TILE, size]` = the transpose of the first `TILE` columns of x, whose rows are `stride` apart.
fn transpose<T: Element>(x: &[T], stride: usize, y: &mut [T]) {
    let size = y.len() / TILE;
    for first in (0..size).step_by(TILE) {
        let columns = TILE.min(size - first);
        let mut tile = [[T::default(); TILE]; TILE];
        for (column, tile) in tile[..columns].iter_mut().enumerate() {
            tile.copy_from_slice(&x[(first + column) * stride..][..TILE]);
        }
        for row in 0..TILE {
            let line: [T; TILE] = std::array::from_fn(|column| tile[column][row]);
            y[row * size + first..][..columns].copy_from_slice(&line[..columns]);
        }
    }
}

/// Writes y's dims as (size, stride in x), without dims of one element, neighbours merged where they stay neighbours, and
/// returns how many there are.
fn merge(shape: &[usize], order: &[usize], dims: &mut [(usize, usize); DIMS_MAX]) -> usize {
    let mut count = 0;
    for &dim in order {
        let (size, stride) = (shape[dim], shape[dim + 1..].iter().product::<usize>());
        if size == 1 {
            continue;
        }
        match dims[..count].last_mut() {
            Some(last) if last.1 == size * stride => *last = (last.0 * size, stride),
            _ => {
                dims[count] = (size, stride);
                count += 1;
            }
        }
    }
    count
}

/// Where row `index` of y (all dims but its last) starts in x.
fn offset(dims: &[(usize, usize)], index: usize) -> usize {
    let walk = |(offset, rest), &(size, stride): &(usize, usize)| (offset + rest % size * stride, rest / size);
    dims.iter().rev().fold((0, index), walk).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::check::{numbers, once, same_bits};

    #[test]
    fn slices_pads_and_concats_undo_each_other() {
        for shape in [vec![1, 5, 1], vec![3, 17, 4], vec![40, 6, 1000], vec![7, 9]] {
            let x = numbers(1, shape.iter().product());
            for dim in 0..shape.len() {
                let cut = shape[dim] / 3;
                let windows =
                    [(0, cut), (cut, shape[dim] - cut)].map(|(from, length)| Window::new(&shape, dim, from, length));
                let parts = windows.map(|window| {
                    same_bits(|context| {
                        let mut part = vec![f32::NAN; window.outer * window.length * window.inner];
                        slice(context, window, &x, &mut part);
                        part
                    })
                });
                let whole = same_bits(|context| {
                    let mut whole = vec![f32::NAN; x.len()];
                    windows.iter().zip(&parts).for_each(|(&window, part)| place(context, window, part, &mut whole));
                    whole
                });
                assert_eq!(whole, x);
                let mut sum = vec![0.0; x.len()];
                for (window, part) in windows.iter().zip(&parts) {
                    let mut padded = vec![f32::NAN; x.len()];
                    once(|context| pad(context, *window, part, &mut padded));
                    sum.iter_mut().zip(padded).for_each(|(sum, padded)| *sum += padded);
                }
                assert_eq!(sum, x);
            }
        }
    }

    #[test]
    fn a_slice_takes_the_right_elements() {
        let x: Vec<f32> = (0..12).map(|x| x as f32).collect();
        let mut y = [0.0; 8];
        once(|context| slice(context, Window::new(&[2, 3, 2], 1, 1, 2), &x, &mut y));
        assert_eq!(y, [2.0, 3.0, 4.0, 5.0, 8.0, 9.0, 10.0, 11.0]);
    }

    fn check_permute(shape: &[usize], order: &[usize]) {
        let x = numbers(1, shape.iter().product());
        let y = same_bits(|context| {
            let mut y = vec![f32::NAN; x.len()];
            permute(context, (&x, shape), order, &mut y);
            y
        });
        let strides: Vec<usize> = (0..shape.len()).map(|dim| shape[dim + 1..].iter().product()).collect();
        for (index, &value) in y.iter().enumerate() {
            let (mut rest, mut source) = (index, 0);
            for &dim in order.iter().rev() {
                source += rest % shape[dim] * strides[dim];
                rest /= shape[dim];
            }
            assert_eq!(value, x[source], "{shape:?} {order:?} at {index}");
        }
    }

    #[test]
    fn permutations_move_every_element_to_its_place() {
        check_permute(&[7], &[0]);
        check_permute(&[33, 1000], &[1, 0]);
        check_permute(&[1, 1], &[1, 0]);
        check_permute(&[2, 17, 3, 8], &[0, 2, 1, 3]);
        check_permute(&[3, 5, 6, 17], &[0, 3, 1, 2]);
        check_permute(&[3, 17, 5, 6], &[0, 2, 3, 1]);
        check_permute(&[2, 3, 4, 5, 6], &[4, 2, 0, 3, 1]);
        check_permute(&[2, 3, 1, 5, 6], &[1, 0, 2, 3, 4]);
    }
}
