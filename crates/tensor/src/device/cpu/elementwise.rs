//! Kernels that treat every element by itself: unary functions and their gradients, sums and products with broadcasting.
//!
//! All are bound by memory: bytes read plus bytes written over the machine's bandwidth, except the functions with an
//! exponential, which cost about 20 vector operations per vector. Where the first operand is an `Option`, `None` says that
//! the output already holds it.

use super::pool::Pool;
use super::reduce::widen;
use super::special;
use super::vectorize::vectorized;
use crate::unary::Unary;

/// Elements per task: 64 KiB, enough to hide the cost of handing a task out, small enough to share the work evenly.
pub(super) const GRAIN: usize = 1 << 14;

/// The part of an optional whole that belongs to the task which starts at `start`.
#[inline(always)]
pub(super) fn part(whole: Option<&[f32]>, start: usize, length: usize) -> Option<&[f32]> {
    whole.map(|whole| &whole[start..start + length])
}

/// y = f(x).
pub fn unary(pool: &Pool, kind: Unary, x: Option<&[f32]>, y: &mut [f32]) {
    check_lengths(x, y);
    pool.chunks(y, GRAIN, |task, y| unary_piece(kind, part(x, task * GRAIN, y.len()), y));
}

/// dx = dy·f′, where `saved` is the output or the input of the function, as [`Unary::saves_output`] says.
pub fn unary_grad(pool: &Pool, kind: Unary, (dy, saved): (Option<&[f32]>, &[f32]), dx: &mut [f32]) {
    check_lengths(dy, dx);
    assert_eq!(saved.len(), dx.len(), "a gradient has the length of its function's values");
    pool.chunks(dx, GRAIN, |task, dx| {
        let start = task * GRAIN;
        unary_grad_piece(kind, part(dy, start, dx.len()), &saved[start..start + dx.len()], dx);
    });
}

/// y = a + b, `b` repeating over the leading dims of `a`.
pub fn add(pool: &Pool, a: Option<&[f32]>, b: &[f32], y: &mut [f32]) {
    broadcast(pool, (a, b), y, add_piece);
}

/// y = a·b, `b` repeating over the leading dims of `a`.
pub fn mul(pool: &Pool, a: Option<&[f32]>, b: &[f32], y: &mut [f32]) {
    broadcast(pool, (a, b), y, mul_piece);
}

/// y = factor·x.
pub fn scale(pool: &Pool, x: Option<&[f32]>, factor: f32, y: &mut [f32]) {
    check_lengths(x, y);
    pool.chunks(y, GRAIN, |task, y| scale_piece(part(x, task * GRAIN, y.len()), factor, y));
}

fn check_lengths(x: Option<&[f32]>, y: &[f32]) {
    assert!(x.is_none_or(|x| x.len() == y.len()), "an elementwise kernel keeps the shape");
}

type Piece = fn(usize, Option<&[f32]>, &[f32], &mut [f32]);

fn broadcast(pool: &Pool, (a, b): (Option<&[f32]>, &[f32]), y: &mut [f32], piece: Piece) {
    check_lengths(a, y);
    if y.is_empty() {
        return;
    }
    assert!(!b.is_empty() && y.len().is_multiple_of(b.len()), "the second operand's shape is a suffix of the first's");
    let b = if b.len() < y.len() { widen(b) } else { b.into() };
    pool.chunks(y, GRAIN, |task, y| piece(task * GRAIN, part(a, task * GRAIN, y.len()), &b, y));
}

// Loops and not `for_each`: a large function makes the latter's closure too large to be inlined.
#[inline(always)]
fn map(x: Option<&[f32]>, y: &mut [f32], function: impl Fn(f32) -> f32) {
    match x {
        Some(x) => {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = function(x);
            }
        }
        None => {
            for y in y {
                *y = function(*y);
            }
        }
    }
}

#[inline(always)]
fn map2(a: Option<&[f32]>, b: &[f32], y: &mut [f32], function: impl Fn(f32, f32) -> f32) {
    match a {
        Some(a) => {
            for (y, (&a, &b)) in y.iter_mut().zip(a.iter().zip(b)) {
                *y = function(a, b);
            }
        }
        None => {
            for (y, &b) in y.iter_mut().zip(b) {
                *y = function(*y, b);
            }
        }
    }
}

/// As [`map2`] for the piece at `start` of the whole, `b` repeating.
#[inline(always)]
fn map_suffix(
    start: usize,
    (a, b): (Option<&[f32]>, &[f32]),
    y: &mut [f32],
    function: impl Fn(f32, f32) -> f32 + Copy,
) {
    let (mut offset, mut done) = (start % b.len(), 0);
    while done < y.len() {
        let length = (b.len() - offset).min(y.len() - done);
        map2(part(a, done, length), &b[offset..offset + length], &mut y[done..done + length], function);
        (offset, done) = (0, done + length);
    }
}

vectorized! {
    fn unary_piece(kind: Unary, x: Option<&[f32]>, y: &mut [f32]) {
        match kind {
            Unary::Relu => map(x, y, relu),
            Unary::Relu6 => map(x, y, relu6),
            Unary::Gelu => map(x, y, special::gelu),
            Unary::GeluTanh => map(x, y, special::gelu_tanh),
            Unary::Sigmoid => map(x, y, special::sigmoid),
            Unary::Tanh => map(x, y, special::tanh),
        }
    }
}

