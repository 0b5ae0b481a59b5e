//! Nodes that may be computed beside others: those that give nothing but gradients of parameters, which no node reads.

use crate::graph::Graph;
use crate::split::Part;

/// How many groups of such nodes may be under way at a time.
const AHEAD: usize = 1;

/// For each node that gives nothing but gradients of parameters, the node before which it has to be done: where the next group of such
/// nodes begins. Nodes of the same kind without others between them are a group.
pub(super) fn beside(graph: &Graph, parts: &[Part]) -> Vec<Option<usize>> {
    let mut is_gradient = vec![false; graph.values.len()];
    parts.iter().filter_map(|part| part.value).for_each(|value| is_gradient[value.index()] = true);
    let nodes = graph.nodes();
    let alone: Vec<bool> =
        nodes.iter().map(|node| node.outputs.iter().all(|output| is_gradient[output.index()])).collect();
    let mut until = vec![None; nodes.len()];
    // Where groups begin, the last one first.
    let mut starts: Vec<usize> = Vec::new();
    let mut end = nodes.len();
    for index in (0..nodes.len()).rev().filter(|&index| alone[index]) {
        if !alone.get(index + 1).is_some_and(|next| *next) {
            end = starts.len().checked_sub(AHEAD).map_or(nodes.len(), |which| starts[which]);
        }
        until[index] = Some(end);
        if index == 0 || !alone[index - 1] {
            starts.push(index);
        }
    }
    until
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::op::Op;
    use crate::plan::{Plan, Updates, Wanted};
    use crate::unary::Unary;

    #[test]
    fn what_is_read_beside_others_is_not_overwritten_before_it_is_done() {
        let mut graph = Graph::new();
        let x = graph.input("x", [32, 8], DType::F32);
        let parameters = ["w", "v"].map(|name| graph.parameter(name, [32, 8]));
        let mut node = |op: Op, inputs: &[_]| graph.push_one("node", op, inputs).unwrap();
        let scaled: Vec<_> = parameters.iter().map(|&w| node(Op::Mul, &[x, w])).collect();
        let dh = node(Op::Add, &scaled);
        let first = node(Op::Unary(Unary::Relu), &[dh]);
        let more = node(Op::Unary(Unary::Sigmoid), &[x]);
        // The last node before the next gradient reads it for the last time, and could take its place.
        let sum = node(Op::Add, &[dh, more]);
        let second = node(Op::Unary(Unary::Relu), &[sum]);
        let wanted = |beside| Wanted {
            outputs: vec![sum],
            gradients: vec![Some(first), Some(second)],
            updates: Updates::FromArena,
            unfused: true,
            beside,
            ..Wanted::default()
        };
        let [alone, beside] = [false, true].map(|beside| Plan::new(graph.clone(), &wanted(beside)));
        assert_eq!(alone.place(sum), alone.place(dh), "in its place where nothing is beside it");
        assert_ne!(beside.place(sum), beside.place(dh));
    }

    #[test]
    fn gradients_may_take_until_the_next_ones_begin() {
        let mut graph = Graph::new();
        let x = graph.input("x", [4], DType::F32);
        let mut node = |_: usize| graph.push_one("node", Op::Unary(Unary::Tanh), &[x]).unwrap();
        let values: Vec<_> = (0..8).map(&mut node).collect();
        let gradient = |parameter: usize, index: usize| Part { parameter, elements: 0..4, value: Some(values[index]) };
        let none = Part { parameter: 4, elements: 0..4, value: None };
        let parts = [gradient(0, 6), gradient(1, 4), gradient(2, 3), gradient(3, 1), none];
        let found = beside(&graph, &parts);
        assert_eq!(found, [None, Some(3), None, Some(6), Some(6), None, Some(8), None]);
    }
}
