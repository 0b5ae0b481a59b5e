//! A batch that is computed in parts, one after the other: their gradients are added up, and the last part makes the step. Among several
//! GPUs, each adds up its own parts, and the last part's backward pass sends the sums.

use std::ops::Range;
use std::sync::Arc;

use super::{Exchange, OUTPUT_BYTES, Session, StepNumbers};
use crate::device::cuda::driver::{Function, Memory, Stream};
use crate::device::cuda::graph::Recorded;
use crate::device::cuda::program::BLOCK;
use crate::device::cuda::{Cuda, CudaError};

/// The sum of the gradients so far, and what is recorded of the parts.
#[derive(Debug)]
pub(super) struct Sums {
    memory: Memory,
    add: Function,
    /// By training graph: a part that is not the last, and the last one, with the step.
    recorded: Vec<[Recorded; 2]>,
}

/// What becomes of the gradients of a batch's part, where the host takes part in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// They begin the sum.
    First,
    /// They are added to it.
    Between,
    /// The sum is added to those of this bucket, which are then the batch's.
    Last {
        /// Its number in the plan.
        bucket: usize,
    },
}

/// Which part of a batch, and what becomes of its gradients.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    /// They begin the sum.
    First,
    /// They are added to it.
    Between,
    /// The sum is added to them.
    Last,
}

impl Sums {
    fn new(cuda: &Cuda, elements: usize, graphs: usize) -> Result<Self, CudaError> {
        let memory = Memory::zeroed(cuda.context(), elements * size_of::<f32>(), "the sum of gradients")?;
        let recorded = (0..graphs).map(|_| <[Recorded; 2]>::default()).collect();
        Ok(Self { memory, add: cuda.function("add_gradients")?, recorded })
    }

    /// Bytes that it holds on the GPU.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }
}

/// Has a range of the gradients and of their sum added up.
fn add(
    stream: &Stream,
    add: Function,
    [sums, gradients]: [u64; 2],
    range: Range<usize>,
    which: Which,
) -> Result<(), CudaError> {
    let [sums, gradients] = [sums, gradients].map(|address| address + (range.start * size_of::<f32>()) as u64);
    let (first, last) = (u64::from(which == Which::First), u64::from(which == Which::Last));
    let blocks = range.len().div_ceil(BLOCK as usize).clamp(1, 1 << 16) as u32;
    stream.launch(add, [blocks, 1, 1], BLOCK, &[sums, gradients, range.len() as u64, first, last])
}

impl Session {
    /// Adds up the gradients of a batch's parts, where the host takes part in steps: after the backward pass of
    /// every part but the last, and in the last one's before a bucket is fetched.
    ///
    /// # Errors
    /// When the GPU does not answer, or has no room for the sums.
    ///
    /// # Panics
    /// When the session has no training graph, or one whose gradients are applied in the backward pass.
    pub fn accumulate(&mut self, part: Part) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let (plan, gradients) = (&self.training().plan, self.training().gradients);
        assert!(plan.stores_gradients(), "gradients of parts stand still until they are added up");
        let elements = plan.parameters().length();
        if self.sums.is_none() {
            self.sums = Some(Sums::new(&cuda, elements, self.train.len())?);
        }
        let (plan, sums) = (&self.training().plan, self.sums.as_ref().expect("taken above"));
        let (range, which) = match part {
            Part::First => (0..elements, Which::First),
            Part::Between => (0..elements, Which::Between),
            Part::Last { bucket } => (plan.buckets()[bucket].elements.clone(), Which::Last),
        };
        add(cuda.stream(), sums.add, [sums.memory.address(), gradients], range, which)
    }

    /// Starts part `part` of `parts` on the samples that were filled in last, without waiting for it. The last one makes the step.
    ///
    /// # Errors
    /// When the GPU does not answer, or has no room for the sums.
    ///
    /// # Panics
    /// When the session has no training graph, or there is only one part.
    pub fn start_part(&mut self, numbers: &StepNumbers, (part, parts): (usize, usize)) -> Result<(), CudaError> {
        assert!(part < parts && parts > 1, "part {part} of {parts}");
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        self.give(numbers)?;
        let (elements, stream) = (self.training().plan.parameters().length(), cuda.stream());
        if self.sums.is_none() {
            self.sums = Some(Sums::new(&cuda, elements, self.train.len())?);
        }
        let (active, graph) = (self.active, &self.train[self.active]);
        let sums = self.sums.as_mut().expect("taken above");
        let (function, addresses) = (sums.add, [sums.memory.address(), graph.gradients]);
        let [recorded_part, recorded_last] = &mut sums.recorded[active];
        let add = |range, which| add(stream, function, addresses, range, which);
        if part + 1 < parts {
            let calls = || graph.program.start(&cuda, stream).and_then(|()| graph.tally.start(&cuda, stream));
            recorded_part.start(stream, true, calls)?;
            add(0..elements, if part == 0 { Which::First } else { Which::Between })?;
        } else {
            let exchange = self.exchange.as_ref();
            let work = || {
                match exchange {
                    Some(exchange) => {
                        exchange.start((&graph.program, active), &cuda, stream, |range| add(range, Which::Last))?;
                    }
                    None => graph.program.start(&cuda, stream).and_then(|()| add(0..elements, Which::Last))?,
                }
                graph.tally.start(&cuda, stream)?;
                graph.update.iter().try_for_each(|update| update.start(&cuda, stream))
            };
            let calls = || exchange.map(Exchange::calls).transpose();
            recorded_last.start_with(stream, exchange.is_none(), work, calls)?;
        }
        stream.download_later(self.output.address(), &mut self.results, OUTPUT_BYTES)
    }
}
