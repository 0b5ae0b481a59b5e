//! From an operation to its kernel: takes the operands, as what they are made of, and calls. No arithmetic here.

use paceline_system::random;

use super::batch_norm::Others;
use super::choice::Chosen;
use super::context::Context;
use super::conv::{self, ConvPass, ConvShape};
use super::gemm::{Batch, Epilogue, Gemm, Matrix, gemm, gemm_batched};
use super::memory::Operands;
use super::pooling::Pooling;
use super::softmax::{CrossEntropy, Mask};
use super::{batch_norm, dropout, elementwise, embedding, layer_norm, layout, lstm, pooling, reduce, softmax};
use crate::bf16::Bf16;
use crate::dtype::{DType, Element, Float};
use crate::execute::Pass;
use crate::op::{BatchNorm, BatchNormGrad, Op, Operand, ReluMask, Together};
use crate::window::PoolKind;

/// Calls a function with the Rust type of a floating-point tensor.
macro_rules! with_float {
    ($dtype:expr, $function:ident::<_ $(, $other:ty)*>($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32 $(, $other)*>($($argument),*),
            DType::Bf16 => $function::<Bf16 $(, $other)*>($($argument),*),
            DType::I32 => panic!("a graph computes with floating-point numbers"),
        }
    };
}

pub(super) use with_float;

/// Runs one node; a convolution by the algorithm `chosen` for it, a batch normalisation together with `others`.
pub(super) fn node(
    context: &mut Context<'_>,
    at: &Operands<'_>,
    pass: Pass,
    chosen: &Chosen,
    others: Option<&mut Others<'_>>,
) {
    match &at.node().op {
        Op::MatMul { .. } => with_float!(at.input_type(0), product_of::<_>(context, at)),
        Op::Cast(target) => match (at.input_type(0), target) {
            (DType::Bf16, DType::F32) => elementwise::cast::<Bf16, f32>(context, at.input(0), at.output(0)),
            (DType::F32, DType::Bf16) => elementwise::cast::<f32, Bf16>(context, at.input(0), at.output(0)),
            (DType::F32, _) => at.output::<f32>(0).copy_from_slice(at.input(0)),
            _ => at.output::<Bf16>(0).copy_from_slice(at.input(0)),
        },
        Op::CrossEntropy { smoothing } => {
            let input = cross_entropy(at, 0, *smoothing);
            at.output(0)[0] = softmax::cross_entropy(context, &input);
        }
        Op::CrossEntropyGrad { smoothing } => {
            let input = cross_entropy(at, 1, *smoothing);
            softmax::cross_entropy_grad(context, &input, at.input(0)[0], at.output(0));
        }
        Op::Embedding => with_float!(at.output_type(0), embed::<_>(context, at)),
        Op::EmbeddingGrad { .. } => with_float!(at.input_type(0), embed_gradient::<_>(context, at)),
        Op::Lstm | Op::LstmGrad => recurrence(context, at),
        op if op.only_moves() => match at.input_type(0) {
            DType::F32 => move_elements::<f32>(context, at),
            DType::Bf16 => move_elements::<Bf16>(context, at),
            DType::I32 => move_elements::<i32>(context, at),
        },
        op => {
            let common = (0..at.inputs()).find(|&index| op.operand(index) == Operand::Common);
            let dtype = at.input_type(common.expect("the operation has activations"));
            with_float!(dtype, typed::<_>(context, at, pass, chosen, others));
        }
    }
}

