//! All-reduce where ranks map the same memory: one copy of the weights and of the optimizer's state, and steps made by whoever has time.
//!
//! A rank computes its gradients in shared memory and says so once it does not read the bucket's weights any more. When all
//! have said so, the bucket's step is cut into pieces. A rank takes a piece, adds up all ranks' gradients of it, in the order of ranks,
//! and steps with the sum, all in its cache. A rank takes its share of the pieces when its own gradients are there, leaves even that to
//! the others where it is behind them, takes what is left when the bucket is offered again, and whatever there is while it waits: a
//! rank that was disturbed catches up, because the others make its steps. Who makes which does not change a bit.
//!
//! Per rank, with p ranks, S·(1 + 4/p) bytes are read and written for the step, against 7·S where every rank adds up for all and steps
//! everywhere. There is no thread, and neither gradients nor weights are copied: forward passes begin with the weights when all pieces
//! of a bucket are done.
//!
//! Rules that look at whole tensors (LARS), or at all gradients at once (clipping), cannot step by pieces.

use std::ops::Range;

use paceline_comm::error::Party;
use paceline_comm::{CommError, Common, Communicator, Rank, SharedBuffer};

use super::report::WORDS;
use super::{Agreement, BucketShape, Protocol, Settled, Shape, SharedWeights, StepReport, Target, Wait};

/// The stage of a rank that cannot go on: its step would have spoilt the weights.
const SPOILT: u64 = u64::MAX;

/// Elements of a piece: sums, weights and state stay in a core's cache of 1 MiB.
const PIECE_ELEMENTS: usize = 64 << 10;

/// A bucket's way through a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Its weights are up to date.
    Home,
    /// Its gradients lie in shared memory.
    Sent,
    /// And its weights may be changed, as far as this rank is concerned.
    Released,
}

#[derive(Debug)]
struct Bucket {
    /// Says how far ranks are with it.
    board: SharedBuffer,
    /// Where it stands among all parameters.
    elements: Range<usize>,
    /// How often it was sent; the stage of a rank that has released it.
    rounds: u64,
    at: At,
}

impl Bucket {
    fn pieces(&self) -> u64 {
        self.elements.len().div_ceil(PIECE_ELEMENTS) as u64
    }

    /// How many pieces are done when this round is.
    fn end(&self) -> u64 {
        self.rounds * self.pieces()
    }
}

/// A rank's end.
#[derive(Debug)]
pub(super) struct Shares {
    communicator: Communicator,
    buckets: Vec<Bucket>,
    /// The buckets in the order in which a forward pass needs them.
    needs: Vec<usize>,
    /// The bucket that was released last.
    last: usize,
    /// Every rank's own, as the parameters lie.
    gradients: SharedBuffer,
    /// The address at which the replica has this rank's.
    gradients_at: usize,
    weights: Common,
    /// What the replica is to use, until it takes it.
    pub memory: Option<SharedWeights>,
    sums: Box<[f32]>,
    /// Reports of a step.
    numbers: SharedBuffer,
    /// How often there were reports.
    rounds: u64,
    /// Whether this rank could not make a piece.
    refused: bool,
    protocol: Protocol,
}

impl Shares {
    /// Joins; all ranks have the same buckets.
    pub fn start(mut communicator: Communicator, shape: &Shape, protocol: Protocol) -> Result<Self, CommError> {
        let Shape { buckets, parameters, slots, .. } = shape;
        let (parameters, slots) = (*parameters, *slots);
        let mut needs: Vec<usize> = (0..buckets.len()).collect();
        needs.sort_by_key(|&index| buckets[index].needed_before);
        let bucket = |shape: &BucketShape| -> Result<Bucket, CommError> {
            assert!(shape.start + shape.elements <= parameters, "a bucket is part of the parameters");
            let board = communicator.shared_buffer(0)?;
            Ok(Bucket { board, elements: shape.start..shape.start + shape.elements, rounds: 0, at: At::Home })
        };
        let buckets = buckets.iter().map(bucket).collect::<Result<_, _>>()?;
        const SHARED_MEMORY: &str = "ranks share memory";
        let (mut gradients, numbers) = (communicator.shared_buffer(parameters)?, communicator.shared_buffer(WORDS)?);
        let own = communicator.own_again(&mut gradients)?.expect(SHARED_MEMORY);
        let [weights, lent] = communicator.common(parameters)?.expect(SHARED_MEMORY);
        let mut optimizer = Vec::with_capacity(slots);
        for _ in 0..slots {
            let [slot] = communicator.common(parameters)?.expect(SHARED_MEMORY);
            optimizer.push(slot);
        }
        Ok(Self {
            communicator,
            buckets,
            needs,
            last: 0,
            gradients,
            gradients_at: own.as_ptr().addr(),
            weights,
            memory: Some(SharedWeights { weights: lent, gradients: own, optimizer }),
            sums: vec![0.0; PIECE_ELEMENTS].into(),
            numbers,
            rounds: 0,
            refused: false,
            protocol,
        })
    }

