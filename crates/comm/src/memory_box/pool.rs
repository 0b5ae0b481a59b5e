//! Memory that the system has given in advance: a file that shrinks as regions grow, so that what was promised is there.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::retry_on_intr;

/// What is kept for regions to come.
#[derive(Debug)]
pub(super) struct Pool {
    file: OwnedFd,
    kept: u64,
    bytes: u64,
}

impl Pool {
    /// Takes so many bytes.
    ///
    /// # Errors
    /// When the system has not as many.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let file = memfd_create("paceline-pool", MemfdFlags::CLOEXEC)?;
        let mut pool = Self { file, kept: 0, bytes };
        pool.settle(0)?;
        Ok(pool)
    }

    /// What is kept follows what is used: together they are what was given in advance, as long as less is used.
    ///
    /// # Errors
    /// When the system takes back what was freed and does not give it again.
    pub fn settle(&mut self, used: u64) -> io::Result<()> {
        let wanted = self.bytes.saturating_sub(used);
        if wanted < self.kept {
            ftruncate(&self.file, wanted)?;
        } else if wanted > self.kept {
            retry_on_intr(|| fallocate(&self.file, FallocateFlags::empty(), self.kept, wanted - self.kept))?;
        }
        self.kept = wanted;
        Ok(())
    }
}
