//! The blocked product that every matrix multiplication and convolution runs on.
//!
//! Loops, from the outside: tasks (share of the depth × row block × column block), blocks of the depth, panels of rows, panels
//! of columns, and the tile of [`super::kernel`]. Cost: 2·rows·columns·depth flops; each left element is packed once per
//! column block, each right element once per call (or once per row block when few rows make that the same).
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::context::Context;
use super::super::pool::{Pool, SendPointer};
use super::super::scratch::{Buffers, Need};
use super::Epilogue;
use super::cut::Cut;
use super::kernel::{self, Fence, Layout, PANEL_STRIDE, ROWS_MAX, Tile};
use super::pack::{How, Left, Right, Words};
use crate::dtype::{DType, Float};

/// From this size on a result that is written once goes past the caches: it would not stay in them, and a cached write would
/// read the line first. On a Zen 4 core a 1×1 convolution with 33 MB of output gained a quarter.
const STREAM_BYTES: usize = 16 << 20;

/// result = \[result +\] scale · left · right, then the epilogue.
pub(crate) struct Product<'a> {
    pub batch: usize,
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
    pub left: &'a dyn Left,
    pub right: &'a dyn Right,
    /// Where row (batch, row) begins in the result.
    pub place: &'a (dyn Fn(usize, usize) -> usize + Sync),
    pub scale: f32,
    pub accumulate: bool,
    pub epilogue: Epilogue<'a>,
    /// Distance between the biases of the batch's products.
    pub bias_stride: usize,
}

/// Computes `product` into `result`.
///
/// # Safety
/// The rows that `place` names must not overlap.
pub(crate) unsafe fn multiply<C: Float>(context: &mut Context<'_>, product: &Product<'_>, result: &mut [C]) {
    let Product { batch, rows, columns, depth, .. } = *product;
    if batch * rows * columns == 0 {
        return;
    }
    assert!(context.isa.available(), "this machine has no {:?}", context.isa);
    if let Some(bias) = product.epilogue.bias {
        assert!(bias.len() >= (batch - 1) * product.bias_stride + columns, "a bias has one value per column");
    }
    let layout = product.left.layout();
    let cut = Cut::new(context.isa, layout, [batch, rows, columns, depth]);
    let narrow = product.left.dtype() == DType::Bf16 || product.right.dtype() == DType::Bf16;
    let how = How { isa: context.isa, words: if narrow { Words::Rounded } else { Words::Plain } };
    let direct = cut.splits == 1 && C::DTYPE == DType::F32;
    let left = match layout {
        Layout::AlongDepth => ROWS_MAX * PANEL_STRIDE,
        Layout::AlongRows => cut.depth_block * row_stride(&cut) + ROWS_MAX,
    };
    let need = Need {
        shared: if cut.shared { batch * depth * cut.padded(columns) } else { 0 },
        partial: if direct { 0 } else { cut.splits * batch * rows * columns },
        worker: left.next_multiple_of(16) + if cut.shared { 0 } else { cut.depth_block * cut.column_block },
    };
    let Buffers { shared, partial, workers } = context.scratch.take(context.pool.threads(), need);
    if cut.shared {
        pack_shared(context.pool, how, product, &cut, shared);
    }
    let (length, output) = if direct {
        (result.len(), SendPointer(result.as_mut_ptr().cast()))
    } else {
        (partial.len(), SendPointer(partial.as_mut_ptr()))
    };
    let once = direct && cut.depth_blocks == 1 && !product.accumulate;
    let stream = once && batch * rows * columns * size_of::<f32>() >= STREAM_BYTES;
    let run = Run { product, cut, how, layout, shared, output, length, direct, stream };
    context.pool.run(batch * cut.tasks(), |task, worker| {
        // SAFETY: the pool runs one task per worker at a time.
        let buffer = unsafe { workers.buffer(worker) };
        let (left, right) = buffer.split_at_mut(left.next_multiple_of(16));
        // SAFETY: tasks write disjoint blocks, as their rows do not overlap.
        unsafe { run.task(task, left, right) };
        if stream {
            run.how.isa.run(Fence);
        }
    });
    if !direct {
        // SAFETY: the rows do not overlap, by the caller's promise.
        unsafe { reduce(context.pool, product, cut.splits, partial, result) };
    }
}

