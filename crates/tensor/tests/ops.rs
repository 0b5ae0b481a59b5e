//! The op table: every forward operation in many geometries, each held against a slow reference in f64 on every
//! instruction set (see `reference/compare.rs`). A new operation is a line in `reference/interpret.rs` and rows here.

mod reference {
    pub mod array;
    pub mod compare;
    pub mod interpret;
    pub mod narrow;
    pub mod normalise;
    pub mod sequence;
    pub mod window;
}

use std::io::Write;

use paceline_tensor::op::{BatchNorm, Gather, Rectifier, Segment, Together};
use paceline_tensor::window::{Conv2d, Padding, Pool2d, PoolKind, Windows};
use paceline_tensor::{Op, Shape, Unary};
use reference::compare::{Case, Fill, check_all};

use Fill::{Any, Distinct, Ids, State};

/// Top, left, bottom, right.
const fn padding([top, left, bottom, right]: [usize; 4]) -> Padding {
    Padding { top, left, bottom, right }
}

/// Kernel, stride, padding, dilation and groups of a convolution.
type Geometry = ([usize; 2], [usize; 2], [usize; 4], [usize; 2], usize);

/// A convolution's name, image, outputs and geometry.
type Row<'a> = (&'a str, [usize; 4], usize, Geometry);

/// A convolution with bias, ReLU and moments, or without.
fn convolution(row: Row<'_>, end: &str, [bias, relu, moments]: [bool; 3]) -> Case {
    let (name, x, outputs, (kernel, stride, pad, dilation, groups)) = row;
    let conv = Conv2d { kernel, stride, padding: padding(pad), dilation, groups };
    let weight = [kernel[0], kernel[1], x[3] / groups, outputs];
    let inputs: [(Fill, &[usize]); 3] = [(Any, &x), (Any, &weight), (Any, &[outputs])];
    let op = Op::Conv2d { conv, bias, relu, moments };
    Case::of(format!("conv {name}{end}"), op, &inputs[..if bias { 3 } else { 2 }])
}

