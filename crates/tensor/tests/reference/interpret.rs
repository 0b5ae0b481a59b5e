//! The slow interpreter: every forward operation in f64, as its definition reads. Backward operations are absent on
//! purpose: gradients are checked against differences of this.

use std::f64::consts::{FRAC_2_SQRT_PI, PI, SQRT_2};

use paceline_tensor::op::Together;
use paceline_tensor::{Graph, Op, Unary, Value};

use super::array::Array;
use super::{normalise, sequence, window};

/// The outputs of one operation; a batch-norm's new running mean and variance follow its outputs.
pub fn eval(op: &Op, inputs: &[&Array]) -> Vec<Array> {
    let x = inputs[0];
    match op {
        Op::Conv2d { conv, relu, moments, .. } => {
            let y = relu_if(*relu, window::conv2d(conv, x, inputs[1], inputs.get(2).copied()));
            let statistics = moments.then(|| normalise::moments(&y));
            std::iter::once(y).chain(statistics.into_iter().flatten()).collect()
        }
        Op::MatMul { trans_a, trans_b, relu, .. } => {
            vec![relu_if(*relu, matmul([x, inputs[1]], [*trans_a, *trans_b], inputs.get(2).copied()))]
        }
        Op::BatchNorm(norm) => normalise::batch_norm(norm, inputs),
        Op::BatchNormInference(norm) => vec![normalise::batch_norm_inference(norm, inputs)],
        Op::BatchNormAgain(norm) => vec![normalise::apply(norm, inputs, inputs[2], inputs[3])],
        Op::LayerNorm { epsilon } => normalise::layer_norm(*epsilon, x, inputs[1], inputs[2]),
        Op::Unary(kind) => vec![x.map(|x| unary(*kind, x))],
        Op::Add => vec![broadcast(x, inputs[1], |a, b| a + b)],
        Op::Mul => vec![broadcast(x, inputs[1], |a, b| a * b)],
        Op::Scale(factor) => vec![x.map(|x| x * f64::from(*factor))],
        Op::SumLeading { suffix } => {
            let mut sum = Array::zeros(suffix);
            let length = sum.data.len();
            x.data.iter().enumerate().for_each(|(position, x)| sum.data[position % length] += x);
            vec![sum]
        }
        Op::Pool2d(pool) => window::pool2d(pool, x),
        Op::Reshape(shape) => vec![Array::new(shape, x.data.clone())],
        Op::Slice { .. } | Op::Pad { .. } | Op::Concat { .. } | Op::Permute { .. } => vec![layout(op, inputs)],
        Op::Softmax { causal } => vec![sequence::softmax(x, *causal)],
        Op::CrossEntropy { smoothing } => vec![sequence::cross_entropy(x, inputs[1], *smoothing)],
        Op::Embedding => vec![sequence::embedding(x, inputs[1])],
        Op::Lstm => sequence::lstm(inputs),
        Op::Together(together) => alone(together, x),
        op => panic!("the reference has no {}", op.name()),
    }
}

/// What a part that has no others computes: its numbers are the sum, and its piece is all.
fn alone(together: &Together, x: &Array) -> Vec<Array> {
    match together {
        Together::Sum | Together::Fork => vec![x.clone()],
        Together::Gather(gather) => {
            assert_eq!(gather.lengths, [x.data.len()], "alone");
            vec![x.clone()]
        }
    }
}

/// Every value of a graph, from those that are given.
pub fn run(graph: &Graph, given: &[(Value, Array)]) -> Vec<Option<Array>> {
    let mut values: Vec<Option<Array>> = graph.values().map(|_| None).collect();
    given.iter().for_each(|(value, array)| values[value.index()] = Some(array.clone()));
    for node in graph.nodes() {
        let inputs: Vec<&Array> =
            node.inputs.iter().map(|input| values[input.index()].as_ref().expect("nodes stand in order")).collect();
        let mut results = eval(&node.op, &inputs);
        if matches!(node.op, Op::BatchNorm(_)) {
            let running = results.split_off(3);
            running.into_iter().zip(&node.inputs[2..4]).for_each(|(new, state)| values[state.index()] = Some(new));
        }
        for (&output, result) in node.outputs.iter().zip(results) {
            assert_eq!(graph.shape(output)[..], result.shape[..], "{}: the shape rule", node.layer);
            values[output.index()] = Some(result);
        }
    }
    values
}

