//! The innermost loop: one tile of the result, held in registers over a run of the depth.
//!
//! A tile of R rows and V vectors needs R·V accumulators, V vectors of the right operand and one broadcast value. Per step of
//! the depth it loads V vectors and R single words for R·V multiply-adds, so a tall tile of two vectors keeps the
//! load ports half idle: 14×2 fills 30 of AVX-512's 32 registers, 6×2 fills 15 of AVX2's 16. Shorter tiles end a
//! ragged block of rows; 24×1 serves results of at most one vector's width.
//!
//! A word is an `f32`, or with AVX512_BF16 two bf16 that follow each other in the depth: one instruction multiplies both and adds
//! them to a sum in `f32`. It takes denormal numbers for zero and rounds after each of the two. Where the machine has AMX, tiles of
//! pairs with more than eight rows are computed there (`amx.rs`).
#![allow(unsafe_code)]
// Index loops over constant bounds unroll into registers; iterators over these arrays do not always.
#![allow(clippy::needless_range_loop)]

use std::mem::MaybeUninit;

use super::super::isa::Isa;
use super::super::moments::{self, BlockSums};
use super::super::rows::Lanes;
use super::super::simd::{Portable, Simd, Vectorised};
#[cfg(target_arch = "x86_64")]
use super::amx::amx;
use crate::bf16::Bf16;

/// Most rows any tile has.
pub(crate) const ROWS_MAX: usize = 32;

/// Rows of the tallest tile of one vector.
const TALL: usize = 24;

/// Most words of the depth that one tile run covers: a panel of the tallest tile then fills about half of a first-level cache.
pub(crate) const DEPTH_MAX: usize = 320;

/// Distance between the rows of a packed left panel that lies along the depth. The extra line keeps the rows out of one cache set.
pub(crate) const PANEL_STRIDE: usize = DEPTH_MAX + 16;

/// How a left panel lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Row after row, a stride apart: the depth is contiguous.
    AlongDepth,
    /// Depth step after depth step, a stride apart: rows are contiguous.
    AlongRows,
}

/// What the words of a panel hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Words {
    /// One `f32`.
    Plain,
    /// One `f32`, rounded to bf16.
    Rounded,
    /// Two bf16, the earlier one in the lower half; a zero follows the last of an odd depth.
    Pairs,
}

impl Words {
    /// Numbers in a word.
    pub const fn numbers(self) -> usize {
        match self {
            Self::Plain | Self::Rounded => 1,
            Self::Pairs => 2,
        }
    }
}

/// One run of a tile: rows += scale · left · right.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'a> {
    pub left: *const f32,
    /// Distance between rows or, for [`Layout::AlongRows`], depth steps, in words.
    pub left_stride: usize,
    /// `vectors · lanes` words per depth step.
    pub right: *const f32,
    /// Distance between depth steps, in words.
    pub right_stride: usize,
    /// In words.
    pub depth: usize,
    /// Where each row begins in the result; rows beyond these are computed and dropped.
    pub rows: &'a [*mut f32],
    /// Where the rows are written instead, rounded, if given.
    pub narrow: Option<&'a [*mut Bf16]>,
    /// The first column, counted from where the rows and the bias begin.
    pub column: usize,
    /// Valid columns.
    pub columns: usize,
    pub scale: f32,
    /// Add to what `rows` hold.
    pub load: bool,
    /// Added per column at the end.
    pub bias: Option<*const f32>,
    pub relu: bool,
    /// Where finished values count.
    pub moments: Option<TileMoments>,
    /// Write whole tiles past the caches; every row then starts at a multiple of a cache line.
    pub stream: bool,
    /// What will be read next: each piece is asked for in an equal share of the depth steps, this many bytes apart.
    pub ahead: &'a [(*const u8, usize)],
}

/// The moments of the rows' columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileMoments {
    /// From where the rows and the bias begin.
    pub sums: BlockSums,
    /// These are the first rows of their block.
    pub begins: bool,
}

