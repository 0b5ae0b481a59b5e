//! The gradient of the weight: for every position a product of mapped inputs and mapped output gradients over all tiles.
//!
//! Tiles are taken a chunk at a time: first all threads map the chunk's images into a third-level cache, then each task multiplies a block of
//! input × output channels for some positions and adds to its sums. After the last chunk the sums are mapped back to 3×3 weights.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::super::context::Context;
use super::super::super::gemm::kernel::{self, DEPTH_MAX, Layout, ROWS_MAX, Tile, Words};
use super::super::super::isa::Isa;
use super::super::super::pool::SendPointer;
use super::super::super::scratch::{Buffers, Need};
use super::super::super::simd::{Simd, Vectorised};
use super::super::ConvShape;
use super::transform::{Input, OutputGradient, WeightGradient, map_tile};
use super::{PATCH, POSITIONS, TILE, Tiles};

/// Mapped images of a chunk: a share of a third-level cache.
const CHUNK_BYTES: usize = 8 << 20;

/// Input and output channels of a task.
const ROWS: usize = 32;
const COLUMNS: usize = 64;

/// Tiles mapped by one task.
const MAP_TILES: usize = 8;

/// dw from x and dy.
pub(in super::super) fn grad_weight(
    context: &mut Context<'_>,
    shape: &ConvShape,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
) {
    assert!(context.isa.available(), "this machine has no {:?}", context.isa);
    let run = Run { cut: Cut::new(context.isa, context.pool.threads(), shape), tiles: Tiles::forward(shape), x, dy };
    let cut = run.cut;
    let (inputs, outputs) = (POSITIONS * cut.chunk * cut.input_stride(), POSITIONS * cut.chunk * cut.padded());
    let zeros = shape.x[3].max(shape.y[3]).next_multiple_of(16);
    let need = Need { shared: inputs + outputs, partial: zeros + POSITIONS * cut.inputs * cut.sum_stride(), worker: 0 };
    let Buffers { shared, partial, .. } = context.scratch.take(context.pool.threads(), need);
    let (zeros, sums) = partial.split_at_mut(zeros);
    zeros.fill(0.0);
    let sums = SendPointer(sums.as_mut_ptr());
    for first in (0..run.tiles.count).step_by(cut.chunk) {
        let tiles = first..(first + cut.chunk).min(run.tiles.count);
        let base = SendPointer(shared.as_mut_ptr());
        context.pool.run(tiles.len().div_ceil(MAP_TILES), |task, _| {
            let part = task * MAP_TILES..((task + 1) * MAP_TILES).min(tiles.len());
            cut.isa.run(MapImages { run: &run, first, part, chunk: tiles.len(), zeros, mapped: base, inputs });
        });
        let (mapped_x, mapped_dy) = shared.split_at(inputs);
        context.pool.run(cut.tasks(), |task, _| {
            let part = Part { cut: &cut, task, tiles: tiles.len(), first: first == 0, sums };
            part.multiply(mapped_x, mapped_dy);
        });
    }
    let target = SendPointer(dw.as_mut_ptr());
    let length = dw.len();
    context.pool.run(cut.row_blocks() * cut.column_blocks(), |task, _| {
        cut.isa.run(MapWeights { cut: &cut, task, sums, target, length });
    });
}

#[derive(Clone, Copy, Debug)]
struct Cut {
    isa: Isa,
    inputs: usize,
    outputs: usize,
    /// Tiles of a chunk.
    chunk: usize,
    /// Shares of the positions, where there are too few channels to give every thread some.
    groups: usize,
}

impl Cut {
    fn new(isa: Isa, threads: usize, shape: &ConvShape) -> Self {
        let (inputs, outputs) = (shape.x[3], shape.y[3]);
        let bytes = POSITIONS * (inputs + outputs) * size_of::<f32>();
        let count = Tiles::forward(shape).count;
        let chunk = (CHUNK_BYTES / bytes).clamp(16, DEPTH_MAX);
        let chunk = count.div_ceil(count.div_ceil(chunk));
        let mut cut = Self { isa, inputs, outputs, chunk, groups: 1 };
        let blocks = cut.row_blocks() * cut.column_blocks();
        cut.groups = [1, 2, 4, 9, 18, 36].into_iter().find(|groups| groups * blocks >= 4 * threads).unwrap_or(36);
        cut
    }

