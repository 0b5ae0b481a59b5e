//! Dropout without a stored mask: whether an element is kept is a pure function of a key and its index.
//!
//! The gradient is the same function applied to dy with the same key. The hash is two rounds of a 32-bit finaliser
//! (multiplications and shifts, so it vectorises), each round taking one half of the key.

use super::context::Context;
use super::elementwise::{GRAIN, part};
use super::vectorize::vectorized;
use crate::dtype::Float;
use crate::op::Within;
use paceline_system::random;

/// Which elements are dropped.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    /// The share of them.
    pub probability: f32,
    /// Of the step and the layer.
    pub key: u64,
    /// The index of the first element: a tensor may be a part of a larger one.
    pub first: u64,
}

/// y = x / (1 − probability) where the element is kept, otherwise 0. `x` is none when `y` holds it.
pub fn dropout<E: Float>(context: &Context<'_>, x: Option<&[E]>, mask: Mask, y: &mut [E]) {
    let Mask { probability, key, first } = mask;
    assert!((0.0..1.0).contains(&probability), "a drop probability lies in [0, 1)");
    assert!(x.is_none_or(|x| x.len() == y.len()), "dropout keeps the shape");
    // An element is dropped when its hash is below this.
    let threshold = (f64::from(probability) * 4_294_967_296.0) as u32;
    let factor = (1.0 / (1.0 - f64::from(probability))) as f32;
    context.pool.chunks(y, GRAIN, |task, y| {
        let start = task * GRAIN;
        if let Some(x) = part(x, start, y.len()) {
            y.copy_from_slice(x);
        }
        // The index's upper half goes into the key. A task is shorter than 2³² elements, so it crosses at most one multiple of that.
        let index = first.wrapping_add(start as u64);
        let until = (1 << 32) - u64::from(index as u32);
        let (below, above) = y.split_at_mut(y.len().min(usize::try_from(until).unwrap_or(usize::MAX)));
        for (index, y) in [(index, below), (index.wrapping_add(until), above)] {
            let key = random::mix(key ^ random::mix(index >> 32));
            drop_piece(context.isa, index as u32, key, (threshold, factor), y);
        }
    });
}

/// As [`dropout`] for some elements of a tensor, whose mask it is.
pub fn dropout_within<E: Float>(context: &Context<'_>, x: Option<&[E]>, mask: Mask, within: Within, y: &mut [E]) {
    assert!(y.len().is_multiple_of(within.length), "whole runs of elements");
    for (run, y) in y.chunks_exact_mut(within.length).enumerate() {
        let at = run * within.length;
        let first = mask.first.wrapping_add((within.start + run * within.stride) as u64);
        dropout(context, x.map(|x| &x[at..at + y.len()]), Mask { first, ..mask }, y);
    }
}

vectorized! {
    fn drop_piece<E: Float>(start: u32, key: u64, rule: (u32, f32), y: &mut [E]) {
        let (low, high) = (key as u32, (key >> 32) as u32);
        for (offset, y) in (0u32..).zip(y) {
            let hash = finalise(finalise(start.wrapping_add(offset) ^ low).wrapping_add(high));
            *y = E::from_f32(if hash < rule.0 { 0.0 } else { y.to_f32() * rule.1 });
        }
    }
}

/// A bijection of 32-bit words in which every input bit reaches every output bit (constants found by Chris Wellons'
/// search for low bias).
#[inline(always)]
const fn finalise(word: u32) -> u32 {
    let word = (word ^ (word >> 16)).wrapping_mul(0x7FEB_352D);
    let word = (word ^ (word >> 15)).wrapping_mul(0x846C_A68B);
    word ^ (word >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::check::{once, same_bits};

    fn kept(key: u64, probability: f32, count: usize) -> Vec<f32> {
        kept_from(0, key, probability, count)
    }

    fn kept_from(first: u64, key: u64, probability: f32, count: usize) -> Vec<f32> {
        same_bits(|context| {
            let mut y = vec![1.0; count];
            dropout(context, None, Mask { probability, key, first }, &mut y);
            y
        })
    }

    #[test]
    fn a_part_has_the_mask_of_the_whole_across_a_multiple_of_two_to_the_32() {
        let (count, whole) = (3 * GRAIN, 7 * GRAIN as u64 + 5);
        for first in [0, (1 << 32) - whole / 2, (1 << 40) - 3] {
            let all = kept_from(first, 9, 0.5, whole as usize);
            for start in [1, 5, GRAIN, 2 * GRAIN + 3, 4 * GRAIN + 5] {
                let part = kept_from(first + start as u64, 9, 0.5, count);
                assert!(part == all[start..start + count], "from {start} behind {first}");
            }
        }
        let [low, high] = [0, 1 << 32].map(|first| kept_from(first, 9, 0.5, count));
        let agree = low.iter().zip(&high).filter(|(a, b)| a == b).count() as f64 / count as f64;
        assert!((agree - 0.5).abs() < 0.02, "the upper half of the index counts: {agree} agree");
    }

    #[test]
    fn the_kept_fraction_and_the_mean_are_as_asked() {
        let count = 200_000;
        for probability in [0.0, 0.1, 0.5, 0.9] {
            let y = kept(7, probability, count);
            let dropped = y.iter().filter(|&&y| y == 0.0).count() as f64 / count as f64;
            assert!((dropped - f64::from(probability)).abs() < 0.005, "{dropped} instead of {probability}");
            assert!((y.iter().map(|&y| f64::from(y)).sum::<f64>() / count as f64 - 1.0).abs() < 0.02);
        }
    }

    #[test]
    fn keys_give_independent_masks_and_neighbours_do_not_correlate() {
        let count = 100_000;
        let agree = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a == b).count() as f64 / a.len() as f64;
        let base = kept(1, 0.5, count);
        for key in [2, 3, 1 << 32, 1 << 63] {
            assert!((agree(&base, &kept(key, 0.5, count)) - 0.5).abs() < 0.01);
        }
        for distance in [1, 2, 16, 64, 1024] {
            assert!((agree(&base[distance..], &base[..count - distance]) - 0.5).abs() < 0.01);
        }
    }

    #[test]
    fn the_same_key_drops_the_same_elements_in_and_out_of_place() {
        let x: Vec<f32> = (1..=40_000).map(|x| x as f32).collect();
        let mask = kept(5, 0.3, x.len());
        let mut y = vec![f32::NAN; x.len()];
        once(|context| dropout(context, Some(&x), Mask { probability: 0.3, key: 5, first: 0 }, &mut y));
        assert!(y.iter().zip(mask.iter().zip(&x)).all(|(&y, (&mask, &x))| y == mask * x));
    }
}
