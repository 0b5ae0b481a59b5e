//! The blocked product that every matrix multiplication and convolution runs on.
//!
//! Loops, from the outside: tasks (share of the depth × row block × column block), blocks of the depth, panels of rows, panels
//! of columns, and the tile of [`super::kernel`]. Cost: 2·rows·columns·depth flops; each left element is packed once per
//! column block, each right element once per call (or once per row block when few rows make that the same).
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::context::Context;
use super::super::isa::Isa;
use super::super::pool::{Pool, SendPointer};
use super::super::scratch::{Buffers, Need};
use super::super::simd::is_f32;
use super::Epilogue;
use super::cut::Cut;
use super::kernel::{self, Fence, Layout, PANEL_STRIDE, ROWS_MAX, Tile, Words};
use super::pack::{Ahead, Asked, Grid, How, Left, Plan, Right};
use crate::bf16::Bf16;
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
    let Product { batch, rows, columns, .. } = *product;
    if batch * rows * columns == 0 {
        return;
    }
    assert!(context.isa.available(), "this machine has no {:?}", context.isa);
    if let Some(bias) = product.epilogue.bias {
        assert!(bias.len() >= (batch - 1) * product.bias_stride + columns, "a bias has one value per column");
    }
    let how = How { isa: context.isa, words: product.words(context.isa) };
    let layout = product.left.layout();
    let depth = product.depth.div_ceil(how.words.numbers());
    let cut = Cut::new(context.isa, layout, [batch, rows, columns, depth]);
    let (direct, narrow) = (cut.splits == 1, !is_f32::<C>());
    let sums = narrow && direct && (cut.depth_blocks > 1 || product.accumulate);
    let room = Room::new(&cut, layout, sums);
    let need = Need {
        shared: if cut.shared { batch * depth * cut.padded(columns) } else { 0 },
        partial: if direct { 0 } else { cut.splits * batch * rows * columns },
        worker: room.total(),
    };
    let Buffers { shared, partial, workers } = context.scratch.take(context.pool.threads(), need);
    if cut.shared {
        pack_shared(context.pool, how, product, &cut, shared);
    }
    let once = direct && (narrow || cut.depth_blocks == 1 && !product.accumulate);
    let stream = once && batch * rows * columns * size_of::<C>() >= STREAM_BYTES;
    let output = if direct {
        Output::Result(SendPointer(result.as_mut_ptr()), result.len())
    } else {
        Output::Partial(SendPointer(partial.as_mut_ptr()))
    };
    let run = Run { product, cut, how, layout, depth, shared, output, room, stream };
    context.pool.run(batch * cut.tasks(), |task, worker| {
        // SAFETY: the pool runs one task per worker at a time.
        let buffer = unsafe { workers.buffer(worker) };
        // SAFETY: tasks write disjoint blocks, as their rows do not overlap.
        unsafe { run.task(task, buffer) };
        if stream {
            run.how.isa.run(Fence);
        }
    });
    if !direct {
        // SAFETY: the rows do not overlap, by the caller's promise.
        unsafe { reduce(context.pool, product, cut.splits, partial, result) };
    }
}

impl Product<'_> {
    /// What its panels hold: bf16 if either operand is of that type.
    fn words(&self, isa: Isa) -> Words {
        if self.left.dtype() == DType::F32 && self.right.dtype() == DType::F32 {
            Words::Plain
        } else if isa == Isa::Avx512Bf16 {
            Words::Pairs
        } else {
            Words::Rounded
        }
    }
}

/// How a worker's buffer is shared out, in words.
#[derive(Clone, Copy, Debug)]
struct Room {
    left: usize,
    right: usize,
    /// A block of the result as sums in `f32`, for one that is rounded at the end.
    sums: usize,
    grid: Grid,
}

