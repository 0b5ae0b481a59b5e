//! A subset of the ranks: a part of the file of their own, laid out as the world's is, with its own words,
//! rings and slots.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::{CONTEXTS_MAX, GROUPS};
use super::{Arena, Port};
use crate::error::CommError;
use crate::rank::Rank;

impl Port {
    /// The number of a part of the file that no group has had.
    pub(crate) fn new_context(&self) -> u64 {
        self.root.word64(GROUPS).fetch_add(1, Ordering::Relaxed) + 1
    }

    /// This rank's end in a group of these ranks, of which it is one, in a part of the file that they have
    /// agreed on.
    pub(crate) fn group(&self, members: &[Rank], context: u64) -> Result<Self, CommError> {
        let rank = self.rank();
        if !(1..CONTEXTS_MAX).contains(&context) {
            let source = std::io::Error::other(format!("there can be {} groups in all", CONTEXTS_MAX - 1));
            return Err(CommError::System { rank, what: "make another group", source });
        }
        let place = members.iter().position(|&member| member == rank).expect("this rank is a member");
        let processes = members.iter().map(|member| self.control.processes[member.index()].clone()).collect();
        let arena = Arena::new(Arc::clone(&self.arena.file), Rank::at(place), context);
        Self::open((arena, Some(Arc::clone(&self.root))), place, processes, self.control.spins)
    }
}
