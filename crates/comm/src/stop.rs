//! What all waits of a process share: one flag that ends them, with the reason that the first one to set it gave, and
//! whom they wait for.

use std::sync::{Arc, OnceLock};

use crate::awaited::{Awaited, Word};

/// Shared by everything in a process that waits for other ranks. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    reason: OnceLock<String>,
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
