//! Working memory of the kernels: packed panels and partial sums.
//!
//! It grows to the largest kernel of a plan during the first step and is then only reused: a step allocates nothing.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use super::moments::Moments;
use super::pool::SendPointer;
use crate::buffer::Buffer;
use crate::plan::ALIGNMENT_BYTES;

/// Floats of a cache line; every worker's buffer starts on one.
const LINE: usize = ALIGNMENT_BYTES / size_of::<f32>();

/// Buffers that keep their size between kernels. Their contents are never meaningful to the next kernel.
#[derive(Debug, Default)]
pub struct Scratch {
    shared: Buffer,
    partial: Buffer,
    workers: Buffer,
    /// Values per channel, and an LSTM's states.
    pub(crate) floats: Vec<f32>,
    /// Sums per channel or row.
    pub(crate) sums: Vec<f64>,
    /// Statistics of a convolution's result.
    pub(crate) moments: Moments,
    /// Numbers that are added up with others.
    pub(crate) numbers: Vec<f32>,
}

/// How many floats a kernel needs of each kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Need {
    /// Read by all workers.
    pub shared: usize,
    /// Partial sums, one part per task.
    pub partial: usize,
    /// For each worker its own.
    pub worker: usize,
}

/// The buffers of one kernel call.
#[derive(Debug)]
pub(crate) struct Buffers<'a> {
    pub shared: &'a mut [f32],
    pub partial: &'a mut [f32],
    pub workers: Workers<'a>,
}

/// One buffer per worker.
#[derive(Debug)]
pub(crate) struct Workers<'a> {
    base: SendPointer<f32>,
    length: usize,
    count: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

impl Workers<'_> {
    /// The buffer of `worker`.
    ///
    /// # Safety
    /// No other buffer of the same worker may be alive: [`super::pool::Pool::run`] gives each worker one task at a time.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn buffer(&self, worker: usize) -> &mut [f32] {
        assert!(worker < self.count);
        // SAFETY: the region holds `count` buffers of `length`; different workers' do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.base.get().add(worker * self.length), self.length) }
    }
}

impl Scratch {
    /// No memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let floats =
            self.shared.len() + self.partial.len() + self.workers.len() + self.floats.len() + self.numbers.len();
        floats * size_of::<f32>() + self.sums.len() * size_of::<f64>() + self.moments.bytes()
    }

    /// Buffers of at least the sizes asked for, each starting on a cache line.
    pub(crate) fn take(&mut self, workers: usize, need: Need) -> Buffers<'_> {
        let length = need.worker.next_multiple_of(LINE);
        let base = SendPointer(floats(&mut self.workers, length * workers).as_mut_ptr());
        Buffers {
            shared: floats(&mut self.shared, need.shared),
            partial: floats(&mut self.partial, need.partial),
            workers: Workers { base, length, count: workers, borrow: PhantomData },
        }
    }
}

fn floats(buffer: &mut Buffer, count: usize) -> &mut [f32] {
    if buffer.len() < count {
        *buffer = Buffer::zeroed_for("working memory of a kernel", count);
    }
    &mut buffer[..count]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_on_cache_lines_and_are_kept() {
        let mut scratch = Scratch::new();
        let need = Need { shared: 5, partial: 17, worker: 33 };
        let buffers = scratch.take(2, need);
        assert_eq!((buffers.shared.len(), buffers.partial.len()), (5, 17));
        // SAFETY: one buffer per worker.
        let second = unsafe { buffers.workers.buffer(1) };
        assert_eq!((second.len(), second.as_ptr() as usize % 64), (48, 0));
        let bytes = scratch.bytes();
        scratch.take(2, need);
        assert_eq!(scratch.bytes(), bytes);
    }
}
