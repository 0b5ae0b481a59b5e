//! Fusion: neighbouring operations that can share one pass over memory become one node.
//!
//! Runs after the gradient was built, so that forward and backward nodes are fused together. Patterns:
//!
//! * batch-norm → add → one node with a residual;
//! * convolution, matrix product or batch-norm → ReLU → one node, batch-norm → ReLU6 too;
//! * ReLU's gradient → batch-norm's gradient → one node, which also gives out the residual's share.
//!
//! * and by itself ([`moments`]), convolution → batch-norm of a batch: the convolution gives out the statistics too, and the
//!   batch-norm does not read its input for them.
//!
//! And where a maximum was taken, what comes after its gradient may come before it, where there are fewer pixels: a ReLU lets pass
//! the winners that it let pass as maxima, and a sum over pixels is the same.
//!
//! A value that disappears must have had no other reader and must not be wanted by the caller.

use crate::dtype::DType;
use crate::graph::{Graph, Node, Source, Value};
use crate::op::{BatchNorm, Op, Rectifier, ReluMask};
use crate::unary::Unary;
use crate::window::PoolKind;

/// The same computation in fewer passes; `wanted` values keep being computed.
pub fn fuse(graph: Graph, wanted: &[Value]) -> Graph {
    let mut work = Fusion::new(graph, wanted);
    work.each_node(Fusion::residual);
    work.each_node(Fusion::relu);
    work.each_node(Fusion::relu_gradient);
    work.each_node(Fusion::relu_before_pooling);
    work.each_node(Fusion::sum_before_pooling);
    work.finish()
}

/// From so many elements on it pays on a CPU: half a million fill most of a core's second-level cache, and of fewer, reading
/// them once more takes no longer than counting them (resnet50 and mobilenet on two Zen 4 cores, in f32).
pub const MOMENTS_FROM: usize = 1 << 19;

/// The same computation with convolutions that give out the statistics of what a batch-norm normalises, where that has at least
/// `least` elements.
pub fn moments(mut graph: Graph, least: usize) -> Graph {
    for index in 0..graph.nodes.len() {
        let Op::BatchNorm(BatchNorm { moments: false, .. }) = graph.nodes[index].op else { continue };
        let x = graph.nodes[index].inputs[0];
        if graph.shape(x).elements() < least {
            continue;
        }
        let Source::Node { node: maker, output: 0 } = graph.values[x.index()].source else { continue };
        let Op::Conv2d { relu: false, moments: given, .. } = graph.nodes[maker].op else { continue };
        if !given {
            give_moments(&mut graph, maker);
        }
        let statistics = graph.nodes[maker].outputs[1..].to_vec();
        let node = &mut graph.nodes[index];
        let Op::BatchNorm(norm) = &mut node.op else { unreachable!("checked above") };
        norm.moments = true;
        let at = norm.moments_at();
        node.inputs.splice(at..at, statistics);
    }
    graph
}

/// Gives a convolution its further outputs.
fn give_moments(graph: &mut Graph, index: usize) {
    let Op::Conv2d { moments, .. } = &mut graph.nodes[index].op else { unreachable!("only convolutions come here") };
    *moments = true;
    let channels = graph.shape(graph.nodes[index].outputs[0]).last();
    for (output, name) in [(1, "mean"), (2, "variance")] {
        let name = format!("{}.{name}", graph.nodes[index].layer);
        let value = graph.value(&name, [channels].into(), DType::F32, Source::Node { node: index, output });
        graph.nodes[index].outputs.push(value);
    }
}

/// The nodes that read each value, in order.
type Readers = Vec<Vec<usize>>;

struct Fusion {
    graph: Graph,
    nodes: Vec<Option<Node>>,
    wanted: Vec<bool>,
}

impl Fusion {
    fn new(mut graph: Graph, wanted: &[Value]) -> Self {
        let nodes = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
        let mut flags = vec![false; graph.values.len()];
        wanted.iter().for_each(|value| flags[value.index()] = true);
        Self { graph, nodes, wanted: flags }
    }

