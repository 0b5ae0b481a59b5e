//! A plan turned into calls with all their arguments: what is left to do at run time is to start them in order.
//!
//! Every tensor has an address before the first call is made. Only working memory has not. A node's lies in the arena, where values that live
//! longer leave a gap that is large enough, and else in memory of its own, as much as the greediest of such nodes wants: that is known at the
//! end, and addresses are completed then.
//!
//! Nodes that the plan lets be computed beside others run on a stream of their own and are waited for where the plan says; until then, what they
//! work in belongs to nobody else.

mod argument;
mod statistics;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

pub(super) use argument::{Address, Argument};
pub(super) use statistics::Statistics;

use super::compile;
use super::convolution::Convolution;
use super::driver::{Event, Function, Stream};
use super::join::Joins;
use super::product::Product;
use super::{Cuda, CudaError};
use crate::dtype::DType;
use crate::graph::{Node, Value};
use crate::plan::{Place, Plan};
use crate::shape::Shape;

/// Where the tensors of a run are.
#[derive(Clone, Debug)]
pub(super) struct Bases {
    /// The arena.
    pub arena: u64,
    /// Parameters in f32.
    pub parameters: u64,
    /// The same rounded to bf16.
    pub rounded: u64,
    /// Gradients of the parameters.
    pub gradients: u64,
    /// States.
    pub states: u64,
    /// Seed and step, as two 64-bit words.
    pub pass: u64,
    /// Bits that ReLUs leave for their gradients, where there is memory for them.
    pub gates: u64,
    /// What batch-norms add up with other replicas', where they do.
    pub statistics: u64,
    /// Which parameters, and their gradients, stand in the order output channel, row, column, input channel.
    pub channels_last: Vec<bool>,
}

/// A tensor of a node.
#[derive(Clone, Debug)]
pub(super) struct Tensor<'a> {
    /// Where it starts.
    pub address: Address,
    /// Its shape.
    pub shape: &'a Shape,
    /// Its type.
    pub dtype: DType,
    /// If it is a parameter or its gradient: whether it stands in the order output channel, row, column, input channel.
    pub channels_last: bool,
    /// If it is a parameter: where it stands rounded to bf16.
    pub rounded: Option<Address>,
}

impl Tensor<'_> {
    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.elements()
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes()
    }

    /// The ending of the names of kernels for its type.
    pub fn suffix(&self) -> &'static str {
        suffix(self.dtype)
    }
}

/// The ending of the names of kernels for a type.
pub(super) fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::Bf16 => "bf16",
        DType::I32 => "i32",
    }
}

/// A kernel with its arguments.
#[derive(Debug)]
pub(super) struct Launch {
    function: Function,
    grid: [u32; 3],
    block: u32,
    shared_bytes: u32,
    /// Whether it is made ready while the kernel ahead of it ends.
    early: bool,
    arguments: Vec<Argument>,
    completed: Vec<u64>,
}

/// Something that the GPU is told to do.
#[derive(Debug)]
pub(super) enum Call {
    /// A kernel of our own.
    Launch(Launch),
    /// A convolution by cuDNN.
    Convolution(Convolution),
    /// A matrix product by cuBLASLt.
    Product(Box<Product>),
    /// A copy: to, from, bytes.
    Copy(Address, Address, usize),
}

impl Call {
    fn start(&self, cuda: &Cuda, stream: &Stream, scratch: u64) -> Result<(), CudaError> {
        match self {
            Self::Launch(launch) => {
                let how = (launch.block, launch.shared_bytes, launch.early);
                stream.launch_with(launch.function, launch.grid, how, &launch.completed)
            }
            Self::Convolution(convolution) => convolution.start(cuda.cudnn(), stream),
            Self::Product(product) => product.start(cuda.blas(), stream, scratch),
            Self::Copy(to, from, bytes) => stream.copy(to.complete(scratch), from.complete(scratch), *bytes),
        }
    }
}

/// All calls of a plan, in order.
#[derive(Debug)]
pub(super) struct Program {
    calls: Vec<Call>,
    /// Where the working memory of each call begins.
    scratch: Vec<Base>,
    /// How many calls come before the end of each node.
    ends: Vec<usize>,
    /// Bytes of working memory of their own: of what is computed in order, and of what is computed beside it.
    scratch_bytes: [usize; 2],
    /// What is computed beside the rest, by node.
    beside: BTreeMap<usize, Beside>,
    /// Of nodes that stop to have numbers added up: how many calls come before each stop.
    stops: BTreeMap<usize, Vec<usize>>,
}

