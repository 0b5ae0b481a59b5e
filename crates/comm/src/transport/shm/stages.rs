//! Common buffers that ranks work on by stages, each at its own pace: a rank says how far it is with a buffer, and looks how far
//! the others are. No stage is a message, nobody has to answer, and nothing runs beside the ranks' own work.
//!
//! Every rank owns one chunk ([`chunk`]) of the buffer. In turn, for each round: all ranks fill their numbers; each owner adds up
//! its chunk of all of them and leaves something in its own numbers there; all read what the owners left. Three stages a round.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::{Mapped, Port};
use crate::error::CommError;
use crate::rank::Rank;
use crate::transfer::chunk;
use crate::wait::Wait;
use crate::wire::stream::Talk;

const PHASE: &str = "share";

impl Port {
    /// Says that this rank has come to a stage with a buffer: what it has written there can be read.
    pub(crate) fn come_to(&self, buffer: &mut Mapped, stage: u64) {
        buffer.stage(self.rank).store(stage, Ordering::Release);
        (0..self.world).filter(|&peer| peer != self.rank).for_each(|peer| self.wake(peer));
    }

    /// The stage of the peer that is furthest behind with a buffer.
    fn slowest(&self, buffer: &Mapped) -> (u64, usize) {
        let peers = (0..self.world).filter(|&peer| peer != self.rank);
        peers.map(|peer| (buffer.stage(peer).load(Ordering::Acquire), peer)).min().unwrap_or((u64::MAX, self.rank))
    }

    /// The stage of the peer that is furthest ahead.
    pub(crate) fn furthest(&self, buffer: &Mapped) -> u64 {
        let peers = (0..self.world).filter(|&peer| peer != self.rank);
        peers.map(|peer| buffer.stage(peer).load(Ordering::Acquire)).max().unwrap_or(0)
    }

    /// Whether all peers have come to a stage; with a `wait`, once they have.
    pub(crate) fn all_at(&mut self, buffer: &Mapped, stage: u64, wait: Option<&Wait>) -> Result<bool, CommError> {
        let mut spins = 0;
        loop {
            let (slowest, peer) = self.slowest(buffer);
            if slowest >= stage {
                return Ok(true);
            }
            let Some(wait) = wait else { return Ok(false) };
            spins += 1;
            if spins < self.spins {
                std::hint::spin_loop();
                continue;
            }
            let talk = Talk { rank: self.rank(), peer: Rank::at(peer).into(), phase: PHASE };
            talk.check(wait)?;
            let reached = |port: &Self| port.slowest(buffer).0 >= stage;
            self.sleep_unless(|port| reached(port) || port.gone(Rank::at(peer)).is_some(), wait.slice());
            if let (Some(reason), false) = (self.gone(Rank::at(peer)), reached(self)) {
                return Err(talk.gone(reason));
            }
        }
    }

    /// Adds up a range of this rank's chunk of all ranks' numbers, which they have written by `stage`, and gives it out.
    pub(crate) fn sum_own<'a>(&self, buffer: &'a mut Mapped, range: Range<usize>, stage: u64) -> &'a mut [f32] {
        let own = chunk(buffer.own().len(), self.world, self.rank);
        assert!(own.start <= range.start && range.end <= own.end, "another rank's chunk");
        buffer.sum_here(self.world, range.clone(), stage);
        &mut buffer.own_mut()[range]
    }

    /// A part of what a peer has written by `stage`.
    pub(crate) fn part_of<'a>(&self, buffer: &'a Mapped, peer: Rank, range: Range<usize>, stage: u64) -> &'a [f32] {
        buffer.part(peer.index(), range, stage)
    }
}
