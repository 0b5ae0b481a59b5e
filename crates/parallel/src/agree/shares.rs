//! All-reduce by shares, for ranks that map the same memory: each rank makes the step for its chunk of every bucket, and all take
//! over the weights that the others made.
//!
//! A bucket goes through three stages on every rank: its gradients lie in shared memory; the rank has added up its chunk of all
//! ranks' gradients, stepped with it, and put the new weights in its place; it has read the other ranks' new weights. So the
//! optimizer's state of an element is touched by one rank and not by all, and per rank, with p ranks, S·(1 + 5/p + 2(p−1)/p) bytes are
//! read and written after the gradients are in place, against 7·S where every rank adds up for all and steps everywhere. There is
//! no thread: a rank looks how far the others are when the turn of a bucket comes, and waits only for what it needs to go on.
//!
//! All ranks hold the same weights, bit for bit those of an all-reduce: one rank has made each. Rules that look at whole tensors
//! (LARS), or at all gradients at once (clipping), cannot step by shares.

use std::ops::Range;

use paceline_comm::transfer::chunk;
use paceline_comm::{CommError, Communicator, Rank, SharedBuffer};

use super::courier::BucketShape;
use super::{Apply, Brought, SHARED, Shared};

/// The stage of a rank that cannot go on: its step would have spoilt the weights.
const SPOILT: u64 = u64::MAX;

/// Elements that are added up and stepped with at once: with weights and state they stay in a core's cache of 1 MiB.
const PIECE_ELEMENTS: usize = 64 << 10;

/// A bucket's way through a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Home,
    Sent,
    Stepped,
}

#[derive(Debug)]
struct Bucket {
    memory: SharedBuffer,
    /// Where it begins among all parameters.
    start: usize,
    /// How often it was sent.
    rounds: u64,
    at: At,
}

impl Bucket {
    /// The stage at which this round's gradients are there; the next two follow it.
    fn sent(&self) -> u64 {
        3 * self.rounds - 2
    }
}

/// A rank's end.
#[derive(Debug)]
pub(super) struct Shares {
    communicator: Communicator,
    buckets: Vec<Bucket>,
    numbers: SharedBuffer,
    /// How often numbers were shared.
    rounds: u64,
}

impl Shares {
    /// Joins; all ranks have the same buckets.
    pub fn start(mut communicator: Communicator, buckets: &[BucketShape]) -> Result<Self, CommError> {
        let bucket = |shape: &BucketShape| -> Result<Bucket, CommError> {
            let memory = communicator.shared_buffer(shape.elements)?;
            Ok(Bucket { memory, start: shape.start, rounds: 0, at: At::Home })
        };
        let buckets = buckets.iter().map(bucket).collect::<Result<_, _>>()?;
        let numbers = communicator.shared_buffer(SHARED)?;
        Ok(Self { communicator, buckets, numbers, rounds: 0 })
    }

    pub fn rank(&self) -> Rank {
        self.communicator.rank()
    }

    pub fn world(&self) -> usize {
        self.communicator.world()
    }

    /// Leaves this rank's numbers for the others.
    pub fn share(&mut self, numbers: Shared) -> Result<(), CommError> {
        self.communicator.all_at(&mut self.numbers, 2 * self.rounds, true)?;
        self.rounds += 1;
        self.numbers.as_mut_slice().copy_from_slice(&numbers);
        self.communicator.come_to(&mut self.numbers, 2 * self.rounds - 1);
        Ok(())
    }

    /// The sum of all ranks' numbers.
    pub fn shared(&mut self) -> Result<Shared, CommError> {
        let stage = 2 * self.rounds - 1;
        self.communicator.all_at(&mut self.numbers, stage, true)?;
        let mut sums = [0.0; SHARED];
        for rank in 0..self.world() {
            let numbers = self.communicator.part_of(&mut self.numbers, Rank::at(rank), 0..SHARED, stage);
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
        }
        self.communicator.come_to(&mut self.numbers, stage + 1);
        Ok(sums)
    }

