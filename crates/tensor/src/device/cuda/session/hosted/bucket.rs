//! A bucket's way to the host and back: pinned memory on one side, a buffer in the host's order on the other,
//! and events between the streams.
//!
//! The main stream alone touches gradients, sums and parameters. It fills and reads the staging buffer, and
//! the copy streams, one for each direction, move it. Every use of the buffer follows the one before:
//!
//! | use | stream | comes after | is recorded as |
//! |---|---|---|---|
//! | gradients are put into the host's order | main | `arrived`, main's own last use | `staged` |
//! | they are copied to the host | outgoing | `staged` | `arrived` |
//! | sums or weights are copied from the host | incoming | `arrived`, `taken` | `uploaded` |
//! | they are put into the device's order, and used | main | `uploaded` | `taken` |
//!
//! Cost for a bucket of n bytes and a step: 2n over the bus, and 4n of GPU memory traffic besides the
//! optimizer's.

use std::ops::Range;

use crate::device::cuda::driver::{Event, Pinned, Stream};
use crate::device::cuda::graph::Recorded;
use crate::device::cuda::program::{Address, Builder, Call, Program};
use crate::device::cuda::session::update::{NUMBERS_BYTES, Stepping, VERDICT_BYTES};
use crate::device::cuda::session::{DeviceGraph, GraphCompiler, StepNumbers, write_numbers};
use crate::device::cuda::{Cuda, CudaError, lower};
use crate::dtype::DType;
use crate::plan::{ALIGNMENT_BYTES, Bucket, Place, Plan};

/// Calls from which on a sequence is recorded: fewer are started as fast one by one.
const RECORDED_FROM: usize = 4;

/// Calls that are started again and again.
#[derive(Debug)]
pub(super) struct Sequence {
    program: Program,
    recorded: Recorded,
}

impl Sequence {
    pub fn new(program: Program) -> Self {
        Self { program, recorded: Recorded::default() }
    }

    /// Bytes of working memory that it needs.
    pub fn scratch_bytes(&self) -> usize {
        self.program.scratch_bytes()
    }

    /// Completes all addresses: the working memory starts here.
    pub fn complete(&mut self, scratch: u64) -> Result<(), CudaError> {
        self.program.complete(scratch)
    }

    /// Starts it on the main stream.
    pub fn start(&mut self, cuda: &Cuda) -> Result<(), CudaError> {
        let (program, stream) = (&self.program, cuda.stream());
        if program.calls() < RECORDED_FROM {
            return program.start(cuda, stream);
        }
        self.recorded.start(stream, true, || program.start(cuda, stream))
    }
}

/// Addresses on the GPU that buckets share, each of a buffer as long as the parameters, or with one entry for
/// each bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers {
    /// What travels, in the host's order.
    pub staged: u64,
    /// Sums of gradients, in the device's order.
    pub sums: u64,
    /// The numbers of the step that a bucket's sums belong to.
    pub staged_numbers: u64,
    /// Verdicts on sums.
    pub verdicts: u64,
}

/// Bytes between two buckets' numbers.
pub(super) const NUMBERS_STRIDE: usize = NUMBERS_BYTES.next_multiple_of(64);

/// A bucket on its way.
#[derive(Debug)]
pub(super) struct BucketStaging {
    length: usize,
    /// Where its part of the staging buffer begins, its numbers of a step, and its verdict.
    address: u64,
    numbers: u64,
    verdict: u64,
    /// Puts gradients into the staging buffer, by training graph: each has them in its own place.
    from_gradients: Vec<Sequence>,
    /// Makes sums of what is in the staging buffer.
    to_sums: Sequence,
    /// Makes the optimizer's step with the sums.
    update: Sequence,
    /// Makes parameters of what is in the staging buffer, rounded ones too.
    to_parameters: Sequence,
    gradients: Pinned,
    /// Sums or weights, and the numbers of a step behind them.
    incoming: Pinned,
    output: Pinned,
    staged: Event,
    arrived: Event,
    uploaded: Event,
    taken: Event,
    /// Whether gradients were fetched.
    is_fetched: bool,
    /// Whether sums were not all numbers, at any time.
    is_spoiled: bool,
}

