//! The gradient of the weight: for every position a product of mapped inputs and mapped output gradients over all tiles.
//!
//! Tiles are taken a chunk at a time: first all threads map the chunk's images into a third-level cache, then each task multiplies a block of
//! input × output channels for some positions and adds to its sums. After the last chunk the sums are mapped back to 3×3 weights; where
//! one chunk is all, a task does so itself and its sums stay in its own cache.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::super::context::Context;
use super::super::super::gemm::kernel::{self, Layout, ROWS_MAX, Tile, Words};
use super::super::super::isa::Isa;
use super::super::super::pool::SendPointer;
use super::super::super::scratch::{Buffers, Need};
use super::super::super::simd::{Simd, Vectorised};
use super::super::ConvShape;
use super::transform::{Input, Map, OutputGradient, WeightGradient, map_pair, map_tile};
use super::{PATCH, POSITIONS, TILE, Tiles, words};
use crate::dtype::Float;

/// Mapped images of a chunk: a share of a third-level cache.
const CHUNK_BYTES: usize = 20 << 20;

/// Most tiles of a chunk: with more, the panels of a product fall out of the first-level cache.
const CHUNK_TILES: usize = 128;

/// Input and output channels of a task.
const ROWS: usize = 32;
const COLUMNS: usize = 64;

/// Tiles mapped by one task: an even number.
const MAP_TILES: usize = 8;

/// dw from x and dy.
pub(in super::super) fn grad_weight<E: Float>(
    context: &mut Context<'_>,
    shape: &ConvShape,
    x: &[E],
    dy: &[E],
    dw: &mut [f32],
) {
    assert!(context.isa.available(), "this machine has no {:?}", context.isa);
    let run =
        Run { cut: Cut::new::<E>(context.isa, context.pool.threads(), shape), tiles: Tiles::forward(shape), x, dy };
    let cut = run.cut;
    let lines = POSITIONS * cut.lines(cut.chunk);
    let (inputs, outputs) = (lines * cut.input_stride(), lines * cut.padded());
    let zeros = shape.x[3].max(shape.y[3]).next_multiple_of(16);
    let at_once = cut.chunk == run.tiles.count && cut.groups == 1;
    let (own, all) = (POSITIONS * ROWS * (COLUMNS + 16), POSITIONS * cut.inputs * cut.sum_stride());
    let (all, own) = if at_once { (0, own) } else { (all, 0) };
    let need = Need { shared: inputs + outputs, partial: zeros + all, worker: own };
    let Buffers { shared, partial, workers } = context.scratch.take(context.pool.threads(), need);
    let (zeros, sums) = partial.split_at_mut(zeros);
    zeros.fill(0.0);
    let sums =
        Sums { base: SendPointer(sums.as_mut_ptr()), row: 0, column: 0, rows: cut.inputs, stride: cut.sum_stride() };
    let result = Target { base: SendPointer(dw.as_mut_ptr()), length: dw.len() };
    for first in (0..run.tiles.count).step_by(cut.chunk) {
        let tiles = first..(first + cut.chunk).min(run.tiles.count);
        let base = SendPointer(shared.as_mut_ptr());
        context.pool.run(tiles.len().div_ceil(MAP_TILES), |task, _| {
            let part = task * MAP_TILES..((task + 1) * MAP_TILES).min(tiles.len());
            cut.isa.run(MapImages { run: &run, first, part, chunk: tiles.len(), zeros, mapped: base, inputs });
        });
        let (mapped_x, mapped_dy) = shared.split_at(inputs);
        context.pool.run(cut.tasks(), |task, worker| {
            let (group, block) = (task % cut.groups, task / cut.groups);
            let (rows, columns) = cut.block(block);
            let sums = if at_once {
                // SAFETY: the pool runs one task per worker at a time.
                let base = SendPointer(unsafe { workers.buffer(worker) }.as_mut_ptr());
                Sums { base, row: rows.start, column: columns.start, rows: ROWS, stride: COLUMNS + 16 }
            } else {
                sums
            };
            Part { cut: &cut, group, block, tiles: tiles.len(), first: first == 0, sums }.multiply(mapped_x, mapped_dy);
            if at_once {
                cut.isa.run(MapWeights { cut: &cut, block, sums, result });
            }
        });
    }
    if !at_once {
        context.pool.run(cut.row_blocks() * cut.column_blocks(), |block, _| {
            cut.isa.run(MapWeights { cut: &cut, block, sums, result });
        });
    }
}

