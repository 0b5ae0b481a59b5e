//! All-reduce where ranks map the same memory: one copy of the weights and of the optimizer's state, and
//! steps made by whoever has time.
//!
//! A rank computes its gradients in shared memory and says so once it does not read the bucket's weights any
//! more. When all have said so, the bucket's step is cut into pieces. A rank takes a piece, adds up all
//! ranks' gradients of it, in the order of ranks, and steps with the sum, all in its cache. A rank takes its
//! share of the pieces when its own gradients are there, leaves even that to the others where it is behind
//! them, takes what is left when the bucket is offered again, and whatever there is while it waits: a rank
//! that was disturbed catches up, because the others make its steps. Who makes which does not change a bit.
//!
//! Per rank, with p ranks, S·(1 + 4/p) bytes are read and written for the step, against 7·S where every rank
//! adds up for all and steps everywhere. There is no thread, and neither gradients nor weights are copied:
//! forward passes begin with the weights when all pieces of a bucket are done.
//!
//! Rules that look at whole tensors (LARS), or at all gradients at once (clipping), cannot step by pieces.

#![allow(unsafe_code)]

use std::ops::Range;

use paceline_comm::{CommError, Communicator, OneCopy, OneCopyShape, Rank};

use super::report::WORDS;
use super::{Agreement, BucketShape, Protocol, Settled, Shape, SharedWeights, StepReport, Target, Wait};

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
    memory: Option<SharedWeights>,
    sums: Box<[f32]>,
    /// Whether this rank could not make a piece.
    refused: bool,
    protocol: Protocol,
}

impl Shares {
    /// The memory for it, if ranks share any; all have the same buckets.
    pub fn region(communicator: &mut Communicator, shape: &Shape) -> Result<Option<OneCopy>, CommError> {
        let Shape { buckets, parameters, slots, .. } = shape;
        let ranges: Vec<Range<usize>> = buckets.iter().map(|shape| shape.start..shape.start + shape.elements).collect();
        communicator.one_copy(&OneCopyShape {
            elements: *parameters,
            buckets: &ranges,
            piece_elements: PIECE_ELEMENTS,
            slots: *slots,
            sums: WORDS,
        })
    }

    /// Joins.
    pub fn start(
        communicator: Communicator,
        region: OneCopy,
        (shape, protocol): (&Shape, Protocol),
    ) -> Result<Self, CommError> {
        let buckets = &shape.buckets;
        let mut needs: Vec<usize> = (0..buckets.len()).collect();
        needs.sort_by_key(|&index| buckets[index].needed_before);
        // SAFETY: what is lent is `memory`, which one replica takes. It fills weights and optimizer on rank 0
        // alone, before the broadcast that begins the run. Afterwards it reads the weights and the
        // optimizer's numbers of a bucket, and computes its gradients, only after `settle` has found all
        // pieces finished and before it calls `settle` again, which alone arrives, and only with a bucket
        // that was sent; or it reads them after `has_made`. It touches the optimizer's numbers otherwise only
        // inside `apply_shared`, in the range of the piece that this rank then holds.
        let lent = unsafe { region.lend() }?;
        let start = lent.gradients.as_ptr().addr();
        let bucket = |bucket: &BucketShape| Bucket {
            gradients: (start + bucket.start * size_of::<f32>(), bucket.elements),
            at: At::Home,
        };
        Ok(Self {
            communicator,
            region,
            buckets: buckets.iter().map(bucket).collect(),
            needs,
            last: 0,
            memory: Some(SharedWeights { weights: lent.weights, gradients: lent.gradients, optimizer: lent.optimizer }),
            sums: vec![0.0; PIECE_ELEMENTS].into(),
            refused: false,
            protocol,
        })
    }

    /// Puts the gradients of a bucket where all can read them, unless they were computed there.
    fn publish(&mut self, index: usize, gradients: &[f32]) {
        let bucket = &mut self.buckets[index];
        assert!(bucket.at == At::Home, "a bucket is sent once, after its last step was seen to be done");
        if !gradients.is_empty() && (gradients.as_ptr().addr(), gradients.len()) != bucket.gradients {
            self.region.write_gradients(index, gradients);
        }
        bucket.at = At::Sent;
    }

    /// Makes pieces of steps until the weights of a bucket are up to date, or, unless it is to wait, as many
    /// as are this rank's.
    fn make_pieces(&mut self, index: usize, wait: Wait, target: &mut dyn Target) -> Result<Settled, CommError> {
        let wait = wait == Wait::Block;
        let (world, pieces) = (self.workers() as u64, self.region.pieces(index));
        let mut left = match self.buckets[index].at {
            At::Home => return Ok(Settled::NotYet),
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
            if self.refused || self.region.is_poisoned(index) {
                return Ok(Settled::Refused);
            }
            if self.region.is_finished(index) {
                self.buckets[index].at = At::Home;
                return Ok(Settled::Done);
            }
            if !wait {
                if left == 0 || !self.work(index, target)? {
                    return Ok(Settled::NotYet);
                }
                left -= 1;
            } else if !self.work_on_any(index, target)? {
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
        let Self { region, sums, .. } = self;
        let Some(mut piece) = region.take(index)? else { return Ok(false) };
        let range = piece.range();
        let sums = &mut sums[..range.len()];
        piece.sum_gradients(sums);
        if target.apply_shared(index, range, sums, piece.weights()).is_err() {
            region.poison();
            self.refused = true;
            return Ok(true);
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
        self.region.start_sum(&report.to_words(), &self.communicator.wait())
    }

    fn total(&mut self) -> Result<StepReport, CommError> {
        let mut sums = [0.0; WORDS];
        self.region.finish_sum(&mut sums, &self.communicator.wait())?;
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

    unsafe fn shared_weights(&mut self) -> Option<SharedWeights> {
        self.memory.take()
    }

    fn freeze(&mut self) -> bool {
        self.region.freeze();
        (0..self.buckets.len()).all(|index| self.region.is_idle(index))
    }

    fn has_one_copy(&self) -> bool {
        true
    }
}
