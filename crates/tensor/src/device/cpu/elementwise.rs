//! Kernels that treat every element by itself: unary functions and their gradients, sums and products with broadcasting.
//!
//! All are bound by memory: bytes read plus bytes written over the machine's bandwidth, except the functions with an
//! exponential, which cost about 20 vector operations per vector. Where the first operand is an `Option`, `None` says that
//! the output already holds it.

mod plain;

use super::context::Context;
use super::reduce::{wide_length, widen};
use super::special;
use super::vectorize::vectorized;
use crate::dtype::Float;
use crate::unary::Unary;

/// Elements per task: 64 KiB of f32, enough to hide the cost of handing a task out, small enough to share the work evenly.
pub(super) const GRAIN: usize = 1 << 14;

/// The part of an optional whole that belongs to the task which starts at `start`.
#[inline(always)]
pub(super) fn part<E>(whole: Option<&[E]>, start: usize, length: usize) -> Option<&[E]> {
    whole.map(|whole| &whole[start..start + length])
}

/// y = f(x).
pub fn unary<E: Float>(context: &Context<'_>, kind: Unary, x: Option<&[E]>, y: &mut [E]) {
    check_lengths(x, y);
    match kind {
        Unary::Relu => plain::each::<E, E>(context, plain::Clamp(f32::INFINITY), (x, None), y),
        Unary::Relu6 => plain::each::<E, E>(context, plain::Clamp(6.0), (x, None), y),
        _ => context.pool.chunks(y, GRAIN, |task, y| unary_piece(context.isa, kind, part(x, task * GRAIN, y.len()), y)),
    }
}

/// dx = dy·f′, where `saved` is the output or the input of the function, as [`Unary::saves_output`] says.
pub fn unary_grad<E: Float>(context: &Context<'_>, kind: Unary, (dy, saved): (Option<&[E]>, &[E]), dx: &mut [E]) {
    check_lengths(dy, dx);
    assert_eq!(saved.len(), dx.len(), "a gradient has the length of its function's values");
    match kind {
        Unary::Relu => plain::each(context, plain::Gate(f32::INFINITY), (dy, Some(saved)), dx),
        Unary::Relu6 => plain::each(context, plain::Gate(6.0), (dy, Some(saved)), dx),
        _ => context.pool.chunks(dx, GRAIN, |task, dx| {
            let start = task * GRAIN;
            unary_grad_piece(context.isa, kind, part(dy, start, dx.len()), &saved[start..start + dx.len()], dx);
        }),
    }
}

/// y = a + b, `b` repeating over the leading dims of `a`.
pub fn add<E: Float>(context: &mut Context<'_>, a: Option<&[E]>, b: &[E], y: &mut [E]) {
    broadcast(context, plain::Add, (a, b), y);
}

/// y = a·b, `b` repeating over the leading dims of `a`.
pub fn mul<E: Float>(context: &mut Context<'_>, a: Option<&[E]>, b: &[E], y: &mut [E]) {
    broadcast(context, plain::Mul, (a, b), y);
}

/// y = factor·x.
pub fn scale<E: Float>(context: &Context<'_>, x: Option<&[E]>, factor: f32, y: &mut [E]) {
    check_lengths(x, y);
    plain::each::<E, E>(context, plain::Scale(factor), (x, None), y);
}

/// y = x as another type.
pub fn cast<A: Float, B: Float>(context: &Context<'_>, x: &[A], y: &mut [B]) {
    assert_eq!(x.len(), y.len(), "a cast keeps the shape");
    plain::each(context, plain::Second, (None, Some(x)), y);
}

fn check_lengths<E>(x: Option<&[E]>, y: &[E]) {
    assert!(x.is_none_or(|x| x.len() == y.len()), "an elementwise kernel keeps the shape");
}

fn broadcast<E: Float>(
    context: &mut Context<'_>,
    function: impl plain::Function,
    (a, b): (Option<&[E]>, &[E]),
    y: &mut [E],
) {
    check_lengths(a, y);
    if y.is_empty() {
        return;
    }
    assert!(!b.is_empty() && y.len().is_multiple_of(b.len()), "the second operand's shape is a suffix of the first's");
    if b.len() == y.len() {
        return plain::each(context, function, (a, Some(b)), y);
    }
    let mut wide = std::mem::take(&mut context.scratch.floats);
    wide.resize(wide_length(b.len()), 0.0);
    widen(b, &mut wide);
    plain::per_column(context, function, (a, &wide), y);
    context.scratch.floats = wide;
}

