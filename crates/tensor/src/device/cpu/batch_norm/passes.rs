//! The passes of batch normalisation over memory. No fused multiply-add: a mask found again from x is the forward pass's own
//! on every instruction set, and all sets give the same bits.
#![allow(unsafe_code)]

use super::super::isa::Isa;
use super::super::reduce::{GROUP, Sums, add_to};
use super::super::rows::{Body, Lanes, Rows, fence, get, put, take, walk};
use super::super::simd::Simd;
use super::{Affine, Backward, BatchNormGrad, Mask};
use crate::dtype::Float;
use crate::op::Rectifier;

/// Rows of a result that are made together.
const TOGETHER: usize = 2;

/// Adds Σ (x − shift) and Σ (x − shift)² of some rows.
pub(super) fn add_moments<E: Float>(isa: Isa, x: &[E], shift: &[f32], rows: Rows, sums: &mut Sums<2>) {
    assert!(shift.len() >= rows.width);
    walk::<GROUP>(isa, rows, x.len(), Moments { x: x.as_ptr(), shift, sums });
}

struct Moments<'a, E> {
    x: *const E,
    shift: &'a [f32],
    sums: &'a mut Sums<2>,
}

impl<E: Float> Body for Moments<'_, E> {
    #[inline(always)]
    unsafe fn vector<S: Simd, const R: usize>(
        &mut self,
        column: usize,
        starts: [usize; R],
        ahead: usize,
        lanes: Lanes,
    ) {
        // SAFETY: `walk` has seen that the elements lie in x; there are as many shifts and accumulators as columns.
        unsafe {
            let shift = get::<S, f32>(self.shift.as_ptr(), column, lanes);
            let [mut sum, mut square] = [S::splat(0.0); 2];
            for start in starts {
                let centred = S::sub(take::<S, E>(self.x, start + column, ahead, lanes), shift);
                sum = S::add(sum, centred);
                square = S::add(square, S::mul(centred, centred));
            }
            let [sums, squares] = &mut *self.sums;
            add_to::<S>(sums, column, sum);
            add_to::<S>(squares, column, square);
        }
    }
}

/// y = (x − mean)·factor + beta, with the residual added and cut off, for the rows of a task.
pub(super) fn apply<E: Float>(
    isa: Isa,
    affine: Affine<'_>,
    (x, residual): (&[E], Option<&[E]>),
    rectifier: Rectifier,
    y: &mut [E],
    past: bool,
) {
    assert!(x.len() == y.len() && residual.is_none_or(|residual| residual.len() == y.len()));
    let (added, length) = (residual.unwrap_or(x).as_ptr(), y.len());
    let job = Apply { affine, x: x.as_ptr(), added, y: y.as_mut_ptr(), ceiling: rectifier.ceiling(), past };
    for rows in Rows::of(length, affine.mean.len()) {
        match (residual.is_some(), rectifier != Rectifier::None) {
            (false, false) => walk::<TOGETHER>(isa, rows, length, Applying::<E, false, false>(job)),
            (false, true) => walk::<TOGETHER>(isa, rows, length, Applying::<E, false, true>(job)),
            (true, false) => walk::<TOGETHER>(isa, rows, length, Applying::<E, true, false>(job)),
            (true, true) => walk::<TOGETHER>(isa, rows, length, Applying::<E, true, true>(job)),
        }
    }
    if past {
        fence(isa);
    }
}

struct Apply<'a, E> {
    affine: Affine<'a>,
    x: *const E,
    added: *const E,
    y: *mut E,
    ceiling: f32,
    past: bool,
}

impl<E> Clone for Apply<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E> Copy for Apply<'_, E> {}

struct Applying<'a, E, const ADD: bool, const CUT: bool>(Apply<'a, E>);