    fn row_blocks(&self) -> usize {
        self.inputs.div_ceil(ROWS)
    }

    fn column_blocks(&self) -> usize {
        self.outputs.div_ceil(COLUMNS)
    }

    fn tasks(&self) -> usize {
        self.groups * self.row_blocks() * self.column_blocks()
    }

    /// Input and output channels of a block.
    fn block(&self, block: usize) -> (Range<usize>, Range<usize>) {
        let (row, column) = (block / self.column_blocks(), block % self.column_blocks());
        (row * ROWS..((row + 1) * ROWS).min(self.inputs), column * COLUMNS..((column + 1) * COLUMNS).min(self.outputs))
    }

    /// Distance between two tiles' mapped inputs: whole vectors, and room for the rows that a tile of the kernel reads beyond the last.
    fn input_stride(&self) -> usize {
        self.inputs.next_multiple_of(16) + 16
    }

    /// Output channels in whole vectors.
    fn padded(&self) -> usize {
        self.outputs.next_multiple_of(self.isa.lanes())
    }

    /// Distance between two rows of sums.
    fn sum_stride(&self) -> usize {
        self.outputs.next_multiple_of(16) + 16
    }

    /// Columns of the panel that starts at `start`.
    fn width(&self, start: usize) -> usize {
        if self.outputs - start > self.isa.lanes() { 2 * self.isa.lanes() } else { self.isa.lanes() }
    }
}

struct Run<'a> {
    cut: Cut,
    tiles: Tiles,
    x: &'a [f32],
    dy: &'a [f32],
}

/// Maps tiles `part` of a chunk: x to `[position][tile][channel]`, dy to `[position][panel][tile][column]`.
struct MapImages<'a> {
    run: &'a Run<'a>,
    /// The chunk's first tile, and how many it has.
    first: usize,
    chunk: usize,
    part: Range<usize>,
    zeros: &'a [f32],
    /// Mapped inputs, and behind so many floats the mapped gradients; a task writes the rows of its own tiles.
    mapped: SendPointer<f32>,
    inputs: usize,
}

impl Vectorised for MapImages<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { run: Run { cut, tiles, x, dy }, first, chunk, part, zeros, mapped, inputs } = self;
        let (row, padded) = (cut.input_stride(), cut.padded());
        assert!(part.end <= chunk && chunk <= cut.chunk && inputs >= POSITIONS * chunk * row);
        for tile in part {
            let channels = cut.inputs;
            let patch = tiles
                .patch(first + tile)
                .map(|line| line.map(|pixel| pixel.map_or(zeros, |pixel| &x[pixel * channels..][..channels]).as_ptr()));
            for channel in (0..channels).step_by(S::LANES) {
                let count = (channels - channel).min(S::LANES);
                // SAFETY: a patch points to whole pixels or to as many zeros; rows are whole vectors.
                unsafe {
                    let to = mapped.get().add(tile * row + channel);
                    let load = |i: usize, j: usize| load::<S>(patch[i][j].add(channel), count);
                    map_tile::<S, Input, PATCH, PATCH>(load, |i, j, value| {
                        S::store(to.add((PATCH * i + j) * chunk * row), value);
                    });
                }
            }
            let channels = cut.outputs;
            let pixels = tiles.outputs(first + tile).map(|line| {
                line.map(|pixel| pixel.map_or(zeros, |pixel| &dy[pixel * channels..][..channels]).as_ptr())
            });
            for channel in (0..channels).step_by(S::LANES) {
                let count = (channels - channel).min(S::LANES);
                let panel = channel / (2 * S::LANES) * 2 * S::LANES;
                let at = panel * chunk + tile * cut.width(panel) + channel - panel;
                // SAFETY: as above; panels are whole vectors wide.
                unsafe {
                    let to = mapped.get().add(inputs + at);
                    let load = |i: usize, j: usize| load::<S>(pixels[i][j].add(channel), count);
                    map_tile::<S, OutputGradient, TILE, PATCH>(load, |i, j, value| {
                        S::store(to.add((PATCH * i + j) * chunk * padded), value);
                    });
                }
            }
        }
    }
}