impl Room {
    fn new(cut: &Cut, layout: Layout, sums: bool) -> Self {
        let stride = cut.height.next_multiple_of(cut.lanes);
        // The extra line keeps the panels out of one cache set.
        let size = cut.depth_block * stride + 16;
        let (grid, left) = match layout {
            Layout::AlongDepth => (Grid::lines(PANEL_STRIDE), ROWS_MAX * PANEL_STRIDE),
            Layout::AlongRows => (Grid { height: cut.height, stride, size }, cut.row_block.div_ceil(cut.height) * size),
        };
        let right = if cut.shared { 0 } else { cut.depth_block * cut.column_block };
        let sums = if sums { cut.row_block * cut.column_block } else { 0 };
        Self { left: left.next_multiple_of(16), right: right.next_multiple_of(16), sums, grid }
    }

    fn total(&self) -> usize {
        self.left + self.right + self.sums
    }
}

/// Packs the whole right operand: depth block after depth block, in each panel after panel.
fn pack_shared(pool: &Pool, how: How, product: &Product<'_>, cut: &Cut, shared: &mut [f32]) {
    let (columns, padded) = (product.columns, cut.padded(product.columns));
    let depth = product.depth.div_ceil(how.words.numbers());
    let panels = columns.div_ceil(2 * cut.lanes);
    let base = SendPointer(shared.as_mut_ptr());
    pool.run(product.batch * cut.depth_blocks * panels, |task, _| {
        let (panel, index, batch) = (task % panels, task / panels % cut.depth_blocks, task / panels / cut.depth_blocks);
        let steps = block(index, cut.depth_block, depth);
        let start = panel * 2 * cut.lanes;
        let width = cut.panel_width(start, columns);
        let offset = (batch * depth + steps.start) * padded + start * steps.len();
        // SAFETY: panels lie one after the other and the last ends with the buffer; each task fills its own.
        let target = unsafe { std::slice::from_raw_parts_mut(base.get().add(offset), steps.len() * width) };
        let numbers = numbers(how.words, &steps, product.depth);
        product.right.pack(how, batch, numbers, start..(start + width).min(columns), target, width);
    });
}

/// The numbers in a range of words.
fn numbers(words: Words, steps: &Range<usize>, depth: usize) -> Range<usize> {
    words.numbers() * steps.start..(words.numbers() * steps.end).min(depth)
}

/// Where tiles write.
#[derive(Clone, Copy)]
enum Output<C> {
    /// The result, of so many elements.
    Result(SendPointer<C>, usize),
    /// Partial sums, which are added and finished later.
    Partial(SendPointer<f32>),
}

/// What the tasks of one product share.
struct Run<'a, C> {
    product: &'a Product<'a>,
    cut: Cut,
    how: How,
    layout: Layout,
    /// In words.
    depth: usize,
    shared: &'a [f32],
    output: Output<C>,
    room: Room,
    stream: bool,
}

/// One block of the depth of a task.
struct Part<'a> {
    batch: usize,
    split: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    /// In words.
    steps: Range<usize>,
    first: bool,
    last: bool,
    right: &'a [f32],
    /// A row of sums, if the task keeps them, and the distance to the next.
    sums: Option<(*mut f32, usize)>,
    /// What the tiles of the block ask for where each task packs its own panels.
    plan: Plan,
}

/// A left panel, and what the tiles that use it ask for: the first of them is this one of the plan's.
struct Panel {
    rows: Range<usize>,
    left: *const f32,
    left_stride: usize,
    plan: Plan,
    tile: usize,
}

