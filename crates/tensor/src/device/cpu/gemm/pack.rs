//! Operands and how they are copied into panels.
//!
//! A panel is small, contiguous and in the order in which the tile loop reads it. Operands are whatever can fill one: a
//! matrix with strides here, patches of an image and transposed kernels in the convolutions.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::isa::Isa;
use super::super::simd::{Simd, Vectorised};
use super::Matrix;
pub(crate) use super::kernel::Layout;

/// A left operand: rows × depth.
pub(crate) trait Left: Sync {
    /// The layout in which it is cheapest to pack.
    fn layout(&self) -> Layout;

    /// Copies a block to `panel`: element (row, depth) goes to `row · stride + depth`, or for [`Layout::AlongRows`] to
    /// `depth · stride + row`, both counted from the block's corner.
    fn pack(&self, isa: Isa, batch: usize, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32], stride: usize);

    /// The memory that packing the block will read.
    fn ahead(&self, _batch: usize, _rows: Range<usize>, _depth: Range<usize>) -> Ahead {
        Ahead::NOTHING
    }
}

/// A right operand: depth × columns.
pub(crate) trait Right: Sync {
    /// Copies a block to `panel`: element (depth, column) goes to `depth · width + column`, zeros beyond the last column.
    fn pack(&self, isa: Isa, batch: usize, depth: Range<usize>, columns: Range<usize>, panel: &mut [f32], width: usize);

    /// As [`Left::ahead`].
    fn ahead(&self, _batch: usize, _depth: Range<usize>, _columns: Range<usize>) -> Ahead {
        Ahead::NOTHING
    }
}

/// Memory that will be read soon: `lines` runs of `run` floats, `stride` apart. Tiles ask for it piece by piece while they compute,
/// one cache line per depth step, so that it arrives without ever filling the queue of misses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub start: *const f32,
    pub lines: usize,
    pub stride: usize,
    pub run: usize,
}

impl Ahead {
    /// Nothing worth asking for.
    pub const NOTHING: Self = Self { start: std::ptr::null(), lines: 0, stride: 0, run: 0 };

    /// Floats.
    pub fn length(&self) -> usize {
        self.lines * self.run
    }

    /// Where tile `tile` of `tiles` begins to ask, and by how much it advances in each of its `steps` depth steps.
    pub fn share(&self, tile: usize, tiles: usize, steps: usize) -> Option<(*const f32, usize)> {
        const LINE: usize = 16;
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
pub(crate) struct Strided<'a> {
    pub matrix: Matrix<'a>,
    pub batch_stride: usize,
}

impl Strided<'_> {
    fn batch(&self, batch: usize) -> &[f32] {
        &self.matrix.data[batch * self.batch_stride..]
    }

    fn ahead(&self, batch: usize, rows: Range<usize>, columns: Range<usize>) -> Ahead {
        let Matrix { row_stride, column_stride, .. } = self.matrix;
        let (lines, stride, run) = match (row_stride, column_stride) {
            (_, 1) => (rows, row_stride, columns),
            (1, _) => (columns, column_stride, rows),
            _ => return Ahead::NOTHING,
        };
        let start = self.batch(batch).as_ptr().wrapping_add(lines.start * stride + run.start);
        Ahead { start, lines: lines.len(), stride, run: run.len() }
    }
}

impl Left for Strided<'_> {
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

    fn pack(&self, _isa: Isa, batch: usize, rows: Range<usize>, depth: Range<usize>, panel: &mut [f32], stride: usize) {
        let (data, Matrix { row_stride, column_stride, .. }) = (self.batch(batch), self.matrix);
        match self.layout() {
            Layout::AlongRows => {
                for (line, step) in panel.chunks_mut(stride).zip(depth) {
                    line[..rows.len()].copy_from_slice(&data[step * column_stride + rows.start..][..rows.len()]);
                }
            }
            Layout::AlongDepth if column_stride == 1 => {
                for (line, row) in panel.chunks_mut(stride).zip(rows) {
                    line[..depth.len()].copy_from_slice(&data[row * row_stride + depth.start..][..depth.len()]);
                }
            }
            Layout::AlongDepth => {
                for (line, row) in panel.chunks_mut(stride).zip(rows) {
                    for (value, step) in line.iter_mut().zip(depth.clone()) {
                        *value = data[row * row_stride + step * column_stride];
                    }
                }
            }
        }
    }
}

impl Right for Strided<'_> {
    fn ahead(&self, batch: usize, depth: Range<usize>, columns: Range<usize>) -> Ahead {
        self.ahead(batch, depth, columns)
    }

    fn pack(
        &self,
        isa: Isa,
        batch: usize,
        depth: Range<usize>,
        columns: Range<usize>,
        panel: &mut [f32],
        width: usize,
    ) {
        let (data, Matrix { row_stride, column_stride, .. }) = (self.batch(batch), self.matrix);
        if column_stride == 1 {
            pack_natural(data, row_stride, depth, columns, panel, width);
        } else if row_stride == 1 {
            let source = &data[columns.start * column_stride + depth.start..];
            pack_transposed(isa, source, column_stride, depth.len(), columns.len(), panel, width);
        } else {
            for (line, step) in panel.chunks_exact_mut(width).zip(depth) {
                line.fill(0.0);
                for (value, column) in line.iter_mut().zip(columns.clone()) {
                    *value = data[step * row_stride + column * column_stride];
                }
            }
        }
    }
}

/// Packs a right operand whose columns are contiguous.
fn pack_natural(
    data: &[f32],
    stride: usize,
    depth: Range<usize>,
    columns: Range<usize>,
    panel: &mut [f32],
    width: usize,
) {
    let count = columns.len();
    for (line, step) in panel.chunks_exact_mut(width).zip(depth) {
        let source = &data[step * stride + columns.start..][..count];
        if let (Ok(source), Ok(line)) = (<&[f32; 32]>::try_from(source), <&mut [f32; 32]>::try_from(&mut *line)) {
            *line = *source;
        } else {
            line[..count].copy_from_slice(source);
            line[count..].fill(0.0);
        }
    }
}

/// Packs a right operand whose depth is contiguous: `columns` runs of `depth` floats, `stride` apart in `source`.
pub(crate) fn pack_transposed(
    isa: Isa,
    source: &[f32],
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
    isa.run(Transpose { source, stride, depth, columns, panel, width });
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

/// Copies the first `target.len()` floats. Runs are often short (a tap of a few channels), so this is not a call of `memcpy`.
///
/// # Safety
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn copy<S: Simd>(source: &[f32], target: &mut [f32]) {
    let (source, length) = (&source[..target.len()], target.len());
    let mut at = 0;
    // SAFETY: both slices have `length` floats.
    unsafe {
        while at + S::LANES <= length {
            S::store(target.as_mut_ptr().add(at), S::load(source.as_ptr().add(at)));
            at += S::LANES;
        }
        if at < length {
            let rest = S::load_first(source.as_ptr().add(at), length - at);
            S::store_first(target.as_mut_ptr().add(at), rest, length - at);
        }
    }
}
