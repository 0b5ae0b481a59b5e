//! From an operation to its kernel: takes the operands and calls. No arithmetic here.

use paceline_system::random;

use super::context::Context;
use super::conv::{self, ConvPass, ConvShape};
use super::gemm::{Batch, Epilogue, Gemm, Matrix, gemm, gemm_batched};
use super::memory::Operands;
use super::pooling::Pooling;
use super::softmax::{CrossEntropy, Mask};
use super::{
    Cpu, Work, batch_norm, dropout, elementwise, embedding, layer_norm, layout, lstm, pooling, reduce, softmax,
};
use crate::execute::Pass;
use crate::op::{BatchNorm, Op};
use crate::window::PoolKind;

/// Runs one node.
pub(super) fn node(cpu: &Cpu, work: &mut Work, at: Operands<'_>, pass: Pass) {
    let pool = cpu.pool();
    match &at.node().op {
        Op::Conv2d { .. } | Op::Conv2dGradInput { .. } | Op::Conv2dGradWeight { .. } => convolution(cpu, work, &at),
        Op::MatMul { .. } => product(cpu, work, &at),
        Op::BatchNorm(norm) => batch_norm_train(cpu, work, &at, *norm),
        Op::BatchNormInference(norm) => {
            let input = batch_norm_input(&at, *norm);
            batch_norm::infer(pool, &input, (at.input(2), at.input(3)), at.output(0));
        }
        Op::BatchNormGrad(norm) => batch_norm_grad(cpu, work, &at, *norm),
        Op::LayerNorm { epsilon } => {
            let width = at.input_shape(0).last();
            let (gamma, beta) = (Some(at.input(1)), Some(at.input(2)));
            let input = layer_norm::LayerNorm { x: at.input(0), width, gamma, beta, eps: *epsilon };
            let output = layer_norm::LayerNormOutput { y: at.output(0), mean: at.output(1), inv_std: at.output(2) };
            layer_norm::forward(pool, &input, output);
        }
        Op::LayerNormGrad => layer_norm_grad(cpu, work, &at),
        Op::Unary(kind) => elementwise::unary(pool, *kind, at.input_unless_shared(0), at.output(0)),
        Op::UnaryGrad(kind) => {
            elementwise::unary_grad(pool, *kind, (at.input_unless_shared(0), at.input(1)), at.output(0));
        }
        Op::Add => elementwise::add(pool, at.input_unless_shared(0), at.input(1), at.output(0)),
        Op::Mul => elementwise::mul(pool, at.input_unless_shared(0), at.input(1), at.output(0)),
        Op::Scale(factor) => elementwise::scale(pool, at.input_unless_shared(0), *factor, at.output(0)),
        Op::SumLeading { .. } => reduce::sum_leading(pool, at.input(0), at.output(0), &mut work.sums),
        Op::Pool2d(_) | Op::Pool2dGrad { .. } => pooling(cpu, &at),
        Op::Reshape(_) => {
            if let Some(x) = at.input_unless_shared(0) {
                at.output(0).copy_from_slice(x);
            }
        }
        Op::Slice { .. } | Op::Pad { .. } | Op::Concat { .. } | Op::Permute { .. } => move_elements(cpu, &at),
        Op::Dropout { probability, salt } => {
            let key = random::key(&[pass.seed, pass.step, *salt]);
            dropout::dropout(pool, at.input_unless_shared(0), (*probability, key), at.output(0));
        }
        Op::Softmax { causal } => {
            let mask = if *causal { Mask::Causal } else { Mask::None };
            softmax::softmax(pool, (at.input(0), at.input_shape(0).last()), mask, at.output(0));
        }
        Op::SoftmaxGrad => {
            softmax::softmax_grad(
                pool,
                (at.input(1), at.input_shape(1).last()),
                at.input_unless_shared(0),
                at.output(0),
            );
        }
        Op::CrossEntropy { smoothing } => {
            let input = cross_entropy(&at, 0, *smoothing);
            at.output(0)[0] = softmax::cross_entropy(pool, &input, &mut work.sums);
        }
        Op::CrossEntropyGrad { smoothing } => {
            let input = cross_entropy(&at, 1, *smoothing);
            softmax::cross_entropy_grad(pool, &input, at.input(0)[0], at.output(0));
        }
        Op::Embedding => {
            embedding::forward(pool, at.integers(0), (at.input(1), at.input_shape(1).last()), at.output(0));
        }
        Op::EmbeddingGrad { .. } => {
            embedding::gradient(pool, at.integers(1), (at.input(0), at.input_shape(0).last()), at.output(0));
        }
        Op::Lstm | Op::LstmGrad => recurrence(cpu, work, &at),
    }
}

