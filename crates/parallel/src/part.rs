//! A part's links to the other parts of its worker, with which it computes layers: sums and pieces that the graph of a part asks for in the
//! middle of a pass (`tensor/src/part.rs`). They are waited for, so nothing else travels over these links, and all parts ask for the same
//! ones in the same order.
//!
//! Of n numbers and p parts, a sum takes 2(p−1)/p·n numbers out and in where all-reduces are rings or halvings. To gather pieces, every part
//! sends its own to each of the others in one step, and receives theirs.

use paceline_comm::{Action, CommError, Communicator, Rank, Transfer};

use crate::mesh::{Axis, Mesh};
use crate::siblings::Siblings;

/// A part's end of its links.
#[derive(Debug)]
pub struct PartLinks {
    siblings: Siblings,
    /// Pieces gathered so far.
    gathered: u64,
    /// The transfers of one, kept so that a step takes no memory.
    list: Vec<Transfer>,
}

impl PartLinks {
    /// Connections that two parts need beside the one that all ranks have, where each group takes one.
    pub const GROUPS: u16 = 1;

    /// Connects a rank with the other parts of its worker; all of them call this at the same point.
    ///
    /// # Errors
    /// When another part, or the way to it, has failed. So for all calls below.
    ///
    /// # Panics
    /// When the rank computes nothing: a bug.
    pub fn connect(world: &mut Communicator, mesh: &Mesh) -> Result<Self, CommError> {
        let ranks = mesh.group(Axis::Part, world.rank());
        let list = Vec::with_capacity(2 * ranks.len());
        Ok(Self { siblings: Siblings::connect(world, &ranks)?, gathered: 0, list })
    }

    /// What goes between all parts beside layers.
    pub const fn siblings(&mut self) -> &mut Siblings {
        &mut self.siblings
    }

    /// Replaces numbers by their sum over the parts, the same bits on all.
    ///
    /// # Errors
    /// As above.
    pub fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        if numbers.is_empty() { Ok(()) } else { self.siblings.communicator().all_reduce(numbers) }
    }

    /// Fills in the pieces of all other parts, one behind the other, of which each part has its own; a piece may be empty.
    ///
    /// # Errors
    /// As above.
    ///
    /// # Panics
    /// When there are not as many pieces as parts: a bug.
    pub fn gather(&mut self, numbers: &mut [f32], lengths: &[usize]) -> Result<(), CommError> {
        let (own, count) = (self.siblings.number(), self.siblings.count());
        assert_eq!(lengths.len(), count, "every part has a piece");
        self.list.clear();
        let mut start = 0;
        for (owner, &length) in lengths.iter().enumerate().filter(|(_, length)| **length > 0) {
            let of = |action, peer| Transfer { step: 0, action, peer: Rank::at(peer), start, length };
            match owner == own {
                true => self.list.extend((0..count).filter(|&peer| peer != own).map(|peer| of(Action::Send, peer))),
                false => self.list.push(of(Action::Receive, owner)),
            }
            start += length;
        }
        self.gathered += 1;
        self.siblings.communicator().exchange(&self.list, self.gathered, numbers)
    }
}
