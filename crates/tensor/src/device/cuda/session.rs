//! Training on the GPU: weights, optimizer and data stay there, and a step is one graph that the host starts with one call.
//!
//! The first step runs call by call, which loads what the libraries load late; the second is recorded, and from then on it is
//! replayed. What changes from step to step (seed, learning rate, how many rows count) stands in a few bytes that are copied before it.

mod album;
mod exchange;
mod hosted;
mod input;
mod parts;
mod room;
mod update;

use std::ops::Range;
use std::sync::Arc;

pub use album::Album;
use exchange::Exchange;
use hosted::HostExchange;
use input::Input;
pub use input::Samples;
pub use parts::Part;
use parts::Sums;
use room::Room;
use update::{Layers, NUMBERS_BYTES, ROWS_AT, VERDICT_BYTES, write_numbers};

use super::bound::{channels_last, translate};
use super::driver::{Event, Memory, Pinned};
use super::graph::Recorded;
use super::program::{Address, Bases, Program, Statistics};
use super::{Cuda, CudaError, lower};
use crate::buffer::{Buffer, bytes_of, bytes_of_mut};
use crate::device::cpu::update::Update;
use crate::dtype::DType;
use crate::execute::Pass;
use crate::graph::Value;
use crate::plan::{Place, Plan};
use crate::store::Store;

/// The values by which a graph on the device is fed and read.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBindings {
    /// Images or tokens.
    pub x: Value,
    /// Class numbers.
    pub targets: Value,
    /// The answers, in f32.
    pub logits: Value,
    /// The gradient of the loss, in a graph that has a backward pass.
    pub seed: Option<Value>,
}

/// The numbers that change from step to step.
#[derive(Clone, Copy, Debug)]
pub struct StepNumbers {
    /// Decides dropout.
    pub pass: Pass,
    /// Gradients are scaled down to this norm; infinity leaves them.
    pub norm_max: f32,
    /// How parameters change: those that do not decay, and those that do.
    pub rules: [Update; 2],
}

/// What a step or an evaluation gives back beside weights and logits. (The `StepOutput` of training is that
/// of all replicas.)
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceOutput {
    /// The sum of the rows' losses.
    pub loss: f64,
    /// Rows whose largest logit was the right one.
    pub top1: u64,
    /// Rows with the right class among the five largest.
    pub top5: u64,
    /// Whether the loss was a number.
    pub loss_is_finite: bool,
    /// Whether all gradients were.
    pub gradients_are_finite: bool,
    /// The norm of the gradients before they were scaled down.
    pub norm: f64,
}

/// Three numbers of the tally, then the verdict on the gradients.
const OUTPUT_BYTES: usize = 24 + VERDICT_BYTES;

/// Reads them.
fn output_in(bytes: &[u8]) -> DeviceOutput {
    let word = |at: usize| f64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let spoiled = u32::from_le_bytes(bytes[24..28].try_into().expect("four bytes"));
    DeviceOutput {
        loss: word(0),
        top1: word(8) as u64,
        top5: word(16) as u64,
        loss_is_finite: spoiled != 1,
        gradients_are_finite: spoiled != 2,
        norm: word(32),
    }
}
/// Steps that may be under way.
const AHEAD: usize = 8;

/// A graph of the session: of training or of evaluation.
#[derive(Debug)]
struct DeviceGraph {
    plan: Plan,
    bindings: DeviceBindings,
    program: Program,
    /// How good the answers are.
    tally: Program,
    /// In training: whether the gradients are numbers, and the step.
    update: Option<Program>,
    recorded: Recorded,
    /// Where its arena begins.
    arena: u64,
    /// Where its gradients are.
    gradients: u64,
}

/// A model on a GPU.
#[derive(Debug)]
pub struct Session {
    /// One for each number of samples, the largest first; none if it only evaluates.
    train: Vec<DeviceGraph>,
    /// Which of them computes now.
    active: usize,
    /// Gradients of the parts of a batch, once there are parts.
    sums: Option<Sums>,
    /// The way to other GPUs that train the same model. Dropped after the graphs that go there.
    exchange: Option<Exchange>,
    /// What the host needs to take part in steps, once it does.
    hosted: Option<Box<HostExchange>>,
    eval: DeviceGraph,
    bases: Bases,
    arena: Memory,
    parameters: Memory,
    /// Gradients that do not stand in the arena.
    gradients: Memory,
    states: Memory,
    /// A copy of the states, while samples are computed that do not count.
    kept_states: Option<Memory>,
    slots: Vec<Memory>,
    numbers: Memory,
    output: Memory,
    input: Input,
    results: Pinned,
    staged_numbers: Vec<(Pinned, Event)>,
    started: usize,
    rows: u32,
    layers: Layers,
    /// Held as long as programs refer to them.
    rounded: Memory,
    gates: Memory,
    statistics: Memory,
    scratch: Memory,
    cuda: Arc<Cuda>,
}

