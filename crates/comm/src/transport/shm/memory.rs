//! Mapped memory, the only place of this transport that holds pointers. Every access is checked against the mapping.
//!
//! Words are atomics. Plain bytes have one writer at a time: rings say who by their counters, staging slots and shared
//! buffers by the rounds of `direct.rs` or the stages of `stages.rs`, common memory by what its users agree on. A peer that breaks these rules can make numbers wrong, as it can by sending
//! wrong ones; no length, offset or pointer is ever read from this memory.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fd::AsFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::layout::{LINE_BYTES, PAGE_BYTES};
use crate::reduce::{Kind, round_bf16, widen_bf16};

/// A shared mapping.
#[derive(Debug)]
pub(super) struct Memory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; accesses follow the rules above on any thread.
unsafe impl Send for Memory {}
// SAFETY: as for Send; words are atomics, and plain bytes have one writer at a time.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps part of a file; the offset is a multiple of a page.
    pub(super) fn map(file: impl AsFd, offset: u64, bytes: usize) -> rustix::io::Result<Self> {
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

    pub(super) fn word32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the mapping and aligned; these words are accessed as atomics only.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4, 4).cast()) }
    }

    pub(super) fn word64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8, 8).cast()) }
    }

    pub(super) fn read(&self, offset: usize, bytes: &mut [u8]) {
        let source = self.at(offset, bytes.len(), 1);
        // SAFETY: inside the mapping; the target is another allocation; nobody writes these bytes now (see the top).
        unsafe { std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len()) };
    }

    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        let target = self.at(offset, bytes.len(), 1);
        // SAFETY: inside the mapping; the source is another allocation; nobody else touches these bytes now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
    }

    /// Elements that nobody writes while the result is held.
    ///
    /// # Safety
    /// As said.
    unsafe fn view<T: bytemuck::AnyBitPattern>(&self, offset: usize, length: usize) -> &[T] {
        let start = self.at(offset, length * size_of::<T>(), align_of::<T>());
        // SAFETY: inside the mapping and aligned, any bits are a T, and the caller promises that nobody writes.
        unsafe { std::slice::from_raw_parts(start.cast(), length) }
    }

    /// Two ranks in one pass, without a copy between.
    fn sum_two(&self, first: usize, second: usize, length: usize) {
        let bytes = length * size_of::<f32>();
        assert!(first.abs_diff(second) >= bytes, "two ranks' numbers do not overlap");
        let view = |offset: usize| self.at(offset, bytes, align_of::<f32>()).cast::<f32>();
        // SAFETY: inside the mapping, aligned, disjoint; only this rank touches these bytes in this phase of the round.
        let first = unsafe { std::slice::from_raw_parts_mut(view(first), length) };
        // SAFETY: as above.
        let second = unsafe { std::slice::from_raw_parts_mut(view(second), length) };
        for (first, second) in first.iter_mut().zip(second) {
            let sum = *first + *second;
            (*first, *second) = (sum, sum);
        }
    }

    /// Adds the numbers at all of `offsets`, in that order, and writes the sums to all of them, in pieces that stay in
    /// the first-level cache. The caller holds the right to these bytes in every rank's part (see the top).
    pub(super) fn sum(&self, kind: Kind, offsets: &[usize], bytes: usize) {
        if let (Kind::F32, &[first, second]) = (kind, offsets) {
            return self.sum_two(first, second, bytes / size_of::<f32>());
        }
        const PIECE: usize = 2048;
        let mut sums = [0f32; PIECE];
        let mut halves = [0u16; PIECE];
        let length = bytes / kind.bytes();
        let mut start = 0;
        while start < length {
            let count = PIECE.min(length - start);
            let sums = &mut sums[..count];
            for (nth, offset) in offsets.iter().enumerate() {
                let from = offset + start * kind.bytes();
                match kind {
                    Kind::F32 => {
                        // SAFETY: only this rank touches these bytes in this phase of the round.
                        let numbers = unsafe { self.view::<f32>(from, count) };
                        accumulate(sums, numbers.iter().copied(), nth == 0);
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
            offsets.iter().for_each(|offset| self.write(offset + start * kind.bytes(), result));
            start += count;
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

/// One rank's numbers in a mapping that holds every rank's, one after the other.
#[derive(Debug)]
pub struct Mapped {
    memory: Memory,
    /// Where the mapping begins in the common file.
    start: u64,
    stride: usize,
    rank: usize,
    length: usize,
}

impl Mapped {
    pub(super) fn new((memory, start): (Memory, u64), stride: usize, rank: usize, length: usize) -> Self {
        Self { memory, start, stride, rank, length }
    }

    /// Where this rank's numbers begin in the common file, and how many they are.
    pub(super) const fn own_place(&self) -> (u64, usize) {
        (self.start + (self.rank * self.stride) as u64, self.length)
    }

    /// What a rank takes of the mapping: its numbers, and on cache lines of their own the stage it has come to and two counters, of
    /// which those of rank 0 are used by all.
    pub(super) const fn stride(length: usize) -> usize {
        (Self::stage_offset(length) + 3 * LINE_BYTES).next_multiple_of(PAGE_BYTES)
    }

    const fn stage_offset(length: usize) -> usize {
        (length * size_of::<f32>()).next_multiple_of(LINE_BYTES)
    }

    /// How far a rank is with the buffer.
    pub(super) fn stage(&self, rank: usize) -> &AtomicU64 {
        self.memory.word64(rank * self.stride + Self::stage_offset(self.length))
    }

    /// How many pieces of work were ever taken by anybody.
    pub(super) fn taken(&self) -> &AtomicU64 {
        self.memory.word64(Self::stage_offset(self.length) + LINE_BYTES)
    }

    /// How many of them are done.
    pub(super) fn done(&self) -> &AtomicU64 {
        self.memory.word64(Self::stage_offset(self.length) + 2 * LINE_BYTES)
    }

    /// Writes the sum of a range of all ranks' numbers, added in the order of ranks, once all have come to a stage with a `board`, by
    /// which they say that these numbers are there.
    pub(super) fn sum_into(&self, world: usize, range: Range<usize>, (board, stage): (&Self, u64), sums: &mut [f32]) {
        assert_eq!(sums.len(), range.len(), "a sum for each number");
        assert!(range.end <= self.length, "outside the shared buffer");
        let there = |rank| board.stage(rank).load(Ordering::Acquire) >= stage;
        assert!((0..world).all(there), "not all ranks are there yet");
        // Parts of the sums that stay in the first-level cache.
        const PIECE: usize = 2048;
        for (start, sums) in range.step_by(PIECE).zip(sums.chunks_mut(PIECE)) {
            for rank in 0..world {
                let offset = rank * self.stride + start * size_of::<f32>();
                // SAFETY: by the rules of `stages.rs` a rank that is there writes its numbers again only after all that is to be
                // done with them is.
                let numbers = unsafe { self.memory.view::<f32>(offset, sums.len()) };
                accumulate(sums, numbers.iter().copied(), rank == 0);
            }
        }
    }

    /// This rank's numbers.
    pub fn own(&self) -> &[f32] {
        // SAFETY: peers write here only during an all-reduce, which borrows this buffer mutably.
        unsafe { self.memory.view(self.rank * self.stride, self.length) }
    }

    /// This rank's numbers, to be written.
    pub fn own_mut(&mut self) -> &mut [f32] {
        let start = self.memory.at(self.rank * self.stride, self.length * size_of::<f32>(), align_of::<f32>());
        // SAFETY: inside the mapping and aligned; peers touch these bytes only during an all-reduce, which borrows this
        // buffer mutably, and within this process only this value leads to them.
        unsafe { std::slice::from_raw_parts_mut(start.cast(), self.length) }
    }

    /// Adds a range of all ranks' numbers and writes the sums to all of them.
    pub(super) fn sum(&mut self, world: usize, range: Range<usize>) {
        assert!(range.end <= self.length, "outside the shared buffer");
        let offset = |rank: usize| rank * self.stride + range.start * size_of::<f32>();
        let offsets: Vec<usize> = (0..world).map(offset).collect();
        self.memory.sum(Kind::F32, &offsets, range.len() * size_of::<f32>());
    }
}

/// Memory that all ranks map and that is no rank's own. Who may write or read which part of it when, is what those who use it have
/// agreed on by the stages of shared buffers.
#[derive(Debug)]
pub struct Common {
    memory: Memory,
    length: usize,
}

impl Common {
    pub(super) const fn new(memory: Memory, length: usize) -> Self {
        Self { memory, length }
    }

    /// The bytes that so many numbers take of a mapping.
    pub(super) const fn bytes(length: usize) -> usize {
        let bytes = length * size_of::<f32>();
        // A mapping is never empty.
        if bytes == 0 { PAGE_BYTES } else { bytes.next_multiple_of(PAGE_BYTES) }
    }
}

impl Deref for Common {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: inside the mapping and aligned, and any bits are numbers. Parts that are looked at are not written by others
        // meanwhile (see above).
        unsafe { self.memory.view(0, self.length) }
    }
}

impl DerefMut for Common {
    fn deref_mut(&mut self) -> &mut [f32] {
        let start = self.memory.at(0, self.length * size_of::<f32>(), align_of::<f32>());
        // SAFETY: as in `deref`, and this mapping is reached through this value alone.
        unsafe { std::slice::from_raw_parts_mut(start.cast(), self.length) }
    }
}
