//! The calls of MPI, made safe: an [`Operation`] owns all memory that MPI reads or writes on its behalf, and gives it up only
//! when MPI says that it is done with it. One that is dropped before leaves its memory to MPI for good.
//!
//! MPI is started for calls from any thread, one at a time (`MPI_THREAD_SERIALIZED`); communicators of
//! several threads take turns at a gate that all of them share ([`Library`]). All calls come back at once,
//! but those that start and end MPI and the one that makes a group.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit, forget};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mpi::Threading;
use mpi::environment::{Universe, initialize_with_threading, library_version};
use mpi::ffi;
use mpi::topology::Communicator;
use paceline_system::clock::{self, Clock};

mod window;

pub use window::Window;

/// What marks the messages of a port.
const TAG: c_int = 1;

/// How long the others may take to come to the end too.
const FAREWELL: Duration = Duration::from_secs(2);

/// MPI itself: started once, and ended when nobody uses it any more.
struct Library {
    universe: ManuallyDrop<Universe>,
    gate: Mutex<()>,
}

impl Library {
    /// Keeps other threads from calling MPI as long as the result is held.
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all ranks have come here in time.
    fn all_are_here(&mut self) -> bool {
        let (clock, mut request, mut done) = (Clock::real(), MaybeUninit::uninit(), 0);
        // SAFETY: no memory is involved but the request, which the call fills in. Nobody else is left to call
        // MPI.
        if check(unsafe { ffi::MPI_Ibarrier(ffi::RSMPI_COMM_WORLD, request.as_mut_ptr()) }).is_err() {
            return false;
        }
        while clock.now() < FAREWELL {
            // SAFETY: the request was filled in, and has not been done before.
            let asked = check(unsafe { ffi::MPI_Test(request.as_mut_ptr(), &mut done, ffi::RSMPI_STATUS_IGNORE) });
            if asked.is_err() || done != 0 {
                return asked.is_ok();
            }
            clock::sleep(Duration::from_micros(100));
        }
        false
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // Ending MPI waits for all ranks, without a deadline: it is done only where all are there.
        if self.all_are_here() {
            // SAFETY: the universe is dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.universe) };
        }
    }
}

/// MPI's name for a communicator. It stays until MPI ends: giving it back would be a collective of its own.
#[derive(Clone, Copy)]
struct Handle(ffi::MPI_Comm);

// SAFETY: a handle is a name; MPI was started for calls from any thread, and the gate lets one in at a time.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// All ranks that `mpirun` started, or some of them.
pub struct Comm {
    library: Arc<Library>,
    handle: Handle,
    rank: usize,
    size: usize,
}