/// What a session is made of.
#[derive(Debug)]
pub struct Blueprint<'a> {
    /// The training graphs, one for each number of samples, the largest first.
    pub train: &'a [(&'a Plan, DeviceBindings)],
    /// The evaluation graph.
    pub eval: (&'a Plan, DeviceBindings),
    /// Tensors of the optimizer.
    pub slots: usize,
    /// Whether batches are computed in parts, whose gradients are added up.
    pub parts: bool,
    /// Where the parameters stand, and whether they decay.
    pub decays: &'a [(Range<usize>, bool)],
    /// c of LARS, where each parameter that decays has a rate of its own: c‖w‖/(‖g‖+λ‖w‖).
    pub layer_rates: Option<f32>,
}

impl Session {
    /// Takes memory, prepares every call.
    ///
    /// # Errors
    /// When the memory is not there (the sentence says how much was needed, how much was free and what would fit), or a node cannot be
    /// computed.
    pub fn new(cuda: &Arc<Cuda>, blueprint: &Blueprint<'_>) -> Result<Self, CudaError> {
        let alone = cuda.enter()?;
        let plan = blueprint.train.first().map_or(blueprint.eval.0, |(plan, _)| plan);
        let room = Room::new(cuda, blueprint)?;
        let take = |bytes: usize, what: &str| Memory::zeroed(cuda.context(), bytes, what);
        let (words, states) = (plan.parameters().length() * 4, plan.states().length() * 4);
        let arena = take(room.arena, "a step")?;
        let parameters = take(words, "the parameters")?;
        let rounded = take(words / 2, "the parameters in bf16")?;
        let gradients = take(room.gradients, "the gradients")?;
        let states = take(states, "the states")?;
        let slots = (0..blueprint.slots).map(|_| take(words, "the optimizer")).collect::<Result<Vec<_>, _>>()?;
        let (numbers, output) = (take(NUMBERS_BYTES, "a step's numbers")?, take(OUTPUT_BYTES, "a step's results")?);
        let gates = take(room.gates, "what ReLUs let pass")?;
        let statistics = take(Statistics::bytes(plan), "statistics of all replicas")?;
        let bases = Bases {
            arena: arena.address(),
            parameters: parameters.address(),
            rounded: rounded.address(),
            gradients: gradients_of(plan, &arena, &gradients),
            states: states.address(),
            pass: numbers.address(),
            gates: gates.address(),
            statistics: statistics.address(),
            channels_last: channels_last(plan),
        };
        let layers = Layers::new(cuda, plan.parameters().length(), (blueprint.decays, blueprint.layer_rates))?;
        let compiler =
            GraphCompiler { cuda, bases: &bases, slots: &slots, layers: &layers, numbers: &numbers, output: &output };
        let (mut train, mut eval) = compiler.graphs(blueprint, room.eval_start, [&arena, &gradients])?;
        let programs = || train.iter().chain([&eval]).flat_map(DeviceGraph::programs);
        let working = programs().map(Program::scratch_bytes).max().unwrap_or(0);
        room.check_working(cuda, working)?;
        let scratch = take(working, "working memory")?;
        train.iter_mut().chain([&mut eval]).try_for_each(|graph| graph.complete(scratch.address()))?;
        let (input, context) = (Input::new(cuda, train.iter().chain([&eval]))?, cuda.context());
        let staged = |_| Ok((Pinned::zeroed(context, NUMBERS_BYTES)?, Event::new(context)?));
        let staged_numbers = (0..AHEAD).map(staged).collect::<Result<Vec<_>, CudaError>>()?;
        let results = Pinned::zeroed(context, OUTPUT_BYTES)?;
        drop(alone);
        Ok(Self {
            train,
            active: 0,
            exchange: None,
            hosted: None,
            eval,
            bases,
            arena,
            parameters,
            gradients,
            states,
            kept_states: None,
            slots,
            numbers,
            output,
            input,
            sums: None,
            results,
            staged_numbers,
            started: 0,
            rows: 0,
            layers,
            rounded,
            gates,
            statistics,
            scratch,
            cuda: Arc::clone(cuda),
        })
    }

