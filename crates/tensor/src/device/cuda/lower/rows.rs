//! Operations over the last dim: softmax, cross-entropy, layer normalisation, and how good the logits of a batch are:
//! `kernels/rows.cu`.

use super::elementwise::column_sums;
use crate::device::cuda::CudaError;
use crate::device::cuda::program::{Address, Argument, At, BLOCK, Builder};
use crate::dtype::DType;
use crate::op::Op;

/// Appends the calls of a node.
pub(super) fn rows(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    let (x, y) = (at.input(0), at.output(0));
    let size = (x.elements() / x.shape.last(), x.shape.last());
    let suffix = format!("_{}", x.suffix());
    match &at.node().op {
        Op::Softmax { causal } => {
            let arguments =
                [x.address.into(), y.address.into(), size.0.into(), size.1.into(), i32::from(*causal).into()];
            by_teams(builder, "softmax", &suffix, size, &arguments)
        }
        Op::SoftmaxGrad => {
            let saved = at.input(1).address;
            let arguments = [x.address.into(), saved.into(), y.address.into(), size.0.into(), size.1.into()];
            by_teams(builder, "softmax_grad", &suffix, size, &arguments)
        }
        Op::CrossEntropy { smoothing } => {
            let losses = builder.scratch(size.0 * size_of::<f64>());
            let sizes = [size.0.into(), size.1.into(), (*smoothing).into()];
            let arguments = [x.address.into(), at.input(1).address.into(), losses.into(), sizes[0], sizes[1], sizes[2]];
            by_teams(builder, "cross_entropy", "", size, &arguments)?;
            let arguments = [losses.into(), size.0.into(), y.address.into()];
            builder.launch("mean_of_losses", [1, 1, 1], BLOCK, &arguments)
        }
        Op::CrossEntropyGrad { smoothing } => {
            let (logits, targets) = (at.input(1), at.input(2));
            let size = (logits.shape[0], logits.shape[1]);
            let mut arguments: Vec<Argument> =
                [x.address, logits.address, targets.address, y.address].map(Argument::from).to_vec();
            arguments.extend([size.0.into(), size.1.into(), Argument::Float(*smoothing)]);
            by_teams(builder, "cross_entropy_grad", "", size, &arguments)
        }
        Op::LayerNorm { epsilon } => {
            let tensors = [x, at.input(1), at.input(2), y, at.output(1), at.output(2)];
            let mut arguments = tensors.map(|tensor| Argument::from(tensor.address)).to_vec();
            arguments.extend([size.0.into(), size.1.into(), Argument::Float(*epsilon)]);
            by_teams(builder, "layer_norm", &suffix, size, &arguments)
        }
        Op::LayerNormGrad => layer_norm_grad(builder, at, size),
        other => unreachable!("{} does not work on rows", other.name()),
    }
}

/// The sums over rows come first: dx may take the place of dy.
fn layer_norm_grad(builder: &mut Builder<'_>, at: &At<'_>, size: (usize, usize)) -> Result<(), CudaError> {
    let [dy, x, gamma, mean, inverse] = [0, 1, 2, 3, 4].map(|index| at.input(index).address);
    let [dx, dgamma, dbeta] = [0, 1, 2].map(|index| at.output(index).address);
    let dtype: DType = at.input(0).dtype;
    column_sums(builder, "layer_norm_sums", dtype, &[dy, x, mean, inverse], size, &[dgamma, dbeta])?;
    let mut arguments = [dy, x, gamma, mean, inverse, dx].map(Argument::from).to_vec();
    arguments.extend([size.0.into(), Argument::from(size.1)]);
    by_teams(builder, "layer_norm_grad", &format!("_{}", at.input(0).suffix()), size, &arguments)
}

/// The widest row that a warp works on alone.
const WARP_WIDTH_MAX: usize = 1024;
/// Threads of a warp.
const WARP: usize = 32;

/// A kernel whose rows belong to warps or blocks, as their width asks.
fn by_teams(
    builder: &mut Builder<'_>,
    kernel: &str,
    suffix: &str,
    (rows, width): (usize, usize),
    arguments: &[Argument],
) -> Result<(), CudaError> {
    let block = BLOCK as usize;
    // Few rows do not fill the GPU with warps.
    let few = rows < builder.cuda().multiprocessors() * 4 && width > 4 * WARP;
    let team = if width > WARP_WIDTH_MAX || few { block } else { WARP };
    let blocks = rows.div_ceil(block / team).min(builder.cuda().multiprocessors() * 32);
    builder.launch(&format!("{kernel}_{team}{suffix}"), [blocks, 1, 1], BLOCK, arguments)
}

/// Writes three f64: over the first `rows` (a u32 on the GPU) of at most `rows_max` rows of f32 logits, the sum of the
/// cross-entropies, how many have their target (i32) as the largest logit, and how many among the five largest.
pub(in crate::device::cuda) fn tally(
    builder: &mut Builder<'_>,
    logits: Address,
    targets: Address,
    rows: Address,
    (rows_max, classes): (usize, usize),
    to: Address,
) -> Result<(), CudaError> {
    let tallies = builder.scratch(3 * rows_max * size_of::<f64>());
    let sizes = [rows_max, classes].map(Argument::from);
    let arguments = [logits.into(), targets.into(), rows.into(), sizes[0], sizes[1], tallies.into()];
    builder.launch_each("tally_rows", rows_max * WARP, &arguments)?;
    builder.launch("tally_sums", [3, 1, 1], BLOCK, &[tallies.into(), sizes[0], to.into()])
}
