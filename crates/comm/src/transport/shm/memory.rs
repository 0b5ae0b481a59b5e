//! Mapped memory: the only place of this transport that holds pointers (the memory box has its regions in it too). Every access is checked against the
//! mapping.
//!
//! Words are atomics. Plain bytes have one writer at a time, and who that is follows from words: rings say it
//! by their counters, staging slots and registered buffers by the rounds of `direct.rs`, the one-copy region
//! by the stages and pieces of `one_copy.rs`. Functions that touch plain bytes are `unsafe`, and their
//! callers say which of these it is. A peer that breaks the rules can make numbers wrong, as it can by
//! sending wrong ones; no length or pointer is ever read from this memory.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fd::AsFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::reduce::{Kind, round_bf16, widen_bf16};

/// Numbers of a sum that are made at once: they stay in the first-level cache.
const PART: usize = 2048;

/// A shared mapping.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread. Words are atomics, and whoever touches plain
// bytes promises that nobody else writes them, on whichever thread.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps part of a file; the offset is a multiple of a page.
    pub(crate) fn map(file: impl AsFd, offset: u64, bytes: usize) -> rustix::io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, offset)? };
        let start = NonNull::new(start.cast()).expect("a mapping does not start at zero");
        Ok(Self { start, bytes })
    }

    fn at(&self, offset: usize, bytes: usize, align: usize) -> *mut u8 {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "outside the shared memory");
        assert!(offset.is_multiple_of(align), "askew in the shared memory");
        // SAFETY: the offset was just found to be inside the mapping.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// A word. The places of words are fixed by the layouts and hold nothing else, so they are never plain
    /// bytes.
    pub(super) fn word32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the mapping and aligned; these words are accessed as atomics only.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4, 4).cast()) }
    }

    /// As [`Memory::word32`].
    pub(super) fn word64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8, 8).cast()) }
    }

    /// Copies bytes out.
    ///
    /// # Safety
    /// No rank writes these bytes meanwhile, and they hold no word.
    pub(super) unsafe fn read(&self, offset: usize, bytes: &mut [u8]) {
        let source = self.at(offset, bytes.len(), 1);
        // SAFETY: inside the mapping; the target is borrowed mutably and so is other memory; the caller
        // promises the rest.
        unsafe { std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies bytes in.
    ///
    /// # Safety
    /// No other rank touches these bytes meanwhile, nobody in this process holds a reference to them, and
    /// they hold no word.
    pub(crate) unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        let target = self.at(offset, bytes.len(), 1);
        // SAFETY: inside the mapping; nobody refers to the target, so the source is other memory; the caller
        // promises the rest.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
    }

    /// Elements in place.
    ///
    /// # Safety
    /// Nobody writes these bytes while the result is held, and they hold no word.
    pub(crate) unsafe fn view<T: bytemuck::AnyBitPattern>(&self, offset: usize, length: usize) -> &[T] {
        let start = self.at(offset, length * size_of::<T>(), align_of::<T>());
        // SAFETY: inside the mapping and aligned, any bits are a T, and the caller promises that nobody writes.
        unsafe { std::slice::from_raw_parts(start.cast(), length) }
    }

    /// Numbers in place, to be written.
    ///
    /// # Safety
    /// Nobody else touches these bytes while the result is held, through whatever mapping, and they hold no
    /// word.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that this is the only reference")]
    pub(crate) unsafe fn view_mut(&self, offset: usize, length: usize) -> &mut [f32] {
        let start = self.at(offset, length * size_of::<f32>(), align_of::<f32>());
        // SAFETY: inside the mapping and aligned, any bits are a number, and the caller promises that nobody
        // else is there.
        unsafe { std::slice::from_raw_parts_mut(start.cast(), length) }
    }

    /// Bytes in place, to be written.
    ///
    /// # Safety
    /// As [`Memory::view_mut`].
    #[expect(clippy::mut_from_ref, reason = "the caller promises that this is the only reference")]
    pub(crate) unsafe fn bytes_mut(&self, offset: usize, length: usize) -> &mut [u8] {
        let start = self.at(offset, length, 1);
        // SAFETY: inside the mapping, and the caller promises that nobody else is there.
        unsafe { std::slice::from_raw_parts_mut(start, length) }
    }

    /// Two ranks in one pass, without a copy between.
    ///
    /// # Safety
    /// As [`Memory::reduce`].
    unsafe fn reduce_two(&self, first: usize, second: usize, length: usize) {
        let bytes = length * size_of::<f32>();
        assert!(first.abs_diff(second) >= bytes, "two ranks' numbers do not overlap");
        // SAFETY: the caller promises that only this rank touches either range now, and they were found to be
        // disjoint.
        let (first, second) = unsafe { (self.view_mut(first, length), self.view_mut(second, length)) };
        for (first, second) in first.iter_mut().zip(second) {
            let sum = *first + *second;
            (*first, *second) = (sum, sum);
        }
    }

    /// Adds the numbers at all of `offsets`, in that order, and writes the sums to all of them, in parts that
    /// stay in the first-level cache.
    ///
    /// # Safety
    /// Only this rank touches these bytes, in every rank's part, until the call returns; and they hold no
    /// word.
    pub(super) unsafe fn reduce(&self, kind: Kind, offsets: &[usize], bytes: usize) {
        if let (Kind::F32, &[first, second]) = (kind, offsets) {
            // SAFETY: what the caller promises.
            return unsafe { self.reduce_two(first, second, bytes / size_of::<f32>()) };
        }
        let (mut sums, mut halves) = ([0f32; PART], [0u16; PART]);
        let length = bytes / kind.bytes();
        for start in (0..length).step_by(PART) {
            let count = PART.min(length - start);
            let sums = &mut sums[..count];
            for (nth, offset) in offsets.iter().enumerate() {
                let from = offset + start * kind.bytes();
                match kind {
                    Kind::F32 => {
                        // SAFETY: the caller promises that only this rank touches these bytes.
                        accumulate(sums, unsafe { self.view::<f32>(from, count) }.iter().copied(), nth == 0);
                    }
                    Kind::Bf16 => {
                        // SAFETY: as above.
                        let numbers = unsafe { self.view::<u16>(from, count) };
                        accumulate(sums, numbers.iter().map(|&half| widen_bf16(half)), nth == 0);
                    }
                    Kind::Byte => panic!("bytes have no sum"),
                }
            }
            let result: &[u8] = if kind == Kind::Bf16 {
                halves.iter_mut().zip(&*sums).for_each(|(half, &sum)| *half = round_bf16(sum));
                bytemuck::cast_slice(&halves[..count])
            } else {
                bytemuck::cast_slice(sums)
            };
            for offset in offsets {
                // SAFETY: the caller promises that only this rank touches these bytes; the views above are
                // gone.
                unsafe { self.write(offset + start * kind.bytes(), result) };
            }
        }
    }

    /// Writes the sums of the numbers at all of `offsets`, added in that order.
    ///
    /// # Safety
    /// Nobody writes these numbers until the call returns, and they hold no word.
    pub(super) unsafe fn sum_into(&self, offsets: impl Iterator<Item = usize> + Clone, sums: &mut [f32]) {
        for (part, sums) in sums.chunks_mut(PART).enumerate() {
            for (nth, offset) in offsets.clone().enumerate() {
                let from = offset + part * PART * size_of::<f32>();
                // SAFETY: the caller promises that nobody writes.
                let numbers = unsafe { self.view::<f32>(from, sums.len()) };
                accumulate(sums, numbers.iter().copied(), nth == 0);
            }
        }
    }
}

