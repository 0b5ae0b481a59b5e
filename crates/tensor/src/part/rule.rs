//! In which ways a node can be computed by several parts, and what each of them then has of its parameters.

use std::ops::Range;

use super::piece::Piece;
use crate::graph::{Graph, Node, Source, Value};
use crate::op::Op;
use crate::shape::Shape;
use crate::window::Conv2d;

/// How a node is computed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// By every part alike.
    Whole,
    /// A convolution or a linear layer: from all input channels to each part's share of the output channels.
    Column,
    /// The same from each part's share of the input channels: results are summed.
    Row {
        /// How many channels the innermost elements of its input are shares of.
        unit: usize,
    },
    /// Each part its share of the channels, from the same share.
    Channels {
        /// As above.
        unit: usize,
    },
    /// Each part its share of the samples.
    Samples,
    /// By one part: a node of a branch.
    Branch {
        /// By which.
        part: usize,
    },
    /// Where branches meet: whose each of them is.
    Join {
        /// The part of each input.
        parts: Vec<usize>,
    },
}

/// A part's share of so many things; the shares of all parts follow each other.
pub fn share(total: usize, parts: usize, own: usize) -> Range<usize> {
    total * own / parts..total * (own + 1) / parts
}

/// What is looked at in a graph, besides its nodes.
pub(super) struct Facts<'a> {
    pub graph: &'a Graph,
    pub parts: usize,
    /// Samples in the batch.
    pub batch: usize,
    /// How many nodes read each value.
    pub readers: Vec<usize>,
    /// The last node that reads each value.
    pub last: Vec<usize>,
    /// Whether something is learned through it.
    pub learns: Vec<bool>,
    /// Whether its leading dim is that of the samples.
    by_samples: Vec<bool>,
}

impl<'a> Facts<'a> {
    pub fn new(graph: &'a Graph, parts: usize) -> Self {
        let count = graph.values().count();
        let batch = graph.inputs().first().map_or(1, |&x| graph.shape(x)[0]);
        let source = |value: Value| graph.info(value).source;
        let mut facts = Self {
            graph,
            parts,
            batch,
            readers: vec![0; count],
            last: vec![0; count],
            learns: graph.values().map(|value| matches!(source(value), Source::Parameter(_))).collect(),
            by_samples: vec![false; count],
        };
        for &input in graph.inputs() {
            facts.by_samples[input.index()] = graph.shape(input)[0].is_multiple_of(batch);
        }
        for (index, node) in graph.nodes().iter().enumerate() {
            for input in &node.inputs {
                facts.readers[input.index()] += 1;
                facts.last[input.index()] = index;
            }
            let learned = node.inputs.iter().any(|input| facts.learns[input.index()]);
            let by_samples = facts.samples(node);
            for output in &node.outputs {
                facts.learns[output.index()] = learned && graph.dtype(*output).is_float();
                facts.by_samples[output.index()] = by_samples;
            }
        }
        facts
    }

    /// Whether a value is neither a parameter nor a state.
    pub fn is_activation(&self, value: Value) -> bool {
        !matches!(self.graph.info(value).source, Source::Parameter(_) | Source::State(_))
    }