/// Distance between the depth steps of a left block that lies along its rows.
fn row_stride(cut: &Cut) -> usize {
    cut.row_block.next_multiple_of(16) + 16
}

/// Packs the whole right operand: depth block after depth block, in each panel after panel.
fn pack_shared(pool: &Pool, how: How, product: &Product<'_>, cut: &Cut, shared: &mut [f32]) {
    let (columns, depth, padded) = (product.columns, product.depth, cut.padded(product.columns));
    let panels = columns.div_ceil(2 * cut.lanes);
    let base = SendPointer(shared.as_mut_ptr());
    pool.run(product.batch * cut.depth_blocks * panels, |task, _| {
        let (panel, block, batch) = (task % panels, task / panels % cut.depth_blocks, task / panels / cut.depth_blocks);
        let steps = block * cut.depth_block..((block + 1) * cut.depth_block).min(depth);
        let start = panel * 2 * cut.lanes;
        let width = cut.panel_width(start, columns);
        let offset = (batch * depth + steps.start) * padded + start * steps.len();
        // SAFETY: panels lie one after the other and the last ends with the buffer; each task fills its own.
        let target = unsafe { std::slice::from_raw_parts_mut(base.get().add(offset), steps.len() * width) };
        product.right.pack(how, batch, steps, start..(start + width).min(columns), target, width);
    });
}

/// What the tasks of one product share.
struct Run<'a> {
    product: &'a Product<'a>,
    cut: Cut,
    how: How,
    layout: Layout,
    shared: &'a [f32],
    output: SendPointer<f32>,
    length: usize,
    /// Tiles write the result itself, not partial sums.
    direct: bool,
    stream: bool,
}

