//! Several micro-batches alive at once: each has a slot, with inputs, activations and gradients of activations of its own. On the CPU.

use super::Executor;
use crate::buffer::Buffer;
use crate::device::cuda::CudaError;
use crate::device::{Device, cpu};

/// The memory of one micro-batch: an arena for a plan.
#[derive(Debug)]
pub struct Slot {
    arena: Buffer,
}

impl Executor {
    /// Takes the memory of one more micro-batch. An executor that only runs with slots needs none of its own
    /// ([`Executor::without_arena`]).
    ///
    /// # Panics
    /// As [`Buffer::zeroed_for`], and on a GPU, which has no slots.
    pub fn new_slot(&self) -> Slot {
        assert!(!matches!(self.device, Device::Cuda(_)), "a GPU has no slots");
        let mut arena = Buffer::zeroed_for("the arena of a micro-batch", self.arena_words());
        if let Device::Cpu(cpu) = &self.device {
            cpu::touch(cpu, &self.plan, &mut arena);
        }
        Slot { arena }
    }

    /// Runs `body` with a slot in place of this executor's arena: inputs are written to it, nodes run in it, and outputs are read from it.
    /// The store is the same for all slots: running statistics follow the order of the forward passes, and gradients of parameters are
    /// those of the last backward pass.
    ///
    /// # Panics
    /// When the slot was made for another plan.
    pub fn with_slot<T>(&mut self, slot: &mut Slot, body: impl FnOnce(&mut Self) -> T) -> T {
        assert_eq!(slot.arena.len(), self.arena_words(), "the slot was made for another plan");
        std::mem::swap(&mut self.arena, &mut slot.arena);
        let result = body(self);
        std::mem::swap(&mut self.arena, &mut slot.arena);
        result
    }

    /// On a GPU: has the activations of this micro-batch at hand from now on, and keeps those that were. Elsewhere micro-batches have
    /// memory of their own ([`Slot`]).
    ///
    /// # Errors
    /// When the GPU has no memory for it, or does not answer.
    pub fn switch_slot(&mut self, slot: usize) -> Result<(), CudaError> {
        self.bind()?;
        self.bound.as_mut().map_or(Ok(()), |bound| bound.switch(slot))
    }

    /// On a GPU: parameters have changed, and will not until this is said again; they are brought there once.
    pub fn hold_parameters(&mut self) {
        if let Some(bound) = &mut self.bound {
            bound.hold();
        }
    }

    /// Whether it computes on a GPU.
    pub const fn is_on_gpu(&self) -> bool {
        matches!(self.device, Device::Cuda(_))
    }
}
