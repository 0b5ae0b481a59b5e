//! A rank's control block in shared memory: whether it is there, and sleeping and waking across processes by
//! a futex that is rung only when the rank says that it sleeps. Every world, group and one-copy region has
//! blocks of its own, so that threads which wait for different ones do not take each other's rings.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::futex;

use super::Memory;
use super::layout::{BELL, CONTROL_BYTES, SLEEPS, STATE, State};
use crate::rank::Rank;

/// A handle on each rank's process, where it is another one that can be watched: readable once that has
/// ended.
pub(super) type Processes = Vec<Option<Arc<OwnedFd>>>;

/// The control blocks of some ranks, at the start of a mapping. Dropping it tells the others that this rank
/// has left.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) memory: Arc<Memory>,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) processes: Processes,
    /// Peers whose process was seen to have ended.
    ended: Vec<AtomicBool>,
    /// How often to look before sleeping: seldom, where ranks share cores.
    pub(super) spins: u32,
}

impl Control {
    /// Says that this rank is here.
    pub(super) fn new(memory: Arc<Memory>, rank: usize, processes: Processes, spins: u32) -> Self {
        let (world, ended) = (processes.len(), processes.iter().map(|_| AtomicBool::new(false)).collect());
        let control = Self { memory, rank, world, processes, ended, spins };
        control.memory.word32(control.at(rank) + STATE).store(State::Here as u32, Ordering::Release);
        control
    }

    /// Where a rank's block begins.
    pub(super) const fn at(&self, rank: usize) -> usize {
        rank * CONTROL_BYTES
    }

    /// All ranks but this one.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.world).filter(move |&peer| peer != own)
    }

    /// Why a peer is gone, if it is known to be.
    pub(super) fn gone(&self, peer: Rank) -> Option<String> {
        let state = self.memory.word32(self.at(peer.index()) + STATE).load(Ordering::Acquire);
        if state == State::Closed as u32 {
            return Some("it left".into());
        }
        self.ended[peer.index()].load(Ordering::Relaxed).then(|| "its process ended".into())
    }

    /// The first peer that is gone, and why.
    pub(super) fn any_gone(&self) -> Option<(Rank, String)> {
        self.peers().map(Rank::at).find_map(|peer| Some((peer, self.gone(peer)?)))
    }

    /// Looks which peers' processes have ended: after every sleep that nothing ended.
    fn look_for_ended(&self) {
        for (process, ended) in self.processes.iter().zip(&self.ended) {
            if let Some(process) = process {
                let mut polled = [PollFd::new(process, PollFlags::IN)];
                if matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..)) {
                    ended.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    /// Wakes a peer if it sleeps. What it is woken for must be written before.
    pub(super) fn wake(&self, peer: usize) {
        let control = self.at(peer);
        // Either this fence comes first and the sleeper sees what was written, or the sleeper's does and we
        // see it.
        fence(Ordering::SeqCst);
        if self.memory.word32(control + SLEEPS).load(Ordering::Relaxed) != 0 {
            let bell = self.memory.word32(control + BELL);
            bell.fetch_add(1, Ordering::Release);
            // A futex that cannot be woken is seen by the sleeper's own timeout.
            let _ = futex::wake(bell, futex::Flags::empty(), 1);
        }
    }

    /// Wakes all who sleep.
    pub(super) fn wake_peers(&self) {
        self.peers().for_each(|peer| self.wake(peer));
    }

    /// Sleeps for at most `limit`, unless what is waited for is already there. Then looks who is alive.
    pub(super) fn sleep_unless(&self, ready: impl Fn() -> bool, limit: Duration) {
        let control = self.at(self.rank);
        let (bell, sleeps) = (self.memory.word32(control + BELL), self.memory.word32(control + SLEEPS));
        let rings = bell.load(Ordering::Acquire);
        sleeps.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut timed_out = false;
        if !ready() {
            let limit = limit.try_into().unwrap_or_default();
            timed_out =
                futex::wait(bell, futex::Flags::empty(), rings, Some(&limit)) == Err(rustix::io::Errno::TIMEDOUT);
        }
        sleeps.store(0, Ordering::Relaxed);
        if timed_out {
            self.look_for_ended();
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.memory.word32(self.at(self.rank) + STATE).store(State::Closed as u32, Ordering::Release);
        self.wake_peers();
    }
}
