//! Batch normalisation of `[rows, channels]`, with the residual sum and the ReLU that usually follow fused in.
//!
//! Forward: one pass for the statistics, unless the convolution that made x took them (`moments.rs`), one to apply them. Gradient: one pass for the two sums, one to apply. The bound is
//! memory bandwidth, so what counts is streams of the tensor's size: forward reads x twice and writes y. The gradient reads
//! dy and x twice and writes dx; it finds a ReLU's mask from x again, by the forward pass's own arithmetic. Where a residual
//! was added that is not possible: then the first pass reads y and writes what the ReLU lets pass, which is the residual's
//! gradient, and the second reads that instead of dy.
//!
//! The first pass goes from the last rows to the first, because whoever wrote the tensor did so in order and its end is still
//! in the caches; the second goes the other way. Statistics are sums of differences from a shift near the mean
//! (the average of a few rows), so that a mean far from zero costs no digits; the sums follow [`super::reduce`].
//!
//! A batch may have parts elsewhere (`shared.rs`): between the two passes the sums per channel are then added up with theirs.
#![allow(unsafe_code)]

mod passes;
mod shared;

use super::context::Context;
use super::elementwise::GRAIN;
use super::isa::Isa;
use super::pool::{Pool, SendPointer};
use super::reduce::{sum_columns, wide_length, widen};
use super::rows;
use super::scratch::Scratch;
use crate::dtype::Float;
use crate::op::Rectifier;

pub use shared::Others;

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
    /// The mean and the variance (over n) of each channel of x, where they are known.
    pub statistics: Option<(&'a [f32], &'a [f32])>,
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

/// Normalises with the batch's own statistics and updates the running ones. `others` have the other parts of the batch.
pub fn train<E: Float>(
    context: &mut Context<'_>,
    input: &BatchNorm<'_, E>,
    output: TrainOutput<'_, E>,
    others: Option<&mut Others<'_>>,
) {
    let (x, channels) = (input.x, input.beta.len());
    assert!(x.len() >= channels && x.len().is_multiple_of(channels), "batch-norm needs at least one whole row");
    let (isa, mut count) = (context.isa, (x.len() / channels) as f64);
    let Scratch { floats, sums, numbers, .. } = &mut *context.scratch;
    if let Some((mean, variance)) = input.statistics {
        sums.clear();
        sums.extend(mean.iter().chain(variance).map(|&statistic| f64::from(statistic)));
    } else {
        add_up((context.pool, isa), x, channels, floats, sums);
    }
    let (means, variances) = sums[..2 * channels].split_at_mut(channels);
    if let Some(others) = others {
        count = shared::statistics(others, count, (means, variances), numbers);
    }
    let running = output.running;
    // One value has no variance that could be remembered.
    let momentum = if count > 1.0 { f64::from(running.momentum) } else { 0.0 };
    let blend = |old: f32, new: f64| ((1.0 - momentum) * f64::from(old) + momentum * new) as f32;
    for channel in 0..channels {
        let (mean, variance) = (means[channel], variances[channel]);
        output.mean[channel] = mean as f32;
        output.inv_std[channel] = (1.0 / (variance + f64::from(input.eps)).sqrt()) as f32;
        running.mean[channel] = blend(running.mean[channel], mean);
        running.variance[channel] = blend(running.variance[channel], variance * count / (count - 1.0).max(1.0));
    }
    let inv_std = output.inv_std;
    let affine = Affine::new(floats, input.gamma, output.mean, |channel| inv_std[channel], input.beta);
    apply((context.pool, isa), input, affine, output.y);
}

/// The mean and the variance (over n) of each channel of x, which has as many as `mean`.
pub(super) fn statistics<E: Float>(context: &mut Context<'_>, x: &[E], mean: &mut [f32], variance: &mut [f32]) {
    let channels = mean.len();
    let Scratch { floats, sums, .. } = &mut *context.scratch;
    add_up((context.pool, context.isa), x, channels, floats, sums);
    for channel in 0..channels {
        (mean[channel], variance[channel]) = (sums[channel] as f32, sums[channels + channel] as f32);
    }
}

