//! One row of a pooling or of its gradient, a vector of channels at a time: a window's sum or maximum stays in registers.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::rows::{Lanes, get, put, take};
use super::super::simd::{Simd, Vectorised};
use super::{Pooling, Span};
use crate::dtype::Float;
use crate::window::PoolKind;

/// Elements between what is computed and what is asked for from memory.
const AHEAD: usize = 1024;

/// The channels of a pixel as vectors: the first channel and how many lanes of it there are.
#[inline(always)]
fn vectors<S: Simd>(channels: usize) -> impl Iterator<Item = (usize, Lanes)> {
    (0..channels).step_by(S::LANES).map(move |first| {
        let rest = channels - first;
        (first, if rest >= S::LANES { Lanes::All } else { Lanes::First(rest) })
    })
}

/// A row of results.
pub(super) struct Forward<'a, E> {
    pub pooling: &'a Pooling,
    /// The image.
    pub x: &'a [E],
    /// Which row of windows.
    pub row: usize,
    pub y: &'a mut [E],
    /// Where the winners of maxima go.
    pub argmax: Option<&'a mut [i32]>,
}

/// The pixels of one window, as rows and columns of the image.
#[derive(Clone, Copy)]
struct Pixels {
    rows: Span,
    columns: Span,
    width: usize,
}

impl Pixels {
    #[inline(always)]
    fn each(self) -> impl Iterator<Item = usize> {
        let Self { rows, columns, width } = self;
        (rows.start..rows.end).flat_map(move |row| (columns.start..columns.end).map(move |column| row * width + column))
    }
}

impl<E: Float> Vectorised for Forward<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let (pooling, channels) = (self.pooling, self.pooling.channels);
        assert!(self.x.len() >= pooling.input_image() && self.y.len() == pooling.output_row());
        assert!(self.argmax.as_ref().is_none_or(|argmax| argmax.len() == self.y.len()));
        let rows = pooling.span(0, self.row);
        for index in 0..pooling.output[1] {
            let pixels = Pixels { rows, columns: pooling.span(1, index), width: pooling.size[1] };
            for (first, lanes) in vectors::<S>(channels) {
                let at = index * channels + first;
                // SAFETY: a window's pixels are those of the image, whose length was checked, and so was that of the results;
                // the caller has seen the instructions.
                unsafe {
                    match pooling.pool2d.kind {
                        PoolKind::Max => self.maximum::<S>(pixels, (first, at), lanes),
                        PoolKind::Average => self.average::<S>(pixels, (first, at), lanes),
                    }
                }
            }
        }
    }
}

impl<E: Float> Forward<'_, E> {
    /// # Safety
    /// The machine has `S`; the pixels, from channel `first` on, lie in the image and `at` in the results.
    #[inline(always)]
    unsafe fn maximum<S: Simd>(&mut self, pixels: Pixels, (first, at): (usize, usize), lanes: Lanes) {
        let bits = |pixel: usize| f32::from_bits(pixel as u32);
        // SAFETY: the caller's promise; a winner has four bytes, as a float does.
        unsafe {
            let mut best = S::splat(f32::NEG_INFINITY);
            let mut winner = S::splat(bits(pixels.rows.start * pixels.width + pixels.columns.start));
            for pixel in pixels.each() {
                let x = take::<S, E>(self.x.as_ptr(), pixel * self.pooling.channels + first, AHEAD, lanes);
                (best, winner) = S::larger((x, S::splat(bits(pixel))), (best, winner));
            }
            put::<S, E>(self.y.as_mut_ptr(), at, lanes, best, false);
            if let Some(argmax) = &mut self.argmax {
                put::<S, f32>(argmax.as_mut_ptr().cast(), at, lanes, winner, false);
            }
        }
    }

    /// # Safety
    /// As [`Self::maximum`].
    #[inline(always)]
    unsafe fn average<S: Simd>(&mut self, pixels: Pixels, (first, at): (usize, usize), lanes: Lanes) {
        let factor = 1.0 / (pixels.rows.count * pixels.columns.count) as f32;
        // SAFETY: the caller's promise.
        unsafe {
            let mut sum = S::splat(0.0);
            for pixel in pixels.each() {
                sum = S::add(sum, take::<S, E>(self.x.as_ptr(), pixel * self.pooling.channels + first, AHEAD, lanes));
            }
            put::<S, E>(self.y.as_mut_ptr(), at, lanes, S::mul(S::splat(factor), sum), false);
        }
    }
}

