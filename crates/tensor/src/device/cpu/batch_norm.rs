//! Batch normalisation of `[rows, channels]`, with the residual sum and the ReLU that usually follow fused in.
//!
//! Forward: one pass for the statistics, one to apply them. Gradient: one pass for the two sums, one to apply. The bound is
//! memory bandwidth, so what counts is streams of the tensor's size: forward reads x twice and writes y. The gradient reads
//! dy and x twice and writes dx; it finds a ReLU's mask from x again, by the forward pass's own arithmetic. Where a residual
//! was added that is not possible: then the first pass reads y and writes what the ReLU lets pass, which is the residual's
//! gradient, and the second reads that instead of dy.
//!
//! The first pass goes from the last rows to the first, because whoever wrote the tensor did so in order and its end is still
//! in the caches; the second goes the other way. Statistics are sums of differences from a shift near the mean
//! (the average of a few rows), so that a mean far from zero costs no digits; the sums follow [`super::reduce`].
#![allow(unsafe_code)]

use super::context::Context;
use super::elementwise::{GRAIN, part, relu, relu6};
use super::isa::Isa;
use super::pool::{Pool, SendPointer};
use super::reduce::{STRIP, Strip, Sums, add_rows, sum_columns, wide_length, widen};
use super::scratch::Scratch;
use super::stream;
use super::vectorize::vectorized;
use crate::dtype::Float;
use crate::op::Rectifier;

/// What the forward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm<'a, E> {
    /// Input, `[rows, channels]`.
    pub x: &'a [E],
    /// Factor per channel; none is 1.
    pub gamma: Option<&'a [f32]>,
    /// Offset per channel.
    pub beta: &'a [f32],
    /// Added after the normalisation, `[rows, channels]`.
    pub residual: Option<&'a [E]>,
    /// What cuts the result off.
    pub rectifier: Rectifier,
    /// Added to the variance.
    pub eps: f32,
}

/// Running statistics, updated as `(1 − momentum)·running + momentum·batch`.
#[derive(Debug)]
pub struct Running<'a> {
    /// Mean per channel.
    pub mean: &'a mut [f32],
    /// Variance per channel. The batch's enters divided by rows − 1, as in PyTorch.
    pub variance: &'a mut [f32],
    /// Weight of the new batch.
    pub momentum: f32,
}

/// What the training pass writes.
#[derive(Debug)]
pub struct TrainOutput<'a, E> {
    /// Output, `[rows, channels]`.
    pub y: &'a mut [E],
    /// Mean of the batch per channel, for the gradient.
    pub mean: &'a mut [f32],
    /// 1 / √(variance + eps) per channel, for the gradient.
    pub inv_std: &'a mut [f32],
    /// Statistics for inference.
    pub running: Running<'a>,
}

/// Normalises with the batch's own statistics and updates the running ones.
pub fn train<E: Float>(context: &mut Context<'_>, input: &BatchNorm<'_, E>, output: TrainOutput<'_, E>) {
    let (x, channels) = (input.x, input.beta.len());
    assert!(x.len() >= channels && x.len().is_multiple_of(channels), "batch-norm needs at least one whole row");
    let (rows, isa) = (x.len() / channels, context.isa);
    let Scratch { floats, sums, .. } = &mut *context.scratch;
    let [shift] = wide_rows(floats, channels);
    shift_near_the_mean(x, channels, shift);
    let sums = sum_columns(context.pool, (rows, channels), sums, |strip, sums| add_moments(isa, x, shift, strip, sums));
    let (count, (sum, square)) = (rows as f64, sums.split_at(channels));
    let running = output.running;
    let momentum = f64::from(running.momentum);
    let blend = |old: f32, new: f64| ((1.0 - momentum) * f64::from(old) + momentum * new) as f32;
    for channel in 0..channels {
        let offset = sum[channel] / count;
        let mean = f64::from(shift[channel]) + offset;
        let variance = (square[channel] / count - offset * offset).max(0.0);
        output.mean[channel] = mean as f32;
        output.inv_std[channel] = (1.0 / (variance + f64::from(input.eps)).sqrt()) as f32;
        running.mean[channel] = blend(running.mean[channel], mean);
        running.variance[channel] = blend(running.variance[channel], variance * count / (count - 1.0).max(1.0));
    }
    let inv_std = output.inv_std;
    let affine = Affine::new(floats, input.gamma, output.mean, |channel| inv_std[channel], input.beta);
    apply((context.pool, isa), input, affine, output.y);
}

