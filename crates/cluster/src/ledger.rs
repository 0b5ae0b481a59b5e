//! Who takes which portion of the data, where workers do not wait for each other: `(state, event) → (state, answer)`,
//! without clock or socket. Rank 0 keeps it.
//!
//! Data come in stretches, between two points at which all meet: an epoch, the way to a checkpoint, an evaluation. All
//! number them alike. The portions of a stretch are handed out in order, each once, to whoever asks; so what was handed
//! out is always a prefix, whoever took it. A stretch that is closed early ends with a whole step.
//!
//! Where every portion has to count once, whoever is lost, answers are claimed (`ledger/answers.rs`).

mod answers;
mod groups;

use answers::Answers;
pub use groups::Groups;
use serde::{Deserialize, Serialize};

/// What a rank asks for: the next portion of a stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Take {
    /// The number of the stretch.
    pub stretch: u64,
    /// How many portions it has.
    pub portions: u64,
    /// How many of those that the rank has taken it has finished.
    pub finished: u64,
    /// Whether the first answer to each portion counts, which is claimed ([`Claim`]).
    pub claimed: bool,
}

/// A rank has computed a portion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// Of which stretch.
    pub stretch: u64,
    /// Its number.
    pub portion: u64,
}

/// Whether its answer counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counted {
    /// What was claimed.
    pub claim: Claim,
    /// Whether it is the first answer to it.
    pub counts: bool,
}

/// What it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Given {
    /// Of which stretch.
    pub stretch: u64,
    /// The number of a portion; none when all are taken.
    pub portion: Option<u64>,
    /// How many portions the stretch has come to, once all are taken.
    pub end: u64,
}

/// The stretch under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// Portions of a step.
    each: u64,
    stretch: u64,
    portions: u64,
    given: u64,
    end: u64,
    /// How many each rank has taken of this stretch and not finished, as far as it has said.
    open: Vec<u64>,
    taken: Vec<u64>,
    /// Where answers are claimed.
    answers: Option<Answers>,
}

/// What ranks are told: those that asked now, or before.
pub type Told = Vec<(usize, Given)>;

impl Ledger {
    /// Of so many ranks, and steps of so many portions.
    pub fn new(ranks: usize, each: u64) -> Self {
        Self {
            each: each.max(1),
            stretch: 0,
            portions: 0,
            given: 0,
            end: 0,
            open: vec![0; ranks],
            taken: vec![0; ranks],
            answers: None,
        }
    }

    /// Whether a rank may ask for this: all go through the same stretches, one after the other, and know how long they are.
    pub fn is_sound(&self, take: Take) -> bool {
        match take.stretch.checked_sub(self.stretch) {
            Some(0) => take.portions == self.portions && take.claimed == self.answers.is_some(),
            Some(next) => next == 1,
            None => true,
        }
    }

    /// A rank asks. Whoever asks for an older stretch is given nothing; where answers are claimed it may have to wait.
    pub fn take(&mut self, rank: usize, take: Take) -> Told {
        if take.stretch > self.stretch {
            (self.stretch, self.portions) = (take.stretch, take.portions);
            (self.given, self.end) = (0, take.portions);
            self.open.fill(0);
            self.taken.fill(0);
            self.answers = take.claimed.then(|| Answers::new(self.open.len(), take.portions));
        }
        let is_over = take.stretch < self.stretch;
        if let Some(answers) = self.answers.as_mut().filter(|_| !is_over) {
            answers.ask(rank);
            return self.answer();
        }
        if is_over || self.given >= self.end {
            self.finish(rank, take);
            return vec![(rank, Given { stretch: take.stretch, portion: None, end: self.end })];
        }
        let portion = self.given;
        self.given += 1;
        self.taken[rank] += 1;
        self.finish(rank, take);
        vec![(rank, Given { stretch: take.stretch, portion: Some(portion), end: self.end })]
    }

    /// What those that have asked can be told by now, where answers are claimed.
    fn answer(&mut self) -> Told {
        let stretch = self.stretch;
        let Some(answers) = &mut self.answers else { return Vec::new() };
        let told = answers.answer();
        let end = answers.end();
        told.into_iter().map(|(rank, portion)| (rank, Given { stretch, portion, end })).collect()
    }

    /// A rank has computed a portion: whether its answer counts; none if it was not given that portion.
    pub fn claim(&mut self, rank: usize, claim: Claim) -> (Option<Counted>, Told) {
        let of_now = claim.stretch == self.stretch;
        let counts = match self.answers.as_mut().filter(|_| of_now) {
            Some(answers) => answers.claim(rank, claim.portion),
            // What is over is over.
            None => (claim.stretch < self.stretch).then_some(false),
        };
        (counts.map(|counts| Counted { claim, counts }), self.answer())
    }

