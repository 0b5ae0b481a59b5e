//! A batch that is computed in parts, one after the other: their gradients are added up, and the last part makes the step.

use std::sync::Arc;

use super::{FOUND_BYTES, Moment, Session};
use crate::device::cuda::CudaError;
use crate::device::cuda::driver::Memory;
use crate::device::cuda::graph::Captured;
use crate::device::cuda::program::BLOCK;

/// The sum of the gradients so far, and the recorded graph without its step.
#[derive(Debug)]
pub(super) struct Sums {
    memory: Memory,
    captured: Option<Captured>,
    runs: u64,
}

impl Sums {
    /// Bytes that it holds on the GPU.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }
}

impl Session {
    /// Starts part `part` of `parts` on the samples that were filled in last, without waiting for it. The last one makes the step.
    ///
    /// # Errors
    /// When the GPU does not answer, or has no room for the sums.
    ///
    /// # Panics
    /// When the session has no training graph, or adds up gradients with other GPUs.
    pub fn start_part(&mut self, moment: &Moment, (part, parts): (usize, usize)) -> Result<(), CudaError> {
        assert!(self.exchange.is_none(), "parts are for one GPU");
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        self.give(moment)?;
        let (half, stream) = (self.train.as_ref().expect("a training graph"), cuda.stream());
        let elements = half.plan.parameters().length();
        if self.sums.is_none() {
            let memory = Memory::zeroed(cuda.context(), elements * size_of::<f32>(), "the sum of gradients")?;
            self.sums = Some(Sums { memory, captured: None, runs: 0 });
        }
        let sums = self.sums.as_mut().expect("taken above");
        let calls = || half.program.start(&cuda, stream).and_then(|()| half.tally.start(&cuda, stream));
        sums.runs += 1;
        if sums.runs == 1 {
            calls()?;
        } else {
            if sums.captured.is_none() {
                sums.captured = Some(stream.capture(true, calls)?);
            }
            stream.replay(sums.captured.as_ref().expect("captured above"))?;
        }
        let (first, last) = (u64::from(part == 0), u64::from(part + 1 == parts));
        let arguments = [sums.memory.address(), self.gradients.address(), elements as u64, first, last];
        let blocks = elements.div_ceil(BLOCK as usize).clamp(1, 1 << 16) as u32;
        stream.launch(cuda.function("add_gradients")?, [blocks, 1, 1], BLOCK, &arguments)?;
        if last == 1 {
            half.update.iter().try_for_each(|update| update.start(&cuda, stream))?;
        }
        stream.download_later(self.found.address(), &mut self.results, FOUND_BYTES)
    }
}
