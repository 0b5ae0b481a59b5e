//! Rows of a table chosen by ids, and the gradient of the table: `kernels/embedding.cu`.

use super::elementwise::width;
use crate::device::cuda::CudaError;
use crate::device::cuda::program::{At, BLOCK, Builder};
use crate::op::Op;

/// Table rows that a block of the gradient owns, at most.
const SPAN_MAX: usize = 16;

/// Appends the calls of a node.
pub(super) fn embedding(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    let y = at.output(0);
    let columns = y.shape.last();
    if let Op::EmbeddingGrad { rows } = at.node().op {
        let (dy, ids) = (at.input(0), at.input(1));
        // Every block walks all ids: few blocks for a large table, but enough of them to fill the GPU.
        let span = (rows / (builder.cuda().multiprocessors() * 8)).clamp(1, SPAN_MAX);
        let sizes = [ids.elements(), rows, columns, span].map(Into::into);
        let arguments =
            [dy.address.into(), ids.address.into(), y.address.into(), sizes[0], sizes[1], sizes[2], sizes[3]];
        let blocks = rows.div_ceil(span).min(1 << 30);
        return builder.launch(&format!("embedding_grad_{}", dy.suffix()), [blocks, 1, 1], BLOCK, &arguments);
    }
    let (ids, table) = (at.input(0), at.input(1));
    let sizes = [ids.elements(), table.shape[0], columns].map(Into::into);
    let arguments = [ids.address.into(), table.address.into(), y.address.into(), sizes[0], sizes[1], sizes[2]];
    let width = if columns.is_multiple_of(width(y.dtype)) { width(y.dtype) } else { 1 };
    builder.launch_each(&format!("embedding_{}", y.suffix()), y.elements() / width, &arguments)
}
