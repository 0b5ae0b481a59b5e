//! Runs a plan on a device, over and over: tensors stand where the plan put them, and no decision is left to take.

mod crossing;
mod slot;

use std::ops::Range;

pub use slot::Slot;

use crate::bf16::Bf16;
use crate::buffer::{Buffer, bytes_of, bytes_of_mut, cast, cast_mut, elements, elements_mut};
use crate::device::cuda::CudaError;
use crate::device::cuda::bound::{Between, Bound};
use crate::device::{Device, cpu, null};
use crate::dtype::{DType, Element};
use crate::graph::{Source, Value};
use crate::plan::{Place, Plan};
use crate::store::Store;

/// What a step needs to know besides its tensors: the randomness of dropout is a function of these.
///
/// Dropout sees tensors whose leading dim is that of the samples, or a multiple of it. Whether an element is kept depends on the seed,
/// the step, the layer, the number of its sample in the global batch and its place in the sample, so that a batch may be computed
/// whole, in parts one after the other, or by several replicas, with the same mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The run's seed.
    pub seed: u64,
    /// The step's number.
    pub step: u64,
    /// The number of this pass's first sample within the global batch of the step.
    pub first_sample: u64,
    /// Samples in this pass; 0 if a whole tensor counts as one.
    pub samples: usize,
}

impl Pass {
    /// The index of the first element of a tensor, counted from the first element of the global batch's.
    ///
    /// # Panics
    /// When the tensor is not made of that many samples.
    pub(crate) fn first_element(&self, elements: usize) -> u64 {
        let samples = self.samples.max(1);
        assert!(elements.is_multiple_of(samples), "{elements} elements are not {samples} samples");
        self.first_sample.wrapping_mul((elements / samples) as u64)
    }
}

/// A plan bound to a device and its memory. Where a method can fail, it is a GPU that does not do its work; the CPU always does.
#[derive(Debug)]
pub struct Executor {
    plan: Plan,
    device: Device,
    /// On the host; empty where the memory is elsewhere.
    arena: Buffer,
    /// On a GPU.
    bound: Option<Box<Bound>>,
}

const ONE_PIECE: &str = "only a plan with `weights_last` has a backward pass in two halves";

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

/// What the caller of a running step has to do next: mostly with a bucket of gradients, see [`crate::plan::Bucket`].
#[derive(Debug)]
pub enum Turn<'a> {
    /// In the forward pass: the next node is the first of this step that reads the bucket's parameters. They have to be up to date.
    BeforeRead {
        /// Its number in the plan.
        bucket: usize,
        /// The parameters.
        parameters: &'a mut [f32],
    },
    /// In the backward pass, after [`Turn::Apply`]: the optimizer may update these parameters now if their sums came too late before.
    /// Only on the CPU.
    Offer {
        /// Its number in the plan.
        bucket: usize,
        /// The parameters.
        parameters: &'a mut [f32],
    },
    /// Numbers of this replica's that have to become the sum of all replicas' now, in place; all get the same ones. See
    /// [`crate::plan::Wanted::shares_statistics`]. Left alone, they are those of a replica that has no others.
    Sum {
        /// Of which node.
        node: usize,
        /// As many as [`Plan::sums`] says. None on a device without memory.
        numbers: &'a mut [f32],
    },
    /// Numbers of this part's that have to become the sum of all parts' now, in place; all get the same ones. Left alone, they are
    /// those of a part by itself.
    SumParts {
        /// None on a device without memory.
        numbers: &'a mut [f32],
    },
    /// Pieces of all parts, one behind the other, of which this part's is there: the others have to be filled in now.
    GatherParts {
        /// All pieces. None on a device without memory.
        numbers: &'a mut [f32],
        /// The length of each.
        lengths: &'a [usize],
        /// Which is there.
        own: usize,
    },
    /// In the backward pass: its gradients are final. Whoever sums them with those of other replicas may send them now.
    Final {
        /// Its number in the plan.
        bucket: usize,
        /// The gradients, as the parameters lie in the flat layout, with zeros in the gaps. They stay until they are applied.
        gradients: &'a mut [f32],
    },
    /// In the backward pass, after [`Turn::Final`]: no node reads its parameters any more in this step. The optimizer may update them.
    Apply {
        /// Its number in the plan.
        bucket: usize,
        /// As they stood in [`Turn::Final`], or as its receiver left them.
        gradients: &'a mut [f32],
        /// What they are the gradients of, at the same positions.
        parameters: &'a mut [f32],
    },
}

