//! One flag that ends every wait of a process, with the reason that the first one to set it gave.

use std::sync::{Arc, OnceLock};

/// Shared by everything in a process that waits for other ranks. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<OnceLock<String>>);

impl Stop {
    /// A flag nobody has set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends every wait. The first reason stays; whether this was the first.
    pub fn set(&self, reason: impl Into<String>) -> bool {
        self.0.set(reason.into()).is_ok()
    }

    /// Why to stop, once somebody has said so.
    pub fn reason(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
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