/// Normalises with the running statistics.
pub fn infer<E: Float>(
    context: &mut Context<'_>,
    input: &BatchNorm<'_, E>,
    (mean, variance): (&[f32], &[f32]),
    y: &mut [E],
) {
    let inv_std = |channel: usize| 1.0 / (variance[channel] + input.eps).sqrt();
    let affine = Affine::new(&mut context.scratch.floats, input.gamma, mean, inv_std, input.beta);
    apply((context.pool, context.isa), input, affine, y);
}

/// `N` rows of values per channel, each as long as a widened one.
fn wide_rows<const N: usize>(floats: &mut Vec<f32>, channels: usize) -> [&mut [f32]; N] {
    let length = wide_length(channels);
    floats.resize(N * length, 0.0);
    let mut rest = &mut floats[..];
    std::array::from_fn(|_| rest.split_off_mut(..length).expect("as many rows as were made"))
}

/// Repeats the first values of a row, one per channel, over the rest of it.
fn repeat(wide: &mut [f32], channels: usize) {
    let (first, rest) = wide.split_at_mut(channels);
    widen(first, rest);
}

/// The average of up to 16 rows spread evenly over x, widened.
fn shift_near_the_mean<E: Float>(x: &[E], channels: usize, shift: &mut [f32]) {
    let rows = x.len() / channels;
    let samples = rows.min(16);
    shift[..channels].fill(0.0);
    for sample in 0..samples {
        let row = &x[sample * rows / samples * channels..][..channels];
        shift.iter_mut().zip(row).for_each(|(shift, x)| *shift += x.to_f32() / samples as f32);
    }
    repeat(shift, channels);
}

vectorized! {
    fn add_moments<E: Float>(x: &[E], shift: &[f32], strip: Strip, sums: &mut Sums<2>) {
        add_rows(strip, ([x; 2], [shift; 3]), sums, |[x, _], [shift, ..]| [x - shift, (x - shift) * (x - shift)]);
    }
}

/// y = (x − mean)·factor + beta, each per channel and widened.
#[derive(Clone, Copy)]
struct Affine<'a> {
    mean: &'a [f32],
    factor: &'a [f32],
    beta: &'a [f32],
}

impl<'a> Affine<'a> {
    fn new(
        floats: &'a mut Vec<f32>,
        gamma: Option<&[f32]>,
        mean: &[f32],
        inv_std: impl Fn(usize) -> f32,
        beta: &[f32],
    ) -> Self {
        let channels = mean.len();
        let [wide_mean, factor, wide_beta] = wide_rows(floats, channels);
        widen(mean, wide_mean);
        widen(beta, wide_beta);
        (0..channels)
            .for_each(|channel| factor[channel] = gamma.map_or(1.0, |gamma| gamma[channel]) * inv_std(channel));
        repeat(factor, channels);
        Self { mean: wide_mean, factor, beta: wide_beta }
    }

    #[inline(always)]
    fn part(self, start: usize, length: usize) -> Self {
        let part = |whole: &'a [f32]| &whole[start..start + length];
        Self { mean: part(self.mean), factor: part(self.factor), beta: part(self.beta) }
    }

    /// One stretch of y over which the channels do not wrap; `finish` takes the normalised value and the residual.
    #[inline(always)]
    fn stretch<E: Float>(self, (x, residual): (&[E], &[E]), y: &mut [E], finish: impl Fn(f32, f32) -> f32) {
        let length = y.len();
        let (x, residual) = (&x[..length], &residual[..length]);
        let (mean, factor, beta) = (&self.mean[..length], &self.factor[..length], &self.beta[..length]);
        for index in 0..length {
            let value = (x[index].to_f32() - mean[index]) * factor[index] + beta[index];
            y[index] = E::from_f32(finish(value, residual[index].to_f32()));
        }
    }
}

fn apply<E: Float>((pool, isa): (&Pool, Isa), input: &BatchNorm<'_, E>, affine: Affine<'_>, y: &mut [E]) {
    assert!(input.x.len() == y.len() && input.residual.is_none_or(|residual| residual.len() == y.len()));
    let streams = size_of_val(y) >= stream::BYTES_MIN;
    pool.chunks(y, GRAIN, |task, y| {
        let first = task * GRAIN;
        let fill = |start: usize, y: &mut [E]| {
            let (start, length) = (first + start, y.len());
            let x = &input.x[start..start + length];
            apply_piece(isa, start, affine, x, part(input.residual, start, length), input.rectifier, y);
        };
        if streams { stream::in_blocks(isa, y, fill) } else { fill(0, y) }
    });
}

