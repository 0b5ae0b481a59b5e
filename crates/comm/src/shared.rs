//! A buffer of numbers that may lie where peers can reach it.

use crate::transport::shm::Mapped;

/// Numbers in memory that peers have mapped too, or in this process's own.
#[derive(Debug)]
pub enum SharedBuffer {
    /// Ordinary memory.
    Heap(Vec<f32>),
    /// Memory that all ranks of the host have mapped.
    Mapped(Mapped),
}

impl SharedBuffer {
    /// This rank's numbers.
    pub fn as_slice(&self) -> &[f32] {
        match self {
            Self::Heap(numbers) => numbers,
            Self::Mapped(mapped) => mapped.own(),
        }
    }

    /// This rank's numbers, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        match self {
            Self::Heap(numbers) => numbers,
            Self::Mapped(mapped) => mapped.own_mut(),
        }
    }

    pub(crate) fn mapped_mut(&mut self) -> Option<&mut Mapped> {
        match self {
            Self::Heap(_) => None,
            Self::Mapped(mapped) => Some(mapped),
        }
    }
}