impl Run<'_> {
    /// # Safety
    /// No other task with the same number runs.
    unsafe fn task(&self, task: usize, left: &mut [f32], own: &mut [f32]) {
        let (product, cut) = (self.product, &self.cut);
        let (batch, task) = (task / cut.tasks(), task % cut.tasks());
        let (split, row_block, column_block) = cut.task(task);
        let rows = block(row_block, cut.row_block, product.rows);
        let columns = block(column_block, cut.column_block, product.columns);
        let per_split = cut.depth_blocks.div_ceil(cut.splits);
        let blocks = split * per_split..((split + 1) * per_split).min(cut.depth_blocks);
        if product.depth == 0 {
            let part = Part { batch, split, columns, steps: 0..0, next: 0..0, first: true, last: true, right: own };
            // SAFETY: no depth, so the panels are never read.
            unsafe { self.rows(&part, rows, left) };
            return;
        }
        for index in blocks.clone() {
            let steps = block(index, cut.depth_block, product.depth);
            if !cut.shared {
                self.pack_own(batch, &steps, &columns, own);
            }
            let right = if cut.shared {
                let offset = (batch * product.depth + steps.start) * cut.padded(product.columns);
                &self.shared[offset + columns.start * steps.len()..]
            } else {
                &*own
            };
            let (first, last) = (index == blocks.start, index + 1 == blocks.end);
            let next = if last { 0..0 } else { block(index + 1, cut.depth_block, product.depth) };
            let part = Part { batch, split, columns: columns.clone(), steps, next, first, last, right };
            // SAFETY: as this function.
            unsafe { self.rows(&part, rows.clone(), left) };
        }
    }

    fn pack_own(&self, batch: usize, steps: &Range<usize>, columns: &Range<usize>, own: &mut [f32]) {
        let mut rest = own;
        for start in columns.clone().step_by(2 * self.cut.lanes) {
            let width = self.cut.panel_width(start, self.product.columns);
            let (panel, next) = rest.split_at_mut(width * steps.len());
            let end = (start + width).min(columns.end);
            self.product.right.pack(self.how, batch, steps.clone(), start..end, panel, width);
            rest = next;
        }
    }

    /// All panels of rows of a block, over one block of the depth.
    unsafe fn rows(&self, part: &Part<'_>, rows: Range<usize>, left: &mut [f32]) {
        let pack = |rows: Range<usize>, left: &mut [f32], stride: usize| {
            self.product.left.pack(self.how, part.batch, rows, part.steps.clone(), left, stride);
        };
        let stride = row_stride(&self.cut);
        if self.layout == Layout::AlongRows {
            pack(rows.clone(), left, stride);
        }
        for start in rows.clone().step_by(self.cut.height) {
            let panel = start..(start + self.cut.height).min(rows.end);
            let source = match self.layout {
                Layout::AlongRows => left[start - rows.start..].as_ptr(),
                Layout::AlongDepth => {
                    pack(panel.clone(), left, PANEL_STRIDE);
                    left.as_ptr()
                }
            };
            let ahead = |tile: usize, tiles: usize| self.ahead(part, &rows, &panel, tile, tiles);
            // SAFETY: the panel is packed and holds a tile's rows, valid ones or not, for every step.
            unsafe { self.columns(part, panel.clone(), source, stride, &ahead) };
        }
    }

    /// What tile `tile` of `tiles` of the panel of rows `panel` asks the memory for: the next panel where the right operand is
    /// packed already, else a piece of the next block of the depth.
    fn ahead(
        &self,
        part: &Part<'_>,
        rows: &Range<usize>,
        panel: &Range<usize>,
        tile: usize,
        tiles: usize,
    ) -> Option<(*const u8, usize)> {
        let (Product { left, right, .. }, steps) = (self.product, part.steps.len());
        if self.cut.shared {
            let next = panel.end..(panel.end + self.cut.height).min(self.product.rows);
            return left.ahead(part.batch, next, part.steps.clone()).share(tile, tiles, steps);
        }
        if part.next.is_empty() {
            return None;
        }
        let panels = rows.len().div_ceil(self.cut.height);
        let (tile, tiles) = ((panel.start - rows.start) / self.cut.height * tiles + tile, panels * tiles);
        let left = left.ahead(part.batch, rows.clone(), part.next.clone());
        let right = right.ahead(part.batch, part.next.clone(), part.columns.clone());
        let for_left = tiles * left.length() / (left.length() + right.length()).max(1);
        if tile < for_left {
            left.share(tile, for_left, steps)
        } else {
            right.share(tile - for_left, tiles - for_left, steps)
        }
    }

    /// All panels of columns against one panel of rows; `ahead` says what each of them asks for.
    unsafe fn columns(
        &self,
        part: &Part<'_>,
        rows: Range<usize>,
        left: *const f32,
        left_stride: usize,
        ahead: &dyn Fn(usize, usize) -> Option<(*const u8, usize)>,
    ) {
        let (product, epilogue) = (self.product, self.product.epilogue);
        let whole = self.direct;
        let mut pointers = [std::ptr::null_mut(); ROWS_MAX];
        for (pointer, row) in pointers.iter_mut().zip(rows.clone()) {
            let offset = if whole {
                (product.place)(part.batch, row)
            } else {
                ((part.split * product.batch + part.batch) * product.rows + row) * product.columns
            };
            assert!(offset + product.columns <= self.length, "a row lies outside the result");
            *pointer = self.output.get().wrapping_add(offset + part.columns.start);
        }
        let pointers = &mut pointers[..rows.len()];
        let stream = self.stream && pointers.iter().all(|pointer| (*pointer as usize).is_multiple_of(64));
        let bias = epilogue.bias.filter(|_| whole && part.last).map(|bias| &bias[part.batch * product.bias_stride..]);
        let mut right = part.right;
        let panels = part.columns.len().div_ceil(2 * self.cut.lanes);
        for (index, start) in part.columns.clone().step_by(2 * self.cut.lanes).enumerate() {
            let width = self.cut.panel_width(start, product.columns);
            let (panel, rest) = right.split_at(width * part.steps.len());
            let columns = width.min(part.columns.end - start);
            let tile = Tile {
                left,
                left_stride,
                right: panel.as_ptr(),
                depth: part.steps.len(),
                rows: pointers,
                columns,
                scale: product.scale,
                load: !part.first || (whole && product.accumulate),
                bias: bias.map(|bias| bias[start..start + columns].as_ptr()),
                relu: epilogue.relu && whole && part.last,
                stream,
                ahead: ahead(index, panels).unwrap_or((panel.as_ptr().cast(), 0)),
            };
            let function = kernel::tile(self.how.isa, rows.len(), width / self.cut.lanes, self.layout);
            // SAFETY: the instruction set is available; panels hold what the tile reads; each row has room for its columns.
            unsafe { function(&tile) };
            for pointer in pointers.iter_mut() {
                *pointer = pointer.wrapping_add(width);
            }
            right = rest;
        }
    }
}

