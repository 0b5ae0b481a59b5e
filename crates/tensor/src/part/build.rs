//! The graph of one part, from the ways of all nodes. Sums, forks and gathers come in the same order in every part.

use super::Part;
use super::choose::{Need, State, need, state};
use super::piece::{PartTensor, Piece};
use super::rule::{Facts, Way, piece_shape, share};
use crate::graph::{Graph, GraphError, Node, Value};
use crate::op::{Gather, Op, Segment, Together, Within};
use crate::shape::Shape;
use crate::window::Conv2d;

/// How a value of the whole graph stands in this part, as far as that was needed.
#[derive(Clone, Debug, Default)]
struct Standing {
    /// As it was made; nothing where another part has it.
    own: Option<(State, Option<Value>)>,
    whole: Option<Value>,
    forked: Option<Value>,
    channels: Vec<(usize, Value)>,
    samples: Option<Value>,
}

struct Builder<'a> {
    facts: &'a Facts<'a>,
    own: usize,
    graph: Graph,
    values: Vec<Standing>,
}

type Result<T> = std::result::Result<T, GraphError>;

/// What each parameter or state is in this part.
pub(super) fn pieces(facts: &Facts<'_>, ways: &[Way], own: usize, tensors: &[Value]) -> Vec<Piece> {
    let mut pieces: Vec<Option<Piece>> = vec![None; facts.graph.values().count()];
    for (node, way) in facts.graph.nodes().iter().zip(ways) {
        for (position, &input) in node.inputs.iter().enumerate().filter(|(_, input)| !facts.is_activation(**input)) {
            let piece = facts.piece((node, position), way, own);
            // Who reads what all have has it whole; others have it to themselves.
            let known = &mut pieces[input.index()];
            if known.is_none() || *known == Some(Piece::Absent) {
                *known = Some(piece);
            }
        }
    }
    tensors.iter().map(|value| pieces[value.index()].clone().unwrap_or(Piece::Whole)).collect()
}

/// The graph of one part.
pub(super) fn build(facts: &Facts<'_>, ways: &[Way], own: usize) -> Result<Part> {
    let whole = facts.graph;
    let mut builder =
        Builder { facts, own, graph: Graph::new(), values: vec![Standing::default(); whole.values().count()] };
    for &input in whole.inputs() {
        let info = whole.info(input);
        let value = builder.graph.input(&info.name, info.shape.clone(), info.dtype);
        builder.values[input.index()].own = Some((State::Whole, Some(value)));
    }
    let parameters = builder.tensors(ways, whole.parameters(), Graph::parameter);
    let states = builder.tensors(ways, whole.states(), Graph::state);
    for (index, way) in ways.iter().enumerate() {
        builder.node(index, way)?;
    }
    let values = builder.values.iter().map(|standing| standing.whole.or(standing.own?.1)).collect();
    Ok(Part { graph: builder.graph, parameters, states, values })
}

