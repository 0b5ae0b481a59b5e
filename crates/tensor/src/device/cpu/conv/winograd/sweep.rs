//! Forward and the gradient of the input: one sweep over the tiles of an image.
//!
//! Two orders of work. Where many tiles meet small weights, the mapped weights are prepared once and every task takes a few tiles from the
//! image to the result ([`Order::Tiles`]). Where large weights meet few tiles, the tiles of a chunk are mapped once and every
//! task maps the weights of a few columns as it needs them ([`Order::Columns`]): mapped weights are four times as large as the
//! weights, and never reach the memory this way.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::super::context::Context;
use super::super::super::gemm::Epilogue;
use super::super::super::gemm::kernel::{self, DEPTH_MAX, Fence, Layout, ROWS_MAX, Tile, Words};
use super::super::super::isa::Isa;
use super::super::super::moments::{self, Blocks};
use super::super::super::pool::{Pool, SendPointer};
use super::super::super::rows::Lanes;
use super::super::super::scratch::{Buffers, Need};
use super::super::super::simd::{Simd, Vectorised, is_f32};
use super::super::ConvShape;
use super::transform::{Input, Output, map_tile};
use super::weights::{Panels, Weights};
use super::{PATCH, POSITIONS, TILE, Tiles, words};
use crate::dtype::Float;

/// Mapped inputs and sums of one task stay below this: most of a second-level cache.
const TASK_BYTES: usize = 768 << 10;

/// Columns whose sums a task holds at a time.
const COLUMNS: usize = 128;

/// Results from this size on are written past the caches.
const STREAM_BYTES: usize = 16 << 20;

/// Weights of at least this many elements per position are mapped where they are used.
const COLUMNS_ORDER: usize = 128 * 256;

/// Mapped tiles of a chunk, when tasks are columns: a share of a third-level cache.
const CHUNK_BYTES: usize = 8 << 20;

/// Most tiles of a chunk, when tasks are columns.
const CHUNK_TILES: usize = 112;

/// Depth of the weights that a task maps at a time, when tasks are columns.
const OWN_DEPTH: usize = 128;

/// y = x ∗ w, then the epilogue. The answer says whether moments were taken.
pub(in super::super) fn forward<E: Float>(
    context: &mut Context<'_>,
    shape: &ConvShape,
    x: &[E],
    weight: &[f32],
    epilogue: Epilogue<'_>,
    y: &mut [E],
) -> bool {
    let (inputs, outputs) = (shape.x[3], shape.y[3]);
    let weights = Weights { weight, inputs, outputs, turned: false };
    let sweep = Sweep { tiles: Tiles::forward(shape), source: x, weights, depth: inputs, columns: outputs, epilogue };
    sweep.run(context, y);
    epilogue.moments
}

/// dx = dy ∗ w backwards.
pub(in super::super) fn grad_input<E: Float>(
    context: &mut Context<'_>,
    shape: &ConvShape,
    dy: &[E],
    weight: &[f32],
    dx: &mut [E],
) {
    let (inputs, outputs) = (shape.x[3], shape.y[3]);
    let weights = Weights { weight, inputs, outputs, turned: true };
    let (tiles, epilogue) = (Tiles::backward(shape), Epilogue::default());
    Sweep { tiles, source: dy, weights, depth: outputs, columns: inputs, epilogue }.run(context, dx);
}

/// A convolution seen from the side that is written: `depth` channels of `source` become `columns` channels.
struct Sweep<'a, E> {
    tiles: Tiles,
    source: &'a [E],
    weights: Weights<'a>,
    depth: usize,
    columns: usize,
    epilogue: Epilogue<'a>,
}

/// What a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Tiles,
    Columns,
}

/// How a sweep is cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    order: Order,
    isa: Isa,
    words: Words,
    /// Rows of a kernel's tile.
    height: usize,
    depth_block: usize,
    depth_blocks: usize,
    /// Tiles mapped together.
    tiles: usize,
    /// Columns whose sums are held together.
    columns: usize,
}

