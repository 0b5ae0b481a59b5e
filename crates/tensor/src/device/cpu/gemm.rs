//! Matrix multiplication.
//!
//! One blocked product (`product.rs`) serves plain, batched and transposed matrices here and implicit matrices in
//! [`super::conv`]. Bits depend on shapes, strides and the instruction set, never on the number of threads.
#![allow(unsafe_code)]

pub(super) mod amx;
mod cut;
pub(super) mod kernel;
mod lines;
pub(crate) mod pack;
pub(crate) mod product;
#[cfg(test)]
pub(crate) mod tests;

use super::context::Context;
use crate::dtype::Float;
use pack::Strided;
use product::{Place, Product, multiply};

/// A matrix in memory: element (row, column) lies at `row · row_stride + column · column_stride`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, E = f32> {
    /// The elements.
    pub data: &'a [E],
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between columns.
    pub column_stride: usize,
}

impl<'a, E: Float> Matrix<'a, E> {
    /// Rows of `columns` elements, one after the other.
    pub const fn row_major(data: &'a [E], columns: usize) -> Self {
        Self { data, row_stride: columns, column_stride: 1 }
    }

    /// The same matrix with rows and columns exchanged.
    pub const fn transposed(self) -> Self {
        Self { data: self.data, row_stride: self.column_stride, column_stride: self.row_stride }
    }

    fn check(&self, name: &str, [batch, rows, columns]: [usize; 3], batch_stride: usize) {
        if batch * rows * columns > 0 {
            let last = (batch - 1) * batch_stride + (rows - 1) * self.row_stride + (columns - 1) * self.column_stride;
            assert!(last < self.data.len(), "matrix {name} ends at {last}, beyond its {} elements", self.data.len());
        }
    }
}

/// What happens to a finished element.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue<'a> {
    /// Added, one value per column.
    pub bias: Option<&'a [f32]>,
    /// Then negative values become zero.
    pub relu: bool,
    /// Then it counts in the moments of its column, which are left in the scratch memory. Kernels say whether they did so.
    pub(super) moments: bool,
}

impl<'a> Epilogue<'a> {
    /// Adds a bias, if there is one, and applies the ReLU, if asked.
    pub const fn new(bias: Option<&'a [f32]>, relu: bool) -> Self {
        Self { bias, relu, moments: false }
    }

    /// And takes the moments.
    pub(super) const fn with_moments(self) -> Self {
        Self { moments: true, ..self }
    }
}

/// c = \[c +\] scale · a · b, then the epilogue; a is m×k, b is k×n.
///
/// Where one operand is bf16, the other is rounded to it. Sums are `f32`; a result in bf16 is rounded once, at the end.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a, A = f32, B = f32> {
    /// Rows of a and c.
    pub m: usize,
    /// Columns of b and c.
    pub n: usize,
    /// Columns of a, rows of b.
    pub k: usize,
    /// Left operand.
    pub a: Matrix<'a, A>,
    /// Right operand.
    pub b: Matrix<'a, B>,
    /// Distance between the rows of c.
    pub c_stride: usize,
    /// Factor of the product.
    pub scale: f32,
    /// Add to c instead of overwriting it.
    pub accumulate: bool,
    /// What follows.
    pub epilogue: Epilogue<'a>,
}

impl<'a, A: Float, B: Float> Gemm<'a, A, B> {
    /// The plain product of `[m, n, k]`: c = a · b, rows of c side by side.
    pub const fn new([m, n, k]: [usize; 3], a: Matrix<'a, A>, b: Matrix<'a, B>) -> Self {
        let epilogue = Epilogue::new(None, false);
        Self { m, n, k, a, b, c_stride: n, scale: 1.0, accumulate: false, epilogue }
    }
}

/// Distances between the matrices of a batch; 0 repeats one operand for all.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// How many products.
    pub count: usize,
    /// In a.
    pub a_stride: usize,
    /// In b.
    pub b_stride: usize,
    /// In c: at least one whole matrix.
    pub c_stride: usize,
}

/// Multiplies two matrices into `c`.
///
/// # Panics
/// When an operand is too short for its shape.
pub fn gemm<A: Float, B: Float, C: Float>(context: &mut Context<'_>, gemm: Gemm<'_, A, B>, c: &mut [C]) {
    gemm_batched(context, gemm, Batch { count: 1, a_stride: 0, b_stride: 0, c_stride: gemm.m * gemm.c_stride }, c);
}

/// Multiplies a batch of matrix pairs into `c`. `gemm` describes the first pair.
///
/// # Panics
/// When an operand is too short for its shape, or results overlap.
pub fn gemm_batched<A: Float, B: Float, C: Float>(
    context: &mut Context<'_>,
    gemm: Gemm<'_, A, B>,
    batch: Batch,
    c: &mut [C],
) {
    let Gemm { m, n, k, a, b, c_stride, scale, accumulate, epilogue } = gemm;
    a.check("a", [batch.count, m, k], batch.a_stride);
    b.check("b", [batch.count, k, n], batch.b_stride);
    assert!(c_stride >= n || m <= 1, "rows of c overlap");
    let extent = m.saturating_sub(1) * c_stride + n;
    assert!(batch.count <= 1 || batch.c_stride >= extent, "results of the batch overlap");
    let left = Strided { matrix: a, batch_stride: batch.a_stride };
    let right = Strided { matrix: b, batch_stride: batch.b_stride };
    let product = Product {
        batch: batch.count,
        rows: m,
        columns: n,
        depth: k,
        left: &left,
        right: &right,
        place: Place::Strided(batch.c_stride, c_stride),
        scale,
        accumulate,
        epilogue,
        bias_stride: 0,
    };
    // SAFETY: rows lie at least `n` apart and matrices at least `extent`.
    unsafe { multiply(context, &product, c) };
}
