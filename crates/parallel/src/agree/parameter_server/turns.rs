//! Who may begin a step: a pure state machine, `(state, event) → (state, answer, reason)`.
//!
//! A clock counts the steps that a worker has pushed whole. With a bound of S, a worker may be at most S
//! steps ahead of the slowest (stale synchronous parallel): its next step then does not begin until the
//! others have come. With no bound everybody goes on. Where all meet, all have the same weights, and clocks begin anew;
//! whoever waits there for the others holds nobody up. How far a worker is ahead is its lead; how many updates a step
//! has missed, its staleness, is another number, which [`super::versions`] counts.

use std::fmt;

/// The state of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turns {
    /// Steps pushed, by worker.
    clocks: Vec<u64>,
    /// Workers that have said goodbye, or are lost.
    gone: Vec<bool>,
    /// Workers that wait where all meet.
    waits: Vec<bool>,
    staleness: Option<u64>,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker has ended a step.
    Stepped(usize),
    /// A worker has made so many steps in all.
    Reached {
        /// Which.
        worker: usize,
        /// How many.
        steps: u64,
    },
    /// A worker has ended.
    Left(usize),
    /// A worker that was lost takes part again: nobody waits until it has made the steps that others have.
    Returned(usize),
    /// A worker waits where all meet.
    Waits(usize),
    /// All have met.
    Met,
}

/// Why a worker may or may not begin a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is within the bound.
    Within,
    /// It is this many steps ahead of the slowest worker.
    Ahead {
        /// Of whom.
        slowest: usize,
        /// By how many steps.
        steps: u64,
    },
    /// It has ended.
    Left,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Within => f.write_str("it is within the bound"),
            Self::Ahead { slowest, steps } => write!(f, "it is {steps} steps ahead of worker {slowest}"),
            Self::Left => f.write_str("it has ended"),
        }
    }
}

impl Turns {
    /// Of so many workers.
    ///
    /// # Panics
    /// When there are none.
    pub fn new(workers: usize, staleness: Option<u64>) -> Self {
        assert!(workers > 0, "somebody pushes something");
        Self { clocks: vec![0; workers], gone: vec![false; workers], waits: vec![false; workers], staleness }
    }

    /// What becomes of it.
    pub fn after(mut self, event: Event) -> Self {
        match event {
            Event::Stepped(worker) => {
                assert!(!self.gone[worker], "worker {worker} steps after it left");
                self.clocks[worker] += 1;
            }
            Event::Reached { worker, steps } => self.clocks[worker] = self.clocks[worker].max(steps),
            Event::Left(worker) => self.gone[worker] = true,
            Event::Returned(worker) => {
                let others = (0..self.clocks.len()).filter(|&other| other != worker && !self.gone[other]);
                self.clocks[worker] = others.map(|other| self.clocks[other]).max().unwrap_or(0);
                (self.gone[worker], self.waits[worker]) = (false, false);
            }
            Event::Waits(worker) => self.waits[worker] = true,
            Event::Met => {
                self.waits.fill(false);
                self.clocks.fill(0);
            }
        }
        self
    }

    /// Whether a worker may begin its next step now, and why.
    pub fn may_step(&self, worker: usize) -> (bool, Reason) {
        if self.gone[worker] {
            return (false, Reason::Left);
        }
        let (Some(bound), Some(slowest)) = (self.staleness, self.others(worker)) else { return (true, Reason::Within) };
        let steps = self.clocks[worker].saturating_sub(self.clocks[slowest]);
        if steps > bound { (false, Reason::Ahead { slowest, steps }) } else { (true, Reason::Within) }
    }

    /// Whether everybody has left.
    pub fn is_over(&self) -> bool {
        self.gone.iter().all(|&gone| gone)
    }

    /// The slowest other worker that makes steps.
    fn others(&self, worker: usize) -> Option<usize> {
        (0..self.clocks.len())
            .filter(|&other| other != worker && !self.gone[other] && !self.waits[other])
            .min_by_key(|&other| self.clocks[other])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nobody_waits_for_the_steps_that_a_worker_has_missed_while_it_was_lost() {
        let mut turns = Turns::new(3, Some(1)).after(Event::Left(2));
        for worker in [0, 1, 0, 1, 0] {
            turns = turns.after(Event::Stepped(worker));
        }
        assert_eq!(turns.may_step(2), (false, Reason::Left));
        turns = turns.after(Event::Returned(2));
        assert!((0..3).all(|worker| turns.may_step(worker).0), "{turns:?}");
        // From there on it counts as the others do.
        turns = [0, 0].into_iter().fold(turns, |turns, worker| turns.after(Event::Stepped(worker)));
        assert!(!turns.may_step(0).0 && turns.may_step(2).0);
    }

    #[test]
    fn a_worker_that_is_ahead_waits_and_the_reason_names_the_slowest() {
        let mut turns = Turns::new(2, Some(1));
        turns = turns.after(Event::Stepped(0));
        assert_eq!(turns.may_step(0), (true, Reason::Within));
        turns = turns.after(Event::Stepped(0));
        assert_eq!(turns.may_step(0), (false, Reason::Ahead { slowest: 1, steps: 2 }));
        assert_eq!(turns.may_step(0).1.to_string(), "it is 2 steps ahead of worker 1");
        turns = turns.after(Event::Stepped(1));
        assert!(turns.may_step(0).0);
    }

    #[test]
    fn steps_may_be_told_several_at_once() {
        let turns = Turns::new(2, Some(8)).after(Event::Reached { worker: 0, steps: 16 });
        assert_eq!(turns.may_step(0).1, Reason::Ahead { slowest: 1, steps: 16 });
        let turns = turns.after(Event::Reached { worker: 1, steps: 8 }).after(Event::Reached { worker: 1, steps: 4 });
        assert!(turns.may_step(0).0 && turns.may_step(1).0, "nobody goes back");
    }

    #[test]
    fn who_has_left_holds_nobody_up() {
        let mut turns = Turns::new(3, Some(0)).after(Event::Stepped(0));
        assert!(!turns.may_step(0).0);
        turns = turns.after(Event::Left(1)).after(Event::Left(2));
        assert!(turns.may_step(0).0 && !turns.is_over());
        assert!(turns.after(Event::Left(0)).is_over());
    }

    #[test]
    fn who_waits_where_all_meet_holds_nobody_up_and_all_begin_anew() {
        let mut turns = Turns::new(2, Some(0)).after(Event::Stepped(0));
        assert!(!turns.may_step(0).0);
        turns = turns.after(Event::Waits(1));
        assert!(turns.may_step(0).0);
        turns = turns.after(Event::Stepped(0)).after(Event::Met);
        assert!(turns.may_step(0).0 && turns.may_step(1).0);
        assert!(!turns.after(Event::Stepped(1)).may_step(1).0);
    }

    proptest! {
        #[test]
        fn nobody_is_ever_further_ahead_than_the_bound_and_somebody_may_always_go_on(
            workers in 1usize..6, bound in 0u64..4, choices in prop::collection::vec(any::<u16>(), 0..300),
        ) {
            let mut turns = Turns::new(workers, Some(bound));
            for choice in choices {
                let served: Vec<usize> = (0..workers).filter(|&worker| turns.may_step(worker).0).collect();
                prop_assert!(!served.is_empty(), "a deadlock");
                turns = turns.after(Event::Stepped(served[choice as usize % served.len()]));
                let (least, most) = (turns.clocks.iter().min().unwrap(), turns.clocks.iter().max().unwrap());
                prop_assert!(most - least <= bound + 1);
            }
        }
    }
}