impl Cut {
    fn new<E: Float>(isa: Isa, threads: usize, sweep: &Sweep<'_, E>) -> Self {
        let Sweep { tiles: Tiles { count, .. }, depth, columns, .. } = *sweep;
        let order = if depth * columns >= COLUMNS_ORDER { Order::Columns } else { Order::Tiles };
        let (width, words) = (2 * isa.lanes(), words::<E>(isa));
        let depth_most = words.numbers() * if order == Order::Tiles { DEPTH_MAX } else { OWN_DEPTH };
        let depth_blocks = depth.div_ceil(depth_most);
        let depth_block = depth.div_ceil(depth_blocks).next_multiple_of(isa.lanes());
        let depth_blocks = depth.div_ceil(depth_block);
        let height = kernel::height(isa, words, columns);
        let bytes = POSITIONS * size_of::<f32>();
        let (columns, most) = match order {
            Order::Tiles => {
                let columns = even(columns, COLUMNS, width);
                let panels = (TASK_BYTES / (bytes * (depth / words.numbers() + columns) * height)).max(1);
                // Two tasks per thread at least, so that the last one to end is not waited for too long.
                let panels = panels.min(count.div_ceil(height).div_ceil(2 * threads)).max(1);
                (columns, panels * height)
            }
            Order::Columns => {
                let panels = (CHUNK_BYTES / (bytes * depth.div_ceil(words.numbers()) * height))
                    .clamp(1, CHUNK_TILES.div_ceil(height).max(1));
                (width.min(columns.next_multiple_of(isa.lanes())), panels * height)
            }
        };
        // Whole panels: their moments do not depend on how many panels a task has.
        Self { order, isa, words, height, depth_block, depth_blocks, tiles: even(count, most, height), columns }
    }

    /// Panels of rows for so many tiles.
    fn panels(&self, tiles: usize) -> usize {
        tiles.div_ceil(self.height)
    }

    /// Distance between the rows of a panel, in words. The extra line keeps them out of one cache set.
    fn row_stride(&self) -> usize {
        (self.depth_block / self.words.numbers()).next_multiple_of(16) + 16
    }

    /// Words of the mapped inputs of one position.
    fn input_stride(&self, tiles: usize) -> usize {
        self.panels(tiles) * self.depth_blocks * self.height * self.row_stride()
    }

    /// Words of so many steps of the depth.
    fn lines(&self, steps: usize) -> usize {
        steps.div_ceil(self.words.numbers())
    }

    /// Where the rows of a panel begin within a position.
    fn panel(&self, panel: usize, block: usize) -> usize {
        (panel * self.depth_blocks + block) * self.height * self.row_stride()
    }

    /// Distance between the sums of two tiles. The extra line keeps them out of one cache set.
    fn sum_stride(&self) -> usize {
        self.columns.next_multiple_of(self.isa.lanes()) + 16
    }

    /// Columns of the panel that starts at `start`.
    fn width(&self, start: usize, columns: usize) -> usize {
        if columns - start > self.isa.lanes() { 2 * self.isa.lanes() } else { self.isa.lanes() }
    }
}

/// The smallest equal blocks of `total` that are multiples of `unit`, with as few of them as blocks of `most` give.
fn even(total: usize, most: usize, unit: usize) -> usize {
    total.div_ceil(total.div_ceil(most).max(1)).next_multiple_of(unit).max(unit)
}

