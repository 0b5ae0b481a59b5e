//! Batch normalisation: how rows and channels are shared among blocks. The passes are in `kernels/batch_norm.cu`.

use super::super::CudaError;
use super::super::program::{Address, Argument, At, Builder, Statistics, Tensor};
use crate::dtype::DType;
use crate::op::{BatchNorm, BatchNormGrad, Op, Rectifier, ReluMask};

/// Threads of a block.
const THREADS: u32 = 256;
/// Packs of channels that a block works on at most: of 16 bytes each; wide tiles are for large matrices, and for packs of one channel. Narrow
/// tiles leave fewer sums to every block of the second pass; a matrix that is larger than the GPU's cache is read faster by wide ones (355
/// against 388 µs for 411 MB on an H200).
const TILE: usize = 8;
const TILE_WIDE: usize = 32;
/// Bytes of a matrix from which on tiles are wide.
const LARGE: usize = 128 << 20;
/// Blocks of a tile in a first pass, on each multiprocessor: every block of the second adds up what they have found.
const FIRST: usize = 2;
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
    packs: usize,
    /// Packs of channels that a block works on.
    tile: usize,
    large: bool,
    /// Whether its kernels are made ready while what is ahead of them ends. For all matrices it cost resnet50 0.7% of a step on an H200 and
    /// gained resnet20 2.6%, so large ones do without.
    early: bool,
    grid: [usize; 3],
    /// The ending of the names of kernels, and the kernel's name.
    kind: String,
    name: String,
}

impl Cut {
    /// For a kernel whose name begins and ends like this, with the type between.
    fn new(builder: &mut Builder<'_>, x: &Tensor<'_>, (begin, end): (&str, &str)) -> Result<Self, CudaError> {
        let (channels, rows) = (x.shape.last(), x.elements() / x.shape.last());
        let width = if x.dtype == DType::Bf16 { 8 } else { 4 };
        let wide = channels.is_multiple_of(width);
        let kind = format!("{}{}", x.suffix(), if wide { "_wide" } else { "" });
        let name = format!("{begin}_{kind}{end}");
        let packs = channels / if wide { width } else { 1 };
        let large = wide && packs > TILE && x.bytes() > LARGE;
        let tile = packs.next_power_of_two().min(if large || !wide { TILE_WIDE } else { TILE });
        let tiles = packs.div_ceil(tile);
        let lanes = THREADS as usize / tile;
        // All blocks run at the same time, so that none is left for a second round.
        let most = (rows / (lanes * ROWS_MIN)).max(1);
        let blocks = (builder.blocks_at_once(&name, THREADS)? / tiles).clamp(1, most);
        let early = x.bytes() <= LARGE;
        Ok(Self { rows, channels, tile, packs, large, early, grid: [blocks, tiles, 1], kind, name })
    }

    /// For a first pass, whose blocks leave sums.
    fn first(builder: &mut Builder<'_>, x: &Tensor<'_>, name: (&str, &str)) -> Result<Self, CudaError> {
        let mut cut = Self::new(builder, x, name)?;
        if !cut.large {
            cut.grid[0] = cut.grid[0].min(FIRST * builder.cuda().multiprocessors());
        }
        Ok(cut)
    }

    /// The last arguments of every kernel.
    fn arguments(&self) -> [Argument; 3] {
        [self.rows.into(), (self.channels as i32).into(), (self.tile as i32).into()]
    }

    /// Room for two sums per block and channel, and for a pivot per channel.
    fn partial_bytes(&self) -> usize {
        (self.grid[0] * 2 + 1) * self.channels * DType::F32.bytes()
    }

    /// Appends a kernel that adds up what this one's blocks have found: one block for each 16 bytes of channels, or for eight of them.
    fn totals(
        &self,
        builder: &mut Builder<'_>,
        name: &str,
        partial: Address,
        results: &[Argument],
    ) -> Result<(), CudaError> {
        let tile = if self.packs == self.channels { self.packs.next_power_of_two().min(TILE) } else { 1 };
        let mut arguments: Vec<Argument> = vec![partial.into(), (self.grid[0] as i32).into()];
        arguments.extend(results);
        arguments.extend([self.rows.into(), Argument::from(self.channels as i32), (tile as i32).into()]);
        let grid = [1, self.packs.div_ceil(tile), 1];
        self.launch_as(builder, &format!("{name}_{}", self.kind), grid, &arguments)
    }

    /// Appends the kernel.
    fn launch(&self, builder: &mut Builder<'_>, arguments: &[Argument]) -> Result<(), CudaError> {
        self.launch_as(builder, &self.name, self.grid, arguments)
    }

    fn launch_as(
        &self,
        builder: &mut Builder<'_>,
        name: &str,
        grid: [usize; 3],
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        builder.launch(name, grid, THREADS, arguments)?;
        if self.early {
            builder.allow_early(name);
        }
        Ok(())
    }

