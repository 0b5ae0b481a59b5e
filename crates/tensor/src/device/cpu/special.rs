//! Exponential, tanh, sigmoid and the two GELUs in forms that vectorise: no branches, no calls, no tables.
//!
//! Each is good to about 1e-6 relative (the exponential to 2 ulp), which the tests hold against f64. NaN stays NaN.
//! Every function is `#[inline(always)]`, so that it takes the instruction set of the kernel around it.

/// Adding this to a small number leaves its nearest integer in the low bits of the mantissa.
const ROUND: f32 = 12_582_912.0;

/// eˣ. Results below 2⁻¹²⁵ become 0.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // x = n·ln 2 + r with |r| ≤ ln 2 / 2; ln 2 in two parts, the first short enough that n times it is exact.
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + coefficient;
    }
    let fraction = p * (r * r) + r + 1.0;
    // 2ⁿ⁻¹ and a doubling, so that results up to the largest number are reached.
    let half_power = f32::from_bits(shifted.to_bits().wrapping_add(126) << 23);
    let value = fraction * half_power * 2.0;
    let value = if x > 88.722_84 { f32::INFINITY } else { value };
    if x < -86.643 { 0.0 } else { value }
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Hyperbolic tangent: an odd polynomial near 0 (Cephes' coefficients), the exponential elsewhere.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let square = x * x;
    let mut p = -5.704_988_7e-3;
    for coefficient in [2.063_909e-2, -5.373_971_6e-2, 0.133_314_42, -0.333_332_8] {
        p = p * square + coefficient;
    }
    let near = p * square * x + x;
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

/// Φ(x), the normal distribution's cumulative function, and its density without the 1/√(2π).
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    let t = 1.0 / (1.0 + 0.247_487_37 * x.abs());
    // erfc(z)·exp(z²) for z = |x|/√2 as t times a polynomial in t = 1/(1 + 0.35 z): interpolated at Chebyshev nodes over
    // z in 0..10, relative error 1e-8.
    let mut p = 3.665_473e-2;
    let coefficients =
        [-0.149_543_54, 0.159_641_22, 1.045_609_3e-3, 6.340_511e-2, 0.158_554_69, 0.146_915_78, 0.188_806_4];
    for coefficient in coefficients {
        p = p * t + coefficient;
    }
    p = (p * t + 0.197_030_74) * t + 0.197_489_27;
    let density = exp(-0.5 * x * x);
    let tail = 0.5 * density * (p * t);
    (if x > 0.0 { 1.0 - tail } else { tail }, density)
}

/// Beyond this distance from 0 both GELUs are x or nothing, in f32.
const FAR: f32 = 13.0;

#[inline(always)]
fn not_below(x: f32) -> f32 {
    if x < -FAR { -FAR } else { x }
}

#[inline(always)]
fn within(x: f32) -> f32 {
    let x = not_below(x);
    if x > FAR { FAR } else { x }
}

/// x·Φ(x).
#[inline(always)]
pub(super) fn gelu(x: f32) -> f32 {
    let x = not_below(x);
    x * normal(x).0
}

/// The derivative of [`gelu`] at x.
#[inline(always)]
pub(super) fn gelu_slope(x: f32) -> f32 {
    const INV_SQRT_TAU: f32 = 0.398_942_3;
    let x = within(x);
    let (phi, density) = normal(x);
    phi + x * density * INV_SQRT_TAU
}

const SQRT_8_OVER_PI: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

/// GELU's tanh form: x·σ(2u) with u = √(2/π)·(x + 0.044715·x³), the same as x·(1 + tanh u)/2 without its cancellation.
#[inline(always)]
pub(super) fn gelu_tanh(x: f32) -> f32 {
    let x = not_below(x);
    x * sigmoid(SQRT_8_OVER_PI * x * (1.0 + CUBIC * x * x))
}

/// The derivative of [`gelu_tanh`] at x.
#[inline(always)]
pub(super) fn gelu_tanh_slope(x: f32) -> f32 {
    let x = within(x);
    let square = x * x;
    let gate = sigmoid(SQRT_8_OVER_PI * x * (1.0 + CUBIC * square));
    gate + x * gate * (1.0 - gate) * SQRT_8_OVER_PI * (1.0 + 3.0 * CUBIC * square)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::check::erf;

    fn worst(function: impl Fn(f32) -> f32, reference: impl Fn(f64) -> f64, reach: f32) -> f64 {
        (-20_000..=20_000)
            .map(|step| step as f32 / 20_000.0 * reach)
            .map(|x| (f64::from(function(x)), reference(f64::from(x))))
            .map(|(value, truth)| (value - truth).abs() / truth.abs().max(1e-30))
            // `max` would pass over a NaN.
            .fold(0.0, |worst, off| if off.is_nan() { f64::INFINITY } else { off.max(worst) })
    }

    #[test]
    fn functions_are_accurate_over_their_range() {
        assert!(worst(exp, f64::exp, 60.0) < 2e-7);
        assert!(worst(tanh, f64::tanh, 30.0) < 3e-7);
        assert!(worst(sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 60.0) < 3e-7);
        assert!(worst(gelu, |x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt())), 5.0) < 2e-6);
        let tanh_form = |x: f64| 0.5 * x * (1.0 + (0.797_884_560_8 * (x + 0.044715 * x * x * x)).tanh());
        assert!(worst(gelu_tanh, tanh_form, 4.0) < 3e-6);
    }

    #[test]
    fn ends_of_the_range_are_exact_and_nan_stays() {
        assert_eq!([exp(f32::NEG_INFINITY), exp(-200.0), exp(0.0), exp(f32::INFINITY)], [0.0, 0.0, 1.0, f32::INFINITY]);
        assert!((exp(88.5) / 88.5f64.exp() as f32 - 1.0).abs() < 1e-6);
        assert_eq!([tanh(-50.0), tanh(0.0), tanh(f32::INFINITY)], [-1.0, 0.0, 1.0]);
        assert_eq!([gelu(40.0), gelu_tanh(1e30), gelu_slope(1e30), gelu_tanh_slope(1e30)], [40.0, 1e30, 1.0, 1.0]);
        for function in [gelu, gelu_slope, gelu_tanh, gelu_tanh_slope] {
            assert!(function(f32::NEG_INFINITY).abs() < 1e-35);
        }
        for function in [exp, tanh, sigmoid, gelu, gelu_slope, gelu_tanh, gelu_tanh_slope] {
            assert!(function(f32::NAN).is_nan());
        }
    }
}
