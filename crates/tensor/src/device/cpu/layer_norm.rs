//! Layer normalisation over the last dim.
//!
//! Rows are independent forward. The gradient of the parameters is a column sum: it goes through blocks of rows, each
//! read from memory once for both the column sums and dx. The bound is memory bandwidth.

use super::context::Context;
use super::reduce::{STRIP, sum_row};
use super::vectorize::vectorized;
use crate::dtype::Float;

/// What the forward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm<'a, E> {
    /// Input, `[rows, width]`.
    pub x: &'a [E],
    /// Factor per column.
    pub gamma: &'a [f32],
    /// Offset per column.
    pub beta: &'a [f32],
    /// Added to the variance.
    pub eps: f32,
}

/// What the forward pass writes.
#[derive(Debug)]
pub struct LayerNormOutput<'a, E> {
    /// Output, `[rows, width]`.
    pub y: &'a mut [E],
    /// Mean per row, for the gradient.
    pub mean: &'a mut [f32],
    /// 1 / √(variance + eps) per row, for the gradient.
    pub inv_std: &'a mut [f32],
}

/// What the gradient reads.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormGrad<'a, E> {
    /// Gradient of the output; none when `dx` holds it.
    pub dy: Option<&'a [E]>,
    /// The forward pass's input.
    pub x: &'a [E],
    /// Factor per column.
    pub gamma: &'a [f32],
    /// Mean per row.
    pub mean: &'a [f32],
    /// 1 / √(variance + eps) per row.
    pub inv_std: &'a [f32],
}

/// What the gradient writes.
#[derive(Debug)]
pub struct LayerNormGradOutput<'a, E> {
    /// Gradient of the input.
    pub dx: &'a mut [E],
    /// Gradient of the factor.
    pub dgamma: &'a mut [f32],
    /// Gradient of the offset.
    pub dbeta: &'a mut [f32],
}

/// Rows of a forward task: about 64 KiB.
fn rows_per_task(width: usize) -> usize {
    (1usize << 14).div_ceil(width)
}

/// y = (x − mean)·inv_std·gamma + beta for every row.
pub fn forward<E: Float>(context: &Context<'_>, input: &LayerNorm<'_, E>, output: LayerNormOutput<'_, E>) {
    let (x, width) = (input.x, input.gamma.len());
    let rows = rows_per_task(width);
    assert!(x.len() == output.y.len() && x.len() == output.mean.len() * width, "layer-norm keeps the shape");
    let (y, mean, inv_std) = ((output.y, rows * width), (output.mean, rows), (output.inv_std, rows));
    context.pool.chunks3(y, mean, inv_std, |task, y, mean, inv_std| {
        let x = &x[task * rows * width..][..y.len()];
        forward_rows(context.isa, x, (input.gamma, input.beta, input.eps), y, mean, inv_std);
    });
}

