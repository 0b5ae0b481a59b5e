//! Steps in which the host takes part: nodes are started in segments, gradients reach the host bucket by
//! bucket while the backward pass goes on, and sums or new weights come back the same way. Here is what a
//! step is made of; the order of the calls is the caller's.
//!
//! One rule orders everything: gradients, sums, parameters and states are touched by the main stream alone,
//! in the order of the calls. An update that is asked for after a segment runs after it, and a segment that
//! is started after an update reads the new weights. Copies run beside it, on a stream for each direction
//! (`hosted/bucket.rs`).
//!
//! A step without its parts, as a caller makes it:
//!
//! 1. [`Session::fill`] or another way to bring a batch, [`Session::begin_step`];
//! 2. forward: [`Session::start_nodes`] up to the first node that reads a bucket whose sums are late,
//!    [`Session::apply_sums`] with the rules of the step that they belong to, or [`Session::replace_weights`],
//!    and so on to the end of the pass; [`Session::start_tally`];
//! 3. backward: [`Session::start_nodes`] up to the node after which a bucket is final,
//!    [`Session::fetch_gradients`], and so on;
//! 4. whenever gradients have arrived ([`Session::gradients_ready`], [`Session::gradients`]), they are sent;
//!    whenever sums are there and no node that is still to be started reads the bucket's parameters
//!    ([`Bucket::apply_after`]), [`Session::apply_sums`]. Who looks at all gradients together calls
//!    [`Session::give_sums`] for each bucket and then [`Session::update_all`].
//!
//! [`Bucket::apply_after`]: crate::plan::Bucket::apply_after

mod bucket;
mod statistics;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bucket::{BucketStaging, Buffers, NUMBERS_STRIDE, Sequence};
use statistics::PinnedSums;

use super::update::{NUMBERS_BYTES, Stepping, VERDICT_BYTES};
use super::{DeviceGraph, DeviceOutput, GraphCompiler, OUTPUT_BYTES, Session, StepNumbers, output_in, write_numbers};
use crate::device::cuda::CudaError;
use crate::device::cuda::driver::{Event, Memory, Pinned, Stream};
use crate::device::cuda::graph::Recorded;
use crate::dtype::DType;

const HOSTED: &str = "a session with a training graph whose host takes part in steps";

/// What the host needs to take part.
#[derive(Debug)]
pub(super) struct HostExchange {
    /// What was started before, by its graph, its first node and the one behind its last.
    segments: BTreeMap<[usize; 3], Recorded>,
    buckets: Vec<BucketStaging>,
    /// The verdict on all sums together, and the step.
    update: Sequence,
    /// The numbers of that step, and whether they were copied.
    step_numbers: (Pinned, Event),
    tally: (Pinned, Event),
    numbers: PinnedSums,
    outgoing: Stream,
    incoming: Stream,
    staged: Memory,
    sums: Memory,
    staged_numbers: Memory,
    _verdicts: Memory,
    _scratch: Memory,
}

impl HostExchange {
    /// For the training graphs, which have the same buckets.
    fn new(compiler: &GraphCompiler<'_>, graphs: &[DeviceGraph]) -> Result<Self, CudaError> {
        let (context, plan) = (compiler.cuda.context(), &graphs.first().expect(HOSTED).plan);
        let (count, words) = (plan.buckets().len(), plan.parameters().length() * DType::F32.bytes());
        let take = |bytes: usize, what: &str| Memory::zeroed(context, bytes, what);
        let (staged, sums) = (take(words, "gradients in the host's order")?, take(words, "sums of gradients")?);
        let staged_numbers = take((count + 1) * NUMBERS_STRIDE, "the numbers of buckets")?;
        let verdicts = take(count * VERDICT_BYTES, "verdicts on buckets")?;
        let buffers = Buffers {
            staged: staged.address(),
            sums: sums.address(),
            staged_numbers: staged_numbers.address(),
            verdicts: verdicts.address(),
        };
        let buckets = (0..count).map(|number| BucketStaging::new(compiler, graphs, number, buffers));
        let mut buckets = buckets.collect::<Result<Vec<_>, _>>()?;
        let stepping = Stepping {
            elements: 0..plan.parameters().length(),
            gradients: sums.address(),
            numbers: staged_numbers.address() + (count * NUMBERS_STRIDE) as u64,
            loss: compiler.output.address(),
            verdict: compiler.output.address() + 24,
        };
        let mut update = Sequence::new(compiler.update_some(&stepping)?);
        // One after the other on the main stream, so that they share working memory.
        let mut sequences: Vec<&mut Sequence> = buckets.iter_mut().flat_map(BucketStaging::sequences).collect();
        sequences.push(&mut update);
        let working = sequences.iter().map(|sequence| sequence.scratch_bytes()).max().unwrap_or(0);
        let scratch = take(working, "working memory of updates")?;
        sequences.into_iter().try_for_each(|sequence| sequence.complete(scratch.address()))?;
        Ok(Self {
            segments: BTreeMap::new(),
            buckets,
            update,
            step_numbers: (Pinned::zeroed(context, NUMBERS_BYTES)?, Event::between(context)?),
            tally: (Pinned::zeroed(context, OUTPUT_BYTES)?, Event::between(context)?),
            numbers: PinnedSums::new(compiler.cuda, plan)?,
            outgoing: Stream::new(context)?,
            incoming: Stream::new(context)?,
            staged,
            sums,
            staged_numbers,
            _verdicts: verdicts,
            _scratch: scratch,
        })
    }

