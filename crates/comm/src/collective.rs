//! Collectives as lists of transfers: what each rank sends, receives and adds, known before the first byte moves.
//!
//! Every function here is pure. In costs, p is the number of ranks, S the bytes of the whole buffer, α the latency of a
//! message and β the seconds per byte; all logarithms are to the base 2.
//! What the buffers mean: `all_reduce` leaves the sum of all buffers in each. `reduce_scatter` leaves the sum of chunk r
//! ([`crate::transfer::chunk`]) with rank r, the rest is spoilt. `all_gather` spreads chunk r of rank r. `broadcast`
//! spreads the root's buffer. `all_to_all` exchanges, in place, chunk j of rank i with chunk i of rank j. `barrier` moves
//! one meaningless byte: no rank leaves before all have come.

use std::fmt;

use crate::rank::Rank;
use crate::transfer::Transfer;

pub mod direct;
pub mod double_tree;
pub mod halving_doubling;
pub mod hierarchical;
pub mod recursive_doubling;
pub mod ring;

mod fold;
#[cfg(test)]
mod tests;

/// What all ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// The sum of all buffers, for all.
    AllReduce,
    /// The sum of chunk r, for rank r.
    ReduceScatter,
    /// Chunk r of rank r, for all.
    AllGather,
    /// The root's buffer, for all.
    Broadcast {
        /// The rank whose buffer it is.
        root: Rank,
    },
    /// Nothing, but all at once.
    Barrier,
    /// Chunk j of rank i against chunk i of rank j.
    AllToAll,
}

/// How they do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// Neighbours pass chunks around: least bytes, most steps.
    Ring,
    /// Partners exchange halves of halves: least bytes and few steps.
    HalvingDoubling,
    /// Partners exchange everything: fewest steps, most bytes.
    RecursiveDoubling,
    /// Two binary trees, each for half of the buffer: few steps, twice the bytes, pipelined.
    DoubleTree,
    /// Inside nodes first, then between them.
    Hierarchical,
    /// Everyone with everyone: two steps.
    Direct,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Ring,
        Self::HalvingDoubling,
        Self::RecursiveDoubling,
        Self::DoubleTree,
        Self::Hierarchical,
        Self::Direct,
    ];

    /// Whether it can do this collective in a world of this size.
    pub const fn supports(self, collective: Collective, world: usize) -> bool {
        match (self, collective) {
            (_, Collective::AllReduce) | (Self::Direct, _) => true,
            (Self::Ring, Collective::Barrier | Collective::AllToAll) => false,
            (Self::Ring, _) => true,
            (Self::HalvingDoubling, Collective::ReduceScatter | Collective::AllGather) => world.is_power_of_two(),
            (Self::RecursiveDoubling, Collective::Broadcast { .. } | Collective::Barrier) => true,
            _ => false,
        }
    }

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::HalvingDoubling => "halving-doubling",
            Self::RecursiveDoubling => "recursive-doubling",
            Self::DoubleTree => "double-tree",
            Self::Hierarchical => "hierarchical",
            Self::Direct => "direct",
        }
    }

    /// The algorithm of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Collective {
    /// One of each kind; the broadcast from rank 0.
    pub const ALL: [Self; 6] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast { root: Rank(0) },
        Self::Barrier,
        Self::AllToAll,
    ];

    /// The name of the phase in errors and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast { .. } => "broadcast",
            Self::Barrier => "barrier",
            Self::AllToAll => "all_to_all",
        }
    }
}

impl Collective {
    /// A number that tells it from the others in a message's header.
    pub(crate) const fn code(self) -> u16 {
        match self {
            Self::AllReduce => 0,
            Self::ReduceScatter => 1,
            Self::AllGather => 2,
            Self::Broadcast { .. } => 3,
            Self::Barrier => 4,
            Self::AllToAll => 5,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which ranks share a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    node_of: Vec<u32>,
}

impl Nodes {
    /// All ranks on one node.
    pub fn one(world: usize) -> Self {
        Self { node_of: vec![0; world] }
    }

    /// Node numbers by rank.
    pub const fn new(node_of: Vec<u32>) -> Self {
        Self { node_of }
    }

    /// How many ranks there are.
    pub const fn world(&self) -> usize {
        self.node_of.len()
    }

    /// The nodes of some of the ranks, which are numbered anew in this order.
    #[must_use]
    pub fn restricted_to(&self, members: &[Rank]) -> Self {
        Self { node_of: members.iter().map(|rank| self.node_of[rank.index()]).collect() }
    }

    /// The ranks of each node, nodes in the order of their first rank.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<(u32, Vec<usize>)> = Vec::new();
        for (rank, &node) in self.node_of.iter().enumerate() {
            match groups.iter_mut().find(|(found, _)| *found == node) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((node, vec![rank])),
            }
        }
        groups.into_iter().map(|(_, ranks)| ranks).collect()
    }
}

/// The list of one rank.
///
/// # Panics
/// When the algorithm does not support the collective in this world, the rank is outside it, or an all-to-all's length
/// is not a multiple of the world's size: bugs of the caller.
pub fn transfers(
    collective: Collective,
    algorithm: Algorithm,
    rank: Rank,
    nodes: &Nodes,
    length: usize,
) -> Vec<Transfer> {
    let world = nodes.world();
    assert!(rank.index() < world, "{rank} is outside a world of {world}");
    assert!(algorithm.supports(collective, world), "{algorithm} does no {collective} for {world} ranks");
    if world == 1 {
        return Vec::new();
    }
    match (collective, algorithm) {
        (Collective::AllReduce, Algorithm::Ring) => ring::all_reduce(rank, world, length),
        (Collective::AllReduce, Algorithm::HalvingDoubling) => halving_doubling::all_reduce(rank, world, length),
        (Collective::AllReduce, Algorithm::RecursiveDoubling) => recursive_doubling::all_reduce(rank, world, length),
        (Collective::AllReduce, Algorithm::DoubleTree) => double_tree::all_reduce(rank, world, length),
        (Collective::AllReduce, Algorithm::Hierarchical) => hierarchical::all_reduce(rank, nodes, length),
        (Collective::AllReduce, _) => direct::all_reduce(rank, world, length),
        (Collective::ReduceScatter, Algorithm::Ring) => ring::reduce_scatter(rank, world, length),
        (Collective::ReduceScatter, Algorithm::HalvingDoubling) => {
            halving_doubling::reduce_scatter(rank, world, length)
        }
        (Collective::ReduceScatter, _) => direct::reduce_scatter(rank, world, length),
        (Collective::AllGather, Algorithm::Ring) => ring::all_gather(rank, world, length),
        (Collective::AllGather, Algorithm::HalvingDoubling) => halving_doubling::all_gather(rank, world, length),
        (Collective::AllGather, _) => direct::all_gather(rank, world, length),
        (Collective::Broadcast { root }, Algorithm::Ring) => ring::broadcast(rank, world, length, root),
        (Collective::Broadcast { root }, Algorithm::RecursiveDoubling) => {
            recursive_doubling::broadcast(rank, world, length, root)
        }
        (Collective::Broadcast { root }, _) => direct::broadcast(rank, world, length, root),
        (Collective::Barrier, Algorithm::RecursiveDoubling) => recursive_doubling::barrier(rank, world),
        (Collective::Barrier, _) => direct::barrier(rank, world),
        (Collective::AllToAll, _) => direct::all_to_all(rank, world, length),
    }
}