impl Builder<'_> {
    /// Declares the parameters or states of which this part has something.
    fn tensors(
        &mut self,
        ways: &[Way],
        tensors: &[Value],
        declare: fn(&mut Graph, &str, Shape) -> Value,
    ) -> Vec<PartTensor> {
        let pieces = pieces(self.facts, ways, self.own, tensors);
        let mut found = Vec::new();
        for (whole, (&value, piece)) in
            tensors.iter().zip(pieces).enumerate().filter(|(_, (_, piece))| *piece != Piece::Absent)
        {
            let info = self.facts.graph.info(value);
            let here = declare(&mut self.graph, &info.name, piece_shape(&info.shape, &piece));
            self.values[value.index()].own = Some((State::Whole, Some(here)));
            found.push(PartTensor { whole, piece });
        }
        found
    }

    fn node(&mut self, index: usize, way: &Way) -> Result<()> {
        let node = self.facts.graph.nodes()[index].clone();
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for &input in &node.inputs {
            inputs.push(self.input(&node.layer, input, way)?);
        }
        let outputs = match way {
            Way::Branch { part } if *part != self.own => vec![None; node.outputs.len()],
            Way::Join { parts } => vec![Some(self.join(&node, parts, &inputs)?)],
            Way::Row { .. } => vec![Some(self.row(&node, &inputs)?)],
            _ => {
                let op = self.op(&node, way);
                let inputs: Vec<Value> = inputs.into_iter().flatten().collect();
                self.graph.push(&node.layer, op, &inputs)?.into_iter().map(Some).collect()
            }
        };
        let state = state(self.facts, index, way);
        for (output, value) in node.outputs.iter().zip(outputs) {
            self.values[output.index()].own = Some((state, value));
        }
        Ok(())
    }

    /// What a node reads for a value; nothing where another part has it.
    fn input(&mut self, layer: &str, value: Value, way: &Way) -> Result<Option<Value>> {
        let Some((state, own)) = self.values[value.index()].own else { return Ok(None) };
        if !self.facts.is_activation(value) {
            let is_partial = *way == Way::Samples && self.facts.learns[value.index()];
            return if is_partial { self.forked(layer, value).map(Some) } else { Ok(own) };
        }
        match need(way, state == State::Local) {
            Need::Local => Ok(own),
            Need::Whole => self.whole(layer, value).map(Some),
            Need::Forked => self.forked(layer, value).map(Some),
            Need::Channels(unit) => self.channels(layer, value, unit).map(Some),
            Need::Samples => self.samples(layer, value).map(Some),
        }
    }

    /// The operation on this part's share of its operands.
    fn op(&self, node: &Node, way: &Way) -> Op {
        let whole = self.facts.graph.shape(node.outputs[0]);
        let within = |shape: &Shape, start: usize, length: usize, stride: usize| {
            Some(Within { elements: shape.elements(), start, length, stride })
        };
        match (&node.op, way) {
            (Op::Conv2d { conv, bias, relu, moments }, Way::Channels { unit }) => {
                let narrow = unit / conv.groups;
                let groups = share(*unit, self.facts.parts, self.own).len() / narrow;
                Op::Conv2d { conv: Conv2d { groups, ..*conv }, bias: *bias, relu: *relu, moments: *moments }
            }
            (Op::Reshape(shape), Way::Channels { unit }) => Op::Reshape(self.channel_shape(shape, *unit)),
            (Op::Reshape(shape), Way::Samples) => Op::Reshape(self.sample_shape(shape)),
            (Op::Dropout { probability, salt, .. }, Way::Channels { unit }) => {
                let range = share(*unit, self.facts.parts, self.own);
                let within = within(whole, range.start, range.len(), *unit);
                Op::Dropout { probability: *probability, salt: *salt, within }
            }
            (Op::Dropout { probability, salt, .. }, Way::Samples) => {
                let rows = self.rows(whole);
                let width = whole.elements() / whole[0];
                let within = within(whole, rows.0 * width, rows.1 * width, whole.elements());
                Op::Dropout { probability: *probability, salt: *salt, within }
            }
            (op, _) => op.clone(),
        }
    }

    /// A layer by its input channels: what the parts have is summed, and then the bias is added.
    fn row(&mut self, node: &Node, inputs: &[Option<Value>]) -> Result<Value> {
        let op = match &node.op {
            Op::Conv2d { conv, .. } => Op::Conv2d { conv: *conv, bias: false, relu: false, moments: false },
            Op::MatMul { trans_a, trans_b, .. } => {
                Op::MatMul { trans_a: *trans_a, trans_b: *trans_b, bias: false, relu: false }
            }
            op => unreachable!("{} has no input channels", op.name()),
        };
        let inputs: Vec<Value> = inputs.iter().copied().flatten().collect();
        let y = self.push(&node.layer, op, &inputs[..2])?;
        let y = self.push(&node.layer, Op::Together(Together::Sum), &[y])?;
        match inputs.get(2) {
            Some(&bias) => self.push(&node.layer, Op::Add, &[y, bias]),
            None => Ok(y),
        }
    }

    /// Where branches meet.
    fn join(&mut self, node: &Node, parts: &[usize], inputs: &[Option<Value>]) -> Result<Value> {
        let Op::Concat { dim } = node.op else { unreachable!("branches meet in a concatenation") };
        let own: Vec<Value> =
            parts.iter().zip(inputs).filter(|(part, _)| **part == self.own).filter_map(|(_, input)| *input).collect();
        let piece = if let [one] = own[..] { one } else { self.push(&node.layer, Op::Concat { dim }, &own)? };
        let shape = |input: &Value| self.facts.graph.shape(*input);
        let segments = parts.iter().zip(&node.inputs).map(|(&part, input)| Segment { part, length: shape(input)[dim] });
        self.gather(&node.layer, piece, dim, segments.collect())
    }

    fn gather(&mut self, layer: &str, piece: Value, dim: usize, segments: Vec<Segment>) -> Result<Value> {
        let shape = self.graph.shape(piece);
        let run = shape.elements() / shape[dim];
        let mut gather = Gather { dim, segments, lengths: Vec::new(), own: self.own };
        gather.lengths = (0..self.facts.parts).map(|part| gather.extent(part) * run).collect();
        self.push(layer, Op::Together(Together::Gather(gather)), &[piece])
    }

    fn push(&mut self, layer: &str, op: Op, inputs: &[Value]) -> Result<Value> {
        self.graph.push_one(layer, op, inputs)
    }

    /// All of a value.
    fn whole(&mut self, layer: &str, value: Value) -> Result<Value> {
        if let Some(whole) = self.values[value.index()].whole {
            return Ok(whole);
        }
        let (state, own) = self.values[value.index()].own.expect("nodes stand in order");
        let own = own.expect("what is not local is in every part");
        let shape = self.facts.graph.shape(value).clone();
        let parts = self.facts.parts;
        let segments = |total: usize| {
            (0..parts).map(|part| Segment { part, length: share(total, parts, part).len() }).collect::<Vec<_>>()
        };
        let whole = match state {
            State::Whole | State::Local => own,
            State::Samples => {
                let per_sample = shape[0] / self.facts.batch;
                let rows = segments(self.facts.batch).into_iter();
                let rows = rows.map(|segment| Segment { length: segment.length * per_sample, ..segment });
                self.gather(layer, own, 0, rows.collect())?
            }
            State::Channels(unit) if unit == shape.last() => {
                self.gather(layer, own, shape.len() - 1, segments(unit))?
            }
            State::Channels(unit) => {
                let pixels = self.push(layer, Op::Reshape(self.pixels(&shape, unit, true)), &[own])?;
                let whole = self.gather(layer, pixels, shape.len(), segments(unit))?;
                self.push(layer, Op::Reshape(shape), &[whole])?
            }
        };
        self.values[value.index()].whole = Some(whole);
        Ok(whole)
    }

    /// All of a value, for what differs between the parts.
    fn forked(&mut self, layer: &str, value: Value) -> Result<Value> {
        if let Some(forked) = self.values[value.index()].forked {
            return Ok(forked);
        }
        let whole = self.whole(layer, value)?;
        let is_learned = self.facts.learns[value.index()];
        let forked = if is_learned { self.push(layer, Op::Together(Together::Fork), &[whole])? } else { whole };
        self.values[value.index()].forked = Some(forked);
        Ok(forked)
    }

    /// This part's share of the channels.
    fn channels(&mut self, layer: &str, value: Value, unit: usize) -> Result<Value> {
        let standing = &self.values[value.index()];
        if let Some((State::Channels(known), Some(own))) = standing.own
            && known == unit
        {
            return Ok(own);
        }
        if let Some(&(_, known)) = standing.channels.iter().find(|(known, _)| *known == unit) {
            return Ok(known);
        }
        let whole = self.forked(layer, value)?;
        let shape = self.facts.graph.shape(value).clone();
        let range = share(unit, self.facts.parts, self.own);
        let slice = |dim: usize| Op::Slice { dim, start: range.start, length: range.len() };
        let own = if unit == shape.last() {
            self.push(layer, slice(shape.len() - 1), &[whole])?
        } else {
            let pixels = self.push(layer, Op::Reshape(self.pixels(&shape, unit, false)), &[whole])?;
            let own = self.push(layer, slice(shape.len()), &[pixels])?;
            self.push(layer, Op::Reshape(self.channel_shape(&shape, unit)), &[own])?
        };
        self.values[value.index()].channels.push((unit, own));
        Ok(own)
    }

    /// This part's share of the samples.
    fn samples(&mut self, layer: &str, value: Value) -> Result<Value> {
        let standing = &self.values[value.index()];
        if let Some((State::Samples, Some(own))) = standing.own {
            return Ok(own);
        }
        if let Some(known) = standing.samples {
            return Ok(known);
        }
        let whole = self.forked(layer, value)?;
        let (start, length) = self.rows(self.facts.graph.shape(value));
        let own = self.push(layer, Op::Slice { dim: 0, start, length }, &[whole])?;
        self.values[value.index()].samples = Some(own);
        Ok(own)
    }

    /// The first of this part's rows of a tensor whose leading dim is that of the samples, and how many they are.
    fn rows(&self, shape: &Shape) -> (usize, usize) {
        let per_sample = shape[0] / self.facts.batch;
        let samples = share(self.facts.batch, self.facts.parts, self.own);
        (samples.start * per_sample, samples.len() * per_sample)
    }

    fn sample_shape(&self, shape: &Shape) -> Shape {
        shape.with(0, self.rows(shape).1)
    }

    fn channel_shape(&self, shape: &Shape, unit: usize) -> Shape {
        let own = share(unit, self.facts.parts, self.own).len();
        shape.with(shape.len() - 1, shape.last() / unit * own)
    }

    /// A shape with its channels apart from what else is in the last dim: all of them, or this part's.
    fn pixels(&self, shape: &Shape, unit: usize, is_own: bool) -> Shape {
        let mut dims = shape.to_vec();
        let last = dims.len() - 1;
        dims[last] = shape.last() / unit;
        dims.push(if is_own { share(unit, self.facts.parts, self.own).len() } else { unit });
        Shape::new(dims)
    }
}