impl<C: Float> Run<'_, C> {
    /// # Safety
    /// No other task with the same number runs.
    unsafe fn task(&self, task: usize, buffer: &mut [f32]) {
        let (product, cut) = (self.product, &self.cut);
        let (batch, task) = (task / cut.tasks(), task % cut.tasks());
        let (split, row_block, column_block) = cut.task(task);
        let rows = block(row_block, cut.row_block, product.rows);
        let columns = block(column_block, cut.column_block, product.columns);
        let (left, buffer) = buffer.split_at_mut(self.room.left);
        let (own, sums) = buffer.split_at_mut(self.room.right);
        if product.accumulate && self.room.sums > 0 {
            self.widen(batch, &rows, &columns, sums);
        }
        let sums = (self.room.sums > 0).then_some((sums.as_mut_ptr(), cut.column_block));
        let per_split = cut.depth_blocks.div_ceil(cut.splits);
        let blocks = split * per_split..((split + 1) * per_split).min(cut.depth_blocks);
        // Without a depth there is one block, of nothing.
        let blocks = if product.depth == 0 { 0..1 } else { blocks };
        for index in blocks.clone() {
            let steps = block(index, cut.depth_block, self.depth);
            if !cut.shared {
                self.pack_own(batch, &steps, &columns, own);
            }
            let right = if cut.shared {
                let offset = (batch * self.depth + steps.start) * cut.padded(product.columns);
                &self.shared[offset + columns.start * steps.len()..]
            } else {
                &*own
            };
            let (first, last) = (index == blocks.start, index + 1 == blocks.end);
            let next = if last || cut.shared { 0..0 } else { block(index + 1, cut.depth_block, self.depth) };
            let plan = self.plan(batch, &rows, &columns, &next);
            let (rows, columns) = (rows.clone(), columns.clone());
            let part = Part { batch, split, rows, columns, steps, first, last, right, sums, plan };
            // SAFETY: as this function.
            unsafe { self.rows(&part, left) };
        }
    }

    /// The task's block of the result as sums.
    fn widen(&self, batch: usize, rows: &Range<usize>, columns: &Range<usize>, sums: &mut [f32]) {
        let Output::Result(base, length) = self.output else { return };
        for (line, row) in sums.chunks_mut(self.cut.column_block).zip(rows.clone()) {
            let offset = (self.product.place)(batch, row) + columns.start;
            assert!(offset + columns.len() <= length, "a row lies outside the result");
            // SAFETY: inside the result, and the row is this task's.
            let row = unsafe { std::slice::from_raw_parts(base.get().add(offset), columns.len()) };
            line.iter_mut().zip(row).for_each(|(sum, value)| *sum = value.to_f32());
        }
    }

    fn pack_own(&self, batch: usize, steps: &Range<usize>, columns: &Range<usize>, own: &mut [f32]) {
        let depth = numbers(self.how.words, steps, self.product.depth);
        let mut rest = own;
        for start in columns.clone().step_by(2 * self.cut.lanes) {
            let width = self.cut.panel_width(start, self.product.columns);
            let (panel, next) = rest.split_at_mut(width * steps.len());
            let end = (start + width).min(columns.end);
            self.product.right.pack(self.how, batch, depth.clone(), start..end, panel, width);
            rest = next;
        }
    }

    /// What a block asks for that packs its own panels: what the next block of the depth will read.
    fn plan(&self, batch: usize, rows: &Range<usize>, columns: &Range<usize>, next: &Range<usize>) -> Plan {
        let panels = rows.len().div_ceil(self.cut.height);
        let tiles = panels * columns.len().div_ceil(2 * self.cut.lanes);
        if next.is_empty() {
            return Plan { left: Ahead::NOTHING, right: Ahead::NOTHING, tiles };
        }
        let depth = numbers(self.how.words, next, self.product.depth);
        let left = self.product.left.ahead(batch, rows.clone(), depth.clone());
        Plan { left, right: self.product.right.ahead(batch, depth, columns.clone()), tiles }
    }

    /// All panels of rows of a block, over one block of the depth.
    unsafe fn rows(&self, part: &Part<'_>, left: &mut [f32]) {
        let (rows, operand) = (part.rows.clone(), self.product.left);
        let depth = numbers(self.how.words, &part.steps, self.product.depth);
        let tiles = part.columns.len().div_ceil(2 * self.cut.lanes);
        let grid = self.room.grid;
        if self.layout == Layout::AlongRows {
            operand.pack(self.how, part.batch, rows.clone(), depth.clone(), left, grid);
        }
        for (index, start) in rows.clone().step_by(self.cut.height).enumerate() {
            let rows = start..(start + self.cut.height).min(rows.end);
            // A tile reads all its rows, so they must all be there.
            let whole = rows.len() == kernel::tile_rows(self.how.isa, rows.len());
            let in_place = || operand.in_place(self.how.words, part.batch, rows.clone(), depth.clone());
            let (left, left_stride) = match self.layout {
                Layout::AlongRows => (left[index * grid.size..].as_ptr(), grid.stride),
                Layout::AlongDepth => whole.then(in_place).flatten().unwrap_or_else(|| {
                    operand.pack(self.how, part.batch, rows.clone(), depth.clone(), left, grid);
                    (left.as_ptr(), grid.stride)
                }),
            };
            let (plan, tile) = if self.cut.shared {
                let next = rows.end..(rows.end + self.cut.height).min(self.product.rows);
                let left = operand.ahead(part.batch, next, depth.clone());
                (Plan { left, right: Ahead::NOTHING, tiles }, 0)
            } else {
                (part.plan, index * tiles)
            };
            // SAFETY: the panel holds a tile's rows, valid ones or not, for every step.
            unsafe { self.columns(part, &Panel { rows, left, left_stride, plan, tile }) };
        }
    }

    /// All panels of columns against one panel of rows.
    unsafe fn columns(&self, part: &Part<'_>, panel: &Panel) {
        let (product, epilogue, count) = (self.product, self.product.epilogue, panel.rows.len());
        let (mut rows, mut narrow) = ([std::ptr::null_mut(); ROWS_MAX], [std::ptr::null_mut(); ROWS_MAX]);
        self.pointers(part, &panel.rows, &mut rows, &mut narrow);
        let to_result = matches!(self.output, Output::Result(..));
        let finish = to_result && part.last;
        let rounds = finish && !is_f32::<C>();
        let aligned = |address: usize| address.is_multiple_of(64);
        let stream = self.stream
            && if rounds {
                narrow[..count].iter().all(|row| aligned(*row as usize))
            } else {
                rows[..count].iter().all(|row| aligned(*row as usize))
            };
        let bias = epilogue.bias.filter(|_| finish).map(|bias| &bias[part.batch * product.bias_stride..]);
        let (steps, isa) = (part.steps.len(), self.how.isa);
        let functions = [1, 2].map(|vectors| kernel::tile(isa, self.how.words, count, vectors, self.layout));
        let (mut right, mut asked) = (part.right, Asked::default());
        for (index, start) in part.columns.clone().step_by(2 * self.cut.lanes).enumerate() {
            let width = self.cut.panel_width(start, product.columns);
            let (panel_right, rest) = right.split_at(width * steps);
            let columns = width.min(part.columns.end - start);
            panel.plan.ask(panel.tile + index, steps, &mut asked);
            let tile = Tile {
                left: panel.left,
                left_stride: panel.left_stride,
                right: panel_right.as_ptr(),
                depth: steps,
                rows: &rows[..count],
                narrow: rounds.then_some(&narrow[..count]),
                columns,
                scale: product.scale,
                load: !part.first || (to_result && product.accumulate),
                bias: bias.map(|bias| bias[start..start + columns].as_ptr()),
                relu: epilogue.relu && finish,
                stream,
                ahead: asked.pieces(),
            };
            // SAFETY: the instruction set is available; panels hold what the tile reads; each row has room for its columns.
            unsafe { functions[width / self.cut.lanes - 1](&tile) };
            rows[..count].iter_mut().for_each(|row| *row = row.wrapping_add(width));
            narrow[..count].iter_mut().for_each(|row| *row = row.wrapping_add(width));
            right = rest;
        }
    }

    /// Where the rows of a panel begin: in `rows` as sums, in `narrow` as finished numbers of bf16.
    fn pointers(
        &self,
        part: &Part<'_>,
        panel: &Range<usize>,
        rows: &mut [*mut f32; ROWS_MAX],
        narrow: &mut [*mut Bf16; ROWS_MAX],
    ) {
        let product = self.product;
        for (index, row) in panel.clone().enumerate() {
            match self.output {
                Output::Partial(base) => {
                    let row = (part.split * product.batch + part.batch) * product.rows + row;
                    rows[index] = base.get().wrapping_add(row * product.columns + part.columns.start);
                }
                Output::Result(base, length) => {
                    let offset = (product.place)(part.batch, row);
                    assert!(offset + product.columns <= length, "a row lies outside the result");
                    let target = base.get().wrapping_add(offset + part.columns.start);
                    (rows[index], narrow[index]) = (target.cast(), target.cast());
                }
            }
            if let Some((sums, stride)) = part.sums {
                rows[index] = sums.wrapping_add((row - part.rows.start) * stride);
            }
        }
    }
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
