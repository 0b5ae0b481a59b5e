//! A training step takes no memory: whatever it needs was taken before, or by the first steps.
//!
//! In a binary of its own, because the counter sees every thread of the process.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use paceline_data::batch::Batch;
use paceline_nn::optim::{HyperParameters, Moment, Optimizer};
use paceline_nn::{Input, zoo};
use paceline_system::clock::Clock;
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::{MemoryUse, Precision};
use paceline_train::phases::Phases;
use paceline_train::replica::{Replica, ReplicaOptions};

static COUNTS: AtomicBool = AtomicBool::new(false);
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, counting while it is told to.
struct Counter;

fn count() {
    if COUNTS.load(Ordering::Relaxed) {
        TAKEN.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counter = Counter;

/// What is different between the steps.
#[derive(Clone, Copy, Debug)]
struct Case {
    model: &'static str,
    side: usize,
    precision: Precision,
    optimizer: Optimizer,
    /// Updates follow the backward pass where there is a norm to clip to.
    clip_norm: Option<f64>,
    accumulate: usize,
    memory: MemoryUse,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let models = [("resnet20", 16), ("mobilenet", 32), ("alexnet", 64), ("googlenet", 32), ("lstm", 12), ("gpt", 12)];
    for (model, side) in models {
        for precision in Precision::ALL {
            for (optimizer, clip_norm, accumulate, memory) in [
                (Optimizer::Momentum, None, 1, MemoryUse::Normal),
                (Optimizer::Adam, Some(1.0), 2, MemoryUse::Low),
                (Optimizer::Lars, None, 1, MemoryUse::Low),
            ] {
                cases.push(Case { model, side, precision, optimizer, clip_norm, accumulate, memory });
            }
        }
    }
    cases
}

fn replica(case: Case) -> (Replica, Batch) {
    let Case { precision, clip_norm, accumulate, memory, .. } = case;
    let entry = zoo::find(case.model).unwrap();
    let (side, micro_batch, classes, mut random) = (case.side.max(entry.smallest), 2, 10, Random::new(&[1]));
    let size = micro_batch * accumulate;
    let mut batch = Batch { size, ..Batch::default() };
    let (input, rows) = match entry.native {
        Input::Image { channels, .. } => {
            batch.images = (0..size * side * side * channels).map(|_| random.normal()).collect();
            (Input::Image { size: [side; 2], channels }, size)
        }
        Input::Tokens { .. } => {
            batch.tokens = (0..size * side).map(|_| random.below(classes) as i32).collect();
            (Input::Tokens { sequence: side }, size * side)
        }
    };
    batch.targets = (0..rows).map(|_| random.below(classes) as i32).collect();
    let rule = case.optimizer.rule(&HyperParameters::default()).unwrap();
    let (smoothing, seed) = (0.1, 3);
    let options = ReplicaOptions {
        input,
        classes,
        micro_batch,
        other_sizes: Default::default(),
        accumulate,
        smoothing,
        seed,
        rule,
        precision,
        memory,
        clip_norm,
        sync_batch_norm: false,
        overlap: true,
        hosted: false,
        separate_gradients: false,
        slots: 0,
        shard: None,
    };
    (Replica::new(entry, options, &Arc::new(Cpu::new(2))).unwrap(), batch)
}

/// How much address space the process has: large buffers are mappings of their own, which no allocator sees.
fn address_space() -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    text.split(' ').next().map(str::to_owned)
}

#[test]
fn a_step_takes_no_memory() {
    let clock = Clock::real();
    for case in cases() {
        let (mut replica, batch) = replica(case);
        if case.optimizer == Optimizer::Lars {
            // The last algorithm that can compute each convolution, instead of the one that the rule takes.
            replica.device().hold_to(replica.plan(), |candidates| *candidates.last().expect("at least one"));
        }
        let mut step = |number: u64| {
            let moment = Moment { step: number, learning_rate: 1e-4 };
            replica.step(&batch, moment, &mut Phases::start(&clock)).unwrap().updated.unwrap();
        };
        (0..2).for_each(&mut step);
        let mapped = address_space();
        COUNTS.store(true, Ordering::SeqCst);
        (2..5).for_each(&mut step);
        COUNTS.store(false, Ordering::SeqCst);
        assert_eq!(TAKEN.swap(0, Ordering::SeqCst), 0, "allocations in three steps of {case:?}");
        assert_eq!(mapped, address_space(), "mappings in three steps of {case:?}");
    }
    // The counter counts.
    COUNTS.store(true, Ordering::SeqCst);
    drop(std::hint::black_box(vec![1u8; 100]));
    COUNTS.store(false, Ordering::SeqCst);
    assert!(TAKEN.load(Ordering::SeqCst) > 0);
}
