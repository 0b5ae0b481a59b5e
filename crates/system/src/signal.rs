//! Ctrl-C as a flag: the loop looks at it between steps, saves and ends. A second Ctrl-C ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set when the user (or a scheduler) asked the process to end.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// A flag that only [`Stop::request`] sets: for tests and for runs inside another program.
    pub fn new() -> Self {
        Self::default()
    }

    /// A flag set by SIGINT and SIGTERM. The first signal sets it; a second one ends the process with code 130.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn on_signals() -> std::io::Result<Self> {
        let stop = Self::default();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // The order matters: the shutdown looks at the flag before the second handler sets it.
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop.0))?;
            signal_hook::flag::register(signal, Arc::clone(&stop.0))?;
        }
        Ok(stop)
    }

    /// Asks for a stop.
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether a stop was asked for.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