/// A node that is computed beside others.
#[derive(Debug)]
struct Beside {
    /// The node before which it has to be done.
    until: usize,
    /// What it is computed from is there.
    begun: Event,
    done: Event,
}

/// Where working memory lies.
#[derive(Clone, Copy, Debug)]
enum Base {
    /// At an address that is known.
    At(u64),
    /// In memory of its own, or in that of calls beside others.
    Own { beside: bool },
}

impl Program {
    /// Turns every node into calls. With `join`, some nodes are computed together with others and have none of their own; what they
    /// would give out between is then not there to be looked at.
    pub fn new(cuda: &Cuda, plan: &Plan, bases: &Bases, join: bool) -> Result<Self, CudaError> {
        let mut builder = Builder::new(cuda);
        let joins = if join { Joins::new(plan) } else { Joins::default() };
        let mut ends = Vec::with_capacity(plan.graph().nodes().len());
        let (mut beside, mut stops) = (BTreeMap::new(), BTreeMap::new());
        for (index, node) in plan.graph().nodes().iter().enumerate() {
            let sum = joins.sums.get(&index).map(|&sum| &plan.graph().nodes()[sum]);
            let gate = joins.gates.get(&index).map(|offset| Address::Fixed(bases.gates + offset));
            let at = At { plan, node, bases, sum, gate };
            let made = match (joins.stems.get(&index), joins.biases.get(&index)) {
                _ if joins.done.contains(&index) => Ok(()),
                (Some(found), _) => {
                    let bias = found.bias.map(|bias| at.tensor(bias).address);
                    let tensors = (&at.tensor(found.image), &at.tensor(found.weight), bias);
                    super::lower::stem_gradient(&mut builder, &at, &found.stem, tensors)
                }
                (None, Some(&bias)) => super::lower::relu_gradient(&mut builder, &at, at.tensor(bias).address),
                (None, None) => super::lower::node(&mut builder, &at),
            };
            made.map_err(|CudaError(why)| CudaError(format!("{}, {}: {why}", node.layer, node.op.name())))?;
            let until = plan.beside(index).filter(|_| builder.calls.len() > ends.last().copied().unwrap_or(0));
            let nodes: Vec<usize> = match until {
                Some(until) => (index..until).collect(),
                // What an addition that is done here reads may be given to others by now.
                None => vec![index, joins.sums.get(&index).copied().unwrap_or(index)],
            };
            builder.end_node(bases.arena, plan, &nodes, until);
            if let Some(until) = until {
                let (begun, done) = (Event::between(cuda.context())?, Event::between(cuda.context())?);
                beside.insert(index, Beside { until, begun, done });
            }
            ends.push(builder.calls.len());
            let found = std::mem::take(&mut builder.stops);
            if !found.is_empty() {
                stops.insert(index, found);
            }
        }
        Ok(Self { beside, stops, ..builder.finish(ends) })
    }

    /// Calls that belong to no node.
    pub fn of_calls(
        cuda: &Cuda,
        build: impl FnOnce(&mut Builder<'_>) -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let mut builder = Builder::new(cuda);
        build(&mut builder)?;
        builder.end_calls((0, 0..0), false);
        Ok(builder.finish(Vec::new()))
    }

    /// Bytes of working memory that it needs.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch_bytes.iter().sum()
    }

    /// Completes all addresses: the working memory starts here.
    pub fn complete(&mut self, scratch: u64) -> Result<(), CudaError> {
        for (call, base) in self.calls.iter_mut().zip(&mut self.scratch) {
            let scratch = match *base {
                Base::At(address) => address,
                Base::Own { beside } => scratch + if beside { self.scratch_bytes[0] as u64 } else { 0 },
            };
            *base = Base::At(scratch);
            match call {
                Call::Launch(launch) => {
                    launch.completed = launch.arguments.iter().map(|argument| argument.complete(scratch)).collect();
                }
                Call::Convolution(convolution) => {
                    convolution.complete(&|address: Address| address.complete(scratch))?
                }
                Call::Product(_) | Call::Copy(..) => {}
            }
        }
        Ok(())
    }

