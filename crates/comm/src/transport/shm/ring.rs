//! A ring of bytes in shared memory, with one writer and one reader: each is the port of one rank, borrowed
//! mutably.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;

use super::layout::{RING_DATA, RING_READ, RING_WRITTEN};
use super::{Memory, Port};

/// The two counters only grow. What a peer writes into its counter is believed only if it makes sense.
pub(super) struct Ring<'a> {
    memory: &'a Memory,
    offset: usize,
    bytes: usize,
}

impl Port {
    pub(super) fn ring(&self, from: usize, to: usize) -> Ring<'_> {
        Ring { memory: self.memory(), offset: self.layout.ring(from, to), bytes: self.layout.ring_bytes }
    }
}

impl Ring<'_> {
    fn counters(&self) -> Result<(u64, u64), String> {
        let written = self.memory.word64(self.offset + RING_WRITTEN).load(Ordering::Acquire);
        let read = self.memory.word64(self.offset + RING_READ).load(Ordering::Acquire);
        if written.wrapping_sub(read) > self.bytes as u64 {
            return Err("its counters in shared memory make no sense".into());
        }
        Ok((written, read))
    }

    /// Bytes that wait to be read.
    pub(super) fn used(&self) -> Result<usize, String> {
        self.counters().map(|(written, read)| written.wrapping_sub(read) as usize)
    }

    /// Bytes that can be written.
    pub(super) fn room(&self) -> Result<usize, String> {
        self.used().map(|used| self.bytes - used)
    }

    /// A count of bytes at a position as at most two pieces: those before the end of the ring and those from its start.
    fn pieces(&self, position: u64, count: usize) -> (usize, usize, usize) {
        let start = (position % self.bytes as u64) as usize;
        let first = count.min(self.bytes - start);
        (self.offset + RING_DATA + start, first, count - first)
    }

    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<usize, String> {
        let (written, read) = self.counters()?;
        let count = bytes.len().min(self.bytes - written.wrapping_sub(read) as usize);
        if count == 0 {
            return Ok(0);
        }
        let (start, first, second) = self.pieces(written, count);
        // SAFETY: these bytes lie between what was written and what was read one turn ago, so the reader does
        // not look at them before the counter says so; there is one writer.
        unsafe {
            self.memory.write(start, &bytes[..first]);
            self.memory.write(self.offset + RING_DATA, &bytes[first..first + second]);
        }
        self.memory.word64(self.offset + RING_WRITTEN).store(written + count as u64, Ordering::Release);
        Ok(count)
    }

    pub(super) fn pop(&mut self, bytes: &mut [u8]) -> Result<usize, String> {
        let (written, read) = self.counters()?;
        let count = bytes.len().min(written.wrapping_sub(read) as usize);
        if count == 0 {
            return Ok(0);
        }
        let (start, first, second) = self.pieces(read, count);
        // SAFETY: these bytes lie between what was read and what was written, so the writer does not come
        // here before the counter says so; there is one reader.
        unsafe {
            self.memory.read(start, &mut bytes[..first]);
            self.memory.read(self.offset + RING_DATA, &mut bytes[first..first + second]);
        }
        self.memory.word64(self.offset + RING_READ).store(read + count as u64, Ordering::Release);
        Ok(count)
    }
}
