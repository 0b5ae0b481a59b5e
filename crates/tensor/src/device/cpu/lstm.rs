//! One LSTM layer over whole sequences, from a zero state.
//!
//! All products with the input are one matrix product before the first step (forward) or after the last (gradient); only
//! the product with the previous output is done step by step. The products themselves come from the caller, so that this
//! file knows nothing of how a matrix product is made. Gates are in PyTorch's order: input, forget, cell, output.

use super::context::Context;
use super::reduce::sum_leading;
use super::special::{sigmoid, tanh};
use super::vectorize::vectorized;

/// c `[m,n]` = op(a) `[m,k]` · op(b) `[k,n]`, row-major and dense, where op transposes what is stored the other way.
#[derive(Debug)]
pub struct Product<'a> {
    /// Rows of c.
    pub m: usize,
    /// Columns of c.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Left factor, `[m,k]` or, transposed, `[k,m]`.
    pub a: &'a [f32],
    /// Whether `a` is stored transposed.
    pub trans_a: bool,
    /// Right factor, `[k,n]` or, transposed, `[n,k]`.
    pub b: &'a [f32],
    /// Whether `b` is stored transposed.
    pub trans_b: bool,
    /// Result.
    pub c: &'a mut [f32],
    /// Whether to add to `c` instead of replacing it.
    pub accumulate: bool,
}

/// Makes matrix products.
pub type MatMul = fn(&mut Context<'_>, Product<'_>);

/// The sizes of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lstm {
    /// Sequences.
    pub batch: usize,
    /// Steps of each sequence.
    pub steps: usize,
    /// Width of the input.
    pub inputs: usize,
    /// Width of state and output.
    pub hidden: usize,
}

/// What both directions read.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Input, `[batch, steps, inputs]`.
    pub x: &'a [f32],
    /// Weights of the input, `[4·hidden, inputs]`.
    pub w_ih: &'a [f32],
    /// Weights of the previous output, `[4·hidden, hidden]`.
    pub w_hh: &'a [f32],
    /// Bias that goes with `w_ih`, `[4·hidden]`.
    pub b_ih: &'a [f32],
    /// Bias that goes with `w_hh`, `[4·hidden]`.
    pub b_hh: &'a [f32],
}

/// What the forward pass writes.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// Output, `[batch, steps, hidden]`.
    pub y: &'a mut [f32],
    /// Gates after their activation, `[batch, steps, 4·hidden]`.
    pub gates: &'a mut [f32],
    /// Cell states, `[batch, steps, hidden]`.
    pub cells: &'a mut [f32],
}

/// What the forward pass wrote and the gradient of its output.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    /// Gradient of the output.
    pub dy: &'a [f32],
    /// Output.
    pub y: &'a [f32],
    /// Gates after their activation.
    pub gates: &'a [f32],
    /// Cell states.
    pub cells: &'a [f32],
}

/// What the gradient writes.
#[derive(Debug)]
pub struct Gradients<'a> {
    /// Of the input; none when nobody asks.
    pub dx: Option<&'a mut [f32]>,
    /// Of `w_ih`.
    pub dw_ih: &'a mut [f32],
    /// Of `w_hh`.
    pub dw_hh: &'a mut [f32],
    /// Of either bias: they always have the same gradient.
    pub db: &'a mut [f32],
}

