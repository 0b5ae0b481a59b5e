//! The menu of faults.

use super::Instant;
use crate::rank::Rank;

/// Something that goes wrong. Times are virtual seconds.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// Bytes of one direction of a link take longer to arrive.
    Delay {
        /// The rank that sends.
        from: Rank,
        /// The rank that receives.
        to: Rank,
        /// By how much.
        seconds: f64,
    },
    /// One direction of a link has this fraction of its bandwidth.
    Narrow {
        /// The rank that sends.
        from: Rank,
        /// The rank that receives.
        to: Rank,
        /// Of the bandwidth.
        fraction: f64,
    },
    /// Packets of one direction of a link are lost and sent again.
    Loss {
        /// The rank that sends.
        from: Rank,
        /// The rank that receives.
        to: Rank,
        /// Of a packet.
        probability: f32,
    },
    /// Nothing passes between two ranks any more; neither is told.
    Cut {
        /// One end.
        between: Rank,
        /// The other.
        and: Rank,
        /// From when on.
        at_s: f64,
    },
    /// Nothing passes between these ranks and the rest any more; nobody is told.
    Partition {
        /// One side.
        ranks: Vec<Rank>,
        /// From when on.
        at_s: f64,
    },
    /// A rank's process ends; its peers' connections break.
    Crash {
        /// The rank that ends.
        rank: Rank,
        /// When it ends.
        at_s: f64,
    },
    /// Everything a rank sends takes so many times as long.
    SlowRank {
        /// The rank that sends slowly.
        rank: Rank,
        /// How many times.
        factor: f64,
    },
}

fn since(at_s: f64, now: Instant) -> bool {
    now as f64 >= at_s * 1e9
}

impl Fault {
    pub(super) fn crashes(&self, whom: u32, now: Instant) -> bool {
        matches!(self, Self::Crash { rank, at_s } if rank.0 == whom && since(*at_s, now))
    }

    pub(super) fn cuts(&self, source: u32, target: u32, now: Instant) -> bool {
        match self {
            Self::Cut { between, and, at_s } => {
                let ends = [(between.0, and.0), (and.0, between.0)];
                ends.contains(&(source, target)) && since(*at_s, now)
            }
            Self::Partition { ranks, at_s } => {
                ranks.contains(&Rank(source)) != ranks.contains(&Rank(target)) && since(*at_s, now)
            }
            _ => false,
        }
    }

    pub(super) fn slowness(&self, source: u32, target: u32) -> f64 {
        match self {
            Self::SlowRank { rank, factor } if rank.0 == source => *factor,
            Self::Narrow { from, to, fraction } if (from.0, to.0) == (source, target) => 1.0 / fraction,
            _ => 1.0,
        }
    }

    pub(super) fn delay_ns(&self, source: u32, target: u32) -> Instant {
        match self {
            Self::Delay { from, to, seconds } if (from.0, to.0) == (source, target) => (seconds * 1e9) as Instant,
            _ => 0,
        }
    }

    pub(super) fn loss(&self, source: u32, target: u32) -> f32 {
        match self {
            Self::Loss { from, to, probability } if (from.0, to.0) == (source, target) => *probability,
            _ => 0.0,
        }
    }
}