    /// One pass. The readers are counted once: what a pass changes of them, it never looks at again.
    fn each_node(&mut self, pass: fn(&mut Self, usize, &Readers)) {
        let mut readers = vec![Vec::new(); self.graph.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            node.iter().flat_map(|node| &node.inputs).for_each(|input| readers[input.index()].push(index));
        }
        (0..self.nodes.len()).for_each(|index| pass(self, index, &readers));
    }

    /// The node whose first output this is.
    fn producer(&self, value: Value) -> Option<usize> {
        match self.graph.values[value.index()].source {
            Source::Node { node, output: 0 } => Some(node),
            _ => None,
        }
    }

    /// The value whose bytes these are: a reshape has none of its own.
    fn bytes_of(&self, mut value: Value) -> Value {
        while let Some(Node { op: Op::Reshape(_), inputs, .. }) =
            self.producer(value).and_then(|node| self.nodes[node].as_ref())
        {
            value = inputs[0];
        }
        value
    }

    /// Whether a batch-norm may run as late as `target`: nobody on the way reads its statistics or touches its states.
    fn may_move(&self, from: usize, target: usize) -> bool {
        let Some(node) = &self.nodes[from] else { return false };
        let touches = |value: &Value| {
            let value = self.bytes_of(*value);
            node.inputs[2..4].contains(&value) || node.outputs[1..].contains(&value)
        };
        let mut between = self.nodes[from + 1..target].iter().flatten();
        !between.any(|other| other.inputs.iter().any(touches))
    }

    /// Whether `value` may disappear into its only reader.
    fn is_private(&self, value: Value, readers: &Readers) -> bool {
        readers[value.index()].len() == 1 && !self.wanted[value.index()]
    }

    /// Puts a node at `index` and points its outputs there.
    fn place(&mut self, index: usize, node: Node) {
        for (output, value) in node.outputs.iter().enumerate() {
            self.graph.values[value.index()].source = Source::Node { node: index, output };
        }
        self.nodes[index] = Some(node);
    }

    /// batch-norm → add: the node moves to the addition, where both operands exist.
    fn residual(&mut self, index: usize, readers: &Readers) {
        let Some(Node { op: Op::Add, inputs, outputs, .. }) = self.nodes[index].clone() else { return };
        if self.graph.shape(inputs[0]) != self.graph.shape(inputs[1]) || inputs[0] == inputs[1] {
            return;
        }
        // The later of two candidates: its gradient is then the first reader of the sum's gradient.
        let candidate = |side: usize| {
            let producer = self.producer(inputs[side]).filter(|_| self.is_private(inputs[side], readers))?;
            let (Op::BatchNorm(norm) | Op::BatchNormInference(norm)) = self.nodes[producer].as_ref()?.op else {
                return None;
            };
            let free = !norm.residual && norm.rectifier == Rectifier::None;
            (free && self.may_move(producer, index)).then_some((producer, side))
        };
        let Some((producer, side)) = candidate(0).max(candidate(1)) else { return };
        let mut node = self.nodes[producer].take().expect("a candidate was found there");
        let (Op::BatchNorm(norm) | Op::BatchNormInference(norm)) = &mut node.op else { unreachable!("checked above") };
        norm.residual = true;
        node.inputs.push(inputs[1 - side]);
        node.outputs[0] = outputs[0];
        self.place(index, node);
    }

    /// anything that has a ReLU flag → ReLU.
    fn relu(&mut self, index: usize, readers: &Readers) {
        let Some(Node { op: Op::Unary(kind), inputs, outputs, .. }) = self.nodes[index].clone() else { return };
        let Some(rectifier) = Rectifier::of(kind) else { return };
        let Some(producer) = self.producer(inputs[0]).filter(|_| self.is_private(inputs[0], readers)) else { return };
        let Some(mut node) = self.nodes[producer].clone() else { return };
        match &mut node.op {
            Op::Conv2d { relu, .. } | Op::MatMul { relu, .. } if kind == Unary::Relu && !*relu => *relu = true,
            Op::BatchNorm(norm) | Op::BatchNormInference(norm) if norm.rectifier == Rectifier::None => {
                norm.rectifier = rectifier;
            }
            _ => return,
        }
        node.outputs[0] = outputs[0];
        self.nodes[index] = None;
        self.place(producer, node);
    }