    /// What the second pass is told of this first one: where sums stand, and of how many blocks. Sums of x have a pivot.
    fn found(
        &self,
        builder: &mut Builder<'_>,
        (partial, pivoted): (Address, bool),
    ) -> Result<[Argument; 2], CudaError> {
        if !self.large {
            return Ok([partial.into(), (self.grid[0] as i32).into()]);
        }
        let sums = builder.scratch(3 * self.channels * DType::F32.bytes());
        self.totals(builder, "batch_norm_totals", partial, &[sums.into(), i32::from(pivoted).into()])?;
        Ok([sums.into(), 1.into()])
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
    let cut = Cut::first(builder, x, ("batch_norm_sums", ""))?;
    let partial = builder.scratch(cut.partial_bytes());
    let mut arguments = vec![x.address.into(), partial.into()];
    arguments.extend(cut.arguments());
    cut.launch(builder, &arguments)?;
    Ok((cut, partial))
}

/// The mean and the variance of every channel, for whoever normalises `x` later.
pub(super) fn moments(builder: &mut Builder<'_>, x: &Tensor<'_>, to: [Address; 2]) -> Result<(), CudaError> {
    let (first, partial) = sums(builder, x)?;
    first.totals(builder, "batch_norm_moments", partial, &to.map(Argument::from))
}

fn train(builder: &mut Builder<'_>, at: &At<'_>, norm: BatchNorm) -> Result<(), CudaError> {
    let (x, mean, spread) = (at.input(0), at.output(1).address, at.output(2).address);
    let numbers = [norm.epsilon, norm.momentum].map(Argument::from);
    let statistics = [mean, spread, at.input(2).address, at.input(3).address].map(Argument::from);
    if let Some(shared) = at.statistics(x.shape.last()) {
        return train_shared(builder, at, norm, shared);
    }
    if norm.moments {
        let (channels, rows) = (x.shape.last(), x.elements() / x.shape.last());
        let given = [0, 1].map(|index| at.input(norm.moments_at() + index).address);
        let mut arguments: Vec<Argument> = given.map(Argument::from).into();
        arguments.extend([rows.into(), Argument::from(channels as i32)]);
        arguments.extend(numbers.into_iter().chain(statistics));
        builder.launch("batch_norm_given", [channels.div_ceil(THREADS as usize), 1, 1], THREADS, &arguments)?;
        return apply(builder, at, norm, [mean, spread], false);
    }
    let (first, partial) = sums(builder, &x)?;
    let found = first.found(builder, (partial, true))?;
    let cut = Cut::new(builder, &x, ("batch_norm_train", ""))?;
    let (added, gamma) = added_and_gamma(at, norm);
    let (y, gate) = (at.output(0).address, at.gate().unwrap_or(NOTHING));
    let mut arguments: Vec<Argument> = [x.address, added, y, gate].map(Argument::from).into();
    arguments.extend(found.into_iter().chain(numbers).chain(statistics));
    arguments.extend([gamma.into(), at.input(1).address.into(), kind(norm.rectifier)]);
    arguments.extend(cut.arguments());
    cut.launch(builder, &arguments)
}

/// Statistics over the rows of all replicas: two stops, at which what is added up stands where [`Statistics`]
/// says. See `kernels/shared_norm.cu`.
fn train_shared(builder: &mut Builder<'_>, at: &At<'_>, norm: BatchNorm, shared: Statistics) -> Result<(), CudaError> {
    if norm.moments {
        return Err(CudaError("statistics that a convolution gives are not added up with other replicas'".into()));
    }
    let (x, mean, spread) = (at.input(0), at.output(1).address, at.output(2).address);
    let (first, partial) = sums(builder, &x)?;
    let totals = builder.scratch(3 * first.channels * DType::F32.bytes());
    first.totals(builder, "batch_norm_totals", partial, &[totals.into(), 1.into()])?;
    let [sums, squares, moments] = [shared.sums[0], shared.sums[1], shared.moments].map(Address::Fixed);
    let (rows, channels) = (Argument::from(first.rows), Argument::from(first.channels as i32));
    let each = |builder: &mut Builder<'_>, name: &str, arguments: &[Argument]| {
        builder.launch(name, [first.channels.div_ceil(THREADS as usize), 1, 1], THREADS, arguments)
    };
    each(builder, "share_sums", &[totals.into(), rows, channels, moments.into(), sums.into()])?;
    builder.stop();
    each(builder, "share_squares", &[sums.into(), moments.into(), rows, channels, mean.into(), squares.into()])?;
    builder.stop();
    let [epsilon, momentum] = [norm.epsilon, norm.momentum].map(Argument::from);
    let mut arguments = vec![sums.into(), squares.into(), channels, epsilon, momentum];
    arguments.extend([mean, spread, at.input(2).address, at.input(3).address].map(Argument::from));
    each(builder, "share_statistics", &arguments)?;
    apply(builder, at, norm, [mean, spread], false)
}