/// Sums of mapped weights, `[position][row][column]`, from some input and output channel on.
#[derive(Clone, Copy)]
struct Sums {
    base: SendPointer<f32>,
    row: usize,
    column: usize,
    rows: usize,
    stride: usize,
}

impl Sums {
    /// Where the sums of an input and an output channel begin.
    fn at(&self, position: usize, row: usize, column: usize) -> *mut f32 {
        self.base.get().wrapping_add((position * self.rows + row - self.row) * self.stride + column - self.column)
    }
}

/// The gradient that is written.
#[derive(Clone, Copy)]
struct Target {
    base: SendPointer<f32>,
    length: usize,
}

#[derive(Clone, Copy, Debug)]
struct Cut {
    isa: Isa,
    words: Words,
    inputs: usize,
    outputs: usize,
    /// Tiles of a chunk.
    chunk: usize,
    /// Shares of the positions, where there are too few channels to give every thread some.
    groups: usize,
}

impl Cut {
    fn new<E: Float>(isa: Isa, threads: usize, shape: &ConvShape) -> Self {
        let (inputs, outputs) = (shape.x[3], shape.y[3]);
        let bytes = POSITIONS * (inputs + outputs) * size_of::<f32>();
        let count = Tiles::forward(shape).count;
        let words = words::<E>(isa);
        let chunk = (CHUNK_BYTES / bytes).clamp(16, CHUNK_TILES) * words.numbers();
        let chunk = count.div_ceil(count.div_ceil(chunk));
        let mut cut = Self { isa, words, inputs, outputs, chunk, groups: 1 };
        let blocks = cut.row_blocks() * cut.column_blocks();
        cut.groups = [1, 2, 4, 9, 18, 36].into_iter().find(|groups| groups * blocks >= 4 * threads).unwrap_or(36);
        cut
    }

    /// Words of so many tiles.
    fn lines(&self, tiles: usize) -> usize {
        tiles.div_ceil(self.words.numbers())
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

struct Run<'a, E> {
    cut: Cut,
    tiles: Tiles,
    x: &'a [E],
    dy: &'a [E],
}

/// Maps tiles `part` of a chunk: x to `[position][tile][channel]`, dy to `[position][panel][tile][column]`; a word may hold two tiles.
struct MapImages<'a, E> {
    run: &'a Run<'a, E>,
    /// The chunk's first tile, and how many it has.
    first: usize,
    chunk: usize,
    part: Range<usize>,
    zeros: &'a [f32],
    /// Mapped inputs, and behind so many floats the mapped gradients; a task writes the rows of its own tiles.
    mapped: SendPointer<f32>,
    inputs: usize,
}

impl<E: Float> Vectorised for MapImages<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { run: Run { cut, tiles, x, dy }, first, chunk, part, zeros, mapped, inputs } = self;
        let (row, padded) = (cut.input_stride(), cut.padded());
        let lines = cut.lines(chunk);
        assert!(part.end <= chunk && chunk <= cut.chunk && inputs >= POSITIONS * lines * row);
        let at = |image: &[E], pixel: Option<usize>, channels: usize| match pixel {
            Some(pixel) => image[pixel * channels..][..channels].as_ptr(),
            None => zeros[..channels].as_ptr().cast::<E>(),
        };
        for tile in part.clone().step_by(cut.words.numbers()) {
            // The last of an odd number has no second tile: nothing but zeros.
            let tiles_here = [Some(tile), (tile + 1 < part.end).then_some(tile + 1)];
            let channels = cut.inputs;
            let patch = tiles_here.map(|tile| {
                let patch = tile.map_or([[None; PATCH]; PATCH], |tile| tiles.patch(first + tile));
                patch.map(|line| line.map(|pixel| at(x, pixel, channels)))
            });
            for channel in (0..channels).step_by(S::LANES) {
                let count = (channels - channel).min(S::LANES);
                // SAFETY: a patch points to whole pixels or to as many zeros; rows are whole vectors.
                unsafe {
                    let to = mapped.get().add(cut.lines(tile) * row + channel);
                    let load =
                        |which: usize| move |i: usize, j: usize| load::<S, E>(patch[which][i][j].add(channel), count);
                    let store = |i: usize, j: usize, word| S::store(to.add((PATCH * i + j) * lines * row), word);
                    map_words::<S, Input, PATCH, PATCH>(cut.words, load(0), load(1), store);
                }
            }
            let channels = cut.outputs;
            let pixels = tiles_here.map(|tile| {
                let pixels = tile.map_or([[None; TILE]; TILE], |tile| tiles.outputs(first + tile));
                pixels.map(|line| line.map(|pixel| at(dy, pixel, channels)))
            });
            for channel in (0..channels).step_by(S::LANES) {
                let count = (channels - channel).min(S::LANES);
                let panel = channel / (2 * S::LANES) * 2 * S::LANES;
                let place = panel * lines + cut.lines(tile) * cut.width(panel) + channel - panel;
                // SAFETY: as above; panels are whole vectors wide.
                unsafe {
                    let to = mapped.get().add(inputs + place);
                    let load =
                        |which: usize| move |i: usize, j: usize| load::<S, E>(pixels[which][i][j].add(channel), count);
                    let store = |i: usize, j: usize, word| S::store(to.add((PATCH * i + j) * lines * padded), word);
                    map_words::<S, OutputGradient, TILE, PATCH>(cut.words, load(0), load(1), store);
                }
            }
        }
    }
}