    /// ReLU's gradient → batch-norm's gradient, where the forward pair was fused. Where nothing was added between the two,
    /// the ReLU's mask follows from x, and y is not read. The gradient before the ReLU may have other readers (the
    /// residual); then the fused node gives it out too, if it comes before all of them.
    fn relu_gradient(&mut self, index: usize, readers: &Readers) {
        let Some(Node { op: Op::UnaryGrad(kind), inputs, outputs, .. }) = self.nodes[index].clone() else { return };
        let Some(cut) = Rectifier::of(kind) else { return };
        let ([dy, y], dz) = ([inputs[0], inputs[1]], outputs[0]);
        let Some(forward) = self.producer(y).and_then(|node| self.nodes[node].as_ref()) else { return };
        let Op::BatchNorm(BatchNorm { rectifier, residual, .. }) = forward.op else { return };
        let (x, beta, mean) = (forward.inputs[0], forward.inputs[1], forward.outputs[1]);
        let readers = &readers[dz.index()];
        let Some(&first) = readers.first() else { return };
        let Some(mut node) = self.nodes[first].clone() else { return };
        let Op::BatchNormGrad(norm) = &mut node.op else { return };
        if rectifier != cut || self.wanted[dz.index()] || node.inputs[..3] != [dz, x, mean] {
            return;
        }
        let (mask, saved) = if residual { (ReluMask::FromOutput, y) } else { (ReluMask::FromInput, beta) };
        (norm.mask, norm.rectifier) = (mask, rectifier);
        norm.residual = readers.len() > 1;
        let gives_residual = norm.residual;
        node.inputs[0] = dy;
        node.inputs.push(saved);
        if gives_residual {
            node.outputs.push(dz);
        }
        self.nodes[index] = None;
        self.place(first, node);
    }

    /// The gradient of a maximum, as (its node, what it was given), if `value` is one and nobody else reads it.
    fn pooled(&self, value: Value) -> Option<(usize, Value, Value)> {
        let node = self.producer(value)?;
        match self.nodes[node].as_ref()? {
            Node { op: Op::Pool2dGrad { pool, .. }, inputs, .. } if pool.kind == PoolKind::Max => {
                Some((node, inputs[0], inputs[1]))
            }
            _ => None,
        }
    }

    /// gradient of a maximum → gradient of a ReLU: the other way round, with the maxima instead of the pixels.
    fn relu_before_pooling(&mut self, index: usize, readers: &Readers) {
        let Some(Node { op: Op::UnaryGrad(kind), inputs, outputs, layer }) = self.nodes[index].clone() else { return };
        if Rectifier::of(kind).is_none() || !self.is_private(inputs[0], readers) {
            return;
        }
        let Some((pooling, dy, winners)) = self.pooled(inputs[0]) else { return };
        // The pooling whose winners these are must have looked at what the ReLU gave.
        let Source::Node { node: forward, .. } = self.graph.values[winners.index()].source else { return };
        let Some(forward) = self.nodes[forward].as_ref().filter(|node| node.inputs[0] == inputs[1]) else { return };
        let maxima = forward.outputs[0];
        let Some(Node { op, .. }) = self.nodes[pooling].take() else { return };
        let info = self.graph.values[dy.index()].clone();
        let gated = self.graph.value(&layer, info.shape, info.dtype, Source::Input(0));
        self.wanted.push(false);
        let gate = Op::UnaryGrad(kind);
        self.place(pooling, Node { op: gate, inputs: vec![dy, maxima], outputs: vec![gated], layer: layer.clone() });
        self.place(index, Node { op, inputs: vec![gated, winners], outputs, layer });
    }

    /// gradient of a maximum → sum over the pixels: each maximum's gradient went to one pixel.
    fn sum_before_pooling(&mut self, index: usize, _: &Readers) {
        let Some(Node { op: Op::SumLeading { suffix }, inputs, .. }) = &self.nodes[index] else { return };
        if suffix.len() != 1 {
            return;
        }
        let Some((_, dy, _)) = self.pooled(inputs[0]) else { return };
        if let Some(node) = &mut self.nodes[index] {
            node.inputs[0] = dy;
        }
    }