impl<E: Float, const ADD: bool, const CUT: bool> Body for Applying<'_, E, ADD, CUT> {
    #[inline(always)]
    unsafe fn vector<S: Simd, const R: usize>(
        &mut self,
        column: usize,
        starts: [usize; R],
        ahead: usize,
        lanes: Lanes,
    ) {
        let Apply { affine, x, added, y, ceiling, past } = self.0;
        // SAFETY: `walk` has seen that the elements lie in all three, which have one length; rows are as wide as the values
        // per column, and where `past` is set, every vector starts on a multiple of its size.
        unsafe {
            let per_column = |values: &[f32]| get::<S, f32>(values.as_ptr(), column, lanes);
            let (mean, factor, beta) = (per_column(affine.mean), per_column(affine.factor), per_column(affine.beta));
            for start in starts {
                let centred = S::sub(take::<S, E>(x, start + column, ahead, lanes), mean);
                let mut value = S::add(S::mul(centred, factor), beta);
                if ADD {
                    value = S::add(value, take::<S, E>(added, start + column, ahead, lanes));
                }
                if CUT {
                    value = S::at_most(S::relu(value), S::splat(ceiling));
                }
                put::<S, E>(y, start + column, lanes, value, past);
            }
        }
    }
}

/// Adds Σ dy and Σ dy·(x − mean) of some rows; with a ceiling, only where the normalised x is above zero and below it.
pub(super) fn add_gradients<E: Float>(
    isa: Isa,
    (dy, x): (&[E], &[E]),
    ceiling: Option<f32>,
    affine: Affine<'_>,
    rows: Rows,
    sums: &mut Sums<2>,
) {
    assert!(dy.len() == x.len() && affine.mean.len() >= rows.width);
    let (dy, length, cut) = (dy.as_ptr(), x.len(), ceiling.unwrap_or(f32::INFINITY));
    let (x, kept) = (x.as_ptr(), std::ptr::null_mut());
    let job = Gradients { dy, x, y: x, kept, affine, ceiling: cut, sums };
    match ceiling {
        None => walk::<GROUP>(isa, rows, length, Summing::<E, NOTHING, false>(job)),
        Some(_) => walk::<GROUP>(isa, rows, length, Summing::<E, INPUT, false>(job)),
    }
}

/// As [`add_gradients`], with the mask that `input` says, and writes what it lets pass to `kept`. Without dy, `kept` holds it.
///
/// # Safety
/// `kept` has the elements of the rows, and nobody else uses those. It is as long as dy, x and a mask's y.
pub(super) unsafe fn keep_gradients<E: Float>(
    isa: Isa,
    input: &BatchNormGrad<'_, E>,
    affine: Affine<'_>,
    (kept, length): (*mut E, usize),
    rows: Rows,
    sums: &mut Sums<2>,
) {
    assert!(affine.mean.len() >= rows.width);
    let (dy, x) = (input.dy.map_or(kept.cast_const(), <[E]>::as_ptr), input.x.as_ptr());
    let y = if let Mask::FromOutput(y) = input.mask { y.as_ptr() } else { x };
    let job = Gradients { dy, x, y, kept, affine, ceiling: input.ceiling, sums };
    match input.mask {
        Mask::None => walk::<GROUP>(isa, rows, length, Summing::<E, NOTHING, true>(job)),
        Mask::FromInput(_) => walk::<GROUP>(isa, rows, length, Summing::<E, INPUT, true>(job)),
        Mask::FromOutput(_) => walk::<GROUP>(isa, rows, length, Summing::<E, OUTPUT, true>(job)),
    }
}

struct Gradients<'a, E> {
    dy: *const E,
    x: *const E,
    y: *const E,
    kept: *mut E,
    affine: Affine<'a>,
    ceiling: f32,
    sums: &'a mut Sums<2>,
}

/// What a mask is found from.
const NOTHING: u8 = 0;
const INPUT: u8 = 1;
const OUTPUT: u8 = 2;

struct Summing<'a, E, const MASK: u8, const KEEP: bool>(Gradients<'a, E>);

