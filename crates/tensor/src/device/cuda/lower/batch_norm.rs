//! Batch normalisation: how rows and channels are shared among blocks. The passes are in `kernels/batch_norm.cu`.

use super::super::CudaError;
use super::super::program::{Address, Argument, At, Builder, Tensor};
use crate::dtype::DType;
use crate::op::{BatchNorm, BatchNormGrad, Op, Rectifier, ReluMask};

/// Threads of a block.
const THREADS: u32 = 256;
/// And of one that adds up what blocks have found, for 32 channels.
const COLLECTING: u32 = 1024;
/// Rows that a thread takes at least, if there are enough: fewer blocks leave less to add up.
const ROWS_MIN: usize = 4;

/// Appends the calls of a node.
pub(super) fn batch_norm(builder: &mut Builder<'_>, at: &At<'_>) -> Result<(), CudaError> {
    match at.node().op {
        Op::BatchNorm(norm) => train(builder, at, norm),
        Op::BatchNormInference(norm) => apply(builder, at, norm, [at.input(2).address, at.input(3).address], true),
        Op::BatchNormAgain(norm) => apply(builder, at, norm, [at.input(2).address, at.input(3).address], false),
        Op::BatchNormGrad(norm) => gradient(builder, at, norm),
        _ => unreachable!("only batch normalisation comes here"),
    }
}

/// How a matrix of rows and channels is cut.
struct Cut {
    rows: usize,
    channels: usize,
    /// Packs of channels that a block works on.
    tile: usize,
    grid: [usize; 3],
    name: String,
}

impl Cut {
    /// For a kernel whose name begins and ends like this, with the type between.
    fn new(builder: &mut Builder<'_>, x: &Tensor<'_>, (begin, end): (&str, &str)) -> Result<Self, CudaError> {
        let (channels, rows) = (x.shape.last(), x.elements() / x.shape.last());
        let width = if x.dtype == DType::Bf16 { 8 } else { 4 };
        let wide = channels.is_multiple_of(width);
        let name = format!("{begin}_{}{}{end}", x.suffix(), if wide { "_wide" } else { "" });
        let packs = channels / if wide { width } else { 1 };
        let tile = packs.next_power_of_two().min(32);
        let tiles = packs.div_ceil(tile);
        let lanes = THREADS as usize / tile;
        // All blocks run at the same time, so that none is left for a second round.
        let most = (rows / (lanes * ROWS_MIN)).max(1);
        let blocks = (builder.blocks_at_once(&name, THREADS)? / tiles).clamp(1, most);
        Ok(Self { rows, channels, tile, grid: [blocks, tiles, 1], name })
    }

    /// The last arguments of every kernel.
    fn arguments(&self) -> [Argument; 3] {
        [self.rows.into(), (self.channels as i32).into(), (self.tile as i32).into()]
    }

    /// Room for two sums per block and channel.
    fn partial_bytes(&self) -> usize {
        self.grid[0] * 2 * self.channels * DType::F32.bytes()
    }
}

const NOTHING: Address = Address::Fixed(0);

fn kind(rectifier: Rectifier) -> Argument {
    Argument::Int(match rectifier {
        Rectifier::None => 0,
        Rectifier::Relu => 1,
        Rectifier::Relu6 => 2,
    })
}

/// The first pass over x: two sums for each block and channel, and where they are.
fn sums(builder: &mut Builder<'_>, x: &Tensor<'_>) -> Result<(Cut, Address), CudaError> {
    let cut = Cut::new(builder, x, ("batch_norm_sums", ""))?;
    let partial = builder.scratch(cut.partial_bytes());
    let mut arguments = vec![x.address.into(), partial.into()];
    arguments.extend(cut.arguments());
    builder.launch(&cut.name, cut.grid, THREADS, &arguments)?;
    Ok((cut, partial))
}

/// The mean and the variance of every channel, for whoever normalises `x` later.
pub(super) fn moments(builder: &mut Builder<'_>, x: &Tensor<'_>, to: [Address; 2]) -> Result<(), CudaError> {
    let (cut, partial) = sums(builder, x)?;
    let mut arguments = vec![partial.into(), (cut.grid[0] as i32).into(), x.address.into(), cut.rows.into()];
    arguments.extend([Argument::from(cut.channels as i32), to[0].into(), to[1].into()]);
    let blocks = [cut.channels.div_ceil(32), 1, 1];
    builder.launch(&format!("batch_norm_moments_{}", x.suffix()), blocks, COLLECTING, &arguments)
}

fn train(builder: &mut Builder<'_>, at: &At<'_>, norm: BatchNorm) -> Result<(), CudaError> {
    let (x, mean, spread) = (at.input(0), at.output(1).address, at.output(2).address);
    let (channels, rows) = (x.shape.last(), x.elements() / x.shape.last());
    let mut end: Vec<Argument> = vec![rows.into(), (channels as i32).into(), norm.epsilon.into(), norm.momentum.into()];
    end.extend([mean, spread, at.input(2).address, at.input(3).address].map(Argument::from));
    if norm.moments {
        let given = [0, 1].map(|index| at.input(norm.moments_at() + index).address);
        let arguments = [&given.map(Argument::from)[..], &end].concat();
        builder.launch("batch_norm_given", [channels.div_ceil(THREADS as usize), 1, 1], THREADS, &arguments)?;
    } else {
        let (cut, partial) = sums(builder, &x)?;
        let begin = [partial.into(), (cut.grid[0] as i32).into(), x.address.into()];
        let (name, blocks) = (format!("batch_norm_statistics_{}", x.suffix()), [channels.div_ceil(32), 1, 1]);
        builder.launch(&name, blocks, COLLECTING, &[&begin[..], &end].concat())?;
    }
    apply(builder, at, norm, [mean, spread], false)
}

