//! Softmax over the last dim, with the causal mask of attention, and the cross-entropy of logits.
//!
//! Rows are independent. Each is read once from memory and then from cache: maximum, sum of the exponentials, result. The
//! exponentials are computed twice, so that a sum of bf16 rows is one of unrounded numbers.

use super::context::Context;
use super::reduce::{max_row, sum_row};
use super::special::exp;
use super::vectorize::vectorized;
use crate::dtype::Float;

/// Which columns of a row take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// All of them.
    None,
    /// Matrices `[.., length, length]`, whose row t sees columns up to t; the others are 0 in the result.
    Causal,
}

impl Mask {
    fn visible(self, row: usize, width: usize) -> usize {
        match self {
            Self::None => width,
            Self::Causal => row % width + 1,
        }
    }
}

/// Rows of a task: about 32 KiB.
fn rows_per_task(width: usize) -> usize {
    (1usize << 13).div_ceil(width)
}

/// y = softmax(x) over rows of `width`.
pub fn softmax<E: Float>(context: &Context<'_>, (x, width): (&[E], usize), mask: Mask, y: &mut [E]) {
    assert!(x.len() == y.len() && x.len().is_multiple_of(width), "softmax keeps the shape");
    let rows = rows_per_task(width);
    context.pool.chunks(y, rows * width, |task, y| {
        for (row, y) in y.chunks_exact_mut(width).enumerate() {
            let row = task * rows + row;
            let (y, hidden) = y.split_at_mut(mask.visible(row, width));
            hidden.fill(E::default());
            softmax_row(context.isa, &x[row * width..][..y.len()], y);
        }
    });
}

vectorized! {
    fn softmax_row<E: Float>(x: &[E], y: &mut [E]) {
        let top = max_row(x);
        let factor = (1.0 / sum_row((x, x, x), |x, _, _| exp(x - top))) as f32;
        for (y, x) in y.iter_mut().zip(x) {
            *y = E::from_f32(factor * exp(x.to_f32() - top));
        }
    }
}

/// dx = y·(dy − Σ dy·y) per row. `dy` is none when `dx` holds it. Masked columns have y = 0, so their gradient is 0
/// by itself.
pub fn softmax_grad<E: Float>(context: &Context<'_>, (y, width): (&[E], usize), dy: Option<&[E]>, dx: &mut [E]) {
    assert!(y.len() == dx.len() && dy.is_none_or(|dy| dy.len() == dx.len()) && y.len().is_multiple_of(width));
    let rows = rows_per_task(width);
    context.pool.chunks(dx, rows * width, |task, dx| {
        let start = task * rows * width;
        if let Some(dy) = dy {
            dx.copy_from_slice(&dy[start..start + dx.len()]);
        }
        for (dx, y) in dx.chunks_exact_mut(width).zip(y[start..].chunks_exact(width)) {
            grad_row(context.isa, y, dx);
        }
    });
}

vectorized! {
    fn grad_row<E: Float>(y: &[E], dx: &mut [E]) {
        let product = sum_row((y, &*dx, y), |y, dy, _| y * dy) as f32;
        for (dx, y) in dx.iter_mut().zip(y) {
            *dx = E::from_f32(y.to_f32() * (dx.to_f32() - product));
        }
    }
}

/// Logits `[batch, classes]` and what they should have been.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// Logits, `[batch, classes]`.
    pub logits: &'a [f32],
    /// Number of classes.
    pub classes: usize,
    /// The right class of each row.
    pub targets: &'a [i32],
    /// Label smoothing: this much of the target's weight is spread evenly over all classes.
    pub smoothing: f32,
}

impl CrossEntropy<'_> {
    fn target(&self, row: usize) -> usize {
        let target = self.targets[row];
        assert!((0..self.classes as i32).contains(&target), "row {row}: target {target} of {} classes", self.classes);
        target as usize
    }

    fn check(&self) {
        assert!(!self.targets.is_empty(), "a mean loss needs at least one row");
        assert_eq!(self.logits.len(), self.targets.len() * self.classes, "one target per row of logits");
    }
}

/// The mean over rows of −Σ target·log softmax(logits).
pub fn cross_entropy(context: &mut Context<'_>, input: &CrossEntropy<'_>) -> f32 {
    input.check();
    let (classes, rows) = (input.classes, rows_per_task(input.classes));
    let (isa, losses) = (context.isa, &mut context.scratch.sums);
    losses.resize(input.targets.len(), 0.0);
    context.pool.chunks(losses, rows, |task, losses| {
        for (row, loss) in losses.iter_mut().enumerate() {
            let row = task * rows + row;
            let logits = &input.logits[row * classes..][..classes];
            let (top, log_sum, mean) = log_sum_row(isa, logits);
            let (right, smoothing) = (f64::from(logits[input.target(row)] - top), f64::from(input.smoothing));
            *loss = log_sum - (1.0 - smoothing) * right - smoothing * mean;
        }
    });
    (losses.iter().sum::<f64>() / losses.len() as f64) as f32
}

