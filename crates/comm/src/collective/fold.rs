//! Worlds that are no power of two, for algorithms that need one: the extra ranks fold into neighbours.
//!
//! With q the largest power of two up to p, the first 2(p−q) ranks form pairs. The even one gives its buffer to the odd
//! one before, and gets the result after. That costs two more steps and S bytes more each way for the ranks of pairs.

use crate::transfer::List;

/// A rank's place in the folded world.
pub(super) struct Fold {
    /// Ranks that take part after folding: a power of two.
    pub(super) size: usize,
    extra: usize,
    rank: usize,
}

impl Fold {
    pub(super) fn new(rank: usize, world: usize) -> Self {
        let size = 1 << world.ilog2();
        Self { size, extra: world - size, rank }
    }

    /// The number among those that take part; none for a rank that has given its buffer away.
    pub(super) fn place(&self) -> Option<usize> {
        if self.rank >= 2 * self.extra {
            Some(self.rank - self.extra)
        } else {
            (self.rank % 2 == 1).then_some(self.rank / 2)
        }
    }

    /// The rank at a place.
    pub(super) fn rank_of(&self, place: usize) -> usize {
        if place < self.extra { 2 * place + 1 } else { place + self.extra }
    }

    /// One step if anyone folds.
    pub(super) fn before(&self, list: &mut List, length: usize) {
        if self.extra == 0 {
            return;
        }
        if self.rank < 2 * self.extra {
            if self.rank.is_multiple_of(2) {
                list.send(self.rank + 1, 0..length);
            } else {
                list.reduce(self.rank - 1, 0..length);
            }
        }
        list.next_step();
    }

    /// One step if anyone folded, at the step where the others are done.
    pub(super) fn after(&self, list: &mut List, length: usize, step: u32) {
        list.at_step(step);
        if self.rank < 2 * self.extra {
            if self.rank.is_multiple_of(2) {
                list.receive(self.rank + 1, 0..length);
            } else {
                list.send(self.rank - 1, 0..length);
            }
        }
    }

    /// Steps that folding takes on each side.
    pub(super) fn steps(&self) -> u32 {
        u32::from(self.extra > 0)
    }
}
