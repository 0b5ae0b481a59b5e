//! A backward pass in two halves: gradients of inputs first, gradients of parameters last.
//!
//! A stage of a pipeline sends the gradients of its inputs to the stage before it as soon as they are there; those of its parameters can
//! wait until it has nothing better to do, and meanwhile other micro-batches may be computed. So the first half writes nothing but the
//! arena: a gradient of a parameter that a node of it gives (of a normalisation's scale, say) stays there and is copied in the second.

use crate::graph::{Graph, Node, Source, Value};
use crate::op::Op;
use crate::split::Part;

/// Moves the nodes of the backward pass on which no gradient of an input depends behind all others; among themselves, both kinds keep
/// their order. Gives the graph and the number of the first node of the second half. One sweep over the nodes, and a search among them for each parameter.
pub(super) fn weights_last(
    mut graph: Graph,
    forward_nodes: usize,
    (input_gradients, parts): (&[Value], &[Part]),
) -> (Graph, usize) {
    let mut is_needed = vec![false; graph.values.len()];
    input_gradients.iter().for_each(|value| is_needed[value.index()] = true);
    let mut nodes = std::mem::take(&mut graph.nodes);
    let backward = nodes.split_off(forward_nodes);
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for node in backward.into_iter().rev() {
        if node.outputs.iter().any(|output| is_needed[output.index()]) {
            node.inputs.iter().for_each(|input| is_needed[input.index()] = true);
            first.push(node);
        } else {
            last.push(node);
        }
    }
    first.reverse();
    last.reverse();
    let copies = copies(&mut graph, (&mut first, &mut last), parts);
    nodes.extend(first);
    let boundary = nodes.len();
    nodes.extend(copies.into_iter().chain(last));
    graph.set_nodes(nodes);
    verify(&graph, boundary, parts);
    (graph, boundary)
}

/// Gives the gradients of parameters among the results of the `first` half other names there. The nodes that copy them to where they belong.
fn copies(graph: &mut Graph, (first, last): (&mut [Node], &mut [Node]), parts: &[Part]) -> Vec<Node> {
    let mut copies = Vec::new();
    let mut renamed = vec![None; graph.values.len()];
    for gradient in parts.iter().filter_map(|part| part.value) {
        let Some(node) = first.iter_mut().find(|node| node.outputs.contains(&gradient)) else { continue };
        let info = graph.info(gradient).clone();
        let result = graph.value(&info.name, info.shape, info.dtype, info.source);
        let output = node.outputs.iter_mut().find(|output| **output == gradient).expect("found above");
        *output = result;
        renamed[gradient.index()] = Some(result);
        let layer = node.layer.clone();
        // Times one is a copy, bit for bit.
        copies.push(Node { op: Op::Scale(1.0), inputs: vec![result], outputs: vec![gradient], layer });
    }
    for input in first.iter_mut().chain(last).flat_map(|node| &mut node.inputs) {
        *input = renamed.get(input.index()).copied().flatten().unwrap_or(*input);
    }
    copies
}

/// Asserts that every node comes after those that it reads from, and every gradient of a parameter from the second half.
fn verify(graph: &Graph, boundary: usize, parts: &[Part]) {
    let maker = |value: Value| match graph.info(value).source {
        Source::Node { node, .. } => Some(node),
        _ => None,
    };
    for (index, node) in graph.nodes().iter().enumerate() {
        let in_order = node.inputs.iter().all(|&input| maker(input).is_none_or(|maker| maker < index));
        assert!(in_order, "{}: a node reads what is computed later", node.layer);
    }
    let is_last = |part: &Part| part.value.and_then(maker).is_none_or(|maker| maker >= boundary);
    assert!(parts.iter().all(is_last), "the first half of a backward pass writes no gradient of a parameter");
}