fn apply(
    builder: &mut Builder<'_>,
    at: &At<'_>,
    norm: BatchNorm,
    [mean, spread]: [Address; 2],
    is_variance: bool,
) -> Result<(), CudaError> {
    let x = at.input(0);
    let cut = Cut::new(builder, &x, ("batch_norm_apply", ""))?;
    let gamma = if norm.scale { at.input(4).address } else { NOTHING };
    let added = if norm.residual { at.input(norm.inputs_fixed()).address } else { NOTHING };
    let mut arguments = vec![
        x.address.into(),
        added.into(),
        at.output(0).address.into(),
        at.gate().unwrap_or(NOTHING).into(),
        mean.into(),
        spread.into(),
        i32::from(is_variance).into(),
        norm.epsilon.into(),
        gamma.into(),
        at.input(1).address.into(),
        kind(norm.rectifier),
    ];
    arguments.extend(cut.arguments());
    builder.launch(&cut.name, cut.grid, THREADS, &arguments)
}

fn gradient(builder: &mut Builder<'_>, at: &At<'_>, norm: BatchNormGrad) -> Result<(), CudaError> {
    // Where dy is a sum that was not computed, its two parts are read instead.
    let (dy, more) = at.summands().map_or_else(|| (at.input(0), NOTHING), |[dy, more]| (dy, more.address));
    let (x, last) = (at.input(1), at.inputs() - 1);
    let (mask, beta, y) = match (norm.mask, at.gate()) {
        (ReluMask::None, _) => ("_0", NOTHING, NOTHING),
        (ReluMask::FromInput, _) => ("_1", at.input(last).address, NOTHING),
        (ReluMask::FromOutput, None) => ("_2", NOTHING, at.input(last).address),
        (ReluMask::FromOutput, Some(gate)) => ("_3", NOTHING, gate),
    };
    let cut = Cut::new(builder, &x, ("batch_norm_grad_sums", mask))?;
    let partial = builder.scratch(cut.partial_bytes());
    let (mean, spread) = (at.input(2).address, at.input(3).address);
    let gamma = if norm.scale { at.input(4).address } else { NOTHING };
    let scaled = usize::from(norm.scale);
    let dz = if norm.residual { at.output(2 + scaled).address } else { NOTHING };
    let mut arguments: Vec<Argument> =
        [dy.address, more, x.address, y, dz, mean, spread, gamma, beta].map(Argument::from).into();
    arguments.extend([kind(norm.rectifier), partial.into()]);
    arguments.extend(cut.arguments());
    builder.launch(&cut.name, cut.grid, THREADS, &arguments)?;
    let dbeta = at.output(1).address;
    let dgamma = if norm.scale { at.output(2).address } else { builder.scratch(cut.channels * DType::F32.bytes()) };
    totals(builder, &cut, partial, [dbeta, dgamma])?;
    // Once it was given out, what the ReLU let pass is read instead of dy.
    let (dz, y, mask) = if norm.residual { (dz, NOTHING, "_0") } else { (dy.address, y, mask) };
    let cut = Cut::new(builder, &x, ("batch_norm_grad_apply", mask))?;
    let dx = at.output(0).address;
    let mut arguments: Vec<Argument> =
        [dz, x.address, y, dx, mean, spread, gamma, beta, dbeta, dgamma].map(Argument::from).into();
    arguments.push(kind(norm.rectifier));
    arguments.extend(cut.arguments());
    builder.launch(&cut.name, cut.grid, THREADS, &arguments)
}

/// Adds up both sums of every channel.
fn totals(
    builder: &mut Builder<'_>,
    cut: &Cut,
    partial: Address,
    [first, second]: [Address; 2],
) -> Result<(), CudaError> {
    let arguments =
        [partial.into(), (cut.grid[0] as i32).into(), (cut.channels as i32).into(), first.into(), second.into()];
    builder.launch("batch_norm_grad_totals", [cut.channels.div_ceil(32), 1, 1], COLLECTING, &arguments)
}

/// The gradient of ReLU and, in the same pass, its sum over all dims but the last: the gradient of a bias.
pub(in crate::device::cuda) fn relu_gradient(
    builder: &mut Builder<'_>,
    at: &At<'_>,
    bias: Address,
) -> Result<(), CudaError> {
    let (dy, y, dz) = (at.input(0), at.input(1), at.output(0));
    let cut = Cut::new(builder, &dz, ("relu_grad_sums", ""))?;
    let partial = builder.scratch(cut.partial_bytes());
    let nothing = builder.scratch(cut.channels * DType::F32.bytes());
    let mut arguments: Vec<Argument> = [dy.address, y.address, dz.address, partial].map(Argument::from).into();
    arguments.extend(cut.arguments());
    builder.launch(&cut.name, cut.grid, THREADS, &arguments)?;
    totals(builder, &cut, partial, [bias, nothing])
}
