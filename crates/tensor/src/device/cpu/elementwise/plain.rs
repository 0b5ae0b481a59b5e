//! The functions that are one or two instructions: explicit vectors, so that nothing but memory bounds them in either type.
#![allow(unsafe_code)]

use super::super::context::Context;
use super::super::rows::{self, Body, Lanes, Rows, fence, get, put, take, walk};
use super::super::simd::Simd;
use super::GRAIN;
use crate::dtype::Float;

/// A function of one or two numbers.
pub(super) trait Function: Copy + Sync {
    /// Whether it reads its first number.
    const FIRST: bool = true;
    /// Whether it reads its second.
    const SECOND: bool = true;

    /// Its values.
    ///
    /// # Safety
    /// The machine has `S`.
    unsafe fn of<S: Simd>(self, a: S::Vector, b: S::Vector) -> S::Vector;
}

/// a + b
#[derive(Clone, Copy)]
pub(super) struct Add;
/// a·b
#[derive(Clone, Copy)]
pub(super) struct Mul;
/// b
#[derive(Clone, Copy)]
pub(super) struct Second;
/// factor·a
#[derive(Clone, Copy)]
pub(super) struct Scale(pub f32);
/// a between zero and a ceiling.
#[derive(Clone, Copy)]
pub(super) struct Clamp(pub f32);
/// a where b is above zero and below a ceiling, elsewhere zero.
#[derive(Clone, Copy)]
pub(super) struct Gate(pub f32);

impl Function for Add {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, a: S::Vector, b: S::Vector) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { S::add(a, b) }
    }
}

impl Function for Mul {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, a: S::Vector, b: S::Vector) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { S::mul(a, b) }
    }
}

impl Function for Second {
    const FIRST: bool = false;

    #[inline(always)]
    unsafe fn of<S: Simd>(self, _: S::Vector, b: S::Vector) -> S::Vector {
        b
    }
}

impl Function for Scale {
    const SECOND: bool = false;

    #[inline(always)]
    unsafe fn of<S: Simd>(self, a: S::Vector, _: S::Vector) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { S::mul(a, S::splat(self.0)) }
    }
}

impl Function for Clamp {
    const SECOND: bool = false;

    #[inline(always)]
    unsafe fn of<S: Simd>(self, a: S::Vector, _: S::Vector) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { S::at_most(S::relu(a), S::splat(self.0)) }
    }
}

impl Function for Gate {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, a: S::Vector, b: S::Vector) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { S::gate(a, b, S::splat(self.0)) }
    }
}

/// Elements between what is computed and what is asked for from memory.
const STRETCH: usize = 1024;

/// y = function(a, b), element by element. Without `a`, y holds it; `b` is left out where the function does not read it.
pub(super) fn each<E: Float, B: Float>(
    context: &Context<'_>,
    function: impl Function,
    (a, b): (Option<&[E]>, Option<&[B]>),
    y: &mut [E],
) {
    assert!(a.is_none_or(|a| a.len() == y.len()) && b.is_none_or(|b| b.len() == y.len()), "the shape is kept");
    let isa = context.isa;
    let past = a.is_some() && size_of_val(y) >= rows::PAST_BYTES_MIN && rows::may_pass(isa, y, STRETCH);
    context.pool.chunks(y, GRAIN, |task, y| {
        let (elements, length) = (task * GRAIN..task * GRAIN + y.len(), y.len());
        let y = y.as_mut_ptr();
        let a = a.map_or(y.cast_const(), |a| a[elements.clone()].as_ptr());
        let b = b.map_or(std::ptr::null(), |b| b[elements].as_ptr());
        for rows in Rows::of(length, STRETCH) {
            walk::<1>(isa, rows, length, Each { a, b, y, function, past });
        }
        if past {
            fence(isa);
        }
    });
}

struct Each<E, B, F> {
    a: *const E,
    b: *const B,
    y: *mut E,
    function: F,
    past: bool,
}

impl<E: Float, B: Float, F: Function> Body for Each<E, B, F> {
    #[inline(always)]
    unsafe fn vector<S: Simd, const R: usize>(
        &mut self,
        column: usize,
        starts: [usize; R],
        ahead: usize,
        lanes: Lanes,
    ) {
        // SAFETY: `walk` has seen that the elements lie in all that is read, which has one length; an element is read before
        // it is written; where `past` is set, every vector starts on a multiple of its size.
        unsafe {
            for start in starts {
                let (at, none) = (start + column, S::splat(0.0));
                let a = if F::FIRST { take::<S, E>(self.a, at, ahead, lanes) } else { none };
                let b = if F::SECOND { take::<S, B>(self.b, at, ahead, lanes) } else { none };
                put::<S, E>(self.y, at, lanes, self.function.of::<S>(a, b), self.past);
            }
        }
    }
}

/// As [`each`] with a `b` that repeats along rows of its length.
pub(super) fn per_column<E: Float>(
    context: &Context<'_>,
    function: impl Function,
    (a, b): (Option<&[E]>, &[f32]),
    y: &mut [E],
) {
    assert!(a.is_none_or(|a| a.len() == y.len()), "the shape is kept");
    let (isa, width) = (context.isa, b.len());
    let task_elements = width * (GRAIN / width).max(1);
    context.pool.chunks(y, task_elements, |task, y| {
        let (start, length) = (task * task_elements, y.len());
        let y = y.as_mut_ptr();
        let a = a.map_or(y.cast_const(), |a| a[start..start + length].as_ptr());
        for rows in Rows::of(length, width) {
            walk::<2>(isa, rows, length, PerColumn { a, b, y, function });
        }
    });
}

struct PerColumn<'a, E, F> {
    a: *const E,
    b: &'a [f32],
    y: *mut E,
    function: F,
}

impl<E: Float, F: Function> Body for PerColumn<'_, E, F> {
    #[inline(always)]
    unsafe fn vector<S: Simd, const R: usize>(
        &mut self,
        column: usize,
        starts: [usize; R],
        ahead: usize,
        lanes: Lanes,
    ) {
        // SAFETY: as in `Each`; rows are as wide as `b`.
        unsafe {
            let b = get::<S, f32>(self.b.as_ptr(), column, lanes);
            for start in starts {
                let a = take::<S, E>(self.a, start + column, ahead, lanes);
                put::<S, E>(self.y, start + column, lanes, self.function.of::<S>(a, b), false);
            }
        }
    }
}