    /// The GPU.
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// Rows of answers that count in the batch that was filled in last.
    pub fn rows(&self) -> usize {
        self.rows as usize
    }

    /// Calls in a training step.
    pub fn calls(&self) -> usize {
        self.train.first().map_or(0, |graph| graph.programs().map(Program::calls).sum())
    }

    /// Bytes that it holds on the GPU.
    pub fn bytes(&self) -> usize {
        self.memory().iter().map(|(_, bytes)| bytes).sum()
    }

    /// What it holds on the GPU, with the bytes of each.
    pub fn memory(&self) -> [(&'static str, usize); 7] {
        let slots = self.slots.iter().map(Memory::bytes).sum();
        let small =
            [&self.states, &self.numbers, &self.output, &self.statistics].map(Memory::bytes).iter().sum::<usize>()
                + self.layers.bytes();
        [
            ("arena", self.arena.bytes()),
            ("gates", self.gates.bytes()),
            ("working", self.scratch.bytes()),
            ("parameters", self.parameters.bytes() + self.rounded.bytes()),
            ("gradients", self.gradients.bytes() + self.hosted.as_ref().map_or(0, |hosted| hosted.bytes())),
            ("optimizer", slots),
            ("rest", small + self.input.bytes() + self.sums.as_ref().map_or(0, Sums::bytes)),
        ]
    }

    /// Brings weights, states and the optimizer's tensors to the GPU.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the store is of another model.
    pub fn load(&mut self, store: &Store, slots: &[Buffer]) -> Result<(), CudaError> {
        let _alone = self.cuda.enter()?;
        let (stream, plan) = (self.cuda.stream(), self.plan());
        assert_eq!(store.layout(), plan.parameters(), "the store was made for another model");
        let upload = |memory: &Memory, values: &[f32]| {
            let mut values = values.to_vec();
            translate(plan, &self.bases.channels_last, &mut values, true);
            stream.upload(memory.address(), bytes_of(&values))
        };
        upload(&self.parameters, &store.parameters)?;
        self.slots.iter().zip(slots).try_for_each(|(memory, slot)| upload(memory, slot))?;
        stream.upload(self.states.address(), bytes_of(&store.states[..]))?;
        let [full, rounded] = [self.bases.parameters, self.bases.rounded].map(Address::Fixed);
        let mut cast = Program::of_calls(&self.cuda, |builder| {
            lower::cast(builder, full, DType::F32, rounded, DType::Bf16, plan.parameters().length())
        })?;
        cast.complete(0)?;
        cast.start(&self.cuda, stream)?;
        stream.wait()
    }

    /// Brings weights, states and the optimizer's tensors to the host.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn fetch(&self, store: &mut Store, slots: &mut [Buffer]) -> Result<(), CudaError> {
        let _alone = self.cuda.enter()?;
        let (stream, plan) = (self.cuda.stream(), self.plan());
        let download = |address: u64, values: &mut [f32]| {
            stream.download(address, bytes_of_mut(values))?;
            translate(plan, &self.bases.channels_last, values, false);
            Ok::<(), CudaError>(())
        };
        download(self.parameters.address(), &mut store.parameters)?;
        if !store.gradients.is_empty() {
            download(
                self.train.get(self.active).map_or(self.bases.gradients, |graph| graph.gradients),
                &mut store.gradients,
            )?;
        }
        self.slots.iter().zip(slots).try_for_each(|(memory, slot)| download(memory.address(), slot))?;
        stream.download(self.states.address(), bytes_of_mut(&mut store.states[..]))
    }

    fn plan(&self) -> &Plan {
        self.train.get(self.active).map_or(&self.eval.plan, |graph| &graph.plan)
    }

    /// The training graph that computes now.
    fn training(&self) -> &DeviceGraph {
        self.train.get(self.active).expect("a training graph")
    }

