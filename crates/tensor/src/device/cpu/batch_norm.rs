//! Batch normalisation of `[rows, channels]`, with the residual sum and the ReLU that usually follow fused in.
//!
//! Forward: one pass for the statistics, one to apply them. Gradient: one pass for the two sums, one to apply. Every pass
//! reads each tensor once; the bound is memory bandwidth. Statistics are sums of differences from a shift near the mean
//! (the average of a few rows), so that a mean far from zero costs no digits; the sums follow [`super::reduce`].

use super::elementwise::{GRAIN, part, relu, relu_mask};
use super::pool::Pool;
use super::reduce::{STRIP, Strip, Sums, add_rows, sum_columns, widen};
use super::vectorize::vectorized;

/// What the forward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm<'a> {
    /// Input, `[rows, channels]`.
    pub x: &'a [f32],
    /// Number of channels.
    pub channels: usize,
    /// Factor per channel; none is 1.
    pub gamma: Option<&'a [f32]>,
    /// Offset per channel; none is 0.
    pub beta: Option<&'a [f32]>,
    /// Added after the normalisation, `[rows, channels]`.
    pub residual: Option<&'a [f32]>,
    /// Whether a ReLU follows.
    pub relu: bool,
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
pub struct TrainOutput<'a> {
    /// Output, `[rows, channels]`.
    pub y: &'a mut [f32],
    /// Mean of the batch per channel, for the gradient.
    pub mean: &'a mut [f32],
    /// 1 / √(variance + eps) per channel, for the gradient.
    pub inv_std: &'a mut [f32],
    /// Statistics for inference.
    pub running: Running<'a>,
}

/// What the gradient reads.
#[derive(Clone, Copy, Debug)]
pub struct BatchNormGrad<'a> {
    /// Gradient of the output; none when `dx` holds it.
    pub dy: Option<&'a [f32]>,
    /// The forward pass's input.
    pub x: &'a [f32],
    /// The forward pass's output when a ReLU followed, otherwise none.
    pub y: Option<&'a [f32]>,
    /// Factor per channel; none is 1.
    pub gamma: Option<&'a [f32]>,
    /// Mean of the batch per channel.
    pub mean: &'a [f32],
    /// 1 / √(variance + eps) per channel.
    pub inv_std: &'a [f32],
}

/// What the gradient writes.
#[derive(Debug)]
pub struct GradOutput<'a> {
    /// Gradient of the input.
    pub dx: &'a mut [f32],
    /// Gradient of the factor.
    pub dgamma: Option<&'a mut [f32]>,
    /// Gradient of the offset.
    pub dbeta: Option<&'a mut [f32]>,
    /// Gradient of the residual: dy where the ReLU let it pass.
    pub dresidual: Option<&'a mut [f32]>,
}

/// Normalises with the batch's own statistics and updates the running ones.
pub fn train(pool: &Pool, input: &BatchNorm, output: TrainOutput, scratch: &mut Vec<f64>) {
    let (x, channels) = (input.x, input.channels);
    assert!(x.len() >= channels && x.len().is_multiple_of(channels), "batch-norm needs at least one whole row");
    let rows = x.len() / channels;
    let shift = shift_near_the_mean(x, channels);
    let wide = widen(&shift);
    let sums = sum_columns(pool, (rows, channels), scratch, |strip, sums| add_moments(x, &wide, strip, sums));
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
    apply(pool, input, (output.mean, output.inv_std), output.y);
}

/// Normalises with the running statistics.
pub fn infer(pool: &Pool, input: &BatchNorm, (mean, variance): (&[f32], &[f32]), y: &mut [f32]) {
    let inv_std: Vec<f32> = variance.iter().map(|variance| 1.0 / (variance + input.eps).sqrt()).collect();
    apply(pool, input, (mean, &inv_std), y);
}

/// The average of up to 16 rows spread evenly over x.
fn shift_near_the_mean(x: &[f32], channels: usize) -> Vec<f32> {
    let rows = x.len() / channels;
    let samples = rows.min(16);
    let mut shift = vec![0.0; channels];
    for sample in 0..samples {
        let row = &x[sample * rows / samples * channels..][..channels];
        shift.iter_mut().zip(row).for_each(|(shift, x)| *shift += x / samples as f32);
    }
    shift
}

vectorized! {
    fn add_moments(x: &[f32], shift: &[f32], strip: Strip, sums: &mut Sums<2>) {
        add_rows(strip, ([x; 3], shift), sums, |[x, ..], shift| [x - shift, (x - shift) * (x - shift)]);
    }
}

