//! Whom a process waits for at the moment: one word that waiting threads write and anybody may read.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::rank::Rank;

/// The other side of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Awaited {
    /// A rank, by its number in the world.
    Rank(Rank),
    /// All ranks together, of which it is not known who is missing.
    All,
    /// Whoever comes next: nobody is late.
    Anyone,
}

/// The word. What stands there may be a moment old: it is for people who ask why nothing goes on.
#[derive(Debug, Default)]
pub(crate) struct Word(AtomicU64);

const NOBODY: u64 = 0;
const ALL: u64 = 1;
const ANYONE: u64 = 2;
const RANK: u64 = 3;

impl Word {
    pub fn set(&self, awaited: Awaited) {
        let word = match awaited {
            Awaited::All => ALL,
            Awaited::Anyone => ANYONE,
            Awaited::Rank(rank) => RANK + u64::from(rank.0),
        };
        self.0.store(word, Ordering::Relaxed);
    }

    /// Costs a look where nobody waited, which is the usual case.
    pub fn clear(&self) {
        if self.0.load(Ordering::Relaxed) != NOBODY {
            self.0.store(NOBODY, Ordering::Relaxed);
        }
    }

    pub fn get(&self) -> Option<Awaited> {
        match self.0.load(Ordering::Relaxed) {
            NOBODY => None,
            ALL => Some(Awaited::All),
            ANYONE => Some(Awaited::Anyone),
            word => u32::try_from(word - RANK).ok().map(|rank| Awaited::Rank(Rank(rank))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_says_what_was_written() {
        let word = Word::default();
        assert_eq!(word.get(), None);
        for awaited in [Awaited::All, Awaited::Anyone, Awaited::Rank(Rank(0)), Awaited::Rank(Rank(u32::MAX))] {
            word.set(awaited);
            assert_eq!(word.get(), Some(awaited));
        }
        word.clear();
        assert_eq!(word.get(), None);
    }
}