/// A compiled tile.
pub(crate) type TileFunction = unsafe fn(&Tile<'_>);

/// Rows of the tallest tile for a result of `columns`.
pub(crate) fn height(isa: Isa, words: Words, columns: usize) -> usize {
    match isa {
        Isa::Amx if words == Words::Pairs => 32,
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx if columns <= 16 => TALL,
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => 14,
        Isa::Avx2 => 6,
        Isa::Portable => 4,
    }
}

/// Rows of the smallest tile with at least `rows` rows.
pub(crate) fn tile_rows(isa: Isa, words: Words, rows: usize) -> usize {
    match (isa, rows) {
        (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, 0..=4) => 4,
        (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, 5..=8) => 8,
        (Isa::Amx, _) if words == Words::Pairs => rows.next_multiple_of(16),
        (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, 9..=14) => 14,
        (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, _) => TALL,
        (Isa::Avx2, 0..=3) => 3,
        (Isa::Avx2, _) => 6,
        (Isa::Portable, _) => 4,
    }
}

/// The tile of [`tile_rows`] and one or two vectors.
pub(crate) fn tile(isa: Isa, words: Words, rows: usize, vectors: usize, layout: Layout) -> TileFunction {
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
    #[cfg(target_arch = "x86_64")]
    macro_rules! pick_512 {
        ($function:ident) => {
            match (tile_rows(isa, Words::Plain, rows), layout) {
                (4, _) => pick!($function, 4),
                (8, _) => pick!($function, 8),
                (14, _) => pick!($function, 14),
                (_, Layout::AlongDepth) => $function::<TALL, 1, true>,
                (_, Layout::AlongRows) => $function::<TALL, 1, false>,
            }
        };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = rows;
    match (isa, words) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Amx, Words::Pairs) if rows > 16 => pick!(amx, 2),
        #[cfg(target_arch = "x86_64")]
        (Isa::Amx, Words::Pairs) if rows > 8 => pick!(amx, 1),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16 | Isa::Amx, Words::Pairs) => pick_512!(avx512_bf16),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, _) => pick_512!(avx512),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, _) if rows <= 3 => pick!(avx2, 3),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, _) => pick!(avx2, 6),
        _ => pick!(portable, 4),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn avx512_bf16<const R: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::super::simd::Avx512Bf16, Pairs, R, V, ALONG_DEPTH>(tile) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn avx512<const R: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::super::simd::Avx512, Floats, R, V, ALONG_DEPTH>(tile) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const R: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::super::simd::Avx2, Floats, R, V, ALONG_DEPTH>(tile) }
}

unsafe fn portable<const R: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>) {
    // SAFETY: the caller's promise.
    unsafe { run::<Portable, Floats, R, V, ALONG_DEPTH>(tile) }
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

/// The product of two vectors of words.
pub(super) trait Arithmetic<S: Simd> {
    /// a · b + c.
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn mul_add(a: S::Vector, b: S::Vector, c: S::Vector) -> S::Vector;
}

/// Words are floats.
struct Floats;

impl<S: Simd> Arithmetic<S> for Floats {
    #[inline(always)]
    unsafe fn mul_add(a: S::Vector, b: S::Vector, c: S::Vector) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { S::mul_add(a, b, c) }
    }
}

/// Words are pairs of bf16.
#[cfg(target_arch = "x86_64")]
pub(super) struct Pairs;

#[cfg(target_arch = "x86_64")]
impl Arithmetic<super::super::simd::Avx512Bf16> for Pairs {
    #[inline(always)]
    unsafe fn mul_add(
        a: std::arch::x86_64::__m512,
        b: std::arch::x86_64::__m512,
        c: std::arch::x86_64::__m512,
    ) -> std::arch::x86_64::__m512 {
        // SAFETY: the caller's promise.
        unsafe { super::super::simd::Avx512Bf16::dot(a, b, c) }
    }
}

