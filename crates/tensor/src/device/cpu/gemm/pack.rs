//! Operands and how they are copied into panels.
//!
//! A panel is small, contiguous and in the order in which the tile loop reads it. Operands are whatever can fill one: a
//! matrix with strides here, patches of an image and transposed kernels in the convolutions. The copies are in `lines.rs`.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::isa::Isa;
use super::Matrix;
pub(crate) use super::kernel::{Layout, Words};
pub(crate) use super::lines::{Grid, Line, copy_words, pack_transposed, scatter, word};
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

    /// Copies a block to panels of `width` columns, one behind the other.
    fn pack_panels(
        &self,
        how: How,
        batch: usize,
        depth: Range<usize>,
        columns: Range<usize>,
        panels: &mut [f32],
        width: usize,
    ) {
        let size = depth.len().div_ceil(how.words.numbers()) * width;
        for (panel, start) in panels.chunks_exact_mut(size.max(1)).zip(columns.clone().step_by(width)) {
            self.pack(how, batch, depth.clone(), start..(start + width).min(columns.end), panel, width);
        }
    }

    /// Where the block's first word lies and the distance between depth steps in words, if the operand itself is as good as panels.
    fn in_place(
        &self,
        _words: Words,
        _batch: usize,
        _depth: Range<usize>,
        _columns: Range<usize>,
    ) -> Option<(*const f32, usize)> {
        None
    }

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
    pub gap: Option<Gap>,
}

/// More than the stride lies between some lines: after the next `first` of them, and then after every `every`, so many bytes more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gap {
    pub first: usize,
    pub every: usize,
    pub bytes: usize,
}

impl Ahead {
    /// Nothing worth asking for.
    pub const NOTHING: Self = Self { start: std::ptr::null(), lines: 0, stride: 0, run: 0, gap: None };

    /// Bytes.
    fn length(&self) -> usize {
        self.lines * self.run
    }
}

/// What the tiles of a block ask for, one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    left: Cursor,
    right: Cursor,
    /// How many of the tiles ask for the left operand; the rest ask for the right one.
    for_left: usize,
}

impl Plan {
    /// Shares `left` and `right` out among `tiles` tiles of `steps` depth steps.
    pub fn new(left: Ahead, right: Ahead, tiles: usize, steps: usize) -> Self {
        let (for_left, bytes) = (left.length(), left.length() + right.length());
        let for_left = if right.length() == 0 { tiles } else { tiles * for_left / bytes };
        let (left, right) = (Cursor::new(left, for_left, steps), Cursor::new(right, tiles - for_left, steps));
        Self { left, right, for_left }
    }

    /// What the next tile asks for.
    pub fn next(&mut self, asked: &mut Asked) {
        asked.count = 0;
        if self.for_left > 0 {
            self.for_left -= 1;
            self.left.next(asked);
        } else {
            self.right.next(asked);
        }
    }
}

/// How far some memory has been asked for.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    memory: Ahead,
    /// Lines for each tile; one that is cut is asked for in pieces of so many bytes.
    take: usize,
    piece: usize,
    /// Bytes for each depth step.
    pace: usize,
    /// Where in its line the next piece begins.
    offset: usize,
}

impl Cursor {
    fn new(mut memory: Ahead, tiles: usize, steps: usize) -> Self {
        if memory.stride == memory.run && memory.gap.is_none() {
            (memory.run, memory.lines) = (memory.length(), 1);
        }
        if memory.length() == 0 || tiles == 0 {
            return Self { memory: Ahead::NOTHING, take: 0, piece: 0, pace: 0, offset: 0 };
        }
        let (take, piece) = if memory.lines >= tiles {
            (memory.lines.div_ceil(tiles).min(Asked::MOST), memory.run)
        } else {
            (1, memory.run.div_ceil(tiles / memory.lines))
        };
        Self { memory, take, piece, pace: piece.div_ceil((steps / take).max(1)), offset: 0 }
    }

