//! Pooling and its gradients: `kernels/pooling.cu`.

use super::elementwise::width;
use crate::device::cuda::CudaError;
use crate::device::cuda::program::{Argument, At, BLOCK, Builder};
use crate::op::Op;
use crate::window::{Pool2d, PoolKind, Windows};

/// Appends the calls of a node.
pub(super) fn pooling(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    let (x, y) = (at.input(0), at.output(0));
    let (pool, shape, kernel) = match at.node().op {
        Op::Pool2d(pool) => {
            let shape = x.shape.nhwc().expect("pooling has an image");
            if pool == Pool2d::global(PoolKind::Average) {
                return average_all(builder, at, shape);
            }
            (pool, shape, if pool.kind == PoolKind::Max { "max_pool" } else { "average_pool" })
        }
        Op::Pool2dGrad { pool, input } => {
            (pool, input, if pool.kind == PoolKind::Max { "max_pool_grad" } else { "average_pool_grad" })
        }
        ref other => unreachable!("{} is no pooling", other.name()),
    };
    let mut arguments = vec![Argument::from(x.address)];
    match (&at.node().op, pool.kind) {
        (Op::Pool2d(_), PoolKind::Max) => arguments.extend([y.address, at.output(1).address].map(Argument::from)),
        (_, PoolKind::Max) => arguments.extend([at.input(1).address, y.address].map(Argument::from)),
        (_, PoolKind::Average) => arguments.push(y.address.into()),
    }
    arguments.extend(geometry(&pool, shape)?);
    let width = if shape[3].is_multiple_of(width(y.dtype)) { width(y.dtype) } else { 1 };
    builder.launch_each(&format!("{kernel}_{}", y.suffix()), y.elements() / width, &arguments)
}

/// One window over the whole image.
fn average_all(builder: &mut Builder<'_>, at: &At<'_>, shape: [usize; 4]) -> Result<(), CudaError> {
    let (x, y) = (at.input(0), at.output(0));
    let [batch, height, columns, channels] = shape;
    let width = if channels.is_multiple_of(width(x.dtype)) { width(x.dtype) } else { 1 };
    let across = (channels / width).next_power_of_two().min(32);
    let blocks = (batch * (channels / width).div_ceil(across)).min(1 << 30);
    let sizes = [batch, height * columns, channels].map(Argument::from);
    let arguments = [x.address.into(), y.address.into(), sizes[0], sizes[1], sizes[2], Argument::Int(across as i32)];
    builder.launch(&format!("average_all_{}", x.suffix()), [blocks, 1, 1], BLOCK, &arguments)
}

/// `POOLING_PARAMETERS` of the kernels.
fn geometry(pool: &Pool2d, [batch, height, width, channels]: [usize; 4]) -> Result<Vec<Argument>, CudaError> {
    let [rows, columns] = pool.output([height, width]).expect("a pooling window fits its image");
    let mut sizes = vec![height, width, rows, columns];
    match pool.windows {
        Windows::Adaptive { .. } => sizes.extend([1, 1, 1, 1, 1, 0, 0, 0, 0, 0]),
        Windows::Sliding { kernel, stride, padding, count_padding, .. } => {
            sizes.extend([0, kernel[0], kernel[1], stride[0], stride[1]]);
            sizes.extend([padding.top, padding.left, padding.bottom, padding.right, usize::from(count_padding)]);
        }
    }
    let mut arguments = vec![batch.into(), channels.into()];
    for size in sizes {
        let size =
            i32::try_from(size).map_err(|_| CudaError(format!("a size of {size} is too large for a pooling")))?;
        arguments.push(Argument::Int(size));
    }
    Ok(arguments)
}
