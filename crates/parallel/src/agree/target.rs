//! What becomes of a bucket: the outcome of an agreement, and where it goes.

use std::ops::Range;

/// What became of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Its parameters are up to date.
    Done,
    /// It has not come back, was settled already, or there are no other ranks.
    NotYet,
    /// The step was refused, here or by another rank: it would have spoilt the weights.
    Refused,
}

/// The target refuses a step; it remembers why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal;

/// Where the outcome of an agreement goes: a replica's weights, on whatever device they are.
pub trait Target {
    /// Makes the optimizer's step of a range of a bucket with the sums of all gradients there.
    ///
    /// # Errors
    /// When it would spoil the weights.
    fn apply_sums(&mut self, bucket: usize, range: Range<usize>, sums: &mut [f32]) -> Result<(), Refusal>;

    /// Makes the optimizer's step of a chunk of a bucket with the sums of all gradients there, and leaves the new
    /// weights in their place. Where it would spoil the weights nothing changes: the sums, which are no numbers,
    /// tell all who gather them.
    ///
    /// # Errors
    /// When the device fails.
    fn step_chunk(&mut self, bucket: usize, range: Range<usize>, values: &mut [f32]) -> Result<(), Refusal>;

    /// As [`Target::apply_sums`], on weights that ranks share, which are given.
    ///
    /// # Errors
    /// As [`Target::apply_sums`].
    fn apply_shared(
        &mut self,
        bucket: usize,
        range: Range<usize>,
        sums: &mut [f32],
        weights: &mut [f32],
    ) -> Result<(), Refusal>;

    /// Replaces the weights of a bucket.
    ///
    /// # Errors
    /// When the device does not take them.
    fn replace_weights(&mut self, bucket: usize, weights: &[f32]) -> Result<(), Refusal>;
}