/// Runs a node whose activations are of type `E`.
fn typed<E: Float>(
    context: &mut Context<'_>,
    at: &Operands<'_>,
    pass: Pass,
    chosen: &Chosen,
    others: Option<&mut Others<'_>>,
) {
    match &at.node().op {
        Op::Conv2d { .. } | Op::Conv2dGradInput { .. } | Op::Conv2dGradWeight { .. } => {
            convolution::<E>(context, at, chosen);
        }
        Op::BatchNorm(norm) => batch_norm_train::<E>(context, at, *norm, others),
        Op::BatchNormInference(norm) => {
            let input = batch_norm_input::<E>(at, *norm);
            batch_norm::infer(context, &input, (at.input(2), at.input(3)), at.output(0));
        }
        Op::BatchNormAgain(norm) => {
            let input = batch_norm_input::<E>(at, *norm);
            batch_norm::again(context, &input, (at.input(2), at.input(3)), at.output(0));
        }
        Op::BatchNormGrad(norm) => batch_norm_grad::<E>(context, at, *norm, others),
        Op::LayerNorm { epsilon } => {
            let (x, gamma, beta) = (at.input::<E>(0), at.input(1), at.input(2));
            let input = layer_norm::LayerNorm { x, gamma, beta, eps: *epsilon };
            let output = layer_norm::LayerNormOutput { y: at.output(0), mean: at.output(1), inv_std: at.output(2) };
            layer_norm::forward(context, &input, output);
        }
        Op::LayerNormGrad => layer_norm_grad::<E>(context, at),
        Op::Unary(kind) => elementwise::unary::<E>(context, *kind, at.input_unless_shared(0), at.output(0)),
        Op::UnaryGrad(kind) => {
            let gradients = (at.input_unless_shared::<E>(0), at.input(1));
            elementwise::unary_grad(context, *kind, gradients, at.output(0));
        }
        Op::Add => elementwise::add::<E>(context, at.input_unless_shared(0), at.input(1), at.output(0)),
        Op::Mul => elementwise::mul::<E>(context, at.input_unless_shared(0), at.input(1), at.output(0)),
        Op::Scale(factor) => elementwise::scale::<E>(context, at.input_unless_shared(0), *factor, at.output(0)),
        Op::SumLeading { .. } => reduce::sum_leading::<E>(context, at.input(0), at.output(0)),
        Op::Pool2d(_) | Op::Pool2dGrad { .. } => pooling::<E>(context, at),
        Op::Dropout { probability, salt, within } => {
            let key = random::key(&[pass.seed, pass.step, *salt]);
            let (x, y) = (at.input_unless_shared(0), at.output::<E>(0));
            let first = pass.first_element(within.map_or(y.len(), |within| within.elements));
            let mask = dropout::Mask { probability: *probability, key, first };
            match within {
                Some(within) => dropout::dropout_within(context, x, mask, *within, y),
                None => dropout::dropout(context, x, mask, y),
            }
        }
        Op::Softmax { causal } => {
            let mask = if *causal { Mask::Causal } else { Mask::None };
            softmax::softmax::<E>(context, (at.input(0), at.input_shape(0).last()), mask, at.output(0));
        }
        Op::SoftmaxGrad => {
            let y = (at.input::<E>(1), at.input_shape(1).last());
            softmax::softmax_grad(context, y, at.input_unless_shared(0), at.output(0));
        }
        op => unreachable!("{} has no activations", op.name()),
    }
}

fn convolution<E: Float>(context: &mut Context<'_>, at: &Operands<'_>, chosen: &Chosen) {
    let image = |index: usize| at.input_shape(index).nhwc().expect("a convolution has images");
    match at.node().op {
        Op::Conv2d { conv, bias, relu, moments } => {
            let shape = ConvShape::new(conv, image(0), at.output_shape(0).last());
            let epilogue = Epilogue::new(bias.then(|| at.input(2)), relu);
            let algorithm = chosen.of(&shape, ConvPass::Forward, E::DTYPE);
            let (x, weight, y) = (at.input::<E>(0), at.input(1), at.output(0));
            if moments {
                let output = conv::WithMoments { y, mean: at.output(1), variance: at.output(2) };
                conv::conv2d_forward_with_moments(context, &shape, algorithm, x, weight, epilogue, output);
            } else {
                conv::conv2d_forward(context, &shape, algorithm, x, weight, epilogue, y);
            }
        }
        Op::Conv2dGradInput { conv, input } => {
            let shape = ConvShape::new(conv, input, at.input_shape(0).last());
            let algorithm = chosen.of(&shape, ConvPass::GradInput, E::DTYPE);
            let (dy, weight, dx) = (at.input::<E>(0), at.input(1), at.output(0));
            conv::conv2d_grad_input(context, &shape, algorithm, dy, weight, dx);
        }
        Op::Conv2dGradWeight { conv } => {
            let shape = ConvShape::new(conv, image(0), at.input_shape(1).last());
            let algorithm = chosen.of(&shape, ConvPass::GradWeight, E::DTYPE);
            let (x, dy, dw) = (at.input::<E>(0), at.input(1), at.output(0));
            conv::conv2d_grad_weight(context, &shape, algorithm, x, dy, dw);
        }
        _ => unreachable!("only convolutions come here"),
    }
}

fn product_of<A: Float>(context: &mut Context<'_>, at: &Operands<'_>) {
    with_float!(at.input_type(1), product_with::<_, A>(context, at));
}

