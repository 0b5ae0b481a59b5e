//! Ranks as threads of one process: tests and small runs. One bounded pipe for each ordered pair, behind a lock.

use std::collections::{HashMap, VecDeque};
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::rank::Rank;

/// Bytes a pipe holds.
const PIPE_BYTES: usize = 1 << 20;

#[derive(Debug, Default)]
struct Bell {
    rings: Mutex<u64>,
    rung: Condvar,
}

/// The groups of a world that some of their ranks have not come to yet, by context; and how many have.
#[derive(Debug, Default)]
struct Groups {
    contexts: AtomicU64,
    open: Mutex<HashMap<u64, (Arc<ThreadWorld>, usize)>>,
}

/// What the ranks of a world of threads share.
#[derive(Debug)]
struct ThreadWorld {
    world: usize,
    groups: Arc<Groups>,
    /// Row: from, column: to.
    pipes: Vec<Mutex<VecDeque<u8>>>,
    /// Rung whenever something changed for a rank.
    bells: Vec<Bell>,
    closed: Vec<AtomicBool>,
}

/// A thread that panicked while it held a lock left bytes that are still bytes.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ThreadWorld {
    fn new(world: usize, groups: Arc<Groups>) -> Arc<Self> {
        Arc::new(Self {
            world,
            groups,
            pipes: (0..world * world).map(|_| Mutex::default()).collect(),
            bells: (0..world).map(|_| Bell::default()).collect(),
            closed: (0..world).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    fn ring(&self, rank: usize) {
        *lock(&self.bells[rank].rings) += 1;
        self.bells[rank].rung.notify_one();
    }

    fn gone(&self, peer: Rank) -> bool {
        self.closed[peer.index()].load(Ordering::SeqCst)
    }
}

/// One rank's end. Dropping it tells the others that the rank is gone.
#[derive(Debug)]
pub struct Port {
    rank: usize,
    shared: Arc<ThreadWorld>,
    heard: u64,
}

/// The ends of a world of threads, by rank.
pub fn mesh(world: usize) -> Vec<Port> {
    let shared = ThreadWorld::new(world, Arc::default());
    (0..world).map(|rank| Port { rank, shared: Arc::clone(&shared), heard: 0 }).collect()
}

impl Port {
    /// This rank.
    pub fn rank(&self) -> Rank {
        Rank::at(self.rank)
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.shared.world
    }

    /// A number that no group of this world has had.
    pub(super) fn new_context(&self) -> u64 {
        self.shared.groups.contexts.fetch_add(1, Ordering::Relaxed)
    }

    /// This rank's end in a group of these ranks, of which it is one, by the number that they have agreed on.
    pub(super) fn group(&self, members: &[Rank], context: u64) -> Self {
        let rank = members.iter().position(|&member| member == self.rank()).expect("this rank is a member");
        let mut open = lock(&self.shared.groups.open);
        let new = || (ThreadWorld::new(members.len(), Arc::clone(&self.shared.groups)), 0);
        let (shared, came) = open.entry(context).or_insert_with(new);
        *came += 1;
        let (shared, whole) = (Arc::clone(shared), *came == members.len());
        if whole {
            open.remove(&context);
        }
        Self { rank, shared, heard: 0 }
    }

    fn pipe(&self, from: usize, to: usize) -> MutexGuard<'_, VecDeque<u8>> {
        lock(&self.shared.pipes[from * self.shared.world + to])
    }

    pub(super) fn try_send(&mut self, peer: Rank, bytes: &[u8]) -> Result<usize, String> {
        if self.shared.gone(peer) {
            return Err("its thread ended".into());
        }
        let mut pipe = self.pipe(self.rank, peer.index());
        let count = bytes.len().min(PIPE_BYTES - pipe.len());
        pipe.extend(&bytes[..count]);
        drop(pipe);
        if count > 0 {
            self.shared.ring(peer.index());
        }
        Ok(count)
    }

    pub(super) fn try_receive(&mut self, peer: Rank, bytes: &mut [u8]) -> Result<usize, String> {
        let gone = self.shared.gone(peer);
        let mut pipe = self.pipe(peer.index(), self.rank);
        let mut count = 0;
        // The bytes may lie in two pieces.
        for _ in 0..2 {
            count += pipe.read(&mut bytes[count..]).expect("memory can be read");
        }
        drop(pipe);
        if count > 0 {
            self.shared.ring(peer.index());
        } else if gone && !bytes.is_empty() {
            return Err("its thread ended".into());
        }
        Ok(count)
    }

    pub(super) fn has_bytes(&mut self, peer: Rank) -> Result<bool, String> {
        let gone = self.shared.gone(peer);
        let some = !self.pipe(peer.index(), self.rank).is_empty();
        if gone && !some { Err("its thread ended".into()) } else { Ok(some) }
    }

    pub(super) fn sleep(&mut self, limit: Duration) {
        let bell = &self.shared.bells[self.rank];
        let rings = lock(&bell.rings);
        let heard = self.heard;
        let waited = bell.rung.wait_timeout_while(rings, limit, |rings| *rings == heard);
        self.heard = *waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.shared.closed[self.rank].store(true, Ordering::SeqCst);
        (0..self.shared.world).for_each(|rank| self.shared.ring(rank));
    }
}