    /// Bytes that it holds on the GPU, without what is small.
    pub fn bytes(&self) -> usize {
        self.staged.bytes() + self.sums.bytes()
    }
}

impl Drop for HostExchange {
    fn drop(&mut self) {
        if self.outgoing.context().enter().is_ok() {
            // Copies end before the memory goes that they read and write.
            let _ = self.outgoing.wait();
            let _ = self.incoming.wait();
        }
    }
}

impl Session {
    /// Lets the host take part in steps from now on. Takes twice the size of the parameters on the GPU, and
    /// twice that of pinned memory of the host. A second call does nothing, and steps can still be made as
    /// one graph.
    ///
    /// # Errors
    /// When the memory is not there, or a bucket of the plan cannot be applied by itself.
    ///
    /// # Panics
    /// When the session has no training graph.
    pub fn host_exchange(&mut self) -> Result<(), CudaError> {
        if self.hosted.is_some() {
            return Ok(());
        }
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let Self { train, bases, slots, layers, numbers, output, .. } = &*self;
        let hosted = HostExchange::new(&GraphCompiler { cuda: &cuda, bases, slots, layers, numbers, output }, train)?;
        self.hosted = Some(Box::new(hosted));
        Ok(())
    }

    fn hosted(&mut self) -> &mut HostExchange {
        self.hosted.as_mut().expect(HOSTED)
    }

