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

    /// Asks the memory for a share of a block that will be packed soon. Only operands read once gain from it.
    fn prefetch(&self, _batch: usize, _rows: Range<usize>, _depth: Range<usize>, _share: Share) {}
}

/// A right operand: depth × columns.
pub(crate) trait Right: Sync {
    /// Copies a block to `panel`: element (depth, column) goes to `depth · width + column`, zeros beyond the last column.
    fn pack(&self, isa: Isa, batch: usize, depth: Range<usize>, columns: Range<usize>, panel: &mut [f32], width: usize);

    /// As [`Left::prefetch`].
    fn prefetch(&self, _batch: usize, _depth: Range<usize>, _columns: Range<usize>, _share: Share) {}
}

/// Part `index` of `count` equal ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub index: usize,
    pub count: usize,
}

impl Share {
    fn of(self, range: &Range<usize>) -> Range<usize> {
        let at = |index: usize| range.start + range.len() * index / self.count;
        at(self.index)..at(self.index + 1)
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

    /// Asks for a share of the block, one line after the other along its contiguous side.
    fn prefetch(&self, batch: usize, rows: &Range<usize>, columns: &Range<usize>, share: Share) {
        let Matrix { row_stride, column_stride, .. } = self.matrix;
        let (lines, stride, run) = match (row_stride, column_stride) {
            (_, 1) => (share.of(rows), row_stride, columns),
            (1, _) => (share.of(columns), column_stride, rows),
            _ => return,
        };
        let base = self.batch(batch).as_ptr();
        for line in lines {
            for start in run.clone().step_by(LINE) {
                prefetch(base.wrapping_add(line * stride + start));
            }
        }
    }
}

/// Floats in a cache line.
const LINE: usize = 16;

/// Brings a line into the second-level cache, if the address exists.
#[inline(always)]
fn prefetch(address: *const f32) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

impl Left for Strided<'_> {
    fn prefetch(&self, batch: usize, rows: Range<usize>, depth: Range<usize>, share: Share) {
        self.prefetch(batch, &rows, &depth, share);
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
    fn prefetch(&self, batch: usize, depth: Range<usize>, columns: Range<usize>, share: Share) {
        self.prefetch(batch, &depth, &columns, share);
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
