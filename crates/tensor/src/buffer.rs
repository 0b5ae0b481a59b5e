//! Memory on the host that starts on a cache line, and views of it as numbers of another type.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use paceline_system::memory::OutOfMemory;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::dtype::Element;
use crate::plan::ALIGNMENT_BYTES;

const LANES: usize = ALIGNMENT_BYTES / size_of::<f32>();

/// A huge page of x86 and of most arm64 systems.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct CacheLine([f32; LANES]);

/// A fixed number of `f32`, zeroed, starting on a cache line.
///
/// From the size of a huge page on it is a mapping of its own that asks for huge pages and starts on one: a page is
/// taken, zeroed by the system, when it is first touched, so memory that is never used is never held, and it lies near
/// the core that touched it.
pub struct Buffer {
    memory: Memory,
    length: usize,
}

enum Memory {
    Lines(Vec<CacheLine>),
    Pages(Pages),
    /// With the address at which it was found.
    Lent(Box<dyn Lent>, usize),
}

/// Numbers that somebody else keeps, say in memory that several processes map. A value that gives out slices
/// promises, as every safe type does, that nobody else writes what is read through them, or reads what is
/// written: where that takes rules which no type can check, making the value is `unsafe`.
pub trait Lent: DerefMut<Target = [f32]> + Send + Sync {}

impl<T: DerefMut<Target = [f32]> + Send + Sync> Lent for T {}

impl Buffer {
    /// So many zeros.
    ///
    /// # Panics
    /// As [`Buffer::zeroed_for`].
    pub fn zeroed(length: usize) -> Self {
        Self::zeroed_for("a buffer", length)
    }

    /// As [`Buffer::zeroed`], and an error says what they are for.
    ///
    /// # Panics
    /// When the system has no such range of addresses: with an [`OutOfMemory`], which [`paceline_system::memory::caught`]
    /// makes an error of.
    pub fn zeroed_for(what: &'static str, length: usize) -> Self {
        let memory = if length < HUGE_PAGE_BYTES / size_of::<f32>() {
            Memory::Lines(vec![CacheLine([0.0; LANES]); length.div_ceil(LANES)])
        } else {
            let bytes = length.saturating_mul(size_of::<f32>());
            Memory::Pages(Pages::zeroed(bytes).unwrap_or_else(|| OutOfMemory { what, bytes }.unwind()))
        };
        Self { memory, length }
    }

    /// These numbers, wherever they are.
    ///
    /// # Panics
    /// When they do not start on a cache line.
    pub fn lent(mut memory: Box<dyn Lent>) -> Self {
        let numbers = on_a_line(&mut memory);
        let (length, address) = (numbers.len(), numbers.as_ptr().addr());
        Self { memory: Memory::Lent(memory, address), length }
    }

    /// The address of the first element, for devices that hand out parts of a buffer by plan.
    pub(crate) fn pointer(&mut self) -> *mut f32 {
        match &mut self.memory {
            Memory::Lines(lines) => lines.as_mut_ptr().cast(),
            Memory::Pages(pages) => pages.start.as_ptr(),
            // Devices keep the address: whoever lends other memory each time, or too little of it, ends here.
            Memory::Lent(memory, address) => {
                let numbers = &mut memory[..self.length];
                assert!(numbers.as_ptr().addr() == *address, "what is lent stays where it is");
                numbers.as_mut_ptr()
            }
        }
    }
}

fn on_a_line(numbers: &mut [f32]) -> &mut [f32] {
    assert!(numbers.as_ptr().addr().is_multiple_of(ALIGNMENT_BYTES), "a buffer starts on a cache line");
    numbers
}

/// Anonymous memory of the system.
struct Pages {
    /// What the system gave: the huge pages, and room to align them.
    mapping: NonNull<std::ffi::c_void>,
    mapping_bytes: usize,
    /// The first huge page.
    start: NonNull<f32>,
}

// SAFETY: the mapping belongs to this value alone; it is reached through `Buffer`, by shared or by exclusive reference.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// None where the system has no such range of addresses.
    fn zeroed(bytes: usize) -> Option<Self> {
        let bytes = bytes.checked_next_multiple_of(HUGE_PAGE_BYTES)?;
        let mapping_bytes = bytes.checked_add(HUGE_PAGE_BYTES)?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the system's choice: it replaces nothing.
        let mapping = unsafe { mmap_anonymous(std::ptr::null_mut(), mapping_bytes, access, flags) }.ok()?;
        let offset = mapping.align_offset(HUGE_PAGE_BYTES);
        // SAFETY: the room for the alignment is part of the mapping.
        let start = unsafe { mapping.byte_add(offset) };
        // SAFETY: inside the mapping. A system without huge pages refuses, which changes nothing but speed.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxHugepage) };
        let pointer = |address| NonNull::new(address).expect("the system maps nothing at address 0");
        Some(Self { mapping: pointer(mapping), mapping_bytes, start: pointer(start).cast() })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `zeroed` and nobody refers to it any more. It cannot fail for a whole mapping.
        let _ = unsafe { munmap(self.mapping.as_ptr(), self.mapping_bytes) };
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.length);
        copy.copy_from_slice(self);
        copy
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        let pointer = match &self.memory {
            Memory::Lines(lines) => lines.as_ptr().cast(),
            Memory::Pages(pages) => pages.start.as_ptr().cast_const(),
            Memory::Lent(memory, _) => return &memory[..self.length],
        };
        // SAFETY: lines (repr(C), no padding) and pages hold at least `length` f32 one after the other, all initialised.
        unsafe { std::slice::from_raw_parts(pointer, self.length) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        let (pointer, length) = (self.pointer(), self.length);
        // SAFETY: as in `deref`; what is lent was found to have this length; and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(pointer, length) }
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

/// The bytes of a slice.
pub(crate) fn bytes_of<T: Element>(slice: &[T]) -> &[u8] {
    // SAFETY: element types are plain numbers without padding; the bytes are borrowed as long as the slice.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), size_of_val(slice)) }
}

/// As [`bytes_of`], to be written.
pub(crate) fn bytes_of_mut<T: Element>(slice: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`, borrowed mutably; no bit pattern of an element type is invalid.
    unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), size_of_val(slice)) }
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
        let huge = HUGE_PAGE_BYTES / size_of::<f32>();
        for length in [0, 1, 16, 1000, huge - 1, huge, 3 * huge + 5] {
            let mut buffer = Buffer::zeroed(length);
            assert_eq!(buffer.len(), length);
            assert!(buffer.iter().all(|&x| x == 0.0));
            let alignment = if length < huge { ALIGNMENT_BYTES } else { HUGE_PAGE_BYTES };
            assert_eq!(buffer.pointer() as usize % alignment, 0);
            buffer.fill(1.0);
            let copy = buffer.clone();
            assert!(copy.len() == length && copy.iter().all(|&x| x == 1.0));
        }
    }

    #[test]
    fn memory_that_is_not_touched_is_not_taken() {
        let before = paceline_system::host::peak_memory_bytes();
        let mut buffer = Buffer::zeroed(1 << 32);
        (buffer[0], buffer[(1 << 32) - 1]) = (1.0, 2.0);
        assert!(paceline_system::host::peak_memory_bytes() - before < 1 << 30, "of 16 GiB");
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let refused = paceline_system::memory::caught(|| Buffer::zeroed_for("a test", 1 << 60)).unwrap_err();
        assert_eq!(refused, OutOfMemory { what: "a test", bytes: 1 << 62 });
        assert!(paceline_system::memory::caught(|| Buffer::zeroed(usize::MAX)).is_err());
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