/// The means of all channels of x, and then the variances, at the front of `sums`.
fn add_up<E: Float>((pool, isa): (&Pool, Isa), x: &[E], channels: usize, floats: &mut Vec<f32>, sums: &mut Vec<f64>) {
    let rows = x.len() / channels;
    let [shift] = wide_rows(floats, channels);
    shift_near_the_mean(x, channels, shift);
    sum_columns(pool, (rows, channels), sums, |strip, sums| {
        passes::add_moments(isa, x, &shift[strip.column..], strip.rows, sums);
    });
    let (count, (means, variances)) = (rows as f64, sums[..2 * channels].split_at_mut(channels));
    for channel in 0..channels {
        let offset = means[channel] / count;
        means[channel] = f64::from(shift[channel]) + offset;
        variances[channel] = (variances[channel] / count - offset * offset).max(0.0);
    }
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

/// Normalises once more with the statistics that [`train`] gave out: the same bits.
pub fn again<E: Float>(
    context: &mut Context<'_>,
    input: &BatchNorm<'_, E>,
    (mean, inv_std): (&[f32], &[f32]),
    y: &mut [E],
) {
    let affine = Affine::new(&mut context.scratch.floats, input.gamma, mean, |channel| inv_std[channel], input.beta);
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

    /// From this column on.
    fn from(self, column: usize) -> Self {
        Self { mean: &self.mean[column..], factor: &self.factor[column..], beta: &self.beta[column..] }
    }
}

/// Elements of a task: whole rows of widened columns.
fn task_elements(period: usize) -> usize {
    period * (GRAIN / period).max(1)
}

fn apply<E: Float>((pool, isa): (&Pool, Isa), input: &BatchNorm<'_, E>, affine: Affine<'_>, y: &mut [E]) {
    assert!(input.x.len() == y.len() && input.residual.is_none_or(|residual| residual.len() == y.len()));
    let task_elements = task_elements(affine.mean.len());
    let past = size_of_val(y) >= rows::PAST_BYTES_MIN && rows::may_pass(isa, y, affine.mean.len());
    let body = |task: usize, y: &mut [E]| {
        let elements = task * task_elements..task * task_elements + y.len();
        let residual = input.residual.map(|residual| &residual[elements.clone()]);
        passes::apply(isa, affine, (&input.x[elements], residual), input.rectifier, y, past);
    };
    // The first to read x after it was written begins with the end of it.
    if input.statistics.is_some() {
        pool.chunks_backwards(y, task_elements, body);
    } else {
        pool.chunks(y, task_elements, body);
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

/// The gradient of [`train`]; those of the factor and the offset are of this part of the batch.
pub fn gradient<E: Float>(
    context: &mut Context<'_>,
    input: &BatchNormGrad<'_, E>,
    output: GradOutput<'_, E>,
    others: Option<&mut Others<'_>>,
) {
    let (x, channels, isa) = (input.x, input.mean.len(), context.isa);
    let GradOutput { dx, dgamma, dbeta, dresidual } = output;
    assert!(x.len() >= channels && x.len().is_multiple_of(channels), "batch-norm needs at least one whole row");
    assert!(dx.len() == x.len() && input.dy.is_none_or(|dy| dy.len() == x.len()), "batch-norm keeps the shape");
    let Scratch { floats, sums: all_sums, numbers, .. } = &mut *context.scratch;
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
    if writes {
        let passed = dresidual.as_deref_mut().unwrap_or(dx);
        sum_passed((pool, isa), shape, (input, affine), passed, all_sums);
    } else {
        let dy = input.dy.unwrap_or(dx);
        let masked = matches!(input.mask, Mask::FromInput(_));
        sum_columns(pool, shape, all_sums, |strip, sums| {
            let affine = affine.from(strip.column);
            passes::add_gradients(isa, (dy, x), masked.then_some(input.ceiling), affine, strip.rows, sums);
        });
    }
    let mut count = shape.0 as f64;
    let (sum_dy, sum_dy_x) = all_sums[..2 * channels].split_at(channels);
    dbeta.iter_mut().zip(sum_dy).for_each(|(dbeta, &sum)| *dbeta = sum as f32);
    let inv_std = |channel: usize| f64::from(input.inv_std[channel]);
    if let Some(dgamma) = dgamma {
        (0..channels).for_each(|channel| dgamma[channel] = (sum_dy_x[channel] * inv_std(channel)) as f32);
    }
    if let Some(others) = others {
        count = shared::sums(others, count, &mut all_sums[..2 * channels], numbers);
    }
    let (sum_dy, sum_dy_x) = all_sums[..2 * channels].split_at(channels);
    for channel in 0..channels {
        mean_dy[channel] = (sum_dy[channel] / count) as f32;
        slope[channel] = (sum_dy_x[channel] / count * inv_std(channel).powi(2)) as f32;
    }
    repeat(mean_dy, channels);
    repeat(slope, channels);
    let ceiling = (!writes && matches!(input.mask, Mask::FromInput(_))).then_some(input.ceiling);
    let backward = Backward { affine, mean_dy, slope, ceiling };
    let dy = dresidual.as_deref().or(input.dy.filter(|_| !writes));
    apply_gradient((pool, isa), backward, (dy, x), dx);
}

/// The sums of the first pass, which also writes `passed`: dy where the ReLU let it pass. Where there is no dy, `passed` holds it.
fn sum_passed<E: Float>(
    (pool, isa): (&Pool, Isa),
    shape: (usize, usize),
    (input, affine): (&BatchNormGrad<'_, E>, Affine<'_>),
    passed: &mut [E],
    sums: &mut Vec<f64>,
) {
    assert_eq!(passed.len(), input.x.len(), "batch-norm keeps the shape");
    assert!(input.dy.is_none_or(|dy| dy.len() == passed.len()), "batch-norm keeps the shape");
    assert!(!matches!(input.mask, Mask::FromOutput(y) if y.len() != passed.len()), "batch-norm keeps the shape");
    let (base, length) = (SendPointer(passed.as_mut_ptr()), passed.len());
    sum_columns(pool, shape, sums, |strip, sums| {
        let affine = affine.from(strip.column);
        // SAFETY: `passed` is borrowed mutably until `sum_columns` returns, has `length` elements as the others do, and each
        // element is in one row of one strip.
        unsafe { passes::keep_gradients(isa, input, affine, (base.get(), length), strip.rows, sums) };
    });
}

/// dx = factor·(dy − mean of dy − slope·(x − mean)), each per channel and widened.
#[derive(Clone, Copy)]
struct Backward<'a> {
    affine: Affine<'a>,
    mean_dy: &'a [f32],
    slope: &'a [f32],
    /// Where a ReLU cut dy off: where the normalised x is not above zero or not below this.
    ceiling: Option<f32>,
}

fn apply_gradient<E: Float>(
    (pool, isa): (&Pool, Isa),
    backward: Backward<'_>,
    (dy, x): (Option<&[E]>, &[E]),
    dx: &mut [E],
) {
    let period = backward.slope.len();
    let task_elements = task_elements(period);
    let past = dy.is_some() && size_of_val(dx) >= rows::PAST_BYTES_MIN && rows::may_pass(isa, dx, period);
    pool.chunks(dx, task_elements, |task, dx| {
        let elements = task * task_elements..task * task_elements + dx.len();
        let dy = dy.map(|dy| &dy[elements.clone()]);
        passes::apply_gradient(isa, backward, (dy, &x[elements]), dx, past);
    });
}

#[cfg(test)]
mod tests;
