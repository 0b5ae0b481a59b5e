//! Operands and how they are copied into panels.
//!
//! A panel is small, contiguous and in the order in which the tile loop reads it. Operands are whatever can fill one: a
//! matrix with strides here, patches of an image and transposed kernels in the convolutions.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::isa::Isa;
use super::super::simd::{Simd, Vectorised, is_f32};
use super::Matrix;
pub(crate) use super::kernel::Layout;
use crate::bf16::Bf16;
use crate::buffer::cast;
use crate::dtype::{DType, Float};

/// What a panel's words hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Words {
    /// The numbers.
    Plain,
    /// The numbers rounded to bf16.
    Rounded,
}

impl Words {
    /// The word of a number.
    #[inline(always)]
    pub fn of<E: Float>(self, value: E) -> f32 {
        match (E::DTYPE, self) {
            (DType::F32, Self::Rounded) => Bf16::from_f32(value.to_f32()).to_f32(),
            _ => value.to_f32(),
        }
    }

    /// The words of numbers side by side.
    #[inline(always)]
    pub fn copy<E: Float>(self, source: &[E], target: &mut [f32]) {
        for (target, &source) in target.iter_mut().zip(source) {
            *target = self.of(source);
        }
    }
}

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

    /// Copies a block to `panel`: element (row, depth) goes to `row · stride + depth`, or for [`Layout::AlongRows`] to
    /// `depth · stride + row`, both counted from the block's corner.
    fn pack(&self, how: How, batch: usize, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32], stride: usize);

    /// The memory that packing the block will read.
    fn ahead(&self, _batch: usize, _rows: Range<usize>, _depth: Range<usize>) -> Ahead {
        Ahead::NOTHING
    }
}

/// A right operand: depth × columns.
pub(crate) trait Right: Sync {
    /// As [`Left::dtype`].
    fn dtype(&self) -> DType;

    /// Copies a block to `panel`: element (depth, column) goes to `depth · width + column`, zeros beyond the last column.
    fn pack(&self, how: How, batch: usize, depth: Range<usize>, columns: Range<usize>, panel: &mut [f32], width: usize);

    /// As [`Left::ahead`].
    fn ahead(&self, _batch: usize, _depth: Range<usize>, _columns: Range<usize>) -> Ahead {
        Ahead::NOTHING
    }
}

/// Memory that will be read soon: `lines` runs of `run` bytes, `stride` apart. Tiles ask for it piece by piece while they compute,
/// one cache line per depth step, so that it arrives without ever filling the queue of misses.
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

    /// Where tile `tile` of `tiles` begins to ask, and by how much it advances in each of its `steps` depth steps.
    pub fn share(&self, tile: usize, tiles: usize, steps: usize) -> Option<(*const u8, usize)> {
        const LINE: usize = 64;
        if self.length() == 0 || steps == 0 {
            None
        } else if self.stride == self.run {
            // One piece: cut it among the tiles.
            let length = self.length();
            Some((self.start.wrapping_add(length * tile / tiles), length / (tiles * steps)))
        } else if tile < self.run.div_ceil(LINE) && 2 * self.lines > steps {
            // A tile walks down one column of cache lines. With fewer lines than steps it would walk far beyond the last.
            Some((self.start.wrapping_add(tile * LINE), self.stride * self.lines.div_ceil(steps)))
        } else {
            None
        }
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
        let (stride, run) = (stride * size_of::<E>(), run.start * size_of::<E>()..run.end * size_of::<E>());
        Ahead { start, lines: lines.len(), stride, run: run.len() }
    }
}

impl<E: Float> Left for Strided<'_, E> {
    fn dtype(&self) -> DType {
        E::DTYPE
    }

    fn ahead(&self, batch: usize, rows: Range<usize>, depth: Range<usize>) -> Ahead {
        self.ahead(batch, rows, depth)
    }

    fn layout(&self) -> Layout {
        if self.matrix.row_stride == 1 && self.matrix.column_stride != 1 {
            Layout::AlongRows
        } else {
            Layout::AlongDepth
        }
    }

    fn pack(&self, how: How, batch: usize, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32], stride: usize) {
        let (data, Matrix { row_stride, column_stride, .. }) = (self.batch(batch), self.matrix);
        match self.layout() {
            Layout::AlongRows => {
                for (line, step) in panel.chunks_mut(stride).zip(depth) {
                    how.words.copy(&data[step * column_stride + rows.start..][..rows.len()], line);
                }
            }
            Layout::AlongDepth if column_stride == 1 => {
                for (line, row) in panel.chunks_mut(stride).zip(rows) {
                    how.words.copy(&data[row * row_stride + depth.start..][..depth.len()], line);
                }
            }
            Layout::AlongDepth => {
                for (line, row) in panel.chunks_mut(stride).zip(rows) {
                    for (value, step) in line.iter_mut().zip(depth.clone()) {
                        *value = how.words.of(data[row * row_stride + step * column_stride]);
                    }
                }
            }
        }
    }
}

