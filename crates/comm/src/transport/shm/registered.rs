//! One rank's numbers in memory that holds every rank's, one after the other: an all-reduce adds them where
//! they lie.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Memory;
use super::layout::PAGE_BYTES;
use crate::reduce::Kind;

/// A buffer that all ranks of a communicator have registered together.
#[derive(Debug)]
pub struct Registered {
    /// This rank's handle on the file, which tells one world from another.
    file: Arc<OwnedFd>,
    memory: Memory,
    /// Where the memory begins in the file, which tells one buffer from another.
    start: u64,
    rank: usize,
    world: usize,
    length: usize,
    /// Whether peers may be writing here for ever: an all-reduce of it has failed.
    lost: bool,
}

impl Registered {
    /// Memory with room for every rank.
    pub(super) fn new(
        file: Arc<OwnedFd>,
        (start, memory): (u64, Memory),
        (rank, world): (usize, usize),
        length: usize,
    ) -> Self {
        Self { file, memory, start, rank, world, length, lost: false }
    }

    /// What one rank takes.
    pub(super) const fn stride(length: usize) -> usize {
        (length * size_of::<f32>()).next_multiple_of(PAGE_BYTES)
    }

    /// The handle on the file that it was made with.
    pub(super) const fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// What tells this buffer from others: its place in the file, and its length.
    pub(super) const fn identity(&self) -> [u64; 2] {
        [self.start, self.length as u64]
    }

    /// How many numbers of each rank.
    pub(super) const fn length(&self) -> usize {
        self.length
    }

    fn own_offset(&self) -> usize {
        assert!(!self.lost, "an all-reduce of this buffer has failed, so that peers may still write to it");
        self.rank * Self::stride(self.length)
    }

    /// This rank's numbers.
    ///
    /// # Panics
    /// After an all-reduce of them has failed.
    pub fn as_slice(&self) -> &[f32] {
        // SAFETY: peers touch these numbers only in an all-reduce of this very buffer that this rank has come
        // to as well, which borrows it mutably until all are done; where it fails before that, the buffer is
        // lost. In this process only this value leads to them.
        unsafe { self.memory.view(self.own_offset(), self.length) }
    }

    /// This rank's numbers, to be written.
    ///
    /// # Panics
    /// After an all-reduce of them has failed.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as in `as_slice`, and `self` is borrowed mutably.
        unsafe { self.memory.view_mut(self.own_offset(), self.length) }
    }

    /// The all-reduce did not come to its end.
    pub(super) fn lose(&mut self) {
        self.lost = true;
    }

    /// Adds a range of all ranks' numbers and writes the sums to all of them.
    ///
    /// # Safety
    /// All ranks have come to an all-reduce of this buffer, none has left it, and only this one reduces this
    /// range.
    pub(super) unsafe fn reduce(&mut self, range: Range<usize>) {
        assert!(range.end <= self.length, "outside the registered buffer");
        let offset = |rank: usize| rank * Self::stride(self.length) + range.start * size_of::<f32>();
        let offsets: Vec<usize> = (0..self.world).map(offset).collect();
        // SAFETY: ranks that are in the all-reduce hold no slice of the buffer, which they borrow mutably,
        // and reduce other ranges than this one.
        unsafe { self.memory.reduce(Kind::F32, &offsets, range.len() * size_of::<f32>()) };
    }
}
