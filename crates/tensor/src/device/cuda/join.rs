//! Nodes of a plan that the GPU computes together although the plan lists them one by one, because each would be a pass over memory:
//! a sum of two gradients with the batch-norm gradient that reads it, the gradient of a bias with that of the ReLU before it, and both with
//! the gradient of a stem's weights.
//!
//! The plan's memory stays as it is, so what is joined must not need longer what the plan has given to others.

use std::collections::{HashMap, HashSet};

use super::lower::Stem;
use crate::device::cpu::conv::ConvPass;
use crate::dtype::DType;
use crate::graph::{Source, Value};
use crate::op::{Op, ReluMask};
use crate::plan::{Place, Plan};
use crate::unary::Unary;

/// What is computed together.
#[derive(Debug, Default)]
pub(super) struct Joins {
    /// Batch-norm gradients, and the additions that they do.
    pub sums: HashMap<usize, usize>,
    /// Gradients of ReLU, and the biases whose gradients they compute.
    pub biases: HashMap<usize, Value>,
    /// Gradients of ReLU that nobody but a stem's bias and weights wants.
    pub stems: HashMap<usize, StemGradient>,
    /// Nodes that others compute.
    pub done: HashSet<usize>,
    /// Batch-norms with an addition and a ReLU and their gradients, stems and the gradients of their ReLU, by where the bits of what
    /// passes stand: they are a sixteenth of the result that the gradient would read instead.
    pub gates: HashMap<usize, u64>,
    /// Bytes of all bits.
    pub gate_bytes: usize,
}

/// The gradients of a stem.
#[derive(Debug)]
pub(super) struct StemGradient {
    /// How they are computed.
    pub stem: Stem,
    /// The image.
    pub image: Value,
    /// The gradient of its weights.
    pub weight: Value,
    /// The gradient of its bias, if it has one.
    pub bias: Option<Value>,
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
            if let Some(forward) = gated(plan, index) {
                joins.gate(plan, forward, index);
            }
            if let Some((forward, nodes, gradient)) = stem_of(plan, index, &readers) {
                joins.gate(plan, forward, index);
                joins.done.extend(nodes);
                joins.stems.insert(index, gradient);
            } else if let Some((sum, bias)) = bias_of(plan, index, &readers) {
                joins.biases.insert(index, bias);
                joins.done.insert(sum);
            }
        }
        joins
    }

    /// Has a node leave bits for another.
    fn gate(&mut self, plan: &Plan, forward: usize, backward: usize) {
        let at = *self.gates.entry(forward).or_insert(self.gate_bytes as u64);
        if at == self.gate_bytes as u64 {
            let elements = plan.graph().shape(plan.graph().nodes()[forward].outputs[0]).elements();
            self.gate_bytes += (elements / 8).next_multiple_of(256);
        }
        self.gates.insert(backward, at);
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

/// The batch-norm whose ReLU a batch-norm gradient asks about, where eight channels are a byte of bits.
fn gated(plan: &Plan, index: usize) -> Option<usize> {
    let node = &plan.graph().nodes()[index];
    let Op::BatchNormGrad(norm) = &node.op else { return None };
    let y = *node.inputs.last().filter(|_| norm.mask == ReluMask::FromOutput)?;
    let Source::Node { node: forward, output: 0 } = plan.graph().info(y).source else { return None };
    let fits = plan.graph().dtype(y) == DType::Bf16 && plan.graph().shape(y).last().is_multiple_of(8);
    (fits && matches!(plan.graph().nodes()[forward].op, Op::BatchNorm(_))).then_some(forward)
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

/// A ReLU's gradient that is read by the gradients of a stem's weights and bias alone: the stem's node, those nodes, and what they give,
/// each into a place of its own.
fn stem_of<'a>(
    plan: &Plan,
    index: usize,
    readers: &impl Fn(Value) -> &'a [usize],
) -> Option<(usize, Vec<usize>, StemGradient)> {
    let (graph, node) = (plan.graph(), &plan.graph().nodes()[index]);
    let Op::UnaryGrad(Unary::Relu) = node.op else { return None };
    let Source::Node { node: forward, output: 0 } = graph.info(node.inputs[1]).source else { return None };
    let Op::Conv2d { relu: true, .. } = graph.nodes()[forward].op else { return None };
    let dz = node.outputs[0];
    let is_weight = |&reader: &usize| matches!(graph.nodes()[reader].op, Op::Conv2dGradWeight { .. });
    let weight = readers(dz).iter().copied().find(is_weight)?;
    let Op::Conv2dGradWeight { conv } = graph.nodes()[weight].op else { return None };
    let image = graph.nodes()[weight].inputs[0];
    let stem = |pass| Stem::new(pass, (graph.shape(image), graph.dtype(image)), conv, graph.shape(dz));
    let (Some(_), Some(stem)) = (stem(ConvPass::Forward), stem(ConvPass::GradWeight)) else { return None };
    let sum = bias_of(plan, index, readers);
    let nodes: Vec<usize> = [weight].into_iter().chain(sum.map(|(sum, _)| sum)).collect();
    let gradient =
        StemGradient { stem, image, weight: graph.nodes()[weight].outputs[0], bias: sum.map(|(_, bias)| bias) };
    let fits = graph.nodes()[forward].inputs[0] == image
        && graph.dtype(dz) == DType::Bf16
        && matches!(plan.place(gradient.weight), Place::Gradient(_))
        && readers(dz).iter().all(|reader| nodes.contains(reader))
        && !plan.outputs().contains(&dz);
    fits.then_some((forward, nodes, gradient))
}