fn product_with<B: Float, A: Float>(context: &mut Context<'_>, at: &Operands<'_>) {
    with_float!(at.output_type(0), product::<_, A, B>(context, at));
}

fn product<C: Float, A: Float, B: Float>(context: &mut Context<'_>, at: &Operands<'_>) {
    let Op::MatMul { trans_a, trans_b, bias, relu } = at.node().op else { unreachable!("only products come here") };
    let (a, b, c) = (at.input_shape(0), at.input_shape(1), at.output_shape(0));
    let (m, n) = (c[c.len() - 2], c.last());
    let k = if trans_a { a[a.len() - 2] } else { a.last() };
    let call = Gemm {
        m,
        n,
        k,
        a: matrix(at.input::<A>(0), a.last(), trans_a),
        b: matrix(at.input::<B>(1), b.last(), trans_b),
        c_stride: n,
        scale: 1.0,
        accumulate: false,
        epilogue: Epilogue::new(bias.then(|| at.input(2)), relu),
    };
    let batch = Batch { count: c.elements() / (m * n), a_stride: m * k, b_stride: k * n, c_stride: m * n };
    gemm_batched(context, call, batch, at.output::<C>(0));
}

/// A row-major matrix with rows of `columns`, read transposed if asked.
pub(super) fn matrix<E: Float>(data: &[E], columns: usize, transposed: bool) -> Matrix<'_, E> {
    if transposed { Matrix { data, row_stride: 1, column_stride: columns } } else { Matrix::row_major(data, columns) }
}

fn batch_norm_input<'a, E: Float>(at: &Operands<'a>, norm: BatchNorm) -> batch_norm::BatchNorm<'a, E> {
    batch_norm::BatchNorm {
        x: at.input(0),
        gamma: norm.scale.then(|| at.input(4)),
        beta: at.input(1),
        residual: norm.residual.then(|| at.input(at.inputs() - 1)),
        rectifier: norm.rectifier,
        eps: norm.epsilon,
        statistics: norm.moments.then(|| (at.input(norm.moments_at()), at.input(norm.moments_at() + 1))),
    }
}

fn batch_norm_train<E: Float>(
    context: &mut Context<'_>,
    at: &Operands<'_>,
    norm: BatchNorm,
    others: Option<&mut Others<'_>>,
) {
    let input = batch_norm_input::<E>(at, norm);
    let running = batch_norm::Running { mean: at.state(2), variance: at.state(3), momentum: norm.momentum };
    let (y, mean, inv_std) = (at.output(0), at.output(1), at.output(2));
    batch_norm::train(context, &input, batch_norm::TrainOutput { y, mean, inv_std, running }, others);
}

fn batch_norm_grad<E: Float>(
    context: &mut Context<'_>,
    at: &Operands<'_>,
    norm: BatchNormGrad,
    others: Option<&mut Others<'_>>,
) {
    let last = at.inputs() - 1;
    let input = batch_norm::BatchNormGrad::<E> {
        dy: at.input_unless_shared(0),
        x: at.input(1),
        mask: match norm.mask {
            ReluMask::None => batch_norm::Mask::None,
            ReluMask::FromInput => batch_norm::Mask::FromInput(at.input(last)),
            ReluMask::FromOutput => batch_norm::Mask::FromOutput(at.input(last)),
        },
        ceiling: norm.rectifier.ceiling(),
        gamma: norm.scale.then(|| at.input(4)),
        mean: at.input(2),
        inv_std: at.input(3),
    };
    let output = batch_norm::GradOutput {
        dx: at.output(0),
        dbeta: at.output(1),
        dgamma: norm.scale.then(|| at.output(2)),
        dresidual: norm.residual.then(|| at.output(2 + usize::from(norm.scale))),
    };
    batch_norm::gradient(context, &input, output, others);
}

fn layer_norm_grad<E: Float>(context: &mut Context<'_>, at: &Operands<'_>) {
    let (dy, x, gamma) = (at.input_unless_shared::<E>(0), at.input(1), at.input(2));
    let input = layer_norm::LayerNormGrad { dy, x, gamma, mean: at.input(3), inv_std: at.input(4) };
    let (dx, dgamma, dbeta) = (at.output(0), at.output(1), at.output(2));
    layer_norm::gradient(context, &input, layer_norm::LayerNormGradOutput { dx, dgamma, dbeta });
}