    /// Starts every call.
    pub fn start(&self, cuda: &Cuda, stream: &Stream) -> Result<(), CudaError> {
        if !self.beside.is_empty() {
            return self.start_nodes(cuda, stream, 0..self.ends.len());
        }
        self.start_calls(cuda, stream, 0..self.calls.len())
    }

    fn start_calls(&self, cuda: &Cuda, stream: &Stream, which: Range<usize>) -> Result<(), CudaError> {
        let (calls, starts) = (&self.calls[which.clone()], &self.scratch[which]);
        calls.iter().zip(starts).try_for_each(|(call, base)| match *base {
            Base::At(scratch) => call.start(cuda, stream, scratch),
            Base::Own { .. } => unreachable!("a program is completed before it runs"),
        })
    }

    /// Starts the calls of one node.
    pub fn start_node(&self, cuda: &Cuda, stream: &Stream, node: usize) -> Result<(), CudaError> {
        self.start_nodes(cuda, stream, node..node + 1)
    }

    /// Starts the calls of consecutive nodes, as far as there are so many. What the stream does next comes after all of them.
    pub fn start_nodes(&self, cuda: &Cuda, stream: &Stream, nodes: Range<usize>) -> Result<(), CudaError> {
        let nodes = nodes.start..nodes.end.min(self.ends.len());
        let before = |node: usize| node.checked_sub(1).map_or(0, |last| self.ends[last]);
        let mut next = nodes.start;
        let mut under_way: Vec<&Beside> = Vec::new();
        for node in nodes.clone() {
            let due = under_way.iter().take_while(|earlier| earlier.until <= node).count();
            let beside = self.beside.get(&node);
            if due == 0 && beside.is_none() {
                continue;
            }
            self.start_calls(cuda, stream, before(next)..before(node))?;
            next = node;
            under_way.drain(..due).try_for_each(|earlier| stream.wait_for(&earlier.done))?;
            if let Some(beside) = beside {
                let side = cuda.side();
                beside.begun.record(stream)?;
                side.wait_for(&beside.begun)?;
                self.start_calls(cuda, side, before(node)..before(node + 1))?;
                beside.done.record(side)?;
                under_way.push(beside);
                next = node + 1;
            }
        }
        self.start_calls(cuda, stream, before(next)..before(nodes.end))?;
        under_way.iter().try_for_each(|beside| stream.wait_for(&beside.done))
    }

    /// Starts the calls of a node that come before its stop number `phase` and after the one before, or after
    /// the last.
    pub fn start_phase(&self, cuda: &Cuda, stream: &Stream, node: usize, phase: usize) -> Result<(), CudaError> {
        let first = node.checked_sub(1).map_or(0, |last| self.ends[last]);
        let stops = self.stops.get(&node).map_or(&[][..], Vec::as_slice);
        let bounds: Vec<usize> = [first].iter().chain(stops).chain([&self.ends[node]]).copied().collect();
        self.start_calls(cuda, stream, bounds[phase]..bounds[phase + 1])
    }

    /// How many calls consecutive nodes have.
    pub fn calls_of(&self, nodes: &Range<usize>) -> usize {
        let before = |node: usize| node.checked_sub(1).map_or(0, |last| self.ends[last.min(self.ends.len() - 1)]);
        if self.ends.is_empty() { 0 } else { before(nodes.end).saturating_sub(before(nodes.start)) }
    }

    /// The number of calls.
    pub fn calls(&self) -> usize {
        self.calls.len()
    }
}

/// A node and where its tensors are.
pub(super) struct At<'a> {
    plan: &'a Plan,
    node: &'a Node,
    bases: &'a Bases,
    /// The addition that gives the first input, where it is left to this node.
    sum: Option<&'a Node>,
    gate: Option<Address>,
}

impl<'a> At<'a> {
    /// Where a ReLU leaves a bit for each element that it lets pass, for its gradient.
    pub fn gate(&self) -> Option<Address> {
        self.gate
    }

    /// What the first input is the sum of, where the addition is left to this node.
    pub fn summands(&self) -> Option<[Tensor<'a>; 2]> {
        self.sum.map(|sum| [0, 1].map(|index| self.tensor(sum.inputs[index])))
    }

