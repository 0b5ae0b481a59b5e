//! Shared buffers that ranks work on by stages, each at its own pace: a rank says how far it is with a buffer, and looks how far
//! the others are. No stage is a message, nobody has to answer, and nothing runs beside the ranks' own work.
//!
//! A round: all ranks fill their numbers and say so. Once all have, what there is to do with them is cut into pieces, and whoever has
//! time takes the next one and says when it is done. Once all are done, ranks may fill their numbers again.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::{Mapped, Port};
use crate::error::{CommError, Party};
use crate::rank::Rank;
use crate::wait::Wait;
use crate::wire::stream::Talk;

const PHASE: &str = "share";

impl Port {
    /// Says that this rank has come to a stage with a buffer: what it has written there can be read.
    pub(crate) fn come_to(&self, buffer: &mut Mapped, stage: u64) {
        buffer.stage(self.rank).store(stage, Ordering::Release);
        self.wake_peers();
    }

    fn wake_peers(&self) {
        self.peers().for_each(|peer| self.wake(peer));
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.world).filter(move |&peer| peer != own)
    }

    /// The stage of the peer that is furthest behind with a buffer.
    fn slowest(&self, buffer: &Mapped) -> (u64, usize) {
        let stages = self.peers().map(|peer| (buffer.stage(peer).load(Ordering::Acquire), peer));
        stages.min().unwrap_or((u64::MAX, self.rank))
    }

    /// The stage of the peer that is furthest ahead.
    pub(crate) fn furthest(&self, buffer: &Mapped) -> u64 {
        self.peers().map(|peer| buffer.stage(peer).load(Ordering::Acquire)).max().unwrap_or(0)
    }

    /// Whether all peers have come to a stage.
    pub(crate) fn are_at(&self, buffer: &Mapped, stage: u64) -> bool {
        self.slowest(buffer).0 >= stage
    }

    /// Takes the next piece of work if its number is below `end`. Each number is given to one rank.
    pub(crate) fn take(&self, buffer: &mut Mapped, end: u64) -> Option<u64> {
        let next = |taken: u64| (taken < end).then_some(taken + 1);
        buffer.taken().fetch_update(Ordering::AcqRel, Ordering::Acquire, next).ok()
    }

    /// Says that a piece is done: what was written for it can be read.
    pub(crate) fn finish(&self, buffer: &mut Mapped) {
        buffer.done().fetch_add(1, Ordering::AcqRel);
        self.wake_peers();
    }

    /// How many pieces are done.
    pub(crate) fn finished(&self, buffer: &Mapped) -> u64 {
        buffer.done().load(Ordering::Acquire)
    }

    /// Waits until all peers have come to a stage, if they had not, or so many pieces are done; comes back earlier when anything else
    /// has happened.
    pub(crate) fn watch(&mut self, buffer: &Mapped, (stage, done): (u64, u64), wait: &Wait) -> Result<(), CommError> {
        let were_there = self.are_at(buffer, stage);
        let ready = |port: &Self| port.finished(buffer) >= done || (!were_there && port.are_at(buffer, stage));
        for _ in 0..self.spins {
            if ready(self) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        // Who has taken a piece is not written down.
        let late = if were_there { Party::Anyone } else { Rank::at(self.slowest(buffer).1).into() };
        let talk = |peer| Talk { rank: self.rank(), peer, phase: PHASE };
        talk(late).check(wait)?;
        let gone = |port: &Self| port.peers().find_map(|peer| Some((peer, port.gone(Rank::at(peer))?)));
        self.sleep_unless(|port| ready(port) || gone(port).is_some(), wait.slice());
        match gone(self) {
            Some((peer, reason)) if !ready(self) => {
                Err(Talk { rank: self.rank(), peer: Rank::at(peer).into(), phase: PHASE }.gone(reason))
            }
            _ => Ok(()),
        }
    }

    /// Writes the sum of a range of all ranks' numbers, which they have written when they came to a stage with a board.
    pub(crate) fn sum_into(&self, buffer: &Mapped, range: Range<usize>, board: (&Mapped, u64), sums: &mut [f32]) {
        buffer.sum_into(self.world, range, board, sums);
    }
}
