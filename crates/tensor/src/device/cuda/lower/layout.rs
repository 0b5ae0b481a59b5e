//! Operations that move elements: `kernels/layout.cu`. A tensor cut along one dim is runs of elements at even distances, and
//! runs are moved in units as large as sizes and addresses allow.

use super::elementwise::advance;
use crate::device::cuda::CudaError;
use crate::device::cuda::program::{Address, Argument, At, BLOCK, Builder, Call};
use crate::op::{DIMS_MAX, Op};

/// Appends the calls of a node.
pub(super) fn layout(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    let (x, y) = (at.input(0), at.output(0));
    let bytes = x.dtype.bytes();
    // The number of runs along a dim, and the bytes of one index of it.
    let cut = |shape: &[usize], dim: usize| {
        (shape[..dim].iter().product::<usize>(), bytes * shape[dim + 1..].iter().product::<usize>())
    };
    match &at.node().op {
        Op::Reshape(_) => {
            if x.address != y.address {
                builder.call(Call::Copy(y.address, x.address, x.bytes()));
            }
            Ok(())
        }
        Op::Slice { dim, start, length } => {
            let (outer, inner) = cut(x.shape, *dim);
            let (from, stride) = (advance(x.address, start * inner), x.shape[*dim] * inner);
            copy(
                builder,
                Runs { from, from_stride: stride, to: y.address, outer, length: length * inner },
                length * inner,
            )
        }
        Op::Pad { dim, before, .. } => {
            let (outer, inner) = cut(x.shape, *dim);
            let length = x.shape[*dim] * inner;
            let runs = Runs { from: x.address, from_stride: length, to: y.address, outer, length };
            pad(builder, runs, before * inner, y.shape[*dim] * inner)
        }
        Op::Concat { dim } => {
            let (outer, inner) = cut(y.shape, *dim);
            let mut start = 0;
            for index in 0..at.inputs() {
                let x = at.input(index);
                let length = x.shape[*dim] * inner;
                let to = advance(y.address, start);
                let runs = Runs { from: x.address, from_stride: length, to, outer, length };
                copy(builder, runs, y.shape[*dim] * inner)?;
                start += length;
            }
            Ok(())
        }
        Op::Permute { order } => permute(builder, x.address, x.shape, order, y.address, bytes),
        other => unreachable!("{} does more than move elements", other.name()),
    }
}

/// Runs to be moved; everything in bytes.
#[derive(Clone, Copy)]
pub(super) struct Runs {
    /// The first run.
    pub from: Address,
    /// From one run to the next.
    pub from_stride: usize,
    /// Where the first goes.
    pub to: Address,
    /// How many there are.
    pub outer: usize,
    /// Of one run.
    pub length: usize,
}

/// The largest unit that divides all of these.
fn unit(addresses: [Address; 2], sizes: &[usize]) -> usize {
    let starts = addresses.map(|address| match address {
        Address::Fixed(start) | Address::Scratch(start) => start as usize,
    });
    let whole = |unit: &usize| starts.iter().chain(sizes).all(|size| size.is_multiple_of(*unit));
    [16, 8, 4].into_iter().find(whole).unwrap_or(2)
}

/// Moves runs to places that are so many bytes apart.
fn copy(builder: &mut Builder<'_>, runs: Runs, to_stride: usize) -> Result<(), CudaError> {
    let Runs { from, from_stride, to, outer, length } = runs;
    if outer == 1 || (length == from_stride && length == to_stride) {
        builder.call(Call::Copy(to, from, outer * length));
        return Ok(());
    }
    let unit = unit([from, to], &[from_stride, to_stride, length]);
    let (length, name) = (length / unit, format!("copy_runs_{unit}"));
    let sizes = [from_stride / unit, to_stride / unit, outer, length].map(Argument::from);
    let arguments = [from.into(), sizes[0], to.into(), sizes[1], sizes[2], sizes[3]];
    builder.launch_each(&name, outer * length, &arguments)
}

/// Moves runs into longer ones of `size` bytes, with zeros before and after.
pub(super) fn pad(builder: &mut Builder<'_>, runs: Runs, before: usize, size: usize) -> Result<(), CudaError> {
    let Runs { from, from_stride, to, outer, length } = runs;
    let unit = unit([from, to], &[from_stride, before, size, length]);
    let sizes = [from_stride, size, before, length].map(|bytes| Argument::from(bytes / unit));
    let arguments = [from.into(), sizes[0], to.into(), sizes[1], sizes[2], outer.into(), sizes[3]];
    builder.launch_each(&format!("pad_runs_{unit}"), outer * (size / unit), &arguments)
}