/// One block of the depth of a task.
struct Part<'a> {
    batch: usize,
    split: usize,
    columns: Range<usize>,
    steps: Range<usize>,
    /// The block of the depth that follows, if any.
    next: Range<usize>,
    first: bool,
    last: bool,
    right: &'a [f32],
}

fn block(index: usize, size: usize, total: usize) -> Range<usize> {
    index * size..((index + 1) * size).min(total)
}

/// Adds the partial sums in the order of the depth, and finishes.
unsafe fn reduce<C: Float>(pool: &Pool, product: &Product<'_>, splits: usize, partial: &[f32], result: &mut [C]) {
    const ROWS: usize = 16;
    const COLUMNS: usize = 128;
    let (columns, rows) = (product.columns, product.batch * product.rows);
    let (length, base) = (result.len(), SendPointer(result.as_mut_ptr()));
    pool.run(rows.div_ceil(ROWS), |task, _| {
        for row in block(task, ROWS, rows) {
            let offset = (product.place)(row / product.rows, row % product.rows);
            assert!(offset + columns <= length, "a row lies outside the result");
            // SAFETY: inside the result; rows do not overlap and each is in one task.
            let target = unsafe { std::slice::from_raw_parts_mut(base.get().add(offset), columns) };
            let bias = product.epilogue.bias.map(|bias| &bias[row / product.rows * product.bias_stride..][..columns]);
            for start in (0..columns).step_by(COLUMNS) {
                let columns_here = start..(start + COLUMNS).min(columns);
                let part = |split: usize| &partial[(split * rows + row) * columns..][columns_here.clone()];
                let mut sums = [0.0; COLUMNS];
                let (sums, target) = (&mut sums[..columns_here.len()], &mut target[columns_here.clone()]);
                if product.accumulate {
                    sums.iter_mut().zip(&*target).for_each(|(sum, target)| *sum = target.to_f32());
                }
                (0..splits).for_each(|split| add(sums, part(split)));
                if let Some(bias) = bias {
                    add(sums, &bias[columns_here.clone()]);
                }
                let floor = if product.epilogue.relu { 0.0 } else { f32::NEG_INFINITY };
                for (target, &sum) in target.iter_mut().zip(&*sums) {
                    *target = C::from_f32(if sum < floor { floor } else { sum });
                }
            }
        }
    });
}

/// target += source.
pub(crate) fn add(target: &mut [f32], source: &[f32]) {
    for (target, source) in target.iter_mut().zip(source) {
        *target += source;
    }
}
