//! A worker that pushes what it has changed since its last push, and adds what others have changed to its weights.
//!
//! W are its weights and L what the centre is as far as it knows: what it has read, and what it has pushed since. It
//! pushes W − L, and then L is W. Of a centre M that comes back, with all that was pushed before it was asked for, it
//! adds M − L to W, and L is M: what it has changed and not pushed stays its own.

use std::ops::Range;

use super::{Exchange, Habit, Point};

/// When which piece is exchanged: before a step, and whether all is pushed behind it.
pub(in super::super) trait Timetable: std::fmt::Debug + Send {
    /// The exchange that begins before the step after so many.
    fn before(&self, step: u64) -> Option<Exchange>;

    /// Whether all is pushed behind that step.
    fn pushes_after(&self, step: u64) -> bool;
}

/// Such a worker.
#[derive(Debug)]
pub(in super::super) struct Changes<T> {
    pub timetable: T,
    /// L.
    base: Vec<f32>,
}

impl<T> Changes<T> {
    pub fn new(timetable: T) -> Self {
        Self { timetable, base: Vec::new() }
    }
}

impl<T: Timetable> Habit for Changes<T> {
    fn before(&self, step: u64) -> Option<Exchange> {
        self.timetable.before(step)
    }

    fn pushes_after(&self, step: u64) -> bool {
        self.timetable.pushes_after(step)
    }

    fn start(&mut self, weights: &[f32]) {
        self.base.clear();
        self.base.extend_from_slice(weights);
    }

    fn fill(&mut self, range: Range<usize>, point: Point<'_>, message: &mut [f32]) {
        let (base, weights) = (&mut self.base[range.clone()], &point.weights[range.clone()]);
        for ((base, weight), message) in base.iter_mut().zip(weights).zip(&mut message[range]) {
            *message = weight - *base;
            *base = *weight;
        }
    }

    fn take_back(&mut self, range: Range<usize>, message: &[f32], weights: &mut [f32]) {
        let (base, weights) = (&mut self.base[range.clone()], &mut weights[range.clone()]);
        for ((base, weight), center) in base.iter_mut().zip(weights).zip(&message[range]) {
            *weight += center - *base;
            *base = *center;
        }
    }
}
