//! Norms of parts of a flat buffer, and clipping by them.
//!
//! Squares are summed in f64, in pieces of fixed size whose sums are added in order: the same bits on any number of
//! threads.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::piece::PIECE;
use super::{Runner, Segment};

/// √Σg² over all the segments.
pub fn global_norm(gradients: &[f32], segments: &[Segment], run: Runner<'_>) -> f64 {
    let ranges: Vec<_> = segments.iter().map(|segment| segment.range.clone()).collect();
    squares(gradients, &ranges, run).into_iter().sum::<f64>().sqrt()
}

/// What to multiply gradients of this norm by so that it is at most `norm_max`, or none if it already is. As PyTorch's
/// `clip_grad_norm_`, which adds 1e-6 to the norm. A norm that is not finite is left for the caller to notice.
pub fn clip_factor(norm: f64, norm_max: f64) -> Option<f32> {
    let factor = norm_max / (norm + 1e-6);
    (norm.is_finite() && factor < 1.0).then_some(factor as f32)
}

/// Multiplies the segments of `gradients` by `factor`.
pub fn scale(gradients: &mut [f32], segments: &[Segment], factor: f32) {
    for segment in segments {
        gradients[segment.range.clone()].iter_mut().for_each(|gradient| *gradient *= factor);
    }
}

/// Σx² of each range.
pub fn squares(values: &[f32], ranges: &[Range<usize>], run: Runner<'_>) -> Vec<f64> {
    let pieces: Vec<(usize, Range<usize>)> = ranges
        .iter()
        .enumerate()
        .flat_map(|(index, range)| {
            range.clone().step_by(PIECE).map(move |start| (index, start..(start + PIECE).min(range.end)))
        })
        .collect();
    let sums: Vec<AtomicU64> = pieces.iter().map(|_| AtomicU64::new(0)).collect();
    run(pieces.len(), &|task| {
        sums[task].store(sum_of_squares(&values[pieces[task].1.clone()]).to_bits(), Ordering::Relaxed);
    });
    let mut totals = vec![0.0; ranges.len()];
    for ((index, _), sum) in pieces.iter().zip(&sums) {
        totals[*index] += f64::from_bits(sum.load(Ordering::Relaxed));
    }
    totals
}

/// Eight running sums, so that the loop vectorises without changing the order of its additions.
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (groups, rest) = values.as_chunks::<8>();
    for group in groups {
        for (lane, &value) in lanes.iter_mut().zip(group) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|&value| f64::from(value) * f64::from(value)).sum::<f64>()
}
