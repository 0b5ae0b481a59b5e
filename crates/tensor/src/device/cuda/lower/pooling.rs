//! Pooling and its gradients: `kernels/pooling.cu`.

use super::elementwise::width;
use crate::device::cuda::CudaError;
use crate::device::cuda::program::{Argument, At, BLOCK, Builder};
use crate::op::Op;
use crate::window::{Pool2d, PoolKind, Windows};

/// Appends the calls of a node.
pub(super) fn pooling(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    let (x, y) = (at.input(0), at.output(0));
    let (pool, shape, is_gradient) = match at.node().op {
        Op::Pool2d(pool) => (pool, x.shape.nhwc().expect("pooling has an image"), false),
        Op::Pool2dGrad { pool, input } => (pool, input, true),
        ref other => unreachable!("{} is no pooling", other.name()),
    };
    if pool == Pool2d::global(PoolKind::Average) {
        return average_all(builder, at, shape, is_gradient);
    }
    let (kernel, addresses) = match (pool.kind, is_gradient) {
        (PoolKind::Max, false) => ("max_pool", vec![x.address, y.address, at.output(1).address]),
        (PoolKind::Max, true) => ("max_pool_grad", vec![x.address, at.input(1).address, y.address]),
        (PoolKind::Average, false) => ("average_pool", vec![x.address, y.address]),
        (PoolKind::Average, true) => ("average_pool_grad", vec![x.address, y.address]),
    };
    let mut arguments: Vec<Argument> = addresses.into_iter().map(Argument::from).collect();
    arguments.extend(geometry(&pool, shape)?);
    // A block walks a line of the result.
    let width = if shape[3].is_multiple_of(width(y.dtype)) { width(y.dtype) } else { 1 };
    let (lines, packs) = (y.shape[0] * y.shape[1], y.shape[2] * y.shape[3] / width);
    let block = packs.next_multiple_of(32).min(BLOCK as usize) as u32;
    builder.launch(&format!("{kernel}_{}", y.suffix()), [lines.min(1 << 30), 1, 1], block, &arguments)
}

/// One window over the whole image.
fn average_all(
    builder: &mut Builder<'_>,
    at: &At<'_>,
    [batch, height, columns, channels]: [usize; 4],
    is_gradient: bool,
) -> Result<(), CudaError> {
    let (x, y) = (at.input(0), at.output(0));
    let width = if channels.is_multiple_of(width(x.dtype)) { width(x.dtype) } else { 1 };
    let mut arguments = [x.address, y.address].map(Argument::from).to_vec();
    arguments.extend([batch, height * columns, channels].map(Argument::from));
    if is_gradient {
        return builder.launch_each(&format!("average_all_grad_{}", x.suffix()), y.elements() / width, &arguments);
    }
    let across = (channels / width).next_power_of_two().min(32);
    let blocks = (batch * (channels / width).div_ceil(across)).min(1 << 30);
    arguments.push(Argument::Int(across as i32));
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
    let fit = |size: usize| {
        i32::try_from(size).map_err(|_| CudaError(format!("a size of {size} is too large for a pooling on a GPU")))
    };
    // Pixels of an image and elements of a line are counted in 32 bits.
    [height * width, width.max(columns) * channels].into_iter().try_for_each(|size| fit(size).map(|_| ()))?;
    let mut arguments = vec![batch.into(), channels.into()];
    for size in sizes {
        arguments.push(Argument::Int(fit(size)?));
    }
    Ok(arguments)
}
