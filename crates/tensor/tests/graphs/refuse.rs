//! Graphs that cannot be, and the sentence each is refused with.

use paceline_tensor::op::{BatchNorm, Rectifier};
use paceline_tensor::window::{Conv2d, Padding, Pool2d, PoolKind, Windows};
use paceline_tensor::{DType, Graph, Op, Plan, Shape, Value, Wanted};

const F: DType = DType::F32;
const I: DType = DType::I32;

/// Type and sizes.
type Input<'a> = (DType, &'a [usize]);

fn message(op: Op, inputs: &[Input<'_>]) -> String {
    let mut graph = Graph::new();
    let inputs: Vec<Value> = inputs.iter().map(|&(dtype, shape)| graph.input("x", shape, dtype)).collect();
    let error = graph.push("block3.conv1", op, &inputs).expect_err("a bad graph");
    assert!(graph.nodes().is_empty(), "a refused node is not kept");
    assert_eq!(error.layer, "block3.conv1");
    error.to_string()
}

fn conv(conv: Conv2d, bias: bool) -> Op {
    Op::Conv2d { conv, bias, relu: false, moments: false }
}

fn matmul(trans_a: bool, trans_b: bool, bias: bool) -> Op {
    Op::MatMul { trans_a, trans_b, bias, relu: false }
}

fn pool(kernel: usize, stride: usize, padding: usize) -> Op {
    let (kernel, stride, padding) = ([kernel; 2], [stride; 2], Padding::all(padding));
    let windows = Windows::Sliding { kernel, stride, padding, ceil: false, count_padding: true };
    Op::Pool2d(Pool2d { kind: PoolKind::Max, windows })
}

#[test]
fn a_bad_graph_is_refused_with_the_layer_and_the_reason() {
    let three = Conv2d::square(3);
    let grouped = Conv2d { groups: 2, ..three };
    let strideless = Conv2d { stride: [0, 1], ..three };
    let norm = BatchNorm {
        epsilon: 1e-5,
        momentum: 0.1,
        scale: false,
        residual: false,
        rectifier: Rectifier::None,
        moments: false,
    };
    let rows: Vec<(Op, Vec<Input<'_>>, &str)> = vec![
        (conv(three, false), vec![(F, &[1, 8, 8, 3])], "(conv2d): 1 inputs given, 2 needed"),
        (conv(three, false), vec![(F, &[8, 8, 3]), (F, &[3, 3, 3, 4])], "needs an image [N,H,W,C], not 8×8×3"),
        (conv(three, false), vec![(F, &[1, 8, 8, 3]), (F, &[3, 3, 4])], "a weight has four dims"),
        (conv(three, false), vec![(F, &[1, 8, 8, 3]), (F, &[5, 5, 3, 4])], "5×5×3×4 is not for a kernel 3×3"),
        (conv(three, false), vec![(F, &[1, 8, 8, 3]), (F, &[3, 3, 2, 4])], "3 input channels in 1 groups do not fit"),
        (conv(grouped, false), vec![(F, &[1, 8, 8, 3]), (F, &[3, 3, 1, 4])], "3 input and 4 output channels do not"),
        (conv(three, false), vec![(F, &[1, 2, 8, 3]), (F, &[3, 3, 3, 4])], "2×8 is smaller than the kernel 3×3"),
        (conv(strideless, false), vec![(F, &[1, 8, 8, 3]), (F, &[3, 3, 3, 4])], "dilation start at 1"),
        (conv(three, true), vec![(F, &[1, 8, 8, 3]), (F, &[3, 3, 3, 4]), (F, &[5])], "the bias must have 4 elements"),
        (conv(three, false), vec![(F, &[0, 8, 8, 3]), (F, &[3, 3, 3, 4])], "input 0 has no elements (shape `0×8×8×3`)"),
        (conv(three, false), vec![(I, &[1, 8, 8, 3]), (F, &[3, 3, 3, 4])], "input 0 must be floating-point, not i32"),
        (matmul(false, false, false), vec![(F, &[2, 3]), (F, &[4, 5])], "2×3 and 4×5 do not share an inner size"),
        (matmul(false, true, false), vec![(F, &[2, 3]), (F, &[4, 5])], "inner size (3 and 5)"),
        (matmul(false, false, false), vec![(F, &[2, 2, 3]), (F, &[3, 5])], "2×2×3, 3×5 do not fit together"),
        (matmul(false, false, true), vec![(F, &[2, 3]), (F, &[3, 5]), (F, &[2])], "the bias must have 5 elements"),
        (Op::BatchNorm(norm), vec![(F, &[4, 3]), (F, &[3]), (F, &[3])], "3 inputs given, 4 needed"),
        (Op::BatchNorm(norm), vec![(F, &[4, 3]), (F, &[2]), (F, &[3]), (F, &[3])], "4×3, 2, 3, 3 do not fit together"),
        (Op::BatchNorm(norm), vec![(F, &[4, 3]), (F, &[3]), (F, &[3]), (F, &[3])], "statistics must be states"),
        (
            Op::LayerNorm { epsilon: 0.1 },
            vec![(F, &[4, 3]), (F, &[3]), (F, &[4])],
            "gamma and beta must have 3 elements",
        ),
        (Op::Add, vec![(F, &[2, 3]), (F, &[2])], "the shapes 2×3, 2 do not fit together"),
        (Op::SumLeading { suffix: Shape::from([2]) }, vec![(F, &[2, 3])], "2 is not the end of 2×3"),
        (pool(3, 0, 0), vec![(F, &[1, 8, 8, 3])], "kernel and stride start at 1"),
        (pool(3, 2, 3), vec![(F, &[1, 8, 8, 3])], "the padding 3×3 is not smaller than the window 3×3"),
        (pool(9, 2, 0), vec![(F, &[1, 8, 8, 3])], "the image 8×8 is smaller than the window 9×9"),
        (Op::Reshape(Shape::from([5])), vec![(F, &[2, 3])], "2×3 does not have the elements of 5"),
        (Op::Slice { dim: 2, start: 0, length: 1 }, vec![(F, &[2, 3])], "2×3 has no dim 2"),
        (Op::Slice { dim: 1, start: 2, length: 2 }, vec![(F, &[2, 3])], "2..4 is not inside dim 1 of 2×3"),
        (Op::Concat { dim: 1 }, vec![(F, &[2, 3]), (F, &[3, 3])], "2×3, 3×3 do not fit together"),
        (Op::Concat { dim: 1 }, vec![(F, &[2, 3]), (I, &[2, 3])], "the types f32 and i32 do not mix"),
        (Op::Concat { dim: 0 }, vec![], "no inputs given, at least 1 needed"),
        (Op::Permute { order: vec![0, 0] }, vec![(F, &[2, 3])], "[0, 0] does not reorder the dims of 2×3"),
        (Op::Dropout { probability: 1.0, salt: 0, within: None }, vec![(F, &[2])], "dropout 1 is not in 0..1"),
        (Op::Softmax { causal: true }, vec![(F, &[2, 3])], "a causal softmax needs square rows, not 2×3"),
        (Op::CrossEntropy { smoothing: 0.0 }, vec![(F, &[2, 3]), (I, &[3])], "2×3, 3 do not fit together"),
        (Op::CrossEntropy { smoothing: 0.0 }, vec![(F, &[2, 3]), (F, &[2])], "input 1 must be numbers of type i32"),
        (Op::CrossEntropy { smoothing: -0.5 }, vec![(F, &[2, 3]), (I, &[2])], "label smoothing -0.5 is not in 0..1"),
        (Op::Embedding, vec![(F, &[2]), (F, &[5, 3])], "input 0 must be numbers of type i32, not f32"),
        (Op::Embedding, vec![(I, &[2]), (F, &[5])], "an embedding table has two dims, not 5"),
        (Op::Lstm, vec![(F, &[2, 3, 4]), (F, &[8, 4]), (F, &[8, 3]), (F, &[8]), (F, &[8])], "do not fit together"),
    ];
    check(rows);
}

fn check(rows: Vec<(Op, Vec<Input<'_>>, &str)>) {
    for (op, inputs, expected) in rows {
        let message = message(op.clone(), &inputs);
        assert!(message.starts_with(&format!("layer `block3.conv1` ({}): ", op.name())), "{message}");
        assert!(message.contains(expected), "`{message}` does not say `{expected}`");
    }
}

#[test]
fn sizes_that_no_machine_can_address_are_refused() {
    const HUGE: usize = 1 << 40;
    let wide = Conv2d { padding: Padding::all(usize::MAX / 2), ..Conv2d::square(1) };
    let reshape = Op::Reshape(Shape::from([1 << 32, 1 << 32, 2]));
    check(vec![
        (Op::Scale(1.0), vec![(F, &[HUGE, HUGE])], "elements, more than this machine can address"),
        (Op::Scale(1.0), vec![(F, &[1 << 61])], "elements, more than this machine can address"),
        (
            matmul(false, false, false),
            vec![(F, &[HUGE, 1]), (F, &[1, HUGE])],
            "the result has 1099511627776×1099511627776",
        ),
        (Op::Pad { dim: 0, before: usize::MAX, after: usize::MAX }, vec![(F, &[2, 3])], "the result has"),
        (conv(wide, false), vec![(F, &[1, 2, 2, 1]), (F, &[1, 1, 1, 1])], "padding and dilation end at 2³¹"),
        // 2³²·2³²·2 is 0 in 64 bits, and 2 elements are not 0 either way.
        (reshape, vec![(F, &[2])], "does not have the elements of"),
    ]);
}

#[test]
fn an_updated_state_is_no_other_operand() {
    let norm = BatchNorm {
        epsilon: 1e-5,
        momentum: 0.1,
        scale: true,
        residual: false,
        rectifier: Rectifier::None,
        moments: false,
    };
    let mut graph = Graph::new();
    let (x, v) = (graph.input("x", [4, 3], F), graph.parameter("v", [3]));
    let (s, t) = (graph.state("s", [3]), graph.state("t", [3]));
    let reshaped = graph.push_one("r", Op::Reshape(Shape::from([3])), &[s]).expect("fits");
    let long = graph.state("long", [12]);
    let long = graph.push_one("r", Op::Reshape(Shape::from([4, 3])), &[long]).expect("fits");
    for (inputs, expected) in [
        ([x, v, s, s, v], "must be two states"),
        ([x, s, s, t, v], "input 1 is the state `s`"),
        ([x, v, s, t, reshaped], "input 4 is the state `s`"),
        ([long, v, s, t, v], "input 0 is the state `long`"),
    ] {
        let error = graph.push("bn", Op::BatchNorm(norm), &inputs).expect_err("aliased").to_string();
        assert!(error.contains(expected), "`{error}` does not say `{expected}`");
    }
    graph.push("bn", Op::BatchNorm(norm), &[x, v, s, t, v]).expect("parameters may be read twice");
}

/// A graph with one parameter and a node whose output could be taken for its gradient.
fn with_gradient(shape: &[usize], count: usize) -> Plan {
    let mut graph = Graph::new();
    let x = graph.input("x", shape, F);
    graph.parameter("p", [3]);
    let y = graph.push_one("y", Op::Scale(2.0), &[x]).expect("fits");
    Plan::new(graph, &Wanted { gradients: vec![Some(y); count], ..Wanted::default() })
}

#[test]
#[should_panic(expected = "the gradient of `p` has its shape")]
fn a_gradient_of_another_shape_is_a_bug() {
    with_gradient(&[300], 1);
}

#[test]
#[should_panic(expected = "gradients are wanted of every parameter or of none")]
fn more_gradients_than_parameters_are_a_bug() {
    with_gradient(&[3], 2);
}
