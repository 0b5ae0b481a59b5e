//! The innermost loop: one tile of the result, held in registers over a run of the depth.
//!
//! A tile of R rows and V vectors needs R·V accumulators, V vectors of the right operand and one broadcast value. Per step of
//! the depth it loads V vectors and R single floats for R·V multiply-adds, so a tall tile of two vectors keeps the
//! load ports half idle: 14×2 fills 30 of AVX-512's 32 registers, 6×2 fills 15 of AVX2's 16. Shorter tiles end a
//! ragged block of rows; 24×1 serves results of at most one vector's width.
#![allow(unsafe_code)]
// Index loops over constant bounds unroll into registers; iterators over these arrays do not always.
#![allow(clippy::needless_range_loop)]

use std::mem::MaybeUninit;

use super::super::isa::Isa;
use super::super::simd::{Portable, Simd, Vectorised};

/// Most rows any tile has.
pub(crate) const ROWS_MAX: usize = 24;

/// Most of the depth one tile run covers: a panel of the tallest tile then fills about half of a first-level cache.
pub(crate) const DEPTH_MAX: usize = 320;

/// Distance between the rows of a left panel that lies along the depth. The extra line keeps the rows out of one cache set.
pub(crate) const PANEL_STRIDE: usize = DEPTH_MAX + 16;

/// How a packed left operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Row after row, [`PANEL_STRIDE`] apart: the depth is contiguous.
    AlongDepth,
    /// Depth step after depth step, a stride apart: rows are contiguous.
    AlongRows,
}

/// One run of a tile: rows += scale · left · right.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'a> {
    pub left: *const f32,
    /// Distance between depth steps, for [`Layout::AlongRows`].
    pub left_stride: usize,
    /// Packed: `vectors · lanes` floats per depth step.
    pub right: *const f32,
    pub depth: usize,
    /// Where each row of the tile begins in the result; rows beyond these are computed and dropped.
    pub rows: &'a [*mut f32],
    /// Valid columns.
    pub columns: usize,
    pub scale: f32,
    /// Add to what the result holds.
    pub load: bool,
    /// Added per column at the end.
    pub bias: Option<*const f32>,
    pub relu: bool,
    /// Write whole tiles past the caches; every row then starts at a multiple of a vector's size.
    pub stream: bool,
    /// What will be packed next: every depth step asks for one line, this many bytes apart.
    pub ahead: (*const u8, usize),
}

/// A compiled tile.
pub(crate) type TileFunction = unsafe fn(&Tile<'_>);

/// Rows of the tallest tile for a result of `columns`.
pub(crate) fn height(isa: Isa, columns: usize) -> usize {
    match isa {
        Isa::Avx512 | Isa::Avx512Bf16 if columns <= 16 => ROWS_MAX,
        Isa::Avx512 | Isa::Avx512Bf16 => 14,
        Isa::Avx2 => 6,
        Isa::Portable => 4,
    }
}

/// The smallest tile with at least `rows` rows, and one or two vectors.
pub(crate) fn tile(isa: Isa, rows: usize, vectors: usize, layout: Layout) -> TileFunction {
    macro_rules! pick {
        ($function:ident, $rows:literal) => {
            match (vectors, layout) {
                (1, Layout::AlongDepth) => $function::<$rows, 1, true>,
                (1, Layout::AlongRows) => $function::<$rows, 1, false>,
                (_, Layout::AlongDepth) => $function::<$rows, 2, true>,
                (_, Layout::AlongRows) => $function::<$rows, 2, false>,
            }
        };
    }
    match (isa, rows) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Avx512Bf16, 0..=4) => pick!(avx512, 4),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Avx512Bf16, 5..=8) => pick!(avx512, 8),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Avx512Bf16, 9..=14) => pick!(avx512, 14),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Avx512Bf16, _) if layout == Layout::AlongDepth => avx512::<ROWS_MAX, 1, true>,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Avx512Bf16, _) => avx512::<ROWS_MAX, 1, false>,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, 0..=3) => pick!(avx2, 3),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, _) => pick!(avx2, 6),
        _ => pick!(portable, 4),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,fma")]