fn relu_if(relu: bool, y: Array) -> Array {
    if relu { y.map(|y| y.max(0.0)) } else { y }
}

fn matmul([a, b]: [&Array; 2], [trans_a, trans_b]: [bool; 2], bias: Option<&Array>) -> Array {
    let rank = a.shape.len();
    let size = |array: &Array, swap: bool, dim: usize| array.shape[rank - 2 + (dim + usize::from(swap)) % 2];
    let (rows, inner, columns) = (size(a, trans_a, 0), size(a, trans_a, 1), size(b, trans_b, 1));
    let shape = [&a.shape[..rank - 2], &[rows, columns]].concat();
    let mut y = Array::zeros(&shape);
    for (position, y) in y.data.iter_mut().enumerate() {
        let (batch, row, column) = (position / columns / rows, position / columns % rows, position % columns);
        *y = bias.map_or(0.0, |bias| bias.data[column]);
        for k in 0..inner {
            let at_a = if trans_a { k * rows + row } else { row * inner + k };
            let at_b = if trans_b { column * inner + k } else { k * columns + column };
            *y += a.data[batch * rows * inner + at_a] * b.data[batch * inner * columns + at_b];
        }
    }
    y
}

fn broadcast(a: &Array, b: &Array, function: impl Fn(f64, f64) -> f64) -> Array {
    let data = a.data.iter().enumerate().map(|(position, &a)| function(a, b.data[position % b.data.len()])).collect();
    Array::new(&a.shape, data)
}

fn layout(op: &Op, inputs: &[&Array]) -> Array {
    let x = inputs[0];
    let with = |dim: usize, size: usize| {
        let mut shape = x.shape.clone();
        shape[dim] = size;
        shape
    };
    let moved = |index: &[usize], dim: usize, to: usize| {
        let mut index = index.to_vec();
        index[dim] = to;
        index
    };
    match op {
        Op::Slice { dim, start, length } => {
            Array::from_fn(&with(*dim, *length), |index| x.at(&moved(index, *dim, index[*dim] + start)))
        }
        Op::Pad { dim, before, after } => Array::from_fn(&with(*dim, x.shape[*dim] + before + after), |index| {
            let inside = (*before..before + x.shape[*dim]).contains(&index[*dim]);
            if inside { x.at(&moved(index, *dim, index[*dim] - before)) } else { 0.0 }
        }),
        Op::Concat { dim } => {
            let total = inputs.iter().map(|input| input.shape[*dim]).sum();
            Array::from_fn(&with(*dim, total), |index| {
                let mut place = index[*dim];
                for input in inputs {
                    if place < input.shape[*dim] {
                        return input.at(&moved(index, *dim, place));
                    }
                    place -= input.shape[*dim];
                }
                unreachable!("the total is the sum of the parts")
            })
        }
        Op::Permute { order } => {
            let shape: Vec<usize> = order.iter().map(|&dim| x.shape[dim]).collect();
            Array::from_fn(&shape, |index| {
                let mut source = vec![0; order.len()];
                order.iter().zip(index).for_each(|(&dim, &place)| source[dim] = place);
                x.at(&source)
            })
        }
        op => unreachable!("{} does not only move elements", op.name()),
    }
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn unary(kind: Unary, x: f64) -> f64 {
    match kind {
        Unary::Relu => x.max(0.0),
        Unary::Relu6 => x.clamp(0.0, 6.0),
        Unary::Gelu => 0.5 * x * (1.0 + erf(x / SQRT_2)),
        Unary::GeluTanh => 0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()),
        Unary::Sigmoid => sigmoid(x),
        Unary::Tanh => x.tanh(),
    }
}

/// The error function by the series 2/√π · e^(−x²) · Σ 2ⁿ·x²ⁿ⁺¹ / (1·3·…·(2n+1)), whose terms all have one sign.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, 0.0);
    for n in 0..200 {
        sum += term;
        term *= 2.0 * x * x / f64::from(2 * n + 3);
    }
    FRAC_2_SQRT_PI * (-x * x).exp() * sum
}
