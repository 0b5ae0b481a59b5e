//! One copy of the weights and of the optimizer's state, which all ranks of a host step together, each at its
//! own pace. No stage is a message, nobody has to answer, and nothing runs beside the ranks' own work.
//!
//! A round of a bucket: every rank writes its gradients and arrives at the next stage. Once all have, the
//! bucket is cut into pieces; whoever has time takes the next one, adds up all ranks' gradients of it, makes
//! the step with the sums and finishes it. Once all pieces are finished, the weights may be read again, and
//! gradients written.
//!
//! Who may touch what is decided by words in shared memory, and every method that touches numbers looks at
//! them first: the gradients and weights of a bucket belong to nobody else while its pieces are finished and
//! this rank has not arrived; a piece belongs to the one rank that took it ([`Piece`]). What no type can
//! check is what an engine does with memory that it was lent: [`OneCopy::lend`] is therefore `unsafe`.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use bytemuck::cast_slice;
use paceline_system::random;

use super::control::Control;
use super::layout::{CONTROL_BYTES, LINE_BYTES, PAGE_BYTES, WHAT};
use super::{Arena, LentSlice, Memory};
use crate::error::{CommError, Party};
use crate::rank::Rank;
use crate::wait::Wait;
use crate::wire::stream::Talk;

const PHASE: &str = "share";

/// The stage of a rank that cannot go on: its step would have spoilt the weights.
const POISONED: u64 = u64::MAX;

/// The stage of a rank that lets nobody go on: it keeps the weights as they are.
const FROZEN: u64 = u64::MAX - 1;

/// What ranks share; the same on all of them.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// How many weights there are, and as many gradients of each rank.
    pub elements: usize,
    /// What is stepped together, as ranges of the weights that do not meet.
    pub buckets: &'a [Range<usize>],
    /// Elements of a piece of a bucket.
    pub piece_elements: usize,
    /// How many buffers of that many elements the optimizer keeps.
    pub slots: usize,
    /// How many numbers are added up by [`OneCopy::start_sum`].
    pub sums: usize,
}

impl Shape<'_> {
    /// A number that differs where shapes do.
    fn key(&self) -> u64 {
        let fixed = [self.elements, self.piece_elements, self.slots, self.sums];
        let ranges = self.buckets.iter().flat_map(|bucket| [bucket.start, bucket.end]);
        random::key(&fixed.into_iter().chain(ranges).map(|word| word as u64).collect::<Vec<_>>())
    }

    /// That it makes sense.
    fn check(&self) {
        assert!(self.piece_elements > 0, "a piece has elements");
        let mut ranges: Vec<&Range<usize>> = self.buckets.iter().filter(|bucket| !bucket.is_empty()).collect();
        ranges.sort_by_key(|bucket| bucket.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "buckets do not meet");
        assert!(self.buckets.iter().all(|bucket| bucket.start <= bucket.end && bucket.end <= self.elements));
    }
}

#[derive(Debug)]
struct Bucket {
    elements: Range<usize>,
    pieces: u64,
    /// How often this rank has arrived.
    stage: u64,
}

impl Bucket {
    /// How many pieces there have been when this round is over.
    const fn end(&self) -> u64 {
        self.stage * self.pieces
    }
}

/// Memory for an engine: see [`OneCopy::lend`].
#[derive(Debug)]
pub struct Lent {
    /// All ranks' weights.
    pub weights: LentSlice,
    /// All ranks' buffers of the optimizer.
    pub optimizer: Vec<LentSlice>,
    /// This rank's gradients, as the weights lie.
    pub gradients: LentSlice,
}

/// One rank's end.
#[derive(Debug)]
pub struct OneCopy {
    control: Control,
    /// The ranks' numbers in the world, for errors.
    members: Arc<[Rank]>,
    file: Arena,
    piece_elements: usize,
    buckets: Vec<Bucket>,
    /// Every rank's, one after the other.
    gradients: Memory,
    weights: Memory,
    elements: usize,
    /// Where gradients, weights and the optimizer's buffers begin in the file.
    places: (u64, u64, Vec<u64>),
    sums: Sums,
    /// What the shape is known by, until all others are known to have the same.
    unchecked: Option<u64>,
    /// Whether this rank takes part no more.
    ended: bool,
}

/// Numbers that are added up beside the gradients. At an even stage nobody has any.
#[derive(Debug)]
struct Sums {
    offset: usize,
    numbers: usize,
    length: usize,
    stage: u64,
}

