//! The instruction of a collective: move a range of elements to or from one peer, at a step.
//!
//! A rank's part in a collective is a list of these, made by a pure function of (rank, world, length). What a list
//! promises, and what the tests of `collective` hold every algorithm to:
//! - steps never fall along the list, and the two ends of a transfer carry the same step and length;
//! - two ranks list what passes between them in the same order.
//!
//! Then a list cannot deadlock, however little the links buffer: of all unfinished transfers take one of the lowest
//! step; everything its two ends wait for is finished. An interpreter may therefore run ahead of the steps wherever the
//! ranges do not meet; `run.rs` does, byte by byte.

use std::fmt;
use std::ops::Range;

use crate::rank::Rank;

/// What happens to the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It goes to the peer as it is.
    Send,
    /// What the peer sends takes its place.
    Receive,
    /// What the peer sends is added to it.
    Reduce,
}

/// One end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// When: transfers of one step do not need each other's results.
    pub step: u32,
    /// Whether the elements are sent, received or added.
    pub action: Action,
    /// The rank at the other end.
    pub peer: Rank,
    /// The first element.
    pub start: usize,
    /// How many elements; never zero.
    pub length: usize,
}

impl Transfer {
    /// The elements concerned.
    pub const fn range(&self) -> Range<usize> {
        self.start..self.start + self.length
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, peer, .. } = self;
        let Range { start, end } = self.range();
        match self.action {
            Action::Send => write!(f, "step {step}: send {start}..{end} to {peer}"),
            Action::Receive => write!(f, "step {step}: receive {start}..{end} from {peer}"),
            Action::Reduce => write!(f, "step {step}: add {start}..{end} from {peer}"),
        }
    }
}

/// Part `index` of `length` elements cut into `parts` that differ by at most one; the first ones are the longer.
pub const fn chunk(length: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, longer) = (length / parts, length % parts);
    let start = index * each + if index < longer { index } else { longer };
    start..start + each + (index < longer) as usize
}

/// A list being written, step by step. Empty ranges are left out: both ends know.
#[derive(Debug, Default)]
pub(crate) struct List {
    transfers: Vec<Transfer>,
    step: u32,
}

impl List {
    pub(crate) fn push(&mut self, action: Action, peer: usize, range: Range<usize>) {
        if !range.is_empty() {
            let peer = Rank::at(peer);
            self.transfers.push(Transfer { step: self.step, action, peer, start: range.start, length: range.len() });
        }
    }

    pub(crate) fn send(&mut self, peer: usize, range: Range<usize>) {
        self.push(Action::Send, peer, range);
    }

    pub(crate) fn receive(&mut self, peer: usize, range: Range<usize>) {
        self.push(Action::Receive, peer, range);
    }

    pub(crate) fn reduce(&mut self, peer: usize, range: Range<usize>) {
        self.push(Action::Reduce, peer, range);
    }

    /// What follows belongs to the next step.
    pub(crate) fn next_step(&mut self) {
        self.step += 1;
    }

    /// What follows belongs to this step, which is not an earlier one.
    pub(crate) fn at_step(&mut self, step: u32) {
        assert!(step >= self.step, "steps never fall along a list");
        self.step = step;
    }

    pub(crate) fn finish(self) -> Vec<Transfer> {
        self.transfers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_and_differ_by_at_most_one() {
        for length in [0, 1, 7, 8, 9, 1000] {
            for parts in 1..20 {
                let chunks: Vec<_> = (0..parts).map(|index| chunk(length, parts, index)).collect();
                assert_eq!(chunks[0].start, 0);
                assert_eq!(chunks[parts - 1].end, length);
                assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].len() >= pair[1].len()));
                assert!(chunks[0].len() - chunks[parts - 1].len() <= 1);
            }
        }
    }

    #[test]
    fn a_transfer_reads_as_a_sentence() {
        let transfer = Transfer { step: 2, action: Action::Reduce, peer: Rank(3), start: 5, length: 4 };
        assert_eq!(transfer.to_string(), "step 2: add 5..9 from rank 3");
    }
}
