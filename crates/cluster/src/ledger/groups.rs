//! Portions of groups of ranks: those of a group are given the same ones, in the same order, and each computes its part.

use super::{Given, Ledger, Take, Told};

/// What each group was given in the stretch under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Ranks of a group, one after the other.
    size: usize,
    stretch: u64,
    given: Vec<Vec<Given>>,
    /// How many answers each rank has had.
    asked: Vec<usize>,
    /// How many portions each has said to have finished.
    finished: Vec<u64>,
    /// Groups that have lost one of them, and are given nothing any more.
    lost: Vec<bool>,
}

impl Groups {
    /// So many ranks, in groups of `size`.
    pub fn new(ranks: usize, size: usize) -> Self {
        let size = size.max(1);
        Self {
            size,
            stretch: 0,
            given: vec![Vec::new(); ranks.div_ceil(size)],
            asked: vec![0; ranks],
            finished: vec![0; ranks],
            lost: vec![false; ranks.div_ceil(size)],
        }
    }

    fn first(&self, rank: usize) -> usize {
        rank / self.size * self.size
    }

    /// A rank is lost, and its group with it: how many portions that had taken and not all of it said to have finished.
    pub fn lose(&mut self, ledger: &mut Ledger, rank: usize) -> (u64, Told) {
        // One alone may come back.
        self.lost[rank / self.size] = self.size > 1;
        ledger.lose(self.first(rank))
    }

    /// A rank asks: what its group was given when others of it had asked as often, or the next.
    pub fn take(&mut self, ledger: &mut Ledger, rank: usize, take: Take) -> Told {
        if self.size == 1 || take.stretch < self.stretch {
            return ledger.take(rank, take);
        }
        if self.lost[rank / self.size] {
            return vec![(rank, Given { stretch: take.stretch, portion: None, end: 0 })];
        }
        if take.stretch > self.stretch {
            self.stretch = take.stretch;
            self.given.iter_mut().for_each(Vec::clear);
            self.asked.fill(0);
            self.finished.fill(0);
        }
        self.finished[rank] = take.finished;
        let first = self.first(rank);
        let of_group = self.finished.iter().skip(first).take(self.size).copied().min().unwrap_or(0);
        let take = Take { finished: of_group, ..take };
        let (given, asked) = (&mut self.given[rank / self.size], &mut self.asked[rank]);
        if *asked == given.len() {
            // A group's portions are written down with its first rank.
            let told = ledger.take(first, take);
            given.extend(told.into_iter().map(|(_, given)| given));
        } else {
            ledger.finish(first, take);
        }
        *asked += 1;
        given.get(*asked - 1).map(|&given| (rank, given)).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a rank is told, which is told at once.
    fn one(told: Told) -> Given {
        let [(_, given)] = told[..] else { panic!("one is told") };
        given
    }

    #[test]
    fn what_a_group_had_taken_and_one_of_it_not_finished_is_lost_once() {
        let (mut ledger, mut groups) = (Ledger::new(4, 2), Groups::new(4, 2));
        let mut ask = |rank, finished| {
            let take = Take { stretch: 1, portions: 20, finished, claimed: false };
            one(groups.take(&mut ledger, rank, take)).portion
        };
        assert_eq!([ask(3, 0), ask(2, 0), ask(0, 0), ask(2, 0), ask(3, 0)], [0, 0, 1, 2, 2].map(Some));
        // Each asks for a third when it has finished the first; one has told of two by then.
        assert_eq!([ask(3, 1), ask(2, 2)], [3, 3].map(Some));
        assert_eq!(groups.lose(&mut ledger, 3).0, 2);
        let take = Take { stretch: 1, portions: 20, finished: 2, claimed: false };
        assert_eq!(one(groups.take(&mut ledger, 2, take)).portion, None, "nothing is given to those that are left");
        assert_eq!([2, 0].map(|rank| groups.lose(&mut ledger, rank).0), [0, 1]);
    }

    proptest! {
        #[test]
        fn ranks_of_a_group_are_given_the_same_and_every_portion_goes_to_one_group(
            size in 1usize..4, groups in 1usize..4, portions in 0u64..30,
            asks in prop::collection::vec(any::<u8>(), 120), close in prop::option::of(0usize..120),
        ) {
            let ranks = size * groups;
            let (mut ledger, mut shared) = (Ledger::new(ranks, groups as u64), Groups::new(ranks, size));
            let mut given: Vec<Vec<u64>> = vec![Vec::new(); ranks];
            for stretch in 1..3 {
                given.iter_mut().for_each(Vec::clear);
                for (index, ask) in asks.iter().enumerate() {
                    if close == Some(index) {
                        ledger.close(stretch);
                    }
                    let rank = *ask as usize % ranks;
                    let take = Take { stretch, portions, finished: 0, claimed: false };
                    given[rank].extend(one(shared.take(&mut ledger, rank, take)).portion);
                }
                // Whoever has not come that far asks until there are none.
                for (rank, given) in given.iter_mut().enumerate() {
                    let take = Take { stretch, portions, finished: 0, claimed: false };
                    while let Some(portion) = one(shared.take(&mut ledger, rank, take)).portion {
                        given.push(portion);
                    }
                }
                for group in given.chunks(size) {
                    prop_assert!(group.iter().all(|own| *own == group[0]));
                }
                let mut all: Vec<u64> = given.chunks(size).flat_map(|group| group[0].clone()).collect();
                all.sort_unstable();
                prop_assert_eq!(&all, &(0..all.len() as u64).collect::<Vec<_>>());
                prop_assert!(all.len() as u64 == portions || close.is_some());
            }
        }
    }
}