impl<E: Float, const MASK: u8, const KEEP: bool> Body for Summing<'_, E, MASK, KEEP> {
    #[inline(always)]
    unsafe fn vector<S: Simd, const R: usize>(
        &mut self,
        column: usize,
        starts: [usize; R],
        ahead: usize,
        lanes: Lanes,
    ) {
        let Gradients { dy, x, y, kept, affine, ceiling, ref mut sums } = self.0;
        // SAFETY: `walk` has seen that the elements lie in all tensors, which have one length, and whoever gave `kept` that its
        // rows are this call's own; there are as many values and accumulators as columns.
        unsafe {
            let per_column = |values: &[f32]| get::<S, f32>(values.as_ptr(), column, lanes);
            let mean = per_column(affine.mean);
            let [mut by_beta, mut by_gamma] = [S::splat(0.0); 2];
            for start in starts {
                let at = start + column;
                let mut gradient = take::<S, E>(dy, at, ahead, lanes);
                let centred = S::sub(take::<S, E>(x, at, ahead, lanes), mean);
                if MASK == INPUT {
                    let value = S::add(S::mul(centred, per_column(affine.factor)), per_column(affine.beta));
                    gradient = S::gate(gradient, value, S::splat(ceiling));
                }
                if MASK == OUTPUT {
                    gradient = S::gate(gradient, take::<S, E>(y, at, ahead, lanes), S::splat(ceiling));
                }
                if KEEP {
                    put::<S, E>(kept, at, lanes, gradient, false);
                }
                by_beta = S::add(by_beta, gradient);
                by_gamma = S::add(by_gamma, S::mul(gradient, centred));
            }
            let [beta_sums, gamma_sums] = &mut **sums;
            add_to::<S>(beta_sums, column, by_beta);
            add_to::<S>(gamma_sums, column, by_gamma);
        }
    }
}

/// dx = factor·(dy − mean of dy − slope·(x − mean)) for the rows of a task. Without dy, dx holds it.
pub(super) fn apply_gradient<E: Float>(
    isa: Isa,
    backward: Backward<'_>,
    (dy, x): (Option<&[E]>, &[E]),
    dx: &mut [E],
    past: bool,
) {
    assert!(x.len() == dx.len() && dy.is_none_or(|dy| dy.len() == dx.len()));
    let (length, dx) = (dx.len(), dx.as_mut_ptr());
    let dy = dy.map_or(dx.cast_const(), <[E]>::as_ptr);
    for rows in Rows::of(length, backward.slope.len()) {
        let job = Applied { backward, dy, x: x.as_ptr(), dx, past };
        match backward.ceiling {
            None => walk::<TOGETHER>(isa, rows, length, ApplyingGradient::<E, false>(job)),
            Some(_) => walk::<TOGETHER>(isa, rows, length, ApplyingGradient::<E, true>(job)),
        }
    }
    if past {
        fence(isa);
    }
}

struct Applied<'a, E> {
    backward: Backward<'a>,
    dy: *const E,
    x: *const E,
    dx: *mut E,
    past: bool,
}

struct ApplyingGradient<'a, E, const CUT: bool>(Applied<'a, E>);

impl<E: Float, const CUT: bool> Body for ApplyingGradient<'_, E, CUT> {
    #[inline(always)]
    unsafe fn vector<S: Simd, const R: usize>(
        &mut self,
        column: usize,
        starts: [usize; R],
        ahead: usize,
        lanes: Lanes,
    ) {
        let Applied { backward: Backward { affine, mean_dy, slope, ceiling }, dy, x, dx, past } = self.0;
        // SAFETY: as in `Applying`; an element of dy is read before it is written as one of dx.
        unsafe {
            let per_column = |values: &[f32]| get::<S, f32>(values.as_ptr(), column, lanes);
            let (mean, factor) = (per_column(affine.mean), per_column(affine.factor));
            let (mean_dy, slope) = (per_column(mean_dy), per_column(slope));
            for start in starts {
                let at = start + column;
                let mut gradient = take::<S, E>(dy, at, ahead, lanes);
                let centred = S::sub(take::<S, E>(x, at, ahead, lanes), mean);
                if CUT {
                    let value = S::add(S::mul(centred, factor), per_column(affine.beta));
                    gradient = S::gate(gradient, value, S::splat(ceiling.unwrap_or(f32::INFINITY)));
                }
                let inner = S::sub(S::sub(gradient, mean_dy), S::mul(slope, centred));
                put::<S, E>(dx, at, lanes, S::mul(factor, inner), past);
            }
        }
    }
}
