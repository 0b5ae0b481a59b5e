//! A plan on the GPU for an [`crate::Executor`]: node by node, with what the caller keeps in the host's store. For tests, profiles and
//! whatever looks between nodes; a whole training run belongs to a [`super::session`].

use std::ops::Range;
use std::sync::Arc;

use super::driver::Memory;
use super::program::{Address, Bases, Program};
use super::{Cuda, CudaError};
use crate::bf16::Bf16;
use crate::buffer::{bytes_of, bytes_of_mut};
use crate::dtype::{DType, Element};
use crate::execute::{Floats, Pass, Progress, Turn};
use crate::graph::Value;
use crate::op::Op;
use crate::plan::{Due, Layout, Place, Plan};
use crate::store::Store;

/// What a caller wants between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Between {
    /// Nothing: nodes follow each other without waiting.
    Nothing,
    /// To be called when each node is done.
    Done,
    /// And to see what it gave.
    Outputs,
}

/// Bytes of a [`Pass`] on the device.
pub(super) const PASS_BYTES: usize = 4 * size_of::<u64>();

/// A pass as kernels read it: four words of 64 bits.
pub(super) fn pass_bytes(pass: Pass) -> [u8; PASS_BYTES] {
    let Pass { seed, step, first_sample, samples } = pass;
    let mut bytes = [0; PASS_BYTES];
    for (target, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip([seed, step, first_sample, samples as u64]) {
        target.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// A plan with its memory on the GPU.
#[derive(Debug)]
pub(crate) struct Bound {
    program: Program,
    bases: Bases,
    arena: Memory,
    parameters: Memory,
    rounded: Memory,
    gradients: Memory,
    states: Memory,
    pass: Memory,
    _scratch: Memory,
    /// The arenas of micro-batches that are not the one at hand.
    saved: Vec<Option<Memory>>,
    /// Whose activations stand in the arena.
    resident: usize,
    /// Whether the parameters here are the store's until the caller says otherwise; else they are brought up to date for every run.
    holds: bool,
    fresh: bool,
    cuda: Arc<Cuda>,
}

/// Which parameters stand in cuDNN's order: those that only convolutions read, and whose gradient, if it has a place of its own, is
/// written by one.
pub(super) fn channels_last(plan: &Plan) -> Vec<bool> {
    let parameters = plan.graph().parameters();
    let mut last = vec![false; parameters.len()];
    for (index, &value) in parameters.iter().enumerate() {
        let mut reads = plan.graph().nodes().iter().flat_map(|node| {
            let positions = node.inputs.iter().enumerate().filter(|(_, input)| **input == value);
            positions.map(|(position, _)| (&node.op, position))
        });
        let weight = |(op, position): (&Op, usize)| {
            matches!(op, Op::Conv2d { .. } | Op::Conv2dGradInput { .. }) && position == 1
        };
        last[index] = reads.clone().next().is_some() && reads.all(weight);
    }
    for node in plan.graph().nodes() {
        for &output in &node.outputs {
            if let Place::Gradient(index) = plan.place(output) {
                last[index] &= matches!(node.op, Op::Conv2dGradWeight { .. });
            }
        }
    }
    last
}

/// `to`, of `rows`·`columns` elements, becomes `from` transposed. Sixteen rows at a time, which are a cache line of the result.
fn transpose(from: &[f32], columns: usize, to: &mut [f32]) {
    let rows = from.len() / columns.max(1);
    for first in (0..rows).step_by(16) {
        let lines = first..rows.min(first + 16);
        for column in 0..columns {
            lines.clone().for_each(|row| to[column * rows + row] = from[row * columns + column]);
        }
    }
}

/// Translates flat parameters between the host's order and the GPU's.
pub(super) fn translate(plan: &Plan, last: &[bool], data: &mut [f32], to_gpu: bool) {
    translate_some(plan, last, (0..last.len(), 0), data, to_gpu);
}

/// The same for some of them, of which `data` has what begins at this element.
fn translate_some(
    plan: &Plan,
    last: &[bool],
    (parameters, start): (Range<usize>, usize),
    data: &mut [f32],
    to_gpu: bool,
) {
    let mut copy = Vec::new();
    for index in parameters.filter(|&index| last[index]) {
        let range = plan.parameters().range(index);
        let part = &mut data[range.start - start..range.end - start];
        copy.clear();
        copy.extend_from_slice(part);
        let outputs = plan.graph().shape(plan.graph().parameters()[index]).last();
        transpose(&copy, if to_gpu { outputs } else { part.len() / outputs }, part);
    }
}

impl Bound {
    /// Takes memory and makes the program.
    pub fn new(cuda: &Arc<Cuda>, plan: &Plan) -> Result<Self, CudaError> {
        if plan.shares_statistics() {
            return Err(CudaError(
                "node by node, a GPU takes the statistics of a batch-norm over its own batch".into(),
            ));
        }
        let _alone = cuda.enter()?;
        let take = |bytes: usize, what: &str| Memory::zeroed(cuda.context(), bytes, what);
        let words = |layout: &Layout| layout.length() * DType::F32.bytes();
        let arena = take(plan.arena_bytes(), "the arena of a step")?;
        let parameters = take(words(plan.parameters()), "the parameters")?;
        let rounded = take(words(plan.parameters()) / 2, "the parameters in bf16")?;
        let gradients = take(if plan.stores_gradients() { words(plan.parameters()) } else { 0 }, "the gradients")?;
        let states = take(words(plan.states()), "the states")?;
        let pass = take(PASS_BYTES, "the pass")?;
        let bases = Bases {
            arena: arena.address(),
            parameters: parameters.address(),
            rounded: rounded.address(),
            gradients: gradients.address(),
            states: states.address(),
            pass: pass.address(),
            gates: 0,
            statistics: 0,
            channels_last: channels_last(plan),
        };
        let mut program = Program::new(cuda, plan, &bases, false)?;
        let scratch = take(program.scratch_bytes(), "working memory")?;
        program.complete(scratch.address())?;
        let cuda = Arc::clone(cuda);
        Ok(Self {
            program,
            bases,
            arena,
            parameters,
            rounded,
            gradients,
            states,
            pass,
            _scratch: scratch,
            saved: Vec::new(),
            resident: 0,
            holds: false,
            fresh: false,
            cuda,
        })
    }

    /// Keeps the parameters from run to run; they have changed since the last one.
    pub fn hold(&mut self) {
        (self.holds, self.fresh) = (true, false);
    }

    /// Has the activations of another micro-batch in the arena from now on; those that stood there are kept.
    pub fn switch(&mut self, slot: usize) -> Result<(), CudaError> {
        if slot == self.resident {
            return Ok(());
        }
        let _alone = self.cuda.enter()?;
        let (bytes, stream) = (self.arena.bytes(), self.cuda.stream());
        while self.saved.len() <= slot.max(self.resident) {
            self.saved.push(None);
        }
        let kept = match self.saved[self.resident].take() {
            Some(kept) => kept,
            None => Memory::zeroed(self.cuda.context(), bytes, "the arena of a micro-batch")?,
        };
        stream.copy(kept.address(), self.arena.address(), bytes)?;
        self.saved[self.resident] = Some(kept);
        if let Some(saved) = &self.saved[slot] {
            stream.copy(self.arena.address(), saved.address(), bytes)?;
        }
        self.resident = slot;
        stream.wait()
    }

    /// Writes bytes of the arena.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let _alone = self.cuda.enter()?;
        self.cuda.stream().upload(self.arena.address() + offset as u64, bytes)
    }

    /// Reads bytes of the arena.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        let _alone = self.cuda.enter()?;
        self.cuda.stream().download(self.arena.address() + offset as u64, bytes)
    }

    /// Fills the arena with NaN.
    pub fn poison(&self) -> Result<(), CudaError> {
        let _alone = self.cuda.enter()?;
        self.cuda.stream().fill(self.arena.address(), 0xff, self.arena.bytes())?;
        self.cuda.stream().wait()
    }

    /// Runs some nodes with the store's tensors, which are brought up to date with the run's.
    pub fn run(
        &mut self,
        (plan, nodes): (&Plan, Range<usize>),
        store: &mut Store,
        pass: Pass,
        between: Between,
        watch: &mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        self.give(plan, store, pass)?;
        let last = nodes.end == plan.graph().nodes().len();
        let mut dues = plan.dues_from(nodes.start).iter().peekable();
        'nodes: for index in nodes {
            self.program.start_node(&cuda, cuda.stream(), index)?;
            if between != Between::Nothing {
                cuda.stream().wait()?;
                let outputs = if between == Between::Outputs { self.outputs(plan, index)? } else { Vec::new() };
                let floats: Vec<Floats<'_>> = outputs.iter().map(|values| Floats::F32(values)).collect();
                if !watch(Progress::Node(index, &floats)) {
                    break 'nodes;
                }
            }
            while let Some(&Due { bucket, apply, .. }) = dues.next_if(|due| due.node == index) {
                if !self.turn(plan, store, (bucket, apply), watch)? {
                    break 'nodes;
                }
            }
        }
        self.take(plan, store, last)
    }

    /// Uploads the store.
    fn give(&mut self, plan: &Plan, store: &Store, pass: Pass) -> Result<(), CudaError> {
        let stream = self.cuda.stream();
        stream.upload(self.states.address(), bytes_of(&store.states[..]))?;
        stream.upload(self.pass.address(), &pass_bytes(pass))?;
        if self.fresh {
            return Ok(());
        }
        self.fresh = self.holds;
        let mut parameters = store.parameters.to_vec();
        translate(plan, &self.bases.channels_last, &mut parameters, true);
        stream.upload(self.parameters.address(), bytes_of(&parameters))?;
        let elements = plan.parameters().length();
        let [full, rounded] = [&self.parameters, &self.rounded].map(|memory| Address::Fixed(memory.address()));
        let mut cast = Program::of_calls(&self.cuda, |builder| {
            super::lower::cast(builder, full, DType::F32, rounded, DType::Bf16, elements)
        })?;
        cast.complete(0)?;
        cast.start(&self.cuda, stream)
    }

    /// Downloads states into the store, and gradients, which are there after the last node.
    fn take(&self, plan: &Plan, store: &mut Store, last: bool) -> Result<(), CudaError> {
        let stream = self.cuda.stream();
        stream.download(self.states.address(), bytes_of_mut(&mut store.states[..]))?;
        if plan.stores_gradients() && last {
            store.gradients.copy_from_slice(&self.all_gradients(plan)?);
        }
        Ok(())
    }

    /// The float outputs of a node.
    fn outputs(&self, plan: &Plan, node: usize) -> Result<Vec<Vec<f32>>, CudaError> {
        let outputs = plan.graph().nodes()[node].outputs.iter();
        outputs
            .filter(|&&output| plan.graph().dtype(output).is_float())
            .map(|&output| self.fetch(plan, output))
            .collect()
    }

    fn fetch(&self, plan: &Plan, value: Value) -> Result<Vec<f32>, CudaError> {
        let info = plan.graph().info(value);
        let words = |base: &Memory, start: usize| base.address() + (start * DType::F32.bytes()) as u64;
        let address = match plan.place(value) {
            Place::Arena(offset) => self.arena.address() + offset as u64,
            Place::Gradient(index) => words(&self.gradients, plan.parameters().range(index).start),
            Place::Parameter(index) => words(&self.parameters, plan.parameters().range(index).start),
            Place::State(index) => words(&self.states, plan.states().range(index).start),
            Place::None => panic!("{value:?} has no place"),
        };
        fn values<T: Element>(cuda: &Cuda, address: u64, length: usize) -> Result<Vec<T>, CudaError> {
            let mut values = vec![T::default(); length];
            cuda.stream().download(address, bytes_of_mut(&mut values))?;
            Ok(values)
        }
        let length = info.shape.elements();
        match info.dtype {
            DType::Bf16 => Ok(values::<Bf16>(&self.cuda, address, length)?.into_iter().map(Bf16::to_f32).collect()),
            _ => values(&self.cuda, address, length),
        }
    }

    /// The turn of a bucket: its gradients and parameters come to the host, and go back as they were changed.
    fn turn(
        &self,
        plan: &Plan,
        store: &mut Store,
        (number, apply): (usize, bool),
        watch: &mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Result<bool, CudaError> {
        let bucket = &plan.buckets()[number];
        let mut gradients = self.bucket(plan, number)?;
        let goes_on = if apply {
            let parameters = &mut store.parameters[bucket.elements.clone()];
            let turn = Turn::Apply { bucket: number, gradients: &mut gradients, parameters };
            let goes_on = watch(Progress::Turn(turn));
            let changed = store.parameters[bucket.elements.clone()].to_vec();
            self.give_bucket(plan, number, changed, self.parameters.address())?;
            goes_on
        } else {
            watch(Progress::Turn(Turn::Final { bucket: number, gradients: &mut gradients }))
        };
        match bucket.place {
            Place::Arena(offset) => {
                self.cuda.stream().upload(self.arena.address() + offset as u64, bytes_of(&gradients))?;
            }
            _ => self.give_bucket(plan, number, gradients, self.gradients.address())?,
        }
        Ok(goes_on)
    }

    /// Uploads a bucket's part of the parameters or gradients that begin at this address.
    fn give_bucket(&self, plan: &Plan, number: usize, mut data: Vec<f32>, address: u64) -> Result<(), CudaError> {
        let bucket = &plan.buckets()[number];
        let which = (bucket.parameters.clone(), bucket.elements.start);
        translate_some(plan, &self.bases.channels_last, which, &mut data, true);
        self.cuda.stream().upload(address + (bucket.elements.start * DType::F32.bytes()) as u64, bytes_of(&data))
    }

    /// The gradients of a bucket in the host's order, with zeros in the gaps between them.
    fn bucket(&self, plan: &Plan, number: usize) -> Result<Vec<f32>, CudaError> {
        let (bucket, stream) = (&plan.buckets()[number], self.cuda.stream());
        let (start, mut gradients) = (bucket.elements.start, vec![0.0f32; bucket.elements.len()]);
        match bucket.place {
            Place::Arena(offset) => {
                stream.download(self.arena.address() + offset as u64, bytes_of_mut(&mut gradients))?;
            }
            _ => {
                let address = self.gradients.address() + (start * DType::F32.bytes()) as u64;
                stream.download(address, bytes_of_mut(&mut gradients))?;
                let which = (bucket.parameters.clone(), start);
                translate_some(plan, &self.bases.channels_last, which, &mut gradients, false);
            }
        }
        for parameter in bucket.parameters.clone().skip(1) {
            let [before, here] = [parameter - 1, parameter].map(|index| plan.parameters().range(index));
            gradients[before.end - start..here.start - start].fill(0.0);
        }
        Ok(gradients)
    }

    /// The gradients that have places of their own, in the host's order.
    fn all_gradients(&self, plan: &Plan) -> Result<Vec<f32>, CudaError> {
        let mut gradients = vec![0.0f32; plan.parameters().length()];
        self.cuda.stream().download(self.gradients.address(), bytes_of_mut(&mut gradients))?;
        translate(plan, &self.bases.channels_last, &mut gradients, false);
        Ok(gradients)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_twice_with_the_sizes_swapped_gives_the_same_back() {
        let from: Vec<f32> = (0..12u8).map(f32::from).collect();
        let (mut once, mut twice) = ([0.0; 12], [0.0; 12]);
        transpose(&from, 4, &mut once);
        assert_eq!(once[..4], [0.0, 4.0, 8.0, 1.0]);
        transpose(&once, 3, &mut twice);
        assert_eq!(from, twice);
        let (long, mut turned) = ((0..40 * 3).map(|x| x as f32).collect::<Vec<_>>(), [0.0; 120]);
        transpose(&long, 3, &mut turned);
        assert!((0..120).all(|at| turned[at % 3 * 40 + at / 3] == long[at]), "more rows than are taken at a time");
    }
}
