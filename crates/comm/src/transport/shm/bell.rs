//! Sleeping and waking across processes: a futex per rank, rung only when the rank says that it sleeps.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::thread::futex;

use super::Port;
use super::layout::{BELL, SLEEPS};

impl Port {
    /// Wakes a peer if it sleeps. What it is woken for must be written before.
    pub(super) fn wake(&self, peer: usize) {
        let control = self.layout.control(peer);
        // Either this fence comes first and the sleeper sees what was written, or the sleeper's does and we see it.
        fence(Ordering::SeqCst);
        if self.memory.word32(control + SLEEPS).load(Ordering::Relaxed) != 0 {
            let bell = self.memory.word32(control + BELL);
            bell.fetch_add(1, Ordering::Release);
            // A futex that cannot be woken is seen by the sleeper's own timeout.
            let _ = futex::wake(bell, futex::Flags::empty(), 1);
        }
    }

    /// Sleeps for at most `limit`, unless what is waited for is already there. Then looks who is alive.
    pub(super) fn sleep_unless(&mut self, ready: impl Fn(&Self) -> bool, limit: Duration) {
        let control = self.layout.control(self.rank);
        let (bell, sleeps) = (self.memory.word32(control + BELL), self.memory.word32(control + SLEEPS));
        let rings = bell.load(Ordering::Acquire);
        sleeps.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut timed_out = false;
        if !ready(self) {
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
