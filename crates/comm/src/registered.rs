//! A buffer of numbers that the transport knows beforehand, so that an all-reduce may work on it where it
//! lies.

use crate::transport::shm::Registered;

/// Numbers in memory that peers have mapped too, or in this process's own.
#[derive(Debug)]
pub struct RegisteredBuffer(Place);

#[derive(Debug)]
enum Place {
    /// Ordinary memory.
    Heap(Vec<f32>),
    /// Memory that all ranks of the host have mapped.
    Shared(Registered),
}

impl From<Vec<f32>> for RegisteredBuffer {
    /// Numbers that no transport knows.
    fn from(numbers: Vec<f32>) -> Self {
        Self(Place::Heap(numbers))
    }
}

impl From<Registered> for RegisteredBuffer {
    fn from(buffer: Registered) -> Self {
        Self(Place::Shared(buffer))
    }
}

impl RegisteredBuffer {
    /// This rank's numbers.
    ///
    /// # Panics
    /// After an all-reduce of them has failed where peers share memory: they may still be writing.
    pub fn as_slice(&self) -> &[f32] {
        match &self.0 {
            Place::Heap(numbers) => numbers,
            Place::Shared(buffer) => buffer.as_slice(),
        }
    }

    /// This rank's numbers, to be written.
    ///
    /// # Panics
    /// As [`RegisteredBuffer::as_slice`].
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Place::Heap(numbers) => numbers,
            Place::Shared(buffer) => buffer.as_mut_slice(),
        }
    }

    /// Whether peers add from it directly.
    pub const fn is_shared(&self) -> bool {
        matches!(self.0, Place::Shared(_))
    }

    pub(crate) fn shared_mut(&mut self) -> Option<&mut Registered> {
        match &mut self.0 {
            Place::Heap(_) => None,
            Place::Shared(buffer) => Some(buffer),
        }
    }
}