fn pooling<E: Float>(context: &mut Context<'_>, at: &Operands<'_>) {
    match at.node().op {
        Op::Pool2d(pool) => {
            let shape = at.input_shape(0).nhwc().expect("pooling has an image");
            let winners = (pool.kind == PoolKind::Max).then(|| at.output(1));
            pooling::forward::<E>(context, &Pooling::new(&pool, shape), at.input(0), at.output(0), winners);
        }
        Op::Pool2dGrad { pool, input } => {
            let winners = (pool.kind == PoolKind::Max).then(|| at.input(1));
            pooling::gradient::<E>(context, &Pooling::new(&pool, input), at.input(0), winners, at.output(0));
        }
        _ => unreachable!("only pooling comes here"),
    }
}

fn move_elements<T: Element>(context: &mut Context<'_>, at: &Operands<'_>) {
    match &at.node().op {
        Op::Reshape(_) | Op::Together(Together::Fork) => {
            if let Some(x) = at.input_unless_shared::<T>(0) {
                at.output(0).copy_from_slice(x);
            }
        }
        Op::Slice { dim, start, length } => {
            let window = layout::Window::new(at.input_shape(0), *dim, *start, *length);
            layout::slice::<T>(context, window, at.input(0), at.output(0));
        }
        Op::Pad { dim, before, .. } => {
            let window = layout::Window::new(at.output_shape(0), *dim, *before, at.input_shape(0)[*dim]);
            layout::pad::<T>(context, window, at.input(0), at.output(0));
        }
        Op::Concat { dim } => {
            let (y, mut start) = (at.output(0), 0);
            for index in 0..at.inputs() {
                let length = at.input_shape(index)[*dim];
                let window = layout::Window::new(at.output_shape(0), *dim, start, length);
                layout::place::<T>(context, window, at.input(index), y);
                start += length;
            }
        }
        Op::Permute { order } => {
            layout::permute::<T>(context, (at.input(0), at.input_shape(0)), order, at.output(0));
        }
        _ => unreachable!("only layout changes come here"),
    }
}

fn cross_entropy<'a>(at: &Operands<'a>, logits: usize, smoothing: f32) -> CrossEntropy<'a> {
    let classes = at.input_shape(logits).last();
    CrossEntropy { logits: at.input(logits), classes, targets: at.input(logits + 1), smoothing }
}

fn embed<E: Float>(context: &mut Context<'_>, at: &Operands<'_>) {
    embedding::forward::<E>(context, at.input(0), (at.input(1), at.input_shape(1).last()), at.output(0));
}

fn embed_gradient<E: Float>(context: &mut Context<'_>, at: &Operands<'_>) {
    embedding::gradient::<E>(context, at.input(1), (at.input(0), at.input_shape(0).last()), at.output(0));
}

fn recurrent_product(context: &mut Context<'_>, call: lstm::Product<'_>) {
    let lstm::Product { m, n, k, a, trans_a, b, trans_b, c, accumulate } = call;
    let (a_columns, b_columns) = (if trans_a { m } else { k }, if trans_b { k } else { n });
    let (a, b) = (matrix(a, a_columns, trans_a), matrix(b, b_columns, trans_b));
    let epilogue = Epilogue::default();
    gemm(context, Gemm { m, n, k, a, b, c_stride: n, scale: 1.0, accumulate, epilogue }, c);
}

fn recurrence(context: &mut Context<'_>, at: &Operands<'_>) {
    let first = usize::from(matches!(at.node().op, Op::LstmGrad));
    let (x, w_hh) = (at.input_shape(first), at.input_shape(first + 2));
    let size = lstm::Lstm { batch: x[0], steps: x[1], inputs: x[2], hidden: w_hh[1] };
    if first == 0 {
        let input =
            lstm::Inputs { x: at.input(0), w_ih: at.input(1), w_hh: at.input(2), b_ih: at.input(3), b_hh: at.input(4) };
        let output = lstm::Outputs { y: at.output(0), gates: at.output(1), cells: at.output(2) };
        lstm::forward(context, recurrent_product, size, input, output);
    } else {
        let input = lstm::Inputs { x: at.input(1), w_ih: at.input(2), w_hh: at.input(3), b_ih: &[], b_hh: &[] };
        let saved = lstm::Saved { dy: at.input(0), y: at.input(4), gates: at.input(5), cells: at.input(6) };
        let (dx, dw_ih, dw_hh, db) = (Some(at.output(0)), at.output(1), at.output(2), at.output(3));
        lstm::gradient(context, recurrent_product, size, input, saved, lstm::Gradients { dx, dw_ih, dw_hh, db });
    }
}
