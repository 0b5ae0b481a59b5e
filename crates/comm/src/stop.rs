//! What all waits of a process share: one flag that ends them, with the reason that the first one to set it gave, the
//! ranks that nobody has to wait for any more, and whom they wait for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::awaited::{Awaited, Word};
use crate::rank::Rank;

/// Shared by everything in a process that waits for other ranks. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    reason: OnceLock<String>,
    lost: Mutex<Vec<Rank>>,
    /// How many are lost: usually none, and then nobody looks further.
    losses: AtomicUsize,
    awaited: Word,
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
        self.0.lost.lock().unwrap_or_else(PoisonError::into_inner).push(rank);
        self.0.losses.fetch_add(1, Ordering::Release);
    }

    /// Whether a rank is lost.
    pub fn has_lost(&self, rank: Rank) -> bool {
        self.0.losses.load(Ordering::Acquire) > 0
            && self.0.lost.lock().unwrap_or_else(PoisonError::into_inner).contains(&rank)
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
}