fn context<'a>(cpu: &'a Cpu, work: &'a mut Work) -> Context<'a> {
    Context { pool: cpu.pool(), isa: cpu.isa(), scratch: &mut work.scratch }
}

fn convolution(cpu: &Cpu, work: &mut Work, at: &Operands<'_>) {
    let image = |index: usize| at.input_shape(index).nhwc().expect("a convolution has images");
    let mut context = context(cpu, work);
    match at.node().op {
        Op::Conv2d { conv, bias, relu } => {
            let shape = ConvShape::new(conv, image(0), at.output_shape(0).last());
            let epilogue = Epilogue { bias: bias.then(|| at.input(2)), relu };
            let algorithm = shape.algorithm(ConvPass::Forward);
            conv::conv2d_forward(&mut context, &shape, algorithm, at.input(0), at.input(1), epilogue, at.output(0));
        }
        Op::Conv2dGradInput { conv, input } => {
            let shape = ConvShape::new(conv, input, at.input_shape(0).last());
            let algorithm = shape.algorithm(ConvPass::GradInput);
            conv::conv2d_grad_input(&mut context, &shape, algorithm, at.input(0), at.input(1), at.output(0));
        }
        Op::Conv2dGradWeight { conv } => {
            let shape = ConvShape::new(conv, image(0), at.input_shape(1).last());
            let algorithm = shape.algorithm(ConvPass::GradWeight);
            conv::conv2d_grad_weight(&mut context, &shape, algorithm, at.input(0), at.input(1), at.output(0));
        }
        _ => unreachable!("only convolutions come here"),
    }
}

fn product(cpu: &Cpu, work: &mut Work, at: &Operands<'_>) {
    let Op::MatMul { trans_a, trans_b, bias, relu } = at.node().op else { unreachable!("only products come here") };
    let (a, b, c) = (at.input_shape(0), at.input_shape(1), at.output_shape(0));
    let (m, n) = (c[c.len() - 2], c.last());
    let k = if trans_a { a[a.len() - 2] } else { a.last() };
    let epilogue = Epilogue { bias: bias.then(|| at.input(2)), relu };
    let call = Gemm {
        m,
        n,
        k,
        a: matrix(at.input(0), a.last(), trans_a),
        b: matrix(at.input(1), b.last(), trans_b),
        c_stride: n,
        scale: 1.0,
        accumulate: false,
        epilogue,
    };
    let batch = Batch { count: c.elements() / (m * n), a_stride: m * k, b_stride: k * n, c_stride: m * n };
    gemm_batched(&mut context(cpu, work), call, batch, at.output(0));
}

/// A row-major matrix with rows of `columns`, read transposed if asked.
fn matrix(data: &[f32], columns: usize, transposed: bool) -> Matrix<'_> {
    if transposed { Matrix { data, row_stride: 1, column_stride: columns } } else { Matrix::row_major(data, columns) }
}

fn batch_norm_input<'a>(at: &Operands<'a>, norm: BatchNorm) -> batch_norm::BatchNorm<'a> {
    batch_norm::BatchNorm {
        x: at.input(0),
        channels: at.input_shape(0).last(),
        gamma: norm.scale.then(|| at.input(4)),
        beta: Some(at.input(1)),
        residual: norm.residual.then(|| at.input(at.inputs() - 1)),
        relu: norm.relu,
        eps: norm.epsilon,
    }
}

fn batch_norm_train(cpu: &Cpu, work: &mut Work, at: &Operands<'_>, norm: BatchNorm) {
    let input = batch_norm_input(at, norm);
    let running = batch_norm::Running { mean: at.state(2), variance: at.state(3), momentum: norm.momentum };
    let (y, mean, inv_std) = (at.output(0), at.output(1), at.output(2));
    let output = batch_norm::TrainOutput { y, mean, inv_std, running };
    batch_norm::train(cpu.pool(), &input, output, &mut work.sums);
}

fn batch_norm_grad(cpu: &Cpu, work: &mut Work, at: &Operands<'_>, norm: BatchNorm) {
    let input = batch_norm::BatchNormGrad {
        dy: at.input_unless_shared(0),
        x: at.input(1),
        y: norm.relu.then(|| at.input(at.inputs() - 1)),
        gamma: norm.scale.then(|| at.input(4)),
        mean: at.input(2),
        inv_std: at.input(3),
    };
    let output = batch_norm::GradOutput {
        dx: at.output(0),
        dbeta: Some(at.output(1)),
        dgamma: norm.scale.then(|| at.output(2)),
        dresidual: norm.residual.then(|| at.output(2 + usize::from(norm.scale))),
    };
    batch_norm::gradient(cpu.pool(), &input, output, &mut work.sums);
}