impl<E: Float> Sweep<'_, E> {
    fn run(&self, context: &mut Context<'_>, target: &mut [E]) {
        assert!(context.isa.available(), "this machine has no {:?}", context.isa);
        let cut = Cut::new(context.isa, context.pool.threads(), self);
        let aligned = self.columns.is_multiple_of(cut.isa.lanes()) && (target.as_ptr() as usize).is_multiple_of(64);
        let stream = aligned && is_f32::<E>() && size_of_val(target) >= STREAM_BYTES;
        let mut moments = std::mem::take(&mut context.scratch.moments);
        let blocks = self.epilogue.moments.then(|| {
            let tiles = |panel: usize| panel * cut.height..((panel + 1) * cut.height).min(self.tiles.count);
            let pixels = |panel: usize| tiles(panel).map(|tile| self.tiles.pixels(tile)).sum();
            moments.begin(self.columns, (0..cut.panels(self.tiles.count)).map(pixels))
        });
        let output = Target { base: SendPointer(target.as_mut_ptr()), length: target.len(), stream, moments: blocks };
        match cut.order {
            Order::Tiles => self.by_tiles(context, &cut, output),
            Order::Columns => self.by_columns(context, &cut, output),
        }
        context.scratch.moments = moments;
    }

    fn by_tiles(&self, context: &mut Context<'_>, cut: &Cut, output: Target<E>) {
        let padded = self.columns.next_multiple_of(cut.isa.lanes());
        let inputs = POSITIONS * cut.input_stride(cut.tiles);
        let sums = POSITIONS * cut.tiles * cut.sum_stride();
        let need = Need {
            shared: POSITIONS * cut.lines(self.depth) * padded,
            partial: self.depth.next_multiple_of(16),
            worker: inputs + sums,
        };
        let Buffers { shared, partial, workers } = context.scratch.take(context.pool.threads(), need);
        partial.fill(0.0);
        self.map_weights(context.pool, cut, shared);
        let (weights, zeros) = (&*shared, &*partial);
        let stride = cut.lines(self.depth) * padded;
        context.pool.run(self.tiles.count.div_ceil(cut.tiles), |task, worker| {
            // SAFETY: the pool runs one task per worker at a time.
            let (mapped, sums) = unsafe { workers.buffer(worker) }.split_at_mut(inputs);
            let tiles = task * cut.tiles..((task + 1) * cut.tiles).min(self.tiles.count);
            let input = InputBlock { sweep: self, cut, tiles: tiles.clone(), zeros };
            // SAFETY: the worker's own memory.
            unsafe { input.map(0..cut.panels(tiles.len()), SendPointer(mapped.as_mut_ptr()), mapped.len()) };
            for first in (0..self.columns).step_by(cut.columns) {
                let columns = first..(first + cut.columns).min(self.columns);
                for block in 0..cut.depth_blocks {
                    let steps = self.steps(cut, block);
                    let (offset, lines) = (cut.lines(steps.start) * padded, cut.lines(steps.len()));
                    let weight = |position: usize, start: usize| &weights[position * stride + offset + start * lines..];
                    let part = Part { cut, tiles: tiles.len(), block, lines, columns: columns.clone() };
                    part.multiply(self.columns, mapped, &weight, sums);
                }
                self.finish(cut, tiles.clone(), columns, sums, output);
            }
        });
    }

    fn by_columns(&self, context: &mut Context<'_>, cut: &Cut, output: Target<E>) {
        let inputs = POSITIONS * cut.input_stride(cut.tiles);
        let weights = POSITIONS * cut.lines(cut.depth_block) * cut.columns;
        let need = Need {
            shared: inputs,
            partial: self.depth.next_multiple_of(16),
            worker: weights + POSITIONS * cut.tiles * cut.sum_stride(),
        };
        let Buffers { shared, partial, workers } = context.scratch.take(context.pool.threads(), need);
        partial.fill(0.0);
        let zeros = &*partial;
        for first in (0..self.tiles.count).step_by(cut.tiles) {
            let tiles = first..(first + cut.tiles).min(self.tiles.count);
            let input = InputBlock { sweep: self, cut, tiles: tiles.clone(), zeros };
            let base = SendPointer(shared.as_mut_ptr());
            context.pool.run(cut.panels(tiles.len()), |panel, _| {
                // SAFETY: a task writes the rows of its own panel only.
                unsafe { input.map(panel..panel + 1, base, inputs) };
            });
            let mapped = &*shared;
            context.pool.run(self.columns.div_ceil(cut.columns), |task, worker| {
                // SAFETY: the pool runs one task per worker at a time.
                let (own, sums) = unsafe { workers.buffer(worker) }.split_at_mut(weights);
                let columns = task * cut.columns..((task + 1) * cut.columns).min(self.columns);
                let width = cut.width(columns.start, self.columns);
                for block in 0..cut.depth_blocks {
                    let steps = self.steps(cut, block);
                    let (lines, words) = (cut.lines(steps.len()), cut.words);
                    let stride = lines * width;
                    let (base, length) = (SendPointer(own.as_mut_ptr()), own.len());
                    // SAFETY: the worker's own memory.
                    unsafe {
                        self.weights.map(
                            cut.isa,
                            steps,
                            columns.clone(),
                            Panels { base, offset: 0, length, stride, width, words },
                        );
                    }
                    let part = Part { cut, tiles: tiles.len(), block, lines, columns: columns.clone() };
                    part.multiply(self.columns, mapped, &|position, _| &own[position * stride..], sums);
                }
                self.finish(cut, tiles.clone(), columns, sums, output);
            });
        }
    }

    fn steps(&self, cut: &Cut, block: usize) -> Range<usize> {
        block * cut.depth_block..((block + 1) * cut.depth_block).min(self.depth)
    }

    /// All mapped weights: position after position, in each depth block after depth block, in each panel after panel.
    fn map_weights(&self, pool: &Pool, cut: &Cut, target: &mut [f32]) {
        let padded = self.columns.next_multiple_of(cut.isa.lanes());
        let panels = self.columns.div_ceil(2 * cut.isa.lanes());
        let (length, base) = (target.len(), SendPointer(target.as_mut_ptr()));
        // Depth blocks are cut finer, so that there is work for every thread.
        const FINE: usize = 32;
        let pieces = cut.depth_block.div_ceil(FINE);
        pool.run(cut.depth_blocks * panels * pieces, |task, _| {
            let (piece, task) = (task % pieces, task / pieces);
            let (panel, block) = (task % panels, task / panels);
            let steps = self.steps(cut, block);
            let fine = steps.start + piece * FINE..(steps.start + (piece + 1) * FINE).min(steps.end);
            if fine.is_empty() {
                return;
            }
            let start = panel * 2 * cut.isa.lanes();
            let width = cut.width(start, self.columns);
            let offset = cut.lines(steps.start) * padded
                + start * cut.lines(steps.len())
                + cut.lines(fine.start - steps.start) * width;
            let stride = cut.lines(self.depth) * padded;
            let panels = Panels { base, offset, length, stride, width, words: cut.words };
            // SAFETY: a task writes only its own rows of its own panels.
            unsafe { self.weights.map(cut.isa, fine, start..(start + width).min(self.columns), panels) };
        });
    }

    fn finish(&self, cut: &Cut, tiles: Range<usize>, columns: Range<usize>, sums: &[f32], target: Target<E>) {
        cut.isa.run(MapOutput { sweep: self, cut, tiles, columns, sums, target });
        if target.stream {
            cut.isa.run(Fence);
        }
    }
}