impl BucketStaging {
    /// Bucket `number` of all graphs, whose arenas begin at `compiler`'s.
    pub fn new(
        compiler: &GraphCompiler<'_>,
        graphs: &[DeviceGraph],
        number: usize,
        buffers: Buffers,
    ) -> Result<Self, CudaError> {
        let plan = &graphs[0].plan;
        let (bucket, context) = (&plan.buckets()[number], compiler.cuda.context());
        let (range, length) = (bucket.elements.clone(), bucket.elements.len());
        let in_lines = range.start.is_multiple_of(ALIGNMENT_BYTES / DType::F32.bytes());
        if !in_lines || !compiler.layers.can_update(&range) {
            return Err(CudaError(format!("bucket {number} of gradients cannot be applied by itself")));
        }
        let at = |base: u64| base + (range.start * DType::F32.bytes()) as u64;
        let (address, bytes) = (at(buffers.staged), length * DType::F32.bytes());
        let numbers = buffers.staged_numbers + (number * NUMBERS_STRIDE) as u64;
        let verdict = buffers.verdicts + (number * VERDICT_BYTES) as u64;
        let reordered = |from: u64, to: u64, to_host: bool| {
            Program::of_calls(compiler.cuda, |builder| {
                reorder(builder, (plan, bucket, &compiler.bases.channels_last), [from, to], to_host)
            })
        };
        let from_gradients = graphs.iter().map(|graph| {
            let program = match graph.plan.buckets()[number].place {
                Place::Arena(offset) => Program::of_calls(compiler.cuda, |builder| {
                    gather(builder, plan, bucket, [graph.arena + offset as u64, address]);
                    Ok(())
                })?,
                _ => reordered(at(graph.gradients), address, true)?,
            };
            Ok(Sequence::new(program))
        });
        let from_gradients = from_gradients.collect::<Result<Vec<_>, CudaError>>()?;
        let stepping = Stepping { elements: range.clone(), gradients: buffers.sums, numbers, loss: 0, verdict };
        let to_parameters = Program::of_calls(compiler.cuda, |builder| {
            let (full, rounded) = (at(compiler.bases.parameters), compiler.bases.rounded + (range.start * 2) as u64);
            reorder(builder, (plan, bucket, &compiler.bases.channels_last), [address, full], false)?;
            let [full, rounded] = [full, rounded].map(Address::Fixed);
            lower::cast(builder, full, DType::F32, rounded, DType::Bf16, length)
        })?;
        Ok(Self {
            length,
            address,
            numbers,
            verdict,
            from_gradients,
            to_sums: Sequence::new(reordered(address, at(buffers.sums), false)?),
            update: Sequence::new(compiler.update_some(&stepping)?),
            to_parameters: Sequence::new(to_parameters),
            gradients: Pinned::zeroed(context, bytes)?,
            incoming: Pinned::zeroed(context, bytes + NUMBERS_BYTES)?,
            output: Pinned::zeroed(context, VERDICT_BYTES)?,
            staged: Event::between(context)?,
            arrived: Event::between(context)?,
            uploaded: Event::between(context)?,
            taken: Event::between(context)?,
            is_fetched: false,
            is_spoiled: false,
        })
    }

    pub fn sequences(&mut self) -> impl Iterator<Item = &mut Sequence> {
        let others = [&mut self.to_sums, &mut self.update, &mut self.to_parameters];
        self.from_gradients.iter_mut().chain(others)
    }

    /// Has its gradients of a graph copied to the host.
    pub fn fetch(&mut self, cuda: &Cuda, outgoing: &Stream, graph: usize) -> Result<(), CudaError> {
        let main = cuda.stream();
        main.wait_for(&self.arrived)?;
        self.from_gradients[graph].start(cuda)?;
        self.staged.record(main)?;
        outgoing.wait_for(&self.staged)?;
        outgoing.download_later(self.address, &mut self.gradients, self.length * DType::F32.bytes())?;
        self.arrived.record(outgoing)?;
        self.is_fetched = true;
        Ok(())
    }

    /// Whether they have arrived.
    pub fn has_arrived(&self) -> Result<bool, CudaError> {
        assert!(self.is_fetched, "gradients were fetched");
        self.arrived.has_happened()
    }

    /// Waits for them.
    pub fn gradients(&mut self) -> Result<&mut [f32], CudaError> {
        assert!(self.is_fetched, "gradients were fetched");
        self.arrived.wait()?;
        Ok(self.gradients.floats_mut(self.length))
    }

    /// Where the host puts sums or weights; what was there before has left.
    pub fn incoming(&mut self) -> Result<&mut [f32], CudaError> {
        self.uploaded.wait()?;
        Ok(self.incoming.floats_mut(self.length))
    }

