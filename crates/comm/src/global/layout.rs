//! Where the elements of a global array are: a pure function of its shape and of how many ranks there are.
//!
//! Elements are numbered row by row, the last axis fastest. A rank has a block of whole rows (of the first axis) next to
//! each other; blocks differ by at most one row, and the first ones are the larger. Of an array with one axis a row is an element.

use std::ops::Range;

use crate::rank::Rank;
use crate::transfer::chunk;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    shape: Vec<usize>,
    /// Elements of a row.
    row: usize,
    world: usize,
}

impl Layout {
    /// An array of this shape on so many ranks.
    ///
    /// # Panics
    /// When the shape has no axis, or more elements than can be counted: a bug.
    pub fn new(shape: &[usize], world: usize) -> Self {
        let (rows, others) = shape.split_first().expect("an array has an axis");
        let row = others.iter().try_fold(1usize, |product, &axis| product.checked_mul(axis));
        let row = row.filter(|row| row.checked_mul(*rows).is_some()).expect("the elements can be counted");
        Self { shape: shape.to_vec(), row, world }
    }

    /// How long each axis is.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How many elements there are.
    pub fn length(&self) -> usize {
        self.shape[0] * self.row
    }

    /// The rows of a rank.
    pub fn rows_of(&self, rank: Rank) -> Range<usize> {
        chunk(self.shape[0], self.world, rank.index())
    }

    /// The elements of a rank.
    pub fn block(&self, rank: Rank) -> Range<usize> {
        self.elements(self.rows_of(rank))
    }

    /// The elements of these rows.
    ///
    /// # Panics
    /// When there are no such rows.
    pub fn elements(&self, rows: Range<usize>) -> Range<usize> {
        assert!(rows.start <= rows.end && rows.end <= self.shape[0], "rows {rows:?} of {:?}", self.shape);
        rows.start * self.row..rows.end * self.row
    }

    /// The number of the element at this place.
    ///
    /// # Panics
    /// When there is no such element.
    pub fn index(&self, place: &[usize]) -> usize {
        let inside = place.len() == self.shape.len() && place.iter().zip(&self.shape).all(|(at, axis)| at < axis);
        assert!(inside, "{place:?} is not in an array of {:?}", self.shape);
        place.iter().zip(&self.shape).fold(0, |index, (at, axis)| index * axis + at)
    }

    /// The elements of a tile of an array with two axes, row by row.
    ///
    /// # Panics
    /// When there is no such tile.
    pub fn tile(&self, rows: Range<usize>, columns: Range<usize>) -> Vec<Range<usize>> {
        let &[height, width] = self.shape.as_slice() else {
            panic!("{:?} has no tiles, for want of two axes", self.shape)
        };
        let inside =
            rows.start <= rows.end && rows.end <= height && columns.start <= columns.end && columns.end <= width;
        assert!(inside, "rows {rows:?} and columns {columns:?} of {:?}", self.shape);
        if columns.len() == width {
            return vec![self.elements(rows)];
        }
        rows.map(|row| row * width + columns.start..row * width + columns.end).collect()
    }

    /// The rank that has an element.
    ///
    /// # Panics
    /// When there is no such element.
    pub fn affinity(&self, index: usize) -> Rank {
        assert!(index < self.length(), "element {index} of {}", self.length());
        let (row, rows) = (index / self.row, self.shape[0]);
        let (each, longer) = (rows / self.world, rows % self.world);
        let of_longer = longer * (each + 1);
        Rank::at(if row < of_longer { row / (each + 1) } else { longer + (row - of_longer) / each })
    }

    /// A range in spans that one rank each has, of at most so many elements.
    ///
    /// # Panics
    /// When the range is outside the array.
    pub fn spans(&self, range: Range<usize>, most: usize) -> impl Iterator<Item = (Rank, Range<usize>)> {
        assert!(range.start <= range.end && range.end <= self.length(), "elements {range:?} of {}", self.length());
        let mut start = range.start;
        std::iter::from_fn(move || {
            (start < range.end).then(|| {
                let rank = self.affinity(start);
                let span = start..range.end.min(self.block(rank).end).min(start + most);
                start = span.end;
                (rank, span)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_element_is_in_the_block_of_its_rank(
            shape in prop::collection::vec(0usize..9, 1..4), world in 1usize..6, most in 1usize..20,
        ) {
            let layout = Layout::new(&shape, world);
            let blocks: Vec<_> = (0..world).map(|rank| layout.block(Rank::at(rank))).collect();
            prop_assert_eq!((blocks[0].start, blocks[world - 1].end), (0, layout.length()));
            for index in 0..layout.length() {
                prop_assert!(blocks[layout.affinity(index).index()].contains(&index));
            }
            let mut next = 0;
            for (rank, span) in layout.spans(0..layout.length(), most) {
                prop_assert!(span.start == next && !span.is_empty() && span.len() <= most);
                let block = &blocks[rank.index()];
                prop_assert!(block.start <= span.start && span.end <= block.end);
                next = span.end;
            }
            prop_assert_eq!(next, layout.length());
        }
    }

    #[test]
    fn what_is_outside_is_a_bug_and_says_so() {
        let layout = Layout::new(&[4, 5], 3);
        type Ask = fn(&Layout) -> usize;
        let asked: [(Ask, &str); 6] = [
            (|layout| layout.affinity(20).index(), "element 20 of 20"),
            (|layout| layout.spans(19..21, 9).count(), "elements 19..21 of 20"),
            (|layout| layout.elements(3..5).len(), "rows 3..5 of [4, 5]"),
            (|layout| layout.index(&[3, 5]), "[3, 5] is not in an array of [4, 5]"),
            (|layout| layout.tile(0..1, 4..6).len(), "rows 0..1 and columns 4..6 of [4, 5]"),
            (|_| Layout::new(&[usize::MAX, 2], 3).length(), "the elements can be counted"),
        ];
        for (ask, words) in asked {
            let said = paceline_system::threads::caught(|| ask(&layout)).unwrap_err();
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn elements_are_numbered_row_by_row() {
        let layout = Layout::new(&[4, 5, 2], 3);
        assert_eq!((layout.index(&[0, 0, 1]), layout.index(&[2, 3, 1])), (1, 27));
        assert_eq!((layout.rows_of(Rank(0)), layout.block(Rank(1))), (0..2, 20..30));
        let flat = Layout::new(&[4, 5], 3);
        assert_eq!(flat.tile(1..3, 2..4), [7..9, 12..14]);
        assert_eq!(flat.tile(1..3, 0..5), std::slice::from_ref(&(5..15)));
    }
}