    /// Puts the gradients of a bucket where all can read them.
    pub fn send(&mut self, bucket: usize, gradients: &[f32]) -> Result<(), CommError> {
        let Self { communicator, buckets, .. } = self;
        let bucket = &mut buckets[bucket];
        assert!(bucket.at == At::Home, "a bucket is sent once, after what came back was taken");
        communicator.all_at(&mut bucket.memory, 3 * bucket.rounds, true)?;
        if !gradients.is_empty() {
            bucket.memory.as_mut_slice().copy_from_slice(gradients);
        }
        (bucket.rounds, bucket.at) = (bucket.rounds + 1, At::Sent);
        let stage = bucket.sent();
        communicator.come_to(&mut bucket.memory, stage);
        Ok(())
    }

    /// Steps with this rank's chunk of a bucket and takes over the others', as far as they are.
    pub fn bring<E: From<CommError>>(
        &mut self,
        index: usize,
        wait: bool,
        parameters: &mut [f32],
        apply: &mut Apply<'_, E>,
    ) -> Result<Brought, E> {
        let (world, bucket) = (self.world(), &self.buckets[index]);
        if bucket.at == At::Home {
            return Ok(Brought::NotYet);
        }
        let sent = bucket.sent();
        let Self { communicator, buckets, .. } = self;
        let Bucket { memory, at, .. } = &mut buckets[index];
        if *at == At::Sent {
            if !communicator.all_at(memory, sent, wait)? {
                return Ok(Brought::NotYet);
            }
            if communicator.furthest(memory) == SPOILT {
                return Ok(Brought::Spoilt);
            }
            let own = chunk(memory.as_slice().len(), world, communicator.rank().index());
            for start in own.clone().step_by(PIECE_ELEMENTS) {
                let piece = start..(start + PIECE_ELEMENTS).min(own.end);
                let gradients = communicator.sum_own(memory, piece.clone(), sent);
                let weights = &mut parameters[piece.clone()];
                if let Err(error) = apply(piece, gradients, weights) {
                    buckets.iter_mut().for_each(|bucket| communicator.come_to(&mut bucket.memory, SPOILT));
                    return Err(error);
                }
                gradients.copy_from_slice(weights);
            }
            communicator.come_to(memory, sent + 1);
            *at = At::Stepped;
        }
        if !communicator.all_at(memory, sent + 1, wait)? {
            return Ok(Brought::NotYet);
        }
        if communicator.furthest(memory) == SPOILT {
            return Ok(Brought::Spoilt);
        }
        let own = communicator.rank().index();
        for rank in (0..world).filter(|&rank| rank != own) {
            let part = chunk(memory.as_slice().len(), world, rank);
            let weights = communicator.part_of(memory, Rank::at(rank), part.clone(), sent + 1);
            parameters[part].copy_from_slice(weights);
        }
        communicator.come_to(memory, sent + 2);
        *at = At::Home;
        Ok(Brought::Done)
    }

    /// Replaces numbers by their sum over all ranks, which come here at the same point.
    pub fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.all_reduce(numbers)
    }

    /// Replaces numbers by those of rank 0.
    pub fn of_first(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.broadcast(Rank(0), numbers)
    }

    /// Gives every rank the whole of a buffer of which each has its chunks.
    pub fn gather(&mut self, buffer: &mut [f32]) -> Result<(), CommError> {
        let (world, rank) = (self.world(), self.rank().index());
        let mut whole = vec![0.0; buffer.len()];
        for bucket in &self.buckets {
            let Range { start, end } = chunk(bucket.memory.as_slice().len(), world, rank);
            let own = bucket.start + start..bucket.start + end;
            whole[own.clone()].copy_from_slice(&buffer[own]);
        }
        // One rank has each element, and the others zero: nothing is rounded.
        self.communicator.all_reduce(&mut whole)?;
        buffer.copy_from_slice(&whole);
        Ok(())
    }
}
