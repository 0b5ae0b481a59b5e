//! Whose part of the optimizer's state is where, when every rank keeps only what it steps with.
//!
//! A bucket travels in pieces ([`crate::schedule`]). After a reduce-scatter each rank has the sums of its chunk
//! of every piece, so those chunks are what it steps, and their state is all that it keeps: one after the
//! other, without gaps, in the order of the parameters. An [`Ownership`] maps elements of all parameters to
//! their place in such a buffer. Training alone, or with the whole state on every rank, is the map that changes
//! nothing.

use std::ops::Range;

use paceline_comm::transfer::chunk;

use crate::schedule::pieces;

/// Which elements of all parameters a rank steps, and where their state stands in its buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// In the order of the parameters; none is empty.
    chunks: Vec<Chunk>,
    length: usize,
    is_whole: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Chunk {
    /// Among all parameters.
    elements: Range<usize>,
    /// Where the state of the first stands.
    start: usize,
}

/// Elements of all parameters, and where their state stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    /// Among all parameters.
    pub elements: Range<usize>,
    /// In a buffer of the state.
    pub place: Range<usize>,
}

impl Ownership {
    /// Everything, where it is.
    pub fn whole(length: usize) -> Self {
        let all = Chunk { elements: 0..length, start: 0 };
        Self { chunks: vec![all], length, is_whole: true }
    }

    /// The chunks of one rank of so many, of buckets that are given as ranges of all parameters.
    ///
    /// # Panics
    /// When the rank is outside of the world.
    pub fn of(buckets: impl IntoIterator<Item = Range<usize>>, rank: usize, world: usize) -> Self {
        assert!(rank < world, "rank {rank} is outside a world of {world}");
        let of_bucket = |bucket: Range<usize>| {
            own_ranges(bucket.len(), rank, world).map(move |own| bucket.start + own.start..bucket.start + own.end)
        };
        let mut owned: Vec<Range<usize>> = buckets.into_iter().flat_map(of_bucket).collect();
        owned.sort_by_key(|elements| elements.start);
        let mut length = 0;
        let chunks = owned.into_iter().map(|elements| {
            let start = length;
            length += elements.len();
            Chunk { elements, start }
        });
        Self { chunks: chunks.collect(), length, is_whole: false }
    }

    /// Whether all of the state is here.
    pub const fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Elements of each buffer of the state.
    pub const fn length(&self) -> usize {
        self.length
    }

    /// Where the state of some elements stands.
    ///
    /// # Panics
    /// When they do not lie in one chunk of this rank's.
    pub fn place(&self, elements: Range<usize>) -> Range<usize> {
        let behind = self.chunks.partition_point(|chunk| chunk.elements.start <= elements.start);
        let chunk = self.chunks[..behind].last().filter(|chunk| elements.end <= chunk.elements.end);
        let chunk = chunk.expect("a rank steps what it has the state of");
        let start = chunk.start + elements.start - chunk.elements.start;
        start..start + elements.len()
    }

    /// What this rank has of some elements, in order.
    pub fn within(&self, elements: Range<usize>) -> impl Iterator<Item = Owned> {
        let first = self.chunks.partition_point(|chunk| chunk.elements.end <= elements.start);
        let near = self.chunks[first..].iter().take_while(move |chunk| chunk.elements.start < elements.end);
        near.map(move |chunk| {
            let held = chunk.elements.start.max(elements.start)..chunk.elements.end.min(elements.end);
            let start = chunk.start + held.start - chunk.elements.start;
            Owned { place: start..start + held.len(), elements: held }
        })
    }
}

/// A rank's chunks of a bucket of so many elements, those that are not empty.
pub(crate) fn own_ranges(elements: usize, rank: usize, world: usize) -> impl Iterator<Item = Range<usize>> {
    let own = move |piece: Range<usize>| {
        let own = chunk(piece.len(), world, rank);
        piece.start + own.start..piece.start + own.end
    };
    pieces(elements).map(own).filter(|own| !own.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::PIECE_ELEMENTS;

    /// Buckets of these lengths, with gaps between them, in any order.
    fn buckets(lengths: &[usize], reversed: bool) -> Vec<Range<usize>> {
        let mut start = 0;
        let mut buckets: Vec<Range<usize>> = lengths
            .iter()
            .map(|length| {
                let bucket = start..start + length;
                start = bucket.end + 3;
                bucket
            })
            .collect();
        if reversed {
            buckets.reverse();
        }
        buckets
    }

    proptest! {
        #[test]
        fn every_element_has_one_owner_and_state_stands_without_gaps(
            lengths in prop::collection::vec(prop_oneof![0usize..7, 0usize..5000, PIECE_ELEMENTS - 2..2 * PIECE_ELEMENTS + 3], 1..5),
            world in 1usize..9,
            reversed: bool,
        ) {
            let buckets = buckets(&lengths, reversed);
            let ranks: Vec<Ownership> = (0..world).map(|rank| Ownership::of(buckets.clone(), rank, world)).collect();
            let total: usize = lengths.iter().sum();
            prop_assert_eq!(ranks.iter().map(Ownership::length).sum::<usize>(), total);
            for bucket in &buckets {
                let mut held: Vec<Range<usize>> =
                    ranks.iter().flat_map(|rank| rank.within(bucket.clone())).map(|owned| owned.elements).collect();
                held.sort_by_key(|elements| elements.start);
                let mut end = bucket.start;
                for elements in held {
                    prop_assert_eq!(elements.start, end);
                    end = elements.end;
                }
                prop_assert_eq!(end, bucket.end);
            }
            for rank in &ranks {
                let mut end = 0;
                for owned in rank.within(0..total + 3 * lengths.len()) {
                    prop_assert_eq!(&rank.place(owned.elements.clone()), &owned.place);
                    let inner = owned.elements.start + owned.elements.len() / 2..owned.elements.end;
                    prop_assert_eq!(rank.place(inner).end, owned.place.end);
                    prop_assert_eq!(owned.place.start, end);
                    end = owned.place.end;
                }
                prop_assert_eq!(end, rank.length());
                // A piece's chunks differ by one element at most.
                let pieces: usize = lengths.iter().map(|length| length.div_ceil(PIECE_ELEMENTS)).sum();
                prop_assert!(rank.length() <= total / world + pieces);
            }
        }
    }

    #[test]
    fn the_whole_state_is_where_the_parameters_are() {
        let whole = Ownership::whole(100);
        assert!(whole.is_whole() && whole.length() == 100 && whole.place(7..30) == (7..30));
        let owned: Vec<Owned> = whole.within(90..200).collect();
        assert_eq!(owned, [Owned { elements: 90..100, place: 90..100 }]);
    }

    #[test]
    fn a_rank_may_have_nothing_of_a_small_bucket() {
        let third = Ownership::of([0..2, 16..26], 2, 4);
        assert_eq!(third.within(0..2).count(), 0);
        assert_eq!(third.within(16..26).collect::<Vec<_>>(), [Owned { elements: 22..24, place: 0..2 }]);
    }

    #[test]
    #[should_panic(expected = "a rank steps what it has the state of")]
    fn the_state_of_another_rank_is_nowhere() {
        let _ = Ownership::of([0..10, 16..20], 0, 2).place(4..6);
    }
}
