//! Arbitrary operations on arbitrary inputs: the graph refuses or accepts, and never panics; what it accepts, the CPU
//! runs.

use paceline_tensor::op::BatchNorm;
use paceline_tensor::window::{Conv2d, Padding, Pool2d, PoolKind, Windows};
use paceline_tensor::{DType, Device, Executor, Graph, Op, Pass, Plan, Shape, Store, Unary, Value, Wanted};
use proptest::prelude::*;

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
    let numbers = prop::array::uniform10(number.clone());
    (0u8..33, numbers, any::<[bool; 3]>(), share, prop::collection::vec(0usize..4, 0..5))
        .prop_map(|(kind, numbers, flags, share, dims)| Draw { kind, numbers, flags, share, dims })
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
    let norm = BatchNorm { epsilon: 1e-5, momentum: 0.1, scale: a, residual: b, relu: c };
    let input = [n[3], n[4], n[5], n[6]];
    let unary = Unary::ALL[n[0] % Unary::ALL.len()];
    match kind {
        0 | 1 => Op::Conv2d { conv, bias: a, relu: b },
        2 => Op::Conv2dGradInput { conv, input },
        3 => Op::Conv2dGradWeight { conv },
        4 | 5 => Op::MatMul { trans_a: a, trans_b: b, bias: c, relu: n[0] > 1 },
        6 | 7 => Op::BatchNorm(norm),
        8 => Op::BatchNormInference(norm),
        9 => Op::BatchNormGrad(norm),
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
        26 => Op::Dropout { probability: share, salt: 1 },
        27 => [Op::Softmax { causal: a }, Op::SoftmaxGrad][usize::from(b)].clone(),
        28 => Op::CrossEntropy { smoothing: share },
        29 => Op::CrossEntropyGrad { smoothing: share },
        30 => [Op::Embedding, Op::EmbeddingGrad { rows: n[0] }][usize::from(a)].clone(),
        31 => Op::Lstm,
        _ => Op::LstmGrad,
    }
}

/// An input: its kind and its sizes.
type Input = (u8, Vec<usize>);

/// Any number of inputs of any shape, among them many that are alike, because those are the ones that nearly fit.
fn inputs() -> impl Strategy<Value = Vec<Input>> {
    let wild = prop::collection::vec((0u8..4, prop::collection::vec(0usize..5, 0..6)), 0..9);
    let dims = prop::sample::select(vec![vec![1], vec![2], vec![1, 1], vec![2, 2], vec![4, 1], vec![1, 1, 1]]);
    let image = prop::sample::select(vec![vec![1, 1, 1, 1], vec![1, 2, 2, 1], vec![2, 2, 2, 2], vec![1, 2, 2, 2]]);
    let tame = prop::collection::vec((0u8..4, prop_oneof![dims, image]), 1..6);
    prop_oneof![wild, tame]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_graph_refuses_or_accepts_but_never_panics(draw in draw(), inputs in inputs()) {
        let mut graph = Graph::new();
        let values: Vec<Value> = inputs
            .iter()
            .map(|(kind, dims)| match kind {
                0 => graph.input("ids", dims.as_slice(), DType::I32),
                1 => graph.state("state", dims.as_slice()),
                _ => graph.input("x", dims.as_slice(), DType::F32),
            })
            .collect();
        match graph.push("fuzzed", op(&draw), &values) {
            Err(error) => prop_assert!(error.to_string().starts_with("layer `fuzzed` (")),
            Ok(outputs) => {
                let is_arena = |value: &Value| !values.contains(value);
                prop_assert!(outputs.iter().all(is_arena));
                // Every node can be costed, planned and run, here on zeros.
                let plan = Plan::new(graph, &Wanted::default());
                let _ = plan.report();
                let mut store = Store::new(&plan);
                Executor::new(&Device::cpu(1), plan).run(&mut store, Pass::default());
            }
        }
    }
}