    /// Computes with the training graph of this number, in the order of [`Blueprint::train`], from the next batch that is filled in on.
    ///
    /// # Panics
    /// When there is none.
    pub fn choose(&mut self, number: usize) {
        assert!(number < self.train.len(), "training graph {number} of {}", self.train.len());
        self.active = number;
    }

    /// Keeps the running statistics as they are before what is started next, for [`Session::restore_states`].
    ///
    /// # Errors
    /// When the GPU does not answer, or has no room for them.
    pub fn keep_states(&mut self) -> Result<(), CudaError> {
        let _alone = self.cuda.enter()?;
        if self.kept_states.is_none() {
            self.kept_states = Some(Memory::zeroed(self.cuda.context(), self.states.bytes(), "a copy of the states")?);
        }
        let kept = self.kept_states.as_ref().expect("taken above");
        self.cuda.stream().copy(kept.address(), self.states.address(), self.states.bytes())
    }

    /// Takes the running statistics back that were kept last, after what was started so far.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When none were kept.
    pub fn restore_states(&mut self) -> Result<(), CudaError> {
        let _alone = self.cuda.enter()?;
        let kept = self.kept_states.as_ref().expect("states were kept");
        self.cuda.stream().copy(self.states.address(), kept.address(), self.states.bytes())
    }

    /// Starts a training step on the batch that was filled in last, without waiting for it.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the session has no training graph.
    pub fn start(&mut self, numbers: &StepNumbers) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        self.give(numbers)?;
        let exchange = self.exchange.as_ref().map(|exchange| (exchange, self.active));
        self.train.get_mut(self.active).expect("a training graph").start(&cuda, exchange)?;
        cuda.stream().download_later(self.output.address(), &mut self.results, OUTPUT_BYTES)
    }

    /// Waits for all steps that were started; what the last one gave back.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn finish(&mut self) -> Result<DeviceOutput, CudaError> {
        let _alone = self.cuda.enter()?;
        self.cuda.stream().wait()?;
        Ok(output_in(self.results.bytes_mut()))
    }

    /// Answers the batch that was filled in last: logits of the rows that it has, and how good they are.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn evaluate(&mut self) -> Result<(Vec<f32>, DeviceOutput), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        {
            let _alone = cuda.enter()?;
            let nothing = Update::Descent { rate: 0.0, decay: 0.0 };
            self.give(&StepNumbers { pass: Pass::default(), norm_max: f32::INFINITY, rules: [nothing; 2] })?;
            self.eval.start(&cuda, None)?;
            cuda.stream().download_later(self.output.address(), &mut self.results, OUTPUT_BYTES)?;
        }
        let output = self.finish()?;
        let _alone = cuda.enter()?;
        let shape = self.eval.plan.graph().shape(self.eval.bindings.logits);
        let mut logits = vec![0.0f32; self.rows as usize * shape.last()];
        cuda.stream().download(self.eval.address(self.eval.bindings.logits), bytes_of_mut(&mut logits))?;
        Ok((logits, output))
    }

    /// Seconds of every node of the training graph on the batch that was filled in last. Changes states, and no weights.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the session has no training graph.
    pub fn profile(&mut self) -> Result<Vec<f64>, CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let graph = self.training();
        let nodes = graph.plan.graph().nodes().len();
        let events = (0..=nodes).map(|_| Event::new(cuda.context())).collect::<Result<Vec<_>, _>>()?;
        // Twice: the first time, libraries load what they load late.
        for _ in 0..2 {
            events[0].record(cuda.stream())?;
            for node in 0..nodes {
                graph.program.start_node(&cuda, cuda.stream(), node)?;
                events[node + 1].record(cuda.stream())?;
            }
            cuda.stream().wait()?;
        }
        events.windows(2).map(|pair| pair[1].seconds_since(&pair[0])).collect()
    }

    /// Has the numbers of a step copied before it.
    fn give(&mut self, numbers: &StepNumbers) -> Result<(), CudaError> {
        let (pinned, copied) = &mut self.staged_numbers[self.started % AHEAD];
        if self.started >= AHEAD {
            copied.wait()?;
        }
        write_numbers(pinned.bytes_mut(), numbers, self.rows);
        self.cuda.stream().upload_later(self.numbers.address(), pinned, NUMBERS_BYTES)?;
        copied.record(self.cuda.stream())?;
        self.started += 1;
        Ok(())
    }
}