    fn next(&mut self, asked: &mut Asked) {
        for _ in 0..self.take.min(self.memory.lines) {
            asked.pieces[asked.count] = (self.memory.start.wrapping_add(self.offset), self.pace);
            asked.count += 1;
            self.offset += self.piece;
            if self.offset >= self.memory.run {
                self.offset = 0;
                self.memory.lines -= 1;
                self.memory.start = self.memory.start.wrapping_add(self.memory.stride);
                if let Some(gap) = &mut self.memory.gap {
                    gap.first -= 1;
                    if gap.first == 0 {
                        gap.first = gap.every;
                        self.memory.start = self.memory.start.wrapping_add(gap.bytes);
                    }
                }
            }
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
        let (stride, run) = (stride * size_of::<E>(), run.len() * size_of::<E>());
        Ahead { start, lines: lines.len(), stride, run, gap: None }
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
        let Matrix { row_stride, column_stride, .. } = self.matrix;
        let numbers = words.numbers();
        let same = matches!((E::DTYPE, words), (DType::F32, Words::Plain) | (DType::Bf16, Words::Pairs));
        let (stride, most) = match Left::layout(self) {
            Layout::AlongDepth if column_stride == 1 => (row_stride, ROWS_APART),
            Layout::AlongRows if numbers == 1 => (column_stride, STEPS_APART),
            _ => return None,
        };
        let whole = stride.is_multiple_of(numbers) && depth.len().is_multiple_of(numbers);
        if !same || !whole || apart(stride * size_of::<E>()) > most || rows.is_empty() || depth.is_empty() {
            return None;
        }
        let data = self.batch(batch);
        let last = (rows.end - 1) * row_stride + (depth.end - 1) * column_stride;
        assert!(last < data.len(), "a row lies outside the matrix");
        let first = rows.start * row_stride + depth.start * column_stride;
        Some((data[first..].as_ptr().cast(), stride / numbers))
    }

    fn ahead(&self, batch: usize, rows: Range<usize>, depth: Range<usize>) -> Ahead {
        self.ahead(batch, rows, depth)
    }
}

/// Lines of memory a multiple of this many bytes apart share the sets of a first-level cache: rows that a tile reads together, again
/// and again, would drive each other out, ...
const ROWS_APART: usize = 1024;

/// ... and here those of a second-level one: a block of steps would fill the few sets it falls into.
pub(super) const STEPS_APART: usize = 2048;

/// The largest power of two of which a distance is a multiple.
pub(super) fn apart(bytes: usize) -> usize {
    1 << bytes.trailing_zeros().min(usize::BITS - 1)
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

    fn pack_panels(
        &self,
        how: How,
        batch: usize,
        depth: Range<usize>,
        columns: Range<usize>,
        panels: &mut [f32],
        width: usize,
    ) {
        let Matrix { row_stride, column_stride, .. } = self.matrix;
        let size = depth.len().div_ceil(how.words.numbers()) * width;
        if column_stride == 1 && size > 0 {
            // Line after line, for the memory's sake.
            let source = &self.batch(batch)[depth.start * row_stride + columns.start..];
            let grid = Grid { height: width, stride: width, size };
            return pack_lines(how, source, row_stride, depth.len(), columns.len(), panels, grid);
        }
        for (panel, start) in panels.chunks_exact_mut(size.max(1)).zip(columns.clone().step_by(width)) {
            Right::pack(self, how, batch, depth.clone(), start..(start + width).min(columns.end), panel, width);
        }
    }

    fn in_place(
        &self,
        words: Words,
        batch: usize,
        depth: Range<usize>,
        columns: Range<usize>,
    ) -> Option<(*const f32, usize)> {
        let Matrix { row_stride, column_stride, .. } = self.matrix;
        let same = E::DTYPE == DType::F32 && words == Words::Plain;
        if !same || column_stride != 1 || depth.is_empty() || columns.is_empty() {
            return None;
        }
        let data = self.batch(batch);
        assert!((depth.end - 1) * row_stride + columns.end <= data.len(), "a row lies outside the matrix");
        Some((data[depth.start * row_stride + columns.start..].as_ptr().cast(), row_stride))
    }

    fn ahead(&self, batch: usize, depth: Range<usize>, columns: Range<usize>) -> Ahead {
        self.ahead(batch, depth, columns)
    }
}
