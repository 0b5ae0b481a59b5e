//! Pooling and its gradients: `kernels/pooling.cu`.

use super::elementwise::width;
use crate::device::cuda::CudaError;
use crate::device::cuda::program::{Argument, At, BLOCK, Builder, Call};
use crate::dtype::DType;
use crate::op::Op;
use crate::window::{Padding, Pool2d, PoolKind, Windows};

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
    if pool.kind == PoolKind::Max && x.dtype == DType::Bf16 && shape[3].is_multiple_of(8) {
        match pool.windows {
            Windows::Sliding { kernel: [2, 2], stride: [2, 2], padding, .. }
                if padding == Padding::all(0) && shape[1].is_multiple_of(2) && shape[2].is_multiple_of(2) =>
            {
                return two_by_two(builder, at, shape, is_gradient);
            }
            Windows::Sliding { kernel: [3, 3], stride: [2, 2], padding, .. } => {
                return three_by_three(builder, at, (&pool, padding), shape, is_gradient);
            }
            _ => {}
        }
    }
    // The plan has 32 bits for a winner; a place in a window needs eight.
    let is_small = matches!(pool.windows, Windows::Sliding { kernel: [rows, columns], .. } if rows * columns <= 256);
    let (kernel, addresses) = match (pool.kind, is_gradient) {
        (PoolKind::Max, false) => {
            let kernel = if is_small { "max_pool" } else { "max_pool_large" };
            (kernel, vec![x.address, y.address, at.output(1).address])
        }
        (PoolKind::Max, true) => {
            let kernel = if is_small { "max_pool_grad" } else { "max_pool_grad_large" };
            (kernel, vec![x.address, at.input(1).address, y.address])
        }
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

/// The addresses of a maximum or its gradient, in the order of its kernel, and the kernel's name.
fn maximum(at: &At<'_>, windows: &str, is_gradient: bool) -> (String, Vec<Argument>) {
    let (first, last) = (at.input(0).address, at.output(0).address);
    let (end, addresses) = if is_gradient {
        ("_grad", [first, at.input(1).address, last])
    } else {
        ("", [first, last, at.output(1).address])
    };
    (format!("max_pool_{windows}{end}_bf16"), addresses.map(Argument::from).into())
}

/// Blocks that walk lines of so many packs.
fn lines(
    builder: &mut Builder<'_>,
    kernel: &str,
    (lines, packs): (usize, usize),
    arguments: &[Argument],
) -> Result<(), CudaError> {
    let block = packs.next_multiple_of(32).min(BLOCK as usize) as u32;
    builder.launch(kernel, [lines.min(1 << 30), 1, 1], block, arguments)
}

/// Maxima of windows of 2×2 that lie side by side and cover the image, or their gradient: a block walks a line of windows.
fn two_by_two(
    builder: &mut Builder<'_>,
    at: &At<'_>,
    [batch, height, width, channels]: [usize; 4],
    is_gradient: bool,
) -> Result<(), CudaError> {
    let (kernel, mut arguments) = maximum(at, "2x2", is_gradient);
    let (rows, columns, packs) = (batch * height / 2, width / 2, channels / 8);
    let across = fit(columns * packs)? as usize;
    arguments.extend([rows.into(), Argument::Int(columns as i32), Argument::Int(packs as i32)]);
    lines(builder, &kernel, (rows, across), &arguments)
}

/// Maxima of windows of 3×3 every second pixel: a block walks a line of windows; or their gradient: two lines of pixels.
fn three_by_three(
    builder: &mut Builder<'_>,
    at: &At<'_>,
    (pool, padding): (&Pool2d, Padding),
    [batch, height, width, channels]: [usize; 4],
    is_gradient: bool,
) -> Result<(), CudaError> {
    let (kernel, mut arguments) = maximum(at, "3x3", is_gradient);
    let [rows, columns] = pool.output([height, width]).expect("a pooling window fits its image");
    let packs = channels / 8;
    fit(height * width * packs)?;
    arguments.push(batch.into());
    let sizes = [height, width, rows, columns, padding.top, padding.left, packs];
    arguments.extend(sizes.map(|size| Argument::Int(size as i32)));
    let [down, across] = if is_gradient {
        [(height + padding.top).div_ceil(2), (width + padding.left).div_ceil(2)]
    } else {
        [rows, columns]
    };
    lines(builder, &kernel, (batch * down, across * packs), &arguments)
}

/// A size that a kernel counts in 32 bits.
fn fit(size: usize) -> Result<i32, CudaError> {
    i32::try_from(size).map_err(|_| CudaError(format!("a size of {size} is too large for a pooling on a GPU")))
}

/// One window over the whole image.
fn average_all(
    builder: &mut Builder<'_>,
    at: &At<'_>,
    [batch, height, columns, channels]: [usize; 4],
    is_gradient: bool,
) -> Result<(), CudaError> {
    let (x, y) = (at.input(0), at.output(0));
    if height * columns == 1 {
        // The mean of one pixel.
        builder.call(Call::Copy(y.address, x.address, x.bytes()));
        return Ok(());
    }
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
    // Pixels of an image and elements of a line are counted in 32 bits.
    [height * width, width.max(columns) * channels].into_iter().try_for_each(|size| fit(size).map(|_| ()))?;
    let mut arguments = vec![batch.into(), channels.into()];
    for size in sizes {
        arguments.push(Argument::Int(fit(size)?));
    }
    Ok(arguments)
}
