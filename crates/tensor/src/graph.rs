//! The static graph: an append-only list of nodes, checked as it is built.
//!
//! A value is made once, by an input, a parameter, a state or one node. Nodes stand in an order in which they can run.
//! What is absent: any notion of memory (see `plan.rs`), of devices, or of who else trains the same model.

use crate::dtype::DType;
use crate::op::Op;
use crate::shape::Shape;

/// A tensor in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub(crate) u32);

impl Value {
    /// The value's number, counted from 0 in the order of creation.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Given for every step: number in [`Graph::inputs`].
    Input(usize),
    /// Trained: number in [`Graph::parameters`].
    Parameter(usize),
    /// Kept from step to step but not trained, such as running statistics: number in [`Graph::states`].
    State(usize),
    /// Output `output` of node `node`.
    Node {
        /// Number in [`Graph::nodes`].
        node: usize,
        /// Which of its outputs.
        output: usize,
    },
}

/// What is known of a value.
#[derive(Clone, Debug)]
pub struct ValueInfo {
    /// Its shape.
    pub shape: Shape,
    /// Its element type.
    pub dtype: DType,
    /// Where it comes from.
    pub source: Source,
    /// The name of the input, parameter or state, or the layer that computes it.
    pub name: String,
}

impl ValueInfo {
    /// Its size in memory.
    pub fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.bytes()
    }
}

/// One operation in a graph.
#[derive(Clone, Debug)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// From what.
    pub inputs: Vec<Value>,
    /// Into what.
    pub outputs: Vec<Value>,
    /// The layer it belongs to, as the model's author named it.
    pub layer: String,
}

/// A graph could not be built: the message names the layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("layer `{layer}` ({op}): {message}")]
pub struct GraphError {
    /// The layer that refused.
    pub layer: String,
    /// Its operation.
    pub op: String,
    /// What its inputs or attributes do not allow.
    pub message: String,
}

/// A computation, known before it runs.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub(crate) values: Vec<ValueInfo>,
    pub(crate) nodes: Vec<Node>,
    inputs: Vec<Value>,
    parameters: Vec<Value>,
    states: Vec<Value>,
}

impl Graph {
    /// A graph without nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a tensor that is given for every step.
    pub fn input(&mut self, name: &str, shape: impl Into<Shape>, dtype: DType) -> Value {
        let source = Source::Input(self.inputs.len());
        let value = self.value(name, shape.into(), dtype, source);
        self.inputs.push(value);
        value
    }

    /// Declares a trained tensor.
    pub fn parameter(&mut self, name: &str, shape: impl Into<Shape>) -> Value {
        let source = Source::Parameter(self.parameters.len());
        let value = self.value(name, shape.into(), DType::F32, source);
        self.parameters.push(value);
        value
    }

    /// Declares a tensor that is kept from step to step without being trained.
    pub fn state(&mut self, name: &str, shape: impl Into<Shape>) -> Value {
        let source = Source::State(self.states.len());
        let value = self.value(name, shape.into(), DType::F32, source);
        self.states.push(value);
        value
    }

    /// Appends an operation and returns its outputs.
    ///
    /// # Errors
    /// When the inputs' shapes or types do not fit; the error names `layer`.
    pub fn push(&mut self, layer: &str, op: Op, inputs: &[Value]) -> Result<Vec<Value>, GraphError> {
        let infos: Vec<(&Shape, DType)> = inputs.iter().map(|&value| (self.shape(value), self.dtype(value))).collect();
        let refuse = |message| GraphError { layer: layer.to_owned(), op: op.name().to_owned(), message };
        let outputs = op.infer(&infos).map_err(refuse)?;
        if matches!(op, Op::BatchNorm(_)) {
            self.check_updated_states(inputs).map_err(refuse)?;
        }
        let node = self.nodes.len();
        let outputs = outputs
            .into_iter()
            .enumerate()
            .map(|(output, (shape, dtype))| self.value(layer, shape, dtype, Source::Node { node, output }))
            .collect::<Vec<_>>();
        self.nodes.push(Node { op, inputs: inputs.to_vec(), outputs: outputs.clone(), layer: layer.to_owned() });
        Ok(outputs)
    }

    /// The running statistics of a batch-norm are written while its other operands are read.
    fn check_updated_states(&self, inputs: &[Value]) -> Result<(), String> {
        let is_state = |value: Value| matches!(self.info(value).source, Source::State(_));
        if !is_state(inputs[2]) || !is_state(inputs[3]) {
            return Err("the running statistics must be states, because they are updated in place".into());
        }
        if inputs[2] == inputs[3] {
            return Err("the running mean and the running variance must be two states".into());
        }
        let others = inputs.iter().enumerate().filter(|(index, _)| !(2..4).contains(index));
        match others.map(|(index, &value)| (index, self.bytes_of(value))).find(|&(_, value)| is_state(value)) {
            Some((index, state)) => {
                let name = &self.info(state).name;
                Err(format!("input {index} is the state `{name}`; only the running statistics may be states"))
            }
            None => Ok(()),
        }
    }