/// The image that is written.
#[derive(Clone, Copy)]
struct Target<E> {
    base: SendPointer<E>,
    length: usize,
    stream: bool,
    /// One for each panel of tiles.
    moments: Option<Blocks>,
}

/// The inputs of some tiles.
struct InputBlock<'a, E> {
    sweep: &'a Sweep<'a, E>,
    cut: &'a Cut,
    tiles: Range<usize>,
    /// At least as many zeros as there are channels, for pixels outside the image.
    zeros: &'a [f32],
}

impl<E: Float> InputBlock<'_, E> {
    /// Maps the tiles of the given panels into `length` floats at `mapped`.
    ///
    /// # Safety
    /// Nobody else touches the rows of these panels.
    unsafe fn map(&self, panels: Range<usize>, mapped: SendPointer<f32>, length: usize) {
        assert!(length >= POSITIONS * self.cut.input_stride(self.tiles.len()));
        self.cut.isa.run(MapInput { input: self, panels, mapped });
    }
}

struct MapInput<'a, E> {
    input: &'a InputBlock<'a, E>,
    panels: Range<usize>,
    mapped: SendPointer<f32>,
}

impl<E: Float> Vectorised for MapInput<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let InputBlock { sweep, cut, tiles, zeros } = self.input;
        let stride = cut.input_stride(tiles.len());
        let first = self.panels.start * cut.height;
        let last = (self.panels.end * cut.height).min(tiles.len());
        for tile in first..last {
            let patch = sweep.tiles.patch(tiles.start + tile).map(|row| {
                row.map(|pixel| match pixel {
                    Some(pixel) => sweep.source[pixel * sweep.depth..][..sweep.depth].as_ptr(),
                    None => zeros[..sweep.depth].as_ptr().cast::<E>(),
                })
            });
            let row = tile % cut.height * cut.row_stride();
            for block in 0..cut.depth_blocks {
                let steps = sweep.steps(cut, block);
                let to = cut.panel(tile / cut.height, block) + row;
                for channel in steps.clone().step_by(S::LANES) {
                    let count = (steps.end - channel).min(S::LANES);
                    // SAFETY: a patch points to whole pixels or to as many zeros; the panel's rows have room for whole vectors.
                    unsafe {
                        let to = self.mapped.get().add(to + (channel - steps.start) / cut.words.numbers());
                        let load = |i: usize, j: usize| {
                            let from = patch[i][j].add(channel);
                            if count == S::LANES { S::read(from) } else { S::read_first(from, count) }
                        };
                        map_tile::<S, Input, PATCH, PATCH>(load, |i, j, value| {
                            let to = to.add((PATCH * i + j) * stride);
                            if cut.words == Words::Pairs {
                                S::store_bf16(to.cast(), value)
                            } else {
                                S::store(to, value)
                            }
                        });
                    }
                }
            }
        }
    }
}

/// The products of one block of the depth.
struct Part<'a> {
    cut: &'a Cut,
    tiles: usize,
    block: usize,
    /// Words of the depth.
    lines: usize,
    columns: Range<usize>,
}

