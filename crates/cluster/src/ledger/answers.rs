//! A stretch of the data in which every portion counts once, whatever happens to ranks: the first answer to a portion
//! counts.
//!
//! Portions are handed out in order. A rank that has none left, where all are handed out, takes one that another rank
//! has and that nobody else has taken a second time, the latest first: the others are computing the earlier ones. Who
//! is first says so, and only its answer counts. What a lost rank had taken, or had counted, is handed out again:
//! nobody has its answers. Whoever asks where nothing is left to take waits until all answers are there, since
//! portions of others may come back.
//!
//! It has as much memory as portions were given to somebody, however many somebody said there were.

use std::collections::{BTreeMap, BTreeSet};

/// The account of such a stretch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answers {
    /// So many portions count in the end.
    end: u64,
    /// The first that was never given.
    next: u64,
    /// Of ranks that were lost.
    returned: BTreeSet<u64>,
    /// What each rank was given and has not claimed.
    held: Vec<BTreeSet<u64>>,
    /// Whose answer counts.
    counted: BTreeMap<u64, usize>,
    /// Ranks that have asked and were not told.
    asking: BTreeSet<usize>,
    /// Nothing counts any more: all answers are there, or no more are wanted.
    over: bool,
}

impl Answers {
    pub fn new(ranks: usize, portions: u64) -> Self {
        Self {
            end: portions,
            next: 0,
            returned: BTreeSet::new(),
            held: vec![BTreeSet::new(); ranks],
            counted: BTreeMap::new(),
            asking: BTreeSet::new(),
            over: portions == 0,
        }
    }

    /// How many portions the stretch has come to, once it is over.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// A rank wants a portion.
    pub fn ask(&mut self, rank: usize) {
        self.asking.insert(rank);
    }

    /// What those that have asked can be told: a portion, or that there are none any more.
    pub fn answer(&mut self) -> Vec<(usize, Option<u64>)> {
        let mut told = Vec::new();
        for rank in self.asking.clone() {
            let portion = self.portion_for(rank);
            if portion.is_some() || self.over {
                self.asking.remove(&rank);
                self.held[rank].extend(portion);
                told.push((rank, portion));
            }
        }
        told
    }

    fn portion_for(&mut self, rank: usize) -> Option<u64> {
        if self.over {
            return None;
        }
        if let Some(portion) = self.returned.pop_first() {
            return Some(portion);
        }
        if self.next < self.end {
            self.next += 1;
            return Some(self.next - 1);
        }
        // Who has a portion left is not free.
        let is_free = self.held[rank].is_empty();
        let second = |portion: &u64| !self.counted.contains_key(portion) && self.holders(*portion) == 1;
        self.held.iter().flatten().copied().filter(|portion| is_free && second(portion)).max()
    }

    fn holders(&self, portion: u64) -> usize {
        self.held.iter().filter(|held| held.contains(&portion)).count()
    }

    /// A rank has an answer: whether it counts; none if it was not given the portion.
    pub fn claim(&mut self, rank: usize, portion: u64) -> Option<bool> {
        if !self.held[rank].remove(&portion) {
            return None;
        }
        if self.over || self.counted.contains_key(&portion) {
            return Some(false);
        }
        self.counted.insert(portion, rank);
        self.over = self.counted.len() as u64 == self.end;
        Some(true)
    }

    /// No more answers are wanted.
    pub fn close(&mut self) {
        if !self.over {
            (self.over, self.end) = (true, self.counted.len() as u64);
        }
    }

