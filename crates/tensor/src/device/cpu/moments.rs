//! Mean and variance per channel of a result, taken while a kernel still has its values in registers.
//!
//! A kernel finishes `[rows, channels]` in blocks of rows, and each block in groups of a few rows. For each block and channel it keeps a
//! shift (the mean of the first group), Σ (y − shift) and Σ (y − shift)² in f32, each group by itself first. So a mean far from zero
//! costs no digits, and neither does a first value far from the mean: the variance is right to about 1e-7 of itself. (With the first
//! value as the shift and one running sum it was off by up to 5e-6, enough to carry ReLUs of resnet50 over their kinks.) Blocks follow from
//! shapes and the instruction set, each is filled in one order, and they are added in f64 one after the other: no bit depends on the
//! number of threads. What is stored as
//! bf16 counts as it is stored: a batch-norm divides by the deviation of what it reads, and where a channel hardly varies, that is
//! mostly rounding. Cost: three operations per value; the blocks' sums are about a hundredth of the result.
#![allow(unsafe_code)]

use super::isa::Isa;
use super::pool::{Pool, SendPointer};
use super::rows::{Lanes, get, put};
use super::simd::Simd;
use super::vectorize::vectorized;
use crate::buffer::Buffer;

/// Channels whose blocks are added up by one task.
const STRIP: usize = 64;

/// The sums of every block of a result: shifts, sums and squares of a block's channels side by side.
#[derive(Debug, Default)]
pub(crate) struct Moments {
    sums: Buffer,
    channels: usize,
    /// Rows of each block.
    rows: Vec<usize>,
}

impl Moments {
    /// Room for a result of `channels` whose blocks have so many rows. Every block has to be filled before [`Moments::finish`].
    pub fn begin(&mut self, channels: usize, rows: impl Iterator<Item = usize>) -> Blocks {
        self.rows.clear();
        self.rows.extend(rows);
        self.channels = channels;
        let floats = 3 * channels * self.rows.len();
        if self.sums.len() < floats {
            self.sums = Buffer::zeroed_for("working memory of a kernel", floats);
        }
        Blocks { base: SendPointer(self.sums.as_mut_ptr()), channels, blocks: self.rows.len() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.sums.len() * size_of::<f32>()
    }

    /// The mean and the variance (over n) of every channel.
    pub fn finish(&self, (pool, isa): (&Pool, Isa), mean: &mut [f32], variance: &mut [f32]) {
        assert!(mean.len() == self.channels && variance.len() == self.channels, "one of each per channel");
        let floats = 3 * self.channels * self.rows.len();
        let (sums, rows) = (&self.sums[..floats], &self.rows[..]);
        pool.chunks2((mean, STRIP), (variance, STRIP), |task, mean, variance| {
            add_blocks(isa, sums, rows, task * STRIP, self.channels, mean, variance);
        });
    }
}

vectorized! {
    /// Adds the blocks of the channels from `first` on.
    fn add_blocks(sums: &[f32], rows: &[usize], first: usize, channels: usize, mean: &mut [f32], variance: &mut [f32]) {
        let (width, mut total) = (mean.len(), 0.0);
        // Σ (y − base) and Σ (y − base)², where the base is the shift of the first block.
        let (mut sums_moved, mut squares_moved) = ([0.0f64; STRIP], [0.0f64; STRIP]);
        let part = |block: usize, kind: usize| &sums[(3 * block + kind) * channels + first..][..width];
        let base = part(0, 0);
        for (block, &rows) in rows.iter().enumerate() {
            let (shift, sum, square, rows) = (part(block, 0), part(block, 1), part(block, 2), rows as f64);
            total += rows;
            for channel in 0..width {
                let (away, sum) = (f64::from(shift[channel]) - f64::from(base[channel]), f64::from(sum[channel]));
                sums_moved[channel] += rows * away + sum;
                squares_moved[channel] += away * (rows * away + 2.0 * sum) + f64::from(square[channel]);
            }
        }
        for channel in 0..width {
            let offset = sums_moved[channel] / total;
            mean[channel] = (f64::from(base[channel]) + offset) as f32;
            variance[channel] = (squares_moved[channel] / total - offset * offset).max(0.0) as f32;
        }
    }
}

/// Where the tasks of a kernel find the blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    base: SendPointer<f32>,
    channels: usize,
    blocks: usize,
}

impl Blocks {
    /// A block from `channel` on.
    pub fn at(&self, block: usize, channel: usize) -> BlockSums {
        assert!(block < self.blocks && channel < self.channels, "a block has its own sums");
        let shift = self.base.get().wrapping_add(3 * block * self.channels + channel);
        BlockSums { shift, stride: self.channels }
    }
}

/// The sums of one block: its shifts here, its sums and its squares a stride apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockSums {
    shift: *mut f32,
    stride: usize,
}

/// Adds a group of values of one vector of channels, the first of their block or more of them. `channel` is counted from where the sums
/// begin.
///
/// # Safety
/// The machine has `S`; the block has the channels, was begun unless it `begins` here, and nobody else uses them.
#[inline(always)]
pub(crate) unsafe fn count<S: Simd>(
    BlockSums { shift: at, stride }: BlockSums,
    channel: usize,
    lanes: Lanes,
    begins: bool,
    values: &[S::Vector],
) {
    // SAFETY: the caller's promise. Indices unroll where the number of values is known, and the values stay in registers.
    unsafe {
        let shift = if begins {
            let mut sum = S::splat(0.0);
            for index in 0..values.len() {
                sum = S::add(sum, *values.get_unchecked(index));
            }
            let mean = S::mul(sum, S::splat(1.0 / values.len() as f32));
            put::<S, f32>(at, channel, lanes, mean, false);
            mean
        } else {
            get::<S, f32>(at.cast_const(), channel, lanes)
        };
        let [mut sum, mut square] = [S::splat(0.0); 2];
        for index in 0..values.len() {
            let away = S::sub(*values.get_unchecked(index), shift);
            sum = S::add(sum, away);
            square = S::mul_add(away, away, square);
        }
        for (kind, mut sum) in [(1, sum), (2, square)] {
            let channel = channel + kind * stride;
            if !begins {
                sum = S::add(sum, get::<S, f32>(at.cast_const(), channel, lanes));
            }
            put::<S, f32>(at, channel, lanes, sum, false);
        }
    }
}