    fn finish(mut self) -> Graph {
        let kept: Vec<Node> = self.nodes.into_iter().flatten().collect();
        for (index, node) in kept.iter().enumerate() {
            for (output, value) in node.outputs.iter().enumerate() {
                self.graph.values[value.index()].source = Source::Node { node: index, output };
            }
        }
        self.graph.nodes = kept;
        self.graph
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient;
    use crate::window::{Conv2d, Pool2d};

    fn names(graph: &Graph) -> Vec<&'static str> {
        graph.nodes().iter().map(|node| node.op.name()).collect()
    }

    const NORM: BatchNorm = BatchNorm {
        epsilon: 1e-5,
        momentum: 0.1,
        scale: false,
        residual: false,
        rectifier: Rectifier::None,
        moments: false,
    };

    fn norm(graph: &mut Graph, x: Value) -> Value {
        let channels = [graph.shape(x).last()];
        let inputs =
            [x, graph.parameter("beta", channels), graph.state("mean", channels), graph.state("var", channels)];
        graph.push_one("bn", Op::BatchNorm(NORM), &inputs).unwrap()
    }

    fn conv(graph: &mut Graph, x: Value) -> Value {
        let channels = graph.shape(x).last();
        let weight = graph.parameter("weight", [1, 1, channels, channels]);
        graph
            .push_one(
                "conv",
                Op::Conv2d { conv: Conv2d::square(1), bias: false, relu: false, moments: false },
                &[x, weight],
            )
            .unwrap()
    }

    fn block(graph: &mut Graph, x: Value) -> Value {
        let main = conv(graph, x);
        let main = norm(graph, main);
        let sum = graph.push_one("add", Op::Add, &[main, x]).unwrap();
        graph.push_one("relu", Op::Unary(Unary::Relu), &[sum]).unwrap()
    }

    #[test]
    fn a_residual_block_is_four_passes() {
        let mut graph = Graph::new();
        let x = graph.input("x", [2, 4, 4, 8], DType::F32);
        let h = block(&mut graph, x);
        let y = block(&mut graph, h);
        let seed = graph.input("dy", [2, 4, 4, 8], DType::F32);
        let parameters = graph.parameters().to_vec();
        let gradients = gradient::differentiate(&mut graph, y, seed, &parameters).unwrap();
        let mut wanted: Vec<Value> = parameters.iter().filter_map(|&p| gradients.of(p)).collect();
        wanted.push(y);
        let fused = fuse(graph, &wanted);
        assert_eq!(
            names(&fused),
            [
                "conv2d",
                "batch_norm+add+relu",
                "conv2d",
                "batch_norm+add+relu",
                "batch_norm+add+relu.grad",
                "conv2d.grad_input",
                "conv2d.grad_weight",
                "add",
                "batch_norm+relu.grad",
                "conv2d.grad_weight",
            ]
        );
    }

    #[test]
    fn a_convolution_gives_its_statistics_to_the_batch_norms_behind_it() {
        let mut graph = Graph::new();
        let x = graph.input("x", [2, 4, 4, 8], DType::F32);
        let y = conv(&mut graph, x);
        let [a, b] = [norm(&mut graph, y), norm(&mut graph, y)];
        let wanted = norm(&mut graph, a);
        assert_eq!(names(&moments(graph.clone(), 257)), ["conv2d", "batch_norm", "batch_norm", "batch_norm"]);
        let fused = moments(graph, 256);
        assert_eq!(names(&fused), ["conv2d+moments", "batch_norm", "batch_norm", "batch_norm"]);
        let [conv, rest @ ..] = fused.nodes() else { unreachable!("counted above") };
        for (node, given) in rest.iter().zip([true, true, false]) {
            assert_eq!(node.inputs.ends_with(&conv.outputs[1..]), given);
            assert_eq!(node.op == Op::BatchNorm(BatchNorm { moments: true, ..NORM }), given);
        }
        assert!(fused.nodes()[1].outputs.contains(&a) && fused.nodes()[2].outputs.contains(&b));
        assert!(fused.nodes()[3].outputs.contains(&wanted));
    }

