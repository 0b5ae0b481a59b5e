//! Normalisations by their definitions.

use paceline_tensor::op::{BatchNorm, Rectifier};

use super::array::Array;

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

/// The mean square distance from the mean.
fn variance(numbers: &[f64]) -> f64 {
    let mean = mean(numbers);
    numbers.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / numbers.len() as f64
}

/// The mean and the variance over n of each channel.
pub fn moments(x: &Array) -> [Array; 2] {
    let column = |c: usize| x.data.iter().copied().skip(c).step_by(x.last()).collect::<Vec<f64>>();
    [mean, variance].map(|of| Array::from_fn(&[x.last()], |index| of(&column(index[0]))))
}

/// y, mean, 1/deviation, and then the new running mean and variance. As PyTorch does it, the batch is normalised by the
/// variance over n and the running variance takes the one over n − 1.
pub fn batch_norm(norm: &BatchNorm, inputs: &[&Array]) -> Vec<Array> {
    let x = inputs[0];
    let channels = x.last();
    let column = |c: usize| x.data.iter().copied().skip(c).step_by(channels).collect::<Vec<f64>>();
    let per_channel = |of: &dyn Fn(usize) -> f64| Array::from_fn(&[channels], |index| of(index[0]));
    let means = per_channel(&|c| mean(&column(c)));
    let inverses = per_channel(&|c| 1.0 / (variance(&column(c)) + f64::from(norm.epsilon)).sqrt());
    let y = apply(norm, inputs, &means, &inverses);
    let momentum = f64::from(norm.momentum);
    let running_mean = per_channel(&|c| (1.0 - momentum) * inputs[2].data[c] + momentum * means.data[c]);
    let count = x.rows() as f64;
    let running_variance = per_channel(&|c| {
        (1.0 - momentum) * inputs[3].data[c] + momentum * variance(&column(c)) * count / (count - 1.0).max(1.0)
    });
    vec![y, means, inverses, running_mean, running_variance]
}

/// y from the running statistics.
pub fn batch_norm_inference(norm: &BatchNorm, inputs: &[&Array]) -> Array {
    let inverses = inputs[3].map(|variance| 1.0 / (variance + f64::from(norm.epsilon)).sqrt());
    apply(norm, inputs, inputs[2], &inverses)
}

/// y from these means and inverse deviations.
pub fn apply(norm: &BatchNorm, inputs: &[&Array], means: &Array, inverses: &Array) -> Array {
    let x = inputs[0];
    let mut y = x.clone();
    for (position, y) in y.data.iter_mut().enumerate() {
        let c = position % x.last();
        let gamma = if norm.scale { inputs[4].data[c] } else { 1.0 };
        *y = (*y - means.data[c]) * inverses.data[c] * gamma + inputs[1].data[c];
        if norm.residual {
            *y += inputs[inputs.len() - 1].data[position];
        }
        if norm.rectifier != Rectifier::None {
            *y = y.max(0.0).min(f64::from(norm.rectifier.ceiling()));
        }
    }
    y
}

/// y, mean and 1/deviation of each row.
pub fn layer_norm(epsilon: f32, x: &Array, gamma: &Array, beta: &Array) -> Vec<Array> {
    let rows: Vec<&[f64]> = x.data.chunks(x.last()).collect();
    let means = Array::new(&[rows.len()], rows.iter().map(|row| mean(row)).collect());
    let inverse = |row: &&[f64]| 1.0 / (variance(row) + f64::from(epsilon)).sqrt();
    let inverses = Array::new(&[rows.len()], rows.iter().map(inverse).collect());
    let mut y = x.clone();
    for (position, y) in y.data.iter_mut().enumerate() {
        let (row, column) = (position / x.last(), position % x.last());
        *y = (*y - means.data[row]) * inverses.data[row] * gamma.data[column] + beta.data[column];
    }
    vec![y, means, inverses]
}