fn layer_norm_grad(cpu: &Cpu, work: &mut Work, at: &Operands<'_>) {
    let width = at.input_shape(1).last();
    let (dy, x, gamma) = (at.input_unless_shared(0), at.input(1), Some(at.input(2)));
    let input = layer_norm::LayerNormGrad { dy, x, width, gamma, mean: at.input(3), inv_std: at.input(4) };
    let (dx, dgamma, dbeta) = (at.output(0), Some(at.output(1)), Some(at.output(2)));
    let output = layer_norm::LayerNormGradOutput { dx, dgamma, dbeta };
    layer_norm::gradient(cpu.pool(), &input, output, &mut work.sums);
}

fn pooling(cpu: &Cpu, at: &Operands<'_>) {
    match at.node().op {
        Op::Pool2d(pool) => {
            let shape = at.input_shape(0).nhwc().expect("pooling has an image");
            let winners = (pool.kind == PoolKind::Max).then(|| at.output_integers(1));
            pooling::forward(cpu.pool(), &Pooling::new(&pool, shape), at.input(0), at.output(0), winners);
        }
        Op::Pool2dGrad { pool, input } => {
            let winners = (pool.kind == PoolKind::Max).then(|| at.integers(1));
            pooling::gradient(cpu.pool(), &Pooling::new(&pool, input), at.input(0), winners, at.output(0));
        }
        _ => unreachable!("only pooling comes here"),
    }
}

fn move_elements(cpu: &Cpu, at: &Operands<'_>) {
    let pool = cpu.pool();
    match &at.node().op {
        Op::Slice { dim, start, length } => {
            let window = layout::Window::new(at.input_shape(0), *dim, *start, *length);
            layout::slice(pool, window, at.input(0), at.output(0));
        }
        Op::Pad { dim, before, .. } => {
            let window = layout::Window::new(at.output_shape(0), *dim, *before, at.input_shape(0)[*dim]);
            layout::pad(pool, window, at.input(0), at.output(0));
        }
        Op::Concat { dim } => {
            let parts: Vec<&[f32]> = (0..at.inputs()).map(|index| at.input(index)).collect();
            let outer = at.output_shape(0)[..*dim].iter().product();
            layout::concat(pool, outer, &parts, at.output(0));
        }
        Op::Permute { order } => layout::permute(pool, (at.input(0), at.input_shape(0)), order, at.output(0)),
        _ => unreachable!("only layout changes come here"),
    }
}

fn cross_entropy<'a>(at: &Operands<'a>, logits: usize, smoothing: f32) -> CrossEntropy<'a> {
    let classes = at.input_shape(logits).last();
    CrossEntropy { logits: at.input(logits), classes, targets: at.integers(logits + 1), smoothing }
}

fn recurrence(cpu: &Cpu, work: &mut Work, at: &Operands<'_>) {
    let Work { scratch, floats, sums } = work;
    let mut context = Context { pool: cpu.pool(), isa: cpu.isa(), scratch };
    let mut matmul = |call: lstm::Product<'_>| {
        let lstm::Product { m, n, k, a, trans_a, b, trans_b, c, accumulate } = call;
        let (a_columns, b_columns) = (if trans_a { m } else { k }, if trans_b { k } else { n });
        let (a, b) = (matrix(a, a_columns, trans_a), matrix(b, b_columns, trans_b));
        let epilogue = Epilogue { bias: None, relu: false };
        gemm(&mut context, Gemm { m, n, k, a, b, c_stride: n, scale: 1.0, accumulate, epilogue }, c);
    };
    let tools = lstm::Tools { pool: cpu.pool(), matmul: &mut matmul, scratch: floats, sums };
    let first = usize::from(matches!(at.node().op, Op::LstmGrad));
    let (x, w_hh) = (at.input_shape(first), at.input_shape(first + 2));
    let size = lstm::Lstm { batch: x[0], steps: x[1], inputs: x[2], hidden: w_hh[1] };
    if first == 0 {
        let input =
            lstm::Inputs { x: at.input(0), w_ih: at.input(1), w_hh: at.input(2), b_ih: at.input(3), b_hh: at.input(4) };
        lstm::forward(tools, size, input, lstm::Outputs { y: at.output(0), gates: at.output(1), cells: at.output(2) });
    } else {
        let input = lstm::Inputs { x: at.input(1), w_ih: at.input(2), w_hh: at.input(3), b_ih: &[], b_hh: &[] };
        let saved = lstm::Saved { dy: at.input(0), y: at.input(4), gates: at.input(5), cells: at.input(6) };
        let (dx, dw_ih, dw_hh, db) = (Some(at.output(0)), at.output(1), at.output(2), at.output(3));
        lstm::gradient(tools, size, input, saved, lstm::Gradients { dx, dw_ih, dw_hh, db });
    }
}
