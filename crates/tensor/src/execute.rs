//! Runs a plan on a device, over and over: tensors stand where the plan put them, and no decision is left to take.

use crate::bf16::Bf16;
use crate::buffer::{Buffer, cast, cast_mut, elements, elements_mut};
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

/// The numbers of a tensor.
#[derive(Clone, Copy, Debug)]
pub enum Floats<'a> {
    /// As `f32`.
    F32(&'a [f32]),
    /// As bf16.
    Bf16(&'a [Bf16]),
}

impl Floats<'_> {
    /// Whether all of them are numbers and none is infinite.
    pub fn is_finite(&self) -> bool {
        match self {
            Self::F32(values) => values.iter().all(|x| x.is_finite()),
            Self::Bf16(values) => values.iter().all(|x| x.to_f32().is_finite()),
        }
    }
}

/// Called after each node with its number and its floating-point outputs; says whether to go on.
pub type After<'a> = dyn FnMut(usize, &[Floats<'_>]) -> bool + 'a;

/// What a run of every node took, for profiles.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Seconds, by node number.
    pub seconds: Vec<f64>,
}

impl Executor {
    /// Takes the memory that the plan asks for.
    pub fn new(device: &Device, plan: Plan) -> Self {
        let words = match device {
            Device::Cpu(_) => plan.arena_bytes() / DType::F32.bytes(),
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

    /// Fills an input. Numbers given as `f32` are rounded where the input is bf16.
    ///
    /// # Panics
    /// When `value` is not an input of that type and length.
    pub fn write<T: Element>(&mut self, value: Value, data: &[T]) {
        let info = self.plan.graph().info(value);
        assert!(matches!(info.source, Source::Input(_)), "`{}` is not an input", info.name);
        assert_eq!(info.shape.elements(), data.len(), "input `{}`", info.name);
        let rounds = (info.dtype, T::DTYPE) == (DType::Bf16, DType::F32);
        assert!(rounds || info.dtype == T::DTYPE, "input `{}` is {}, not {}", info.name, info.dtype, T::DTYPE);
        let Some(start) = self.offset(value) else { return };
        if rounds {
            let target = elements_mut::<Bf16>(&mut self.arena, start, data.len());
            target.iter_mut().zip(cast::<T, f32>(data)).for_each(|(target, &x)| *target = Bf16::from_f32(x));
        } else {
            elements_mut(&mut self.arena, start, data.len()).copy_from_slice(data);
        }
    }

    /// A wanted output of the last run; one in bf16 can be read as `f32` too. The null device answers zeros.
    ///
    /// # Panics
    /// When `value` is not a wanted output of the plan, does not live in the arena, or has another type.
    pub fn read<T: Element>(&self, value: Value) -> Vec<T> {
        let mut data = vec![T::default(); self.plan.graph().shape(value).elements()];
        self.read_into(value, &mut data);
        data
    }

    /// As [`Executor::read`], into memory of the caller.
    ///
    /// # Panics
    /// As [`Executor::read`], and when `data` has another length.
    pub fn read_into<T: Element>(&self, value: Value, data: &mut [T]) {
        let info = self.plan.graph().info(value);
        assert!(self.plan.outputs().contains(&value), "`{}` is not a wanted output", info.name);
        assert_eq!(info.shape.elements(), data.len(), "output `{}`", info.name);
        let widens = (info.dtype, T::DTYPE) == (DType::Bf16, DType::F32);
        assert!(widens || info.dtype == T::DTYPE, "output `{}` is {}, not {}", info.name, info.dtype, T::DTYPE);
        match self.offset(value) {
            None => data.fill(T::default()),
            Some(start) if widens => {
                let source = elements::<Bf16>(&self.arena, start, data.len());
                cast_mut::<T, f32>(data).iter_mut().zip(source).for_each(|(target, x)| *target = x.to_f32());
            }
            Some(start) => data.copy_from_slice(elements(&self.arena, start, data.len())),
        }
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
            if !outputs.iter().all(Floats::is_finite) {
                found = Some(node);
            }
            found.is_none()
        });
        let node = &self.plan.graph().nodes()[found?];
        Some((node.layer.clone(), node.op.name()))
    }

    /// Runs the nodes in order; after each, `after(node, float outputs)` says whether to go on.
    pub fn run_each(&mut self, store: &mut Store, pass: Pass, after: &mut After<'_>) {
        let layouts = (self.plan.parameters(), self.plan.states());
        assert_eq!((store.layout(), store.states_layout()), layouts, "the store was made for another model");
        match &self.device {
            Device::Cpu(device) => cpu::run(device, &self.plan, &mut self.arena, store, pass, after),
            Device::Null(device) => null::run(device, &self.plan, after),
        }
    }

    /// Where a value starts in the arena, if there is one.
    fn offset(&self, value: Value) -> Option<usize> {
        let Place::Arena(offset) = self.plan.place(value) else { panic!("`{value:?}` is not in the arena") };
        (!self.arena.is_empty()).then_some(offset)
    }
}
