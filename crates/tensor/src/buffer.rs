//! Memory on the host that starts on a cache line, and views of it as numbers of another type.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};

use crate::dtype::Element;
use crate::plan::ALIGNMENT_BYTES;

const LANES: usize = ALIGNMENT_BYTES / size_of::<f32>();

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct CacheLine([f32; LANES]);

/// A fixed number of `f32`, zeroed, starting on a cache line.
#[derive(Clone, Default)]
pub struct Buffer {
    lines: Vec<CacheLine>,
    length: usize,
}

impl Buffer {
    /// So many zeros.
    pub fn zeroed(length: usize) -> Self {
        // All-zero lines come from the system's zeroed pages: memory that is never touched is never taken.
        Self { lines: vec![CacheLine([0.0; LANES]); length.div_ceil(LANES)], length }
    }

    /// The address of the first element, for devices that hand out parts of a buffer by plan.
    pub(crate) fn pointer(&mut self) -> *mut f32 {
        self.lines.as_mut_ptr().cast()
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: `lines` holds at least `length` initialised f32 one after the other (repr(C), no padding).
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.length) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.length) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Buffer({} f32)", self.length)
    }
}

/// `count` elements of any type from a byte of an arena of words on.
///
/// # Panics
/// When they are not inside, or the byte is not a multiple of the element's size.
pub(crate) fn elements<T: Element>(words: &[f32], byte: usize, count: usize) -> &[T] {
    check_range::<T>(words, byte, count);
    // SAFETY: the range was checked to lie inside; words are aligned for every element type, none of which is larger than
    // a word, and no bit pattern of one is invalid.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>().add(byte).cast(), count) }
}

/// As [`elements`], to be written.
pub(crate) fn elements_mut<T: Element>(words: &mut [f32], byte: usize, count: usize) -> &mut [T] {
    check_range::<T>(words, byte, count);
    // SAFETY: as in `elements`, and `words` is borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>().add(byte).cast(), count) }
}

fn check_range<T: Element>(words: &[f32], byte: usize, count: usize) {
    assert!(
        byte.is_multiple_of(size_of::<T>()) && align_of::<T>() <= align_of::<f32>(),
        "an element starts on its size"
    );
    let end = count.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(byte));
    assert!(end.is_some_and(|end| end <= size_of_val(words)), "the elements lie inside the arena");
}

/// A slice under another name of the same type: `Element` types are told apart by their `DTYPE`, which must be equal.
pub(crate) fn cast<A: Element, B: Element>(slice: &[A]) -> &[B] {
    assert!(A::DTYPE == B::DTYPE && size_of::<A>() == size_of::<B>() && align_of::<A>() == align_of::<B>());
    // SAFETY: an element type has one Rust type, so A and B are the same type.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), slice.len()) }
}

/// As [`cast`], to be written.
pub(crate) fn cast_mut<A: Element, B: Element>(slice: &mut [A]) -> &mut [B] {
    assert!(A::DTYPE == B::DTYPE && size_of::<A>() == size_of::<B>() && align_of::<A>() == align_of::<B>());
    // SAFETY: as in `cast`, and `slice` is borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), slice.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16::Bf16;

    #[test]
    fn a_buffer_is_zero_and_aligned() {
        for length in [0, 1, 16, 1000] {
            let mut buffer = Buffer::zeroed(length);
            assert_eq!(buffer.len(), length);
            assert!(buffer.iter().all(|&x| x == 0.0));
            assert_eq!(buffer.pointer() as usize % ALIGNMENT_BYTES, 0);
        }
    }

    #[test]
    fn elements_of_every_type_keep_their_bits() {
        let mut words = [0.0f32; 3];
        elements_mut::<i32>(&mut words, 4, 2).copy_from_slice(&[-1, i32::MAX]);
        elements_mut::<Bf16>(&mut words, 2, 1).copy_from_slice(&[Bf16::from_f32(1.5)]);
        assert_eq!(elements::<i32>(&words, 4, 2), [-1, i32::MAX]);
        assert_eq!(elements::<Bf16>(&words, 0, 2), [0.0, 1.5].map(Bf16::from_f32));
        assert_eq!(elements::<f32>(&words, 0, 1), [1.5]);
    }

    #[test]
    #[should_panic(expected = "inside the arena")]
    fn elements_end_with_the_arena() {
        elements::<Bf16>(&[0.0; 3], 2, 6);
    }
}