vectorized! {
    fn apply_piece<E: Float>(start: usize, affine: Affine<'_>, x: &[E], residual: Option<&[E]>, cut: Rectifier, y: &mut [E]) {
        let period = affine.mean.len();
        let (mut offset, mut done) = (start % period, 0);
        while done < y.len() {
            let length = (period - offset).min(y.len() - done);
            let (affine, x) = (affine.part(offset, length), &x[done..done + length]);
            let y = &mut y[done..done + length];
            match (part(residual, done, length), cut) {
                (None, Rectifier::None) => affine.stretch((x, x), y, |value, _| value),
                (None, Rectifier::Relu) => affine.stretch((x, x), y, |value, _| relu(value)),
                (None, Rectifier::Relu6) => affine.stretch((x, x), y, |value, _| relu6(value)),
                (Some(added), Rectifier::None) => affine.stretch((x, added), y, |value, added| value + added),
                (Some(added), Rectifier::Relu) => affine.stretch((x, added), y, |value, added| relu(value + added)),
                (Some(added), Rectifier::Relu6) => affine.stretch((x, added), y, |value, added| relu6(value + added)),
            }
            (offset, done) = (0, done + length);
        }
    }
}

/// What the gradient reads.
#[derive(Clone, Copy, Debug)]
pub struct BatchNormGrad<'a, E> {
    /// Gradient of the output; none when `dresidual`, or `dx` if there is no such result, holds it.
    pub dy: Option<&'a [E]>,
    /// The forward pass's input.
    pub x: &'a [E],
    /// What the ReLU cut off.
    pub mask: Mask<'a, E>,
    /// What is not below this was cut off too.
    pub ceiling: f32,
    /// Factor per channel; none is 1.
    pub gamma: Option<&'a [f32]>,
    /// Mean of the batch per channel.
    pub mean: &'a [f32],
    /// 1 / √(variance + eps) per channel.
    pub inv_std: &'a [f32],
}

/// Which elements a ReLU after the normalisation cut off.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a, E> {
    /// None: there was no ReLU.
    None,
    /// Those that are not above zero when normalised with this beta.
    FromInput(&'a [f32]),
    /// Those whose result was not above zero.
    FromOutput(&'a [E]),
}

/// What the gradient writes.
#[derive(Debug)]
pub struct GradOutput<'a, E> {
    /// Gradient of the input.
    pub dx: &'a mut [E],
    /// Gradient of the factor.
    pub dgamma: Option<&'a mut [f32]>,
    /// Gradient of the offset.
    pub dbeta: &'a mut [f32],
    /// Gradient of the residual: dy where the ReLU let it pass.
    pub dresidual: Option<&'a mut [E]>,
}

/// The gradient where a ReLU lets it pass: its input or output was above zero and below the ceiling.
#[inline(always)]
fn passed(dy: f32, value: f32, ceiling: f32) -> f32 {
    if value <= 0.0 || value >= ceiling { 0.0 } else { dy }
}