vectorized! {
    fn forward_rows<E: Float>(x: &[E], affine: (&[f32], &[f32], f32), y: &mut [E], mean: &mut [f32], inv_std: &mut [f32]) {
        let (gamma, beta, eps) = affine;
        let width = gamma.len();
        let beta = &beta[..width];
        let statistics = mean.iter_mut().zip(inv_std);
        for ((x, y), (mean, inv_std)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(statistics) {
            let center = (sum_row((x, x, x), |x, _, _| x) / width as f64) as f32;
            let variance = sum_row((x, x, x), |x, _, _| (x - center) * (x - center)) / width as f64;
            let factor = (1.0 / (variance + f64::from(eps)).sqrt()) as f32;
            for index in 0..width {
                y[index] = E::from_f32((x[index].to_f32() - center) * factor * gamma[index] + beta[index]);
            }
            (*mean, *inv_std) = (center, factor);
        }
    }
}

/// Rows whose column sums are kept in f32 before a flush to f64; they stay in the second-level cache for dx.
const RUN: usize = 32;
/// Row blocks, each with its own partial column sums.
const BLOCKS_MAX: usize = 64;

/// The gradient of [`forward`].
pub fn gradient<E: Float>(context: &mut Context<'_>, input: &LayerNormGrad<'_, E>, output: LayerNormGradOutput<'_, E>) {
    let (x, width, isa) = (input.x, input.gamma.len(), context.isa);
    let rows = input.mean.len();
    assert!(x.len() == rows * width && output.dx.len() == x.len(), "layer-norm keeps the shape");
    if rows == 0 {
        [output.dgamma, output.dbeta].into_iter().for_each(|sum| sum.fill(0.0));
        return;
    }
    let sums = &mut context.scratch.sums;
    let block = rows.div_ceil(BLOCKS_MAX).max(rows_per_task(width)).next_multiple_of(RUN);
    sums.clear();
    sums.resize(rows.div_ceil(block) * 2 * width, 0.0);
    context.pool.chunks2((output.dx, block * width), (sums, 2 * width), |task, dx, sums| {
        for (run, dx) in dx.chunks_mut(RUN * width).enumerate() {
            let (row, length) = (task * block + run * RUN, dx.len());
            let elements = row * width..row * width + length;
            let rows = row..row + length / width;
            if let Some(dy) = input.dy {
                dx.copy_from_slice(&dy[elements.clone()]);
            }
            let statistics = (&input.mean[rows.clone()], &input.inv_std[rows]);
            gradient_run(isa, &x[elements], input.gamma, statistics, dx, sums);
        }
    });
    let total = |column: usize| sums.iter().skip(column).step_by(2 * width).sum::<f64>() as f32;
    output.dgamma.iter_mut().enumerate().for_each(|(column, dgamma)| *dgamma = total(column));
    output.dbeta.iter_mut().enumerate().for_each(|(column, dbeta)| *dbeta = total(width + column));
}

vectorized! {
    /// Some rows: `dx` holds dy and is replaced; `sums` are the block's column sums, of gamma and then of beta.
    fn gradient_run<E: Float>(x: &[E], gamma: &[f32], statistics: (&[f32], &[f32]), dx: &mut [E], sums: &mut [f64]) {
        let (mean, inv_std) = statistics;
        let width = gamma.len();
        let (gamma_sums, beta_sums) = sums.split_at_mut(width);
        for first in (0..width).step_by(STRIP) {
            let last = (first + STRIP).min(width);
            let [mut by_gamma, mut by_beta] = [[0.0f32; STRIP]; 2];
            for (row, (&mean, &inv_std)) in mean.iter().zip(inv_std).enumerate() {
                let (x, dy) = (&x[row * width..][first..last], &dx[row * width..][first..last]);
                let (by_gamma, by_beta) = (&mut by_gamma[..last - first], &mut by_beta[..last - first]);
                for index in 0..last - first {
                    by_gamma[index] += dy[index].to_f32() * ((x[index].to_f32() - mean) * inv_std);
                    by_beta[index] += dy[index].to_f32();
                }
            }
            let add = |sums: &mut [f64], run: &[f32]| sums.iter_mut().zip(run).for_each(|(sum, &run)| *sum += f64::from(run));
            add(&mut gamma_sums[first..last], &by_gamma);
            add(&mut beta_sums[first..last], &by_beta);
        }
        for (row, (&mean, &inv_std)) in mean.iter().zip(inv_std).enumerate() {
            let (x, dx) = (&x[row * width..][..width], &mut dx[row * width..][..width]);
            let offset = (sum_row((&*dx, gamma, x), |dy, gamma, _| dy * gamma) / width as f64) as f32;
            let product = sum_row((&*dx, gamma, x), |dy, gamma, x| dy * gamma * ((x - mean) * inv_std));
            let slope = (product / width as f64) as f32;
            for index in 0..width {
                let normal = (x[index].to_f32() - mean) * inv_std;
                dx[index] = E::from_f32(inv_std * (dx[index].to_f32() * gamma[index] - offset - normal * slope));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::check::{assert_close, numbers, once, same_bits, slope, weigh, wide};

    const EPS: f32 = 1e-5;

    /// x, gamma and beta one after the other in `point`.
    fn reference(point: &[f64], rows: usize, width: usize) -> Vec<f64> {
        let (x, affine) = point.split_at(rows * width);
        let (gamma, beta) = affine.split_at(width);
        let mut y = Vec::new();
        for x in x.chunks(width) {
            let mean = x.iter().sum::<f64>() / width as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
            let normal = |column: usize| (x[column] - mean) / (variance + f64::from(EPS)).sqrt();
            y.extend((0..width).map(|column| normal(column) * gamma[column] + beta[column]));
        }
        y
    }

    fn forward_all(context: &mut Context<'_>, x: &[f32], gamma: &[f32], beta: &[f32]) -> [Vec<f32>; 3] {
        let width = gamma.len();
        let mut y = vec![f32::NAN; x.len()];
        let [mut mean, mut inv_std] = [(); 2].map(|()| vec![f32::NAN; x.len() / width]);
        let input = LayerNorm { x, gamma, beta, eps: EPS };
        forward(context, &input, LayerNormOutput { y: &mut y, mean: &mut mean, inv_std: &mut inv_std });
        [y, mean, inv_std]
    }

    fn gradient_all(context: &mut Context<'_>, x: &[f32], gamma: &[f32], dy: &[f32], in_place: bool) -> Vec<f32> {
        let width = gamma.len();
        let [_, mean, inv_std] = forward_all(context, x, gamma, gamma);
        let mut dx = if in_place { dy.to_vec() } else { vec![f32::NAN; dy.len()] };
        let [mut dgamma, mut dbeta] = [(); 2].map(|()| vec![f32::NAN; width]);
        let dy = (!in_place).then_some(dy);
        let input = LayerNormGrad { dy, x, gamma, mean: &mean, inv_std: &inv_std };
        let output = LayerNormGradOutput { dx: &mut dx, dgamma: &mut dgamma, dbeta: &mut dbeta };
        gradient(context, &input, output);
        [dx, dgamma, dbeta].concat()
    }

    #[test]
    fn forward_follows_the_definition() {
        for (rows, width) in [(4, 3), (100, 17), (70, 1000), (3, 5000), (20_000, 2)] {
            let (x, gamma, beta) = (numbers(1, rows * width), numbers(2, width), numbers(3, width));
            same_bits(|context| forward_all(context, &x, &gamma, &beta).concat());
            let [y, ..] = once(|context| forward_all(context, &x, &gamma, &beta));
            let expected = reference(&wide(&[&x[..], &gamma, &beta].concat()), rows, width);
            // Two nearly equal numbers in a row lose digits in f32 whatever the kernel does.
            assert_close(&y, &expected, if width == 2 { 1e-3 } else { 3e-6 });
        }
    }

    #[test]
    fn gradients_follow_finite_differences() {
        for (rows, width) in [(1, 3), (50, 5), (7, 17)] {
            let (x, gamma, beta) = (numbers(1, rows * width), numbers(2, width), numbers(3, width));
            let dy = numbers(4, rows * width);
            let all = same_bits(|context| gradient_all(context, &x, &gamma, &dy, false));
            assert_eq!(all, once(|context| gradient_all(context, &x, &gamma, &dy, true)));
            let total = |point: &[f64]| weigh(&reference(point, rows, width), &dy);
            assert_close(&all, &slope(&[&x[..], &gamma, &beta].concat(), total), 3e-5);
        }
    }

    #[test]
    fn gradients_of_large_shapes_do_not_depend_on_threads() {
        for (rows, width) in [(3000, 17), (700, 1000), (5, 5000)] {
            let (x, gamma, dy) = (numbers(1, rows * width), numbers(2, width), numbers(4, rows * width));
            same_bits(|context| gradient_all(context, &x, &gamma, &dy, false));
        }
    }
}
