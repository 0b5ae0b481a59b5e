//! Operands and how they are copied into panels.
//!
//! A panel is small, contiguous and in the order in which the tile loop reads it. Operands are whatever can fill one: a
//! matrix with strides here, patches of an image and transposed kernels in the convolutions. The copies are in `lines.rs`.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::isa::Isa;
use super::Matrix;
pub(crate) use super::kernel::{Layout, Words};
pub(crate) use super::lines::{Grid, copy_words, pack_transposed, scatter, word};
use super::lines::{copy, pack_lines};
use crate::dtype::{DType, Float};

/// How a panel is filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub isa: Isa,
    pub words: Words,
}

/// A left operand: rows × depth.
pub(crate) trait Left: Sync {
    /// The type of its elements.
    fn dtype(&self) -> DType;

    /// The layout in which it is cheapest to pack.
    fn layout(&self) -> Layout;

    /// Copies a block to `panel`. For [`Layout::AlongDepth`], row after row `grid.stride` words apart; else as [`Grid`] says. The
    /// depth is counted in numbers and begins with a whole word.
    fn pack(&self, how: How, batch: usize, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32], grid: Grid);

    /// Where the block's first word lies and the distance between its rows in words, if the operand itself is as good as a panel
    /// along the depth.
    fn in_place(
        &self,
        _words: Words,
        _batch: usize,
        _rows: Range<usize>,
        _depth: Range<usize>,
    ) -> Option<(*const f32, usize)> {
        None
    }

    /// The memory that packing the block will read.
    fn ahead(&self, _batch: usize, _rows: Range<usize>, _depth: Range<usize>) -> Ahead {
        Ahead::NOTHING
    }
}

/// A right operand: depth × columns.
pub(crate) trait Right: Sync {
    /// As [`Left::dtype`].
    fn dtype(&self) -> DType;

    /// Copies a block to `panel`: the word (depth, column) goes to `depth · width + column`, zeros beyond the last column. The depth
    /// is counted in numbers and begins with a whole word.
    fn pack(&self, how: How, batch: usize, depth: Range<usize>, columns: Range<usize>, panel: &mut [f32], width: usize);

    /// As [`Left::ahead`].
    fn ahead(&self, _batch: usize, _depth: Range<usize>, _columns: Range<usize>) -> Ahead {
        Ahead::NOTHING
    }
}

/// Memory that will be read soon: `lines` runs of `run` bytes, `stride` apart. Tiles ask for it piece by piece while they compute,
/// so that it arrives without ever filling the queue of misses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub start: *const u8,
    pub lines: usize,
    pub stride: usize,
    pub run: usize,
}

impl Ahead {
    /// Nothing worth asking for.
    pub const NOTHING: Self = Self { start: std::ptr::null(), lines: 0, stride: 0, run: 0 };

    /// Bytes.
    pub fn length(&self) -> usize {
        self.lines * self.run
    }

    /// What tile `tile` of `tiles` asks for.
    fn share(mut self, tile: usize, tiles: usize, asked: &mut Asked) {
        if self.stride == self.run {
            (self.run, self.lines) = (self.length(), 1);
        }
        if self.length() == 0 || tile >= tiles {
        } else if self.lines >= tiles {
            for line in self.lines * tile / tiles..self.lines * (tile + 1) / tiles {
                asked.push(self.start.wrapping_add(line * self.stride), self.run);
            }
        } else {
            let pieces = tiles / self.lines;
            let (line, piece) = (tile / pieces, tile % pieces);
            if line < self.lines {
                let (from, to) = (self.run * piece / pieces, self.run * (piece + 1) / pieces);
                asked.push(self.start.wrapping_add(line * self.stride + from), to - from);
            }
        }
    }
}

/// What the tiles of a block ask for, shared out among them by bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub left: Ahead,
    pub right: Ahead,
    pub tiles: usize,
}

impl Plan {
    /// What tile `tile` asks for in `steps` steps of the depth.
    pub fn ask(&self, tile: usize, steps: usize, asked: &mut Asked) {
        asked.count = 0;
        let (left, right) = (self.left.length(), self.right.length());
        if left + right > 0 {
            let for_left = if right == 0 { self.tiles } else { self.tiles * left / (left + right) };
            if tile < for_left {
                self.left.share(tile, for_left, asked);
            } else {
                self.right.share(tile - for_left, self.tiles - for_left, asked);
            }
            asked.pace(steps);
        }
    }
}

/// The pieces that one tile asks for: where each begins, and by how many bytes a depth step advances.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pieces: [(*const u8, usize); Self::MOST],
    count: usize,
}

impl Asked {
    const MOST: usize = 16;

    fn push(&mut self, start: *const u8, bytes: usize) {
        if self.count < Self::MOST {
            self.pieces[self.count] = (start, bytes);
            self.count += 1;
        }
    }

    /// From bytes to bytes per step.
    fn pace(&mut self, steps: usize) {
        let steps = (steps / self.count.max(1)).max(1);
        for (_, bytes) in &mut self.pieces[..self.count] {
            *bytes = bytes.div_ceil(steps);
        }
    }