impl Sums {
    const fn stride(length: usize) -> usize {
        (length * size_of::<f32>()).next_multiple_of(LINE_BYTES)
    }
}

impl OneCopy {
    /// Takes memory; all ranks do so in the same order with the same shape.
    pub(super) fn new(
        arena: &mut Arena,
        parent: &Control,
        members: &Arc<[Rank]>,
        shape: &Shape<'_>,
    ) -> Result<Self, CommError> {
        shape.check();
        let (rank, world, elements) = (parent.rank, parent.world, shape.elements);
        let boards = world * CONTROL_BYTES;
        let sums = boards + shape.buckets.len() * board_bytes(world);
        let numbers = sums + world * LINE_BYTES;
        let (_, memory) = arena.map(numbers + world * Sums::stride(shape.sums))?;
        let (gradients_at, gradients) = arena.map(world * part_bytes(elements))?;
        let (weights_at, weights) = arena.map(part_bytes(elements))?;
        let optimizer = (0..shape.slots).map(|_| arena.map(part_bytes(elements)).map(|(start, _)| start));
        let places = (gradients_at, weights_at, optimizer.collect::<Result<_, _>>()?);
        let key = shape.key();
        memory.word64(rank * CONTROL_BYTES + WHAT).store(key, Ordering::Relaxed);
        let bucket = |range: &Range<usize>| {
            let pieces = range.len().div_ceil(shape.piece_elements) as u64;
            Bucket { elements: range.clone(), pieces, stage: 0 }
        };
        Ok(Self {
            control: Control::new(Arc::new(memory), rank, parent.processes.clone(), parent.spins),
            members: Arc::clone(members),
            file: arena.handle(),
            piece_elements: shape.piece_elements,
            buckets: shape.buckets.iter().map(bucket).collect(),
            gradients,
            weights,
            elements,
            places,
            sums: Sums { offset: sums, numbers, length: shape.sums, stage: 0 },
            unchecked: Some(key),
            ended: false,
        })
    }

    fn board(&self, bucket: usize) -> usize {
        assert!(bucket < self.buckets.len(), "there is no such bucket");
        self.control.world * CONTROL_BYTES + bucket * board_bytes(self.control.world)
    }

    fn stage_of(&self, bucket: usize, rank: usize) -> &AtomicU64 {
        self.control.memory.word64(self.board(bucket) + rank * LINE_BYTES)
    }

    /// Counts pieces that were ever taken by anybody.
    fn taken(&self, bucket: usize) -> &AtomicU64 {
        self.control.memory.word64(self.board(bucket) + self.control.world * LINE_BYTES)
    }

    /// Counts those that are finished.
    fn done(&self, bucket: usize) -> &AtomicU64 {
        self.control.memory.word64(self.board(bucket) + (self.control.world + 1) * LINE_BYTES)
    }

    fn talk(&self, peer: impl Into<Party>) -> Talk {
        Talk { rank: self.members[self.control.rank], peer: peer.into(), phase: PHASE }
    }

    /// How often this rank has arrived with a bucket.
    pub fn stage(&self, bucket: usize) -> u64 {
        self.buckets[bucket].stage
    }

    /// How many pieces a bucket is cut into.
    pub fn pieces(&self, bucket: usize) -> u64 {
        self.buckets[bucket].pieces
    }

    /// The highest stage of another rank.
    pub fn latest_stage(&self, bucket: usize) -> u64 {
        self.control.peers().map(|peer| self.stage_of(bucket, peer).load(Ordering::Acquire)).max().unwrap_or(0)
    }

    /// Whether another rank could not go on ([`OneCopy::poison`]).
    pub fn is_poisoned(&self, bucket: usize) -> bool {
        self.latest_stage(bucket) == POISONED
    }

    /// Whether all other ranks have arrived at this rank's stage. One that cannot go on counts as if it had.
    pub fn all_arrived(&self, bucket: usize) -> bool {
        self.last(bucket).0 >= self.buckets[bucket].stage
    }

    /// The lowest stage of another rank, and whose it is.
    fn last(&self, bucket: usize) -> (u64, usize) {
        let stages = self.control.peers().map(|peer| (self.stage_of(bucket, peer).load(Ordering::Acquire), peer));
        stages.min().unwrap_or((POISONED, self.control.rank))
    }

    /// How many pieces of a bucket were ever finished.
    pub fn finished(&self, bucket: usize) -> u64 {
        self.done(bucket).load(Ordering::Acquire)
    }