/// # Safety
/// The machine has the instructions of `S` and `A`; `left` holds `R` rows and `right` `V` vectors for `depth` steps; each of `rows`
/// may be read (if `load`) and written (if not `narrow`) for `columns` numbers, each of `narrow` written, and `bias` read.
#[inline(always)]
pub(super) unsafe fn run<S: Simd, A: Arithmetic<S>, const R: usize, const V: usize, const ALONG_DEPTH: bool>(
    tile: &Tile<'_>,
) {
    // SAFETY: as promised by the caller.
    unsafe { run_from::<S, A, R, V, ALONG_DEPTH>(tile, None) }
}

/// As [`run`], adding to the sums that `start` holds, row after row of `V` vectors.
///
/// # Safety
/// As [`run`]; `start` can be read for `R` rows.
#[inline(always)]
pub(super) unsafe fn run_from<S: Simd, A: Arithmetic<S>, const R: usize, const V: usize, const ALONG_DEPTH: bool>(
    tile: &Tile<'_>,
    start: Option<*const f32>,
) {
    debug_assert!(tile.rows.len() <= R && tile.columns <= V * S::LANES);
    // SAFETY: as promised by the caller.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; R];
        if let Some(start) = start {
            for r in 0..R {
                for v in 0..V {
                    sums[r][v] = S::load(start.add((r * V + v) * S::LANES));
                }
            }
        }
        let (mut left, mut right, stride) = (tile.left, tile.right, tile.left_stride);
        let (pieces, mut done) = (tile.ahead.len().max(1), 0);
        for piece in 0..pieces {
            let (mut ahead, ahead_step) = tile.ahead.get(piece).copied().unwrap_or((right.cast(), 0));
            let end = tile.depth * (piece + 1) / pieces;
            for _ in done..end {
                S::prefetch(ahead);
                ahead = ahead.wrapping_add(ahead_step);
                let mut vectors = [S::splat(0.0); V];
                for v in 0..V {
                    vectors[v] = S::load(right.add(v * S::LANES));
                }
                for r in 0..R {
                    let word = left.add(if ALONG_DEPTH { r * stride } else { r });
                    let value = S::splat(word.read_unaligned());
                    for v in 0..V {
                        sums[r][v] = A::mul_add(value, vectors[v], sums[r][v]);
                    }
                }
                left = left.add(if ALONG_DEPTH { 1 } else { stride });
                right = right.add(tile.right_stride);
            }
            done = end;
        }
        let rounds = tile.narrow.is_some() && !S::ROUNDS;
        if tile.rows.len() == R && tile.columns == V * S::LANES && !rounds {
            finish::<S, R, V>(tile, sums);
            return;
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
            finish_ragged::<S, V>(tile, v, columns, spilled.add(v));
        }
    }
}

