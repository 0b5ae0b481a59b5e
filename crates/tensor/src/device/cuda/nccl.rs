//! Sums over the GPUs of several processes, by the vendor's NCCL. Here a group has seats, and one of them is
//! ours; who takes part, how they find each other and how long they may take is the caller's affair.
//!
//! Three layers, as for the other libraries: functions looked up by name (raw), statuses turned into
//! sentences (checked), [`Group`] and [`Watcher`] (safe). The two share a communicator: one makes calls, the
//! other may end it at any time.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use paceline_system::clock;

use super::driver::{Context, Memory, Stream};
use super::{Cuda, CudaError, library, lock};

/// Bytes of a [`Key`].
pub const KEY_BYTES: usize = 128;

/// What one member of a group makes and the others have to be told: where they meet.
pub type Key = [u8; KEY_BYTES];

/// A member's place in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// From 0; each is taken once.
    pub number: usize,
    /// How many there are.
    pub of: usize,
}

type Comm = *mut c_void;

/// `ncclUniqueId`, which is handed over by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId {
    bytes: Key,
}

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// The functions that are used, with the signatures of NCCL 2.
struct Raw {
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    join: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    describe: unsafe extern "C" fn(c_int) -> *const c_char,
    /// Not in the oldest.
    last_error: Option<unsafe extern "C" fn(Comm) -> *const c_char>,
    /// Keeps the functions where they are: NCCL has threads of its own that outlast our calls, so it is never
    /// unloaded.
    _library: ManuallyDrop<libloading::Library>,
}

impl Raw {
    fn load() -> Result<Self, CudaError> {
        let library = ManuallyDrop::new(library::NCCL.open()?);
        let missing = |name: &str| CudaError(format!("the NCCL that was found has no `{name}`; install NCCL 2"));
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the function has this signature in every NCCL 2.
                unsafe { *library.get($name.as_bytes()).map_err(|_| missing($name))? }
            };
        }
        Ok(Self {
            version: function!("ncclGetVersion"),
            unique_id: function!("ncclGetUniqueId"),
            join: function!("ncclCommInitRank"),
            all_reduce: function!("ncclAllReduce"),
            async_error: function!("ncclCommGetAsyncError"),
            abort: function!("ncclCommAbort"),
            destroy: function!("ncclCommDestroy"),
            describe: function!("ncclGetErrorString"),
            // SAFETY: as above.
            last_error: unsafe { library.get(b"ncclGetLastError") }.ok().map(|function| *function),
            _library: library,
        })
    }

    /// Turns a status into a result that names what was tried.
    fn check(&self, status: c_int, what: &str) -> Result<(), CudaError> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both return null or a text of NCCL's own that lives until its next error; the last error is
        // of all communicators, so that none is named.
        let (kind, last) = unsafe {
            (text((self.describe)(status)), self.last_error.map_or_else(String::new, |last| text(last(null_mut()))))
        };
        let last = last.lines().last().unwrap_or_default().trim();
        let last = if last.is_empty() { String::new() } else { format!(": {last}") };
        Err(CudaError(format!("{what}: {kind}{last}")))
    }
}

/// # Safety
/// Null, or a text that ends with a zero and lives for the call.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// The version of the library, as 22803 for 2.28.3.
///
/// # Errors
/// When there is none; the sentence says what was looked for.
pub fn version() -> Result<u32, CudaError> {
    let (raw, mut version) = (Raw::load()?, 0);
    // SAFETY: one integer is written.
    raw.check(unsafe { (raw.version)(&mut version) }, "asking for NCCL's version")?;
    Ok(u32::try_from(version).unwrap_or(0))
}

/// A version for people.
pub fn version_text(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// A key for a new group; its first member makes it, and stays as long as the others join.
///
/// # Errors
/// When there is no NCCL, or it finds no network interface.
pub fn key() -> Result<Key, CudaError> {
    let (raw, mut id) = (Raw::load()?, UniqueId { bytes: [0; KEY_BYTES] });
    // SAFETY: one key is written.
    raw.check(unsafe { (raw.unique_id)(&mut id) }, "beginning NCCL")?;
    Ok(id.bytes)
}

/// A communicator, and who may use it: whoever holds the lock makes calls, the one [`Watcher`] asks for the
/// state and ends it, and who drops the last reference gives it back.
struct GroupState {
    raw: Raw,
    comm: Comm,
    /// Held during calls, and by who ends the communicator.
    calls: Mutex<()>,
    /// Set before the communicator is ended; never unset.
    ended: AtomicBool,
    context: Arc<Context>,
}

// SAFETY: nothing in it belongs to a thread. NCCL wants one thread at a time to operate a communicator, which
// `calls` sees to; asking for asynchronous errors, which only the watcher does, is made for another thread
// than the one that makes calls.
unsafe impl Send for GroupState {}
// SAFETY: as above.
unsafe impl Sync for GroupState {}

impl Drop for GroupState {
    fn drop(&mut self) {
        if !*self.ended.get_mut() && self.context.enter().is_ok() {
            // SAFETY: joined once, and not ended: that sets `ended` first. This was the last reference, so
            // nobody makes calls. Graphs that hold its work are gone: who captured them holds a group longer.
            unsafe { (self.raw.destroy)(self.comm) };
        }
    }
}

/// Our place in a group: who holds it adds up numbers with the others.
pub struct Group(Arc<GroupState>);

/// Looks after a [`Group`] from another thread. There is one for each, and it alone asks for the state and
/// leaves: after [`Watcher::abort`], which consumes it, nobody can ask any more, and [`Group`] refuses to
/// make calls.
pub struct Watcher {
    shared: Arc<GroupState>,
    /// One thread at a time.
    _alone: PhantomData<Cell<()>>,
}

/// The right to make calls: as long as it is held, the communicator is not ended.
pub(super) struct Calls<'a> {
    shared: &'a GroupState,
    _alone: MutexGuard<'a, ()>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Group")
    }
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watcher")
    }
}