    /// Whether all pieces of this rank's stage are finished.
    pub fn is_finished(&self, bucket: usize) -> bool {
        self.finished(bucket) >= self.buckets[bucket].end()
    }

    /// Writes this rank's gradients of a bucket.
    ///
    /// # Panics
    /// While pieces of the round before are not finished, or when they are not as many as the bucket has.
    pub fn write_gradients(&mut self, bucket: usize, gradients: &[f32]) {
        assert!(self.is_finished(bucket), "gradients that are being added up are not written");
        let Bucket { elements, .. } = &self.buckets[bucket];
        assert_eq!(gradients.len(), elements.len(), "a gradient for each weight");
        let offset = self.control.rank * part_bytes(self.elements) + elements.start * size_of::<f32>();
        // SAFETY: all pieces for which they were read are finished, and there are no others before this rank
        // arrives, for which it has to borrow this value again. An engine that was lent them is not writing
        // here: see `lend`.
        unsafe { self.gradients.write(offset, cast_slice(gradients)) };
    }

    /// Says that this rank's gradients of a bucket are there, and that it does not read the weights any more:
    /// the next stage. A rank that takes part no more does not.
    ///
    /// # Panics
    /// While pieces of the round before are not finished.
    pub fn arrive(&mut self, bucket: usize) {
        assert!(self.is_finished(bucket), "a round begins when the last is over");
        if !self.ended {
            self.buckets[bucket].stage += 1;
            self.stage_of(bucket, self.control.rank).store(self.buckets[bucket].stage, Ordering::Release);
            self.control.wake_peers();
        }
    }

