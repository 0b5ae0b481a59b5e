//! One LSTM layer over whole sequences: matrix products by `product.rs`, the rest by `kernels/lstm.cu`.
//!
//! All products with the input are one product before the first step (forward) or after the last (gradient); only the product
//! with the previous output is made step by step, straight into or out of the rows of that step.

use super::elementwise::{advance, sum_leading};
use super::layout::{Runs, pad};
use super::product::{Matrix, Multiply, multiply};
use crate::device::cuda::CudaError;
use crate::device::cuda::program::{Address, Argument, At, Builder};
use crate::dtype::DType;
use crate::op::Op;

/// Bytes of an element.
const FLOAT: usize = DType::F32.bytes();

/// The sizes of a layer.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    steps: usize,
    inputs: usize,
    hidden: usize,
}

/// Appends the calls of a node.
pub(super) fn lstm(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    let first = usize::from(matches!(at.node().op, Op::LstmGrad));
    let (x, w_hh) = (at.input(first).shape, at.input(first + 2).shape);
    let sizes = Sizes { batch: x[0], steps: x[1], inputs: x[2], hidden: w_hh[1] };
    if first == 0 { forward(builder, at, sizes) } else { gradient(builder, at, sizes) }
}

/// A matrix of rows that are so many elements apart.
fn matrix(address: Address, stride: usize, trans: bool) -> Matrix {
    Matrix { address, dtype: DType::F32, stride, trans }
}

/// c (+)= a·b.
fn product(
    builder: &mut Builder<'_>,
    (m, n, k): (usize, usize, usize),
    a: Matrix,
    b: Matrix,
    (c, c_stride, accumulate): (Address, usize, bool),
) -> Result<(), CudaError> {
    let (c_dtype, bias, relu, batch, batch_strides) = (DType::F32, None, false, 1, [0; 3]);
    multiply(builder, Multiply { m, n, k, a, b, c, c_dtype, c_stride, bias, relu, accumulate, batch, batch_strides })
}

fn forward(builder: &mut Builder<'_>, at: &At<'_>, sizes: Sizes) -> Result<(), CudaError> {
    let Sizes { batch, steps, inputs, hidden } = sizes;
    let wide = 4 * hidden;
    let [x, w_ih, w_hh, b_ih, b_hh] = [0, 1, 2, 3, 4].map(|index| at.input(index).address);
    let [y, gates, cells] = [0, 1, 2].map(|index| at.output(index).address);
    let (all, w_ih) = ((batch * steps, wide, inputs), matrix(w_ih, inputs, true));
    product(builder, all, matrix(x, inputs, false), w_ih, (gates, wide, false))?;
    for step in 0..steps {
        if step > 0 {
            let before = matrix(advance(y, (step - 1) * hidden * FLOAT), steps * hidden, false);
            let sums = (advance(gates, step * wide * FLOAT), steps * wide, true);
            product(builder, (batch, wide, hidden), before, matrix(w_hh, hidden, true), sums)?;
        }
        let mut arguments = [gates, b_ih, b_hh, cells, y].map(Argument::from).to_vec();
        arguments.extend([batch, steps, hidden, step].map(Argument::from));
        builder.launch_each("lstm_step", batch * hidden, &arguments)?;
    }
    Ok(())
}

fn gradient(builder: &mut Builder<'_>, at: &At<'_>, sizes: Sizes) -> Result<(), CudaError> {
    let Sizes { batch, steps, inputs, hidden } = sizes;
    let (rows, wide) = (batch * steps, 4 * hidden);
    let [dy, x, w_ih, w_hh, y, gates, cells] = [0, 1, 2, 3, 4, 5, 6].map(|index| at.input(index).address);
    let [dx, dw_ih, dw_hh, db] = [0, 1, 2, 3].map(|index| at.output(index).address);
    let dgates = builder.scratch(rows * wide * FLOAT);
    let [dstate, dcell] = [(); 2].map(|()| builder.scratch(batch * hidden * FLOAT));
    for step in (0..steps).rev() {
        let mut arguments = [dy, gates, cells, dstate, dcell, dgates].map(Argument::from).to_vec();
        arguments.extend([batch, steps, hidden, step].map(Argument::from));
        builder.launch_each("lstm_grad_step", batch * hidden, &arguments)?;
        if step > 0 {
            let dstep = matrix(advance(dgates, step * wide * FLOAT), steps * wide, false);
            product(builder, (batch, hidden, wide), dstep, matrix(w_hh, hidden, false), (dstate, hidden, false))?;
        }
    }
    // What each step saw of the one before it: the outputs one step later, after zeros.
    let before = builder.scratch(rows * hidden * FLOAT);
    let (row, sequence) = (hidden * FLOAT, steps * hidden * FLOAT);
    pad(
        builder,
        Runs { from: y, from_stride: sequence, to: before, outer: batch, length: sequence - row },
        row,
        sequence,
    )?;
    let turned = || matrix(dgates, wide, true);
    product(builder, (wide, inputs, rows), turned(), matrix(x, inputs, false), (dw_ih, inputs, false))?;
    product(builder, (wide, hidden, rows), turned(), matrix(before, hidden, false), (dw_hh, hidden, false))?;
    let flat = matrix(dgates, wide, false);
    product(builder, (rows, inputs, wide), flat, matrix(w_ih, inputs, false), (dx, inputs, false))?;
    sum_leading(builder, dgates, DType::F32, (rows, wide), db)
}