unsafe fn avx512<const R: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::super::simd::Avx512, R, V, ALONG_DEPTH>(tile) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const R: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::super::simd::Avx2, R, V, ALONG_DEPTH>(tile) }
}

unsafe fn portable<const R: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run::<Portable, R, V, ALONG_DEPTH>(tile) }
}

/// What has to follow tiles that write past the caches, on the same thread.
pub(crate) struct Fence;

impl Vectorised for Fence {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller's promise.
        unsafe { S::fence() };
    }
}

/// # Safety
/// The machine has the instructions of `S`; `left` holds `R` rows and `right` `V` vectors for `depth` steps; each of `rows`
/// may be written for `columns` floats, and `bias` read for as many.
#[inline(always)]
unsafe fn run<S: Simd, const R: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>) {
    debug_assert!(tile.rows.len() <= R && tile.columns <= V * S::LANES);
    // SAFETY: as promised by the caller.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; R];
        let (mut left, mut right) = (tile.left, tile.right);
        let (mut ahead, ahead_step) = tile.ahead;
        for _ in 0..tile.depth {
            S::prefetch(ahead);
            ahead = ahead.wrapping_add(ahead_step);
            let mut vectors = [S::splat(0.0); V];
            for v in 0..V {
                vectors[v] = S::load(right.add(v * S::LANES));
            }
            for r in 0..R {
                let value = S::splat(*left.add(if ALONG_DEPTH { r * PANEL_STRIDE } else { r }));
                for v in 0..V {
                    sums[r][v] = S::mul_add(value, vectors[v], sums[r][v]);
                }
            }
            left = left.add(if ALONG_DEPTH { 1 } else { tile.left_stride });
            right = right.add(V * S::LANES);
        }
        // The sums leave the registers by constant indices. Indexed by the loops below they would live in memory all along.
        let mut spilled = MaybeUninit::<[[S::Vector; V]; R]>::uninit();
        let spilled = spilled.as_mut_ptr().cast::<S::Vector>();
        for r in 0..R {
            for v in 0..V {
                spilled.add(r * V + v).write(sums[r][v]);
            }
        }
        for v in 0..V {
            let columns = tile.columns.saturating_sub(v * S::LANES).min(S::LANES);
            if columns == S::LANES {
                finish::<S, V, true>(tile, v, columns, spilled.add(v));
            } else {
                finish::<S, V, false>(tile, v, columns, spilled.add(v));
            }
        }
    }
}

/// Scales the sums of vector `v` of every row, adds what is to be added and writes them.
///
/// # Safety
/// As [`run`]; `sums` holds a vector for each row, `V` apart.
#[inline(always)]
unsafe fn finish<S: Simd, const V: usize, const FULL: bool>(
    tile: &Tile<'_>,
    v: usize,
    columns: usize,
    sums: *const S::Vector,
) {
    // SAFETY: only `columns` floats of each row are touched.
    unsafe {
        let load = |source: *const f32| if FULL { S::load(source) } else { S::load_first(source, columns) };
        let scale = S::splat(tile.scale);
        let bias = tile.bias.map_or(S::splat(0.0), |bias| load(bias.wrapping_add(v * S::LANES)));
        for (r, row) in tile.rows.iter().enumerate() {
            let target = row.wrapping_add(v * S::LANES);
            let before = if tile.load { S::add(load(target), bias) } else { bias };
            let sum = S::mul_add(*sums.add(r * V), scale, before);
            let sum = if tile.relu { S::relu(sum) } else { sum };
            match (FULL, tile.stream) {
                (true, true) => S::stream(target, sum),
                (true, false) => S::store(target, sum),
                (false, _) => S::store_first(target, sum, columns),
            }
        }
    }
}
