//! All-reduce without messages: every rank adds its own chunk of all ranks' numbers where they lie.
//!
//! A round: (1) a rank says that its numbers are there; (2) once all have said so, it adds chunk r of all
//! buffers, in the order of ranks, and writes the sums into all of them; (3) it says so, and once all have,
//! the result is whole. Per rank and element: p/p reads and p/p writes of memory, 2S bytes in all, against
//! 2(p−1)/p·S sent, received and copied twice by a ring. All ranks hold the same bits, since one rank made
//! each sum. Buffers outside the shared memory go through two staging slots: while the peers finish one, the
//! next is copied in.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::layout::{ARRIVED, REDUCED, SLOT_BYTES, WHAT};
use super::{Port, Registered};
use crate::collective::Collective;
use crate::error::CommError;
use crate::rank::Rank;
use crate::reduce::Kind;
use crate::transfer::chunk;
use crate::wait::Wait;
use crate::wire::stream::Talk;

const PHASE: &str = Collective::AllReduce.name();

/// The place of buffers that go through the staging slots: no registered one's.
const STAGED: [u64; 3] = [u64::MAX; 3];

impl Port {
    /// Adds a range of a registered buffer in place. Where that fails, the buffer is lost.
    pub(crate) fn all_reduce_registered(
        &mut self,
        buffer: &mut Registered,
        range: Range<usize>,
        sequence: u64,
        wait: &Wait,
    ) -> Result<(), CommError> {
        assert!(range.start <= range.end && range.end <= buffer.length(), "outside the registered buffer");
        let outcome = self.reduce_registered(buffer, range, sequence, wait);
        if outcome.is_err() {
            // Peers that have seen this rank come may still add here.
            buffer.lose();
        }
        outcome
    }

    fn reduce_registered(
        &mut self,
        buffer: &mut Registered,
        range: Range<usize>,
        sequence: u64,
        wait: &Wait,
    ) -> Result<(), CommError> {
        self.rounds += 1;
        let [place, length] = buffer.identity();
        let what = what(Kind::F32, range.len(), sequence, [place, length, range.start as u64]);
        self.arrive(self.rounds, what);
        self.wait_all(ARRIVED, self.rounds, what, wait)?;
        let own = chunk(range.len(), self.control.world, self.control.rank);
        // SAFETY: all have come with the same buffer and range, and none leaves before all are done; each
        // reduces its own chunk of the range.
        unsafe { buffer.reduce(range.start + own.start..range.start + own.end) };
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
        let (rank, world) = (self.control.rank, self.control.world);
        let what = what(kind, buffer.len(), sequence, STAGED);
        // An empty buffer is a round too: then all ranks agree that it is empty.
        let blocks = buffer.len().div_ceil(SLOT_BYTES).max(1);
        let length = buffer.len();
        let block = |index: usize| index * SLOT_BYTES..((index + 1) * SLOT_BYTES).min(length);
        let first = self.rounds + 1;
        self.rounds += blocks as u64;
        // SAFETY: of both slots, the last sums were made before this rank passed their round, and copied out;
        // peers touch them again once this rank has come to the next. A communicator that has failed comes
        // here no more.
        unsafe { self.memory().write(self.layout.slot(rank, slot(first)), &buffer[block(0)]) };
        self.arrive(first, what);
        for index in 0..blocks {
            let round = first + index as u64;
            if index + 1 < blocks {
                // SAFETY: as above: the round before the last one used this slot, and was copied out below.
                unsafe { self.memory().write(self.layout.slot(rank, slot(round + 1)), &buffer[block(index + 1)]) };
                self.arrive(round + 1, what);
            }
            self.wait_all(ARRIVED, round, what, wait)?;
            let bytes = block(index).len();
            let own = chunk(bytes / kind.bytes(), world, rank);
            let start = own.start * kind.bytes();
            let offsets: Vec<usize> = (0..world).map(|rank| self.layout.slot(rank, slot(round)) + start).collect();
            // SAFETY: all have come to the round and wait for its sums, of which this rank alone makes its
            // own chunk's.
            unsafe { self.memory().reduce(kind, &offsets, own.len() * kind.bytes()) };
            self.publish(REDUCED, round);
            self.wait_all(REDUCED, round, what, wait)?;
            // SAFETY: all have made their sums of this round, and nobody writes here before this rank comes
            // again.
            unsafe { self.memory().read(self.layout.slot(rank, slot(round)), &mut buffer[block(index)]) };
        }
        Ok(())
    }

    fn arrive(&self, round: u64, what: u64) {
        self.memory().word64(self.control.at(self.control.rank) + WHAT).store(what, Ordering::Relaxed);
        self.publish(ARRIVED, round);
    }

    fn publish(&self, word: usize, round: u64) {
        self.memory().word64(self.control.at(self.control.rank) + word).store(round, Ordering::Release);
        self.control.wake_peers();
    }

    /// Waits until a word of every peer has reached a round, and that all do the same thing in it.
    fn wait_all(&mut self, word: usize, round: u64, what: u64, wait: &Wait) -> Result<(), CommError> {
        let control = &self.control;
        for peer in control.peers() {
            let block = control.at(peer);
            let reached = || control.memory.word64(block + word).load(Ordering::Acquire) >= round;
            let talk = Talk { rank: self.rank(), peer: Rank::at(peer).into(), phase: PHASE };
            let mut spins = 0;
            while !reached() {
                spins += 1;
                if spins < control.spins {
                    std::hint::spin_loop();
                    continue;
                }
                talk.check(wait)?;
                control.sleep_unless(|| reached() || control.gone(Rank::at(peer)).is_some(), wait.slice());
                if let (Some(reason), false) = (control.gone(Rank::at(peer)), reached()) {
                    return Err(talk.gone(reason));
                }
            }
            if word == ARRIVED && control.memory.word64(block + WHAT).load(Ordering::Relaxed) != what {
                return Err(talk.violation("it reduces another buffer than this rank"));
            }
        }
        wait.over();
        Ok(())
    }
}

/// Which of the two slots a round uses.
const fn slot(round: u64) -> usize {
    (round % 2) as usize
}

/// A word that differs when ranks disagree about what they are doing, and in which memory.
fn what(kind: Kind, length: usize, sequence: u64, [start, whole, from]: [u64; 3]) -> u64 {
    paceline_system::random::key(&[kind as u64, length as u64, sequence, start, whole, from])
}
