//! Events that other threads of a process tell, until whoever writes its log takes them.

use std::sync::{Arc, Mutex, PoisonError};

use crate::clock::Clock;
use crate::event::Event;

/// More than are told between two looks of a log that is alive; later ones are dropped.
const EVENTS_MAX: usize = 1000;

/// Where they wait. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Inbox {
    clock: Clock,
    events: Arc<Mutex<Vec<(f64, Event)>>>,
}

impl Default for Inbox {
    fn default() -> Self {
        Self { clock: Clock::real(), events: Arc::default() }
    }
}

impl Inbox {
    /// Tells of something that happens now.
    pub fn push(&self, event: Event) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < EVENTS_MAX {
            events.push((self.clock.seconds(), event));
        }
    }

    /// Takes what was told, each with the seconds since. Takes no memory if there is nothing.
    pub fn take(&self) -> Vec<(f64, Event)> {
        let mut told = std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        let now = self.clock.seconds();
        told.iter_mut().for_each(|(at, _)| *at = (now - *at).max(0.0));
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_taken_once_and_bounded() {
        let inbox = Inbox::default();
        (0..EVENTS_MAX + 5).for_each(|_| inbox.clone().push(Event::Warning { message: "hot".into() }));
        let told = inbox.take();
        assert!(told.len() == EVENTS_MAX && told.iter().all(|(age, _)| *age >= 0.0));
        assert!(inbox.take().is_empty());
    }
}
