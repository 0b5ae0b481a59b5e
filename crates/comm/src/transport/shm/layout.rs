//! Where things are in the shared memory. Words that different ranks write lie on different cache lines.

/// A page.
pub(super) const PAGE_BYTES: usize = 4096;
/// What two ranks should not both write at a time: processors fetch cache lines in pairs.
pub(super) const LINE_BYTES: usize = 128;
/// What a world or a group has of the file, most of which is never touched and costs nothing: first what
/// every rank maps (the [`Layout`]), then what its ranks ask for together.
pub(super) const CONTEXT_BYTES: u64 = 1 << 40;
/// The world, and groups of its ranks. Those that are gone count too.
pub(super) const CONTEXTS_MAX: u64 = 1024;
/// The size of the file.
pub(super) const FILE_BYTES: u64 = CONTEXTS_MAX * CONTEXT_BYTES;

/// Of a rank's control block, in bytes. Two cache lines apart, since processors fetch lines in pairs.
pub(super) const CONTROL_BYTES: usize = 512;
/// A [`State`].
pub(super) const STATE: usize = 0;
/// The number of its process.
pub(super) const PROCESS: usize = 4;
/// How many groups there are; in the world's block of rank 0.
pub(super) const GROUPS: usize = 8;
/// Counts up when the rank is to be woken.
pub(super) const BELL: usize = 128;
/// Not zero while the rank sleeps.
pub(super) const SLEEPS: usize = 132;
/// Rounds for which the rank's own numbers are there.
pub(super) const ARRIVED: usize = 256;
/// What kind of exchange the round belongs to.
pub(super) const WHAT: usize = 264;
/// Rounds whose chunk the rank has added and written everywhere.
pub(super) const REDUCED: usize = 384;

/// Bytes of a staging slot; each rank has two. Both of two ranks fit into a core's cache of 1 MiB.
pub(super) const SLOT_BYTES: usize = 256 << 10;

/// Of a ring: bytes written so far, bytes read so far, then the bytes.
pub(super) const RING_WRITTEN: usize = 0;
pub(super) const RING_READ: usize = 128;
pub(super) const RING_DATA: usize = 256;

/// Whether a rank is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum State {
    /// It has mapped the memory.
    Here = 1,
    /// It has left.
    Closed = 2,
}

/// The layout for a world; every rank computes the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    world: usize,
    pub(super) ring_bytes: usize,
}

impl Layout {
    pub(super) const fn new(world: usize) -> Self {
        // Rings are touched only by pairs that talk; in large worlds all pairs might.
        Self { world, ring_bytes: if world <= 16 { 256 << 10 } else { 32 << 10 } }
    }

    pub(super) const fn ring(&self, from: usize, to: usize) -> usize {
        self.controls_end() + (from * self.world + to) * (RING_DATA + self.ring_bytes)
    }

    pub(super) const fn slot(&self, rank: usize, slot: usize) -> usize {
        self.ring(self.world, 0).next_multiple_of(PAGE_BYTES) + (2 * rank + slot) * SLOT_BYTES
    }

    /// Bytes that every rank maps from the start.
    pub(super) const fn bytes(&self) -> usize {
        self.slot(self.world, 0)
    }

    const fn controls_end(&self) -> usize {
        (self.world * CONTROL_BYTES).next_multiple_of(PAGE_BYTES)
    }
}
