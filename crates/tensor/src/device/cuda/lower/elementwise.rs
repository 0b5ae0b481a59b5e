//! Operations that treat every element by itself, and sums over the leading dims: `kernels/elementwise.cu`.

use crate::device::cuda::CudaError;
use crate::device::cuda::program::{Address, Argument, At, BLOCK, Builder, Call, Tensor, suffix};
use crate::dtype::DType;
use crate::op::Op;
use crate::unary::Unary;

/// Appends the calls of a node.
pub(super) fn elementwise(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    let (x, y) = (at.input(0), at.output(0));
    match &at.node().op {
        Op::Unary(kind) => each(builder, &format!("unary_{}", name(*kind)), &[&x, &y], &[]),
        Op::UnaryGrad(kind) => each(builder, &format!("unary_grad_{}", name(*kind)), &[&x, &at.input(1), &y], &[]),
        op @ (Op::Add | Op::Mul) => {
            let b = at.input(1);
            let kernel = if matches!(op, Op::Add) { "add" } else { "mul" };
            each(builder, kernel, &[&x, &b, &y], &[b.elements().into()])
        }
        Op::Scale(factor) => each(builder, "scale", &[&x, &y], &[(*factor).into()]),
        Op::Cast(_) => cast(builder, x.address, x.dtype, y.address, y.dtype, x.elements()),
        Op::Dropout { within: Some(_), .. } => unreachable!("layers are computed by several parts on CPUs only"),
        Op::Dropout { probability, salt, within: None } => {
            // An element is dropped when its hash is below this.
            let threshold = (f64::from(*probability) * 4_294_967_296.0) as u32;
            let factor = (1.0 / (1.0 - f64::from(*probability))) as f32;
            let rule = [at.pass().into(), (*salt as usize).into(), (threshold as i32).into(), factor.into()];
            each(builder, "dropout", &[&x, &y], &rule)
        }
        Op::SumLeading { suffix } => {
            let columns = suffix.elements();
            sum_leading(builder, x.address, x.dtype, (x.elements() / columns, columns), y.address)
        }
        other => unreachable!("{} does not treat every element by itself", other.name()),
    }
}

const fn name(kind: Unary) -> &'static str {
    match kind {
        Unary::Relu => "relu",
        Unary::Relu6 => "relu6",
        Unary::Gelu => "gelu",
        Unary::GeluTanh => "gelu_tanh",
        Unary::Sigmoid => "sigmoid",
        Unary::Tanh => "tanh",
    }
}

/// Elements in 16 bytes.
pub(super) fn width(dtype: DType) -> usize {
    16 / dtype.bytes()
}

/// A kernel that takes tensors of one type, the number of elements of the first, and more.
fn each(builder: &mut Builder<'_>, kernel: &str, tensors: &[&Tensor<'_>], more: &[Argument]) -> Result<(), CudaError> {
    let (elements, dtype) = (tensors[0].elements(), tensors[0].dtype);
    let mut arguments: Vec<Argument> = tensors.iter().map(|tensor| tensor.address.into()).collect();
    arguments.push(elements.into());
    arguments.extend(more);
    // A thread has two packs in flight.
    builder.launch_each(&format!("{kernel}_{}", suffix(dtype)), elements.div_ceil(2 * width(dtype)), &arguments)
}

/// The same numbers as another type; a copy if it is the same type.
pub(in crate::device::cuda) fn cast(
    builder: &mut Builder<'_>,
    from: Address,
    from_type: DType,
    to: Address,
    to_type: DType,
    elements: usize,
) -> Result<(), CudaError> {
    if from_type == to_type {
        if from != to {
            builder.call(Call::Copy(to, from, elements * from_type.bytes()));
        }
        return Ok(());
    }
    let kernel = format!("cast_{}_{}", suffix(from_type), suffix(to_type));
    builder.launch_each(&kernel, elements.div_ceil(16), &[from.into(), to.into(), elements.into()])
}

/// The sums of the columns of a matrix, in f32.
pub(super) fn sum_leading(
    builder: &mut Builder<'_>,
    x: Address,
    dtype: DType,
    (rows, columns): (usize, usize),
    to: Address,
) -> Result<(), CudaError> {
    column_sums(builder, "sum_leading", dtype, &[x], (rows, columns), &[to])
}

/// Rows that a thread adds, at least, before another block shares the work.
const ROWS_MIN: usize = 8;

/// Sums over rows by `column_sums` of `kernels/elementwise.cu`: as many sums per column as there are results. The kernel
/// takes the addresses, rows and columns, how wide a block stands, room for partial sums, and the results.
pub(super) fn column_sums(
    builder: &mut Builder<'_>,
    kernel: &str,
    dtype: DType,
    addresses: &[Address],
    (rows, columns): (usize, usize),
    results: &[Address],
) -> Result<(), CudaError> {
    let width = if columns.is_multiple_of(width(dtype)) { width(dtype) } else { 1 };
    let across = (columns / width).next_power_of_two().min(32);
    let tiles = columns.div_ceil(across * width).min(1 << 16);
    let chunk_rows = ROWS_MIN * BLOCK as usize / across;
    let chunks_max = (builder.cuda().multiprocessors() * 8).div_ceil(tiles).max(1);
    let chunks = rows.div_ceil(chunk_rows).clamp(1, chunks_max);
    let partial_bytes = chunks * columns * size_of::<f64>();
    let partial = builder.scratch(if chunks > 1 { results.len() * partial_bytes } else { 0 });
    let mut arguments: Vec<Argument> = addresses.iter().map(|&address| address.into()).collect();
    arguments.extend([rows.into(), columns.into(), Argument::Int(across as i32), partial.into()]);
    arguments.extend(results.iter().map(|&result| Argument::from(result)));
    builder.launch(&format!("{kernel}_{}", suffix(dtype)), [tiles, chunks, 1], BLOCK, &arguments)?;
    if chunks == 1 {
        return Ok(());
    }
    for (index, &result) in results.iter().enumerate() {
        let partial = advance(partial, index * partial_bytes);
        let arguments = [partial.into(), chunks.into(), columns.into(), result.into()];
        builder.launch("sum_partials", [columns.div_ceil(32).min(1 << 16), 1, 1], BLOCK, &arguments)?;
    }
    Ok(())
}

/// So many bytes further.
pub(super) fn advance(address: Address, bytes: usize) -> Address {
    match address {
        Address::Fixed(start) => Address::Fixed(start + bytes as u64),
        Address::Scratch(start) => Address::Scratch(start + bytes as u64),
    }
}
