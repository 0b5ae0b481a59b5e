//! How long to wait: until a deadline, or until somebody sets the [`Stop`]. Every blocking call takes one.

use std::time::Duration;

use paceline_system::clock::Clock;

use crate::error::{CommError, Party};
use crate::rank::Rank;
use crate::stop::Stop;

/// A waiting thread looks up at least this often.
pub const SLICE_MAX: Duration = Duration::from_millis(50);

/// A deadline that started to run when it was made, and the flag that ends it early.
#[derive(Clone, Debug)]
pub struct Wait {
    clock: Clock,
    limit: Duration,
    stop: Stop,
}

impl Wait {
    /// From now until `limit` has passed or `stop` is set.
    pub fn new(limit: Duration, stop: &Stop) -> Self {
        Self { clock: Clock::real(), limit, stop: stop.clone() }
    }

    /// The same, but no longer than `limit` from now.
    pub fn at_most(&self, limit: Duration) -> Self {
        Self::new(limit.min(self.left()), &self.stop)
    }

    /// Time left; zero once the deadline has passed.
    pub fn left(&self) -> Duration {
        self.limit.saturating_sub(self.clock.now())
    }

    /// How long to sleep before looking up again; never zero, which some system calls take for "for ever".
    pub fn slice(&self) -> Duration {
        self.left().clamp(Duration::from_millis(1), SLICE_MAX)
    }

    /// Whether to go on waiting.
    ///
    /// # Errors
    /// When the stop was set or the deadline has passed: who waited for whom, in which phase.
    pub fn check(&self, rank: Rank, peer: impl Into<Party>, phase: &'static str) -> Result<(), CommError> {
        if let Some(reason) = self.stop.reason() {
            return Err(CommError::Stopped { rank, phase, reason: reason.to_owned() });
        }
        if self.left().is_zero() {
            return Err(CommError::DeadlinePassed { rank, peer: peer.into(), phase, waited: self.limit });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passed_deadline_names_who_was_waited_for() {
        let wait = Wait::new(Duration::ZERO, &Stop::new());
        let error = wait.check(Rank(1), Rank(2), "all_reduce").unwrap_err();
        assert_eq!(error.to_string(), "rank 1 waited 0 ms for rank 2 in all_reduce: deadline passed");
        assert_eq!(error.peer(), Some(Rank(2)));
    }

    #[test]
    fn a_stop_ends_a_wait_before_its_deadline() {
        let stop = Stop::new();
        let wait = Wait::new(Duration::from_secs(1000), &stop);
        wait.check(Rank(0), Rank(1), "barrier").unwrap();
        assert!(wait.slice() <= SLICE_MAX);
        stop.set("asked to");
        let error = wait.check(Rank(0), Rank(1), "barrier").unwrap_err();
        assert_eq!(error.to_string(), "rank 0 was stopped in barrier: asked to");
    }
}