// Loops and not `for_each`: a large function makes the latter's closure too large to be inlined.
#[inline(always)]
fn map<E: Float>(x: Option<&[E]>, y: &mut [E], function: impl Fn(f32) -> f32) {
    match x {
        Some(x) => {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = E::from_f32(function(x.to_f32()));
            }
        }
        None => {
            for y in y {
                *y = E::from_f32(function(y.to_f32()));
            }
        }
    }
}

#[inline(always)]
fn map2<E: Float>(a: Option<&[E]>, b: &[E], y: &mut [E], function: impl Fn(f32, f32) -> f32) {
    match a {
        Some(a) => {
            for (y, (&a, &b)) in y.iter_mut().zip(a.iter().zip(b)) {
                *y = E::from_f32(function(a.to_f32(), b.to_f32()));
            }
        }
        None => {
            for (y, &b) in y.iter_mut().zip(b) {
                *y = E::from_f32(function(y.to_f32(), b.to_f32()));
            }
        }
    }
}

vectorized! {
    fn unary_piece<E: Float>(kind: Unary, x: Option<&[E]>, y: &mut [E]) {
        match kind {
            Unary::Gelu => map(x, y, special::gelu),
            Unary::GeluTanh => map(x, y, special::gelu_tanh),
            Unary::Sigmoid => map(x, y, special::sigmoid),
            Unary::Tanh => map(x, y, special::tanh),
            Unary::Relu | Unary::Relu6 => unreachable!("plain functions have their own vectors"),
        }
    }
}

vectorized! {
    fn unary_grad_piece<E: Float>(kind: Unary, dy: Option<&[E]>, saved: &[E], dx: &mut [E]) {
        match kind {
            Unary::Gelu => map2(dy, saved, dx, gelu_grad),
            Unary::GeluTanh => map2(dy, saved, dx, gelu_tanh_grad),
            Unary::Sigmoid => map2(dy, saved, dx, sigmoid_grad),
            Unary::Tanh => map2(dy, saved, dx, tanh_grad),
            Unary::Relu | Unary::Relu6 => unreachable!("plain functions have their own vectors"),
        }
    }
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
    use crate::device::cpu::check::{assert_close, erf, numbers, once, same_bits, slope, weigh, wide};

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
                let y = same_bits(|context| {
                    let mut y = vec![f32::NAN; count];
                    unary(context, kind, Some(&x), &mut y);
                    let mut in_place = x.clone();
                    unary(context, kind, None, &mut in_place);
                    assert_eq!(y, in_place);
                    y
                });
                assert_close(&y, &wide(&x).iter().map(|&x| reference(kind, x)).collect::<Vec<_>>(), 1e-6);
                let saved = if kind.saves_output() { &y } else { &x };
                let dx = same_bits(|context| {
                    let mut dx = vec![f32::NAN; count];
                    unary_grad(context, kind, (Some(&dy), saved), &mut dx);
                    let mut in_place = dy.clone();
                    unary_grad(context, kind, (None, saved), &mut in_place);
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
        once(|context| unary(context, Unary::Relu, None, &mut y));
        assert!(y[0].is_nan() && y[1] == 0.0);
    }

    #[test]
    fn suffixes_repeat_over_leading_dims() {
        for (rows, suffix) in [(1, 1), (5000, 3), (300, 17), (40, 1000), (1, 40_000), (2, 70_001)] {
            let (a, b) = (numbers(1, rows * suffix), numbers(2, suffix));
            let expected = |function: fn(f32, f32) -> f32| -> Vec<f32> {
                a.iter().enumerate().map(|(index, &a)| function(a, b[index % suffix])).collect()
            };
            let sum = same_bits(|context| {
                let mut y = a.clone();
                add(context, None, &b, &mut y);
                y
            });
            assert_eq!(sum, expected(|a, b| a + b));
            let product = same_bits(|context| {
                let mut y = vec![0.0; a.len()];
                mul(context, Some(&a), &b, &mut y);
                y
            });
            assert_eq!(product, expected(|a, b| a * b));
        }
    }

    #[test]
    fn scaling_and_adding_in_place() {
        let x = numbers(3, 20_000);
        let doubled = same_bits(|context| {
            let mut y = vec![0.0; x.len()];
            scale(context, Some(&x), 0.5, &mut y);
            add(context, None, &x, &mut y);
            y
        });
        assert_eq!(doubled, x.iter().map(|x| 0.5 * x + x).collect::<Vec<_>>());
    }
}