/// Runs the sequences through the layer.
pub fn forward(context: &mut Context<'_>, matmul: MatMul, size: Lstm, input: Inputs<'_>, output: Outputs<'_>) {
    let Lstm { batch, steps, inputs, hidden } = size;
    let (gates, cells, y) = (output.gates, output.cells, output.y);
    assert_eq!(input.x.len(), batch * steps * inputs, "x is [batch, steps, inputs]");
    assert_eq!(y.len(), batch * steps * hidden, "y is [batch, steps, hidden]");
    let (m, n, k) = (batch * steps, 4 * hidden, inputs);
    let (a, b, c) = (input.x, input.w_ih, &mut *gates);
    matmul(context, Product { m, n, k, a, trans_a: false, b, trans_b: true, c, accumulate: false });
    let mut floats = zeros(context, batch * 5 * hidden);
    let (recurrent, state) = floats.split_at_mut(batch * 4 * hidden);
    for step in 0..steps {
        if step > 0 {
            state.chunks_exact_mut(hidden).zip(y.chunks_exact(steps * hidden)).for_each(|(state, y)| {
                state.copy_from_slice(&y[(step - 1) * hidden..step * hidden]);
            });
            let (m, n, k) = (batch, 4 * hidden, hidden);
            let (a, b, c) = (&*state, input.w_hh, &mut *recurrent);
            matmul(context, Product { m, n, k, a, trans_a: false, b, trans_b: true, c, accumulate: false });
        }
        let slices = ((&mut *gates, steps * 4 * hidden), (&mut *cells, steps * hidden), (&mut *y, steps * hidden));
        let isa = context.isa;
        context.pool.chunks3(slices.0, slices.1, slices.2, |item, gates, cells, y| {
            let (past, cells) = cells[..(step + 1) * hidden].split_at_mut(step * hidden);
            let before = past.len().checked_sub(hidden).map(|start| &past[start..]);
            let recurrent = &recurrent[item * 4 * hidden..][..4 * hidden];
            let gates = &mut gates[step * 4 * hidden..][..4 * hidden];
            add_three(isa, gates, recurrent, input.b_ih, input.b_hh);
            cell_forward(isa, gates, before, cells, &mut y[step * hidden..][..hidden]);
        });
    }
    context.scratch.floats = floats;
}

/// So many zeros in the working memory, which is lent from the context because the products need the rest of it.
fn zeros(context: &mut Context<'_>, count: usize) -> Vec<f32> {
    let mut floats = std::mem::take(&mut context.scratch.floats);
    floats.clear();
    floats.resize(count, 0.0);
    floats
}

vectorized! {
    fn add_three(sum: &mut [f32], a: &[f32], b: &[f32], c: &[f32]) {
        let addends = a.iter().zip(b.iter().zip(c));
        sum.iter_mut().zip(addends).for_each(|(sum, (&a, (&b, &c)))| *sum = (*sum + a) + (b + c));
    }
}

vectorized! {
    /// One step of one sequence; `gates` come in before and go out after their activation.
    fn cell_forward(gates: &mut [f32], before: Option<&[f32]>, cells: &mut [f32], y: &mut [f32]) {
        let hidden = y.len();
        let (open, rest) = gates.split_at_mut(2 * hidden);
        let (candidate, out) = rest.split_at_mut(hidden);
        for gate in &mut *open {
            *gate = sigmoid(*gate);
        }
        for gate in &mut *candidate {
            *gate = tanh(*gate);
        }
        for gate in &mut *out {
            *gate = sigmoid(*gate);
        }
        let (enter, forget) = open.split_at(hidden);
        cells.iter_mut().zip(enter.iter().zip(&*candidate)).for_each(|(cell, (&enter, &new))| *cell = enter * new);
        if let Some(before) = before {
            cells.iter_mut().zip(forget.iter().zip(before)).for_each(|(cell, (&forget, &old))| *cell += forget * old);
        }
        for (y, (&out, &cell)) in y.iter_mut().zip(out.iter().zip(&*cells)) {
            *y = out * tanh(cell);
        }
    }
}

