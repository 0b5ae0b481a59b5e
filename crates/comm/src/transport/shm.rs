//! Ranks as processes of one host, which map the same memory.
//!
//! The memory has no name: rank 0 makes it and hands it to each of the others over a socket (`connect.rs`), and it is
//! gone with the last process that maps it, however that ends. In it are (`layout.rs`): a few words per rank, a ring of
//! bytes for each ordered pair (`ring.rs`), staging slots, and buffers that all ranks asked for together. An all-reduce
//! exchanges no messages: a rank adds its chunk straight from its peers' memory and writes it there (`direct.rs`), or keeps it
//! to itself and works on it (`stages.rs`).
//! Waiting spins for a moment, then sleeps on a futex.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::CommError;
use crate::rank::Rank;
use crate::transport::Interest;

mod bell;
mod connect;
mod direct;
mod layout;
mod memory;
mod ring;
mod stages;

pub use connect::connect;
use layout::{Layout, STATE, State};
use memory::Memory;
pub use memory::{Common, Mapped};

/// One rank's end. Dropping it tells the others that the rank is gone.
#[derive(Debug)]
pub struct Port {
    rank: usize,
    world: usize,
    layout: Layout,
    memory: Arc<Memory>,
    file: OwnedFd,
    /// A handle on each peer's process, where it is another one: readable once that has ended.
    processes: Vec<Option<OwnedFd>>,
    /// Peers whose process was seen to have ended.
    ended: Vec<bool>,
    /// Rounds of direct exchange so far.
    rounds: u64,
    /// Where the next common buffer begins.
    buffers_end: u64,
    /// How often to look before sleeping: seldom, where ranks share cores.
    spins: u32,
}

impl Port {
    /// This rank.
    pub fn rank(&self) -> Rank {
        Rank::at(self.rank)
    }

    /// How many ranks there are.
    pub const fn world(&self) -> usize {
        self.world
    }

    /// Why a peer is gone, if it is known to be.
    fn gone(&self, peer: Rank) -> Option<String> {
        let state = self.memory.word32(self.layout.control(peer.index()) + STATE).load(Ordering::Acquire);
        if state == State::Closed as u32 {
            return Some("it left".into());
        }
        self.ended[peer.index()].then(|| "its process ended".into())
    }

    /// Looks which peers' processes have ended: after every sleep that nothing ended.
    fn look_for_ended(&mut self) {
        for (process, ended) in self.processes.iter().zip(&mut self.ended) {
            if let Some(process) = process {
                let mut polled = [PollFd::new(process, PollFlags::IN)];
                *ended |= matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..));
            }
        }
    }

    pub(super) fn try_send(&mut self, peer: Rank, bytes: &[u8]) -> Result<usize, String> {
        let count = self.ring(self.rank, peer.index()).push(bytes)?;
        if count > 0 {
            self.wake(peer.index());
        } else if let Some(reason) = self.gone(peer) {
            return Err(reason);
        }
        Ok(count)
    }

    pub(super) fn try_receive(&mut self, peer: Rank, bytes: &mut [u8]) -> Result<usize, String> {
        let gone = self.gone(peer);
        let count = self.ring(peer.index(), self.rank).pop(bytes)?;
        if count > 0 {
            self.wake(peer.index());
        } else if let (Some(reason), false) = (gone, bytes.is_empty()) {
            return Err(reason);
        }
        Ok(count)
    }

    pub(super) fn has_bytes(&mut self, peer: Rank) -> Result<bool, String> {
        let gone = self.gone(peer);
        match (self.ring(peer.index(), self.rank).used()?, gone) {
            (0, Some(reason)) => Err(reason),
            (used, _) => Ok(used > 0),
        }
    }

    pub(super) fn sleep(&mut self, interests: &[Interest], limit: Duration) {
        let ready = |port: &Self| {
            interests.iter().any(|interest| {
                let peer = interest.peer.index();
                let can_receive = || port.ring(peer, port.rank).used() != Ok(0);
                let can_send = || port.ring(port.rank, peer).room() != Ok(0);
                (interest.receive && can_receive())
                    || (interest.send && can_send())
                    || port.gone(interest.peer).is_some()
            })
        };
        self.sleep_unless(ready, limit);
    }

    /// Memory of this rank that all ranks map; all call this in the same order with the same length.
    pub(crate) fn shared_buffer(&mut self, length: usize) -> Result<Mapped, CommError> {
        let stride = Mapped::stride(length);
        let start = self.reserve(stride * self.world)?;
        Ok(Mapped::new((self.map(start, stride * self.world)?, start), stride, self.rank, length))
    }

    /// Memory that is no rank's own, mapped so many times: each mapping leads to the same numbers. As [`Port::shared_buffer`].
    pub(crate) fn common<const N: usize>(&mut self, length: usize) -> Result<[Common; N], CommError> {
        let start = self.reserve(Common::bytes(length))?;
        let mut mappings = Vec::with_capacity(N);
        for _ in 0..N {
            mappings.push(Common::new(self.map(start, Common::bytes(length))?, length));
        }
        Ok(mappings.try_into().expect("as many as were asked for"))
    }

    /// Another mapping of this rank's numbers of a shared buffer.
    pub(crate) fn own_again(&self, buffer: &Mapped) -> Result<Common, CommError> {
        let (start, length) = buffer.own_place();
        Ok(Common::new(self.map(start, Common::bytes(length))?, length))
    }

    fn failed(&self, source: std::io::Error) -> CommError {
        CommError::System { rank: Rank::at(self.rank), what: "map shared memory", source }
    }

    fn reserve(&mut self, bytes: usize) -> Result<u64, CommError> {
        let start = self.buffers_end;
        if start + bytes as u64 > layout::FILE_BYTES {
            return Err(self.failed(std::io::ErrorKind::OutOfMemory.into()));
        }
        self.buffers_end += bytes as u64;
        Ok(start)
    }

    fn map(&self, start: u64, bytes: usize) -> Result<Memory, CommError> {
        Memory::map(&self.file, start, bytes).map_err(|error| self.failed(error.into()))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let state = self.memory.word32(self.layout.control(self.rank) + STATE);
        state.store(State::Closed as u32, Ordering::Release);
        (0..self.world).filter(|&peer| peer != self.rank).for_each(|peer| self.wake(peer));
    }
}