    /// The node.
    pub fn node(&self) -> &'a Node {
        self.node
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.node.inputs.len()
    }

    /// An input. It may have the address of an output that overwrites it.
    pub fn input(&self, index: usize) -> Tensor<'a> {
        self.tensor(self.node.inputs[index])
    }

    /// An output.
    pub fn output(&self, index: usize) -> Tensor<'a> {
        self.tensor(self.node.outputs[index])
    }

    /// Where the statistics of a batch-norm of so many channels stand while they are added up with other
    /// replicas', if they are.
    pub fn statistics(&self, channels: usize) -> Option<Statistics> {
        self.plan.shares_statistics().then(|| Statistics::at(self.bases.statistics, channels))
    }

    /// Where the [`crate::Pass`] stands, as four 64-bit words: seed, step, first sample, samples.
    pub fn pass(&self) -> Address {
        Address::Fixed(self.bases.pass)
    }

    fn tensor(&self, value: Value) -> Tensor<'a> {
        let info = self.plan.graph().info(value);
        let element = |base: u64, start: usize, bytes: usize| Address::Fixed(base + (start * bytes) as u64);
        let bases = self.bases;
        let (mut channels_last, mut rounded) = (false, None);
        let address = match self.plan.place(value) {
            Place::Arena(offset) => element(bases.arena, offset, 1),
            Place::Parameter(index) => {
                let start = self.plan.parameters().range(index).start;
                (channels_last, rounded) = (bases.channels_last[index], Some(element(bases.rounded, start, 2)));
                element(bases.parameters, start, 4)
            }
            Place::Gradient(index) => {
                channels_last = bases.channels_last[index];
                element(bases.gradients, self.plan.parameters().range(index).start, 4)
            }
            Place::State(index) => element(bases.states, self.plan.states().range(index).start, 4),
            Place::None => panic!("{value:?} has no place"),
        };
        Tensor { address, shape: &info.shape, dtype: info.dtype, channels_last, rounded }
    }
}

/// Collects calls.
pub(super) struct Builder<'a> {
    cuda: &'a Cuda,
    calls: Vec<Call>,
    functions: HashMap<String, Function>,
    starts: Vec<Base>,
    scratch_used: usize,
    scratch_bytes: [usize; 2],
    /// Bytes of the arena that nodes beside others work in, and the node before which they are done.
    taken: Vec<(Range<usize>, usize)>,
    /// Working memory that one call of this node after the other may use: where it begins, and its bytes.
    workspace: (u64, usize),
    /// How many calls come before each stop of this node.
    stops: Vec<usize>,
}

/// Bytes of shared memory that a block may ask for: every GPU that multiplies bf16 has them.
pub(super) const SHARED_MAX: usize = 96 << 10;

/// What the beginning of every piece of working memory is a multiple of.
const SCRATCH_ALIGNMENT: usize = 256;

/// Threads of a block, where nothing else is asked for.
pub(super) const BLOCK: u32 = 256;

impl<'a> Builder<'a> {
    fn new(cuda: &'a Cuda) -> Self {
        let (calls, functions, starts) = (Vec::new(), HashMap::new(), Vec::new());
        Self {
            cuda,
            calls,
            functions,
            starts,
            scratch_used: 0,
            scratch_bytes: [0; 2],
            taken: Vec::new(),
            workspace: (0, 0),
            stops: Vec::new(),
        }
    }

    /// Ends a phase of a node: before the next, numbers may be added up with others'.
    pub fn stop(&mut self) {
        self.stops.push(self.calls.len());
    }

    /// Ends a node that may be under way as long as any of some nodes, and beside them if it is done before a node.
    fn end_node(&mut self, arena: u64, plan: &Plan, nodes: &[usize], until: Option<usize>) {
        self.taken.retain(|(_, until)| *until > nodes[0]);
        let taken: Vec<Range<usize>> = self.taken.iter().map(|(bytes, _)| bytes.clone()).collect();
        let gap = plan.free_arena(nodes, &taken);
        let used = self.end_calls((arena, gap), until.is_some());
        self.taken.extend(used.zip(until));
    }

    /// Ends calls that belong together: their working memory lies in a gap of the arena if that has room for it. What they take of the gap.
    fn end_calls(&mut self, (arena, gap): (u64, Range<usize>), beside: bool) -> Option<Range<usize>> {
        let start = gap.start.next_multiple_of(SCRATCH_ALIGNMENT);
        let (bytes, fits) = (self.scratch_used, start + self.scratch_used <= gap.end);
        let base = if fits {
            Base::At(arena + start as u64)
        } else {
            let most = &mut self.scratch_bytes[usize::from(beside)];
            *most = bytes.max(*most);
            Base::Own { beside }
        };
        self.starts.resize(self.calls.len(), base);
        (self.scratch_used, self.workspace) = (0, (0, 0));
        (fits && bytes > 0).then_some(start..start + bytes)
    }

