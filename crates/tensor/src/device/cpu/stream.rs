//! Results that are larger than the caches are written past them: a line that is written whole need not be read first.
#![allow(unsafe_code)]

use super::isa::Isa;
use super::simd::{Simd, Vectorised};
use crate::dtype::Element;

/// A result of at least this many bytes will not be found in a cache by whoever reads it next.
pub(super) const BYTES_MIN: usize = 16 << 20;

/// Elements that are made in the first-level cache before they are written.
const BLOCK: usize = 2048;

/// Fills `target` past the caches, a block at a time: `fill(start, block)` makes the elements from `start` on.
pub(super) fn in_blocks<E: Element>(isa: Isa, target: &mut [E], mut fill: impl FnMut(usize, &mut [E])) {
    let mut buffer = [E::default(); BLOCK];
    for (index, target) in target.chunks_mut(BLOCK).enumerate() {
        let source = &mut buffer[..target.len()];
        fill(index * BLOCK, source);
        isa.run(Copy { source, target });
    }
    // Whoever reads the elements was told by the pool, which such writes may overtake.
    isa.run(Fence);
}

struct Copy<'a, E> {
    source: &'a [E],
    target: &'a mut [E],
}

impl<E: Element> Vectorised for Copy<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let bytes = size_of::<S::Vector>();
        let ragged = self.target.as_ptr().align_offset(bytes).min(self.target.len());
        let lanes = bytes / size_of::<E>();
        let (head, body) = self.target.split_at_mut(ragged);
        let (head_source, body_source) = self.source[..ragged + body.len()].split_at(ragged);
        head.copy_from_slice(head_source);
        let whole = body.len() / lanes * lanes;
        for start in (0..whole).step_by(lanes) {
            // SAFETY: `whole` elements lie in both slices, the target is aligned to a vector, and the caller has seen the
            // instructions. Vectors move bits and do not look at them.
            unsafe { S::stream(body.as_mut_ptr().add(start).cast(), S::load(body_source.as_ptr().add(start).cast())) };
        }
        body[whole..].copy_from_slice(&body_source[whole..]);
    }
}

struct Fence;

impl Vectorised for Fence {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller has seen the instructions.
        unsafe { S::fence() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16::Bf16;
    use crate::dtype::Float;

    fn check<E: Float + PartialEq + std::fmt::Debug>(isa: Isa, start: usize, end: usize) {
        let number = |index: usize| E::from_f32((index % 251) as f32);
        let mut target = vec![E::from_f32(-1.0); 5000];
        in_blocks(isa, &mut target[start..end], |first, block| {
            block.iter_mut().enumerate().for_each(|(index, x)| *x = number(first + index));
        });
        for (index, &found) in target.iter().enumerate() {
            let inside = (start..end).contains(&index);
            assert_eq!(found, if inside { number(index - start) } else { E::from_f32(-1.0) }, "{isa:?} at {index}");
        }
    }

    #[test]
    fn every_element_arrives_at_any_offset_and_no_other_is_touched() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for (start, end) in [(0, 5000), (1, 4999), (7, 40), (3, 3), (16, 17), (33, 2500)] {
                check::<f32>(isa, start, end);
                check::<Bf16>(isa, start, end);
            }
        }
    }
}
