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

/// The bits of `f32` read as `i32`, which is how integer tensors live in an arena of words.
pub(crate) fn as_i32(words: &[f32]) -> &[i32] {
    // SAFETY: both types have four bytes, the same alignment and no invalid bit patterns.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}

/// As [`as_i32`], to be written.
pub(crate) fn as_i32_mut(words: &mut [f32]) -> &mut [i32] {
    // SAFETY: as in `as_i32`, and `words` is borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

/// A slice under another name of the same type: `Element` types are told apart by their `DTYPE`, which must be equal.
pub(crate) fn cast<A: Element, B: Element>(slice: &[A]) -> &[B] {
    assert!(A::DTYPE == B::DTYPE && size_of::<A>() == size_of::<B>() && align_of::<A>() == align_of::<B>());
    // SAFETY: an element type has one Rust type (f32 or i32), so A and B are the same type.
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
    fn integers_keep_their_bits() {
        let mut words = [0.0f32; 3];
        as_i32_mut(&mut words).copy_from_slice(&[-1, 0, i32::MAX]);
        assert_eq!(as_i32(&words), [-1, 0, i32::MAX]);
    }
}
