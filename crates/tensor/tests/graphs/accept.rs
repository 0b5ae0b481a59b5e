//! Arbitrary operations on arbitrary inputs: the graph refuses or accepts, and never panics; what it accepts, the CPU
//! runs.

use std::cell::RefCell;
use std::collections::BTreeMap;

use paceline_tensor::op::{BatchNorm, BatchNormGrad, Rectifier, ReluMask};
use paceline_tensor::window::{Conv2d, Padding, Pool2d, PoolKind, Windows};
use paceline_tensor::{DType, Device, Executor, Graph, Op, Pass, Plan, Precision, Shape, Store, Unary, Value, Wanted};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

/// What is drawn for an operation: small numbers and flags to make any of them from.
#[derive(Clone, Debug)]
struct Draw {
    kind: u8,
    numbers: [usize; 10],
    flags: [bool; 3],
    share: f32,
    dims: Vec<usize>,
}

fn draw() -> impl Strategy<Value = Draw> {
    let share = prop::sample::select(vec![0.0, 0.5, 1.0, -1.0, f32::NAN, f32::INFINITY]);
    let number = prop_oneof![6 => 1usize..3, 2 => 0usize..5];
    let numbers = prop::array::uniform10(number);
    // Sizes, or an order of dims.
    let order = Just((0..4).collect::<Vec<usize>>()).prop_shuffle();
    let dims = prop_oneof![3 => prop::collection::vec(1usize..4, 1..4), 1 => prop::collection::vec(0usize..4, 0..5), 1 => order];
    (0u8..34, numbers, any::<[bool; 3]>(), share, dims).prop_map(|(kind, numbers, flags, share, dims)| Draw {
        kind,
        numbers,
        flags,
        share,
        dims,
    })
}

fn op(draw: &Draw) -> Op {
    let Draw { kind, numbers: n, flags: [a, b, c], share, dims } = draw.clone();
    let padding = Padding { top: n[4] / 2, left: n[5] / 2, bottom: n[6] / 2, right: n[7] / 2 };
    let conv = Conv2d { kernel: [n[0], n[1]], stride: [n[2], n[3]], padding, dilation: [n[8], 1], groups: n[9] };
    let windows = if c {
        Windows::Adaptive { output: [n[0], n[1]] }
    } else {
        Windows::Sliding { kernel: [n[0], n[1]], stride: [n[2], n[3]], padding, ceil: b, count_padding: n[8] > 1 }
    };
    let pool = Pool2d { kind: if a { PoolKind::Max } else { PoolKind::Average }, windows };
    let norm = BatchNorm {
        epsilon: 1e-5,
        momentum: 0.1,
        scale: a,
        residual: b,
        rectifier: if c { Rectifier::Relu6 } else { Rectifier::None },
        moments: false,
    };
    let input = [n[3], n[4], n[5], n[6]];
    let unary = Unary::ALL[n[0] % Unary::ALL.len()];
    match kind {
        0 | 1 => Op::Conv2d { conv, bias: a, relu: b, moments: c },
        2 => Op::Conv2dGradInput { conv, input },
        3 => Op::Conv2dGradWeight { conv },
        4 | 5 => Op::MatMul { trans_a: a, trans_b: b, bias: c, relu: n[0] > 1 },
        6 | 7 => Op::BatchNorm(norm),
        8 => Op::BatchNormInference(norm),
        9 => {
            let mask = [ReluMask::None, ReluMask::FromInput, ReluMask::FromOutput][n[0] % 3];
            Op::BatchNormGrad(BatchNormGrad { scale: a, rectifier: Rectifier::Relu, mask, residual: b })
        }
        10 => Op::LayerNorm { epsilon: 1e-5 },
        11 => Op::LayerNormGrad,
        12 => Op::Unary(unary),
        13 => Op::UnaryGrad(unary),
        14 => Op::Add,
        15 => Op::Mul,
        16 => Op::Scale(share),
        17 => Op::SumLeading { suffix: Shape::new(dims) },
        18 | 19 => Op::Pool2d(pool),
        20 => Op::Pool2dGrad { pool, input },
        21 => Op::Reshape(Shape::new(dims)),
        22 => Op::Slice { dim: n[0], start: n[1], length: n[2] },
        23 => Op::Pad { dim: n[0], before: n[1], after: n[2] },
        24 => Op::Concat { dim: n[0] },
        25 => Op::Permute { order: dims },
        26 => Op::Dropout { probability: share, salt: 1, within: None },
        27 => [Op::Softmax { causal: a }, Op::SoftmaxGrad][usize::from(b)].clone(),
        28 => Op::CrossEntropy { smoothing: share },
        29 => Op::CrossEntropyGrad { smoothing: share },
        30 => [Op::Embedding, Op::EmbeddingGrad { rows: n[0] }][usize::from(a)].clone(),
        31 => Op::Lstm,
        32 => Op::Cast([DType::F32, DType::Bf16, DType::I32][n[0] % 3]),
        _ => Op::LstmGrad,
    }
}

