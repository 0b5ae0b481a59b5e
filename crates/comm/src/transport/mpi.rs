//! Ranks that `mpirun` started, joined by the MPI library that this binary was built with (cargo feature `mpi`).
//!
//! Collectives are MPI's own (`direct.rs`), unless an algorithm is named: then lists of transfers run over messages, as on
//! every other transport. The bytes between two ranks are one stream, cut into messages of at most [`MESSAGE_BYTES`]; MPI
//! keeps their order. Nothing blocks: everything under way is asked whether it is done (`raw.rs`).
//!
//! Who may join is decided by `mpirun`, and what becomes of the others when one dies too; the greeting with
//! the run's token is that of the control connections. A process has one MPI, and so one of these ports, and
//! those of groups that it makes (`MPI_Comm_create_group`). MPI is started for one call at a time: ports that
//! threads use at once take turns, call by call.

use std::collections::VecDeque;
use std::time::Duration;

use paceline_system::clock;

use crate::error::CommError;
use crate::rank::Rank;

mod connect;
mod direct;
mod raw;

pub use connect::connect;
pub use raw::Window;
use raw::{Comm, Operation};

/// Bytes of the longest message: large enough for the bandwidth of a link.
const MESSAGE_BYTES: usize = 256 << 10;

/// Messages under way to one peer.
const UNDER_WAY_MAX: usize = 4;

/// MPI has nothing to sleep on, so a waiting rank looks again after this; short enough to be hidden by a message's own time.
const NAP: Duration = Duration::from_micros(50);

/// A message that comes in.
#[derive(Debug)]
struct Arrival {
    operation: Operation,
    done: bool,
    used: usize,
}

/// One rank's end. Dropping the last of a process ends MPI, if all ranks do so within a few seconds; else MPI
/// is left to `mpirun`.
#[derive(Debug)]
pub struct Port {
    comm: Comm,
    /// By peer, oldest first.
    sends: Vec<VecDeque<Operation>>,
    /// By peer.
    arrivals: Vec<Option<Arrival>>,
}

impl Port {
    fn new(comm: Comm) -> Self {
        let sends = (0..comm.size()).map(|_| VecDeque::new()).collect();
        let arrivals = (0..comm.size()).map(|_| None).collect();
        Self { comm, sends, arrivals }
    }

    /// Memory of every rank, which the others read, write and add to by themselves. All ranks call this.
    ///
    /// # Errors
    /// When MPI says so.
    pub fn window(&self, bytes: usize) -> Result<Window, CommError> {
        let failed = |what| CommError::Failed { rank: Rank::at(self.comm.rank()), phase: "MPI_Win_allocate", what };
        Window::allocate(&self.comm, bytes).map_err(failed)
    }

    /// This rank's end in a group of these ranks, of which it is one: a communicator of MPI's own. All of
    /// them are here, or MPI waits for them without a deadline.
    pub(super) fn group(&self, members: &[Rank]) -> Result<Self, CommError> {
        let members: Vec<usize> = members.iter().map(|member| member.index()).collect();
        let failed = |what| CommError::Failed { rank: self.rank(), phase: "group", what };
        self.comm.group(&members).map(Self::new).map_err(failed)
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        Rank::at(self.comm.rank())
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.sends.len()
    }

    pub(super) fn try_send(&mut self, peer: Rank, bytes: &[u8]) -> Result<usize, String> {
        self.retire(peer.index())?;
        let sends = &mut self.sends[peer.index()];
        if bytes.is_empty() || sends.len() >= UNDER_WAY_MAX {
            return Ok(0);
        }
        let count = bytes.len().min(MESSAGE_BYTES);
        sends.push_back(self.comm.send(peer.index(), bytes[..count].to_vec())?);
        Ok(count)
    }

    /// Lets go of messages that have left.
    fn retire(&mut self, peer: usize) -> Result<(), String> {
        while let Some(oldest) = self.sends[peer].front_mut() {
            if !oldest.is_done()? {
                break;
            }
            self.sends[peer].pop_front();
        }
        Ok(())
    }

    /// Whether all messages have left. They move only while somebody looks, so a call ends when they have.
    pub(crate) fn has_sent(&mut self) -> Result<bool, String> {
        for peer in 0..self.sends.len() {
            self.retire(peer)?;
        }
        Ok(self.sends.iter().all(VecDeque::is_empty))
    }

    pub(super) fn try_receive(&mut self, peer: Rank, bytes: &mut [u8]) -> Result<usize, String> {
        if bytes.is_empty() || !self.has_bytes(peer)? {
            return Ok(0);
        }
        let place = &mut self.arrivals[peer.index()];
        let arrival = place.as_mut().expect("a message is there");
        let rest = &arrival.operation.bytes()[arrival.used..];
        let count = rest.len().min(bytes.len());
        bytes[..count].copy_from_slice(&rest[..count]);
        arrival.used += count;
        if count == rest.len() {
            *place = None;
        }
        Ok(count)
    }

    pub(super) fn has_bytes(&mut self, peer: Rank) -> Result<bool, String> {
        let place = &mut self.arrivals[peer.index()];
        if place.is_none() {
            let Some(operation) = self.comm.receive(peer.index(), MESSAGE_BYTES)? else { return Ok(false) };
            *place = Some(Arrival { operation, done: false, used: 0 });
        }
        let arrival = place.as_mut().expect("a message comes in");
        arrival.done = arrival.done || arrival.operation.is_done()?;
        Ok(arrival.done)
    }

    pub(super) fn sleep(&mut self, limit: Duration) {
        clock::sleep(limit.min(NAP));
    }
}
