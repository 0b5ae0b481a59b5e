//! Which elements of a tensor a part has.

use std::ops::Range;

/// The elements of a whole tensor that a part has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// All of them.
    Whole,
    /// Seen as `[outer, length, inner]`: those of a range in the middle.
    Slice {
        /// Product of the dims before.
        outer: usize,
        /// What is divided.
        length: usize,
        /// This part's share of it.
        range: Range<usize>,
        /// Product of the dims after.
        inner: usize,
    },
    /// None.
    Absent,
}

/// Which tensor of the whole graph a part's parameter or state is, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartTensor {
    /// Its number there.
    pub whole: usize,
    /// What the part has of it; never [`Piece::Absent`].
    pub piece: Piece,
}

impl Piece {
    /// How many elements they are, of a tensor that has so many.
    pub fn elements(&self, whole: usize) -> usize {
        match self {
            Self::Whole => whole,
            Self::Slice { outer, range, inner, .. } => outer * range.len() * inner,
            Self::Absent => 0,
        }
    }

    /// Copies them out of a whole tensor.
    ///
    /// # Panics
    /// When one of the two has another length.
    pub fn take(&self, whole: &[f32], own: &mut [f32]) {
        assert_eq!(own.len(), self.elements(whole.len()), "what a part has of a tensor");
        self.runs(whole.len(), |at, source| own[at].copy_from_slice(&whole[source]));
    }

    /// Copies them to where they belong in a whole tensor, and leaves its other elements alone.
    ///
    /// # Panics
    /// As [`Piece::take`].
    pub fn put(&self, own: &[f32], whole: &mut [f32]) {
        assert_eq!(own.len(), self.elements(whole.len()), "what a part has of a tensor");
        self.runs(whole.len(), |at, target| whole[target].copy_from_slice(&own[at]));
    }

    /// Calls `run` with every range of elements that follow each other: here, and in the whole tensor.
    fn runs(&self, whole: usize, mut run: impl FnMut(Range<usize>, Range<usize>)) {
        match self {
            Self::Whole => run(0..whole, 0..whole),
            Self::Slice { outer, length, range, inner } => {
                assert_eq!(whole, outer * length * inner, "a slice of another tensor");
                let own = range.len() * inner;
                for index in 0..*outer {
                    let start = (index * length + range.start) * inner;
                    run(index * own..(index + 1) * own, start..start + own);
                }
            }
            Self::Absent => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_all_parts_make_the_whole() {
        let whole: Vec<f32> = (0..2 * 5 * 3).map(|x| x as f32).collect();
        let mut again = vec![0.0; whole.len()];
        for range in [0..2, 2..3, 3..5] {
            let piece = Piece::Slice { outer: 2, length: 5, range: range.clone(), inner: 3 };
            let mut own = vec![0.0; piece.elements(whole.len())];
            piece.take(&whole, &mut own);
            assert_eq!(own[0], (range.start * 3) as f32);
            piece.put(&own, &mut again);
        }
        assert_eq!(again, whole);
        Piece::Absent.put(&[], &mut again);
        Piece::Whole.take(&whole, &mut again);
        assert_eq!(again, whole);
    }
}