fn apply(pool: &Pool, input: &BatchNorm, (mean, inv_std): (&[f32], &[f32]), y: &mut [f32]) {
    assert!(input.x.len() == y.len() && input.residual.is_none_or(|residual| residual.len() == y.len()));
    let gamma = |channel: usize| input.gamma.map_or(1.0, |gamma| gamma[channel]);
    let factor: Vec<f32> = inv_std.iter().enumerate().map(|(channel, inv_std)| gamma(channel) * inv_std).collect();
    let beta = input.beta.map_or_else(|| vec![0.0; input.channels], <[f32]>::to_vec);
    let (mean, factor, beta) = (widen(mean), widen(&factor), widen(&beta));
    let affine = Affine { mean: &mean, factor: &factor, beta: &beta };
    pool.chunks(y, GRAIN, |task, y| {
        let (start, length) = (task * GRAIN, y.len());
        let x = &input.x[start..start + length];
        apply_piece(start, affine, x, part(input.residual, start, length), input.relu, y);
    });
}

/// y = (x − mean)·factor + beta, each per channel and widened.
#[derive(Clone, Copy)]
struct Affine<'a> {
    mean: &'a [f32],
    factor: &'a [f32],
    beta: &'a [f32],
}

impl<'a> Affine<'a> {
    #[inline(always)]
    fn part(self, start: usize, length: usize) -> Self {
        let part = |whole: &'a [f32]| &whole[start..start + length];
        Self { mean: part(self.mean), factor: part(self.factor), beta: part(self.beta) }
    }

    /// One stretch of y over which the channels do not wrap; `finish` takes the normalised value and the residual.
    #[inline(always)]
    fn stretch(self, (x, residual): (&[f32], &[f32]), y: &mut [f32], finish: impl Fn(f32, f32) -> f32) {
        let length = y.len();
        let (x, residual) = (&x[..length], &residual[..length]);
        let (mean, factor, beta) = (&self.mean[..length], &self.factor[..length], &self.beta[..length]);
        for index in 0..length {
            let value = (x[index] - mean[index]) * factor[index] + beta[index];
            y[index] = finish(value, residual[index]);
        }
    }
}

vectorized! {
    fn apply_piece(start: usize, affine: Affine<'_>, x: &[f32], residual: Option<&[f32]>, with_relu: bool, y: &mut [f32]) {
        let period = affine.mean.len();
        let (mut offset, mut done) = (start % period, 0);
        while done < y.len() {
            let length = (period - offset).min(y.len() - done);
            let (affine, x) = (affine.part(offset, length), &x[done..done + length]);
            let y = &mut y[done..done + length];
            match (part(residual, done, length), with_relu) {
                (None, false) => affine.stretch((x, x), y, |value, _| value),
                (None, true) => affine.stretch((x, x), y, |value, _| relu(value)),
                (Some(residual), false) => affine.stretch((x, residual), y, |value, residual| value + residual),
                (Some(residual), true) => affine.stretch((x, residual), y, |value, residual| relu(value + residual)),
            }
            (offset, done) = (0, done + length);
        }
    }
}