/// Dim i of the result is dim `order[i]` of a tensor of this shape.
pub(in crate::device::cuda) fn permute(
    builder: &mut Builder<'_>,
    from: Address,
    shape: &[usize],
    order: &[usize],
    to: Address,
    element_bytes: usize,
) -> Result<(), CudaError> {
    let elements: usize = shape.iter().product();
    let mut dims = merge(shape, order);
    let matrices = match dims[..] {
        [] | [(_, 1)] => {
            if from != to {
                builder.call(Call::Copy(to, from, elements * element_bytes));
            }
            return Ok(());
        }
        [(columns, 1), (rows, _)] => Some((1, rows, columns)),
        [(batch, stride), (columns, 1), (rows, _)] if stride == rows * columns => Some((batch, rows, columns)),
        _ => None,
    };
    if let Some((batch, rows, columns)) = matrices {
        let tiles = batch * rows.div_ceil(32) * columns.div_ceil(32);
        let blocks = tiles.min(builder.cuda().multiprocessors() * 32);
        let arguments = [from.into(), to.into(), batch.into(), rows.into(), columns.into()];
        return builder.launch(&format!("transpose_{element_bytes}"), [blocks, 1, 1], BLOCK, &arguments);
    }
    // A last dim that stays last is moved in larger units.
    let mut unit_bytes = element_bytes;
    if let Some((size, 1)) = dims.last_mut() {
        unit_bytes = unit([from, to], &[*size * element_bytes]).max(element_bytes);
        let factor = unit_bytes / element_bytes;
        *size /= factor;
        let (_, outer) = dims.split_last_mut().expect("there is a last dim");
        outer.iter_mut().for_each(|(_, stride)| *stride /= factor);
    }
    let mut sizes_and_strides = [[1; DIMS_MAX], [0; DIMS_MAX]];
    for (slot, (size, stride)) in (DIMS_MAX - dims.len()..).zip(dims) {
        (sizes_and_strides[0][slot], sizes_and_strides[1][slot]) = (size, stride);
    }
    let units = elements * element_bytes / unit_bytes;
    let mut arguments = vec![from.into(), to.into(), Argument::from(units)];
    arguments.extend(sizes_and_strides.as_flattened().iter().map(|&size| Argument::from(size)));
    builder.launch_each(&format!("permute_{unit_bytes}"), units, &arguments)
}

/// The dims of the result as (size, distance in the source), without those of size 1, and with those in one that stay
/// neighbours.
fn merge(shape: &[usize], order: &[usize]) -> Vec<(usize, usize)> {
    let stride = |dim: usize| shape[dim + 1..].iter().product::<usize>();
    let mut dims: Vec<(usize, usize)> = Vec::with_capacity(order.len());
    for &dim in order.iter().filter(|&&dim| shape[dim] > 1) {
        let (size, distance) = (shape[dim], stride(dim));
        match dims.last_mut() {
            Some(last) if last.1 == size * distance => *last = (last.0 * size, distance),
            _ => dims.push((size, distance)),
        }
    }
    dims
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_dim_and_ones_fall_out() {
        assert_eq!(merge(&[3, 3, 64, 128], &[3, 0, 1, 2]), [(128, 1), (576, 128)]);
        assert_eq!(merge(&[8, 7, 7, 64], &[0, 3, 1, 2]), [(8, 3136), (64, 1), (49, 64)]);
        assert_eq!(merge(&[4, 1, 5], &[1, 0, 2]), [(20, 1)]);
        assert_eq!(merge(&[2, 3, 4, 8], &[0, 2, 1, 3]), [(2, 96), (4, 8), (3, 32), (8, 1)]);
        assert_eq!(merge(&[1, 1], &[1, 0]), []);
    }

    #[test]
    fn units_divide_addresses_and_sizes() {
        let fixed = [Address::Fixed(256), Address::Scratch(64)];
        assert_eq!(unit(fixed, &[32, 48]), 16);
        assert_eq!(unit(fixed, &[32, 24]), 8);
        assert_eq!(unit([Address::Fixed(258), Address::Fixed(0)], &[32]), 2);
    }
}