/// What is added before the ReLU, and what multiplies; nothing where there is none.
fn added_and_gamma(at: &At<'_>, norm: BatchNorm) -> (Address, Address) {
    let added = if norm.residual { at.input(norm.inputs_fixed()).address } else { NOTHING };
    (added, if norm.scale { at.input(4).address } else { NOTHING })
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
    let (added, gamma) = added_and_gamma(at, norm);
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
    cut.launch(builder, &arguments)
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
    let first = Cut::first(builder, &x, ("batch_norm_grad_sums", mask))?;
    let partial = builder.scratch(first.partial_bytes());
    let (mean, spread) = (at.input(2).address, at.input(3).address);
    let gamma = if norm.scale { at.input(4).address } else { NOTHING };
    let scaled = usize::from(norm.scale);
    let dz = if norm.residual { at.output(2 + scaled).address } else { NOTHING };
    let mut arguments: Vec<Argument> =
        [dy.address, more, x.address, y, dz, mean, spread, gamma, beta].map(Argument::from).into();
    arguments.extend([kind(norm.rectifier), partial.into()]);
    arguments.extend(first.arguments());
    first.launch(builder, &arguments)?;
    let channel_bytes = first.channels * DType::F32.bytes();
    let dgamma = if norm.scale { at.output(2).address } else { builder.scratch(channel_bytes) };
    let given = [at.output(1).address, dgamma];
    let ([sums, blocks], [dbeta, dgamma]) = match at.statistics(first.channels) {
        None => (first.found(builder, (partial, false))?, given),
        // What the second pass gives out besides dx are then sums over all replicas, which nobody wants.
        Some(shared) => {
            let found = gradient_shared(builder, (&first, partial), (spread, given), shared)?;
            (found, [(); 2].map(|()| builder.scratch(channel_bytes)))
        }
    };
    // Once it was given out, what the ReLU let pass is read instead of dy.
    let (dz, y, mask) = if norm.residual { (dz, NOTHING, "_0") } else { (dy.address, y, mask) };
    let cut = Cut::new(builder, &x, ("batch_norm_grad_apply", mask))?;
    let dx = at.output(0).address;
    let mut arguments: Vec<Argument> =
        [dz, x.address, y, dx, mean, spread, gamma, beta, dbeta, dgamma].map(Argument::from).into();
    arguments.extend([kind(norm.rectifier), sums, blocks]);
    arguments.extend(cut.arguments());
    cut.launch(builder, &arguments)
}

/// What the second pass of a gradient is told, where sums are those of all replicas; the gradients of offset
/// and factor, which are this replica's own, are given out here. One stop.
fn gradient_shared(
    builder: &mut Builder<'_>,
    (first, partial): (&Cut, Address),
    (spread, [dbeta, dgamma]): (Address, [Address; 2]),
    shared: Statistics,
) -> Result<[Argument; 2], CudaError> {
    let [own, all] = [(); 2].map(|()| builder.scratch(2 * first.channels * DType::F32.bytes()));
    first.totals(builder, "batch_norm_totals", partial, &[own.into(), 0.into()])?;
    let (sums, rows) = (Address::Fixed(shared.sums[0]), Argument::from(first.rows));
    let (channels, blocks) = (Argument::from(first.channels as i32), first.channels.div_ceil(THREADS as usize));
    let arguments = [own.into(), spread.into(), rows, channels, dbeta.into(), dgamma.into(), sums.into()];
    builder.launch("share_gradient_sums", [blocks, 1, 1], THREADS, &arguments)?;
    builder.stop();
    let arguments = [sums.into(), spread.into(), rows, channels, all.into()];
    builder.launch("share_gradient_totals", [blocks, 1, 1], THREADS, &arguments)?;
    Ok([all.into(), 1.into()])
}

/// The gradient of ReLU and, in the same pass, its sum over all dims but the last: the gradient of a bias.
pub(in crate::device::cuda) fn relu_gradient(
    builder: &mut Builder<'_>,
    at: &At<'_>,
    bias: Address,
) -> Result<(), CudaError> {
    let (dy, y, dz) = (at.input(0), at.input(1), at.output(0));
    let cut = Cut::first(builder, &dz, ("relu_grad_sums", ""))?;
    let partial = builder.scratch(cut.partial_bytes());
    let mut arguments: Vec<Argument> = [dy.address, y.address, dz.address, partial].map(Argument::from).into();
    arguments.extend(cut.arguments());
    cut.launch(builder, &arguments)?;
    cut.totals(builder, "first_totals", partial, &[bias.into()])
}