/// [`map_pair`] of both, or [`map_tile`] of the first.
///
/// # Safety
/// As theirs.
#[inline(always)]
unsafe fn map_words<S: Simd, T: Map<S, N, M>, const N: usize, const M: usize>(
    words: Words,
    low: impl FnMut(usize, usize) -> S::Vector,
    high: impl FnMut(usize, usize) -> S::Vector,
    store: impl FnMut(usize, usize, S::Vector),
) {
    // SAFETY: the caller's promise.
    unsafe {
        if words == Words::Pairs {
            map_pair::<S, T, N, M>(low, high, store);
        } else {
            map_tile::<S, T, N, M>(low, store);
        }
    }
}

/// # Safety
/// The machine has the instructions of `S`; `count` numbers can be read.
#[inline(always)]
unsafe fn load<S: Simd, E: Float>(from: *const E, count: usize) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe { if count == S::LANES { S::read(from) } else { S::read_first(from, count) } }
}

/// One task's products over a chunk.
struct Part<'a> {
    cut: &'a Cut,
    group: usize,
    block: usize,
    tiles: usize,
    first: bool,
    sums: Sums,
}

impl Part<'_> {
    fn multiply(&self, mapped_x: &[f32], mapped_dy: &[f32]) {
        let (cut, lines) = (self.cut, self.cut.lines(self.tiles));
        let (rows, columns) = cut.block(self.block);
        let positions = POSITIONS / cut.groups;
        for position in self.group * positions..(self.group + 1) * positions {
            let left = &mapped_x[position * lines * cut.input_stride()..][..lines * cut.input_stride()];
            let right = &mapped_dy[position * lines * cut.padded()..][..lines * cut.padded()];
            let height = kernel::height(cut.isa, cut.words, cut.outputs);
            for start in columns.clone().step_by(2 * cut.isa.lanes()) {
                let width = cut.width(start);
                for first in rows.clone().step_by(height) {
                    let panel = first..(first + height).min(rows.end);
                    let mut pointers = [std::ptr::null_mut(); ROWS_MAX];
                    for (pointer, row) in pointers.iter_mut().zip(panel.clone()) {
                        *pointer = self.sums.at(position, row, start);
                    }
                    let panel_right = &right[start * lines..][..width * lines];
                    let tile = Tile {
                        left: left[first..].as_ptr(),
                        left_stride: cut.input_stride(),
                        right: panel_right.as_ptr(),
                        right_stride: width,
                        depth: lines,
                        rows: &pointers[..panel.len()],
                        narrow: None,
                        column: 0,
                        columns: width.min(columns.end - start),
                        scale: 1.0,
                        load: !self.first,
                        bias: None,
                        relu: false,
                        moments: None,
                        stream: false,
                        ahead: &[],
                    };
                    let function =
                        kernel::tile(cut.isa, cut.words, panel.len(), width / cut.isa.lanes(), Layout::AlongRows);
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
    block: usize,
    sums: Sums,
    result: Target,
}

impl Vectorised for MapWeights<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { cut, block, sums, result } = self;
        let (rows, columns) = cut.block(block);
        assert!(result.length >= 9 * cut.inputs * cut.outputs);
        let (stride, taps) = (sums.rows * sums.stride, cut.inputs * cut.outputs);
        for row in rows {
            for column in columns.clone().step_by(S::LANES) {
                let count = (columns.end - column).min(S::LANES);
                // SAFETY: rows of sums are whole vectors; each weight is written by one task.
                unsafe {
                    let from = sums.at(0, row, column).cast_const();
                    let to = result.base.get().add(row * cut.outputs + column);
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