impl<E: Float> Right for Strided<'_, E> {
    fn dtype(&self) -> DType {
        E::DTYPE
    }

    fn ahead(&self, batch: usize, depth: Range<usize>, columns: Range<usize>) -> Ahead {
        self.ahead(batch, depth, columns)
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
            pack_natural(how, data, row_stride, depth, columns, panel, width);
        } else if row_stride == 1 {
            let source = &data[columns.start * column_stride + depth.start..];
            pack_transposed(how, source, column_stride, depth.len(), columns.len(), panel, width);
        } else {
            for (line, step) in panel.chunks_exact_mut(width).zip(depth) {
                line.fill(0.0);
                for (value, column) in line.iter_mut().zip(columns.clone()) {
                    *value = how.words.of(data[step * row_stride + column * column_stride]);
                }
            }
        }
    }
}

/// Packs a right operand whose columns are contiguous.
fn pack_natural<E: Float>(
    how: How,
    data: &[E],
    stride: usize,
    depth: Range<usize>,
    columns: Range<usize>,
    panel: &mut [f32],
    width: usize,
) {
    let count = columns.len();
    for (line, step) in panel.chunks_exact_mut(width).zip(depth) {
        let source = &data[step * stride + columns.start..][..count];
        if let (Ok(source), Ok(line)) = (<&[E; 32]>::try_from(source), <&mut [f32; 32]>::try_from(&mut *line)) {
            how.words.copy(source, line);
        } else {
            how.words.copy(source, &mut line[..count]);
            line[count..].fill(0.0);
        }
    }
}

/// Packs a right operand whose depth is contiguous: `columns` runs of `depth` floats, `stride` apart in `source`.
pub(crate) fn pack_transposed<E: Float>(
    how: How,
    source: &[E],
    stride: usize,
    depth: usize,
    columns: usize,
    panel: &mut [f32],
    width: usize,
) {
    if depth == 0 || columns == 0 {
        return;
    }
    assert!(source.len() > (columns - 1) * stride + depth - 1 && panel.len() >= depth * width && columns <= width);
    if let (DType::F32, Words::Plain) = (E::DTYPE, how.words) {
        return how.isa.run(Transpose { source: cast(source), stride, depth, columns, panel, width });
    }
    for (step, line) in panel.chunks_exact_mut(width).take(depth).enumerate() {
        line.fill(0.0);
        for (value, column) in line.iter_mut().zip(0..columns) {
            *value = how.words.of(source[column * stride + step]);
        }
    }
}

struct Transpose<'a> {
    source: &'a [f32],
    stride: usize,
    depth: usize,
    columns: usize,
    panel: &'a mut [f32],
    width: usize,
}

impl Vectorised for Transpose<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { source, stride, depth, columns, panel, width } = self;
        let (whole_depth, whole_columns) = (depth / S::LANES * S::LANES, columns / S::LANES * S::LANES);
        for column in (0..whole_columns).step_by(S::LANES) {
            for step in (0..whole_depth).step_by(S::LANES) {
                // SAFETY: both blocks lie inside their slices, by the assertion of `pack_transposed`.
                unsafe {
                    let from = source.as_ptr().add(column * stride + step);
                    S::transpose(from, stride, panel.as_mut_ptr().add(step * width + column), width);
                }
            }
            for step in whole_depth..depth {
                for lane in column..column + S::LANES {
                    panel[step * width + lane] = source[lane * stride + step];
                }
            }
        }
        if whole_columns < width {
            for step in 0..depth {
                for column in whole_columns..columns {
                    panel[step * width + column] = source[column * stride + step];
                }
                panel[step * width + columns..(step + 1) * width].fill(0.0);
            }
        }
    }
}

/// Copies the first `target.len()` numbers. Runs are often short (a tap of a few channels), so this is not a call of `memcpy`.
///
/// # Safety
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn copy<S: Simd, E: Float>(words: Words, source: &[E], target: &mut [f32]) {
    if is_f32::<E>() && words == Words::Rounded {
        return words.copy(&source[..target.len()], target);
    }
    let (source, length) = (&source[..target.len()], target.len());
    let mut at = 0;
    // SAFETY: both slices have `length` numbers.
    unsafe {
        while at + S::LANES <= length {
            S::store(target.as_mut_ptr().add(at), S::read(source.as_ptr().add(at)));
            at += S::LANES;
        }
        if at < length {
            let rest = S::read_first(source.as_ptr().add(at), length - at);
            S::store_first(target.as_mut_ptr().add(at), rest, length - at);
        }
    }
}