/// An input: what it is and its sizes.
type Input = (Kind, Vec<usize>);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Float,
    Narrow,
    Ids,
    State,
}

/// Inputs that fit an operation, or would if its own numbers were sound.
fn fitting(op: &Op, draw: &Draw) -> Vec<Input> {
    let n = draw.numbers;
    let x = vec![n[3], n[4] + 1, n[5] + 1, n[6]];
    let (channels, rows) = (vec![n[6]], vec![x[..3].iter().product()]);
    match op {
        Op::Conv2d { .. } | Op::Conv2dGradInput { .. } | Op::Conv2dGradWeight { .. } => convolution(op, &x, n[7]),
        Op::MatMul { trans_a, trans_b, bias, .. } => {
            let matrix = |rows: usize, columns: usize, swap: bool| {
                [&draw.dims[..], &if swap { [columns, rows] } else { [rows, columns] }].concat()
            };
            let (a, b) = (matrix(n[0], n[1], *trans_a), matrix(n[1], n[2], *trans_b));
            float(&[&a, &b, &vec![n[2]]][..2 + usize::from(*bias)])
        }
        Op::BatchNorm(norm) | Op::BatchNormInference(norm) => {
            let mut inputs = float(&[&x, &channels]);
            inputs.extend([(Kind::State, channels.clone()), (Kind::State, channels.clone())]);
            inputs.extend(norm.scale.then(|| (Kind::Float, channels.clone())));
            inputs.extend(norm.residual.then(|| (Kind::Float, x.clone())));
            inputs
        }
        Op::BatchNormGrad(norm) => {
            let mut inputs = float(&[&x, &x, &channels, &channels]);
            inputs.extend(norm.scale.then(|| (Kind::Float, channels.clone())));
            match norm.mask {
                ReluMask::None => {}
                ReluMask::FromInput => inputs.push((Kind::Float, channels.clone())),
                ReluMask::FromOutput => inputs.push((Kind::Float, x.clone())),
            }
            inputs
        }
        Op::LayerNorm { .. } => float(&[&x, &channels, &channels]),
        Op::LayerNormGrad => float(&[&x, &x, &channels, &rows, &rows]),
        Op::UnaryGrad(_) | Op::SoftmaxGrad => float(&[&x, &x]),
        Op::Add | Op::Mul => float(&[&x, &x[n[0].min(3)..].to_vec()]),
        Op::SumLeading { suffix } => float(&[&[&[n[0]], &suffix[..]].concat()]),
        Op::Pool2dGrad { pool, input } => {
            let sound = !matches!(pool.windows, Windows::Sliding { stride, .. } if stride.contains(&0));
            let size = sound.then(|| pool.output([input[1], input[2]])).flatten().unwrap_or([1, 1]);
            let y = vec![input[0], size[0], size[1], input[3]];
            let mut inputs = float(&[&y]);
            inputs.extend((pool.kind == PoolKind::Max).then_some((Kind::Ids, y)));
            inputs
        }
        Op::Reshape(shape) => float(&[&vec![shape.elements()]]),
        Op::Concat { dim } => {
            let mut other = x.clone();
            other.iter_mut().skip(*dim).take(1).for_each(|size| *size = n[1]);
            float(&[&x, &other])
        }
        Op::Permute { order } => float(&[&x[..order.len().min(4)].to_vec()]),
        Op::CrossEntropy { .. } => vec![(Kind::Float, vec![n[0], n[1]]), (Kind::Ids, vec![n[0]])],
        Op::CrossEntropyGrad { .. } => {
            vec![(Kind::Float, vec![1]), (Kind::Float, vec![n[0], n[1]]), (Kind::Ids, vec![n[0]])]
        }
        Op::Embedding => vec![(Kind::Ids, draw.dims.clone()), (Kind::Float, vec![n[0], n[1]])],
        Op::EmbeddingGrad { .. } => {
            vec![(Kind::Float, [&draw.dims[..], &[n[1]]].concat()), (Kind::Ids, draw.dims.clone())]
        }
        Op::Lstm | Op::LstmGrad => lstm(op, n),
        _ => float(&[&x]),
    }
}