/// The gradient of [`train`].
pub fn gradient<E: Float>(context: &mut Context<'_>, input: &BatchNormGrad<'_, E>, output: GradOutput<'_, E>) {
    let (x, channels, isa) = (input.x, input.mean.len(), context.isa);
    let GradOutput { dx, dgamma, dbeta, dresidual } = output;
    assert!(x.len() >= channels && x.len().is_multiple_of(channels), "batch-norm needs at least one whole row");
    assert!(dx.len() == x.len() && input.dy.is_none_or(|dy| dy.len() == x.len()), "batch-norm keeps the shape");
    let Scratch { floats, sums, .. } = &mut *context.scratch;
    let [mean, factor, beta, mean_dy, slope] = wide_rows(floats, channels);
    widen(input.mean, mean);
    let gamma = |channel: usize| input.gamma.map_or(1.0, |gamma| gamma[channel]);
    (0..channels).for_each(|channel| factor[channel] = gamma(channel) * input.inv_std[channel]);
    repeat(factor, channels);
    if let Mask::FromInput(offsets) = input.mask {
        widen(offsets, beta);
    }
    let affine = Affine { mean, factor, beta };
    let (shape, pool) = ((x.len() / channels, channels), context.pool);
    // Where what the ReLU let pass is written by the first pass, the second needs no mask.
    let writes = dresidual.is_some() || matches!(input.mask, Mask::FromOutput(_));
    let mut dresidual = dresidual;
    let sums = if writes {
        let passed = dresidual.as_deref_mut().unwrap_or(dx);
        sum_passed((pool, isa), shape, (input, affine), passed, sums)
    } else {
        let dy = input.dy.unwrap_or(dx);
        sum_columns(pool, shape, sums, |strip, sums| match input.mask {
            Mask::FromInput(_) => add_masked_gradients(isa, dy, x, (affine, input.ceiling), strip, sums),
            _ => add_gradients(isa, dy, x, affine, strip, sums),
        })
    };
    let (count, (sum_dy, sum_dy_x)) = (shape.0 as f64, sums.split_at(channels));
    dbeta.iter_mut().zip(sum_dy).for_each(|(dbeta, &sum)| *dbeta = sum as f32);
    let inv_std = |channel: usize| f64::from(input.inv_std[channel]);
    if let Some(dgamma) = dgamma {
        (0..channels).for_each(|channel| dgamma[channel] = (sum_dy_x[channel] * inv_std(channel)) as f32);
    }
    for channel in 0..channels {
        mean_dy[channel] = (sum_dy[channel] / count) as f32;
        slope[channel] = (sum_dy_x[channel] / count * inv_std(channel).powi(2)) as f32;
    }
    repeat(mean_dy, channels);
    repeat(slope, channels);
    let masked = !writes && matches!(input.mask, Mask::FromInput(_));
    let backward = Backward { affine, mean_dy, slope, masked, ceiling: input.ceiling };
    let dy = dresidual.as_deref().or(input.dy.filter(|_| !writes));
    apply_gradient((pool, isa), backward, (dy, x), dx);
}

vectorized! {
    fn add_gradients<E: Float>(dy: &[E], x: &[E], affine: Affine<'_>, strip: Strip, sums: &mut Sums<2>) {
        add_rows(strip, ([dy, x], [affine.mean; 3]), sums, |[dy, x], [mean, ..]| [dy, dy * (x - mean)]);
    }
}

vectorized! {
    fn add_masked_gradients<E: Float>(dy: &[E], x: &[E], cut: (Affine<'_>, f32), strip: Strip, sums: &mut Sums<2>) {
        let (affine, ceiling) = cut;
        let parameters = [affine.mean, affine.factor, affine.beta];
        add_rows(strip, ([dy, x], parameters), sums, |[dy, x], [mean, factor, beta]| {
            let dy = passed(dy, (x - mean) * factor + beta, ceiling);
            [dy, dy * (x - mean)]
        });
    }
}

/// The sums of the first pass, which also writes `passed`: dy where the ReLU let it pass. Where there is no dy, `passed` holds it.
fn sum_passed<'a, E: Float>(
    (pool, isa): (&Pool, Isa),
    shape: (usize, usize),
    (input, affine): (&BatchNormGrad<'_, E>, Affine<'_>),
    passed: &mut [E],
    sums: &'a mut Vec<f64>,
) -> &'a [f64] {
    assert_eq!(passed.len(), input.x.len(), "batch-norm keeps the shape");
    let base = SendPointer(passed.as_mut_ptr());
    sum_columns(pool, shape, sums, |strip, sums| {
        for row in strip.rows() {
            assert!(row.end <= input.x.len());
            // SAFETY: the row lies in `passed`, which is borrowed mutably until `sum_columns` returns, and each element is in
            // one row of one strip.
            let passed = unsafe { std::slice::from_raw_parts_mut(base.get().add(row.start), row.len()) };
            let affine = affine.part(strip.column(), row.len());
            let (dy, x) = (input.dy.map(|dy| &dy[row.clone()]), &input.x[row.clone()]);
            let mask = match input.mask {
                Mask::FromOutput(y) => Mask::FromOutput(&y[row]),
                other => other,
            };
            pass_row(isa, (dy, x, mask), (affine, input.ceiling), passed, sums);
        }
    })
}

/// The pieces of dy, x and the mask that belong to some elements.
type Saved<'a, E> = (Option<&'a [E]>, &'a [E], Mask<'a, E>);

