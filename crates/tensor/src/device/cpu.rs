//! The CPU device: compute threads, an instruction set and working memory, and the dispatch from operations to kernels.

pub mod batch_norm;
#[cfg(test)]
mod check;
pub mod context;
pub mod conv;
mod dispatch;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
pub mod isa;
pub mod layer_norm;
pub mod layout;
pub mod lstm;
mod memory;
pub mod pool;
pub mod pooling;
pub mod reduce;
pub mod scratch;
pub(crate) mod simd;
pub mod softmax;
mod special;
pub mod update;
mod vectorize;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use isa::Isa;
use pool::Pool;
use scratch::Scratch;

use crate::buffer::Buffer;
use crate::execute::{Pass, Progress, Turn};
use crate::plan::{Due, Plan};
use crate::store::Store;

/// This machine's cores, as one device.
#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    isa: Isa,
    work: Mutex<Work>,
}

/// Working memory of the kernels: grows during the first step, then stays.
#[derive(Debug, Default)]
struct Work {
    scratch: Scratch,
    floats: Vec<f32>,
    sums: Vec<f64>,
}

impl Cpu {
    /// A device with so many compute threads and the best instructions this machine has.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::best())
    }

    /// A device whose convolutions and matrix products are held to an instruction set, to compare the paths. The other
    /// kernels take the widest vectors of the machine in any case: they give the same bits at every width, which their
    /// own tests hold.
    ///
    /// # Panics
    /// When the machine does not have it.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        assert!(isa.available(), "this machine does not have {isa:?}");
        Self { pool: Pool::new(threads), isa, work: Mutex::default() }
    }

    /// The compute threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

/// Runs some of the plan's nodes in order; after each, and when a bucket's turn has come, `watch` says whether to go on.
pub(crate) fn run(
    cpu: &Cpu,
    (plan, nodes): (&Plan, Range<usize>),
    arena: &mut Buffer,
    store: &mut Store,
    pass: Pass,
    watch: &mut dyn FnMut(Progress<'_>) -> bool,
) {
    let mut work = cpu.work.lock().unwrap_or_else(PoisonError::into_inner);
    let mut memory = memory::Memory::new(plan, arena, store);
    let mut dues = plan.dues_from(nodes.start).iter().peekable();
    for index in nodes {
        dispatch::node(cpu, &mut work, memory.operands(index), pass);
        if !memory.show_outputs(index, |outputs| watch(Progress::Node(index, outputs))) {
            return;
        }
        while let Some(&Due { bucket, apply, .. }) = dues.next_if(|due| due.node == index) {
            let (gradients, parameters) = memory.bucket(bucket);
            let turn =
                if apply { Turn::Apply { bucket, gradients, parameters } } else { Turn::Send { bucket, gradients } };
            if !watch(Progress::Turn(turn)) {
                return;
            }
        }
    }
}