    /// Has them copied, with the numbers of a step if there are some; the main stream goes on when they are
    /// there.
    fn upload(&mut self, cuda: &Cuda, incoming: &Stream, step: Option<&StepNumbers>) -> Result<(), CudaError> {
        self.uploaded.wait()?;
        let bytes = self.length * DType::F32.bytes();
        incoming.wait_for(&self.arrived)?;
        incoming.wait_for(&self.taken)?;
        if let Some(numbers) = step {
            // Who clips looks at all buckets together.
            let numbers = StepNumbers { norm_max: f32::INFINITY, ..*numbers };
            write_numbers(&mut self.incoming.bytes_mut()[bytes..bytes + NUMBERS_BYTES], &numbers, 0);
            incoming.upload_part_later(self.numbers, &self.incoming, bytes..bytes + NUMBERS_BYTES)?;
        }
        incoming.upload_part_later(self.address, &self.incoming, 0..bytes)?;
        self.uploaded.record(incoming)?;
        cuda.stream().wait_for(&self.uploaded)
    }

    /// Makes sums of what the host has put there.
    pub fn give_sums(&mut self, cuda: &Cuda, incoming: &Stream) -> Result<(), CudaError> {
        self.upload(cuda, incoming, None)?;
        self.to_sums.start(cuda)?;
        self.taken.record(cuda.stream())
    }

    /// The same, and the optimizer's step with them.
    pub fn apply_sums(&mut self, cuda: &Cuda, incoming: &Stream, numbers: &StepNumbers) -> Result<(), CudaError> {
        // The step before has long been made: its verdict is kept before the next one takes its place.
        self.taken.wait()?;
        self.keep_verdict();
        self.upload(cuda, incoming, Some(numbers))?;
        self.to_sums.start(cuda)?;
        self.update.start(cuda)?;
        cuda.stream().download_later(self.verdict, &mut self.output, VERDICT_BYTES)?;
        self.taken.record(cuda.stream())
    }

    /// Makes parameters of what the host has put there.
    pub fn replace_weights(&mut self, cuda: &Cuda, incoming: &Stream) -> Result<(), CudaError> {
        self.upload(cuda, incoming, None)?;
        self.to_parameters.start(cuda)?;
        self.taken.record(cuda.stream())
    }

    /// Whether sums were not all numbers, as far as that is known.
    pub fn is_spoiled(&mut self) -> Result<bool, CudaError> {
        if self.taken.has_happened()? {
            self.keep_verdict();
        }
        Ok(self.is_spoiled)
    }

    /// Reads the verdict on the last sums, which were used: nobody writes it now.
    fn keep_verdict(&mut self) {
        let spoiled = &self.output.bytes_mut()[..size_of::<u32>()];
        self.is_spoiled |= spoiled.iter().any(|byte| *byte != 0);
    }
}

/// Copies a bucket, or transposes what stands in another order on the GPU. Gaps that are not copied stay
/// zeros.
fn reorder(
    builder: &mut Builder<'_>,
    (plan, bucket, channels_last): (&Plan, &Bucket, &[bool]),
    bases: [u64; 2],
    to_host: bool,
) -> Result<(), CudaError> {
    let Range { start, end } = bucket.elements;
    let at = |element: usize| bases.map(|base| Address::Fixed(base + ((element - start) * DType::F32.bytes()) as u64));
    let copy = |builder: &mut Builder<'_>, run: Range<usize>| {
        let [from, to] = at(run.start);
        if !run.is_empty() {
            builder.call(Call::Copy(to, from, run.len() * DType::F32.bytes()));
        }
    };
    let mut copied = start;
    for index in bucket.parameters.clone().filter(|&index| channels_last[index]) {
        let range = plan.parameters().range(index);
        if range.start < start || range.end > end {
            return Err(CudaError("a convolution's weights do not travel in parts".into()));
        }
        copy(builder, copied..range.start);
        let outputs = plan.graph().shape(plan.graph().parameters()[index]).last();
        let inner = range.len() / outputs.max(1);
        let shape = if to_host { [outputs, inner] } else { [inner, outputs] };
        let [from, to] = at(range.start);
        lower::permute(builder, from, &shape, &[1, 0], to, DType::F32.bytes())?;
        copied = range.end.next_multiple_of(ALIGNMENT_BYTES / DType::F32.bytes());
    }
    if copied < end {
        copy(builder, copied..end);
    }
    Ok(())
}

/// Copies a bucket that stands in the arena in the host's order, where nobody sees to it that gaps are zeros.
fn gather(builder: &mut Builder<'_>, plan: &Plan, bucket: &Bucket, [from, to]: [u64; 2]) {
    for index in bucket.parameters.clone() {
        let range = plan.parameters().range(index);
        let (first, end) = (range.start.max(bucket.elements.start), range.end.min(bucket.elements.end));
        let [from, to] =
            [from, to].map(|base| Address::Fixed(base).plus((first - bucket.elements.start) * DType::F32.bytes()));
        builder.call(Call::Copy(to, from, (end - first) * DType::F32.bytes()));
    }
}
