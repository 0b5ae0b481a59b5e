//! How a product is cut into tasks and blocks: a pure function of its shape, so that its bits are too. Many threads cut columns further,
//! which changes no sum.
//!
//! A task computes a block of rows × columns over its share of the depth, `DEPTH_MAX` at a time: the right block of that
//! depth lies in the second-level cache, a left panel of a few rows in the first, and the task's part of the result
//! stays in the second until it is done.

use super::kernel::{DEPTH_MAX, Layout, height};
use super::pack::How;

/// Enough tasks that the last one to end does not leave other threads idle for long.
const TASKS: usize = 32;

/// Tasks of each thread, where columns can be cut further: with 36 tasks for 16 threads, a quarter of the time some have none.
const TASKS_PER_THREAD: usize = 4;

/// Rows of a block when the right operand is packed once for all tasks, and when every task packs its own.
const ROWS_SHARED: usize = 112;
const ROWS_OWN: usize = 256;

/// Columns of a block, likewise.
const COLUMNS_SHARED: usize = 256;
const COLUMNS_OWN: usize = 256;

/// Floats of a right operand up to which it is packed once for all tasks. Above, the copy would cost more memory than it saves time.
const SHARED_MAX: usize = 1 << 24;

/// Depth below which a share of a split is not worth its partial sums.
const SPLIT_DEPTH_MIN: usize = 512;

/// The cut of one product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Floats in a vector.
    pub lanes: usize,
    /// Rows of a tile.
    pub height: usize,
    pub row_block: usize,
    pub column_block: usize,
    pub depth_block: usize,
    pub row_blocks: usize,
    pub column_blocks: usize,
    pub depth_blocks: usize,
    /// Shares of the depth whose partial sums are added at the end, in order.
    pub splits: usize,
    /// The right operand is packed before the tasks start.
    pub shared: bool,
}

impl Cut {
    pub fn new(
        How { isa, words }: How,
        layout: Layout,
        [batch, rows, columns, depth]: [usize; 4],
        threads: usize,
    ) -> Self {
        let (height, width) = (height(isa, words, columns), 2 * isa.lanes());
        let shared = layout == Layout::AlongDepth && rows > ROWS_OWN && batch * columns * depth <= SHARED_MAX;
        let (row_most, column_most) = if shared { (ROWS_SHARED, COLUMNS_SHARED) } else { (ROWS_OWN, COLUMNS_OWN) };
        let mut row_block = even(rows, row_most, height);
        let mut column_block = even(columns, column_most, width);
        let count = |row_block, column_block| batch * rows.div_ceil(row_block) * columns.div_ceil(column_block);
        let depth_block = depth.div_ceil(depth.div_ceil(DEPTH_MAX).max(1)).next_multiple_of(4).clamp(1, DEPTH_MAX);
        let depth_blocks = depth.div_ceil(depth_block);
        let split_most = (depth / SPLIT_DEPTH_MIN).clamp(1, depth_blocks.max(1));
        while count(row_block, column_block) * split_most < TASKS && column_block > 2 * width {
            column_block = even(columns, column_block / 2, width);
        }
        while count(row_block, column_block) * split_most < TASKS && row_block > 4 * height && shared {
            row_block = even(rows, row_block / 2, height);
        }
        let splits = TASKS.div_ceil(count(row_block, column_block)).min(split_most);
        // A split takes whole depth blocks; none may be left without one.
        let splits = depth_blocks.max(1).div_ceil(depth_blocks.max(1).div_ceil(splits));
        // Rows stay: moments are taken of blocks of them.
        while count(row_block, column_block) * splits < TASKS_PER_THREAD * threads && column_block > 2 * width {
            column_block = even(columns, column_block / 2, width);
        }
        let (row_blocks, column_blocks) = (rows.div_ceil(row_block), columns.div_ceil(column_block));
        let lanes = isa.lanes();
        Self {
            lanes,
            height,
            row_block,
            column_block,
            depth_block,
            row_blocks,
            column_blocks,
            depth_blocks,
            splits,
            shared,
        }
    }

    /// Tasks per matrix of the batch.
    pub fn tasks(&self) -> usize {
        self.splits * self.row_blocks * self.column_blocks
    }

    /// The share, row block and column block of a task.
    pub fn task(&self, task: usize) -> (usize, usize, usize) {
        let (task, column) = (task / self.column_blocks, task % self.column_blocks);
        (task / self.row_blocks, task % self.row_blocks, column)
    }

    /// Columns of a packed panel at `start` of a result of `columns`: two vectors, or one for what is left at the end.
    pub fn panel_width(&self, start: usize, columns: usize) -> usize {
        if columns - start > self.lanes { 2 * self.lanes } else { self.lanes }
    }

    /// Columns of all panels together.
    pub fn padded(&self, columns: usize) -> usize {
        columns.next_multiple_of(self.lanes)
    }
}

/// The smallest equal blocks of `total` that are multiples of `unit`, with as few of them as blocks of `most` give.
fn even(total: usize, most: usize, unit: usize) -> usize {
    let blocks = total.div_ceil(most).max(1);
    total.div_ceil(blocks).next_multiple_of(unit).max(unit)
}

#[cfg(test)]
mod tests {
    use super::super::super::isa::Isa;
    use super::super::kernel::Words;
    use super::*;

    fn cut(layout: Layout, shape: [usize; 4]) -> Cut {
        cut_for(1, layout, shape)
    }

    fn cut_for(threads: usize, layout: Layout, shape: [usize; 4]) -> Cut {
        Cut::new(How { isa: Isa::Avx512, words: Words::Plain }, layout, shape, threads)
    }

    #[test]
    fn many_threads_cut_columns_and_nothing_else() {
        for (layout, shape) in [(Layout::AlongRows, [1, 2304, 256, 8192]), (Layout::AlongDepth, [1, 8192, 512, 128])] {
            let (few, many) = (cut(layout, shape), cut_for(64, layout, shape));
            assert!(many.tasks() > few.tasks() && many.column_block.is_multiple_of(32), "{many:?}");
            let Cut { column_block, column_blocks, .. } = few;
            assert_eq!(Cut { column_block, column_blocks, ..many }, few);
            assert_eq!(cut_for(8, layout, shape), few, "enough for eight");
        }
    }

    #[test]
    fn a_deep_and_small_result_is_split_along_the_depth_and_no_share_is_empty() {
        for depth in [1, 511, 1024, 5000, 32_768, 100_001] {
            let cut = cut(Layout::AlongRows, [1, 576, 64, depth]);
            let per_split = cut.depth_blocks.div_ceil(cut.splits);
            assert!((cut.splits - 1) * per_split < cut.depth_blocks, "{cut:?}");
            assert_eq!(cut.splits > 1, depth >= 1024);
        }
    }

    #[test]
    fn many_threads_find_work_in_a_small_image() {
        let cut = cut(Layout::AlongDepth, [1, 512, 512, 4608]);
        assert!(cut.tasks() >= 16, "{cut:?}");
    }

    #[test]
    fn a_huge_right_operand_is_not_copied_whole() {
        assert!(cut(Layout::AlongDepth, [1, 512, 512, 4608]).shared);
        assert!(!cut(Layout::AlongDepth, [1, 512, 4096, 25_088]).shared);
    }
}