impl Comm {
    /// Starts MPI.
    pub fn join() -> Result<Self, String> {
        let started = initialize_with_threading(Threading::Serialized);
        let (universe, provided) = started.ok_or("MPI was started in this process before")?;
        if provided < Threading::Serialized {
            return Err(format!("this MPI allows calls from one thread only ({provided:?})"));
        }
        // SAFETY: MPI has been started; the world and the handler are constants of the library.
        check(unsafe { ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) })?;
        let world = universe.world();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        let library = Arc::new(Library { universe: ManuallyDrop::new(universe), gate: Mutex::default() });
        // SAFETY: a constant of the library.
        Ok(Self { library, handle: Handle(unsafe { ffi::RSMPI_COMM_WORLD }), rank, size })
    }

    /// The communicator of some ranks, of which this is one, in this order. All of them call this; MPI waits
    /// for them here, without a deadline.
    pub fn group(&self, members: &[usize]) -> Result<Self, String> {
        let rank = members.iter().position(|&member| member == self.rank).ok_or("this rank is not a member")?;
        let (count, members) = (int(members.len())?, ints(members)?);
        let _turn = self.library.turn();
        let (mut all, mut some, mut new) = (MaybeUninit::uninit(), MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the communicator is there until MPI ends; the call fills in the group.
        check(unsafe { ffi::MPI_Comm_group(self.handle.0, all.as_mut_ptr()) })?;
        // SAFETY: the group was filled in, and there are `count` ranks of it, all different; the call fills
        // in the other.
        let chosen =
            check(unsafe { ffi::MPI_Group_incl(*all.assume_init_ref(), count, members.as_ptr(), some.as_mut_ptr()) });
        let made = chosen.and_then(|()| {
            // SAFETY: the group was filled in, and this rank is in it; the call fills in the communicator.
            check(unsafe {
                let made = ffi::MPI_Comm_create_group(self.handle.0, *some.assume_init_ref(), TAG, new.as_mut_ptr());
                ffi::MPI_Group_free(some.as_mut_ptr());
                made
            })
        });
        // SAFETY: the group was filled in and is used no more.
        check(unsafe { ffi::MPI_Group_free(all.as_mut_ptr()) })?;
        made?;
        // SAFETY: the call succeeded on a rank of the group, so it filled in the communicator.
        let handle = Handle(unsafe { new.assume_init() });
        // SAFETY: the communicator was just made; the handler is a constant of the library.
        check(unsafe { ffi::MPI_Comm_set_errhandler(handle.0, ffi::RSMPI_ERRORS_RETURN) })?;
        Ok(Self { library: Arc::clone(&self.library), handle, rank, size: members.len() })
    }

    /// This process's number.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes there are.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Which library this is: its first line.
    pub fn version(&self) -> String {
        let _turn = self.library.turn();
        let text = library_version().unwrap_or_default();
        text.lines().next().unwrap_or_default().trim_end_matches('\0').to_owned()
    }

    /// Sends bytes to a rank.
    pub fn send(&self, to: usize, bytes: Vec<u8>) -> Result<Operation, String> {
        let count = int(bytes.len())?;
        Memory { bytes, ..Memory::default() }.begin(&self.library, |memory, request| {
            let from = memory.bytes.as_ptr().cast();
            // SAFETY: the bytes belong to the operation until MPI is done with them; the rank is one of the world.
            unsafe { ffi::MPI_Isend(from, count, byte(), to as c_int, TAG, self.handle.0, request) }
        })
    }

    /// Takes the next message of a rank, if there is one; one of more than `limit` bytes is refused.
    pub fn receive(&self, from: usize, limit: usize) -> Result<Option<Operation>, String> {
        let (mut there, mut count) = (0, 0);
        let turn = self.library.turn();
        let (mut message, mut status) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the call writes the flag, and message and status where the flag is set.
        check(unsafe {
            let (message, status) = (message.as_mut_ptr(), status.as_mut_ptr());
            ffi::MPI_Improbe(from as c_int, TAG, self.handle.0, &mut there, message, status)
        })?;
        if there == 0 {
            return Ok(None);
        }
        // SAFETY: the flag is set, so both were written.
        let (mut message, status) = unsafe { (message.assume_init(), status.assume_init()) };
        // SAFETY: the status is that of the probe.
        check(unsafe { ffi::MPI_Get_count(&status, byte(), &mut count) })?;
        drop(turn);
        let length = usize::try_from(count).ok().filter(|&length| length <= limit);
        let length = length.ok_or_else(|| format!("a message of {count} bytes, where at most {limit} may come"))?;
        let memory = Memory { bytes: vec![0; length], ..Memory::default() };
        let begun = memory.begin(&self.library, |memory, request| {
            let into = memory.bytes.as_mut_ptr().cast();
            // SAFETY: the message was probed and is received once; its bytes fit the operation's memory.
            unsafe { ffi::MPI_Imrecv(into, count, byte(), &mut message, request) }
        });
        begun.map(Some)
    }

    /// The sum of all ranks' numbers.
    pub fn all_reduce(&self, from: Vec<f32>) -> Result<Operation, String> {
        let (count, into) = (int(from.len())?, vec![0.0; from.len()]);
        Memory { from, into, ..Memory::default() }.begin(&self.library, |memory, request| {
            let (from, into) = memory.places();
            // SAFETY: both buffers belong to the operation and have `count` numbers.
            unsafe { ffi::MPI_Iallreduce(from, into, count, float(), sum(), self.handle.0, request) }
        })
    }

    /// The sum of this rank's chunk of all ranks' numbers; the lengths of the chunks add up to all.
    pub fn reduce_scatter(&self, from: Vec<f32>, lengths: Vec<usize>) -> Result<Operation, String> {
        assert_eq!(lengths.iter().sum::<usize>(), from.len(), "chunks are all of a buffer");
        let (into, counts) = (vec![0.0; lengths[self.rank]], ints(&lengths)?);
        Memory { from, into, counts, ..Memory::default() }.begin(&self.library, |memory, request| {
            let (from, into) = memory.places();
            let counts = memory.counts.as_ptr();
            // SAFETY: all buffers belong to the operation; there is a count for each rank, their sum is the length of what is
            // sent, and this rank's is that of what is received.
            unsafe { ffi::MPI_Ireduce_scatter(from, into, counts, float(), sum(), self.handle.0, request) }
        })
    }

    /// All ranks' chunks in a row.
    pub fn all_gather(&self, from: Vec<f32>, lengths: Vec<usize>) -> Result<Operation, String> {
        assert_eq!(lengths[self.rank], from.len(), "a rank gives its own chunk");
        let starts: Vec<usize> = (0..lengths.len()).map(|rank| lengths[..rank].iter().sum()).collect();
        let (count, into) = (int(from.len())?, vec![0.0; lengths.iter().sum()]);
        let (counts, starts) = (ints(&lengths)?, ints(&starts)?);
        Memory { from, into, counts, starts, ..Memory::default() }.begin(&self.library, |memory, request| {
            let (from, into) = memory.places();
            let (counts, starts) = (memory.counts.as_ptr(), memory.starts.as_ptr());
            // SAFETY: all buffers belong to the operation; chunks lie one behind the other in what is received.
            unsafe {
                let world = self.handle.0;
                ffi::MPI_Iallgatherv(from, count, float(), into, counts, starts, float(), world, request)
            }
        })
    }

    /// Chunk r of rank j's numbers in place j, for this rank r; chunks are equal.
    pub fn all_to_all(&self, from: Vec<f32>) -> Result<Operation, String> {
        assert!(from.len().is_multiple_of(self.size), "chunks are equal");
        let (count, into) = (int(from.len() / self.size)?, vec![0.0; from.len()]);
        Memory { from, into, ..Memory::default() }.begin(&self.library, |memory, request| {
            let (from, into) = memory.places();
            // SAFETY: both buffers belong to the operation and have `count` numbers for each rank.
            unsafe {
                let world = self.handle.0;
                ffi::MPI_Ialltoall(from, count, float(), into, count, float(), world, request)
            }
        })
    }

    /// The root's bytes on all ranks.
    pub fn broadcast(&self, root: usize, bytes: Vec<u8>) -> Result<Operation, String> {
        assert!(root < self.size, "the root is a rank");
        let count = int(bytes.len())?;
        Memory { bytes, ..Memory::default() }.begin(&self.library, |memory, request| {
            let bytes = memory.bytes.as_mut_ptr().cast();
            // SAFETY: the bytes belong to the operation.
            unsafe { ffi::MPI_Ibcast(bytes, count, byte(), root as c_int, self.handle.0, request) }
        })
    }

    /// Done once all ranks have begun it.
    pub fn barrier(&self) -> Result<Operation, String> {
        Memory::default().begin(&self.library, |_, request| {
            // SAFETY: no memory is involved.
            unsafe { ffi::MPI_Ibarrier(self.handle.0, request) }
        })
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Comm").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

/// What an operation works on.
#[derive(Default)]
struct Memory {
    bytes: Vec<u8>,
    from: Vec<f32>,
    into: Vec<f32>,
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

impl Memory {
    fn places(&mut self) -> (*const c_void, *mut c_void) {
        (self.from.as_ptr().cast(), self.into.as_mut_ptr().cast())
    }

    /// Begins an operation with a call that fills in its request. The vectors move, and what they point to stays.
    fn begin(
        mut self,
        library: &Arc<Library>,
        call: impl FnOnce(&mut Self, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<Operation, String> {
        let mut request = MaybeUninit::uninit();
        let turn = library.turn();
        check(call(&mut self, request.as_mut_ptr()))?;
        drop(turn);
        // SAFETY: the call succeeded, so it wrote the request.
        let request = Some(unsafe { request.assume_init() });
        Ok(Operation { request, memory: self, library: Arc::clone(library) })
    }
}

/// Something under way, with the memory it works on.
pub struct Operation {
    request: Option<ffi::MPI_Request>,
    memory: Memory,
    library: Arc<Library>,
}

// SAFETY: a request may be asked about by any thread, one at a time, which `&mut` and the gate uphold; MPI
// was started for that.
unsafe impl Send for Operation {}

impl Operation {
    /// Whether MPI is done with it.
    pub fn is_done(&mut self) -> Result<bool, String> {
        let Some(request) = &mut self.request else { return Ok(true) };
        let (mut done, _turn) = (0, self.library.turn());
        // SAFETY: the request was filled in by the call that began it, and has not been done before.
        check(unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        if done != 0 {
            self.request = None;
        }
        Ok(done != 0)
    }

    /// The bytes it has left.
    ///
    /// # Panics
    /// While it is under way: a bug.
    pub fn bytes(&self) -> &[u8] {
        assert!(self.request.is_none(), "MPI still works on these bytes");
        &self.memory.bytes
    }

    /// The numbers it has left.
    ///
    /// # Panics
    /// While it is under way: a bug.
    pub fn numbers(&self) -> &[f32] {
        assert!(self.request.is_none(), "MPI still works on these numbers");
        &self.memory.into
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if self.request.is_some() {
            forget(std::mem::take(&mut self.memory));
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("under_way", &self.request.is_some()).finish_non_exhaustive()
    }
}

fn float() -> ffi::MPI_Datatype {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_FLOAT }
}

fn byte() -> ffi::MPI_Datatype {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_UINT8_T }
}

fn sum() -> ffi::MPI_Op {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_SUM }
}

/// MPI counts in C's `int`.
fn int(length: usize) -> Result<c_int, String> {
    c_int::try_from(length).map_err(|_| format!("{length} elements are more than MPI can count"))
}

fn ints(lengths: &[usize]) -> Result<Vec<c_int>, String> {
    lengths.iter().map(|&length| int(length)).collect()
}

/// What MPI says of a call.
fn check(code: c_int) -> Result<(), String> {
    if code == 0 {
        return Ok(());
    }
    let (mut text, mut length) = ([0u8; 1024], 0);
    // SAFETY: 1024 bytes are more than any library's longest sentence (512 in MPICH, 256 in OpenMPI).
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let text = &text[..usize::try_from(length).unwrap_or(0).min(text.len())];
    Err(format!("MPI says: {}", String::from_utf8_lossy(text)))
}