/// Scales the sums of a whole tile, adds what is to be added and writes them. Loops are short so that each is unrolled and the sums
/// stay in registers; rounding without an instruction for it would be too long.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn finish<S: Simd, const R: usize, const V: usize>(tile: &Tile<'_>, mut sums: [[S::Vector; V]; R]) {
    // SAFETY: the caller's promise; there are `R` rows.
    unsafe {
        // Most tiles of a convolution end without any of this.
        if tile.scale != 1.0 || tile.bias.is_some() {
            let (scale, mut bias) = (S::splat(tile.scale), [S::splat(0.0); V]);
            if let Some(values) = tile.bias {
                for v in 0..V {
                    bias[v] = S::load(values.add(tile.column + v * S::LANES));
                }
            }
            for r in 0..R {
                for v in 0..V {
                    sums[r][v] = S::mul_add(sums[r][v], scale, bias[v]);
                }
            }
        }
        if tile.load {
            for r in 0..R {
                let row = tile.rows.get_unchecked(r).add(tile.column);
                for v in 0..V {
                    sums[r][v] = S::add(sums[r][v], S::load(row.add(v * S::LANES)));
                }
            }
        }
        if tile.relu {
            for r in 0..R {
                for v in 0..V {
                    sums[r][v] = S::relu(sums[r][v]);
                }
            }
        }
        if let Some(narrow) = tile.narrow.filter(|_| S::ROUNDS) {
            if V == 1 {
                for r in 0..R {
                    S::store_bf16(narrow.get_unchecked(r).add(tile.column), sums[r][0]);
                }
            } else if tile.stream {
                for r in 0..R {
                    S::store_bf16_twice(narrow.get_unchecked(r).add(tile.column), [sums[r][0], sums[r][V - 1]], true);
                }
            } else {
                for r in 0..R {
                    S::store_bf16_twice(narrow.get_unchecked(r).add(tile.column), [sums[r][0], sums[r][V - 1]], false);
                }
            }
        } else if tile.stream {
            for r in 0..R {
                let row = tile.rows.get_unchecked(r).add(tile.column);
                for v in 0..V {
                    S::stream(row.add(v * S::LANES), sums[r][v]);
                }
            }
        } else {
            for r in 0..R {
                let row = tile.rows.get_unchecked(r).add(tile.column);
                for v in 0..V {
                    S::store(row.add(v * S::LANES), sums[r][v]);
                }
            }
        }
        if let Some(moments) = tile.moments {
            count::<S, R, V>(moments, tile, sums);
        }
    }
}

/// Adds finished values to the moments of their columns. They are stored by now, so that every register is free after its use.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn count<S: Simd, const R: usize, const V: usize>(
    TileMoments { sums, begins }: TileMoments,
    tile: &Tile<'_>,
    mut values: [[S::Vector; V]; R],
) {
    let column = tile.column;
    // SAFETY: the caller's promise.
    unsafe {
        if tile.narrow.is_some() {
            for r in 0..R {
                for v in 0..V {
                    values[r][v] = S::round(values[r][v]);
                }
            }
        }
        for v in 0..V {
            let mut group = [S::splat(0.0); R];
            for r in 0..R {
                group[r] = values[r][v];
            }
            moments::count::<S>(sums, column + v * S::LANES, Lanes::All, begins, &group);
        }
    }
}

/// As [`finish`], for vector `v` of the rows there are and the first `columns` of its lanes.
///
/// # Safety
/// As [`run`]; `sums` holds a vector for each row, `V` apart.
#[inline(always)]
unsafe fn finish_ragged<S: Simd, const V: usize>(tile: &Tile<'_>, v: usize, columns: usize, sums: *const S::Vector) {
    // SAFETY: only `columns` numbers of each row are touched.
    unsafe {
        let scale = S::splat(tile.scale);
        let floor = S::splat(if tile.relu { 0.0 } else { f32::NEG_INFINITY });
        let at = tile.column + v * S::LANES;
        let bias = match tile.bias {
            Some(bias) => S::load_first(bias.wrapping_add(at), columns),
            None => S::splat(0.0),
        };
        let mut group = [S::splat(0.0); ROWS_MAX];
        for (r, row) in tile.rows.iter().enumerate() {
            let mut sum = S::mul_add(*sums.add(r * V), scale, bias);
            if tile.load {
                sum = S::add(sum, S::load_first(row.wrapping_add(at), columns));
            }
            let sum = S::raise(sum, floor);
            if tile.moments.is_some() {
                group[r] = if tile.narrow.is_some() { S::round(sum) } else { sum };
            }
            if let Some(narrow) = tile.narrow {
                S::store_first_bf16(narrow.get_unchecked(r).wrapping_add(at), sum, columns);
            } else {
                S::store_first(row.wrapping_add(at), sum, columns);
            }
        }
        if let Some(TileMoments { sums, begins }) = tile.moments.filter(|_| columns > 0) {
            moments::count::<S>(sums, at, Lanes::First(columns), begins, &group[..tile.rows.len()]);
        }
    }
}
