//! Runs a plan on a device, over and over: tensors stand where the plan put them, and no decision is left to take.

use crate::buffer::{Buffer, as_i32, as_i32_mut, cast};
use crate::device::{Device, cpu, null};
use crate::dtype::{DType, Element};
use crate::graph::{Source, Value};
use crate::plan::{Place, Plan};
use crate::store::Store;

/// What a step needs to know besides its tensors: the randomness of dropout is a function of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The run's seed.
    pub seed: u64,
    /// The step's number.
    pub step: u64,
}

/// A plan bound to a device and its memory.
#[derive(Debug)]
pub struct Executor {
    plan: Plan,
    device: Device,
    arena: Buffer,
}

/// What a run of every node took, for profiles.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Seconds, by node number.
    pub seconds: Vec<f64>,
}

impl Executor {
    /// Takes the memory that the plan asks for.
    ///
    /// # Panics
    /// When the plan has tensors that are not made of four-byte words, which is all that the CPU's kernels know.
    pub fn new(device: &Device, plan: Plan) -> Self {
        let words = match device {
            Device::Cpu(_) => {
                let graph = plan.graph();
                assert!(graph.values().all(|value| graph.dtype(value) != DType::Bf16), "the CPU computes in f32");
                plan.arena_bytes() / DType::F32.bytes()
            }
            Device::Null(_) => 0,
        };
        Self { plan, device: device.clone(), arena: Buffer::zeroed(words) }
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Fills the whole arena with NaN: a result that depends on memory that no node wrote, then shows.
    pub fn poison(&mut self) {
        self.arena.fill(f32::NAN);
    }

    /// Fills an input.
    ///
    /// # Panics
    /// When `value` is not an input of that type and length.
    pub fn write<T: Element>(&mut self, value: Value, data: &[T]) {
        let info = self.plan.graph().info(value);
        assert!(matches!(info.source, Source::Input(_)), "`{}` is not an input", info.name);
        assert_eq!((info.dtype, info.shape.elements()), (T::DTYPE, data.len()), "input `{}`", info.name);
        let Some(words) = self.words_mut(value) else { return };
        if T::DTYPE == DType::I32 {
            as_i32_mut(words).copy_from_slice(cast(data));
        } else {
            words.copy_from_slice(cast(data));
        }
    }

    /// A wanted output of the last run. The null device answers zeros.
    ///
    /// # Panics
    /// When `value` is not a wanted output of the plan, does not live in the arena, or has another type.
    pub fn read<T: Element>(&self, value: Value) -> Vec<T> {
        let info = self.plan.graph().info(value);
        assert!(self.plan.outputs().contains(&value), "`{}` is not a wanted output", info.name);
        assert_eq!(info.dtype, T::DTYPE, "reading `{}`", info.name);
        let Some(words) = self.words(value) else { return vec![T::default(); info.shape.elements()] };
        if T::DTYPE == DType::I32 { cast::<i32, T>(as_i32(words)).to_vec() } else { cast::<f32, T>(words).to_vec() }
    }

    /// Runs every node once.
    ///
    /// # Panics
    /// When the store has another layout than the plan.
    pub fn run(&mut self, store: &mut Store, pass: Pass) {
        self.run_each(store, pass, &mut |_, _| true);
    }

    /// Runs every node and times each.
    pub fn profile(&mut self, store: &mut Store, pass: Pass) -> Profile {
        let clock = paceline_system::clock::Clock::real();
        let mut last = clock.seconds();
        let mut seconds = Vec::with_capacity(self.plan.graph().nodes().len());
        self.run_each(store, pass, &mut |_, _| {
            let now = clock.seconds();
            seconds.push(now - std::mem::replace(&mut last, now));
            true
        });
        Profile { seconds }
    }

    /// Runs again until a node's result is not finite, and names its layer and operation.
    pub fn find_non_finite(&mut self, store: &mut Store, pass: Pass) -> Option<(String, &'static str)> {
        let mut found = None;
        self.run_each(store, pass, &mut |node, outputs| {
            if outputs.iter().any(|output| output.iter().any(|x| !x.is_finite())) {
                found = Some(node);
            }
            found.is_none()
        });
        let node = &self.plan.graph().nodes()[found?];
        Some((node.layer.clone(), node.op.name()))
    }

    /// Runs the nodes in order; after each, `after(node, float outputs)` says whether to go on.
    pub fn run_each(&mut self, store: &mut Store, pass: Pass, after: &mut dyn FnMut(usize, &[&[f32]]) -> bool) {
        let layouts = (self.plan.parameters(), self.plan.states());
        assert_eq!((store.layout(), store.states_layout()), layouts, "the store was made for another model");
        match &self.device {
            Device::Cpu(device) => cpu::run(device, &self.plan, &mut self.arena, store, pass, after),
            Device::Null(device) => null::run(device, &self.plan, after),
        }
    }

    fn words(&self, value: Value) -> Option<&[f32]> {
        let range = self.range(value)?;
        Some(&self.arena[range])
    }

    fn words_mut(&mut self, value: Value) -> Option<&mut [f32]> {
        let range = self.range(value)?;
        Some(&mut self.arena[range])
    }

    fn range(&self, value: Value) -> Option<std::ops::Range<usize>> {
        let Place::Arena(offset) = self.plan.place(value) else { panic!("`{value:?}` is not in the arena") };
        let start = offset / DType::F32.bytes();
        (!self.arena.is_empty()).then(|| start..start + self.plan.graph().shape(value).elements())
    }
}