    /// Has the numbers of a step copied before what is started next: every step, and every part of one,
    /// begins with this.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn begin_step(&mut self, numbers: &StepNumbers) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        self.give(numbers)
    }

    /// Starts consecutive nodes of the training graph, without waiting for them. The same nodes are started
    /// call by call the first time, recorded the second time, and then replayed by one call. What is started
    /// next comes after all of them, those that run beside others included. A batch-norm among them has the
    /// statistics of this replica alone.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the host does not take part in steps.
    pub fn start_nodes(&mut self, nodes: Range<usize>) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let (active, program) = (self.active, &self.train.get(self.active).expect(HOSTED).program);
        if program.calls_of(&nodes) == 0 {
            return Ok(());
        }
        let segments = &mut self.hosted.as_mut().expect(HOSTED).segments;
        let (recorded, stream) = (segments.entry([active, nodes.start, nodes.end]).or_default(), cuda.stream());
        recorded.start(stream, true, || program.start_nodes(&cuda, stream, nodes.clone()))
    }

    /// Has the gradients of a bucket copied to the host, in its order, once what was started so far is done.
    /// What is started next may overwrite them where they stood.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the host does not take part in steps, or there is no such bucket.
    pub fn fetch_gradients(&mut self, bucket: usize) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let active = self.active;
        let HostExchange { buckets, outgoing, .. } = self.hosted();
        buckets[bucket].fetch(&cuda, outgoing, active)
    }

    /// Whether the gradients of a bucket that were fetched last have arrived.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When they were not fetched.
    pub fn gradients_ready(&self, bucket: usize) -> Result<bool, CudaError> {
        self.cuda.context().enter()?;
        self.hosted.as_ref().expect(HOSTED).buckets[bucket].has_arrived()
    }

    /// Waits for the gradients of a bucket that were fetched last: as the parameters lie in the flat layout,
    /// with zeros in the gaps. They are the caller's until the next are fetched. There is no deadline: who
    /// has one asks [`Session::gradients_ready`] first.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When they were not fetched.
    pub fn gradients(&mut self, bucket: usize) -> Result<&mut [f32], CudaError> {
        self.cuda.context().enter()?;
        self.hosted().buckets[bucket].gradients()
    }

    /// Pinned memory for sums or weights of a bucket, for those who write there and then call
    /// [`Session::apply_staged_sums`] or one of its kind. Waits until what was there before has left.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the host does not take part in steps, or there is no such bucket.
    pub fn staging_mut(&mut self, bucket: usize) -> Result<&mut [f32], CudaError> {
        self.cuda.context().enter()?;
        self.hosted().buckets[bucket].incoming()
    }

    /// Makes the optimizer's step of a bucket with sums in the host's order, after everything that was
    /// started so far. The rules are those of the step that the sums belong to, which may be an earlier one
    /// than has begun; gradients are not clipped. Sums that are not all numbers change nothing, and
    /// [`Session::spoiled_bucket`] tells.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the sums are not as many as the bucket's elements, or as [`Session::staging_mut`].
    pub fn apply_sums(&mut self, bucket: usize, sums: &[f32], numbers: &StepNumbers) -> Result<(), CudaError> {
        self.staging_mut(bucket)?.copy_from_slice(sums);
        self.apply_staged_sums(bucket, numbers)
    }

    /// As [`Session::apply_sums`] with what was written to [`Session::staging_mut`].
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// As [`Session::staging_mut`].
    pub fn apply_staged_sums(&mut self, bucket: usize, numbers: &StepNumbers) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let HostExchange { buckets, incoming, .. } = self.hosted();
        buckets[bucket].apply_sums(&cuda, incoming, numbers)
    }

    /// Replaces the weights of a bucket, after everything that was started so far.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the weights are not as many as the bucket's elements, or as [`Session::staging_mut`].
    pub fn replace_weights(&mut self, bucket: usize, weights: &[f32]) -> Result<(), CudaError> {
        self.staging_mut(bucket)?.copy_from_slice(weights);
        self.replace_staged_weights(bucket)
    }

    /// As [`Session::replace_weights`] with what was written to [`Session::staging_mut`].
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// As [`Session::staging_mut`].
    pub fn replace_staged_weights(&mut self, bucket: usize) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let HostExchange { buckets, incoming, .. } = self.hosted();
        buckets[bucket].replace_weights(&cuda, incoming)
    }

    /// Gives the sums of a bucket, in the host's order, for [`Session::update_all`].
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// As [`Session::apply_sums`].
    pub fn give_sums(&mut self, bucket: usize, sums: &[f32]) -> Result<(), CudaError> {
        self.staging_mut(bucket)?.copy_from_slice(sums);
        self.give_staged_sums(bucket)
    }

    /// As [`Session::give_sums`] with what was written to [`Session::staging_mut`].
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// As [`Session::staging_mut`].
    pub fn give_staged_sums(&mut self, bucket: usize) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let HostExchange { buckets, incoming, .. } = self.hosted();
        buckets[bucket].give_sums(&cuda, incoming)
    }

    /// Makes the optimizer's step with the sums of all buckets, which are scaled down to the norm of
    /// `numbers`. A loss that is no number, as [`Session::start_tally`] found it last, or sums that are none,
    /// change nothing: [`Session::finish`] tells, and their norm.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the host does not take part in steps.
    pub fn update_all(&mut self, numbers: &StepNumbers) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let (rows, stream) = (self.rows, cuda.stream());
        let hosted = self.hosted();
        let (pinned, copied) = &mut hosted.step_numbers;
        copied.wait()?;
        write_numbers(pinned.bytes_mut(), numbers, rows);
        let address = hosted.staged_numbers.address() + (hosted.buckets.len() * NUMBERS_STRIDE) as u64;
        stream.upload_later(address, pinned, NUMBERS_BYTES)?;
        copied.record(stream)?;
        hosted.update.start(&cuda)?;
        stream.download_later(self.output.address(), &mut self.results, OUTPUT_BYTES)
    }

    /// The first bucket whose sums were not all numbers and were therefore not applied, at any time; of steps
    /// that were made, which after [`Session::settle`] are all.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the host does not take part in steps.
    pub fn spoiled_bucket(&mut self) -> Result<Option<usize>, CudaError> {
        self.cuda.context().enter()?;
        for (number, bucket) in self.hosted().buckets.iter_mut().enumerate() {
            if bucket.is_spoiled()? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Has the answers of the forward pass, which was started, counted and copied to the host.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the host does not take part in steps.
    pub fn start_tally(&mut self) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let stream = cuda.stream();
        self.training().tally.start(&cuda, stream)?;
        let address = self.output.address();
        let (pinned, counted) = &mut self.hosted().tally;
        stream.download_later(address, pinned, OUTPUT_BYTES)?;
        counted.record(stream)
    }

    /// Waits for the tally that was started last, and for nothing that was started after it. Of the gradients
    /// nothing is known yet.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the host does not take part in steps.
    pub fn tally(&mut self) -> Result<DeviceOutput, CudaError> {
        self.cuda.context().enter()?;
        let (pinned, counted) = &mut self.hosted().tally;
        counted.wait()?;
        let output = output_in(pinned.bytes_mut());
        Ok(DeviceOutput { loss_is_finite: output.loss.is_finite(), gradients_are_finite: true, norm: 0.0, ..output })
    }

    /// Waits until everything that was started is done, copies included.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn settle(&mut self) -> Result<(), CudaError> {
        self.cuda.context().enter()?;
        self.cuda.stream().wait()?;
        match &self.hosted {
            Some(hosted) => hosted.outgoing.wait().and_then(|()| hosted.incoming.wait()),
            None => Ok(()),
        }
    }
}