    pub fn activations<'n>(&self, node: &'n Node) -> impl Iterator<Item = Value> + use<'_, 'n, 'a> {
        node.inputs.iter().copied().filter(|&input| self.is_activation(input))
    }

    /// Whether no other node reads the parameters of this one.
    fn has_own_parameters(&self, node: &Node) -> bool {
        node.inputs.iter().all(|&input| self.is_activation(input) || self.readers[input.index()] == 1)
    }

    /// Whether there are channels for every part.
    fn suffices(&self, channels: usize) -> bool {
        channels >= self.parts
    }

    /// The input and output channels of a layer that can be divided by either.
    pub fn product(&self, node: &Node) -> Option<(usize, usize)> {
        let weight = *node.inputs.get(1)?;
        let shape = self.graph.shape(weight);
        let is_product = match node.op {
            Op::Conv2d { conv: Conv2d { groups: 1, .. }, relu: false, moments: false, .. } => true,
            Op::MatMul { trans_a: false, trans_b: true, relu: false, .. } => shape.len() == 2,
            _ => false,
        };
        let is_layer = is_product && !self.is_activation(weight) && self.is_activation(node.inputs[0]);
        let x = self.graph.shape(node.inputs[0]).last();
        (is_layer && self.has_own_parameters(node)).then(|| (x, self.graph.shape(node.outputs[0]).last()))
    }

    /// Whether a layer can be divided by its output channels.
    pub fn column(&self, node: &Node) -> bool {
        self.product(node).is_some_and(|(_, outputs)| self.suffices(outputs))
    }

    /// Whether a layer can be divided by its input channels, of which there are `unit`, over and over.
    pub fn row(&self, node: &Node, unit: usize) -> bool {
        let fits = |inputs: usize| inputs == unit || matches!(node.op, Op::MatMul { .. });
        self.product(node).is_some_and(|(inputs, _)| fits(inputs) && self.suffices(unit))
    }

    /// Whether each part can compute its share of the channels from the same share of what the node reads: the channels of the result, of
    /// which the innermost elements of what it reads are `unit`, over and over.
    pub fn channels(&self, node: &Node, unit: usize) -> Option<usize> {
        let shape = |value: Value| self.graph.shape(value);
        let y = shape(node.outputs[0]);
        let keeps = |dim: usize| dim + 1 < y.len();
        let fits = match &node.op {
            Op::Conv2d { conv, relu: false, moments: false, .. } => return self.grouped(node, conv, unit),
            Op::BatchNorm(_) | Op::BatchNormInference(_) | Op::Pool2d(_) => true,
            Op::Unary(_) | Op::Scale(_) | Op::Dropout { .. } | Op::Add | Op::Mul | Op::Reshape(_) => true,
            Op::Slice { dim, .. } | Op::Pad { dim, .. } | Op::Concat { dim } => keeps(*dim),
            Op::Permute { order } => order.last() == Some(&(order.len() - 1)),
            _ => false,
        };
        let divides = |value: &Value| shape(*value).last().is_multiple_of(unit);
        let all = node.inputs.iter().all(divides) && y.last().is_multiple_of(unit);
        let computes = self.activations(node).next().is_some();
        (fits && all && computes && self.has_own_parameters(node) && self.suffices(unit)).then_some(unit)
    }

    /// A convolution in groups, where the parts' shares of channels are whole groups.
    fn grouped(&self, node: &Node, conv: &Conv2d, unit: usize) -> Option<usize> {
        let (inputs, outputs) = (self.graph.shape(node.inputs[0]).last(), self.graph.shape(node.outputs[0]).last());
        let (narrow, wide) = (inputs / conv.groups, outputs / conv.groups);
        let is_whole = |part: usize| {
            let (from, to) = (share(inputs, self.parts, part), share(outputs, self.parts, part));
            let ends = [(from.start, to.start), (from.end, to.end)];
            !from.is_empty() && ends.iter().all(|&(from, to)| from % narrow == 0 && from / narrow * wide == to)
        };
        let fits = conv.groups > 1 && inputs == unit && self.has_own_parameters(node);
        (fits && (0..self.parts).all(is_whole)).then_some(outputs)
    }

    /// Whether each part can compute its share of the samples.
    pub fn samples(&self, node: &Node) -> bool {
        let shape = |value: Value| self.graph.shape(value);
        let y = shape(node.outputs[0]);
        let is_weight = |index: usize| !self.is_activation(node.inputs[index]);
        let fits = match &node.op {
            Op::Conv2d { .. } | Op::BatchNormInference(_) | Op::Pool2d(_) | Op::LayerNorm { .. } => true,
            Op::Unary(_) | Op::Scale(_) | Op::Dropout { .. } | Op::Embedding | Op::Lstm | Op::Reshape(_) => true,
            Op::MatMul { trans_a, .. } => (!trans_a && is_weight(1)) || y.len() > 2,
            Op::Add | Op::Mul => shape(node.inputs[0]).len() == shape(node.inputs[1]).len() || is_weight(1),
            Op::Slice { dim, .. } | Op::Pad { dim, .. } | Op::Concat { dim } => *dim > 0,
            Op::Permute { order } => order.first() == Some(&0),
            Op::Softmax { causal } => y.len() > if *causal { 2 } else { 1 },
            _ => false,
        };
        let has_samples = |value: Value| self.by_samples[value.index()];
        let mut read = self.activations(node).peekable();
        // A parameter that has the leading dim too would have to be divided.
        let is_repeated = |&input: &Value| {
            self.is_activation(input)
                || !matches!(node.op, Op::Add | Op::Mul)
                || shape(input).len() < shape(node.inputs[0]).len()
        };
        let computes = read.peek().is_some() && node.inputs.iter().all(is_repeated);
        fits && computes
            && read.all(has_samples)
            && y[0].is_multiple_of(self.batch)
            && self.is_activation(node.inputs[0])
    }

    /// What a part has of an input of a node that is a parameter or a state.
    pub fn piece(&self, (node, position): (&Node, usize), way: &Way, own: usize) -> Piece {
        let shape = self.graph.shape(node.inputs[position]);
        let slice = |outer: usize, length: usize, inner: usize| {
            let range = share(length, self.parts, own);
            Piece::Slice { outer, length, range, inner }
        };
        let last = |length: usize| slice(shape.elements() / length, length, 1);
        let outputs = self.graph.shape(node.outputs[0]).last();
        match (way, &node.op) {
            (Way::Column, Op::MatMul { .. }) if position == 1 => slice(1, shape[0], shape[1]),
            (Way::Column, _) | (Way::Channels { .. }, Op::Conv2d { .. }) => last(outputs),
            (Way::Row { .. }, Op::Conv2d { .. }) if position == 1 => slice(shape[0] * shape[1], shape[2], shape[3]),
            (Way::Row { unit }, _) if position == 1 => last(*unit),
            (Way::Channels { unit }, _) => last(*unit),
            (Way::Branch { part }, _) if *part != own => Piece::Absent,
            _ => Piece::Whole,
        }
    }
}

/// The shape of a piece of a tensor.
pub(super) fn piece_shape(shape: &Shape, piece: &Piece) -> Shape {
    let Piece::Slice { length, range, inner, .. } = piece else { return shape.clone() };
    let is_divided = |dim: &usize| {
        shape[dim + 1..].iter().product::<usize>() == *inner && shape[*dim] > 1 && shape[*dim].is_multiple_of(*length)
    };
    let dim = (0..shape.len()).find(is_divided).expect("a piece is a slice along one dim");
    shape.with(dim, shape[dim] / length * range.len())
}