    /// Waits until all others have come to a stage with the numbers.
    fn numbers_at(&mut self, stage: u64) -> Result<(), CommError> {
        let Self { communicator, numbers, .. } = self;
        let wait = communicator.wait();
        while !communicator.are_at(numbers, stage) {
            communicator.watch(numbers, (stage, u64::MAX), &wait)?;
        }
        Ok(())
    }

    /// Puts the gradients of a bucket where all can read them, unless they were computed there.
    fn publish(&mut self, bucket: usize, gradients: &[f32]) {
        let bucket = &mut self.buckets[bucket];
        assert!(bucket.at == At::Home, "a bucket is sent once, after its last step was seen to be done");
        let place = self.gradients_at + bucket.elements.start * size_of::<f32>();
        if !gradients.is_empty() && gradients.as_ptr().addr() != place {
            self.gradients.as_mut_slice()[bucket.elements.clone()].copy_from_slice(gradients);
        }
        (bucket.rounds, bucket.at) = (bucket.rounds + 1, At::Sent);
    }

    /// Makes pieces of steps until the weights of a bucket are up to date, or, unless it is to wait, as many as are this rank's.
    fn make_pieces(&mut self, index: usize, wait: Wait, target: &mut dyn Target) -> Result<Settled, CommError> {
        let wait = wait == Wait::Block;
        let (world, Self { communicator, buckets, .. }) = (self.workers(), &mut *self);
        let bucket = &mut buckets[index];
        let (pieces, end, stage) = (bucket.pieces(), bucket.end(), bucket.rounds);
        let mut left = match bucket.at {
            At::Home => return Ok(Settled::NotYet),
            At::Sent => {
                communicator.come_to(&mut bucket.board, stage);
                (bucket.at, self.last) = (At::Released, index);
                pieces.div_ceil(world as u64)
            }
            At::Released => pieces,
        };
        if !wait && self.is_behind(stage) {
            left = 0;
        }
        let limit = self.communicator.wait();
        loop {
            let Self { communicator, buckets, .. } = self;
            let board = &mut buckets[index].board;
            if self.refused || communicator.furthest(board) == SPOILT {
                return Ok(Settled::Refused);
            }
            if communicator.finished(board) >= end {
                buckets[index].at = At::Home;
                return Ok(Settled::Done);
            }
            if !wait {
                if left == 0 || !self.work(index, target)? {
                    return Ok(Settled::NotYet);
                }
                left -= 1;
            } else if !self.work_on_any(index, target)? {
                let Self { communicator, buckets, .. } = self;
                communicator.watch(&mut buckets[index].board, (stage, end), &limit)?;
            }
        }
    }

    /// Whether another rank has released a bucket that this one has still to come to, in the same step.
    fn is_behind(&mut self, round: u64) -> bool {
        let Self { communicator, buckets, last, .. } = self;
        let next = buckets.get_mut(*last + 1).filter(|next| next.at != At::Released);
        next.is_some_and(|next| communicator.furthest(&mut next.board) >= round)
    }