impl Part<'_> {
    /// sums \[+\]= mapped · weights, for every position. `weight(position, column)` is the panel at that column of `total`.
    fn multiply<'w>(&self, total: usize, mapped: &[f32], weight: &dyn Fn(usize, usize) -> &'w [f32], sums: &mut [f32]) {
        let Self { cut, tiles, block, lines, columns } = self;
        let (input_stride, sum_stride) = (cut.input_stride(*tiles), cut.sum_stride());
        assert!(mapped.len() >= POSITIONS * input_stride && sums.len() >= POSITIONS * tiles * sum_stride);
        assert!(columns.len() + 16 <= sum_stride);
        let panels = cut.panels(*tiles);
        for position in 0..POSITIONS {
            for start in columns.clone().step_by(2 * cut.isa.lanes()) {
                let width = cut.width(start, total);
                let right = &weight(position, start)[..lines * width];
                for panel in 0..panels {
                    let rows = panel * cut.height..((panel + 1) * cut.height).min(*tiles);
                    let mut pointers = [std::ptr::null_mut(); ROWS_MAX];
                    for (pointer, row) in pointers.iter_mut().zip(rows.clone()) {
                        let at = (position * tiles + row) * sum_stride + start - columns.start;
                        *pointer = sums.as_mut_ptr().wrapping_add(at);
                    }
                    // The panel after this one, a share for each panel of rows.
                    let share = right.len() / panels;
                    let ahead = right.as_ptr().wrapping_add(right.len() + panel * share);
                    let tile = Tile {
                        left: mapped[position * input_stride + cut.panel(panel, *block)..].as_ptr(),
                        left_stride: cut.row_stride(),
                        right: right.as_ptr(),
                        right_stride: width,
                        depth: *lines,
                        rows: &pointers[..rows.len()],
                        narrow: None,
                        column: 0,
                        columns: width.min(columns.end - start),
                        scale: 1.0,
                        load: *block > 0,
                        bias: None,
                        relu: false,
                        moments: None,
                        stream: false,
                        ahead: &[(ahead.cast(), size_of::<f32>() * (share / lines))],
                    };
                    let function =
                        kernel::tile(cut.isa, cut.words, rows.len(), width / cut.isa.lanes(), Layout::AlongDepth);
                    // SAFETY: the set is available; a panel holds `height` rows, valid or not, and every
                    // row of the sums has room for its columns.
                    unsafe { function(&tile) };
                }
            }
        }
    }
}

struct MapOutput<'a, E> {
    sweep: &'a Sweep<'a, E>,
    cut: &'a Cut,
    tiles: Range<usize>,
    columns: Range<usize>,
    sums: &'a [f32],
    target: Target<E>,
}

impl<E: Float> Vectorised for MapOutput<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { sweep, cut, tiles, columns, sums, target } = self;
        let (stride, position_stride) = (cut.sum_stride(), tiles.len() * cut.sum_stride());
        assert!(sums.len() >= POSITIONS * position_stride && columns.len() <= stride);
        for tile in tiles.clone() {
            let pixels = sweep.tiles.outputs(tile).map(|row| {
                row.map(|pixel| {
                    pixel.map(|pixel| {
                        assert!((pixel + 1) * sweep.columns <= target.length, "a pixel lies outside the result");
                        target.base.get().wrapping_add(pixel * sweep.columns)
                    })
                })
            });
            let moments = target.moments.map(|blocks| blocks.at(tile / cut.height, columns.start));
            let begins = tile.is_multiple_of(cut.height);
            for column in columns.clone().step_by(S::LANES) {
                let count = (columns.end - column).min(S::LANES);
                let lanes = if count == S::LANES { Lanes::All } else { Lanes::First(count) };
                let from = sums[(tile - tiles.start) * stride + column - columns.start..].as_ptr();
                // SAFETY: rows of sums hold whole vectors; a pixel's columns are written by the task that has its tile, and only
                // valid ones.
                unsafe {
                    let bias = match sweep.epilogue.bias {
                        Some(bias) => S::load_first(bias[column..column + count].as_ptr(), count),
                        None => S::splat(0.0),
                    };
                    let at = column - columns.start;
                    let (mut group, mut members) = ([S::splat(0.0); TILE * TILE], 0);
                    let load = |i: usize, j: usize| S::load(from.add((PATCH * i + j) * position_stride));
                    map_tile::<S, Output, PATCH, TILE>(load, |i, j, value| {
                        let Some(pixel) = pixels[i][j] else { return };
                        let value = S::add(value, bias);
                        let value = if sweep.epilogue.relu { S::relu(value) } else { value };
                        if moments.is_some() {
                            group[members] = if is_f32::<E>() { value } else { S::round(value) };
                            members += 1;
                        }
                        let to = pixel.add(column);
                        match (count == S::LANES, target.stream) {
                            (true, true) => S::stream(to.cast(), value),
                            (true, false) => S::write(to, value),
                            (false, _) => S::write_first(to, value, count),
                        }
                    });
                    if let Some(block) = moments {
                        moments::count::<S>(block, at, lanes, begins, &group[..members]);
                    }
                }
            }
        }
    }
}
