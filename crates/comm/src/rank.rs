//! Who is who: the number of a process in its world, and which incarnation of that world it belongs to.

use std::fmt;

/// The number of a process among those that train together, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank at a position of a table.
    ///
    /// # Panics
    /// Beyond four thousand million ranks.
    pub fn at(index: usize) -> Self {
        Self(u32::try_from(index).expect("a rank fits 32 bits"))
    }

    /// Its position in a table of ranks.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// Which incarnation of a world: it grows with every restart, so that a straggler of the last one is not let in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation {}", self.0)
    }
}