    /// A rank is lost. Where all answers were there already, it may have passed its own on.
    pub fn lose(&mut self, rank: usize) {
        self.asking.remove(&rank);
        let mut lost = std::mem::take(&mut self.held[rank]);
        if self.over {
            return;
        }
        lost.extend(self.counted.iter().filter(|(_, counted)| **counted == rank).map(|(portion, _)| *portion));
        self.counted.retain(|_, counted| *counted != rank);
        lost.retain(|portion| !self.counted.contains_key(portion) && self.holders(*portion) == 0);
        self.returned.extend(lost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Asks for one, which it is told at once.
    fn take(answers: &mut Answers, rank: usize) -> Option<u64> {
        answers.ask(rank);
        let told = answers.answer();
        assert_eq!(told.len(), 1, "{told:?}");
        told[0].1
    }

    fn waits(answers: &mut Answers, rank: usize) {
        answers.ask(rank);
        assert_eq!(answers.answer(), []);
    }

    #[test]
    fn a_free_rank_takes_what_another_has_and_the_first_answer_wins() {
        let mut answers = Answers::new(2, 3);
        assert_eq!([take(&mut answers, 0), take(&mut answers, 1), take(&mut answers, 0)], [Some(0), Some(1), Some(2)]);
        waits(&mut answers, 1);
        assert_eq!(answers.claim(1, 1), Some(true));
        // It has none left: the later of those that rank 0 has is its own too.
        assert_eq!(answers.answer(), [(1, Some(2))]);
        assert_eq!((answers.claim(1, 2), answers.claim(0, 0)), (Some(true), Some(true)));
        assert_eq!(answers.claim(0, 2), Some(false), "it came second");
        assert_eq!((take(&mut answers, 0), take(&mut answers, 1), answers.end()), (None, None, 3));
    }

    #[test]
    fn nobody_computes_a_portion_a_third_time() {
        let mut answers = Answers::new(3, 1);
        assert_eq!([take(&mut answers, 0), take(&mut answers, 1)], [Some(0), Some(0)]);
        waits(&mut answers, 2);
        assert_eq!(answers.claim(1, 0), Some(true));
        assert_eq!(answers.answer(), [(2, None)]);
    }

    #[test]
    fn what_a_lost_rank_had_counted_is_computed_again() {
        let mut answers = Answers::new(2, 2);
        assert_eq!((take(&mut answers, 0), answers.claim(0, 0)), (Some(0), Some(true)));
        assert_eq!((take(&mut answers, 1), answers.claim(1, 1)), (Some(1), Some(true)));
        // All answers were there: who was lost then may have passed them on.
        let mut late = answers.clone();
        late.lose(0);
        assert_eq!(take(&mut late, 1), None);
        let mut answers = Answers::new(2, 2);
        assert_eq!((take(&mut answers, 0), answers.claim(0, 0)), (Some(0), Some(true)));
        assert_eq!(take(&mut answers, 1), Some(1));
        answers.lose(0);
        assert_eq!(
            (take(&mut answers, 1), answers.claim(1, 0), answers.claim(1, 1)),
            (Some(0), Some(true), Some(true))
        );
    }

    #[test]
    fn a_portion_that_was_not_given_is_not_claimed() {
        let mut answers = Answers::new(2, 9);
        assert_eq!((take(&mut answers, 0), answers.claim(1, 0), answers.claim(0, 7)), (Some(0), None, None));
        assert_eq!((answers.claim(0, 0), answers.claim(0, 0)), (Some(true), None));
    }

    #[test]
    fn whoever_waits_hears_that_no_more_answers_are_wanted() {
        let mut answers = Answers::new(2, 5);
        assert_eq!([0; 5].map(|rank| take(&mut answers, rank)), [0, 1, 2, 3, 4].map(Some));
        assert_eq!(take(&mut answers, 1), Some(4));
        waits(&mut answers, 1);
        assert_eq!(answers.claim(0, 0), Some(true));
        answers.close();
        assert_eq!((answers.answer(), answers.end(), answers.claim(0, 1)), (vec![(1, None)], 1, Some(false)));
    }

    proptest! {
        /// Ranks come, compute, answer late and are lost in any order: in the end every portion counts with one rank that is
        /// left.
        #[test]
        fn every_portion_counts_once_whatever_happens(
            ranks in 1usize..5, portions in 0u64..30, happens in prop::collection::vec((any::<u8>(), any::<u8>()), 400),
        ) {
            let mut answers = Answers::new(ranks, portions);
            let mut left: Vec<usize> = (0..ranks).collect();
            let mut mine: Vec<Vec<u64>> = vec![Vec::new(); ranks];
            let mut sums: Vec<BTreeSet<u64>> = vec![BTreeSet::new(); ranks];
            let mut ended: BTreeSet<usize> = BTreeSet::new();
            // Behind what happens, everybody that is left works until there is nothing more to do.
            let work = (0..600u16).map(|turn| (u8::from(turn % 2 == 0), (turn / 2) as u8));
            for (what, who) in happens.into_iter().chain(work) {
                let rank = left[who as usize % left.len()];
                let told = match what % 40 {
                    39 if left.len() > 1 && !answers.over => {
                        answers.lose(rank);
                        left.retain(|&other| other != rank);
                        sums[rank].clear();
                        answers.answer()
                    }
                    what if what % 2 == 0 && !mine[rank].is_empty() => {
                        let portion = mine[rank].remove(0);
                        let counts = answers.claim(rank, portion);
                        prop_assert!(counts.is_some());
                        if counts == Some(true) {
                            prop_assert!(sums[rank].insert(portion));
                        }
                        answers.answer()
                    }
                    _ if mine[rank].len() < 2 && !ended.contains(&rank) => {
                        answers.ask(rank);
                        answers.answer()
                    }
                    _ => Vec::new(),
                };
                for (rank, portion) in told {
                    prop_assert!(left.contains(&rank));
                    mine[rank].extend(portion);
                    if portion.is_none() {
                        ended.insert(rank);
                    }
                }
            }
            prop_assert_eq!(ended.len(), left.len(), "all have heard of the end");
            let all: Vec<u64> = left.iter().flat_map(|&rank| sums[rank].iter().copied()).collect();
            prop_assert_eq!(all.len() as u64, portions);
            prop_assert_eq!(all.into_iter().collect::<BTreeSet<_>>(), (0..portions).collect::<BTreeSet<_>>());
        }
    }
}
