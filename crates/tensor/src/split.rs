//! Splitting: the gradient of a large matrix becomes several nodes, each of which computes some of its rows.
//!
//! Where gradients are applied one by one, the largest is what they need of memory. A part is applied before the next one
//! is computed: the fully connected layer that holds three quarters of VGG's weights needs 32 MiB for its gradient instead
//! of 411 MB. A row is computed as before, so no bit changes.

use std::ops::Range;

use crate::graph::{Graph, Node, Source, Value};
use crate::op::Op;

/// Rows come in multiples of this, so that every part starts on a cache line.
const ROWS_UNIT: usize = 16;

/// A gradient, or some rows of one.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// The parameter's number.
    pub parameter: usize,
    /// Which of its elements.
    pub elements: Range<usize>,
    /// Their gradient; none where the loss does not depend on the parameter.
    pub value: Option<Value>,
}

/// The gradients as they are, one part each.
pub(crate) fn whole(graph: &Graph, gradients: &[Option<Value>]) -> Vec<Part> {
    let part = |(parameter, &value)| Part { parameter, elements: 0..elements(graph, parameter), value };
    gradients.iter().enumerate().map(part).collect()
}

/// Cuts the gradients that are products of matrices and larger than `bytes_max`.
pub(crate) fn split(mut graph: Graph, gradients: &[Option<Value>], bytes_max: usize) -> (Graph, Vec<Part>) {
    let mut parts = Vec::new();
    let mut cut: Vec<Vec<Node>> = vec![Vec::new(); graph.nodes.len()];
    for part in whole(&graph, gradients) {
        match part.value.and_then(|value| rows(&graph, value, bytes_max)) {
            Some((node, rows)) => cut_rows(&mut graph, part.parameter, node, rows, (&mut cut[node], &mut parts)),
            None => parts.push(part),
        }
    }
    let nodes = std::mem::take(&mut graph.nodes).into_iter().zip(cut);
    let nodes = nodes.flat_map(|(node, cut)| if cut.is_empty() { vec![node] } else { cut }).collect();
    graph.set_nodes(nodes);
    (graph, parts)
}

fn elements(graph: &Graph, parameter: usize) -> usize {
    graph.shape(graph.parameters()[parameter]).elements()
}

/// The node of a gradient that is to be cut, and into parts of how many rows.
fn rows(graph: &Graph, gradient: Value, bytes_max: usize) -> Option<(usize, usize)> {
    let Source::Node { node, .. } = graph.info(gradient).source else { return None };
    let by_rows = Op::MatMul { trans_a: true, trans_b: false, bias: false, relu: false };
    let [count, width] = **graph.shape(gradient) else { return None };
    let rows = (bytes_max / (width * graph.dtype(gradient).bytes()).max(1)).max(ROWS_UNIT) / ROWS_UNIT * ROWS_UNIT;
    (graph.nodes[node].op == by_rows && rows < count).then_some((node, rows))
}

/// The rows of aᵀ·b, some at a time: those columns of a are taken out and multiplied.
fn cut_rows(
    graph: &mut Graph,
    parameter: usize,
    node: usize,
    rows: usize,
    (nodes, parts): (&mut Vec<Node>, &mut Vec<Part>),
) {
    let Node { op, inputs, outputs, layer } = graph.nodes[node].clone();
    let [a, b] = inputs[..] else { unreachable!("a product without bias has two factors") };
    let (depth, [count, width]) = (graph.shape(a)[0], [graph.shape(outputs[0])[0], graph.shape(outputs[0])[1]]);
    let (from, to) = (graph.dtype(a), graph.dtype(outputs[0]));
    let source = graph.info(outputs[0]).source;
    for start in (0..count).step_by(rows) {
        let length = rows.min(count - start);
        let columns = graph.value(&layer, [depth, length].into(), from, source);
        let value = graph.value(&layer, [length, width].into(), to, source);
        let slice = Op::Slice { dim: 1, start, length };
        nodes.push(Node { op: slice, inputs: vec![a], outputs: vec![columns], layer: layer.clone() });
        nodes.push(Node { op: op.clone(), inputs: vec![columns, b], outputs: vec![value], layer: layer.clone() });
        parts.push(Part { parameter, elements: start * width..(start + length) * width, value: Some(value) });
    }
}
