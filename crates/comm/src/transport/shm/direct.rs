//! All-reduce without messages: every rank adds its own chunk of all ranks' numbers where they lie.
//!
//! A round: (1) a rank says that its numbers are there; (2) once all have said so, it adds chunk r of all buffers, in
//! the order of ranks, and writes the sums into all of them; (3) it says so, and once all have, the result is whole.
//! Per rank and element: p/p reads and p/p writes of memory, 2S bytes in all, against 2(p−1)/p·S sent, received and
//! copied twice by a ring. All ranks hold the same bits, since one rank made each sum.
//! Buffers outside the common memory go through two staging slots: while the peers finish one, the next is copied in.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::layout::{ARRIVED, REDUCED, SLOT_BYTES, WHAT};
use super::{Mapped, Port};
use crate::collective::Collective;
use crate::error::CommError;
use crate::rank::Rank;
use crate::reduce::Kind;
use crate::transfer::chunk;
use crate::wait::Wait;
use crate::wire::stream::Talk;

const PHASE: &str = Collective::AllReduce.name();

impl Port {
    /// Adds a range of a common buffer in place.
    pub(crate) fn all_reduce_mapped(
        &mut self,
        buffer: &mut Mapped,
        range: Range<usize>,
        sequence: u64,
        wait: &Wait,
    ) -> Result<(), CommError> {
        self.rounds += 1;
        let what = what(Kind::F32, range.len(), sequence);
        self.arrive(self.rounds, what);
        self.wait_all(ARRIVED, self.rounds, what, wait)?;
        let own = chunk(range.len(), self.world, self.rank);
        buffer.sum(self.world, range.start + own.start..range.start + own.end);
        self.publish(REDUCED, self.rounds);
        self.wait_all(REDUCED, self.rounds, what, wait)
    }

    /// Adds a buffer of this process through the staging slots.
    pub(crate) fn all_reduce_staged(
        &mut self,
        kind: Kind,
        buffer: &mut [u8],
        sequence: u64,
        wait: &Wait,
    ) -> Result<(), CommError> {
        let what = what(kind, buffer.len(), sequence);
        // An empty buffer is a round too: then all ranks agree that it is empty.
        let blocks = buffer.len().div_ceil(SLOT_BYTES).max(1);
        let length = buffer.len();
        let block = |index: usize| index * SLOT_BYTES..((index + 1) * SLOT_BYTES).min(length);
        let first = self.rounds + 1;
        self.rounds += blocks as u64;
        self.memory.write(self.layout.slot(self.rank, slot(first)), &buffer[block(0)]);
        self.arrive(first, what);
        for index in 0..blocks {
            let round = first + index as u64;
            if index + 1 < blocks {
                // Free: its last sums were made before we passed the last round, and copied out below.
                self.memory.write(self.layout.slot(self.rank, slot(round + 1)), &buffer[block(index + 1)]);
                self.arrive(round + 1, what);
            }
            self.wait_all(ARRIVED, round, what, wait)?;
            let bytes = block(index).len();
            let own = chunk(bytes / kind.bytes(), self.world, self.rank);
            let start = own.start * kind.bytes();
            let offsets: Vec<usize> = (0..self.world).map(|rank| self.layout.slot(rank, slot(round)) + start).collect();
            self.memory.sum(kind, &offsets, own.len() * kind.bytes());
            self.publish(REDUCED, round);
            self.wait_all(REDUCED, round, what, wait)?;
            self.memory.read(self.layout.slot(self.rank, slot(round)), &mut buffer[block(index)]);
        }
        Ok(())
    }

    fn arrive(&self, round: u64, what: u64) {
        self.memory.word64(self.layout.control(self.rank) + WHAT).store(what, Ordering::Relaxed);
        self.publish(ARRIVED, round);
    }

    fn publish(&self, word: usize, round: u64) {
        self.memory.word64(self.layout.control(self.rank) + word).store(round, Ordering::Release);
        (0..self.world).filter(|&peer| peer != self.rank).for_each(|peer| self.wake(peer));
    }

    /// Waits until a word of every peer has reached a round, and that all do the same thing in it.
    fn wait_all(&mut self, word: usize, round: u64, what: u64, wait: &Wait) -> Result<(), CommError> {
        let own = self.rank;
        for peer in (0..self.world).filter(|&peer| peer != own) {
            let control = self.layout.control(peer);
            let reached = |port: &Self| port.memory.word64(control + word).load(Ordering::Acquire) >= round;
            let talk = Talk { rank: self.rank(), peer: Rank::at(peer).into(), phase: PHASE };
            let mut spins = 0;
            while !reached(self) {
                spins += 1;
                if spins < self.spins {
                    std::hint::spin_loop();
                    continue;
                }
                talk.check(wait)?;
                self.sleep_unless(|port| reached(port) || port.gone(Rank::at(peer)).is_some(), wait.slice());
                if let (Some(reason), false) = (self.gone(Rank::at(peer)), reached(self)) {
                    return Err(talk.gone(reason));
                }
            }
            if word == ARRIVED && self.memory.word64(control + WHAT).load(Ordering::Relaxed) != what {
                return Err(talk.violation("it reduces another buffer than this rank"));
            }
        }
        Ok(())
    }
}

/// Which of the two slots a round uses.
const fn slot(round: u64) -> usize {
    (round % 2) as usize
}

/// A word that differs when ranks disagree about what they are doing.
fn what(kind: Kind, length: usize, sequence: u64) -> u64 {
    paceline_system::random::key(&[kind as u64, length as u64, sequence])
}