fn float(shapes: &[&Vec<usize>]) -> Vec<Input> {
    shapes.iter().map(|&shape| (Kind::Float, shape.clone())).collect()
}

/// Inputs of a convolution or one of its gradients, with so many output channels in each group.
fn convolution(op: &Op, x: &[usize], outputs: usize) -> Vec<Input> {
    let (Op::Conv2d { conv, .. } | Op::Conv2dGradInput { conv, .. } | Op::Conv2dGradWeight { conv }) = op else {
        unreachable!("only convolutions come here")
    };
    let x = if let Op::Conv2dGradInput { input, .. } = op { input.to_vec() } else { x.to_vec() };
    let sound = [conv.kernel, conv.stride, conv.dilation].iter().flatten().all(|&size| size > 0);
    let [height, width] = sound.then(|| conv.output([x[1], x[2]])).flatten().unwrap_or([1, 1]);
    let channels = outputs * conv.groups;
    let weight = vec![conv.kernel[0], conv.kernel[1], x[3] / conv.groups.max(1), channels];
    let y = vec![x[0], height, width, channels];
    match op {
        Op::Conv2d { bias, .. } => float(&[&x, &weight, &vec![channels]][..2 + usize::from(*bias)]),
        Op::Conv2dGradInput { .. } => float(&[&y, &weight]),
        _ => float(&[&x, &y]),
    }
}

fn lstm(op: &Op, n: [usize; 10]) -> Vec<Input> {
    let [batch, steps, width, hidden] = [n[0], n[1], n[2], n[3]];
    let state = |size: usize| vec![batch, steps, size];
    let weights = [vec![batch, steps, width], vec![4 * hidden, width], vec![4 * hidden, hidden]];
    let shapes = if *op == Op::Lstm {
        [&weights[..], &[vec![4 * hidden], vec![4 * hidden]]].concat()
    } else {
        [&[state(hidden)], &weights[..], &[state(hidden), state(4 * hidden), state(hidden)]].concat()
    };
    shapes.into_iter().map(|shape| (Kind::Float, shape)).collect()
}

/// One thing that goes wrong with a list of inputs.
#[derive(Clone, Debug)]
enum Mistake {
    Forget,
    Add(Vec<usize>),
    Resize(usize, usize, usize),
    Rerank(usize, Vec<usize>),
    Retype(usize, Kind),
    Swap(usize),
}

fn mistake() -> impl Strategy<Value = Mistake> {
    let dims = || prop::collection::vec(0usize..5, 0..6);
    let kind = prop::sample::select(vec![Kind::Float, Kind::Narrow, Kind::Ids, Kind::State]);
    prop_oneof![
        Just(Mistake::Forget),
        dims().prop_map(Mistake::Add),
        (0usize..8, 0usize..4, 0usize..5).prop_map(|(input, dim, size)| Mistake::Resize(input, dim, size)),
        (0usize..8, dims()).prop_map(|(input, dims)| Mistake::Rerank(input, dims)),
        (0usize..8, kind).prop_map(|(input, kind)| Mistake::Retype(input, kind)),
        (0usize..8).prop_map(Mistake::Swap),
    ]
}

