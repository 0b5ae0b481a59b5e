//! What the kernels' tests share: inputs, closeness, finite differences, and "the same bits on any number of threads".

use super::context::Context;
use super::isa::Isa;
use super::pool::Pool;
use super::scratch::Scratch;
use paceline_system::random::Random;

/// Numbers between −2 and 2, the same for the same seed.
pub(super) fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(&[seed]);
    (0..count).map(|_| random.range(-2.0, 2.0)).collect()
}

/// `values` as f64.
pub(super) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// Fails unless every value is within `tolerance`, relative to the largest expected magnitude (at least 1).
pub(super) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    let scale = expected.iter().fold(1.0, |scale: f64, value| scale.max(value.abs()));
    for (index, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(actual) - expected).abs();
        assert!(error <= tolerance * scale, "element {index}: {actual} instead of {expected}");
    }
}

/// Central differences of `function` at `point`.
pub(super) fn slope(point: &[f32], function: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut point = wide(point);
    (0..point.len())
        .map(|index| {
            let middle = point[index];
            point[index] = middle + STEP;
            let above = function(&point);
            point[index] = middle - STEP;
            let below = function(&point);
            point[index] = middle;
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

/// Σ aᵢ·bᵢ: turns an output into a scalar whose gradient with respect to the output is `weights`.
pub(super) fn weigh(values: &[f64], weights: &[f32]) -> f64 {
    values.iter().zip(weights).map(|(value, &weight)| value * f64::from(weight)).sum()
}

/// Runs `kernel` once with these threads and instructions.
pub(super) fn with<T>(threads: usize, isa: Isa, kernel: impl FnOnce(&mut Context<'_>) -> T) -> T {
    kernel(&mut Context { pool: &Pool::new(threads), isa, scratch: &mut Scratch::new() })
}

/// Runs `kernel` once on one thread with the best instructions.
pub(super) fn once<T>(kernel: impl FnOnce(&mut Context<'_>) -> T) -> T {
    with(1, Isa::best(), kernel)
}

/// Runs a kernel on 1, 2 and 3 threads and at every instruction set of this processor; all must give the same bits.
/// Returns them.
pub(super) fn same_bits(kernel: impl Fn(&mut Context<'_>) -> Vec<f32>) -> Vec<f32> {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let expected = once(&kernel);
    for threads in [2, 3] {
        assert!(bits(&with(threads, Isa::best(), &kernel)) == bits(&expected), "{threads} threads change the result");
    }
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        assert!(bits(&with(1, isa, &kernel)) == bits(&expected), "{isa:?} changes the result");
    }
    expected
}

/// The error function by its Taylor series (small arguments) or continued fraction (large ones).
pub(super) fn erf(x: f64) -> f64 {
    if x.abs() < 3.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..120 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return sum * 2.0 / std::f64::consts::PI.sqrt();
    }
    let z = x.abs();
    let fraction = (1..200).rev().fold(z, |fraction, n| z + f64::from(n) / 2.0 / fraction);
    (1.0 - (-z * z).exp() / (fraction * std::f64::consts::PI.sqrt())).copysign(x)
}
