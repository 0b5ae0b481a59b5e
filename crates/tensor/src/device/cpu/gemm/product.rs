//! The blocked product that every matrix multiplication and convolution runs on.
//!
//! Loops, from the outside: tasks (share of the depth × row block × column block), blocks of the depth, panels of rows, panels
//! of columns, and the tile of [`super::kernel`]. Cost: 2·rows·columns·depth flops; each left element is packed once per
//! column block, each right element once per call (or once per row block when few rows make that the same).
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::context::Context;
use super::super::isa::Isa;
use super::super::moments::Blocks;
use super::super::pool::{Pool, SendPointer};
use super::super::scratch::{Buffers, Need};
use super::super::simd::is_f32;
use super::Epilogue;
use super::cut::Cut;
use super::kernel::{self, Fence, Layout, PANEL_STRIDE, ROWS_MAX, Tile, TileMoments, Words};
use super::pack::{Ahead, Asked, Grid, How, Left, Plan, Right, STEPS_APART, apart};
use crate::bf16::Bf16;
use crate::dtype::{DType, Float};

/// From this size on a result that is written once, by one product or by several, goes past the caches: it would not stay in them, and
/// a cached write would read the line first. On a Zen 4 core a 1×1 convolution with 33 MB of output gained a quarter.
const STREAM_BYTES: usize = 16 << 20;

/// result = \[result +\] scale · left · right, then the epilogue.
pub(crate) struct Product<'a> {
    pub batch: usize,
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
    pub left: &'a dyn Left,
    pub right: &'a dyn Right,
    /// Where the rows begin in the result.
    pub place: Place<'a>,
    pub scale: f32,
    pub accumulate: bool,
    pub epilogue: Epilogue<'a>,
    /// Distance between the biases of the batch's products.
    pub bias_stride: usize,
}

/// Where row (batch, row) begins in a result.
#[derive(Clone, Copy)]
pub(crate) enum Place<'a> {
    /// At `batch · .0 + row · .1`.
    Strided(usize, usize),
    /// Wherever this says.
    Scattered(&'a (dyn Fn(usize, usize) -> usize + Sync)),
}

impl Place<'_> {
    fn at(&self, batch: usize, row: usize) -> usize {
        match self {
            Self::Strided(batch_stride, row_stride) => batch * batch_stride + row * row_stride,
            Self::Scattered(place) => place(batch, row),
        }
    }
}

/// Computes `product` into `result`. The answer says whether moments were taken: they are not where sums come in shares of the depth.
///
/// # Safety
/// The rows that `place` gives must not overlap.
pub(crate) unsafe fn multiply<C: Float>(context: &mut Context<'_>, product: &Product<'_>, result: &mut [C]) -> bool {
    let Product { batch, rows, columns, .. } = *product;
    if batch * rows * columns == 0 {
        return false;
    }
    assert!(context.isa.available(), "this machine has no {:?}", context.isa);
    if let Some(bias) = product.epilogue.bias {
        assert!(bias.len() >= (batch - 1) * product.bias_stride + columns, "a bias has one value per column");
    }
    let how = How { isa: context.isa, words: product.words(context.isa) };
    let layout = product.left.layout();
    let depth = product.depth.div_ceil(how.words.numbers());
    let cut = Cut::new(how, layout, [batch, rows, columns, depth], context.pool.threads());
    let (direct, narrow) = (cut.splits == 1, !is_f32::<C>());
    let sums = narrow && direct && (cut.depth_blocks > 1 || product.accumulate);
    let room = Room::new(&cut, layout, sums);
    let need = Need {
        shared: if cut.shared { batch * depth * cut.padded(columns) } else { 0 },
        partial: if direct { 0 } else { cut.splits * batch * rows * columns },
        worker: room.total(),
    };
    let mut moments = std::mem::take(&mut context.scratch.moments);
    let blocks = (product.epilogue.moments && direct).then(|| {
        let rows = (0..cut.row_blocks).map(|index| block(index, cut.row_block, rows).len());
        moments.begin((batch - 1) * product.bias_stride + columns, rows)
    });
    let Buffers { shared, partial, workers } = context.scratch.take(context.pool.threads(), need);
    if cut.shared {
        pack_shared(context.pool, how, product, &cut, shared);
    }
    let once = direct && (narrow || cut.depth_blocks == 1 && !product.accumulate);
    let stream = once && size_of_val(result) >= STREAM_BYTES;
    let output = if direct {
        Output::Result(SendPointer(result.as_mut_ptr()), result.len())
    } else {
        Output::Partial(SendPointer(partial.as_mut_ptr()))
    };
    let threads = context.pool.threads();
    let run = Run { product, cut, how, layout, depth, shared, output, room, stream, moments: blocks, threads };
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
    context.scratch.moments = moments;
    blocks.is_some()
}

