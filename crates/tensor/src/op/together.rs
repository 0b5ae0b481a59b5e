//! What the parts of a layer do together: sums and pieces that come from other parts. Conjugate under differentiation: the gradient of a
//! sum is the gradient itself, that of a fork a sum, that of a gather the own piece. Who the other parts are, nobody here knows
//! ([`crate::execute::Turn`]); alone, a part has numbers of its own only.

use std::ops::Range;

/// See the variants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Together {
    /// x → the sum of all parts' x.
    Sum,
    /// x, the same in all parts → x. What follows differs between the parts, so that each has a share of the gradient: it is their sum.
    Fork,
    /// A piece → all parts' pieces joined along a dim, and, where they do not lie one behind the other there, as they came.
    Gather(Gather),
}

/// How pieces are joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gather {
    /// Along which dim.
    pub dim: usize,
    /// What stands along it, in order.
    pub segments: Vec<Segment>,
    /// How many elements each part's piece has.
    pub lengths: Vec<usize>,
    /// The number of this part.
    pub own: usize,
}

/// Some of what stands along the dim of a gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Whose it is. A part may have several; they are one behind the other in its piece.
    pub part: usize,
    /// How much.
    pub length: usize,
}

impl Gather {
    /// How much stands along the dim of a part's piece.
    pub fn extent(&self, part: usize) -> usize {
        self.of(part).map(|(_, length)| length).sum()
    }

    /// How much stands along the dim of the result.
    pub fn total(&self) -> usize {
        self.segments.iter().map(|segment| segment.length).sum()
    }

    /// Where a part's segments begin in the result, and how long they are.
    pub fn of(&self, part: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut start = 0;
        let placed = self.segments.iter().map(move |segment| {
            start += segment.length;
            (segment.part, start - segment.length, segment.length)
        });
        placed.filter(move |placed| placed.0 == part).map(|(_, start, length)| (start, length))
    }

    /// Where a part's piece lies among the pieces one behind the other.
    pub fn range(&self, part: usize) -> Range<usize> {
        piece_range(&self.lengths, part)
    }

    /// Whether the pieces one behind the other, for so many indices of the dims before, are the result.
    pub(crate) fn is_in_order(&self, outer: usize) -> bool {
        (outer == 1 || self.lengths.len() == 1) && self.segments.is_sorted_by_key(|segment| segment.part)
    }
}

/// Where a piece lies among pieces of these lengths one behind the other.
pub fn piece_range(lengths: &[usize], part: usize) -> Range<usize> {
    let start: usize = lengths[..part].iter().sum();
    start..start + lengths[part]
}

/// Which elements of a larger tensor a tensor has: `length` of every `stride` elements, from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Within {
    /// Elements of the larger tensor.
    pub elements: usize,
    /// The first one.
    pub start: usize,
    /// How many follow each other.
    pub length: usize,
    /// From the first of them to the first of the next ones.
    pub stride: usize,
}
