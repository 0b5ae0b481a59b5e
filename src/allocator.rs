//! The system's allocator, with a sentence and exit code 1 where it has no memory for something small.
//!
//! What is large is asked for (`system::memory`) and a no is an error that names it. Nobody asks for a name or a line of text: when one
//! of those is refused, the standard library ends the process by a signal, and there is no stable way to hear of it but this.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// From this size on whoever asks hears of a no. Buffers of files, which nobody asks for, have 1 MiB.
const LARGE_BYTES: usize = 4 << 20;

/// See above.
pub struct Allocator;

/// Whether the end has begun: it may need memory itself.
static ENDING: AtomicBool = AtomicBool::new(false);

// SAFETY: every call goes to the system's allocator with the same arguments, and its answer comes back unchanged.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.realloc(pointer, layout, size) }, size)
    }
}

// Whoever asked cannot go on without an answer, so there is no way back to `main`.
#[allow(clippy::disallowed_methods)]
fn checked(pointer: *mut u8, bytes: usize) -> *mut u8 {
    if pointer.is_null() && bytes < LARGE_BYTES && !ENDING.swap(true, Ordering::Relaxed) {
        // Neither formatting a number nor standard error takes memory.
        let _ = writeln!(
            std::io::stderr(),
            "error: no memory for {bytes} bytes; type a smaller --batch or fewer --workers, \
             or raise the limit that paceline doctor shows"
        );
        std::process::exit(1);
    }
    pointer
}
