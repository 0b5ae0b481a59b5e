//! Runs a plan on a device, over and over: tensors stand where the plan put them, and no decision is left to take.

use std::ops::Range;

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

/// A bucket of gradients whose turn has come while a step runs; see [`crate::plan::Bucket`].
#[derive(Debug)]
pub enum Turn<'a> {
    /// Its gradients are final: whoever averages them with others may send them now.
    Send {
        /// Its number in the plan.
        bucket: usize,
        /// The gradients, as the parameters lie in the flat layout, with zeros in the gaps. They stay until they are applied.
        gradients: &'a mut [f32],
    },
    /// Nobody reads its parameters any more in this step: they may be changed.
    Apply {
        /// Its number in the plan.
        bucket: usize,
        /// As they were sent.
        gradients: &'a mut [f32],
        /// What they are the gradients of, at the same positions.
        parameters: &'a mut [f32],
    },
}

/// What happens in a run, in order. The answer says whether to go on.
pub(crate) enum Progress<'a> {
    /// A node has run, with these float outputs.
    Node(usize, &'a [&'a [f32]]),
    /// A bucket's turn has come.
    Turn(Turn<'a>),
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
        let mut executor = Self::without_arena(device, plan);
        executor.arena = Buffer::zeroed(executor.arena_words());
        executor
    }

    /// As [`Executor::new`] without memory of its own: it borrows that of another before it runs.
    ///
    /// # Panics
    /// As [`Executor::new`].
    pub fn without_arena(device: &Device, plan: Plan) -> Self {
        let graph = plan.graph();
        let words = !matches!(device, Device::Cpu(_)) || graph.values().all(|value| graph.dtype(value) != DType::Bf16);
        assert!(words, "the CPU computes in f32");
        Self { plan, device: device.clone(), arena: Buffer::default() }
    }

    fn arena_words(&self) -> usize {
        match self.device {
            Device::Cpu(_) => self.plan.arena_bytes() / DType::F32.bytes(),
            Device::Null(_) => 0,
        }
    }

    /// Runs `body` with this executor's arena lent to `borrower`, whose inputs and outputs stand in it until the next such
    /// call; those of this executor are lost.
    pub fn lend_arena<T>(&mut self, borrower: &mut Self, body: impl FnOnce(&mut Self) -> T) -> T {
        let words = self.arena_words().max(borrower.arena_words());
        if self.arena.len() < words {
            self.arena = Buffer::zeroed(words);
        }
        std::mem::swap(&mut self.arena, &mut borrower.arena);
        let result = body(borrower);
        std::mem::swap(&mut self.arena, &mut borrower.arena);
        result
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
        self.write_first(value, data);
    }

    /// Fills the first elements of an input, and the others with zeros.
    ///
    /// # Panics
    /// When `value` is not an input of that type, or shorter.
    pub fn write_first<T: Element>(&mut self, value: Value, data: &[T]) {
        let info = self.plan.graph().info(value);
        assert!(matches!(info.source, Source::Input(_)), "`{}` is not an input", info.name);
        let fits = data.len() <= info.shape.elements();
        assert!(info.dtype == T::DTYPE && fits, "input `{}` is {} of {}", info.name, info.shape, info.dtype);
        let Some(words) = self.words_mut(value) else { return };
        let (first, rest) = words.split_at_mut(data.len());
        rest.fill(0.0);
        if T::DTYPE == DType::I32 {
            as_i32_mut(first).copy_from_slice(cast(data));
        } else {
            first.copy_from_slice(cast(data));
        }
    }

    /// A copy of a wanted output of the last run. The null device answers zeros.
    ///
    /// # Panics
    /// When `value` is not a wanted output of the plan, does not live in the arena, or has another type.
    pub fn read<T: Element>(&self, value: Value) -> Vec<T> {
        let elements = self.plan.graph().shape(value).elements();
        self.view(value).map_or_else(|| vec![T::default(); elements], <[T]>::to_vec)
    }

    /// A wanted output of the last run, where it stands; none on the null device.
    ///
    /// # Panics
    /// As [`Executor::read`].
    pub fn view<T: Element>(&self, value: Value) -> Option<&[T]> {
        let info = self.plan.graph().info(value);
        assert!(self.plan.outputs().contains(&value), "`{}` is not a wanted output", info.name);
        assert_eq!(info.dtype, T::DTYPE, "reading `{}`", info.name);
        let words = self.words(value)?;
        Some(if T::DTYPE == DType::I32 { cast(as_i32(words)) } else { cast(words) })
    }

    /// Runs every node once.
    ///
    /// # Panics
    /// When the store has another layout than the plan.
    pub fn run(&mut self, store: &mut Store, pass: Pass) {
        self.run_each(store, pass, &mut |_, _| true);
    }

    /// Runs the forward pass: afterwards the wanted outputs can be read.
    ///
    /// # Panics
    /// When the store has another layout than the plan.
    pub fn forward(&mut self, store: &mut Store, pass: Pass) {
        self.run_nodes(0..self.plan.forward_nodes(), store, pass, &mut |_| true);
    }

    /// Runs the backward pass. `turn` is called when the turn of a bucket has come, to send it and to apply it, and says
    /// whether to go on.
    ///
    /// # Panics
    /// When the store has another layout than the plan.
    pub fn backward(&mut self, store: &mut Store, pass: Pass, turn: &mut dyn FnMut(Turn<'_>) -> bool) {
        let nodes = self.plan.forward_nodes()..self.plan.graph().nodes().len();
        self.run_nodes(nodes, store, pass, &mut |progress| match progress {
            Progress::Node(..) => true,
            Progress::Turn(bucket) => turn(bucket),
        });
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
        self.run_nodes(0..self.plan.graph().nodes().len(), store, pass, &mut |progress| match progress {
            Progress::Node(node, outputs) => after(node, outputs),
            Progress::Turn(_) => true,
        });
    }

    fn run_nodes(
        &mut self,
        nodes: Range<usize>,
        store: &mut Store,
        pass: Pass,
        watch: &mut dyn FnMut(Progress<'_>) -> bool,
    ) {
        let layouts = (self.plan.parameters(), self.plan.states());
        assert_eq!((store.layout(), store.states_layout()), layouts, "the store was made for another model");
        match &self.device {
            Device::Cpu(device) => cpu::run(device, (&self.plan, nodes), &mut self.arena, store, pass, watch),
            Device::Null(device) => null::run(device, (&self.plan, nodes), store, watch),
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

    fn range(&self, value: Value) -> Option<Range<usize>> {
        let Place::Arena(offset) = self.plan.place(value) else { panic!("`{value:?}` is not in the arena") };
        let start = offset / DType::F32.bytes();
        (!self.arena.is_empty()).then(|| start..start + self.plan.graph().shape(value).elements())
    }
}