vectorized! {
    fn unary_grad_piece(kind: Unary, dy: Option<&[f32]>, saved: &[f32], dx: &mut [f32]) {
        match kind {
            Unary::Relu => map2(dy, saved, dx, relu_mask),
            Unary::Relu6 => map2(dy, saved, dx, relu6_grad),
            Unary::Gelu => map2(dy, saved, dx, gelu_grad),
            Unary::GeluTanh => map2(dy, saved, dx, gelu_tanh_grad),
            Unary::Sigmoid => map2(dy, saved, dx, sigmoid_grad),
            Unary::Tanh => map2(dy, saved, dx, tanh_grad),
        }
    }
}

vectorized! {
    fn add_piece(start: usize, a: Option<&[f32]>, b: &[f32], y: &mut [f32]) {
        map_suffix(start, (a, b), y, |a, b| a + b);
    }
}

vectorized! {
    fn mul_piece(start: usize, a: Option<&[f32]>, b: &[f32], y: &mut [f32]) {
        map_suffix(start, (a, b), y, |a, b| a * b);
    }
}

vectorized! {
    fn scale_piece(x: Option<&[f32]>, factor: f32, y: &mut [f32]) {
        map(x, y, |x| factor * x);
    }
}

/// max(x, 0), NaN staying NaN.
#[inline(always)]
pub(super) fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
fn relu6(x: f32) -> f32 {
    let x = relu(x);
    if x > 6.0 { 6.0 } else { x }
}

/// The gradient through a ReLU whose output was `y`.
#[inline(always)]
pub(super) fn relu_mask(dy: f32, y: f32) -> f32 {
    if y <= 0.0 { 0.0 } else { dy }
}

#[inline(always)]
fn relu6_grad(dy: f32, y: f32) -> f32 {
    if y <= 0.0 || y >= 6.0 { 0.0 } else { dy }
}

#[inline(always)]
fn gelu_grad(dy: f32, x: f32) -> f32 {
    dy * special::gelu_slope(x)
}

#[inline(always)]
fn gelu_tanh_grad(dy: f32, x: f32) -> f32 {
    dy * special::gelu_tanh_slope(x)
}

#[inline(always)]
fn sigmoid_grad(dy: f32, y: f32) -> f32 {
    dy * y * (1.0 - y)
}

#[inline(always)]
fn tanh_grad(dy: f32, y: f32) -> f32 {
    dy * (1.0 - y * y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::check::{assert_close, erf, numbers, same_bits, slope, weigh, wide};

    fn reference(kind: Unary, x: f64) -> f64 {
        match kind {
            Unary::Relu => x.max(0.0),
            Unary::Relu6 => x.clamp(0.0, 6.0),
            Unary::Gelu => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
            Unary::GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
            Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Unary::Tanh => x.tanh(),
        }
    }

    #[test]
    fn unary_functions_and_gradients_follow_f64_in_and_out_of_place() {
        for kind in Unary::ALL {
            for count in [1, 17, 1000, GRAIN + 5] {
                let x: Vec<f32> = numbers(1, count).iter().map(|x| 4.0 * x).collect();
                let dy = numbers(2, count);
                let y = same_bits(|pool| {
                    let mut y = vec![f32::NAN; count];
                    unary(pool, kind, Some(&x), &mut y);
                    let mut in_place = x.clone();
                    unary(pool, kind, None, &mut in_place);
                    assert_eq!(y, in_place);
                    y
                });
                assert_close(&y, &wide(&x).iter().map(|&x| reference(kind, x)).collect::<Vec<_>>(), 1e-6);
                let saved = if kind.saves_output() { &y } else { &x };
                let dx = same_bits(|pool| {
                    let mut dx = vec![f32::NAN; count];
                    unary_grad(pool, kind, (Some(&dy), saved), &mut dx);
                    let mut in_place = dy.clone();
                    unary_grad(pool, kind, (None, saved), &mut in_place);
                    assert_eq!(dx, in_place);
                    dx
                });
                let tested = count.min(100);
                let total =
                    |x: &[f64]| weigh(&x.iter().map(|&x| reference(kind, x)).collect::<Vec<_>>(), &dy[..tested]);
                assert_close(&dx[..tested], &slope(&x[..tested], total), 1e-5);
            }
        }
    }

    #[test]
    fn nan_passes_through_relu() {
        let mut y = [f32::NAN, -1.0];
        unary(&Pool::new(1), Unary::Relu, None, &mut y);
        assert!(y[0].is_nan() && y[1] == 0.0);
    }

    #[test]
    fn suffixes_repeat_over_leading_dims() {
        for (rows, suffix) in [(1, 1), (5000, 3), (300, 17), (40, 1000), (1, 40_000), (2, 70_001)] {
            let (a, b) = (numbers(1, rows * suffix), numbers(2, suffix));
            let expected = |function: fn(f32, f32) -> f32| -> Vec<f32> {
                a.iter().enumerate().map(|(index, &a)| function(a, b[index % suffix])).collect()
            };
            let sum = same_bits(|pool| {
                let mut y = a.clone();
                add(pool, None, &b, &mut y);
                y
            });
            assert_eq!(sum, expected(|a, b| a + b));
            let product = same_bits(|pool| {
                let mut y = vec![0.0; a.len()];
                mul(pool, Some(&a), &b, &mut y);
                y
            });
            assert_eq!(product, expected(|a, b| a * b));
        }
    }

    #[test]
    fn scaling_and_adding_in_place() {
        let x = numbers(3, 20_000);
        let doubled = same_bits(|pool| {
            let mut y = vec![0.0; x.len()];
            scale(pool, Some(&x), 0.5, &mut y);
            add(pool, None, &x, &mut y);
            y
        });
        assert_eq!(doubled, x.iter().map(|x| 0.5 * x + x).collect::<Vec<_>>());
    }
}