/// Where a plan's gradients are: in the arena, if they stand there.
fn gradients_of(plan: &Plan, arena: &Memory, gradients: &Memory) -> u64 {
    if plan.arena_has_gradients() { arena.address() } else { gradients.address() }
}

impl DeviceGraph {
    fn address(&self, value: Value) -> u64 {
        let Place::Arena(offset) = self.plan.place(value) else { panic!("inputs and outputs live in the arena") };
        self.arena + offset as u64
    }

    /// Completes all addresses: the working memory starts here.
    fn complete(&mut self, scratch: u64) -> Result<(), CudaError> {
        let programs = [&mut self.program, &mut self.tally].into_iter().chain(&mut self.update);
        programs.into_iter().try_for_each(|program| program.complete(scratch))
    }

    fn programs(&self) -> impl Iterator<Item = &Program> {
        [&self.program, &self.tally].into_iter().chain(&self.update)
    }

    /// `exchange` is the way to others, where there are some, and this graph's number.
    fn start(&mut self, cuda: &Cuda, exchange: Option<(&Exchange, usize)>) -> Result<(), CudaError> {
        let stream = cuda.stream();
        let (program, tally, update) = (&self.program, &self.tally, &self.update);
        let work = || {
            match exchange {
                Some((exchange, graph)) => exchange.start((program, graph), cuda, stream, |_| Ok(()))?,
                None => program.start(cuda, stream)?,
            }
            tally.start(cuda, stream)?;
            update.iter().try_for_each(|update| update.start(cuda, stream))
        };
        let calls = || exchange.map(|(exchange, _)| exchange.calls()).transpose();
        self.recorded.start_with(stream, exchange.is_none(), work, calls)
    }
}

/// What the programs of a graph are made with: where everything stands on the device.
struct GraphCompiler<'a> {
    cuda: &'a Cuda,
    bases: &'a Bases,
    slots: &'a [Memory],
    layers: &'a Layers,
    numbers: &'a Memory,
    output: &'a Memory,
}

impl GraphCompiler<'_> {
    /// The graphs of a session: those of training, and that of evaluation, whose arena begins so many bytes later.
    fn graphs(
        &self,
        blueprint: &Blueprint<'_>,
        eval_start: usize,
        [arena, gradients]: [&Memory; 2],
    ) -> Result<(Vec<DeviceGraph>, DeviceGraph), CudaError> {
        let train = blueprint.train.iter().map(|&(plan, bindings)| {
            assert_eq!(channels_last(plan), self.bases.channels_last, "weights have one order for all graphs");
            let bases = Bases { gradients: gradients_of(plan, arena, gradients), ..self.bases.clone() };
            GraphCompiler { bases: &bases, ..*self }.graph(plan, bindings, true)
        });
        let train = train.collect::<Result<Vec<_>, _>>()?;
        let bases = Bases { arena: self.bases.arena + eval_start as u64, ..self.bases.clone() };
        let eval = GraphCompiler { bases: &bases, ..*self }.graph(blueprint.eval.0, blueprint.eval.1, false)?;
        Ok((train, eval))
    }

    fn graph(&self, plan: &Plan, bindings: DeviceBindings, trains: bool) -> Result<DeviceGraph, CudaError> {
        let program = Program::new(self.cuda, plan, self.bases, true)?;
        let tally = self.tally(plan, bindings)?;
        let update = trains.then(|| self.update(plan)).transpose()?;
        let Bases { arena, gradients, .. } = *self.bases;
        let recorded = Recorded::default();
        Ok(DeviceGraph { plan: plan.clone(), bindings, program, tally, update, recorded, arena, gradients })
    }

    /// What follows the graph.
    fn tally(&self, plan: &Plan, bindings: DeviceBindings) -> Result<Program, CudaError> {
        let address = |value: Value| match plan.place(value) {
            Place::Arena(offset) => Address::Fixed(self.bases.arena + offset as u64),
            _ => panic!("inputs and outputs live in the arena"),
        };
        let shape = plan.graph().shape(bindings.logits);
        let size = (shape.elements() / shape.last(), shape.last());
        Program::of_calls(self.cuda, |builder| {
            let rows = Address::Fixed(self.numbers.address() + ROWS_AT);
            let output = Address::Fixed(self.output.address());
            lower::tally(builder, address(bindings.logits), address(bindings.targets), rows, size, output)
        })
    }
}