    /// Makes a piece of this bucket's step, or of another's; whether there was one.
    fn work_on_any(&mut self, first: usize, target: &mut dyn Target) -> Result<bool, CommError> {
        if self.work(first, target)? {
            return Ok(true);
        }
        for nth in 0..self.needs.len() {
            let index = self.needs[nth];
            if self.buckets[index].at == At::Released && self.work(index, target)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes a piece of a bucket's step; whether there was one left, and all have released it.
    fn work(&mut self, index: usize, target: &mut dyn Target) -> Result<bool, CommError> {
        let Self { communicator, buckets, gradients, weights, sums, .. } = self;
        let bucket = &mut buckets[index];
        let (round, end, pieces, length) = (bucket.rounds, bucket.end(), bucket.pieces(), bucket.elements.len());
        if !communicator.are_at(&mut bucket.board, round) || communicator.furthest(&mut bucket.board) == SPOILT {
            return Ok(false);
        }
        let Some(number) = communicator.take(&mut bucket.board, end) else { return Ok(false) };
        let Some(piece) = number.checked_sub(end - pieces) else {
            let (rank, what) = (communicator.rank(), "pieces were taken that there are not".to_owned());
            return Err(CommError::Protocol { rank, peer: Party::Anyone, phase: "share", what });
        };
        let start = piece as usize * PIECE_ELEMENTS;
        let range = start..(start + PIECE_ELEMENTS).min(length);
        let sums = &mut sums[..range.len()];
        let here = bucket.elements.start + range.start..bucket.elements.start + range.end;
        communicator.sum_into(gradients, here.clone(), (&mut bucket.board, round), sums);
        let weights = &mut weights[here];
        if target.apply_shared(index, range, sums, weights).is_err() {
            buckets.iter_mut().for_each(|bucket| communicator.come_to(&mut bucket.board, SPOILT));
            self.refused = true;
            return Ok(true);
        }
        communicator.finish(&mut bucket.board);
        Ok(true)
    }

    /// Whether the weights are those after so many steps, and stay so as long as this rank makes no other: every piece of those
    /// steps is done, and no bucket of the next has been released by all ranks, so that nobody can take a piece of it.
    pub fn has_made(&mut self, steps: u64) -> bool {
        let Self { communicator, buckets, .. } = self;
        buckets.iter_mut().all(|bucket| {
            let released = bucket.at == At::Released && bucket.rounds > steps;
            let under_way = released && communicator.are_at(&mut bucket.board, steps + 1);
            let spoilt = communicator.furthest(&mut bucket.board) == SPOILT;
            !under_way && !spoilt && communicator.finished(&mut bucket.board) == steps * bucket.pieces()
        })
    }
}

impl Agreement for Shares {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        self.communicator.rank()
    }

    fn workers(&self) -> usize {
        self.communicator.world()
    }

    fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.broadcast(Rank(0), numbers)
    }

    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.all_reduce(numbers)
    }

    fn begin_step(&mut self, report: StepReport) -> Result<(), CommError> {
        self.numbers_at(2 * self.rounds)?;
        self.rounds += 1;
        self.numbers.as_mut_slice().copy_from_slice(&report.to_words());
        self.communicator.come_to(&mut self.numbers, 2 * self.rounds - 1);
        Ok(())
    }

    fn total(&mut self) -> Result<StepReport, CommError> {
        let stage = 2 * self.rounds - 1;
        self.numbers_at(stage)?;
        let mut sums = [0.0; WORDS];
        self.communicator.sum_here(&mut self.numbers, stage, &mut sums);
        self.communicator.come_to(&mut self.numbers, stage + 1);
        Ok(StepReport::from_words(sums))
    }

    fn send(&mut self, bucket: usize, gradients: &[f32]) -> Result<(), CommError> {
        self.publish(bucket, gradients);
        Ok(())
    }

    fn settle(&mut self, bucket: usize, wait: Wait, target: &mut dyn Target) -> Result<Settled, CommError> {
        self.make_pieces(bucket, wait, target)
    }

    fn has_stepped(&mut self, steps: u64) -> bool {
        self.has_made(steps)
    }

    fn shared_weights(&mut self) -> Option<SharedWeights> {
        self.memory.take()
    }

    fn has_one_copy(&self) -> bool {
        true
    }
}