    /// Takes the next piece of a bucket, if all ranks have arrived and there is one left.
    ///
    /// # Errors
    /// When another rank has another shape, or counts wrongly.
    pub fn take(&mut self, bucket: usize) -> Result<Option<Piece<'_>>, CommError> {
        let Bucket { stage, pieces, .. } = self.buckets[bucket];
        let end = self.buckets[bucket].end();
        if self.ended || !self.all_take_part(bucket, stage) {
            return Ok(None);
        }
        self.check_shapes()?;
        let next = |taken: u64| (taken < end).then_some(taken + 1);
        let Ok(number) = self.taken(bucket).fetch_update(Ordering::AcqRel, Ordering::Acquire, next) else {
            return Ok(None);
        };
        // Either whoever freezes the region sees that the piece is taken, or this rank sees that it is
        // frozen.
        fence(Ordering::SeqCst);
        if !self.all_take_part(bucket, stage) {
            return Ok(None);
        }
        let Some(index) = number.checked_sub(end - pieces) else {
            return Err(self.talk(Party::Anyone).violation("pieces were taken that there are not"));
        };
        let start = index as usize * self.piece_elements;
        let range = start..(start + self.piece_elements).min(self.buckets[bucket].elements.len());
        Ok(Some(Piece { region: self, bucket, range }))
    }

    /// Whether all others have arrived at a stage, and none has ended.
    fn all_take_part(&self, bucket: usize, stage: u64) -> bool {
        let takes_part = |peer| (stage..FROZEN).contains(&self.stage_of(bucket, peer).load(Ordering::Acquire));
        self.control.peers().all(takes_part)
    }

    /// That all others have this shape; they have said so before they arrived anywhere.
    fn check_shapes(&mut self) -> Result<(), CommError> {
        let Some(key) = self.unchecked else { return Ok(()) };
        let shape = |peer| self.control.memory.word64(self.control.at(peer) + WHAT).load(Ordering::Relaxed);
        if let Some(other) = self.control.peers().find(|&peer| shape(peer) != key) {
            return Err(self.talk(self.members[other]).violation("it shares other buckets than this rank"));
        }
        self.unchecked = None;
        Ok(())
    }

    /// Says that this rank cannot go on: nobody takes a piece any more, and all others see it.
    pub fn poison(&mut self) {
        self.end_at(POISONED);
    }

    /// Keeps the weights as they are, as far as that is still possible: nobody takes a piece any more. Where
    /// none is held ([`OneCopy::is_idle`]) they stay so.
    pub fn freeze(&mut self) {
        if !self.ended {
            self.end_at(FROZEN);
        }
    }

    fn end_at(&mut self, stage: u64) {
        self.ended = true;
        for bucket in 0..self.buckets.len() {
            self.stage_of(bucket, self.control.rank).store(stage, Ordering::Release);
        }
        fence(Ordering::SeqCst);
        self.control.wake_peers();
    }

    /// Whether nobody holds a piece of a bucket.
    pub fn is_idle(&self, bucket: usize) -> bool {
        self.finished(bucket) == self.taken(bucket).load(Ordering::Acquire)
    }

    /// The weights of a bucket.
    ///
    /// # Panics
    /// While pieces of this rank's stage are not finished.
    pub fn weights(&self, bucket: usize) -> &[f32] {
        assert!(self.is_finished(bucket), "weights that are being stepped are not read");
        let Bucket { elements, .. } = &self.buckets[bucket];
        // SAFETY: weights are written for pieces. All of this stage are finished, and there are no others
        // before this rank arrives, for which it has to borrow this value mutably. What else writes them
        // follows the rules of `lend`.
        unsafe { self.weights.view(elements.start * size_of::<f32>(), elements.len()) }
    }

    /// Waits until all others have arrived at this rank's stage of a bucket, if they had not, or all pieces
    /// of it are finished; returns earlier when anything else has happened, so that the caller can look
    /// whether there is work.
    ///
    /// # Errors
    /// When another rank is gone, or too late.
    pub fn wait_for_progress(&self, bucket: usize, wait: &Wait) -> Result<(), CommError> {
        let had_arrived = self.all_arrived(bucket);
        let ready = || self.is_finished(bucket) || (!had_arrived && self.all_arrived(bucket));
        // Who has taken a piece is not written down.
        let late = || if had_arrived { Party::Anyone } else { self.members[self.last(bucket).1].into() };
        self.wait_a_while(ready, late, wait)
    }

    /// Waits once: until it is ready, or woken, or a slice of the time is over.
    fn wait_a_while(&self, ready: impl Fn() -> bool, late: impl Fn() -> Party, wait: &Wait) -> Result<(), CommError> {
        for _ in 0..self.control.spins {
            if ready() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.talk(late()).check(wait)?;
        self.control.sleep_unless(|| ready() || self.control.any_gone().is_some(), wait.slice());
        wait.over();
        match self.control.any_gone() {
            Some((peer, reason)) if !ready() => Err(self.talk(self.members[peer.index()]).gone(reason)),
            _ => Ok(()),
        }
    }

    fn sum_stage(&self, rank: usize) -> &AtomicU64 {
        self.control.memory.word64(self.sums.offset + rank * LINE_BYTES)
    }

    /// Waits until all others have come to a stage with their numbers.
    fn wait_for_sums(&self, stage: u64, wait: &Wait) -> Result<(), CommError> {
        let behind = || self.control.peers().find(|&peer| self.sum_stage(peer).load(Ordering::Acquire) < stage);
        while let Some(peer) = behind() {
            self.wait_a_while(|| behind().is_none(), || self.members[behind().unwrap_or(peer)].into(), wait)?;
        }
        Ok(())
    }

    fn arrive_at_sum(&mut self, stage: u64) {
        self.sums.stage = stage;
        self.sum_stage(self.control.rank).store(stage, Ordering::Release);
        self.control.wake_peers();
    }

    /// Gives this rank's numbers, whose sum over all ranks [`OneCopy::finish_sum`] will give; waits until all
    /// have that of the numbers before.
    ///
    /// # Errors
    /// When another rank is gone, or too late.
    ///
    /// # Panics
    /// When the sum before was not taken, or the numbers are not as many as the shape says.
    pub fn start_sum(&mut self, numbers: &[f32], wait: &Wait) -> Result<(), CommError> {
        let Sums { numbers: start, length, stage, .. } = self.sums;
        assert!(stage.is_multiple_of(2) && numbers.len() == length, "one sum after the other, of so many numbers");
        self.wait_for_sums(stage, wait)?;
        let offset = start + self.control.rank * Sums::stride(length);
        // SAFETY: all have taken the sum for which these numbers were read, and read them again only after
        // the next store.
        unsafe { self.control.memory.write(offset, cast_slice(numbers)) };
        self.arrive_at_sum(stage + 1);
        Ok(())
    }

    /// The sum of all ranks' numbers, added in the order of ranks; waits for them.
    ///
    /// # Errors
    /// When another rank is gone, too late, or has another shape.
    ///
    /// # Panics
    /// When this rank gave no numbers, or there is room for more or fewer sums.
    pub fn finish_sum(&mut self, sums: &mut [f32], wait: &Wait) -> Result<(), CommError> {
        let Sums { numbers: start, length, stage, .. } = self.sums;
        assert!(!stage.is_multiple_of(2) && sums.len() == length, "one sum after the other, of so many numbers");
        self.wait_for_sums(stage, wait)?;
        self.check_shapes()?;
        let offsets = (0..self.control.world).map(|rank| start + rank * Sums::stride(length));
        // SAFETY: all have given their numbers, and write them again only after this rank's next store.
        unsafe { self.control.memory.sum_into(offsets, sums) };
        self.arrive_at_sum(stage + 1);
        Ok(())
    }

    /// The address space of an engine that computes gradients where they are added up, and reads weights
    /// where they are stepped: other mappings of the same memory.
    ///
    /// # Errors
    /// When the system has no memory to map.
    ///
    /// # Safety
    /// While any of the slices is there, whoever holds them
    /// - writes gradients and reads weights of a bucket only while [`OneCopy::is_finished`] holds for it and
    ///   before the [`OneCopy::arrive`] that follows, or reads them after [`OneCopy::freeze`] where
    ///   [`OneCopy::is_idle`] holds;
    /// - reads the optimizer's numbers of a bucket when it may read its weights, and otherwise reads and
    ///   writes only those of a [`Piece`] that this rank holds;
    /// - writes weights and optimizer's numbers otherwise only on one rank, before the first round, and has
    ///   all ranks meet in a collective between that and their first look at them;
    /// - holds no reference into a slice while it calls a method of this value that touches the same numbers.
    pub unsafe fn lend(&self) -> Result<Lent, CommError> {
        let (gradients, weights, optimizer) = &self.places;
        let own = gradients + (self.control.rank * part_bytes(self.elements)) as u64;
        let slice = |start: u64| -> Result<LentSlice, CommError> {
            let memory = self.file.map_again(start, part_bytes(self.elements))?;
            // SAFETY: the caller keeps the rules; there are no words among these numbers.
            Ok(unsafe { LentSlice::new(memory, self.elements) })
        };
        let optimizer = optimizer.iter().map(|&start| slice(start)).collect::<Result<_, _>>()?;
        Ok(Lent { weights: slice(*weights)?, optimizer, gradients: slice(own)? })
    }
}