    /// The GPU.
    pub fn cuda(&self) -> &'a Cuda {
        self.cuda
    }

    /// Working memory of this node, aligned to 256 bytes; the next node may get the same again.
    pub fn scratch(&mut self, bytes: usize) -> Address {
        let offset = self.scratch_used;
        self.scratch_used += bytes.next_multiple_of(SCRATCH_ALIGNMENT);
        Address::Scratch(offset as u64)
    }

    /// Working memory of one call: calls of a node that follow each other get the same.
    pub fn workspace(&mut self, bytes: usize) -> Address {
        if bytes > self.workspace.1 {
            let Address::Scratch(offset) = self.scratch(bytes) else { unreachable!("working memory is") };
            self.workspace = (offset, bytes);
        }
        Address::Scratch(self.workspace.0)
    }

    fn function(&mut self, name: &str) -> Result<Function, CudaError> {
        if let Some(&function) = self.functions.get(name) {
            return Ok(function);
        }
        let function = self.cuda.function(name)?;
        self.functions.insert(name.to_owned(), function);
        Ok(function)
    }

    /// How many blocks of a kernel run at the same time on the whole GPU.
    pub fn blocks_at_once(&mut self, name: &str, threads: u32) -> Result<usize, CudaError> {
        self.blocks_with_shared(name, threads, 0)
    }

    /// The same where blocks have shared memory besides the kernel's own.
    pub fn blocks_with_shared(&mut self, name: &str, threads: u32, shared_bytes: usize) -> Result<usize, CudaError> {
        let function = self.function(name)?;
        if shared_bytes > 0 {
            function.allow_shared(SHARED_MAX)?;
        }
        Ok(function.blocks_per_multiprocessor(threads, shared_bytes)? * self.cuda.multiprocessors())
    }

    /// A kernel by name, with a grid of blocks. The arguments are those of the kernel, in order and of its types.
    pub fn launch(
        &mut self,
        name: &str,
        grid: [usize; 3],
        block: u32,
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        self.launch_with_shared(name, (grid, block), 0, arguments)
    }

    /// The same with shared memory besides the kernel's own, which [`Builder::blocks_with_shared`] was asked about before.
    pub fn launch_with_shared(
        &mut self,
        name: &str,
        (grid, block): ([usize; 3], u32),
        shared_bytes: usize,
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        let function = self.function(name)?;
        let shared_bytes = shared_bytes as u32;
        let grid = grid.map(|size| u32::try_from(size.max(1)).expect("a grid of blocks that can be counted"));
        let (arguments, completed, early) = (arguments.to_vec(), Vec::new(), false);
        self.calls.push(Call::Launch(Launch { function, grid, block, shared_bytes, early, arguments, completed }));
        Ok(())
    }

    /// Lets the kernel that was launched last, the one of this name, be made ready while the call ahead of it ends.
    pub fn allow_early(&mut self, name: &str) {
        assert!(compile::waits(name), "{name} does not wait for what it reads");
        let Some(Call::Launch(launch)) = self.calls.last_mut() else { panic!("{name} was not launched last") };
        assert_eq!(self.functions.get(name), Some(&launch.function), "{name} was launched last");
        launch.early = self.cuda.starts_early();
    }

    /// A kernel with one thread for each of so many pieces, at most a few waves of blocks: kernels stride over the rest.
    pub fn launch_each(&mut self, name: &str, pieces: usize, arguments: &[Argument]) -> Result<(), CudaError> {
        let blocks = pieces.div_ceil(BLOCK as usize).min(self.cuda.multiprocessors() * 32);
        self.launch(name, [blocks, 1, 1], BLOCK, arguments)
    }

    /// Any other call.
    pub fn call(&mut self, call: Call) {
        self.calls.push(call);
    }

    fn finish(self, ends: Vec<usize>) -> Program {
        let Self { calls, starts: scratch, scratch_bytes, .. } = self;
        Program { calls, scratch, ends, scratch_bytes, beside: BTreeMap::new(), stops: BTreeMap::new() }
    }
}