    /// The value whose bytes these are: a reshape has none of its own.
    fn bytes_of(&self, mut value: Value) -> Value {
        while let Source::Node { node, .. } = self.info(value).source
            && let Node { op, inputs, .. } = &self.nodes[node]
            && op.is_view()
        {
            value = inputs[0];
        }
        value
    }

    /// As [`Graph::push`], for the first output.
    ///
    /// # Errors
    /// As [`Graph::push`].
    pub fn push_one(&mut self, layer: &str, op: Op, inputs: &[Value]) -> Result<Value, GraphError> {
        Ok(self.push(layer, op, inputs)?[0])
    }

    /// What is known of a value.
    pub fn info(&self, value: Value) -> &ValueInfo {
        &self.values[value.index()]
    }

    /// A value's shape.
    pub fn shape(&self, value: Value) -> &Shape {
        &self.info(value).shape
    }

    /// A value's element type.
    pub fn dtype(&self, value: Value) -> DType {
        self.info(value).dtype
    }

    /// All values, in the order of creation.
    pub fn values(&self) -> impl Iterator<Item = Value> + use<> {
        (0..self.values.len() as u32).map(Value)
    }

    /// All nodes, in an order in which they can run.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The tensors given for every step.
    pub fn inputs(&self) -> &[Value] {
        &self.inputs
    }

    /// The trained tensors.
    pub fn parameters(&self) -> &[Value] {
        &self.parameters
    }

    /// The tensors kept from step to step.
    pub fn states(&self) -> &[Value] {
        &self.states
    }

    /// Floating-point operations of one node; a multiply-add counts as two.
    pub fn flops(&self, node: &Node) -> u64 {
        let shapes = |values: &[Value]| values.iter().map(|&value| self.shape(value)).collect::<Vec<_>>();
        node.op.flops(&shapes(&node.inputs), &shapes(&node.outputs))
    }

    /// Bytes a node must at least move: each input read and each output written once.
    pub fn bytes_moved(&self, node: &Node) -> u64 {
        if node.op.is_view() {
            return 0;
        }
        node.inputs.iter().chain(&node.outputs).map(|&value| self.info(value).bytes() as u64).sum()
    }

    /// Multiply-adds of the convolutions and matrix products, the figure that papers call MACs.
    pub fn macs(&self) -> u64 {
        self.nodes.iter().filter(|node| node.op.is_product()).map(|node| self.flops(node)).sum::<u64>() / 2
    }

    /// Replaces all nodes: values learn which one gives them now.
    pub(crate) fn set_nodes(&mut self, nodes: Vec<Node>) {
        self.nodes = nodes;
        for (index, node) in self.nodes.iter().enumerate() {
            for (output, value) in node.outputs.iter().enumerate() {
                self.values[value.index()].source = Source::Node { node: index, output };
            }
        }
    }

    pub(crate) fn value(&mut self, name: &str, shape: Shape, dtype: DType, source: Source) -> Value {
        let value = Value(u32::try_from(self.values.len()).expect("fewer than 2³² values"));
        self.values.push(ValueInfo { shape, dtype, source, name: name.to_owned() });
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::Conv2d;

    #[test]
    fn an_error_names_the_layer_and_the_sizes() {
        let mut graph = Graph::new();
        let x = graph.input("x", [1, 4, 4, 3], DType::F32);
        let w = graph.parameter("conv1.weight", [7, 7, 3, 8]);
        let op = Op::Conv2d { conv: Conv2d::square(7), bias: false, relu: false, moments: false };
        let error = graph.push("conv1", op, &[x, w]).unwrap_err();
        assert_eq!(error.to_string(), "layer `conv1` (conv2d): the image 4×4 is smaller than the kernel 7×7");
        assert!(graph.nodes().is_empty());
    }

    #[test]
    fn macs_of_a_convolution_are_counted_as_in_print() {
        let mut graph = Graph::new();
        let x = graph.input("x", [1, 224, 224, 3], DType::F32);
        let w = graph.parameter("w", [7, 7, 3, 64]);
        let conv = Conv2d { stride: [2, 2], padding: crate::window::Padding::all(3), ..Conv2d::square(7) };
        graph.push("conv1", Op::Conv2d { conv, bias: false, relu: false, moments: false }, &[x, w]).unwrap();
        assert_eq!(graph.macs(), 118_013_952);
    }
}