#[inline(always)]
fn accumulate(sums: &mut [f32], numbers: impl Iterator<Item = f32>, first: bool) {
    if first {
        sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum = number);
    } else {
        sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing borrowed from it outlives it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A mapping of numbers that other ranks map too. It looks like a slice of its own because whoever made it,
/// by [`super::OneCopy::lend`], has promised to look at it only when nobody else writes there, and to write
/// only when nobody else looks.
#[derive(Debug)]
pub struct LentSlice {
    memory: Memory,
    length: usize,
}

impl LentSlice {
    /// So many numbers at the start of a mapping.
    ///
    /// # Safety
    /// As [`super::OneCopy::lend`]; and the numbers hold no word.
    pub(super) unsafe fn new(memory: Memory, length: usize) -> Self {
        assert!(length * size_of::<f32>() <= memory.bytes, "outside the shared memory");
        Self { memory, length }
    }
}

impl Deref for LentSlice {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: whoever made this has promised that nobody writes what is looked at, as long as it is.
        unsafe { self.memory.view(0, self.length) }
    }
}

impl DerefMut for LentSlice {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: this mapping is reached through this value alone, which is borrowed mutably; that nobody
        // looks at what is written through other mappings meanwhile is promised by whoever made it.
        unsafe { self.memory.view_mut(0, self.length) }
    }
}