fn convolutions(rows: &[Row<'_>]) {
    let mut cases = Vec::new();
    for &row in rows {
        cases.push(convolution(row, "", [false; 3]));
        cases.push(convolution(row, ", bias", [true, false, false]));
        cases.push(convolution(row, ", bias, relu", [true, true, false]).forward_only());
        cases.push(convolution(row, ", relu", [false, true, false]).forward_only());
        cases.push(convolution(row, ", bias, moments", [true, false, true]).forward_only());
    }
    check_all(cases);
}

#[test]
fn every_row_on_a_gpu() {
    if reference::compare::gpu().is_none() {
        let _ = writeln!(std::io::stderr(), "skipped: every_row_on_a_gpu: no GPU");
    }
}

#[test]
fn dense_convolutions() {
    convolutions(&[
        ("3×3", [1, 5, 5, 3], 4, ([3, 3], [1, 1], [0; 4], [1, 1], 1)),
        ("3×3 same", [2, 5, 4, 3], 5, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("3×3 stride 2", [1, 7, 6, 2], 3, ([3, 3], [2, 2], [1; 4], [1, 1], 1)),
        ("3×3 stride 1×2", [1, 5, 6, 2], 3, ([3, 3], [1, 2], [1; 4], [1, 1], 1)),
        ("3×3 stride 3, larger than its reach", [1, 9, 8, 2], 3, ([2, 2], [3, 3], [0; 4], [1, 1], 1)),
        ("3×3 padded below and right", [1, 6, 6, 2], 3, ([3, 3], [2, 2], [0, 0, 1, 1], [1, 1], 1)),
        ("3×3 padded by four numbers", [2, 4, 5, 2], 3, ([3, 3], [1, 1], [2, 0, 1, 3], [1, 1], 1)),
        ("5×5 padding as wide as the kernel", [1, 3, 3, 2], 2, ([3, 3], [1, 1], [3; 4], [1, 1], 1)),
        ("3×3 dilated", [1, 7, 7, 2], 3, ([3, 3], [1, 1], [2; 4], [2, 2], 1)),
        ("3×3 dilated 1×3, stride 2×1", [1, 6, 9, 2], 3, ([3, 3], [2, 1], [1; 4], [1, 3], 1)),
        ("1×1", [2, 3, 3, 5], 4, ([1, 1], [1, 1], [0; 4], [1, 1], 1)),
        ("1×1 stride 2", [1, 5, 4, 3], 4, ([1, 1], [2, 2], [0; 4], [1, 1], 1)),
        ("1×1 padded", [1, 3, 2, 3], 2, ([1, 1], [1, 1], [1; 4], [1, 1], 1)),
        ("1×7", [1, 4, 9, 2], 3, ([1, 7], [1, 1], [0, 3, 0, 3], [1, 1], 1)),
        ("7×1", [1, 9, 4, 2], 3, ([7, 1], [1, 1], [3, 0, 3, 0], [1, 1], 1)),
        ("2×3 even kernel", [1, 5, 5, 2], 3, ([2, 3], [1, 1], [1, 1, 0, 1], [1, 1], 1)),
        ("one pixel", [2, 1, 1, 3], 4, ([1, 1], [1, 1], [0; 4], [1, 1], 1)),
        ("one pixel under 3×3", [2, 1, 1, 3], 4, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("whole image", [2, 4, 3, 3], 5, ([4, 3], [1, 1], [0; 4], [1, 1], 1)),
        ("one channel", [1, 6, 6, 1], 1, ([5, 5], [1, 1], [2; 4], [1, 1], 1)),
        ("7×7 stride 2, a stem", [1, 13, 13, 3], 6, ([7, 7], [2, 2], [3; 4], [1, 1], 1)),
        ("11×11 stride 4", [1, 19, 15, 3], 3, ([11, 11], [4, 4], [2; 4], [1, 1], 1)),
        ("vectors and a rest", [1, 9, 7, 17], 35, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("1×1 vectors and a rest", [2, 5, 5, 33], 19, ([1, 1], [1, 1], [0; 4], [1, 1], 1)),
        ("vectors, stride 2", [2, 9, 9, 16], 32, ([3, 3], [2, 2], [1; 4], [1, 1], 1)),
    ]);
}

/// Few channels and results of which eight are 16 bytes: what a GPU computes by kernels of its own in bf16.
#[test]
fn convolutions_of_pictures() {
    convolutions(&[
        ("3×3, 3 channels", [2, 5, 19, 3], 64, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("3×3, 4 channels, more than 64 outputs", [1, 6, 7, 4], 72, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("3×3, not padded, 24 outputs", [3, 7, 9, 3], 24, ([3, 3], [1, 1], [0; 4], [1, 1], 1)),
        ("3×3, rows that do not fit at once", [1, 12, 130, 3], 8, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("3×3 stride 2", [2, 9, 12, 3], 32, ([3, 3], [2, 2], [0, 0, 1, 1], [1, 1], 1)),
        ("2×3, padded by four numbers", [1, 5, 6, 2], 16, ([2, 3], [1, 2], [1, 0, 0, 2], [1, 1], 1)),
        ("5×5, one channel", [2, 8, 8, 1], 8, ([5, 5], [1, 1], [2; 4], [1, 1], 1)),
        ("7×7 stride 2", [1, 13, 37, 3], 40, ([7, 7], [2, 2], [3; 4], [1, 1], 1)),
        ("11×11 stride 4", [1, 19, 23, 3], 8, ([11, 11], [4, 4], [2; 4], [1, 1], 1)),
        ("1×1", [1, 3, 5, 3], 8, ([1, 1], [1, 1], [0; 4], [1, 1], 1)),
    ]);
}

/// Channels that are multiples of 16, kernels of 3×3 and 1×1: what a GPU computes by other kernels of its own in bf16. All rows reach those of
/// the weights' gradient; those of a forward pass are for 16 to 16 at stride 1, 16 to 32 and, by 1×1, 32 to 64 at stride 2.
#[test]
fn convolutions_of_few_channels() {
    let rows: [Row<'_>; 15] = [
        ("3×3, 16 channels", [2, 5, 5, 16], 16, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("3×3, 16 channels, rows that are cut", [1, 3, 172, 16], 16, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("3×3, 16, padded by four numbers", [2, 3, 4, 16], 16, ([3, 3], [1, 1], [2, 0, 1, 3], [1, 1], 1)),
        ("3×3, 16, padding wider than itself", [1, 2, 2, 16], 16, ([3, 3], [1, 1], [3; 4], [1, 1], 1)),
        ("3×3, 32 channels", [1, 3, 4, 32], 32, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("3×3, 64 channels, images together", [3, 1, 2, 64], 64, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
        ("3×3, 48 to 16, not padded", [1, 5, 4, 48], 16, ([3, 3], [1, 1], [0; 4], [1, 1], 1)),
        ("3×3 stride 2, 16 to 32", [2, 7, 5, 16], 32, ([3, 3], [2, 2], [1; 4], [1, 1], 1)),
        ("3×3 stride 2, padded below and right", [1, 6, 6, 16], 32, ([3, 3], [2, 2], [0, 0, 1, 1], [1, 1], 1)),
        ("3×3 stride 2, 32 to 64", [1, 4, 4, 32], 64, ([3, 3], [2, 2], [1; 4], [1, 1], 1)),
        ("1×1, 32 to 48", [2, 3, 5, 32], 48, ([1, 1], [1, 1], [0; 4], [1, 1], 1)),
        ("1×1, 64 to 64, padded", [1, 2, 2, 64], 64, ([1, 1], [1, 1], [1; 4], [1, 1], 1)),
        ("1×1 stride 2, rows that are cut", [1, 3, 260, 16], 32, ([1, 1], [2, 2], [0; 4], [1, 1], 1)),
        ("1×1 stride 2, 32 to 64", [3, 5, 5, 32], 64, ([1, 1], [2, 2], [0; 4], [1, 1], 1)),
        ("1×1 stride 3, 48 to 16", [1, 7, 8, 48], 16, ([1, 1], [3, 3], [0; 4], [1, 1], 1)),
    ];
    check_all(rows.map(|row| convolution(row, "", [false; 3])).into());
}

/// Channels that are multiples of eight, by 1×1, and too many or too odd for the kernels above: on a GPU the gradient of the weights is a
/// product in bf16.
#[test]
fn convolutions_by_products() {
    let rows: [Row<'_>; 3] = [
        ("1×1, 24 to 40", [2, 5, 3, 24], 40, ([1, 1], [1, 1], [0; 4], [1, 1], 1)),
        ("1×1, 136 to 8, one pixel", [3, 1, 1, 136], 8, ([1, 1], [1, 1], [0; 4], [1, 1], 1)),
        ("1×1, 72 to 136, many pixels", [4, 17, 19, 72], 136, ([1, 1], [1, 1], [0; 4], [1, 1], 1)),
    ];
    check_all(rows.map(|row| convolution(row, "", [false; 3])).into());
}

#[test]
fn grouped_convolutions() {
    convolutions(&[
        ("2 groups", [1, 5, 5, 4], 6, ([3, 3], [1, 1], [1; 4], [1, 1], 2)),
        ("3 groups 1×1", [2, 3, 3, 6], 9, ([1, 1], [1, 1], [0; 4], [1, 1], 3)),
        ("4 groups, stride 2, dilated", [1, 9, 9, 8], 4, ([3, 3], [2, 2], [2, 1, 1, 2], [2, 2], 4)),
        ("2 wide groups", [1, 4, 4, 34], 38, ([3, 3], [1, 1], [1; 4], [1, 1], 2)),
        ("depthwise 3×3", [1, 5, 5, 5], 5, ([3, 3], [1, 1], [1; 4], [1, 1], 5)),
        ("depthwise 3×3 stride 2", [2, 6, 7, 5], 5, ([3, 3], [2, 2], [0, 1, 1, 0], [1, 1], 5)),
        ("depthwise 5×5 dilated", [1, 9, 9, 3], 3, ([5, 5], [1, 1], [4; 4], [2, 2], 3)),
        ("depthwise 1×1", [1, 3, 3, 4], 4, ([1, 1], [1, 1], [0; 4], [1, 1], 4)),
        ("depthwise one pixel", [2, 1, 1, 4], 4, ([3, 3], [1, 1], [1; 4], [1, 1], 4)),
        ("depthwise 1×5", [1, 3, 8, 3], 3, ([1, 5], [1, 2], [0, 2, 0, 2], [1, 1], 3)),
        ("depthwise vectors and a rest", [1, 6, 6, 37], 37, ([3, 3], [1, 1], [1; 4], [1, 1], 37)),
        ("multiplier 2", [1, 5, 5, 3], 6, ([3, 3], [1, 1], [1; 4], [1, 1], 3)),
        ("multiplier 3, stride 2", [1, 6, 6, 2], 6, ([3, 3], [2, 2], [1; 4], [1, 1], 2)),
        ("one channel, multiplier 4", [1, 5, 5, 1], 4, ([3, 3], [1, 1], [1; 4], [1, 1], 1)),
    ]);
}

#[test]
fn a_concatenation_of_more_parts_than_a_word_has_bits() {
    let inputs: [(Fill, &[usize]); 40] = [(Any, &[2, 3]); 40];
    check_all(vec![Case::of("concat of 40", Op::Concat { dim: 1 }, &inputs)]);
}

#[test]
fn matrix_products() {
    let mut cases = Vec::new();
    let sizes: [(&[usize], [usize; 3]); 8] = [
        (&[], [1, 1, 1]),
        (&[], [3, 4, 5]),
        (&[], [1, 7, 20]),
        (&[], [20, 1, 3]),
        (&[], [17, 33, 19]),
        (&[], [40, 70, 90]),
        (&[3], [4, 5, 2]),
        (&[2, 3], [5, 3, 7]),
    ];
    for (batch, [m, n, k]) in sizes {
        for [trans_a, trans_b] in [[false, false], [false, true], [true, false], [true, true]] {
            let shape = |swap: bool, rows: usize, columns: usize| {
                [batch, &if swap { [columns, rows] } else { [rows, columns] }].concat()
            };
            let (a, b) = (shape(trans_a, m, k), shape(trans_b, k, n));
            let inputs: [(Fill, &[usize]); 3] = [(Any, &a), (Any, &b), (Any, &[n])];
            let name = format!("matmul {batch:?} {m}×{n}×{k}, transposed {trans_a} {trans_b}");
            let op = |bias, relu| Op::MatMul { trans_a, trans_b, bias, relu };
            cases.push(Case::of(name.clone(), op(false, false), &inputs[..2]));
            cases.push(Case::of(format!("{name}, bias"), op(true, false), &inputs));
            cases.push(Case::of(format!("{name}, bias, relu"), op(true, true), &inputs).forward_only());
        }
    }
    check_all(cases);
}

const fn norm(scale: bool, residual: bool, rectifier: Rectifier) -> BatchNorm {
    BatchNorm { epsilon: 1e-3, momentum: 0.2, scale, residual, rectifier, moments: false }
}

#[rustfmt::skip]
const NORM_SHAPES: [&[usize]; 9] =
    [&[2, 3], &[6, 3], &[2, 3, 3, 4], &[3, 1, 1, 5], &[2, 5, 5, 1], &[2, 7, 7, 37], &[2, 40, 40, 9], &[2, 8, 9, 24], &[3, 3, 3, 136]];

#[test]
fn batch_norms() {
    let mut cases = Vec::new();
    for shape in NORM_SHAPES {
        for scale in [false, true] {
            let channels: &[usize] = &[shape[shape.len() - 1]];
            let mut inputs = vec![(Any, shape), (Any, channels), (State, channels), (State, channels)];
            inputs.extend(scale.then_some((Any, channels)));
            let name = format!("batch norm {shape:?}, scale {scale}");
            cases.push(Case::of(&name, Op::BatchNorm(norm(scale, false, Rectifier::None)), &inputs));
            let inference = Op::BatchNormInference(norm(scale, false, Rectifier::None));
            cases.push(Case::of(format!("{name}, inference"), inference, &inputs).forward_only());
            let again = Op::BatchNormAgain(norm(scale, false, Rectifier::None));
            cases.push(Case::of(format!("{name}, again"), again, &inputs).forward_only());
            inputs.push((Any, shape));
            for rectifier in [Rectifier::None, Rectifier::Relu, Rectifier::Relu6] {
                let fused = norm(scale, true, rectifier);
                let name = format!("{name}, residual, {rectifier:?}");
                cases.push(Case::of(&name, Op::BatchNorm(fused), &inputs).forward_only());
                cases.push(
                    Case::of(format!("{name}, inference"), Op::BatchNormInference(fused), &inputs).forward_only(),
                );
                cases.push(Case::of(format!("{name}, again"), Op::BatchNormAgain(fused), &inputs).forward_only());
            }
        }
    }
    check_all(cases);
}

/// Batch-norm, then an addition or not, then ReLU or not: planned as written and planned fused.
#[test]
fn fused_batch_norms() {
    let mut cases = Vec::new();
    for shape in NORM_SHAPES {
        let flags = (0u8..8).map(|bits| [1, 2, 4].map(|bit| bits & bit != 0));
        let last = [None, Some(Unary::Relu), Some(Unary::Relu6)];
        for ([scale, residual, first], relu) in flags.flat_map(|flags| last.map(|last| (flags, last))) {
            // Among many numbers some always lie so near to a kink that differences step over it.
            if relu == Some(Unary::Relu6) && shape.iter().product::<usize>() > 500 {
                continue;
            }
            let after = match relu {
                Some(Unary::Relu6) => "6".to_owned(),
                other => other.is_some().to_string(),
            };
            let mut case =
                Case::new(format!("bn → add {residual} → relu {after} {shape:?}, scale {scale}, first {first}"));
            let channels: &[usize] = &[shape[shape.len() - 1]];
            let mut inputs: Vec<_> = [(Any, shape), (Any, channels), (State, channels), (State, channels)]
                .map(|(fill, shape)| case.input(fill, shape))
                .into();
            inputs.extend(scale.then(|| case.input(Any, channels)));
            let other = residual.then(|| case.input(Any, shape));
            // Far enough from zero for some results to lie above six.
            let far = |other| if after == "6" { case.push(Op::Scale(8.0), &[other]) } else { other };
            let other = other.map(far);
            let mut y = case.push(Op::BatchNorm(norm(scale, false, Rectifier::None)), &inputs);
            if let Some(other) = other {
                y = case.push(Op::Add, &if first { [y, other] } else { [other, y] });
            }
            if let Some(relu) = relu {
                y = case.push(Op::Unary(relu), &[y]);
            }
            // Keeps the sum from being the graph's result, so that its gradient is not the seed itself.
            case.push(Op::Scale(-2.0), &[y]);
            cases.push(case);
        }
    }
    check_all(cases);
}

/// A convolution that takes the statistics of its result for the batch-norm behind it.
#[test]
fn convolutions_with_batch_norms() {
    let conv = |kernel: usize, stride: usize, groups: usize| {
        let padding = Padding::all(kernel / 2);
        Conv2d { stride: [stride; 2], padding, groups, ..Conv2d::square(kernel) }
    };
    let rows = [
        ([3, 4, 5, 6], 7, conv(1, 1, 1)),
        ([2, 9, 9, 16], 16, conv(3, 1, 1)),
        ([2, 7, 6, 5], 20, conv(3, 2, 1)),
        ([2, 6, 5, 4], 6, conv(3, 1, 2)),
        ([2, 12, 12, 18], 18, conv(3, 1, 18)),
    ];
    let mut cases = Vec::new();
    for (x, outputs, conv) in rows {
        for scale in [false, true] {
            let mut case = Case::new(format!("{conv:?} of {x:?} → batch norm, scale {scale}"));
            let weight = [conv.kernel[0], conv.kernel[1], x[3] / conv.groups, outputs];
            let inputs = [case.input(Any, &x), case.input(Any, &weight)];
            let y = case.push(Op::Conv2d { conv, bias: false, relu: false, moments: false }, &inputs);
            let mut inputs = vec![y];
            inputs.extend([Any, State, State].map(|fill| case.input(fill, &[outputs])));
            inputs.extend(scale.then(|| case.input(Any, &[outputs])));
            let y = case.push(Op::BatchNorm(norm(scale, false, Rectifier::None)), &inputs);
            case.push(Op::Scale(-2.0), &[y]);
            cases.push(case.f32_only());
        }
    }
    check_all(cases);
}

/// Two blocks that add what they were given, as in a residual network.
#[test]
fn fused_residual_blocks() {
    let mut case = Case::new("residual blocks");
    let image: &[usize] = &[2, 5, 5, 6];
    let mut x = case.input(Any, image);
    let norm_of = |case: &mut Case, x| {
        let inputs = [Any, State, State, Any].map(|fill| case.input(fill, &[6]));
        case.push(Op::BatchNorm(norm(true, false, Rectifier::None)), &[x, inputs[0], inputs[1], inputs[2], inputs[3]])
    };
    for shortcut in [false, true] {
        let weight = case.input(Any, &[3, 3, 6, 6]);
        let conv = Conv2d { padding: Padding::all(1), ..Conv2d::square(3) };
        let main = case.push(Op::Conv2d { conv, bias: false, relu: false, moments: false }, &[x, weight]);
        let main = norm_of(&mut case, main);
        let other = if shortcut { norm_of(&mut case, x) } else { x };
        let sum = case.push(Op::Add, &[main, other]);
        x = case.push(Op::Unary(Unary::Relu), &[sum]);
    }
    case.push(Op::Pool2d(Pool2d::global(PoolKind::Average)), &[x]);
    check_all(vec![case.f32_only()]);
}

/// Products that end in ReLU, whose bias and gradient must see the same mask.
#[test]
fn fused_products() {
    let mut cases = Vec::new();
    for bias in [false, true] {
        let mut case = Case::new(format!("conv → relu → linear → relu, bias {bias}"));
        let (x, weight) = (case.input(Any, &[2, 4, 4, 3]), case.input(Any, &[3, 3, 3, 5]));
        let mut inputs = vec![x, weight];
        inputs.extend(bias.then(|| case.input(Any, &[5])));
        let y = case.push(Op::Conv2d { conv: Conv2d::square(3), bias, relu: false, moments: false }, &inputs);
        let y = case.push(Op::Unary(Unary::Relu), &[y]);
        let y = case.push(Op::Reshape(Shape::from([2, 20])), &[y]);
        let mut inputs = vec![y, case.input(Any, &[7, 20])];
        inputs.extend(bias.then(|| case.input(Any, &[7])));
        let y = case.push(Op::MatMul { trans_a: false, trans_b: true, bias, relu: false }, &inputs);
        let y = case.push(Op::Unary(Unary::Relu), &[y]);
        case.push(Op::Scale(2.0), &[y]);
        cases.push(case);
    }
    check_all(cases);
}

#[test]
fn layer_norms() {
    let shapes: [&[usize]; 6] = [&[1, 3], &[4, 7], &[2, 3, 16], &[2, 2, 2, 33], &[300, 5], &[3, 700]];
    let row = |shape: &[usize]| {
        let width: &[usize] = &[shape[shape.len() - 1]];
        let inputs = [(Any, shape), (Any, width), (Any, width)];
        Case::of(format!("layer norm {shape:?}"), Op::LayerNorm { epsilon: 1e-2 }, &inputs)
    };
    check_all(shapes.into_iter().map(row).collect());
}

#[test]
fn elementwise_operations() {
    let mut cases = Vec::new();
    for kind in Unary::ALL {
        for shape in [&[1][..], &[7], &[3, 5], &[501], &[200, 201]] {
            // The grid of distinct numbers is as wide as it is long; past ±20 the smooth functions only saturate.
            let fill = if matches!(kind, Unary::Relu | Unary::Relu6) { Distinct } else { Any };
            let mut case = Case::new(format!("{kind:?} {shape:?}"));
            let mut x = case.input(fill, shape);
            if matches!(fill, Any) {
                x = case.push(Op::Scale(8.0), &[x]);
                cases.push(Case::of(format!("{kind:?} {shape:?} near 0"), Op::Unary(kind), &[(Any, shape)]));
            }
            case.push(Op::Unary(kind), &[x]);
            // Far from 0, 1 − y² and y·(1 − y) are smaller than what bf16 rounds off y.
            let saturates = matches!(kind, Unary::Tanh | Unary::Sigmoid);
            cases.push(if saturates { case.f32_only() } else { case });
        }
    }
    let pairs: [(&[usize], &[usize]); 8] = [
        (&[1], &[1]),
        (&[5], &[5]),
        (&[2, 3, 4], &[2, 3, 4]),
        (&[2, 3, 4], &[3, 4]),
        (&[2, 3, 4], &[4]),
        (&[5, 1], &[1]),
        (&[300, 67], &[67]),
        (&[150, 140], &[150, 140]),
    ];
    for (a, b) in pairs {
        cases.push(Case::of(format!("add {a:?} {b:?}"), Op::Add, &[(Any, a), (Any, b)]));
        cases.push(Case::of(format!("mul {a:?} {b:?}"), Op::Mul, &[(Any, a), (Any, b)]));
        cases.push(Case::of(format!("scale {a:?}"), Op::Scale(-0.75), &[(Any, a)]));
        let sum = Op::SumLeading { suffix: Shape::from(b) };
        cases.push(Case::of(format!("sum {a:?} to {b:?}"), sum, &[(Any, a)]).forward_only());
    }
    let mut square = Case::new("a number times and plus itself");
    let x = square.input(Any, &[4, 3]);
    let y = square.push(Op::Mul, &[x, x]);
    square.push(Op::Add, &[y, y]);
    cases.push(square);
    check_all(cases);
}

/// Name, image, kernel, stride and padding of a pooling.
type Sliding<'a> = (&'a str, [usize; 4], [usize; 2], [usize; 2], [usize; 4]);

#[test]
fn poolings() {
    let sliding: [Sliding<'_>; 21] = [
        ("2/2", [1, 4, 6, 3], [2, 2], [2, 2], [0; 4]),
        ("2/2 with a rest", [2, 5, 7, 2], [2, 2], [2, 2], [0; 4]),
        ("3/2", [1, 7, 7, 2], [3, 3], [2, 2], [0; 4]),
        ("3/2 with a rest", [1, 8, 6, 2], [3, 3], [2, 2], [0; 4]),
        ("3/2 padded", [1, 7, 6, 3], [3, 3], [2, 2], [1; 4]),
        ("3/1 padded", [1, 5, 5, 2], [3, 3], [1, 1], [1; 4]),
        ("2/3, gaps between windows", [1, 8, 9, 2], [2, 2], [3, 3], [0; 4]),
        ("2/3 padded", [1, 7, 8, 2], [2, 2], [3, 3], [1, 0, 1, 1]),
        ("1/2", [1, 5, 4, 3], [1, 1], [2, 2], [0; 4]),
        ("2×3/1×2", [1, 6, 8, 2], [2, 3], [1, 2], [0, 1, 0, 1]),
        ("3/2 padded below and right", [1, 6, 6, 2], [3, 3], [2, 2], [0, 0, 1, 1]),
        ("3/3 padded by four numbers", [2, 6, 5, 1], [3, 3], [3, 3], [2, 0, 1, 2]),
        ("5/4 padded", [1, 9, 10, 2], [5, 5], [4, 4], [2; 4]),
        ("2/1 padded to the left", [1, 3, 3, 2], [2, 2], [1, 1], [1, 1, 0, 0]),
        ("one pixel", [2, 1, 1, 3], [3, 3], [2, 2], [1; 4]),
        ("vectors and a rest", [1, 6, 6, 37], [3, 3], [2, 2], [1; 4]),
        ("2/2, 8 channels", [2, 4, 6, 8], [2, 2], [2, 2], [0; 4]),
        ("2/2, 24 channels", [1, 6, 2, 24], [2, 2], [2, 2], [0; 4]),
        ("2/2, 8 channels and a rest", [2, 5, 6, 8], [2, 2], [2, 2], [0; 4]),
        ("3/2 padded, 16 channels", [1, 7, 6, 16], [3, 3], [2, 2], [1; 4]),
        ("17/1, more pixels than a byte counts", [1, 18, 19, 2], [17, 17], [1, 1], [0; 4]),
    ];
    let mut cases = Vec::new();
    for (name, x, kernel, stride, pad) in sliding {
        for (kind, ceil, count_padding) in [
            (PoolKind::Max, false, true),
            (PoolKind::Max, true, true),
            (PoolKind::Average, false, true),
            (PoolKind::Average, false, false),
            (PoolKind::Average, true, true),
            (PoolKind::Average, true, false),
        ] {
            let windows = Windows::Sliding { kernel, stride, padding: padding(pad), ceil, count_padding };
            let name = format!("{kind:?} pool {name}, ceil {ceil}, count padding {count_padding}");
            cases.push(Case::of(name, Op::Pool2d(Pool2d { kind, windows }), &[(Distinct, &x)]));
        }
    }
    let adaptive: [([usize; 4], [usize; 2]); 7] = [
        ([2, 4, 4, 3], [1, 1]),
        ([1, 6, 6, 2], [3, 2]),
        ([1, 7, 5, 2], [3, 4]),
        ([1, 2, 3, 2], [5, 7]),
        ([2, 1, 1, 3], [2, 2]),
        ([1, 13, 9, 3], [6, 6]),
        ([2, 20, 20, 35], [1, 1]),
    ];
    for (x, output) in adaptive {
        for kind in [PoolKind::Max, PoolKind::Average] {
            let op = Op::Pool2d(Pool2d { kind, windows: Windows::Adaptive { output } });
            cases.push(Case::of(format!("{kind:?} pool {x:?} to {output:?}"), op, &[(Distinct, &x)]));
        }
    }
    check_all(cases);
}

#[test]
fn layout_changes() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 5] = [&[5], &[4, 3], &[2, 3, 5], &[3, 2, 4, 5], &[30, 40, 20]];
    for shape in shapes {
        for (dim, &size) in shape.iter().enumerate() {
            let slices = [(0, size), (0, 1), (size - 1, 1), (1, size - 1)];
            for (start, length) in slices {
                let name = format!("slice {start}..{} of dim {dim} of {shape:?}", start + length);
                cases.push(Case::of(name, Op::Slice { dim, start, length }, &[(Any, shape)]));
            }
            for (before, after) in [(0, 0), (1, 0), (0, 2), (3, 1)] {
                let name = format!("pad dim {dim} of {shape:?} by {before} and {after}");
                cases.push(Case::of(name, Op::Pad { dim, before, after }, &[(Any, shape)]));
            }
            let with = |size: usize| [&shape[..dim], &[size], &shape[dim + 1..]].concat();
            let (one, three) = (with(1), with(3));
            let join = |name: &str, inputs: &[(Fill, &[usize])]| {
                Case::of(format!("concat {name} on dim {dim} of {shape:?}"), Op::Concat { dim }, inputs)
            };
            cases.push(join("one", &[(Any, shape)]));
            cases.push(join("two", &[(Any, shape), (Any, &three)]));
            cases.push(join("three", &[(Any, &one), (Any, shape), (Any, &one)]));
        }
    }
    let orders: [&[usize]; 12] = [
        &[0],
        &[1, 0],
        &[0, 2, 1],
        &[1, 0, 2],
        &[1, 2, 0],
        &[2, 0, 1],
        &[2, 1, 0],
        &[0, 2, 1, 3],
        &[0, 3, 1, 2],
        &[0, 2, 3, 1],
        &[3, 2, 1, 0],
        &[1, 3, 0, 2],
    ];
    for order in orders {
        for sizes in [[2, 3, 4, 5], [17, 3, 21, 2]] {
            let (shape, name) = (&sizes[..order.len()], format!("permute {sizes:?} by {order:?}"));
            cases.push(Case::of(name, Op::Permute { order: order.to_vec() }, &[(Any, shape)]));
        }
    }
    for (from, to) in [([2, 3, 4], [4, 3, 2]), ([1, 1, 7], [7, 1, 1])] {
        cases.push(Case::of(format!("reshape {from:?} to {to:?}"), Op::Reshape(Shape::from(to)), &[(Any, &from)]));
    }
    check_all(cases);
}

#[test]
fn softmaxes_and_losses() {
    let mut cases = Vec::new();
    for shape in [&[1, 1][..], &[7], &[3, 5], &[2, 3, 4, 4], &[40, 130], &[5, 33, 33]] {
        cases.push(Case::of(format!("softmax {shape:?}"), Op::Softmax { causal: false }, &[(Any, shape)]));
        if shape.len() > 1 && shape[shape.len() - 2] == shape[shape.len() - 1] {
            let mut case = Case::new(format!("causal softmax {shape:?}"));
            let x = case.input(Any, shape);
            let x = case.push(Op::Scale(8.0), &[x]);
            case.push(Op::Softmax { causal: true }, &[x]);
            cases.push(case);
        }
    }
    for [rows, classes] in [[1, 2], [3, 5], [16, 10], [130, 67], [2, 1000]] {
        for smoothing in [0.0, 0.1] {
            let name = format!("cross-entropy {rows}×{classes}, smoothing {smoothing}");
            let inputs: [(Fill, &[usize]); 2] = [(Any, &[rows, classes]), (Ids(classes), &[rows])];
            cases.push(Case::of(name, Op::CrossEntropy { smoothing }, &inputs));
        }
    }
    check_all(cases);
}

/// By itself. What several parts make of each other's numbers is tested with graphs in parts (`graphs/part.rs`).
#[test]
fn what_parts_do_together() {
    let mut cases = Vec::new();
    for shape in [&[7][..], &[3, 5], &[2, 4, 3, 5]] {
        cases.push(Case::of(format!("sum of parts {shape:?}"), Op::Together(Together::Sum), &[(Any, shape)]));
        cases.push(Case::of(format!("fork {shape:?}"), Op::Together(Together::Fork), &[(Any, shape)]));
        for (dim, &length) in shape.iter().enumerate() {
            let lengths = vec![shape.iter().product()];
            let gather = |segments: Vec<Segment>| {
                Op::Together(Together::Gather(Gather { dim, segments, lengths: lengths.clone(), own: 0 }))
            };
            let one = gather(vec![Segment { part: 0, length }]);
            let two = gather(vec![Segment { part: 0, length: 1 }, Segment { part: 0, length: length - 1 }]);
            cases.push(Case::of(format!("gather dim {dim} of {shape:?}"), one, &[(Any, shape)]));
            cases.push(Case::of(format!("gather dim {dim} of {shape:?}, in two"), two, &[(Any, shape)]));
        }
        let mut case = Case::new(format!("sum of parts in place of {shape:?}"));
        let x = case.input(Any, shape);
        let y = case.push(Op::Scale(2.0), &[x]);
        let y = case.push(Op::Together(Together::Sum), &[y]);
        let forked = case.push(Op::Together(Together::Fork), &[y]);
        case.push(Op::Add, &[forked, y]);
        cases.push(case);
    }
    check_all(cases.into_iter().map(Case::f32_only).collect());
}

#[test]
fn sequences() {
    let mut cases = Vec::new();
    // Fewer rows than numbers: every row is asked for more than once. More rows: some never.
    for (ids, rows, width) in [(&[6][..], 2, 3), (&[2, 5], 4, 1), (&[3, 2], 50, 7), (&[400], 3, 35)] {
        let inputs: [(Fill, &[usize]); 2] = [(Ids(rows), ids), (Any, &[rows, width])];
        cases.push(Case::of(format!("embedding {ids:?} of {rows}×{width}"), Op::Embedding, &inputs));
    }
    for [batch, steps, inputs, hidden] in [[1, 1, 1, 1], [2, 1, 3, 4], [3, 5, 2, 3], [2, 5, 4, 1], [3, 5, 17, 19]] {
        let gates = 4 * hidden;
        let shapes: [(Fill, &[usize]); 5] = [
            (Any, &[batch, steps, inputs]),
            (Any, &[gates, inputs]),
            (Any, &[gates, hidden]),
            (Any, &[gates]),
            (Any, &[gates]),
        ];
        cases.push(Case::of(format!("lstm {batch}×{steps}, {inputs} to {hidden}"), Op::Lstm, &shapes));
    }
    check_all(cases);
}
