//! Sums over the GPUs of several processes, by the vendor's NCCL. Here a group has seats, and one of them is ours; who takes part, how they
//! find each other and how long they may take is the caller's affair.
//!
//! Three layers, as for the other libraries: functions looked up by name (raw), statuses turned into sentences (checked), [`Group`] (safe).
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_system::clock;

use super::driver::{Context, Stream};
use super::{Cuda, CudaError, library, lock};

/// Bytes of a [`Key`].
pub const KEY_BYTES: usize = 128;

/// What one member of a group makes and the others have to be told: where they meet.
pub type Key = [u8; KEY_BYTES];

/// A member's place in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
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
    /// Keeps the functions where they are: NCCL has threads of its own that outlast our calls, so it is never unloaded.
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

    /// Turns a status into a result that names what was tried. `comm` is null, or a communicator that lives.
    fn check(&self, status: c_int, what: &str, comm: Comm) -> Result<(), CudaError> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both return null or a text of NCCL's own that lives until its next error.
        let (kind, last) = unsafe {
            (text((self.describe)(status)), self.last_error.map_or_else(String::new, |last| text(last(comm))))
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
    raw.check(unsafe { (raw.version)(&mut version) }, "asking for NCCL's version", null_mut())?;
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
    raw.check(unsafe { (raw.unique_id)(&mut id) }, "beginning NCCL", null_mut())?;
    Ok(id.bytes)
}

/// Our seat in a group.
pub struct Group {
    raw: Raw,
    comm: Comm,
    /// Held during calls that other threads must not make at the same time.
    calls: Mutex<()>,
    ended: AtomicBool,
    context: Arc<Context>,
}

// SAFETY: `calls` keeps calls apart; asking for errors and aborting are allowed from any thread at any time.
unsafe impl Send for Group {}
// SAFETY: as above.
unsafe impl Sync for Group {}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Group")
    }
}

impl Group {
    /// Takes a seat, and waits until all are taken: NCCL has no deadline of its own.
    ///
    /// # Errors
    /// When there is no NCCL, or a member or the way to it fails.
    ///
    /// # Panics
    /// When there is no such seat.
    pub fn join(cuda: &Cuda, key: &Key, seat: Seat) -> Result<Self, CudaError> {
        assert!(seat.number < seat.of, "a seat of the group");
        let (raw, mut comm) = (Raw::load()?, null_mut());
        cuda.context().enter()?;
        let (of, number) = (seat.of as c_int, seat.number as c_int);
        // SAFETY: one handle is written, which `drop` or `abort` gives back; the GPU is the calling thread's.
        let status = unsafe { (raw.join)(&mut comm, of, UniqueId { bytes: *key }, number) };
        raw.check(status, "joining the other GPUs", null_mut())?;
        let context = Arc::clone(cuda.context());
        Ok(Self { raw, comm, calls: Mutex::default(), ended: AtomicBool::new(false), context })
    }

    /// Replaces numbers by their sum over all seats, in order with the stream's other work. All seats do so in the same order.
    pub(super) fn sum(&self, address: u64, elements: usize, stream: &Stream) -> Result<(), CudaError> {
        let _alone = lock(&self.calls);
        if self.ended.load(Ordering::SeqCst) {
            return Err(CudaError("the GPUs were parted".into()));
        }
        let memory = address as *mut c_void;
        // SAFETY: the range is the caller's to name; the communicator has not ended.
        let status =
            unsafe { (self.raw.all_reduce)(memory, memory, elements, FLOAT32, SUM, self.comm, stream.handle().cast()) };
        self.raw.check(status, "adding up gradients", self.comm)
    }

    /// What NCCL has found out since: its network threads tell here. Not after [`Group::abort`].
    ///
    /// # Errors
    /// What went wrong.
    pub fn state(&self) -> Result<(), CudaError> {
        if self.ended.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut found = SUCCESS;
        // SAFETY: one status is written; the communicator has not ended: only who asks here ends it.
        let asked = unsafe { (self.raw.async_error)(self.comm, &mut found) };
        self.raw.check(asked, "asking NCCL for errors", null_mut())?;
        self.raw.check(found, "adding up gradients", self.comm)
    }

    /// Leaves the others at once: whatever waits for them on the GPU or in a call returns, with nothing worth having. By the thread that
    /// calls [`Group::state`].
    pub fn abort(&self) {
        if self.ended.swap(true, Ordering::SeqCst) || self.context.enter().is_err() {
            return;
        }
        // A call that does not return by itself waits for somebody; it may be interrupted. Others are let through.
        let mut alone = self.calls.try_lock().ok();
        for _ in 0..100 {
            if alone.is_some() {
                break;
            }
            clock::sleep(Duration::from_millis(10));
            alone = self.calls.try_lock().ok();
        }
        // SAFETY: ended once, as `swap` sees to; calls that begin later see it.
        unsafe { (self.raw.abort)(self.comm) };
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !*self.ended.get_mut() && self.context.enter().is_ok() {
            // SAFETY: joined once, ended nowhere else. Graphs that hold its work are gone: who captured them holds a group longer.
            unsafe { (self.raw.destroy)(self.comm) };
        }
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