    #[test]
    fn a_batch_norm_does_not_move_past_a_reader_of_its_statistics_or_states() {
        for (output, state, expected) in [(None, None, 2), (Some(1), None, 3), (None, Some(0), 4)] {
            let mut graph = Graph::new();
            let x = graph.input("x", [2, 4], DType::F32);
            let y = norm(&mut graph, x);
            if let Some(output) = output {
                let statistic = graph.nodes()[0].outputs[output];
                graph.push_one("reader", Op::Scale(2.0), &[statistic]).unwrap();
            }
            if let Some(state) = state {
                let state = graph.states()[state];
                let reshaped = graph.push_one("reshape", Op::Reshape([2, 2].into()), &[state]).unwrap();
                graph.push_one("reader", Op::Scale(2.0), &[reshaped]).unwrap();
            }
            let z = graph.push_one("add", Op::Add, &[y, x]).unwrap();
            let w = graph.push_one("end", Op::Scale(3.0), &[z]).unwrap();
            let fused = fuse(graph, &[w]);
            let moved = names(&fused).contains(&"batch_norm+add");
            assert_eq!(moved, output.is_none() && state.is_none(), "{:?}", names(&fused));
            assert_eq!(fused.nodes().len(), expected + usize::from(!moved));
        }
    }

    #[test]
    fn only_a_first_output_is_fused_with_what_follows() {
        let mut graph = Graph::new();
        let x = graph.input("x", [2, 4], DType::F32);
        norm(&mut graph, x);
        let mean = graph.nodes()[0].outputs[1];
        let y = graph.push_one("relu", Op::Unary(Unary::Relu), &[mean]).unwrap();
        assert_eq!(names(&fuse(graph, &[y])), ["batch_norm", "relu"]);
    }

    #[test]
    fn what_follows_the_gradient_of_a_maximum_comes_before_it() {
        let mut graph = Graph::new();
        let x = graph.input("x", [2, 4, 4, 8], DType::F32);
        let (weight, bias) = (graph.parameter("weight", [1, 1, 8, 8]), graph.parameter("bias", [8]));
        let op = Op::Conv2d { conv: Conv2d::square(1), bias: true, relu: false, moments: false };
        let c = graph.push_one("conv", op, &[x, weight, bias]).unwrap();
        let r = graph.push_one("relu", Op::Unary(Unary::Relu), &[c]).unwrap();
        let p = graph.push_one("pool", Op::Pool2d(Pool2d::sliding(PoolKind::Max, 2, 2)), &[r]).unwrap();
        let seed = graph.input("dy", [2, 2, 2, 8], DType::F32);
        let gradients = gradient::differentiate(&mut graph, p, seed, &[weight, bias]).unwrap();
        let wanted = [p, gradients.of(weight).unwrap(), gradients.of(bias).unwrap()];
        let fused = fuse(graph, &wanted);
        let expected = ["conv2d+relu", "pool2d", "unary.grad", "pool2d.grad", "sum_leading", "conv2d.grad_weight"];
        assert_eq!(names(&fused), expected);
        let gate = &fused.nodes()[2];
        assert_eq!((gate.inputs[1], fused.nodes()[4].inputs[0]), (p, gate.outputs[0]));
    }

    #[test]
    fn a_wanted_value_does_not_disappear() {
        let mut graph = Graph::new();
        let x = graph.input("x", [1, 2, 2, 4], DType::F32);
        let c = conv(&mut graph, x);
        let y = graph.push_one("relu", Op::Unary(Unary::Relu), &[c]).unwrap();
        assert_eq!(names(&fuse(graph.clone(), &[y])), ["conv2d+relu"]);
        assert_eq!(names(&fuse(graph, &[y, c])), ["conv2d", "relu"]);
    }

    #[test]
    fn a_value_with_two_readers_does_not_disappear() {
        let mut graph = Graph::new();
        let x = graph.input("x", [1, 2, 2, 4], DType::F32);
        let c = conv(&mut graph, x);
        let r = graph.push_one("relu", Op::Unary(Unary::Relu), &[c]).unwrap();
        let y = graph.push_one("add", Op::Add, &[r, c]).unwrap();
        assert_eq!(names(&fuse(graph, &[y])), ["conv2d", "relu", "add"]);
    }
}
