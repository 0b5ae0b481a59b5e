//! Memory of every rank that the others read, write and add to by themselves: MPI's one-sided calls, which are the network's
//! own where it has such (RDMA). Every call is over when it returns, at both ends.
//!
//! Numbers that several ranks add to at once are added one by one, each whole; what is put is not kept from being seen
//! half. The memory box (`memory_box.rs`) has whole versions instead, keys, and clients that come and go; a window has the
//! ranks of `mpirun`, and memory that is there as long as they are.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use mpi::ffi;

use super::{Comm, Library, byte, check, float, int, sum};

/// A window's name.
struct Handle(ffi::MPI_Win);

// SAFETY: a handle is a name; MPI was started for calls from any thread, and the gate lets one in at a time.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Memory of all ranks of a communicator, as many bytes of each.
pub struct Window {
    library: Arc<Library>,
    handle: Handle,
    bytes: usize,
    size: usize,
}

impl Window {
    /// As many bytes of every rank, full of zeros. All ranks call this; MPI waits for them, without a deadline.
    pub(in super::super) fn allocate(comm: &Comm, bytes: usize) -> Result<Self, String> {
        let (mut base, mut window) = (std::ptr::null_mut::<c_void>(), MaybeUninit::uninit());
        let _turn = comm.library.turn();
        // SAFETY: the communicator is there until MPI ends; the call fills in where the memory is, and the window.
        check(unsafe {
            let base = (&raw mut base).cast();
            ffi::MPI_Win_allocate(
                bytes as ffi::MPI_Aint,
                1,
                ffi::RSMPI_INFO_NULL,
                comm.handle.0,
                base,
                window.as_mut_ptr(),
            )
        })?;
        // SAFETY: the call succeeded, so it filled in the window, and nobody else has it yet.
        let handle = Handle(unsafe { window.assume_init() });
        // SAFETY: the memory was just allocated, with this length; the others come to it behind the barrier below.
        unsafe { std::ptr::write_bytes(base.cast::<u8>(), 0, bytes) };
        // SAFETY: a window that was just made; from here on everybody may read and write everywhere.
        check(unsafe {
            ffi::MPI_Win_set_errhandler(handle.0, ffi::RSMPI_ERRORS_RETURN);
            ffi::MPI_Win_lock_all(0, handle.0)
        })?;
        // SAFETY: as above; what was written directly is there for all behind the barrier.
        check(unsafe {
            ffi::MPI_Win_sync(handle.0);
            ffi::MPI_Barrier(comm.handle.0)
        })?;
        Ok(Self { library: Arc::clone(&comm.library), handle, bytes, size: comm.size })
    }

    fn place(&self, rank: usize, at: usize, bytes: usize) -> Result<(c_int, ffi::MPI_Aint), String> {
        let inside = at.checked_add(bytes).is_some_and(|end| end <= self.bytes) && rank < self.size;
        inside.then_some((rank as c_int, at as ffi::MPI_Aint)).ok_or_else(|| "outside of the window".into())
    }

    /// Copies bytes of a rank's memory.
    ///
    /// # Errors
    /// When they are not inside, or MPI says so.
    pub fn get(&self, rank: usize, at: usize, bytes: &mut [u8]) -> Result<(), String> {
        let ((rank, at), count) = (self.place(rank, at, bytes.len())?, int(bytes.len())?);
        let _turn = self.library.turn();
        // SAFETY: inside of the window; the bytes are borrowed until the flush has ended the call.
        check(unsafe {
            let into = bytes.as_mut_ptr().cast();
            ffi::MPI_Get(into, count, byte(), rank, at, count, byte(), self.handle.0)
        })?;
        // SAFETY: the window is locked for all as long as it is there.
        check(unsafe { ffi::MPI_Win_flush(rank, self.handle.0) })
    }

    /// Replaces bytes of a rank's memory.
    ///
    /// # Errors
    /// As [`Window::get`].
    pub fn put(&self, rank: usize, at: usize, bytes: &[u8]) -> Result<(), String> {
        let ((rank, at), count) = (self.place(rank, at, bytes.len())?, int(bytes.len())?);
        let _turn = self.library.turn();
        // SAFETY: as above; the bytes are only read.
        check(unsafe {
            let from = bytes.as_ptr().cast();
            ffi::MPI_Put(from, count, byte(), rank, at, count, byte(), self.handle.0)
        })?;
        // SAFETY: as above.
        check(unsafe { ffi::MPI_Win_flush(rank, self.handle.0) })
    }

    /// Adds numbers to those of a rank's memory, each whole.
    ///
    /// # Errors
    /// As [`Window::get`].
    pub fn accumulate(&self, rank: usize, at: usize, numbers: &[f32]) -> Result<(), String> {
        let ((rank, at), count) = (self.place(rank, at, size_of_val(numbers))?, int(numbers.len())?);
        let _turn = self.library.turn();
        // SAFETY: as above; the numbers are only read.
        check(unsafe {
            let from = numbers.as_ptr().cast();
            ffi::MPI_Accumulate(from, count, float(), rank, at, count, float(), sum(), self.handle.0)
        })?;
        // SAFETY: as above.
        check(unsafe { ffi::MPI_Win_flush(rank, self.handle.0) })
    }

    /// Adds to a number of 64 bits, and tells what it was.
    ///
    /// # Errors
    /// As [`Window::get`].
    pub fn fetch_add(&self, rank: usize, at: usize, by: i64) -> Result<i64, String> {
        let ((rank, at), mut before) = (self.place(rank, at, 8)?, 0i64);
        let _turn = self.library.turn();
        // SAFETY: as above; both numbers outlive the flush.
        check(unsafe {
            let (by, before) = ((&raw const by).cast(), (&raw mut before).cast());
            ffi::MPI_Fetch_and_op(by, before, ffi::RSMPI_INT64_T, rank, at, sum(), self.handle.0)
        })?;
        // SAFETY: as above.
        check(unsafe { ffi::MPI_Win_flush(rank, self.handle.0) })?;
        Ok(before)
    }

    /// Gives the memory back. All ranks call this; where one is gone the window is left to MPI.
    ///
    /// # Errors
    /// When MPI says so.
    pub fn free(mut self) -> Result<(), String> {
        let _turn = self.library.turn();
        // SAFETY: nobody uses the window any more, which this value is given up for.
        check(unsafe {
            ffi::MPI_Win_unlock_all(self.handle.0);
            ffi::MPI_Win_free(&mut self.handle.0)
        })
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("bytes", &self.bytes).field("size", &self.size).finish_non_exhaustive()
    }
}