vectorized! {
    /// The row's maximum, and relative to it the logarithm of the sum of exponentials and the mean.
    fn log_sum_row(x: &[f32]) -> (f32, f64, f64) {
        let top = max_row(x);
        let log_sum = sum_row((x, x, x), |x, _, _| exp(x - top)).ln();
        (top, log_sum, sum_row((x, x, x), |x, _, _| x - top) / x.len() as f64)
    }
}

/// The gradient of [`cross_entropy`] times `scale`: (softmax − target)·scale/batch.
pub fn cross_entropy_grad(context: &Context<'_>, input: &CrossEntropy<'_>, scale: f32, dlogits: &mut [f32]) {
    input.check();
    assert_eq!(input.logits.len(), dlogits.len(), "a gradient has its value's shape");
    let (classes, rows) = (input.classes, rows_per_task(input.classes));
    let scale = scale / input.targets.len() as f32;
    context.pool.chunks(dlogits, rows * classes, |task, dlogits| {
        for (row, dlogits) in dlogits.chunks_exact_mut(classes).enumerate() {
            let row = task * rows + row;
            softmax_row(context.isa, &input.logits[row * classes..][..classes], dlogits);
            let (spread, right) = (input.smoothing / classes as f32, input.target(row));
            dlogits[right] -= 1.0 - input.smoothing;
            dlogits.iter_mut().for_each(|dlogit| *dlogit = scale * (*dlogit - spread));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::check::{assert_close, numbers, once, same_bits, slope, weigh, wide};

    fn reference(x: &[f64], width: usize, mask: Mask) -> Vec<f64> {
        let mut y = Vec::new();
        for (row, x) in x.chunks(width).enumerate() {
            let visible = mask.visible(row, width);
            let sum: f64 = x[..visible].iter().map(|x| x.exp()).sum();
            y.extend((0..width).map(|column| if column < visible { x[column].exp() / sum } else { 0.0 }));
        }
        y
    }

    #[test]
    fn softmax_and_gradient_follow_the_definition() {
        for (rows, width, mask) in [
            (3, 1, Mask::None),
            (700, 17, Mask::None),
            (2, 1000, Mask::None),
            (6, 3, Mask::Causal),
            (130, 65, Mask::Causal),
        ] {
            let (x, dy) = (numbers(1, rows * width), numbers(2, rows * width));
            let y = same_bits(|context| {
                let mut y = vec![f32::NAN; x.len()];
                softmax(context, (&x, width), mask, &mut y);
                y
            });
            assert_close(&y, &reference(&wide(&x), width, mask), 1e-6);
            let dx = same_bits(|context| {
                let mut dx = dy.clone();
                softmax_grad(context, (&y, width), None, &mut dx);
                let mut other = vec![f32::NAN; dy.len()];
                softmax_grad(context, (&y, width), Some(&dy), &mut other);
                assert_eq!(dx, other);
                dx
            });
            let tested = if mask == Mask::Causal { width.min(20) } else { 2 } * width;
            let total = |x: &[f64]| weigh(&reference(x, width, mask), &dy[..tested]);
            if tested <= 2000 {
                assert_close(&dx[..tested], &slope(&x[..tested], total), 1e-5);
            }
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let mut y = [0.0; 3];
        once(|context| softmax(context, (&[1e30, 0.0, 1e30], 3), Mask::None, &mut y));
        assert_eq!(y, [0.5, 0.0, 0.5]);
    }

    fn reference_loss(x: &[f64], targets: &[i32], smoothing: f64) -> f64 {
        let classes = x.len() / targets.len();
        let row = |(x, &target): (&[f64], &i32)| -> f64 {
            let log_sum = x.iter().map(|x| x.exp()).sum::<f64>().ln();
            let weight =
                |class| smoothing / classes as f64 + if class as i32 == target { 1.0 - smoothing } else { 0.0 };
            (0..classes).map(|class| weight(class) * (log_sum - x[class])).sum()
        };
        x.chunks(classes).zip(targets).map(row).sum::<f64>() / targets.len() as f64
    }

    #[test]
    fn cross_entropy_and_gradient_follow_the_definition() {
        for (rows, classes, smoothing) in [(5, 3, 0.0), (40, 17, 0.1), (2, 1000, 0.1), (1, 1, 0.0)] {
            let logits = numbers(1, rows * classes);
            let targets: Vec<i32> = (0..rows).map(|row| (row * 7 % classes) as i32).collect();
            let input = CrossEntropy { logits: &logits, classes, targets: &targets, smoothing };
            let loss = same_bits(|context| vec![cross_entropy(context, &input)]);
            assert_close(&loss, &[reference_loss(&wide(&logits), &targets, f64::from(smoothing))], 1e-6);
            let dlogits = same_bits(|context| {
                let mut dlogits = vec![f32::NAN; logits.len()];
                cross_entropy_grad(context, &input, 3.0, &mut dlogits);
                dlogits
            });
            let expected = slope(&logits, |x| 3.0 * reference_loss(x, &targets, f64::from(smoothing)));
            assert_close(&dlogits, &expected, 1e-6);
        }
    }

    #[test]
    #[should_panic(expected = "target 3 of 3 classes")]
    fn a_target_out_of_range_is_named() {
        let input = CrossEntropy { logits: &[0.0; 3], classes: 3, targets: &[3], smoothing: 0.0 };
        once(|context| cross_entropy(context, &input));
    }
}