/// The gradient of [`forward`].
pub fn gradient(
    context: &mut Context<'_>,
    matmul: MatMul,
    size: Lstm,
    input: Inputs<'_>,
    saved: Saved<'_>,
    output: Gradients<'_>,
) {
    let Lstm { batch, steps, inputs, hidden } = size;
    let (rows, wide) = (batch * steps, 4 * hidden);
    let mut floats = zeros(context, rows * (wide + hidden) + batch * (wide + 2 * hidden));
    let (dgates, rest) = floats.split_at_mut(rows * wide);
    let (before, rest) = rest.split_at_mut(rows * hidden);
    let (dstep, rest) = rest.split_at_mut(batch * wide);
    let (dcell, dstate) = rest.split_at_mut(batch * hidden);
    for step in (0..steps).rev() {
        let slices = ((&mut *dgates, steps * wide), (&mut *dstep, wide), (&mut *dcell, hidden));
        let isa = context.isa;
        context.pool.chunks3(slices.0, slices.1, slices.2, |item, dgates, dstep, dcell| {
            let row = item * steps + step;
            let flow = Flow {
                dy: row_of(saved.dy, row, hidden),
                dstate: row_of(dstate, item, hidden),
                gates: row_of(saved.gates, row, wide),
                cells: row_of(saved.cells, row, hidden),
                before: (step > 0).then(|| row_of(saved.cells, row - 1, hidden)),
            };
            cell_gradient(isa, flow, dcell, dstep);
            dgates[step * wide..][..wide].copy_from_slice(dstep);
        });
        if step > 0 {
            let (a, b) = (&*dstep, input.w_hh);
            let (m, n, k, c) = (batch, hidden, wide, &mut *dstate);
            matmul(context, Product { m, n, k, a, trans_a: false, b, trans_b: false, c, accumulate: false });
        }
    }
    for (before, y) in before.chunks_exact_mut(steps * hidden).zip(saved.y.chunks_exact(steps * hidden)) {
        before[hidden..].copy_from_slice(&y[..(steps - 1) * hidden]);
    }
    let mut weight_gradient = |n: usize, b: &[f32], c: &mut [f32]| {
        let (m, k, a) = (wide, rows, &*dgates);
        matmul(context, Product { m, n, k, a, trans_a: true, b, trans_b: false, c, accumulate: false });
    };
    weight_gradient(inputs, input.x, output.dw_ih);
    weight_gradient(hidden, before, output.dw_hh);
    if let Some(c) = output.dx {
        let (m, n, k, a, b) = (rows, inputs, wide, &*dgates, input.w_ih);
        matmul(context, Product { m, n, k, a, trans_a: false, b, trans_b: false, c, accumulate: false });
    }
    sum_leading(context, dgates, output.db);
    context.scratch.floats = floats;
}

fn row_of(matrix: &[f32], row: usize, width: usize) -> &[f32] {
    &matrix[row * width..][..width]
}

/// What one step of one sequence reads on the way back.
#[derive(Clone, Copy)]
struct Flow<'a> {
    dy: &'a [f32],
    dstate: &'a [f32],
    gates: &'a [f32],
    cells: &'a [f32],
    before: Option<&'a [f32]>,
}

vectorized! {
    /// `dcell` is the gradient of this step's cell from the future, and becomes that of the step before.
    fn cell_gradient(flow: Flow<'_>, dcell: &mut [f32], dgates: &mut [f32]) {
        let hidden = dcell.len();
        let part = |gate: usize| &flow.gates[gate * hidden..][..hidden];
        let (enter, forget, new, out) = (part(0), part(1), part(2), part(3));
        let (dy, dstate, cells) = (&flow.dy[..hidden], &flow.dstate[..hidden], &flow.cells[..hidden]);
        let (denter, rest) = dgates[..4 * hidden].split_at_mut(hidden);
        let (dforget, rest) = rest.split_at_mut(hidden);
        let (dnew, dout) = rest.split_at_mut(hidden);
        for index in 0..hidden {
            let (state, dy) = (tanh(cells[index]), dy[index] + dstate[index]);
            let total = dcell[index] + dy * out[index] * (1.0 - state * state);
            dout[index] = dy * state * out[index] * (1.0 - out[index]);
            denter[index] = total * new[index] * enter[index] * (1.0 - enter[index]);
            dnew[index] = total * enter[index] * (1.0 - new[index] * new[index]);
            dcell[index] = total;
        }
        match flow.before {
            Some(before) => {
                let before = &before[..hidden];
                for index in 0..hidden {
                    dforget[index] = dcell[index] * before[index] * forget[index] * (1.0 - forget[index]);
                }
            }
            None => dforget.fill(0.0),
        }
        for index in 0..hidden {
            dcell[index] *= forget[index];
        }
    }
}

#[cfg(test)]
mod tests;
