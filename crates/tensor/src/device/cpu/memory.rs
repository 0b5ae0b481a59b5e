//! Hands a kernel its operands: slices of the arena and the store, as the plan placed them.
//!
//! The plan asserts (in `Plan::verify`) that within a node an output overlaps nothing but the one input it may
//! overwrite, and that a state which is updated is no other operand. What is left to check here, at run time, is that a
//! kernel takes each operand as what it is made of, each output once, and not also the input that it overwrites.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::bf16::Bf16;
use crate::buffer::Buffer;
use crate::dtype::{DType, Element};
use crate::execute::Floats;
use crate::graph::{Node, Value};
use crate::plan::{Place, Plan};
use crate::shape::Shape;
use crate::store::Store;

/// All memory of one run, borrowed for as long as it lasts.
pub(super) struct Memory<'a> {
    plan: &'a Plan,
    arena: *mut f32,
    parameters: *mut f32,
    gradients: *mut f32,
    states: *mut f32,
    borrow: PhantomData<&'a mut f32>,
}

impl<'a> Memory<'a> {
    /// Borrows the buffers.
    ///
    /// # Panics
    /// When a buffer is smaller than the plan says.
    pub fn new(plan: &'a Plan, arena: &'a mut Buffer, store: &'a mut Store) -> Self {
        assert!(arena.len() * DType::F32.bytes() >= plan.arena_bytes(), "the arena is too small");
        assert!(store.parameters.len() >= plan.parameters().length(), "too few parameters");
        assert!(store.states.len() >= plan.states().length(), "too few states");
        let stored = plan.writes_gradients();
        assert!(!stored || store.gradients.len() >= plan.parameters().length(), "too few gradients");
        let [arena, parameters, gradients, states] =
            [arena, &mut store.parameters, &mut store.gradients, &mut store.states].map(Buffer::pointer);
        Self { plan, arena, parameters, gradients, states, borrow: PhantomData }
    }

    /// The operands of a node.
    pub fn operands(&mut self, index: usize) -> Operands<'_> {
        Operands { memory: self, node: &self.plan.graph().nodes()[index], taken: Cell::new(0) }
    }

    /// Calls `look` with the floating-point outputs of a node that has just run.
    pub fn show_outputs<T>(&mut self, index: usize, look: impl FnOnce(&[Floats<'_>]) -> T) -> T {
        let node = &self.plan.graph().nodes()[index];
        let mut outputs = [Floats::F32(&[]); 4];
        let mut count = 0;
        for &output in &node.outputs {
            outputs[count] = match self.plan.graph().dtype(output) {
                // SAFETY: `locate` gives memory inside the borrowed buffers, and no kernel runs while `self` is borrowed.
                DType::F32 => Floats::F32(unsafe { self.locate::<f32>(output).as_ref() }),
                // SAFETY: as above.
                DType::Bf16 => Floats::Bf16(unsafe { self.locate::<Bf16>(output).as_ref() }),
                DType::I32 => continue,
            };
            count += 1;
        }
        look(&outputs[..count])
    }

    /// The gradients of a bucket whose turn has come, with zeros in the gaps between them, and their parameters.
    pub fn bucket(&mut self, index: usize) -> (&mut [f32], &mut [f32]) {
        let bucket = &self.plan.buckets()[index];
        let (start, length) = (bucket.elements.start, bucket.elements.len());
        let (base, first) = match bucket.place {
            Place::Arena(offset) => (self.arena, offset / DType::F32.bytes()),
            _ => (self.gradients, start),
        };
        // SAFETY: the plan keeps both ranges within their buffers, whose sizes `new` has checked; parameters are a buffer of
        // their own, and `self` is borrowed until the slices are gone, so no kernel runs.
        let (gradients, parameters) = unsafe {
            let gradients = std::slice::from_raw_parts_mut(base.add(first), length);
            (gradients, std::slice::from_raw_parts_mut(self.parameters.add(start), length))
        };
        for parameter in bucket.parameters.clone().skip(1) {
            let [before, here] = [parameter - 1, parameter].map(|index| self.plan.parameters().range(index));
            gradients[before.end - start..here.start - start].fill(0.0);
        }
        (gradients, parameters)
    }

    /// The parameters of a bucket. Its gradients may be gone: whatever stands in their place now is left alone.
    pub fn parameters(&mut self, index: usize) -> &mut [f32] {
        let elements = &self.plan.buckets()[index].elements;
        // SAFETY: the plan keeps the range within the buffer, whose size `new` has checked, and `self` is borrowed until the slice
        // is gone, so no kernel runs.
        unsafe { std::slice::from_raw_parts_mut(self.parameters.add(elements.start), elements.len()) }
    }

    /// A value's elements, as raw memory: inside the borrowed buffers, aligned and initialised.
    ///
    /// # Panics
    /// When the value is not of that type.
    fn locate<T: Element>(&self, value: Value) -> NonNull<[T]> {
        let info = self.plan.graph().info(value);
        assert_eq!(info.dtype, T::DTYPE, "an operand of `{}`", info.name);
        let words = |base: *mut f32, start: usize| (base, start * DType::F32.bytes());
        let (base, offset) = match self.plan.place(value) {
            Place::Arena(offset) => (self.arena, offset),
            Place::Parameter(index) => words(self.parameters, self.plan.parameters().range(index).start),
            Place::Gradient(index) => words(self.gradients, self.plan.parameters().range(index).start),
            Place::State(index) => words(self.states, self.plan.states().range(index).start),
            Place::None => panic!("{value:?} has no place"),
        };
        // SAFETY: the plan keeps the value's bytes within the buffer, whose size `new` has checked.
        let first = unsafe { base.cast::<u8>().add(offset) }.cast::<T>();
        let first = NonNull::new(first).expect("a buffer has an address");
        NonNull::slice_from_raw_parts(first, info.shape.elements())
    }
}

/// The operands of one node, each to be taken at most once for writing.
pub(super) struct Operands<'a> {
    memory: &'a Memory<'a>,
    node: &'a Node,
    /// One bit per output, then one per state input, that was handed out for writing.
    taken: Cell<u32>,
}