/// # Safety
/// The machine has the instructions of `S`; `count` floats can be read.
#[inline(always)]
unsafe fn load<S: Simd>(from: *const f32, count: usize) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe { if count == S::LANES { S::load(from) } else { S::load_first(from, count) } }
}

/// One task's products over a chunk.
struct Part<'a> {
    cut: &'a Cut,
    task: usize,
    tiles: usize,
    first: bool,
    sums: SendPointer<f32>,
}

impl Part<'_> {
    fn multiply(&self, mapped_x: &[f32], mapped_dy: &[f32]) {
        let (cut, tiles) = (self.cut, self.tiles);
        let (group, block) = (self.task % cut.groups, self.task / cut.groups);
        let (rows, columns) = cut.block(block);
        let positions = POSITIONS / cut.groups;
        for position in group * positions..(group + 1) * positions {
            let left = &mapped_x[position * tiles * cut.input_stride()..][..tiles * cut.input_stride()];
            let right = &mapped_dy[position * tiles * cut.padded()..][..tiles * cut.padded()];
            let height = kernel::height(cut.isa, cut.outputs);
            for start in columns.clone().step_by(2 * cut.isa.lanes()) {
                let width = cut.width(start);
                for first in rows.clone().step_by(height) {
                    let panel = first..(first + height).min(rows.end);
                    let mut pointers = [std::ptr::null_mut(); ROWS_MAX];
                    for (pointer, row) in pointers.iter_mut().zip(panel.clone()) {
                        let at = (position * cut.inputs + row) * cut.sum_stride() + start;
                        *pointer = self.sums.get().wrapping_add(at);
                    }
                    let panel_right = &right[start * tiles..][..width * tiles];
                    let tile = Tile {
                        left: left[first..].as_ptr(),
                        left_stride: cut.input_stride(),
                        right: panel_right.as_ptr(),
                        right_stride: width,
                        depth: tiles,
                        rows: &pointers[..panel.len()],
                        narrow: None,
                        column: 0,
                        columns: width.min(columns.end - start),
                        scale: 1.0,
                        load: !self.first,
                        bias: None,
                        relu: false,
                        stream: false,
                        ahead: &[],
                    };
                    let function =
                        kernel::tile(cut.isa, Words::Plain, panel.len(), width / cut.isa.lanes(), Layout::AlongRows);
                    // SAFETY: the set is available; a row of mapped inputs has a line to spare for the rows that a tile reads
                    // beyond the last (the last row's lie in the mapped gradients behind); tasks have rows of sums of their own.
                    unsafe { function(&tile) };
                }
            }
        }
    }
}

/// Maps the sums of a block of channels back to weights.
struct MapWeights<'a> {
    cut: &'a Cut,
    task: usize,
    sums: SendPointer<f32>,
    target: SendPointer<f32>,
    length: usize,
}

impl Vectorised for MapWeights<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { cut, task, sums, target, length } = self;
        let (rows, columns) = cut.block(task);
        assert!(length >= 9 * cut.inputs * cut.outputs);
        let (stride, taps) = (cut.inputs * cut.sum_stride(), cut.inputs * cut.outputs);
        for row in rows {
            for column in columns.clone().step_by(S::LANES) {
                let count = (columns.end - column).min(S::LANES);
                // SAFETY: rows of sums are whole vectors; each weight is written by one task.
                unsafe {
                    let from = sums.get().add(row * cut.sum_stride() + column).cast_const();
                    let to = target.get().add(row * cut.outputs + column);
                    let load = |i: usize, j: usize| S::load(from.add((PATCH * i + j) * stride));
                    map_tile::<S, WeightGradient, PATCH, 3>(load, |i, j, value| {
                        let to = to.add((3 * i + j) * taps);
                        if count == S::LANES { S::store(to, value) } else { S::store_first(to, value, count) }
                    });
                }
            }
        }
    }
}
