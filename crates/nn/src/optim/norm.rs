//! Norms of parts of a flat buffer, and clipping by them.
//!
//! Squares are summed in f64, in pieces of fixed size whose sums are added in order: the same bits on any number of
//! threads.

use super::{Segment, Tools};

/// Elements whose squares are summed by one task.
const PIECE: usize = 16 * 1024;

/// √Σg² over all the segments.
pub fn global_norm(gradients: &[f32], segments: &[Segment], tools: &mut Tools<'_>) -> f64 {
    segments.iter().map(|segment| squares(&gradients[segment.range.clone()], tools)).sum::<f64>().sqrt()
}

/// What to multiply gradients of this norm by so that it is at most `norm_max`, or none if it already is. As PyTorch's
/// `clip_grad_norm_`, which adds 1e-6 to the norm. A norm that is not finite is left for the caller to notice.
pub fn clip_factor(norm: f64, norm_max: f64) -> Option<f32> {
    let factor = norm_max / (norm + 1e-6);
    (norm.is_finite() && factor < 1.0).then_some(factor as f32)
}

/// Multiplies the gradients by `factor`.
pub fn scale(gradients: &mut [f32], factor: f32, tools: &Tools<'_>) {
    tools.cpu.pool().chunks(gradients, PIECE, |_, piece| piece.iter_mut().for_each(|gradient| *gradient *= factor));
}

/// Σx²
pub fn squares(values: &[f32], tools: &mut Tools<'_>) -> f64 {
    tools.sums.clear();
    tools.sums.resize(values.len().div_ceil(PIECE), 0.0);
    tools.cpu.pool().chunks(tools.sums, 1, |task, sum| {
        sum[0] = sum_of_squares(&values[task * PIECE..values.len().min((task + 1) * PIECE)]);
    });
    tools.sums.iter().sum()
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