const STATE_BITS: usize = 8;

impl<'a> Operands<'a> {
    /// The node.
    pub fn node(&self) -> &'a Node {
        self.node
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.node.inputs.len()
    }

    /// Number of outputs.
    pub fn outputs(&self) -> usize {
        self.node.outputs.len()
    }

    /// The shape of an input.
    pub fn input_shape(&self, index: usize) -> &'a Shape {
        self.memory.plan.graph().shape(self.node.inputs[index])
    }

    /// The shape of an output.
    pub fn output_shape(&self, index: usize) -> &'a Shape {
        self.memory.plan.graph().shape(self.node.outputs[index])
    }

    /// The type of an input.
    pub fn input_type(&self, index: usize) -> DType {
        self.memory.plan.graph().dtype(self.node.inputs[index])
    }

    /// The type of an output.
    pub fn output_type(&self, index: usize) -> DType {
        self.memory.plan.graph().dtype(self.node.outputs[index])
    }

    /// An input that no output overwrites.
    pub fn input<T: Element>(&self, index: usize) -> &'a [T] {
        self.input_unless_shared(index).expect("this operation does not work in place")
    }

    /// An input, or none if an output lives in its place and already holds it.
    pub fn input_unless_shared<T: Element>(&self, index: usize) -> Option<&'a [T]> {
        let value = self.node.inputs[index];
        let place = self.memory.plan.place(value);
        if self.node.outputs.iter().any(|&output| self.memory.plan.place(output) == place) {
            return None;
        }
        assert!(!self.is_taken(STATE_BITS + index), "input {index} is being written");
        // SAFETY: inside the borrowed buffers; the plan keeps it apart from every output of this node, and a state input
        // that was taken for writing is refused above.
        Some(unsafe { self.memory.locate(value).as_ref() })
    }

    /// An output, to be written. Each may be taken once.
    pub fn output<T: Element>(&self, index: usize) -> &'a mut [T] {
        self.take(self.node.outputs[index], index)
    }

    /// A state that the node updates, given as an input.
    pub fn state(&self, index: usize) -> &'a mut [f32] {
        let value = self.node.inputs[index];
        assert!(matches!(self.memory.plan.place(value), Place::State(_)), "only states are updated in place");
        assert!(STATE_BITS + index < u32::BITS as usize, "states are among the first inputs");
        self.take(value, STATE_BITS + index)
    }

    /// Whether an operand was handed out for writing. Only the first few inputs can be: states have low numbers.
    fn is_taken(&self, bit: usize) -> bool {
        (bit as u32) < u32::BITS && self.taken.get() >> bit & 1 == 1
    }

    fn take<T: Element>(&self, value: Value, bit: usize) -> &'a mut [T] {
        assert!(!self.is_taken(bit), "an operand was taken twice");
        self.taken.set(self.taken.get() | 1 << bit);
        // SAFETY: inside the borrowed buffers; the plan keeps outputs apart from each other and from the inputs that
        // `input` hands out, states are a buffer of their own, a state to be updated is no other operand (`Plan::verify`),
        // and each is taken once.
        unsafe { self.memory.locate(value).as_mut() }
    }
}