/// A row of an image's gradient.
pub(super) struct Backward<'a, E> {
    pub pooling: &'a Pooling,
    /// Which row of the image.
    pub row: usize,
    /// Of the image's results.
    pub dy: &'a [E],
    /// The winners of maxima.
    pub argmax: Option<&'a [i32]>,
    pub dx: &'a mut [E],
    /// Write past the caches.
    pub past: bool,
}

/// Windows over one pixel whose factors are worked out once for all channels.
const FACTORS: usize = 32;

impl<E: Float> Vectorised for Backward<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (pooling, channels) = (self.pooling, self.pooling.channels);
        let [down, across] = pooling.output;
        assert!(self.dy.len() == down * pooling.output_row() && self.dx.len() == pooling.size[1] * channels);
        assert!(self.argmax.is_none_or(|argmax| argmax.len() == self.dy.len()));
        let rows = pooling.covering(0, self.row, 0..0, down);
        let mut columns = 0..0;
        for column in 0..pooling.size[1] {
            columns = pooling.covering(1, column, columns, across);
            let pixel = f32::from_bits((self.row * pooling.size[1] + column) as u32);
            let factors = self.factors(rows.clone(), columns.clone());
            for (first, lanes) in vectors::<S>(channels) {
                // SAFETY: windows that cover a pixel are those of the results, whose length was checked, and so was that of
                // the row; where `past` is set, every vector starts on a multiple of its size; the caller has seen the
                // instructions.
                unsafe {
                    let mut sum = S::splat(0.0);
                    let windows = rows.clone().flat_map(|row| columns.clone().map(move |column| (row, column)));
                    for (index, (row, column)) in windows.enumerate() {
                        let at = (row * across + column) * channels + first;
                        let dy = take::<S, E>(self.dy.as_ptr(), at, AHEAD, lanes);
                        let share = match self.argmax {
                            Some(argmax) => {
                                let winner = get::<S, f32>(argmax.as_ptr().cast(), at, lanes);
                                S::where_same(dy, winner, S::splat(pixel))
                            }
                            None => {
                                let factor = factors.get(index).copied();
                                S::mul(S::splat(factor.unwrap_or_else(|| self.factor(row, column))), dy)
                            }
                        };
                        sum = S::add(sum, share);
                    }
                    put::<S, E>(self.dx.as_mut_ptr(), column * channels + first, lanes, sum, self.past);
                }
            }
        }
        if self.past {
            // SAFETY: the caller has seen the instructions.
            unsafe { S::fence() };
        }
    }
}

impl<E: Float> Backward<'_, E> {
    /// What a mean's window gives to each of its pixels.
    #[inline(always)]
    fn factor(&self, row: usize, column: usize) -> f32 {
        1.0 / (self.pooling.span(0, row).count * self.pooling.span(1, column).count) as f32
    }

    /// The factors of the first windows over a pixel.
    #[inline(always)]
    fn factors(&self, rows: Range<usize>, columns: Range<usize>) -> [f32; FACTORS] {
        let mut factors = [0.0; FACTORS];
        if self.argmax.is_none() {
            let windows = rows.flat_map(|row| columns.clone().map(move |column| (row, column)));
            factors.iter_mut().zip(windows).for_each(|(factor, (row, column))| *factor = self.factor(row, column));
        }
        factors
    }
}
