//! The CPU device: compute threads, an instruction set and working memory, and the dispatch from operations to kernels.

pub mod batch_norm;
#[cfg(test)]
mod check;
pub mod choice;
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
mod moments;
mod parts;
pub mod peak;
pub mod pool;
pub mod pooling;
pub mod reduce;
mod rows;
pub mod scratch;
pub(crate) mod simd;
pub mod softmax;

mod special;

pub mod trial;
pub mod update;
mod vectorize;

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock};

use choice::Chosen;
use context::Context;
use isa::Isa;
use pool::Pool;
use scratch::Scratch;

use crate::buffer::Buffer;
use crate::execute::{Pass, Progress, Turn};
use crate::op::{Op, Together};
use crate::plan::{Due, Plan};
use crate::store::Store;

/// This machine's cores, as one device.
#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    isa: Isa,
    scratch: Mutex<Scratch>,
    chosen: RwLock<Chosen>,
}

impl Cpu {
    /// A device with so many compute threads and the best instructions this machine has, or those of [`Isa::preferred`].
    ///
    /// # Panics
    /// When `PACELINE_ISA` names instructions that this machine does not have.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::preferred().unwrap_or_else(|error| panic!("{error}")))
    }

    /// A device held to an instruction set, to compare the paths.
    ///
    /// # Panics
    /// When the machine does not have it.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        assert!(isa.available(), "this machine does not have {isa:?}");
        Self { pool: Pool::new(threads), isa, scratch: Mutex::default(), chosen: RwLock::default() }
    }

    /// As [`Cpu::new`], each thread on a core of its own if they take most of those that this process may use; see
    /// [`Pool::pinned`].
    ///
    /// # Panics
    /// As [`Cpu::new`].
    pub fn pinned(threads: usize) -> Self {
        Self { pool: Pool::pinned(threads), ..Self::new(1) }
    }

    /// [`Cpu::pinned`] or [`Cpu::new`].
    ///
    /// # Panics
    /// As [`Cpu::new`].
    pub fn placed(threads: usize, pin: bool) -> Self {
        if pin { Self::pinned(threads) } else { Self::new(threads) }
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

/// Has the pages of an untouched arena taken near the threads that will work on them: the largest tensors decide.
pub(crate) fn touch(cpu: &Cpu, plan: &Plan, arena: &mut Buffer) {
    if cpu.pool.nodes() < 2 {
        return;
    }
    let mut ranges: Vec<Range<usize>> = plan.graph().values().filter_map(|value| plan.arena_range(value)).collect();
    ranges.sort_by_key(|range| (Reverse(range.len()), range.start));
    for range in ranges {
        let words = range.start / size_of::<f32>()..range.end.div_ceil(size_of::<f32>()).min(arena.len());
        cpu.pool.touch(&mut arena[words]);
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
    let _bound = cpu.pool.enter();
    let chosen = cpu.chosen.read().unwrap_or_else(PoisonError::into_inner);
    let mut scratch = cpu.scratch.lock().unwrap_or_else(PoisonError::into_inner);
    let mut context = Context { pool: &cpu.pool, isa: cpu.isa, scratch: &mut scratch };
    let mut memory = memory::Memory::new(plan, arena, store);
    let mut dues = plan.dues_from(nodes.start).iter().peekable();
    let mut offers = plan.offers_from(nodes.start).iter().peekable();
    for index in nodes {
        let mut goes_on = true;
        let mut add = |numbers: &mut [f32]| {
            goes_on = goes_on && watch(Progress::Turn(Turn::Sum { node: index, numbers }));
        };
        let others = plan.shares_statistics().then_some(&mut add as &mut batch_norm::Others<'_>);
        match &plan.graph().nodes()[index].op {
            Op::Together(together) if !matches!(together, Together::Fork) => {
                goes_on = parts::together(&context, &memory.operands(index), together, watch);
            }
            _ => dispatch::node(&mut context, &memory.operands(index), pass, &chosen, others),
        }
        if !goes_on || !memory.show_outputs(index, |outputs| watch(Progress::Node(index, outputs))) {
            return;
        }
        while let Some(&Due { bucket, apply, .. }) = dues.next_if(|due| due.node == index) {
            let (gradients, parameters) = memory.bucket(bucket);
            let turn =
                if apply { Turn::Apply { bucket, gradients, parameters } } else { Turn::Final { bucket, gradients } };
            if !watch(Progress::Turn(turn)) {
                return;
            }
        }
        while let Some(&(_, bucket)) = offers.next_if(|offer| offer.0 == index) {
            if !watch(Progress::Turn(Turn::Offer { bucket, parameters: memory.parameters(bucket) })) {
                return;
            }
        }
    }
}