/// The gradient of [`train`].
pub fn gradient(pool: &Pool, input: &BatchNormGrad, output: GradOutput, scratch: &mut Vec<f64>) {
    let channels = input.mean.len();
    let (x, length) = (input.x, input.x.len());
    assert!(length >= channels && length.is_multiple_of(channels), "batch-norm needs at least one whole row");
    assert!(output.dx.len() == length && input.y.is_none_or(|y| y.len() == length));
    let count = (length / channels) as f64;
    let wide_mean = widen(input.mean);
    let dy = input.dy.unwrap_or(output.dx);
    let sums = sum_columns(pool, (length / channels, channels), scratch, |strip, sums| match input.y {
        Some(y) => add_masked_gradients(dy, x, y, &wide_mean, strip, sums),
        None => add_gradients(dy, x, &wide_mean, strip, sums),
    });
    let (sum_dy, sum_dy_x) = sums.split_at(channels);
    if let Some(dbeta) = output.dbeta {
        dbeta.iter_mut().zip(sum_dy).for_each(|(dbeta, &sum)| *dbeta = sum as f32);
    }
    let inv_std = input.inv_std;
    if let Some(dgamma) = output.dgamma {
        (0..channels).for_each(|channel| dgamma[channel] = (sum_dy_x[channel] * f64::from(inv_std[channel])) as f32);
    }
    let per_channel = |value: &dyn Fn(usize) -> f32| (0..channels).map(value).collect::<Vec<f32>>();
    let factor = per_channel(&|channel| input.gamma.map_or(1.0, |gamma| gamma[channel]) * inv_std[channel]);
    let mean_dy = per_channel(&|channel| (sum_dy[channel] / count) as f32);
    let slope = per_channel(&|channel| (sum_dy_x[channel] / count * f64::from(inv_std[channel]).powi(2)) as f32);
    let parameters =
        Backward { mean: &wide_mean, factor: &widen(&factor), mean_dy: &widen(&mean_dy), slope: &widen(&slope) };
    let piece = |task: usize, dx: &mut [f32], dresidual: Option<&mut [f32]>| {
        let (start, length) = (task * GRAIN, dx.len());
        let saved = (part(input.dy, start, length), &x[start..start + length], part(input.y, start, length));
        gradient_piece(start, parameters, saved, dx, dresidual);
    };
    match output.dresidual {
        Some(dresidual) => {
            pool.chunks2((output.dx, GRAIN), (dresidual, GRAIN), |task, dx, dresidual| {
                piece(task, dx, Some(dresidual))
            });
        }
        None => pool.chunks(output.dx, GRAIN, |task, dx| piece(task, dx, None)),
    }
}

vectorized! {
    fn add_gradients(dy: &[f32], x: &[f32], mean: &[f32], strip: Strip, sums: &mut Sums<2>) {
        add_rows(strip, ([dy, x, x], mean), sums, |[dy, x, _], mean| [dy, dy * (x - mean)]);
    }
}

vectorized! {
    fn add_masked_gradients(dy: &[f32], x: &[f32], y: &[f32], mean: &[f32], strip: Strip, sums: &mut Sums<2>) {
        add_rows(strip, ([dy, x, y], mean), sums, |[dy, x, y], mean| {
            let dy = relu_mask(dy, y);
            [dy, dy * (x - mean)]
        });
    }
}

/// dx = factor·(dy − mean of dy − slope·(x − mean)), each per channel and widened.
#[derive(Clone, Copy)]
struct Backward<'a> {
    mean: &'a [f32],
    factor: &'a [f32],
    mean_dy: &'a [f32],
    slope: &'a [f32],
}

/// dy where the ReLU let it pass; all of it where none followed.
#[inline(always)]
fn mask<'a>(dy: &[f32], y: Option<&[f32]>, masked: &'a mut [f32]) -> &'a [f32] {
    match y {
        Some(y) => {
            for (masked, (&dy, &y)) in masked.iter_mut().zip(dy.iter().zip(y)) {
                *masked = relu_mask(dy, y);
            }
        }
        None => masked.copy_from_slice(dy),
    }
    masked
}

/// The pieces of dy, x and y that belong to a task.
type Saved<'a> = (Option<&'a [f32]>, &'a [f32], Option<&'a [f32]>);

vectorized! {
    fn gradient_piece(start: usize, p: Backward<'_>, saved: Saved<'_>, dx: &mut [f32], dresidual: Option<&mut [f32]>) {
        let ((dy, x, y), period) = (saved, p.mean.len());
        let mut dresidual = dresidual;
        let mut masked = [0.0; STRIP];
        let (mut offset, mut done) = (start % period, 0);
        while done < dx.len() {
            let length = (period - offset).min(dx.len() - done).min(STRIP);
            let (here, there) = (done..done + length, offset..offset + length);
            let dx = &mut dx[here.clone()];
            let dy = match (part(dy, done, length), part(y, done, length)) {
                (Some(dy), None) => dy,
                (dy, y) => mask(dy.unwrap_or(dx), y, &mut masked[..length]),
            };
            if let Some(dresidual) = &mut dresidual {
                dresidual[here.clone()].copy_from_slice(dy);
            }
            let x = &x[here];
            let (mean, factor) = (&p.mean[there.clone()], &p.factor[there.clone()]);
            let (mean_dy, slope) = (&p.mean_dy[there.clone()], &p.slope[there]);
            for index in 0..length {
                dx[index] = factor[index] * (dy[index] - mean_dy[index] - slope[index] * (x[index] - mean[index]));
            }
            (offset, done) = ((offset + length) % period, done + length);
        }
    }
}

#[cfg(test)]
mod tests;
