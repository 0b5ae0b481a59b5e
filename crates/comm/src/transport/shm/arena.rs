//! What is left of a world's or a group's part of the file: ranks that ask for the same, in the same order,
//! are given the same place.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Memory;
use super::layout::{CONTEXT_BYTES, PAGE_BYTES};
use crate::error::CommError;
use crate::rank::Rank;

/// A part of the file, of which some is given away.
#[derive(Debug)]
pub(super) struct Arena {
    pub(super) file: Arc<OwnedFd>,
    rank: Rank,
    next: u64,
    end: u64,
}

impl Arena {
    /// All of a context's part.
    pub(super) fn new(file: Arc<OwnedFd>, rank: Rank, context: u64) -> Self {
        let next = context * CONTEXT_BYTES;
        Self { file, rank, next, end: next + CONTEXT_BYTES }
    }

    /// Takes the next bytes, whole pages and at least one, and maps them. Where they begin in the file.
    pub(super) fn map(&mut self, bytes: usize) -> Result<(u64, Memory), CommError> {
        let (start, bytes) = (self.next, bytes.max(1).next_multiple_of(PAGE_BYTES));
        if bytes as u64 > self.end - start {
            return Err(self.failed(std::io::ErrorKind::OutOfMemory.into()));
        }
        let memory = self.map_again(start, bytes)?;
        self.next += bytes as u64;
        Ok((start, memory))
    }

    /// Another mapping of bytes that were taken before.
    pub(super) fn map_again(&self, start: u64, bytes: usize) -> Result<Memory, CommError> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        Memory::map(&self.file, start, bytes).map_err(|error| self.failed(error.into()))
    }

    /// Maps again what this arena has given away, and gives away nothing.
    pub(super) fn handle(&self) -> Self {
        Self { file: Arc::clone(&self.file), rank: self.rank, next: self.end, end: self.end }
    }

    /// Whether a place of the file was given away by this arena.
    pub(super) const fn contains(&self, start: u64) -> bool {
        self.end - CONTEXT_BYTES <= start && start < self.next
    }

    fn failed(&self, source: std::io::Error) -> CommError {
        CommError::System { rank: self.rank, what: "map shared memory", source }
    }
}