/// What happens in a run, in order. The answer says whether to go on.
pub(crate) enum Progress<'a> {
    /// A node has run, with these float outputs.
    Node(usize, &'a [Floats<'a>]),
    /// The caller's turn has come.
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
    /// # Errors
    /// When a GPU does not have it, or cannot compute a node: the message says which and why.
    ///
    /// # Panics
    /// As [`Buffer::zeroed_for`].
    pub fn new(device: &Device, plan: Plan) -> Result<Self, CudaError> {
        let mut executor = Self::without_arena(device, plan);
        executor.arena = Buffer::zeroed_for("the arena of a step", executor.arena_words());
        if let Device::Cpu(cpu) = &executor.device {
            cpu::touch(cpu, &executor.plan, &mut executor.arena);
        }
        executor.bind()?;
        Ok(executor)
    }

    /// As [`Executor::new`] without memory of its own: it borrows that of another before it runs.
    pub fn without_arena(device: &Device, plan: Plan) -> Self {
        Self { plan, device: device.clone(), arena: Buffer::default(), bound: None }
    }

    /// Takes memory on a GPU, if that is where it runs and there is none yet.
    fn bind(&mut self) -> Result<(), CudaError> {
        if let (Device::Cuda(cuda), None) = (&self.device, &self.bound) {
            self.bound = Some(Box::new(Bound::new(cuda, &self.plan)?));
        }
        Ok(())
    }

    fn arena_words(&self) -> usize {
        match self.device {
            Device::Cpu(_) => self.plan.arena_bytes() / DType::F32.bytes(),
            Device::Cuda(_) | Device::Null(_) => 0,
        }
    }

    /// Runs `body` with this executor's arena lent to `borrower`, whose inputs and outputs stand in it until the next such
    /// call; those of this executor are lost.
    pub fn lend_arena<T>(&mut self, borrower: &mut Self, body: impl FnOnce(&mut Self) -> T) -> T {
        let words = self.arena_words().max(borrower.arena_words());
        if self.arena.len() < words {
            self.arena = Buffer::zeroed_for("the arena of an evaluation", words);
        }
        std::mem::swap(&mut self.arena, &mut borrower.arena);
        let result = body(borrower);
        std::mem::swap(&mut self.arena, &mut borrower.arena);
        result
    }

    /// Runs on another device without memory from now on.
    ///
    /// # Panics
    /// When one of the two has memory.
    pub fn set_device(&mut self, device: &Device) {
        assert!(matches!((&self.device, device), (Device::Null(_), Device::Null(_))), "memory does not move");
        self.device = device.clone();
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// As [`Plan::keep_gradients`], for a store that has these gradients; on the CPU.
    ///
    /// # Panics
    /// When the store has other parameters than the plan, or the device is another.
    pub fn keep_gradients(&mut self, store: &mut Store, gradients: Buffer) {
        assert!(matches!(self.device, Device::Cpu(_)) && gradients.len() >= self.plan.parameters().length());
        store.gradients = gradients;
        self.plan.keep_gradients();
    }

    /// As [`Plan::keep_gradients`], for a plan that runs with the store of another executor which keeps them.
    pub fn keep_gradients_too(&mut self) {
        self.plan.keep_gradients();
    }

    /// Fills the whole arena with NaN: a result that depends on memory that no node wrote, then shows.
    ///
    /// # Errors
    /// When a GPU does not answer.
    pub fn poison(&mut self) -> Result<(), CudaError> {
        self.arena.fill(f32::NAN);
        self.bound.as_ref().map_or(Ok(()), |bound| bound.poison())
    }

    /// Fills an input. Numbers given as `f32` are rounded where the input is bf16.
    ///
    /// # Errors
    /// When a GPU does not answer.
    ///
    /// # Panics
    /// When `value` is not an input of that type and length.
    pub fn write<T: Element>(&mut self, value: Value, data: &[T]) -> Result<(), CudaError> {
        let info = self.plan.graph().info(value);
        assert!(matches!(info.source, Source::Input(_)), "`{}` is not an input", info.name);
        assert_eq!(info.shape.elements(), data.len(), "input `{}`", info.name);
        self.write_first(value, data)
    }

    /// Fills the first elements of an input, and the others with zeros.
    ///
    /// # Errors
    /// When a GPU does not answer, or has no memory for the plan.
    ///
    /// # Panics
    /// When `value` is not an input of that type, or shorter.
    pub fn write_first<T: Element>(&mut self, value: Value, data: &[T]) -> Result<(), CudaError> {
        self.bind()?;
        let info = self.plan.graph().info(value);
        assert!(matches!(info.source, Source::Input(_)), "`{}` is not an input", info.name);
        let length = info.shape.elements();
        assert!(data.len() <= length, "input `{}` is {}", info.name, info.shape);
        let rounds = (info.dtype, T::DTYPE) == (DType::Bf16, DType::F32);
        assert!(rounds || info.dtype == T::DTYPE, "input `{}` is {}, not {}", info.name, info.dtype, T::DTYPE);
        if let Some(bound) = &self.bound {
            let Place::Arena(start) = self.plan.place(value) else { panic!("`{value:?}` is not in the arena") };
            return if rounds {
                let mut rounded = vec![Bf16::default(); length];
                rounded.iter_mut().zip(cast::<T, f32>(data)).for_each(|(target, &x)| *target = Bf16::from_f32(x));
                bound.write(start, bytes_of(&rounded))
            } else {
                let mut padded = vec![T::default(); length];
                padded[..data.len()].copy_from_slice(data);
                bound.write(start, bytes_of(&padded))
            };
        }
        let Some(start) = self.offset(value) else { return Ok(()) };
        if rounds {
            let (first, rest) = elements_mut::<Bf16>(&mut self.arena, start, length).split_at_mut(data.len());
            first.iter_mut().zip(cast::<T, f32>(data)).for_each(|(target, &x)| *target = Bf16::from_f32(x));
            rest.fill(Bf16::default());
        } else {
            let (first, rest) = elements_mut::<T>(&mut self.arena, start, length).split_at_mut(data.len());
            first.copy_from_slice(data);
            rest.fill(T::default());
        }
        Ok(())
    }

    /// A wanted output of the last run; one in bf16 can be read as `f32` too. The null device answers zeros.
    ///
    /// # Errors
    /// When a GPU does not answer.
    ///
    /// # Panics
    /// When `value` is not a wanted output of the plan, does not live in the arena, or has another type.
    pub fn read<T: Element>(&self, value: Value) -> Result<Vec<T>, CudaError> {
        let mut data = vec![T::default(); self.plan.graph().shape(value).elements()];
        self.read_into(value, &mut data)?;
        Ok(data)
    }

    /// As [`Executor::read`], into memory of the caller.
    ///
    /// # Errors
    /// As [`Executor::read`].
    ///
    /// # Panics
    /// As [`Executor::read`], and when `data` has another length.
    pub fn read_into<T: Element>(&self, value: Value, data: &mut [T]) -> Result<(), CudaError> {
        let info = self.plan.graph().info(value);
        assert!(self.plan.outputs().contains(&value), "`{}` is not a wanted output", info.name);
        assert_eq!(info.shape.elements(), data.len(), "output `{}`", info.name);
        let widens = (info.dtype, T::DTYPE) == (DType::Bf16, DType::F32);
        assert!(widens || info.dtype == T::DTYPE, "output `{}` is {}, not {}", info.name, info.dtype, T::DTYPE);
        if let Some(bound) = &self.bound {
            let Place::Arena(start) = self.plan.place(value) else { panic!("`{value:?}` is not in the arena") };
            if widens {
                let mut narrow = vec![Bf16::default(); data.len()];
                bound.read(start, bytes_of_mut(&mut narrow))?;
                cast_mut::<T, f32>(data).iter_mut().zip(narrow).for_each(|(target, x)| *target = x.to_f32());
            } else {
                bound.read(start, bytes_of_mut(data))?;
            }
            return Ok(());
        }
        match self.offset(value) {
            None => data.fill(T::default()),
            Some(start) if widens => {
                let source = elements::<Bf16>(&self.arena, start, data.len());
                cast_mut::<T, f32>(data).iter_mut().zip(source).for_each(|(target, x)| *target = x.to_f32());
            }
            Some(start) => data.copy_from_slice(elements(&self.arena, start, data.len())),
        }
        Ok(())
    }

    /// A wanted output of the last run, where it stands; none on a device whose memory the host does not reach.
    ///
    /// # Panics
    /// When `value` is not a wanted output of the plan, does not live in the arena, or has another type.
    pub fn view<T: Element>(&self, value: Value) -> Option<&[T]> {
        let info = self.plan.graph().info(value);
        assert!(self.plan.outputs().contains(&value), "`{}` is not a wanted output", info.name);
        assert_eq!(info.dtype, T::DTYPE, "reading `{}`", info.name);
        let start = self.offset(value)?;
        Some(elements(&self.arena, start, info.shape.elements()))
    }

    /// Runs every node once.
    ///
    /// # Errors
    /// When a GPU does not answer, or has no memory for the plan.
    ///
    /// # Panics
    /// When the store has another layout than the plan.
    pub fn run(&mut self, store: &mut Store, pass: Pass) -> Result<(), CudaError> {
        let nodes = 0..self.plan.graph().nodes().len();
        self.run_nodes(nodes, store, pass, Between::Nothing, &mut |_| true)
    }

    /// Runs the forward pass: afterwards the wanted outputs can be read.
    ///
    /// # Errors
    /// As [`Executor::run`].
    ///
    /// # Panics
    /// When the store has another layout than the plan.
    pub fn forward(&mut self, store: &mut Store, pass: Pass) -> Result<(), CudaError> {
        self.run_nodes(0..self.plan.forward_nodes(), store, pass, Between::Nothing, &mut |_| true)
    }

    /// As [`Executor::forward`], with [`Turn::BeforeRead`] of every bucket and [`Turn::Sum`].
    ///
    /// # Errors
    /// The first that `turn` gives, and as [`Executor::run`].
    ///
    /// # Panics
    /// As [`Executor::forward`].
    pub fn forward_with<E: From<CudaError>>(
        &mut self,
        store: &mut Store,
        pass: Pass,
        turn: &mut dyn FnMut(Turn<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut done, end) = (0, self.plan.forward_nodes());
        for index in 0..self.plan.needs().len() {
            let (node, bucket) = self.plan.needs()[index];
            let node = node.min(end);
            self.run_turns(done..node, store, pass, turn)?;
            done = node;
            let parameters = &mut store.parameters[self.plan.buckets()[bucket].elements.clone()];
            turn(Turn::BeforeRead { bucket, parameters })?;
        }
        self.run_turns(done..end, store, pass, turn)
    }

    /// Some nodes, until `turn` gives an error.
    fn run_turns<E: From<CudaError>>(
        &mut self,
        nodes: Range<usize>,
        store: &mut Store,
        pass: Pass,
        turn: &mut dyn FnMut(Turn<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut result = Ok(());
        self.run_nodes(nodes, store, pass, Between::Nothing, &mut |progress| {
            if let Progress::Turn(at) = progress {
                result = turn(at);
            }
            result.is_ok()
        })?;
        result
    }

    /// Runs the backward pass, with [`Turn::Final`], [`Turn::Apply`] and [`Turn::Offer`] of every bucket and [`Turn::Sum`]; `turn` says
    /// whether to go on.
    ///
    /// # Errors
    /// As [`Executor::run`].
    ///
    /// # Panics
    /// When the store has another layout than the plan.
    pub fn backward(
        &mut self,
        store: &mut Store,
        pass: Pass,
        turn: &mut dyn FnMut(Turn<'_>) -> bool,
    ) -> Result<(), CudaError> {
        let nodes = self.plan.forward_nodes()..self.plan.graph().nodes().len();
        self.run_with(nodes, store, pass, turn)
    }

    /// The first half of the backward pass: afterwards the gradients of inputs can be read, and none of the store's gradients has changed.
    ///
    /// # Errors
    /// As [`Executor::run`].
    ///
    /// # Panics
    /// As [`Executor::backward`], and when the plan's backward pass does not have two halves.
    pub fn backward_inputs(
        &mut self,
        store: &mut Store,
        pass: Pass,
        turn: &mut dyn FnMut(Turn<'_>) -> bool,
    ) -> Result<(), CudaError> {
        assert!(self.plan.weights_are_last(), "{ONE_PIECE}");
        self.run_with(self.plan.input_gradient_nodes(), store, pass, turn)
    }

    /// The second half of the backward pass: the gradients of parameters.
    ///
    /// # Errors
    /// As [`Executor::run`].
    ///
    /// # Panics
    /// As [`Executor::backward_inputs`].
    pub fn backward_weights(
        &mut self,
        store: &mut Store,
        pass: Pass,
        turn: &mut dyn FnMut(Turn<'_>) -> bool,
    ) -> Result<(), CudaError> {
        assert!(self.plan.weights_are_last(), "{ONE_PIECE}");
        self.run_with(self.plan.weight_gradient_nodes(), store, pass, turn)
    }

    fn run_with(
        &mut self,
        nodes: Range<usize>,
        store: &mut Store,
        pass: Pass,
        turn: &mut dyn FnMut(Turn<'_>) -> bool,
    ) -> Result<(), CudaError> {
        self.run_nodes(nodes, store, pass, Between::Nothing, &mut |progress| match progress {
            Progress::Node(..) => true,
            Progress::Turn(bucket) => turn(bucket),
        })
    }

    /// Runs every node and times each.
    ///
    /// # Errors
    /// As [`Executor::run`].
    pub fn profile(&mut self, store: &mut Store, pass: Pass) -> Result<Profile, CudaError> {
        let clock = paceline_system::clock::Clock::real();
        let mut last = clock.seconds();
        let mut seconds = Vec::with_capacity(self.plan.graph().nodes().len());
        self.run_nodes(0..self.plan.graph().nodes().len(), store, pass, Between::Done, &mut |progress| {
            if matches!(progress, Progress::Turn(_)) {
                return true;
            }
            let now = clock.seconds();
            seconds.push(now - std::mem::replace(&mut last, now));
            true
        })?;
        Ok(Profile { seconds })
    }

    /// Runs again until a node's result is not finite, and names its layer and operation.
    ///
    /// # Errors
    /// As [`Executor::run`].
    pub fn find_non_finite(
        &mut self,
        store: &mut Store,
        pass: Pass,
    ) -> Result<Option<(String, &'static str)>, CudaError> {
        let mut found = None;
        self.run_each(store, pass, &mut |node, outputs| {
            if !outputs.iter().all(Floats::is_finite) {
                found = Some(node);
            }
            found.is_none()
        })?;
        let node = found.map(|found: usize| &self.plan.graph().nodes()[found]);
        Ok(node.map(|node| (node.layer.clone(), node.op.name())))
    }

    /// Runs the nodes in order; after each, `after(node, float outputs)` says whether to go on.
    ///
    /// # Errors
    /// As [`Executor::run`].
    pub fn run_each(&mut self, store: &mut Store, pass: Pass, after: &mut After<'_>) -> Result<(), CudaError> {
        let nodes = 0..self.plan.graph().nodes().len();
        self.run_nodes(nodes, store, pass, Between::Outputs, &mut |progress| match progress {
            Progress::Node(node, outputs) => after(node, outputs),
            Progress::Turn(_) => true,
        })
    }

    fn run_nodes(
        &mut self,
        nodes: Range<usize>,
        store: &mut Store,
        pass: Pass,
        between: Between,
        watch: &mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Result<(), CudaError> {
        let layouts = (self.plan.parameters(), self.plan.states());
        assert_eq!((store.layout(), store.states_layout()), layouts, "the store was made for another model");
        self.bind()?;
        match &self.device {
            Device::Cpu(device) => cpu::run(device, (&self.plan, nodes), &mut self.arena, store, pass, watch),
            Device::Cuda(_) => {
                let bound = self.bound.as_mut().expect("an executor on a GPU has memory of its own");
                bound.run((&self.plan, nodes), store, pass, between, watch)?;
            }
            Device::Null(device) => null::run(device, (&self.plan, nodes), store, watch),
        }
        Ok(())
    }

    /// Where a value starts in the arena, if there is one.
    fn offset(&self, value: Value) -> Option<usize> {
        let Place::Arena(offset) = self.plan.place(value) else { panic!("`{value:?}` is not in the arena") };
        (!self.arena.is_empty()).then_some(offset)
    }
}