    pub fn pieces(&self) -> &[(*const u8, usize)] {
        &self.pieces[..self.count]
    }
}

impl Default for Asked {
    fn default() -> Self {
        Self { pieces: [(std::ptr::null(), 0); Self::MOST], count: 0 }
    }
}

/// A batch of matrices a fixed distance apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strided<'a, E> {
    pub matrix: Matrix<'a, E>,
    pub batch_stride: usize,
}

impl<E: Float> Strided<'_, E> {
    fn batch(&self, batch: usize) -> &[E] {
        &self.matrix.data[batch * self.batch_stride..]
    }

    fn ahead(&self, batch: usize, rows: Range<usize>, columns: Range<usize>) -> Ahead {
        let Matrix { row_stride, column_stride, .. } = self.matrix;
        let (lines, stride, run) = match (row_stride, column_stride) {
            (_, 1) => (rows, row_stride, columns),
            (1, _) => (columns, column_stride, rows),
            _ => return Ahead::NOTHING,
        };
        let start = self.batch(batch).as_ptr().wrapping_add(lines.start * stride + run.start).cast();
        Ahead { start, lines: lines.len(), stride: stride * size_of::<E>(), run: run.len() * size_of::<E>() }
    }
}

impl<E: Float> Left for Strided<'_, E> {
    fn dtype(&self) -> DType {
        E::DTYPE
    }

    fn layout(&self) -> Layout {
        if self.matrix.row_stride == 1 && self.matrix.column_stride != 1 {
            Layout::AlongRows
        } else {
            Layout::AlongDepth
        }
    }

    fn pack(&self, how: How, batch: usize, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32], grid: Grid) {
        let (data, Matrix { row_stride, column_stride, .. }) = (self.batch(batch), self.matrix);
        if Left::layout(self) == Layout::AlongRows {
            let source = &data[depth.start * column_stride + rows.start..];
            return pack_lines(how, source, column_stride, depth.len(), rows.len(), panel, grid);
        }
        for (line, row) in panel.chunks_mut(grid.stride).zip(rows) {
            let source = &data[row * row_stride + depth.start * column_stride..];
            if column_stride == 1 {
                copy(how, &source[..depth.len()], line);
            } else {
                for (word_at, value) in line[..depth.len().div_ceil(how.words.numbers())].iter_mut().enumerate() {
                    *value = word(how.words, depth.len(), word_at, |step| source[step * column_stride]);
                }
            }
        }
    }

    fn in_place(
        &self,
        words: Words,
        batch: usize,
        rows: Range<usize>,
        depth: Range<usize>,
    ) -> Option<(*const f32, usize)> {
        // Rows whose lines fall into few sets of a first-level cache would drive each other out.
        const WAY: usize = 4096;
        let Matrix { row_stride, column_stride, .. } = self.matrix;
        let same = matches!((E::DTYPE, words), (DType::F32, Words::Plain) | (DType::Bf16, Words::Pairs));
        let numbers = words.numbers();
        let whole = row_stride.is_multiple_of(numbers) && depth.len().is_multiple_of(numbers);
        let apart = 1 << (row_stride * size_of::<E>()).trailing_zeros().min(12);
        if !same || !whole || column_stride != 1 || 4 * apart > WAY {
            return None;
        }
        let data = self.batch(batch);
        let last = rows.end.checked_sub(1)? * row_stride + depth.end;
        assert!(last <= data.len(), "a row lies outside the matrix");
        Some((data[rows.start * row_stride + depth.start..].as_ptr().cast(), row_stride / numbers))
    }

    fn ahead(&self, batch: usize, rows: Range<usize>, depth: Range<usize>) -> Ahead {
        self.ahead(batch, rows, depth)
    }
}

impl<E: Float> Right for Strided<'_, E> {
    fn dtype(&self) -> DType {
        E::DTYPE
    }

    fn pack(
        &self,
        how: How,
        batch: usize,
        depth: Range<usize>,
        columns: Range<usize>,
        panel: &mut [f32],
        width: usize,
    ) {
        let (data, Matrix { row_stride, column_stride, .. }) = (self.batch(batch), self.matrix);
        if column_stride == 1 {
            let source = &data[depth.start * row_stride + columns.start..];
            pack_lines(how, source, row_stride, depth.len(), columns.len(), panel, Grid::panel(width));
        } else if row_stride == 1 {
            let source = &data[columns.start * column_stride + depth.start..];
            pack_transposed(how, source, column_stride, depth.len(), columns.len(), panel, width);
        } else {
            let source = &data[depth.start * row_stride + columns.start * column_stride..];
            for (word_at, line) in
                panel.chunks_exact_mut(width).take(depth.len().div_ceil(how.words.numbers())).enumerate()
            {
                line.fill(0.0);
                for (column, value) in line[..columns.len()].iter_mut().enumerate() {
                    let at = |step: usize| source[step * row_stride + column * column_stride];
                    *value = word(how.words, depth.len(), word_at, at);
                }
            }
        }
    }

    fn ahead(&self, batch: usize, depth: Range<usize>, columns: Range<usize>) -> Ahead {
        self.ahead(batch, depth, columns)
    }
}
