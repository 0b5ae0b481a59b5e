//! Nodes of a plan that the GPU computes together although the plan lists them one by one, because each would be a pass over memory:
//! a sum of two gradients with the batch-norm gradient that reads it, and the gradient of a bias with that of the ReLU before it.
//!
//! The plan's memory stays as it is, so what is joined must not need longer what the plan has given to others.

use std::collections::{HashMap, HashSet};

use crate::graph::Value;
use crate::op::Op;
use crate::plan::{Place, Plan};
use crate::unary::Unary;

/// What is computed together.
#[derive(Debug, Default)]
pub(super) struct Joins {
    /// Batch-norm gradients, and the additions that they do.
    pub sums: HashMap<usize, usize>,
    /// Gradients of ReLU, and the biases whose gradients they compute.
    pub biases: HashMap<usize, Value>,
    /// Nodes that others compute.
    pub done: HashSet<usize>,
}

impl Joins {
    /// Finds them.
    pub fn new(plan: &Plan) -> Self {
        let mut joins = Self::default();
        let mut readers: HashMap<Value, Vec<usize>> = HashMap::new();
        for (index, node) in plan.graph().nodes().iter().enumerate() {
            node.inputs.iter().for_each(|&input| readers.entry(input).or_default().push(index));
        }
        let readers = |value: Value| readers.get(&value).map_or(&[][..], Vec::as_slice);
        for index in 0..plan.graph().nodes().len() {
            if is_sum_for_next(plan, index, &readers) {
                joins.sums.insert(index + 1, index);
                joins.done.insert(index);
            }
            if let Some((sum, bias)) = bias_of(plan, index, &readers) {
                joins.biases.insert(index, bias);
                joins.done.insert(sum);
            }
        }
        joins
    }
}

/// Whether a node adds two gradients for nobody but the batch-norm gradient right after it, which gives out what its ReLU lets pass in
/// the sum's place. Its first pass then reads both parts and writes there; its second reads neither, so whatever else it writes may
/// already lie where they were.
fn is_sum_for_next<'a>(plan: &Plan, index: usize, readers: &impl Fn(Value) -> &'a [usize]) -> bool {
    let nodes = plan.graph().nodes();
    let (node, Some(next)) = (&nodes[index], nodes.get(index + 1)) else { return false };
    let (Op::Add, Op::BatchNormGrad(norm)) = (&node.op, &next.op) else { return false };
    let (sum, shape) = (node.outputs[0], |value: Value| plan.graph().shape(value));
    let given = next.outputs[if norm.scale { 3 } else { 2 }..].first().copied();
    norm.residual
        && next.inputs[0] == sum
        && readers(sum) == [index + 1]
        && shape(node.inputs[0]) == shape(node.inputs[1])
        && !plan.outputs().contains(&sum)
        && given.is_some_and(|given| plan.place(given) == plan.place(sum))
}

/// The node that sums a ReLU's gradient over all dims but the last into a place of its own, and what it gives.
fn bias_of<'a>(plan: &Plan, index: usize, readers: &impl Fn(Value) -> &'a [usize]) -> Option<(usize, Value)> {
    let nodes = plan.graph().nodes();
    let Op::UnaryGrad(Unary::Relu) = nodes[index].op else { return None };
    let dz = nodes[index].outputs[0];
    let last = plan.graph().shape(dz).last();
    let sums = |&reader: &usize| matches!(&nodes[reader].op, Op::SumLeading { suffix } if **suffix == [last]);
    let sum = readers(dz).iter().copied().find(sums)?;
    let bias = nodes[sum].outputs[0];
    matches!(plan.place(bias), Place::Gradient(_)).then_some((sum, bias))
}
