//! What the control thread says, for whoever keeps a log. Refusals of strangers are limited to one line a second.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use paceline_system::clock::Clock;
use paceline_system::event::Event;

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Notice {
    /// Whether the user should see it without having asked.
    pub warning: bool,
    /// The sentence.
    pub text: String,
    /// The same for an event log, where it belongs there.
    pub event: Option<Event>,
}

/// Where lines go. Cheap to clone.
#[derive(Clone)]
pub struct Log(Arc<dyn Fn(Notice) + Send + Sync>);

impl Log {
    /// A log that calls `listener` for each line, from the control thread.
    pub fn new(listener: impl Fn(Notice) + Send + Sync + 'static) -> Self {
        Self(Arc::new(listener))
    }

    /// A log that nobody reads.
    pub fn silent() -> Self {
        Self::new(|_| {})
    }

    /// Tells of refusals, whoever was refused, at most once a second.
    pub fn refusals(&self) -> impl Fn(&str) + Send + Sync + use<> {
        let (log, clock, refusals) = (self.clone(), Clock::real(), Mutex::new(Refusals::default()));
        move |text| refusals.lock().unwrap_or_else(PoisonError::into_inner).say(&log, clock.now(), text)
    }

    pub(crate) fn say(&self, text: impl Into<String>) {
        (self.0)(Notice { warning: false, text: text.into(), event: None });
    }

    pub(crate) fn warn(&self, text: impl Into<String>) {
        (self.0)(Notice { warning: true, text: text.into(), event: None });
    }

    pub(crate) fn tell(&self, text: impl Into<String>, event: Event) {
        (self.0)(Notice { warning: true, text: text.into(), event: Some(event) });
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Log")
    }
}

/// Refusals, at most one line a second: a stranger who knocks a million times fills no disk.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    next: Duration,
    unsaid: u64,
}

impl Refusals {
    pub(crate) fn say(&mut self, log: &Log, now: Duration, text: &str) {
        if now < self.next {
            self.unsaid += 1;
            return;
        }
        self.next = now + Duration::from_secs(1);
        match std::mem::take(&mut self.unsaid) {
            0 => log.warn(text),
            more => log.warn(format!("{text} (and {more} more refusals)")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_refusals_are_two_lines() {
        let said = Arc::new(Mutex::new(Vec::new()));
        let log = Log::new({
            let said = said.clone();
            move |notice| said.lock().unwrap().push(notice.text)
        });
        let mut refusals = Refusals::default();
        (0..1_000_000).for_each(|_| refusals.say(&log, Duration::ZERO, "refused x"));
        refusals.say(&log, Duration::from_secs(1), "refused y");
        assert_eq!(*said.lock().unwrap(), ["refused x", "refused y (and 999999 more refusals)"]);
    }
}
