//! The devices that run a plan. A closed enum: a new device is a new file and a line in `execute.rs`.

pub mod cpu;
pub mod cuda;
pub mod null;

use std::sync::Arc;

/// Where a plan runs. Cheap to clone; clones share threads.
#[derive(Clone, Debug)]
pub enum Device {
    /// This machine's cores.
    Cpu(Arc<cpu::Cpu>),
    /// An NVIDIA GPU.
    Cuda(Arc<cuda::Cuda>),
    /// Computes nothing and takes the time that a cost model says.
    Null(null::CostModel),
}

impl Device {
    /// The CPU with so many threads.
    pub fn cpu(threads: usize) -> Self {
        Self::Cpu(Arc::new(cpu::Cpu::new(threads)))
    }

    /// A device that only takes time.
    ///
    /// # Panics
    /// When no time follows from the model.
    pub fn null(model: null::CostModel) -> Self {
        assert!(model.is_possible(), "a cost model has speeds above zero: {model:?}");
        Self::Null(model)
    }
}
