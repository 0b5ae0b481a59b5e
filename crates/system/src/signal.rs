//! Ctrl-C as a flag: the loop looks at it between steps, saves and ends. A second Ctrl-C ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// Which signal asked for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM: a scheduler, or `kill`.
    Terminate,
    /// SIGHUP: the terminal was closed, or the connection to it.
    HangUp,
}

impl Signal {
    const ALL: [Self; 3] = [Self::Interrupt, Self::Terminate, Self::HangUp];

    const fn number(self) -> i32 {
        match self {
            Self::Interrupt => SIGINT,
            Self::Terminate => SIGTERM,
            Self::HangUp => SIGHUP,
        }
    }

    /// What a process that it ended answers, by the custom of shells: 130, 143 or 129.
    pub const fn exit_code(self) -> u8 {
        128 + self.number() as u8
    }

    /// Whether an exit code says that a signal ended the process in good order.
    pub fn is_exit_code(code: i32) -> bool {
        Self::ALL.iter().any(|signal| i32::from(signal.exit_code()) == code)
    }
}

/// Set when the user (or a scheduler) asked the process to end.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    asked: Arc<AtomicBool>,
    /// The number of the signal that asked; 0 if none did.
    signal: Arc<AtomicUsize>,
    /// Another that counts too.
    parent: Option<Arc<Stop>>,
}

impl Stop {
    /// A flag that only [`Stop::request`] sets: for tests and for runs inside another program.
    pub fn new() -> Self {
        Self::default()
    }

    /// A flag set by SIGINT, SIGTERM and SIGHUP. The first signal sets it; a second SIGINT or SIGTERM ends the process at once, with exit code 1. A second
    /// SIGHUP does not: when a terminal is closed, the kernel sends one and many a shell another. Where SIGHUP is ignored from the start
    /// (nohup), it stays so.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn on_signals() -> std::io::Result<Self> {
        let stop = Self::default();
        for signal in Signal::ALL {
            let number = signal.number();
            if signal == Signal::HangUp {
                if is_ignored(number) {
                    continue;
                }
            } else {
                // The order matters: the shutdown looks at the flag before the last handler sets it.
                // It is a failure: what was under way is not saved.
                flag::register_conditional_shutdown(number, 1, Arc::clone(&stop.asked))?;
            }
            flag::register_usize(number, Arc::clone(&stop.signal), number as usize)?;
            flag::register(number, Arc::clone(&stop.asked))?;
        }
        Ok(stop)
    }

    /// A flag of its own that is also set whenever this one is.
    pub fn child(&self) -> Self {
        Self { parent: Some(Arc::new(self.clone())), ..Self::default() }
    }

    /// Asks for a stop.
    pub fn request(&self) {
        self.asked.store(true, Ordering::SeqCst);
    }

    /// Whether a stop was asked for.
    pub fn requested(&self) -> bool {
        self.asked.load(Ordering::SeqCst) || self.parent.as_ref().is_some_and(|parent| parent.requested())
    }

    /// The signal that asked for it; Ctrl-C if another process passed the wish on.
    pub fn signal(&self) -> Signal {
        let number = self.signal.load(Ordering::SeqCst);
        let known = Signal::ALL.into_iter().find(|signal| signal.number() as usize == number);
        known.or_else(|| Some(self.parent.as_ref()?.signal())).unwrap_or(Signal::Interrupt)
    }
}

/// Whether the process was started with a signal ignored; false where the system does not say.
fn is_ignored(number: i32) -> bool {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = text.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (number - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_shells() {
        assert_eq!(Signal::ALL.map(Signal::exit_code), [130, 143, 129]);
        assert!(Signal::is_exit_code(143) && !Signal::is_exit_code(1) && !Signal::is_exit_code(137));
    }

    #[test]
    fn a_wish_without_a_signal_counts_as_an_interrupt() {
        let stop = Stop::new();
        assert!(!stop.requested());
        stop.request();
        assert!(stop.requested());
        assert_eq!(stop.signal(), Signal::Interrupt);
    }

    #[test]
    fn a_child_hears_of_its_parents_stop_and_not_the_other_way_round() {
        let stop = Stop::new();
        let (first, second) = (stop.child(), stop.child());
        first.request();
        assert!(first.requested() && !stop.requested() && !second.requested());
        stop.request();
        assert!(second.requested());
    }
}