fn make(mistake: &Mistake, inputs: &mut Vec<Input>) {
    let count = inputs.len().max(1);
    match mistake {
        Mistake::Forget => drop(inputs.pop()),
        Mistake::Add(dims) => inputs.push((Kind::Float, dims.clone())),
        Mistake::Resize(input, dim, size) => inputs.iter_mut().skip(input % count).take(1).for_each(|input| {
            input.1.iter_mut().skip(*dim).take(1).for_each(|old| *old = *size);
        }),
        Mistake::Rerank(input, dims) => {
            inputs.iter_mut().skip(input % count).take(1).for_each(|input| input.1.clone_from(dims));
        }
        Mistake::Retype(input, kind) => inputs.iter_mut().skip(input % count).take(1).for_each(|input| input.0 = *kind),
        Mistake::Swap(input) if inputs.len() > 1 => inputs.swap(0, input % count),
        Mistake::Swap(_) => {}
    }
}

/// Floats of the first input's shape become bf16, as activations would.
fn narrow(inputs: &mut [Input]) {
    let Some((_, shape)) = inputs.first().cloned() else { return };
    let alike = |input: &&mut Input| input.0 == Kind::Float && input.1 == shape;
    inputs.iter_mut().filter(alike).for_each(|input| input.0 = Kind::Narrow);
}

/// Pushes, and runs what was accepted on zeros in both precisions; says whether it was.
fn attempt(device: &Device, op: Op, inputs: &[Input]) -> Result<bool, TestCaseError> {
    let mut graph = Graph::new();
    let values: Vec<Value> = inputs
        .iter()
        .map(|(kind, dims)| match kind {
            Kind::Ids => graph.input("ids", dims.as_slice(), DType::I32),
            Kind::State => graph.state("state", dims.as_slice()),
            Kind::Float => graph.input("x", dims.as_slice(), DType::F32),
            Kind::Narrow => graph.input("x", dims.as_slice(), DType::Bf16),
        })
        .collect();
    if let Err(error) = graph.push("fuzzed", op, &values) {
        prop_assert!(error.to_string().starts_with("layer `fuzzed` ("));
        prop_assert!(graph.nodes().is_empty());
        return Ok(false);
    }
    for precision in Precision::ALL {
        let plan = Plan::new(graph.clone(), &Wanted { precision, ..Wanted::default() });
        prop_assert!(precision == Precision::Bf16 || plan.report().nodes.len() == 1);
        let mut store = Store::new(&plan);
        Executor::new(device, plan).unwrap().run(&mut store, Pass::default()).unwrap();
    }
    Ok(true)
}

#[test]
fn a_graph_refuses_or_accepts_but_never_panics_and_what_it_accepts_runs() {
    let mut runner = TestRunner::new(Config { cases: 20_000, failure_persistence: None, ..Config::default() });
    let device = Device::cpu(1);
    let accepted = RefCell::new(BTreeMap::new());
    let strategy = (draw(), any::<bool>(), prop::collection::vec(mistake(), 0..3));
    let result = runner.run(&strategy, |(draw, narrows, mistakes)| {
        let op = op(&draw);
        let mut inputs = fitting(&op, &draw);
        if narrows {
            narrow(&mut inputs);
        }
        mistakes.iter().for_each(|mistake| make(mistake, &mut inputs));
        let name = op.name();
        let runs = attempt(&device, op, &inputs)?;
        *accepted.borrow_mut().entry(name.split('+').next()).or_insert(0) += usize::from(runs);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    // The fuzz means something only where both answers occur.
    let accepted = accepted.into_inner();
    assert!(accepted.values().all(|&count| (1..20_000).contains(&count)), "{accepted:?}");
}