impl Product<'_> {
    /// What its panels hold: bf16 if either operand is of that type.
    fn words(&self, isa: Isa) -> Words {
        if self.left.dtype() == DType::F32 && self.right.dtype() == DType::F32 {
            Words::Plain
        } else if isa.multiplies_pairs() {
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
    /// One for each block of rows.
    moments: Option<Blocks>,
    threads: usize,
}

/// A block of the right operand: its panels lie `next` words apart, in each the steps of the depth `stride` or side by side.
#[derive(Clone, Copy)]
struct RightBlock {
    start: *const f32,
    stride: Option<usize>,
    next: usize,
}

/// What a task computes: a block of the result over a range of blocks of the depth.
struct Block {
    batch: usize,
    split: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    depth: Range<usize>,
}

/// One block of the depth of a task.
struct Part<'a> {
    block: &'a Block,
    /// In words.
    steps: Range<usize>,
    first: bool,
    last: bool,
    right: RightBlock,
    /// A row of sums, if the task keeps them, and the distance to the next.
    sums: Option<(*mut f32, usize)>,
    /// What comes after it.
    next: Option<(&'a Block, Range<usize>)>,
}

/// A left panel.
struct Panel {
    rows: Range<usize>,
    left: *const f32,
    left_stride: usize,
}

impl<C: Float> Run<'_, C> {
    /// The block that a task computes.
    fn block(&self, task: usize) -> Block {
        let (product, cut) = (self.product, &self.cut);
        let (batch, task) = (task / cut.tasks(), task % cut.tasks());
        let (split, row_block, column_block) = cut.task(task);
        let rows = block(row_block, cut.row_block, product.rows);
        let columns = block(column_block, cut.column_block, product.columns);
        let per_split = cut.depth_blocks.div_ceil(cut.splits);
        // Without a depth there is one block, of nothing.
        let end = ((split + 1) * per_split).min(cut.depth_blocks).max(1);
        Block { batch, split, rows, columns, depth: split * per_split..end }
    }

    /// # Safety
    /// No other task with the same number runs.
    unsafe fn task(&self, task: usize, buffer: &mut [f32]) {
        let block = self.block(task);
        let (left, buffer) = buffer.split_at_mut(self.room.left);
        let (own, sums) = buffer.split_at_mut(self.room.right);
        if self.product.accumulate && self.room.sums > 0 {
            self.widen(&block, sums);
        }
        let sums = (self.room.sums > 0).then_some((sums.as_mut_ptr(), self.cut.column_block));
        // The task that this worker probably does next.
        let following = task + self.threads;
        let following = (following < self.product.batch * self.cut.tasks()).then(|| self.block(following));
        for index in block.depth.clone() {
            let steps = self.steps(index);
            let right = self.right(&block, &steps, own);
            let (first, last) = (index == block.depth.start, index + 1 == block.depth.end);
            let next = if last {
                following.as_ref().map(|following| (following, self.steps(following.depth.start)))
            } else {
                Some((&block, self.steps(index + 1)))
            };
            let part = Part { block: &block, steps, first, last, right, sums, next };
            // SAFETY: as this function.
            unsafe { self.rows(&part, left) };
        }
    }

    /// The words of a block of the depth.
    fn steps(&self, index: usize) -> Range<usize> {
        block(index, self.cut.depth_block, self.depth)
    }

    /// The numbers in a range of words.
    fn numbers(&self, steps: &Range<usize>) -> Range<usize> {
        numbers(self.how.words, steps, self.product.depth)
    }

    /// The task's block of the result as sums.
    fn widen(&self, block: &Block, sums: &mut [f32]) {
        let Output::Result(base, length) = self.output else { return };
        let columns = &block.columns;
        for (line, row) in sums.chunks_mut(self.cut.column_block).zip(block.rows.clone()) {
            let offset = self.product.place.at(block.batch, row) + columns.start;
            assert!(offset + columns.len() <= length, "a row lies outside the result");
            // SAFETY: inside the result, and the row is this task's.
            let row = unsafe { std::slice::from_raw_parts(base.get().add(offset), columns.len()) };
            line.iter_mut().zip(row).for_each(|(sum, value)| *sum = value.to_f32());
        }
    }

    /// The right operand's block: packed already, as it lies in memory, or packed now into `own`.
    fn right(&self, block: &Block, steps: &Range<usize>, own: &mut [f32]) -> RightBlock {
        let (cut, operand, Block { batch, rows, columns, .. }) = (&self.cut, self.product.right, block);
        let width = 2 * cut.lanes;
        let packed = |panels: &[f32]| {
            let next = width * steps.len();
            assert!(panels.len() >= steps.len() * cut.padded(columns.len()), "a block has all its panels");
            RightBlock { start: panels.as_ptr(), stride: None, next }
        };
        if cut.shared {
            let offset = (*batch * self.depth + steps.start) * cut.padded(self.product.columns);
            return packed(&self.shared[offset + columns.start * steps.len()..]);
        }
        let depth = self.numbers(steps);
        if columns.len().is_multiple_of(cut.lanes)
            && let Some((start, stride)) = operand.in_place(self.how.words, *batch, depth.clone(), columns.clone())
            && (rows.len() <= cut.height || apart(stride * size_of::<f32>()) <= STEPS_APART)
        {
            return RightBlock { start, stride: Some(stride), next: width };
        }
        // The last panel may be a narrow one.
        let narrow = columns.start + (columns.len() - 1) / width * width;
        let end = if cut.panel_width(narrow, self.product.columns) == width { columns.end } else { narrow };
        let (panels, last) = own.split_at_mut((end - columns.start).next_multiple_of(width) * steps.len());
        operand.pack_panels(self.how, *batch, depth.clone(), columns.start..end, panels, width);
        if end < columns.end {
            operand.pack_panels(self.how, *batch, depth, end..columns.end, last, cut.lanes);
        }
        packed(own)
    }

    /// What the tiles ask for: the next panel of rows, or first panel of the next block, where the right operand is packed
    /// already; else all that the next block of the depth will read.
    fn plan(&self, part: &Part<'_>, panel: &Range<usize>) -> Plan {
        let (left, right, height) = (self.product.left, self.product.right, self.cut.height);
        let (panels, steps_now) = (part.block.rows.len().div_ceil(height), part.steps.len());
        let tiles = part.block.columns.len().div_ceil(2 * self.cut.lanes);
        let (block, rows, steps) = match &part.next {
            _ if self.cut.shared && panel.end < part.block.rows.end => {
                (part.block, panel.end..(panel.end + height).min(part.block.rows.end), &part.steps)
            }
            Some((block, steps)) if self.cut.shared => {
                (*block, block.rows.start..(block.rows.start + height).min(block.rows.end), steps)
            }
            Some((block, steps)) => (*block, block.rows.clone(), steps),
            None => return Plan::new(Ahead::NOTHING, Ahead::NOTHING, tiles, steps_now),
        };
        let depth = self.numbers(steps);
        let left = left.ahead(block.batch, rows.clone(), depth.clone());
        if self.cut.shared {
            return Plan::new(left, self.written(block, &rows), tiles, steps_now);
        }
        Plan::new(left, right.ahead(block.batch, depth, block.columns.clone()), panels * tiles, steps_now)
    }

    /// The memory that will be written to, if the tiles write once to rows that follow each other. A line that is not there costs a
    /// write more than it does a read: few writes can wait.
    fn written(&self, block: &Block, rows: &Range<usize>) -> Ahead {
        let (Output::Result(base, _), Place::Strided(_, stride)) = (self.output, self.product.place) else {
            return Ahead::NOTHING;
        };
        if self.stream || self.cut.depth_blocks > 1 {
            return Ahead::NOTHING;
        }
        let at = self.product.place.at(block.batch, rows.start) + block.columns.start;
        let start = base.get().wrapping_add(at).cast_const().cast();
        let (stride, run) = (stride * size_of::<C>(), block.columns.len() * size_of::<C>());
        Ahead { start, lines: rows.len(), stride, run, gap: None }
    }

    /// All panels of rows of a block, over one block of the depth.
    unsafe fn rows(&self, part: &Part<'_>, left: &mut [f32]) {
        let (operand, Block { batch, rows, .. }) = (self.product.left, part.block);
        let depth = self.numbers(&part.steps);
        let grid = self.room.grid;
        let mut plan = self.plan(part, &(rows.start..(rows.start + self.cut.height).min(rows.end)));
        let in_place = |rows: &Range<usize>| operand.in_place(self.how.words, *batch, rows.clone(), depth.clone());
        // Across the rows, a whole block is packed at once: its lines are read from beginning to end.
        let packed = self.layout == Layout::AlongRows && in_place(rows).is_none();
        if packed {
            operand.pack(self.how, *batch, rows.clone(), depth.clone(), left, grid);
        }
        for (index, start) in rows.clone().step_by(self.cut.height).enumerate() {
            let rows = start..(start + self.cut.height).min(rows.end);
            // A tile reads all its rows, so they must all be there.
            let whole = rows.len() == kernel::tile_rows(self.how.isa, self.how.words, rows.len());
            let (left, left_stride) = if packed {
                (left[index * grid.size..].as_ptr(), grid.stride)
            } else {
                whole.then(|| in_place(&rows)).flatten().unwrap_or_else(|| {
                    operand.pack(self.how, *batch, rows.clone(), depth.clone(), left, grid);
                    (left.as_ptr(), grid.stride)
                })
            };
            if self.cut.shared && index > 0 {
                plan = self.plan(part, &rows);
            }
            // SAFETY: the panel holds a tile's rows, valid ones or not, for every step.
            unsafe { self.columns(part, &Panel { rows, left, left_stride }, &mut plan) };
        }
    }

    /// All panels of columns against one panel of rows.
    unsafe fn columns(&self, part: &Part<'_>, panel: &Panel, plan: &mut Plan) {
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
        let Block { columns, .. } = part.block;
        let bias = epilogue.bias.filter(|_| finish).map(|bias| {
            let first = part.block.batch * product.bias_stride;
            bias[first + columns.start..first + columns.end].as_ptr()
        });
        let moments = self.moments.filter(|_| finish).map(|moments| {
            let sums = moments
                .at(part.block.rows.start / self.cut.row_block, part.block.batch * product.bias_stride + columns.start);
            TileMoments { sums, begins: panel.rows.start == part.block.rows.start }
        });
        let (isa, lanes, mut asked) = (self.how.isa, self.cut.lanes, Asked::default());
        let functions = [1, 2].map(|vectors| kernel::tile(isa, self.how.words, count, vectors, self.layout));
        let mut right = part.right.start;
        for start in columns.clone().step_by(2 * lanes) {
            let width = self.cut.panel_width(start, product.columns);
            plan.next(&mut asked);
            let tile = Tile {
                left: panel.left,
                left_stride: panel.left_stride,
                right,
                right_stride: part.right.stride.unwrap_or(width),
                depth: part.steps.len(),
                rows: &rows[..count],
                narrow: rounds.then_some(&narrow[..count]),
                column: start - columns.start,
                columns: width.min(columns.end - start),
                scale: product.scale,
                load: !part.first || (to_result && product.accumulate),
                bias,
                relu: epilogue.relu && finish,
                moments,
                stream,
                ahead: asked.pieces(),
            };
            // SAFETY: the instruction set is available; panels hold what the tile reads; each row has room for its columns.
            unsafe { functions[usize::from(width > lanes)](&tile) };
            right = right.wrapping_add(part.right.next);
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
                    let row = (part.block.split * product.batch + part.block.batch) * product.rows + row;
                    rows[index] = base.get().wrapping_add(row * product.columns + part.block.columns.start);
                }
                Output::Result(base, length) => {
                    let offset = product.place.at(part.block.batch, row);
                    assert!(offset + product.columns <= length, "a row lies outside the result");
                    let target = base.get().wrapping_add(offset + part.block.columns.start);
                    (rows[index], narrow[index]) = (target.cast(), target.cast());
                }
            }
            if let Some((sums, stride)) = part.sums {
                rows[index] = sums.wrapping_add((row - part.block.rows.start) * stride);
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
            let offset = product.place.at(row / product.rows, row % product.rows);
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
