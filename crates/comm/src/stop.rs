//! What all waits of a process share: one flag that ends them, with the reason that the first one to set it gave, the
//! ranks that nobody has to wait for any more, and whom they wait for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::awaited::{Awaited, Word};
use crate::rank::Rank;

/// Shared by everything in a process that waits for other ranks. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    reason: OnceLock<String>,
    losses: Mutex<Losses>,
    /// How many are lost: usually none, and then nobody looks further.
    lost_count: AtomicUsize,
    awaited: Word,
}

#[derive(Debug, Default)]
struct Losses {
    lost: BTreeSet<Rank>,
    /// Which of these are here again, and for the so-manieth time: lost until they are readmitted.
    returning: BTreeMap<Rank, u16>,
}

impl Stop {
    /// A flag nobody has set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends every wait. The first reason stays; whether this was the first.
    pub fn set(&self, reason: impl Into<String>) -> bool {
        self.0.reason.set(reason.into()).is_ok()
    }

    /// Why to stop, once somebody has said so.
    pub fn reason(&self) -> Option<&str> {
        self.0.reason.get().map(String::as_str)
    }

    /// A rank is lost, and the others go on: whoever waits for it need not any more. Ranks are those of the world.
    pub fn lose(&self, rank: Rank) {
        let mut losses = self.losses();
        losses.returning.remove(&rank);
        losses.lost.insert(rank);
        self.0.lost_count.store(losses.lost.len(), Ordering::Release);
    }

    /// Whether a rank is lost.
    pub fn has_lost(&self, rank: Rank) -> bool {
        self.0.lost_count.load(Ordering::Acquire) > 0 && self.losses().lost.contains(&rank)
    }

    /// A rank that is lost has come back, for the so-manieth time: whoever has a place for its connections may take
    /// them. For those who exchange with it, it is lost until [`Stop::readmit`].
    pub fn let_return(&self, rank: Rank, life: u16) {
        let mut losses = self.losses();
        if losses.lost.contains(&rank) {
            losses.returning.insert(rank, life);
        }
    }

    /// For the so-manieth time that a rank has come back and is not readmitted yet.
    pub fn returning(&self, rank: Rank) -> Option<u16> {
        self.losses().returning.get(&rank).copied()
    }

    /// A rank that has come back is not lost any more; whether that was so: it may have been lost again, or be another
    /// process by now.
    pub fn readmit(&self, rank: Rank, life: u16) -> bool {
        let mut losses = self.losses();
        if losses.returning.get(&rank) != Some(&life) {
            return false;
        }
        losses.returning.remove(&rank);
        losses.lost.remove(&rank);
        self.0.lost_count.store(losses.lost.len(), Ordering::Release);
        true
    }

    fn losses(&self) -> MutexGuard<'_, Losses> {
        self.0.losses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whom this process waits for at the moment, if it does: of several threads that wait, the one that looked up last.
    pub fn awaited(&self) -> Option<Awaited> {
        self.0.awaited.get()
    }

    pub(crate) fn word(&self) -> &Word {
        &self.0.awaited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays() {
        let stop = Stop::new();
        assert_eq!(stop.reason(), None);
        assert!(stop.clone().set("rank 3 is gone"));
        assert!(!stop.set("another"));
        assert_eq!(stop.reason(), Some("rank 3 is gone"));
    }

    #[test]
    fn a_lost_rank_is_lost_until_it_is_readmitted_in_the_life_in_which_it_has_come_back() {
        let (stop, rank) = (Stop::new(), Rank(2));
        stop.let_return(rank, 1);
        assert_eq!(stop.returning(rank), None, "who is there does not come back");
        stop.lose(rank);
        stop.let_return(rank, 1);
        assert!(stop.has_lost(rank) && stop.returning(rank) == Some(1));
        // Lost again before it was readmitted, and back once more.
        stop.lose(rank);
        assert!(!stop.readmit(rank, 1));
        stop.let_return(rank, 2);
        assert!(!stop.readmit(rank, 1) && stop.has_lost(rank));
        assert!(stop.readmit(rank, 2) && !stop.has_lost(rank));
        assert!(!stop.readmit(rank, 2), "once");
        stop.lose(rank);
        assert!(stop.has_lost(rank));
    }
}
