//! How long to wait: until a deadline, or until somebody sets the [`Stop`]. Every blocking call takes one, and says
//! there whom it waits for.

use std::sync::Arc;
use std::time::Duration;

use paceline_system::clock::Clock;

use crate::awaited::Awaited;
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
    /// The numbers in the world of a group's ranks, where those are waited for.
    members: Option<Arc<[Rank]>>,
    /// Whether it ends when whom it is for is lost.
    heeds_losses: bool,
}

impl Wait {
    /// From now until `limit` has passed or `stop` is set.
    pub fn new(limit: Duration, stop: &Stop) -> Self {
        Self { clock: Clock::real(), limit, stop: stop.clone(), members: None, heeds_losses: true }
    }

    /// The same for ranks that are numbered within a group of these.
    pub(crate) fn among(members: &Arc<[Rank]>, limit: Duration, stop: &Stop) -> Self {
        Self { clock: Clock::real(), limit, stop: stop.clone(), members: Some(Arc::clone(members)), heeds_losses: true }
    }

    /// The same, but no longer than `limit` from now.
    pub fn at_most(&self, limit: Duration) -> Self {
        Self::new(limit.min(self.left()), &self.stop)
    }

    /// The same for one who may be lost and is here again, on a connection of its own.
    pub(crate) fn for_whoever_comes(&self) -> Self {
        let mut wait = self.clone();
        wait.heeds_losses = false;
        wait
    }

    /// What ends it early.
    pub(crate) const fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Time left; zero once the deadline has passed.
    pub fn left(&self) -> Duration {
        self.limit.saturating_sub(self.clock.now())
    }

    /// How long to sleep before looking up again; never zero, which some system calls take for "for ever".
    pub fn slice(&self) -> Duration {
        self.left().clamp(Duration::from_millis(1), SLICE_MAX)
    }

    /// Whether to go on waiting. Until the wait is over, the [`Stop`] says for whom.
    ///
    /// # Errors
    /// When the stop was set or the deadline has passed: who waited for whom, in which phase.
    pub fn check(&self, rank: Rank, peer: impl Into<Party>, phase: &'static str) -> Result<(), CommError> {
        let peer = peer.into();
        let awaited = match &peer {
            Party::Rank(peer) => Some(Awaited::Rank(self.number(*peer))),
            Party::Anyone => Some(Awaited::All),
            Party::Address(_) => None,
        };
        self.check_as(awaited, rank, peer, phase)
    }

    /// The same for one who waits for whoever comes next, so that nobody is late.
    pub(crate) fn check_idle(&self, rank: Rank, phase: &'static str) -> Result<(), CommError> {
        self.check_as(Some(Awaited::Anyone), rank, Party::Anyone, phase)
    }

    fn check_as(
        &self,
        awaited: Option<Awaited>,
        rank: Rank,
        peer: Party,
        phase: &'static str,
    ) -> Result<(), CommError> {
        if let Some(awaited) = awaited {
            self.stop.word().set(awaited);
        }
        if let Some(reason) = self.stop.reason() {
            return Err(CommError::Stopped { rank, phase, reason: reason.to_owned() });
        }
        if let Some(Awaited::Rank(lost)) = awaited
            && self.heeds_losses
            && self.stop.has_lost(lost)
        {
            return Err(CommError::PeerGone { rank, peer, phase, reason: "it is lost".into() });
        }
        if self.left().is_zero() {
            return Err(CommError::DeadlinePassed { rank, peer, phase, waited: self.limit });
        }
        Ok(())
    }

    /// Whether a rank is lost that is numbered as those that are waited for.
    pub(crate) fn has_lost(&self, rank: Rank) -> bool {
        self.stop.has_lost(self.number(rank))
    }

    /// Says that what was waited for has come. So does the end of the wait itself.
    pub(crate) fn over(&self) {
        self.stop.word().clear();
    }

    fn number(&self, rank: Rank) -> Rank {
        self.members.as_ref().and_then(|members| members.get(rank.index()).copied()).unwrap_or(rank)
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.over();
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
    fn whoever_looks_sees_who_is_waited_for_by_its_number_in_the_world() {
        let stop = Stop::new();
        let members: Arc<[Rank]> = [Rank(4), Rank(7)].into();
        let wait = Wait::among(&members, Duration::from_secs(1000), &stop);
        assert_eq!(stop.awaited(), None);
        wait.check(Rank(0), Rank(1), "all_reduce").unwrap();
        assert_eq!(stop.awaited(), Some(Awaited::Rank(Rank(7))));
        wait.over();
        assert_eq!(stop.awaited(), None);
        wait.check(Rank(0), Party::Anyone, "all_reduce").unwrap();
        assert_eq!(stop.awaited(), Some(Awaited::All));
        wait.check_idle(Rank(0), "wait_any").unwrap();
        assert_eq!(stop.awaited(), Some(Awaited::Anyone));
        drop(wait);
        assert_eq!(stop.awaited(), None);
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