/// A part of a bucket that this rank alone has to step. One that is dropped is never finished.
#[derive(Debug)]
#[must_use = "a piece that is not finished holds up all ranks"]
pub struct Piece<'a> {
    region: &'a mut OneCopy,
    bucket: usize,
    range: Range<usize>,
}

impl Piece<'_> {
    /// Where it lies in its bucket.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The byte at which its numbers begin among a rank's.
    fn offset(&self) -> usize {
        (self.region.buckets[self.bucket].elements.start + self.range.start) * size_of::<f32>()
    }

    /// Writes the sum of all ranks' gradients, added in the order of ranks.
    ///
    /// # Panics
    /// When there is room for more or fewer sums.
    pub fn sum_gradients(&self, sums: &mut [f32]) {
        assert_eq!(sums.len(), self.range.len(), "a sum for each gradient");
        let stride = part_bytes(self.region.elements);
        let offsets = (0..self.region.control.world).map(|rank| rank * stride + self.offset());
        // SAFETY: all ranks have arrived, and none writes its gradients again before all pieces are finished,
        // of which this is one.
        unsafe { self.region.gradients.sum_into(offsets, sums) };
    }

    /// Its weights.
    pub fn weights(&mut self) -> &mut [f32] {
        // SAFETY: a piece is given to one rank, pieces do not meet, and nobody else touches the weights
        // before it is finished; in this process only this value, which is borrowed mutably, and engines that
        // keep the rules of `lend`.
        unsafe { self.region.weights.view_mut(self.offset(), self.range.len()) }
    }

    /// Says that it is done: what was written for it can be read once all are.
    pub fn finish(self) {
        self.region.done(self.bucket).fetch_add(1, Ordering::AcqRel);
        self.region.control.wake_peers();
    }
}

/// The words of a bucket, each on a line of its own: a stage for each rank, pieces taken, and pieces
/// finished.
const fn board_bytes(world: usize) -> usize {
    (world + 2) * LINE_BYTES
}

/// What so many numbers take of a mapping.
const fn part_bytes(length: usize) -> usize {
    (length * size_of::<f32>()).next_multiple_of(PAGE_BYTES)
}
