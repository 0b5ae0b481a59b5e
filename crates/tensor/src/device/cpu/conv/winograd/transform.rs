//! The maps between images and mapped tiles, a vector of channels at a time.
//!
//! With p² = ½ or 2 for the points p, the even and odd parts of a polynomial at ±p are shared, and each one-dimensional map takes at
//! most 12 multiply-adds. A map of a tile is the one-dimensional map of its columns, then of its rows.
#![allow(unsafe_code)]
// Index loops over constant bounds unroll into registers.
#![allow(clippy::needless_range_loop)]

use std::f32::consts::{FRAC_1_SQRT_2 as A, SQRT_2 as B};

use super::super::super::simd::Simd;
use super::{PATCH, TILE};

/// A one-dimensional map from `N` to `M` vectors.
pub(super) trait Map<S: Simd, const N: usize, const M: usize> {
    /// # Safety
    /// The machine has the instructions of `S`.
    unsafe fn map(x: [S::Vector; N]) -> [S::Vector; M];
}

/// Six pixels of an image to six values: Bᵀ.
pub(super) struct Input;
/// Six sums to four outputs: Aᵀ.
pub(super) struct Output;
/// Four output gradients to six values: A.
pub(super) struct OutputGradient;
/// Three weights to six values: G.
pub(super) struct Weight;
/// Six sums to three weight gradients: Gᵀ.
pub(super) struct WeightGradient;

/// y + factor · x.
#[inline(always)]
unsafe fn plus<S: Simd>(y: S::Vector, factor: f32, x: S::Vector) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe { S::mul_add(x, S::splat(factor), y) }
}

/// factor · x.
#[inline(always)]
unsafe fn times<S: Simd>(factor: f32, x: S::Vector) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe { S::mul_add(x, S::splat(factor), S::splat(0.0)) }
}

impl<S: Simd> Map<S, PATCH, PATCH> for Input {
    #[inline(always)]
    unsafe fn map(x: [S::Vector; PATCH]) -> [S::Vector; PATCH] {
        // SAFETY: the caller's promise.
        unsafe {
            let (even_a, odd_a) = (plus::<S>(x[4], -2.0, x[2]), plus::<S>(x[3], -2.0, x[1]));
            let (even_b, odd_b) = (plus::<S>(x[4], -0.5, x[2]), plus::<S>(x[3], -0.5, x[1]));
            [
                S::add(plus::<S>(x[0], -2.5, x[2]), x[4]),
                plus::<S>(even_a, A, odd_a),
                plus::<S>(even_a, -A, odd_a),
                plus::<S>(even_b, B, odd_b),
                plus::<S>(even_b, -B, odd_b),
                S::add(plus::<S>(x[1], -2.5, x[3]), x[5]),
            ]
        }
    }
}

impl<S: Simd> Map<S, PATCH, TILE> for Output {
    #[inline(always)]
    unsafe fn map(m: [S::Vector; PATCH]) -> [S::Vector; TILE] {
        // SAFETY: the caller's promise.
        unsafe {
            let (sum_a, difference_a) = (S::add(m[1], m[2]), plus::<S>(m[1], -1.0, m[2]));
            let (sum_b, difference_b) = (S::add(m[3], m[4]), plus::<S>(m[3], -1.0, m[4]));
            [
                S::add(m[0], S::add(sum_a, sum_b)),
                plus::<S>(times::<S>(A, difference_a), B, difference_b),
                plus::<S>(times::<S>(0.5, sum_a), 2.0, sum_b),
                plus::<S>(plus::<S>(m[5], 0.5 * A, difference_a), 2.0 * B, difference_b),
            ]
        }
    }
}

impl<S: Simd> Map<S, TILE, PATCH> for OutputGradient {
    #[inline(always)]
    unsafe fn map(d: [S::Vector; TILE]) -> [S::Vector; PATCH] {
        // SAFETY: the caller's promise.
        unsafe {
            let (even_a, odd_a) = (plus::<S>(d[0], 0.5, d[2]), plus::<S>(d[1], 0.5, d[3]));
            let (even_b, odd_b) = (plus::<S>(d[0], 2.0, d[2]), plus::<S>(d[1], 2.0, d[3]));
            [
                d[0],
                plus::<S>(even_a, A, odd_a),
                plus::<S>(even_a, -A, odd_a),
                plus::<S>(even_b, B, odd_b),
                plus::<S>(even_b, -B, odd_b),
                d[3],
            ]
        }
    }
}

impl<S: Simd> Map<S, 3, PATCH> for Weight {
    #[inline(always)]
    unsafe fn map(w: [S::Vector; 3]) -> [S::Vector; PATCH] {
        // SAFETY: the caller's promise.
        unsafe {
            let even_a = times::<S>(-1.0 / 1.5, plus::<S>(w[0], 0.5, w[2]));
            let even_b = times::<S>(1.0 / 6.0, plus::<S>(w[0], 2.0, w[2]));
            [
                w[0],
                plus::<S>(even_a, -A / 1.5, w[1]),
                plus::<S>(even_a, A / 1.5, w[1]),
                plus::<S>(even_b, B / 6.0, w[1]),
                plus::<S>(even_b, -B / 6.0, w[1]),
                w[2],
            ]
        }
    }
}

impl<S: Simd> Map<S, PATCH, 3> for WeightGradient {
    #[inline(always)]
    unsafe fn map(u: [S::Vector; PATCH]) -> [S::Vector; 3] {
        // SAFETY: the caller's promise.
        unsafe {
            let (sum_a, difference_a) = (S::add(u[1], u[2]), plus::<S>(u[1], -1.0, u[2]));
            let (sum_b, difference_b) = (S::add(u[3], u[4]), plus::<S>(u[3], -1.0, u[4]));
            [
                plus::<S>(plus::<S>(u[0], -1.0 / 1.5, sum_a), 1.0 / 6.0, sum_b),
                plus::<S>(times::<S>(-A / 1.5, difference_a), B / 6.0, difference_b),
                plus::<S>(plus::<S>(u[5], -0.5 / 1.5, sum_a), 2.0 / 6.0, sum_b),
            ]
        }
    }
}

/// Maps an `N`×`N` tile to `M`×`M`: `load(i, j)` gives a value, `store(i, j, value)` takes a result.
///
/// # Safety
/// The machine has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn map_tile<S: Simd, T: Map<S, N, M>, const N: usize, const M: usize>(
    mut load: impl FnMut(usize, usize) -> S::Vector,
    mut store: impl FnMut(usize, usize, S::Vector),
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut half = [[S::splat(0.0); N]; M];
        for j in 0..N {
            let column = std::array::from_fn(|i| load(i, j));
            let mapped = T::map(column);
            for i in 0..M {
                half[i][j] = mapped[i];
            }
        }
        for i in 0..M {
            let mapped = T::map(half[i]);
            for j in 0..M {
                store(i, j, mapped[j]);
            }
        }
    }
}

/// Maps two tiles and stores each pair of results as one word of two bf16.
///
/// # Safety
/// As [`map_tile`].
#[inline(always)]
pub(super) unsafe fn map_pair<S: Simd, T: Map<S, N, M>, const N: usize, const M: usize>(
    low: impl FnMut(usize, usize) -> S::Vector,
    high: impl FnMut(usize, usize) -> S::Vector,
    mut store: impl FnMut(usize, usize, S::Vector),
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut first = [[S::splat(0.0); M]; M];
        map_tile::<S, T, N, M>(low, |i, j, value| first[i][j] = value);
        map_tile::<S, T, N, M>(high, |i, j, value| store(i, j, S::pair(first[i][j], value)));
    }
}