    fn finish(&mut self, rank: usize, take: Take) {
        if take.stretch == self.stretch {
            self.open[rank] = self.taken[rank].saturating_sub(take.finished);
        }
    }

    /// No more steps are begun in a stretch.
    pub fn close(&mut self, stretch: u64) -> Told {
        if stretch == self.stretch {
            self.end = self.end.min(self.given.next_multiple_of(self.each));
            self.answers.iter_mut().for_each(Answers::close);
        }
        self.answer()
    }

    /// A rank that was lost takes part again, and has taken nothing of this stretch by its own count.
    pub fn readmit(&mut self, rank: usize) {
        (self.open[rank], self.taken[rank]) = (0, 0);
    }

    /// A rank is lost: how many portions it had taken and not said to have finished. The last of them may have been
    /// applied. Where answers are claimed there are none: others compute them again.
    pub fn lose(&mut self, rank: usize) -> (u64, Told) {
        self.answers.iter_mut().for_each(|answers| answers.lose(rank));
        (std::mem::take(&mut self.open[rank]), self.answer())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn take(stretch: u64, portions: u64, finished: u64) -> Take {
        Take { stretch, portions, finished, claimed: false }
    }

    impl Ledger {
        fn give(&mut self, rank: usize, take: Take) -> Given {
            let told = self.take(rank, take);
            assert_eq!((told.len(), told[0].0), (1, rank));
            told[0].1
        }
    }

    #[test]
    fn a_stretch_that_is_closed_ends_with_a_whole_step_and_the_next_begins_anew() {
        let mut ledger = Ledger::new(2, 2);
        assert_eq!(ledger.give(0, take(1, 10, 0)).portion, Some(0));
        assert_eq!(ledger.give(1, take(1, 10, 0)).portion, Some(1));
        assert_eq!(ledger.give(0, take(1, 10, 0)).portion, Some(2));
        ledger.close(1);
        assert_eq!(ledger.give(0, take(1, 10, 1)).portion, Some(3));
        assert_eq!(ledger.give(0, take(1, 10, 2)), Given { stretch: 1, portion: None, end: 4 });
        // Closed once more, by another: nothing changes.
        ledger.close(1);
        assert_eq!(ledger.give(1, take(1, 10, 1)), Given { stretch: 1, portion: None, end: 4 });
        assert_eq!(ledger.give(1, take(2, 1, 0)), Given { stretch: 2, portion: Some(0), end: 1 });
        assert_eq!(ledger.give(0, take(1, 10, 3)).portion, None, "an older stretch is over");
    }

    #[test]
    fn whoever_is_elsewhere_in_the_data_is_not_believed() {
        let mut ledger = Ledger::new(2, 2);
        assert!(ledger.is_sound(take(1, 10, 0)) && !ledger.is_sound(take(2, 10, 0)));
        ledger.give(0, take(1, 10, 0));
        assert!(ledger.is_sound(take(1, 10, 5)) && !ledger.is_sound(take(1, 12, 0)));
        assert!(ledger.is_sound(take(2, 4, 0)) && ledger.is_sound(take(0, 9, 0)));
        assert!(!ledger.is_sound(take(u64::MAX, 10, 0)));
    }

    #[test]
    fn what_a_lost_rank_had_taken_is_counted_once() {
        let mut ledger = Ledger::new(3, 3);
        for _ in 0..3 {
            ledger.give(2, take(1, 9, 0));
        }
        ledger.give(2, take(1, 9, 2));
        assert_eq!([2, 2, 0].map(|rank| ledger.lose(rank).0), [2, 0, 0]);
        // It comes back, counts anew, and is lost again.
        ledger.readmit(2);
        for finished in [0, 0, 1] {
            ledger.give(2, take(1, 9, finished));
        }
        assert_eq!([2, 2].map(|rank| ledger.lose(rank).0), [2, 0]);
    }

    proptest! {
        #[test]
        fn every_portion_is_given_to_one_rank_in_order(
            ranks in 1usize..6, portions in 0u64..60, asks in prop::collection::vec(any::<u8>(), 80), close in prop::option::of(0usize..80),
        ) {
            let mut ledger = Ledger::new(ranks, ranks as u64);
            let mut given = Vec::new();
            let mut end = None;
            for (index, ask) in asks.into_iter().enumerate() {
                if close == Some(index) {
                    ledger.close(1);
                }
                let answer = ledger.give(ask as usize % ranks, take(1, portions, 0));
                given.extend(answer.portion);
                if answer.portion.is_none() {
                    prop_assert_eq!(*end.get_or_insert(answer.end), answer.end, "all hear of one end");
                }
            }
            prop_assert_eq!(&given, &(0..given.len() as u64).collect::<Vec<_>>());
            if let Some(end) = end {
                prop_assert_eq!(end, given.len() as u64);
                prop_assert!(end == portions || end % ranks as u64 == 0);
            }
        }
    }
}
