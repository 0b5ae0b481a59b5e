//! Ranks as processes of one host, which map the same memory.
//!
//! The memory has no name: rank 0 makes it and hands it to each of the others over a socket (`connect.rs`),
//! and it is gone with the last process that maps it, however that ends. The world has one part of it and
//! every group another (`arena.rs`). In each are (`layout.rs`): a few words per rank (`control.rs`), a ring
//! of bytes for each ordered pair (`ring.rs`), staging slots, and what the ranks asked for together. An
//! all-reduce exchanges no messages: a rank adds its chunk straight from its peers' memory and writes it
//! there (`direct.rs`). Ranks that have one copy of the weights add up gradients and make the step with them
//! in pieces (`one_copy.rs`). Waiting spins for a moment, then sleeps on a futex.

use std::sync::Arc;
use std::time::Duration;

use crate::error::CommError;
use crate::rank::Rank;
use crate::transport::Interest;

mod arena;
mod connect;
mod control;
mod direct;
mod group;
mod layout;
pub(crate) mod memory;
mod one_copy;
mod registered;
mod ring;

use arena::Arena;
pub use connect::connect;
use control::{Control, Processes};
use layout::Layout;
pub use memory::LentSlice;
use memory::Memory;
pub use one_copy::{Lent, OneCopy, Piece, Shape};
pub use registered::Registered;

/// One rank's end. Dropping it tells the others that the rank is gone.
#[derive(Debug)]
pub struct Port {
    control: Control,
    layout: Layout,
    arena: Arena,
    /// The words of the world, of which this is a group or all.
    root: Arc<Memory>,
    /// Rounds of direct exchange so far.
    rounds: u64,
}

impl Port {
    /// The end of a rank in the part of the file that belongs to a context. The memory of the world, if this
    /// is a group.
    fn open(
        (mut arena, root): (Arena, Option<Arc<Memory>>),
        rank: usize,
        processes: Processes,
        spins: u32,
    ) -> Result<Self, CommError> {
        let layout = Layout::new(processes.len());
        let memory = Arc::new(arena.map(layout.bytes())?.1);
        let root = root.unwrap_or_else(|| Arc::clone(&memory));
        Ok(Self { control: Control::new(memory, rank, processes, spins), layout, arena, root, rounds: 0 })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        Rank::at(self.control.rank)
    }

    /// How many ranks there are.
    pub const fn world(&self) -> usize {
        self.control.world
    }

    fn memory(&self) -> &Memory {
        &self.control.memory
    }

    pub(super) fn try_send(&mut self, peer: Rank, bytes: &[u8]) -> Result<usize, String> {
        let count = self.ring(self.control.rank, peer.index()).push(bytes)?;
        if count > 0 {
            self.control.wake(peer.index());
        } else if let Some(reason) = self.control.gone(peer) {
            return Err(reason);
        }
        Ok(count)
    }

    pub(super) fn try_receive(&mut self, peer: Rank, bytes: &mut [u8]) -> Result<usize, String> {
        let gone = self.control.gone(peer);
        let count = self.ring(peer.index(), self.control.rank).pop(bytes)?;
        if count > 0 {
            self.control.wake(peer.index());
        } else if let (Some(reason), false) = (gone, bytes.is_empty()) {
            return Err(reason);
        }
        Ok(count)
    }

    pub(super) fn has_bytes(&mut self, peer: Rank) -> Result<bool, String> {
        let gone = self.control.gone(peer);
        match (self.ring(peer.index(), self.control.rank).used()?, gone) {
            (0, Some(reason)) => Err(reason),
            (used, _) => Ok(used > 0),
        }
    }

    pub(super) fn sleep(&mut self, interests: &[Interest], limit: Duration) {
        let own = self.control.rank;
        let ready = || {
            interests.iter().any(|interest| {
                let peer = interest.peer.index();
                let can_receive = || self.ring(peer, own).used() != Ok(0);
                let can_send = || self.ring(own, peer).room() != Ok(0);
                (interest.receive && can_receive())
                    || (interest.send && can_send())
                    || self.control.gone(interest.peer).is_some()
            })
        };
        self.control.sleep_unless(ready, limit);
    }

    /// Memory in which every rank has so many numbers; all call this in the same order with the same length.
    pub(crate) fn register(&mut self, length: usize) -> Result<Registered, CommError> {
        let (rank, world) = (self.control.rank, self.control.world);
        let memory = self.arena.map(Registered::stride(length) * world)?;
        Ok(Registered::new(Arc::clone(&self.arena.file), memory, (rank, world), length))
    }

    /// Whether a buffer was registered with this communicator, and not with another.
    pub(crate) fn has_registered(&self, buffer: &Registered) -> bool {
        Arc::ptr_eq(&self.arena.file, buffer.file()) && self.arena.contains(buffer.identity()[0])
    }

    /// One copy of the weights; all call this in the same order with the same shape.
    pub(crate) fn one_copy(&mut self, shape: &Shape<'_>, members: &Arc<[Rank]>) -> Result<OneCopy, CommError> {
        OneCopy::new(&mut self.arena, &self.control, members, shape)
    }
}
