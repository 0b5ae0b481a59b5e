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

#![allow(unsafe_code)]

use std::ops::Range;

use paceline_comm::{CommError, Communicator, OneCopy, OneCopyShape, Rank};

use super::courier::BucketShape;
use super::{Apply, Brought, Elements, Memory, SHARED, Shared};

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
    /// The address at which the replica has its gradients in shared memory, and how many there are.
    gradients: (usize, usize),
    at: At,
}

/// A rank's end.
#[derive(Debug)]
pub(super) struct Shares {
    communicator: Communicator,
    region: OneCopy,
    buckets: Vec<Bucket>,
    /// The buckets in the order in which a forward pass needs them.
    needs: Vec<usize>,
    /// The bucket that was released last.
    last: usize,
    /// What the replica is to use, until it takes it.
    pub memory: Option<Memory>,
    sums: Box<[f32]>,
}

impl Shares {
    /// Joins; all ranks have the same buckets.
    pub fn start(mut communicator: Communicator, buckets: &[BucketShape], size: Elements) -> Result<Self, CommError> {
        let Elements { parameters, slots } = size;
        let mut needs: Vec<usize> = (0..buckets.len()).collect();
        needs.sort_by_key(|&index| buckets[index].needed_before);
        let ranges: Vec<Range<usize>> = buckets.iter().map(|shape| shape.start..shape.start + shape.elements).collect();
        let shape = OneCopyShape {
            elements: parameters,
            buckets: &ranges,
            piece_elements: PIECE_ELEMENTS,
            slots,
            sums: SHARED,
        };
        let region = communicator.one_copy(&shape)?.expect("ranks share memory");
        // SAFETY: what is lent is `memory`, which one replica takes. It fills weights and optimizer on rank 0
        // alone, before the broadcast that begins the run. Afterwards it reads the weights and the
        // optimizer's numbers of a bucket, and computes its gradients, only after `bring` has found all
        // pieces finished and before it calls `bring` again, which alone arrives, and only with a bucket that
        // was sent; or it reads them after `has_made`. It touches the optimizer's numbers otherwise only
        // inside `apply`, in the range of the piece that this rank then holds.
        let lent = unsafe { region.lend() }?;
        let start = lent.gradients.as_ptr().addr();
        let bucket = |range: &Range<usize>| Bucket {
            gradients: (start + range.start * size_of::<f32>(), range.len()),
            at: At::Home,
        };
        Ok(Self {
            communicator,
            region,
            buckets: ranges.iter().map(bucket).collect(),
            needs,
            last: 0,
            memory: Some(Memory { weights: lent.weights, gradients: lent.gradients, optimizer: lent.optimizer }),
            sums: vec![0.0; PIECE_ELEMENTS].into(),
        })
    }

    pub fn rank(&self) -> Rank {
        self.communicator.rank()
    }

    pub fn world(&self) -> usize {
        self.communicator.world()
    }

    /// Leaves this rank's numbers for the others.
    pub fn share(&mut self, numbers: Shared) -> Result<(), CommError> {
        self.region.start_sum(&numbers, &self.communicator.wait())
    }

    /// The sum of all ranks' numbers.
    pub fn shared(&mut self) -> Result<Shared, CommError> {
        let mut sums = [0.0; SHARED];
        self.region.finish_sum(&mut sums, &self.communicator.wait())?;
        Ok(sums)
    }

    /// Puts the gradients of a bucket where all can read them, unless they were computed there.
    pub fn send(&mut self, index: usize, gradients: &[f32]) {
        let bucket = &mut self.buckets[index];
        assert!(bucket.at == At::Home, "a bucket is sent once, after its last step was seen to be done");
        if !gradients.is_empty() && (gradients.as_ptr().addr(), gradients.len()) != bucket.gradients {
            self.region.write_gradients(index, gradients);
        }
        bucket.at = At::Sent;
    }

    /// Makes pieces of steps until the weights of a bucket are up to date, or, unless it is to `wait`, as
    /// many as are this rank's.
    pub fn bring<E: From<CommError>>(
        &mut self,
        index: usize,
        wait: bool,
        apply: &mut Apply<'_, E>,
    ) -> Result<Brought, E> {
        let (world, pieces) = (self.world() as u64, self.region.pieces(index));
        let mut left = match self.buckets[index].at {
            At::Home => return Ok(Brought::NotYet),
            At::Sent => {
                self.region.arrive(index);
                (self.buckets[index].at, self.last) = (At::Released, index);
                pieces.div_ceil(world)
            }
            At::Released => pieces,
        };
        if !wait && self.is_behind(self.region.stage(index)) {
            left = 0;
        }
        let limit = self.communicator.wait();
        loop {
            if self.region.is_poisoned(index) {
                return Ok(Brought::Spoilt);
            }
            if self.region.is_finished(index) {
                self.buckets[index].at = At::Home;
                return Ok(Brought::Done);
            }
            if !wait {
                if left == 0 || !self.work(index, apply)? {
                    return Ok(Brought::NotYet);
                }
                left -= 1;
            } else if !self.work_on_any(index, apply)? {
                self.region.wait_for_progress(index, &limit)?;
            }
        }
    }

    /// Whether another rank has released a bucket that this one has still to come to, in the same step.
    fn is_behind(&self, stage: u64) -> bool {
        let next = self.last + 1;
        let waits = self.buckets.get(next).is_some_and(|bucket| bucket.at != At::Released);
        waits && self.region.latest_stage(next) >= stage
    }

    /// Makes a piece of this bucket's step, or of another's; whether there was one.
    fn work_on_any<E: From<CommError>>(&mut self, first: usize, apply: &mut Apply<'_, E>) -> Result<bool, E> {
        if self.work(first, apply)? {
            return Ok(true);
        }
        for nth in 0..self.needs.len() {
            let index = self.needs[nth];
            if self.buckets[index].at == At::Released && self.work(index, apply)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes a piece of a bucket's step; whether there was one left, and all have released it.
    fn work<E: From<CommError>>(&mut self, index: usize, apply: &mut Apply<'_, E>) -> Result<bool, E> {
        let Self { region, sums, .. } = self;
        let Some(mut piece) = region.take(index)? else { return Ok(false) };
        let range = piece.range();
        let sums = &mut sums[..range.len()];
        piece.sum_gradients(sums);
        if let Err(error) = apply((index, range), sums, piece.weights()) {
            region.poison();
            return Err(error);
        }
        piece.finish();
        Ok(true)
    }

    /// Whether the weights are those after so many steps, and stay so: every piece of those steps is done,
    /// and nobody holds one of the next. Nobody takes a piece after this.
    pub fn has_made(&mut self, steps: u64) -> bool {
        let Self { region, buckets, .. } = self;
        region.freeze();
        (0..buckets.len()).all(|index| {
            let whole = region.finished(index) == steps * region.pieces(index);
            whole && region.is_idle(index) && !region.is_poisoned(index)
        })
    }

    /// Replaces numbers by their sum over all ranks, which come here at the same point.
    pub fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.all_reduce(numbers)
    }

    /// Replaces numbers by those of rank 0.
    pub fn of_first(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.broadcast(Rank(0), numbers)
    }
}