vectorized! {
    fn pass_row<E: Float>(saved: Saved<'_, E>, cut: (Affine<'_>, f32), kept: &mut [E], sums: &mut Sums<2>) {
        let ((dy, x, mask), (affine, ceiling), length) = (saved, cut, kept.len().min(STRIP));
        if let Some(dy) = dy {
            kept.copy_from_slice(dy);
        }
        let ([by_beta, by_gamma], kept) = (sums, &mut kept[..length]);
        let (by_beta, by_gamma) = (&mut by_beta[..length], &mut by_gamma[..length]);
        let (x, mean) = (&x[..length], &affine.mean[..length]);
        match mask {
            Mask::None => {}
            Mask::FromInput(_) => {
                let (factor, beta) = (&affine.factor[..length], &affine.beta[..length]);
                for index in 0..length {
                    let value = (x[index].to_f32() - mean[index]) * factor[index] + beta[index];
                    kept[index] = E::from_f32(passed(kept[index].to_f32(), value, ceiling));
                }
            }
            Mask::FromOutput(y) => {
                let y = &y[..length];
                for index in 0..length {
                    kept[index] = E::from_f32(passed(kept[index].to_f32(), y[index].to_f32(), ceiling));
                }
            }
        }
        for index in 0..length {
            let dy = kept[index].to_f32();
            by_beta[index] += dy;
            by_gamma[index] += dy * (x[index].to_f32() - mean[index]);
        }
    }
}

/// dx = factor·(dy − mean of dy − slope·(x − mean)), each per channel and widened.
#[derive(Clone, Copy)]
struct Backward<'a> {
    affine: Affine<'a>,
    mean_dy: &'a [f32],
    slope: &'a [f32],
    /// Whether a ReLU cut dy off where the normalised x is not above zero or not below the ceiling.
    masked: bool,
    ceiling: f32,
}

impl Backward<'_> {
    #[inline(always)]
    fn part(self, start: usize, length: usize) -> Self {
        let (mean_dy, slope) = (&self.mean_dy[start..start + length], &self.slope[start..start + length]);
        Self { affine: self.affine.part(start, length), mean_dy, slope, ..self }
    }

    /// One stretch of dx over which the channels do not wrap; without dy, dx holds it. `mask` takes dy and the normalised x.
    #[inline(always)]
    fn stretch<E: Float>(self, (dy, x): (Option<&[E]>, &[E]), dx: &mut [E], mask: impl Fn(f32, f32) -> f32) {
        let length = dx.len();
        let (x, mean_dy, slope) = (&x[..length], &self.mean_dy[..length], &self.slope[..length]);
        let Affine { mean, factor, beta } = self.affine.part(0, length);
        let value = |index: usize, dy: f32| {
            let centred = x[index].to_f32() - mean[index];
            let dy = mask(dy, centred * factor[index] + beta[index]);
            E::from_f32(factor[index] * (dy - mean_dy[index] - slope[index] * centred))
        };
        match dy {
            Some(dy) => {
                let dy = &dy[..length];
                for index in 0..length {
                    dx[index] = value(index, dy[index].to_f32());
                }
            }
            None => {
                for index in 0..length {
                    dx[index] = value(index, dx[index].to_f32());
                }
            }
        }
    }
}

fn apply_gradient<E: Float>(
    (pool, isa): (&Pool, Isa),
    backward: Backward<'_>,
    (dy, x): (Option<&[E]>, &[E]),
    dx: &mut [E],
) {
    let streams = dy.is_some() && size_of_val(dx) >= stream::BYTES_MIN;
    pool.chunks(dx, GRAIN, |task, dx| {
        let first = task * GRAIN;
        let fill = |start: usize, dx: &mut [E]| {
            let (start, length) = (first + start, dx.len());
            gradient_piece(isa, start, backward, (part(dy, start, length), &x[start..start + length]), dx);
        };
        if streams { stream::in_blocks(isa, dx, fill) } else { fill(0, dx) }
    });
}

vectorized! {
    fn gradient_piece<E: Float>(start: usize, backward: Backward<'_>, saved: (Option<&[E]>, &[E]), dx: &mut [E]) {
        let ((dy, x), period) = (saved, backward.slope.len());
        let (mut offset, mut done) = (start % period, 0);
        while done < dx.len() {
            let length = (period - offset).min(dx.len() - done);
            let (dy, x) = (part(dy, done, length), &x[done..done + length]);
            let (backward, dx) = (backward.part(offset, length), &mut dx[done..done + length]);
            if backward.masked {
                let ceiling = backward.ceiling;
                backward.stretch((dy, x), dx, |dy, value| passed(dy, value, ceiling));
            } else {
                backward.stretch((dy, x), dx, |dy, _| dy);
            }
            (offset, done) = (0, done + length);
        }
    }
}

#[cfg(test)]
mod tests;