impl Group {
    /// Takes a place, waits until all are taken, and makes a sum of each of these lengths once, which
    /// connects all that will be needed: later calls only start work on the GPU, and return. NCCL has no
    /// deadline of its own; who has one calls this on a thread that can be left behind.
    ///
    /// # Errors
    /// When there is no NCCL, or a member or the way to it fails.
    ///
    /// # Panics
    /// When there is no such place.
    pub fn join(cuda: &Cuda, key: &Key, placement: Placement, lengths: &[usize]) -> Result<(Self, Watcher), CudaError> {
        assert!(placement.number < placement.of, "a place in the group");
        let (raw, mut comm) = (Raw::load()?, null_mut());
        cuda.context().enter()?;
        let (of, number) = (placement.of as c_int, placement.number as c_int);
        // SAFETY: one handle is written, which `drop` or `abort` gives back; the GPU is the calling thread's.
        let status = unsafe { (raw.join)(&mut comm, of, UniqueId { bytes: *key }, number) };
        raw.check(status, "joining the other GPUs")?;
        let (context, ended) = (Arc::clone(cuda.context()), AtomicBool::new(false));
        let shared = Arc::new(GroupState { raw, comm, calls: Mutex::default(), ended, context });
        let (group, watcher) = (Self(Arc::clone(&shared)), Watcher { shared, _alone: PhantomData });
        match group.connect(cuda, lengths) {
            Ok(()) => Ok((group, watcher)),
            Err(error) => {
                // Giving a communicator back waits for its work, which may never end.
                watcher.abort();
                Err(error)
            }
        }
    }

    fn connect(&self, cuda: &Cuda, lengths: &[usize]) -> Result<(), CudaError> {
        let most = lengths.iter().max().map_or(0, |most| most * size_of::<f32>());
        let memory = Memory::zeroed(cuda.context(), most, "a first sum over all GPUs")?;
        let (stream, calls) = (Stream::new(cuda.context())?, self.calls()?);
        lengths.iter().try_for_each(|&length| calls.sum(memory.address(), length, &stream))?;
        stream.wait()
    }

    /// The right to make calls, unless the GPUs were parted.
    pub(super) fn calls(&self) -> Result<Calls<'_>, CudaError> {
        let alone = lock(&self.0.calls);
        if self.0.ended.load(Ordering::SeqCst) {
            return Err(CudaError("the GPUs were parted".into()));
        }
        Ok(Calls { shared: &self.0, _alone: alone })
    }
}

impl Calls<'_> {
    /// Replaces numbers by their sum over all seats, in order with the stream's other work. All seats do so
    /// in the same order.
    pub fn sum(&self, address: u64, elements: usize, stream: &Stream) -> Result<(), CudaError> {
        let (memory, GroupState { raw, comm, .. }) = (address as *mut c_void, self.shared);
        // SAFETY: the range is the caller's to name. The communicator lives: it was not ended when the lock
        // was taken, and who ends it needs the lock.
        let status = unsafe { (raw.all_reduce)(memory, memory, elements, FLOAT32, SUM, *comm, stream.handle().cast()) };
        raw.check(status, "adding up gradients")
    }
}

impl Watcher {
    /// What NCCL has found out since: its network threads tell here.
    ///
    /// # Errors
    /// What went wrong.
    pub fn state(&self) -> Result<(), CudaError> {
        let (mut found, GroupState { raw, comm, .. }) = (SUCCESS, &*self.shared);
        // SAFETY: one status is written. The communicator lives: only this watcher ends it, and is consumed
        // by that, and it holds a reference.
        let asked = unsafe { (raw.async_error)(*comm, &mut found) };
        raw.check(asked, "asking NCCL for errors")?;
        raw.check(found, "adding up gradients")
    }

    /// Leaves the others at once: whatever waits for them on the GPU returns, with nothing worth having. A
    /// call that is under way is waited for; calls only start work, so that one that has not returned after a
    /// second has lost its thread. Then the communicator is left as it is: nothing that waits is freed, and
    /// the process has to end.
    pub fn abort(self) {
        let GroupState { raw, comm, calls, ended, context } = &*self.shared;
        ended.store(true, Ordering::SeqCst);
        let mut alone = calls.try_lock();
        for _ in 0..100 {
            if !matches!(alone, Err(TryLockError::WouldBlock)) {
                break;
            }
            drop(alone);
            clock::sleep(Duration::from_millis(10));
            alone = calls.try_lock();
        }
        if matches!(alone, Err(TryLockError::WouldBlock)) || context.enter().is_err() {
            return;
        }
        // SAFETY: no call is under way, because we hold the lock, and none will begin: `ended` was set
        // before. Nobody asks for the state, because there is one watcher, which is here. It is ended once,
        // because this consumes it, and `drop` sees that it was.
        unsafe { (raw.abort)(*comm) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_reads_as_its_makers_write_it() {
        assert_eq!(version_text(22_803), "2.28.3");
        assert_eq!(version_text(21_800), "2.18.0");
    }

    #[test]
    fn without_the_library_a_sentence_says_what_was_looked_for() {
        if let Err(error) = version() {
            assert!(error.to_string().contains("libnccl.so.2"), "{error}");
        }
    }
}
