//! AMX: tiles of 16 rows × 16 words in registers of their own, and one instruction that multiplies two of them.
//!
//! A block of 32×32 results is four sums, two tiles of the left operand and two of the right: all eight registers. In sixteen steps of
//! the depth it loads four tiles of a kilobyte for four products of 16 cycles each, so loads hide behind products. The packed panels are
//! what the instruction wants: pairs of bf16 along the depth on the left, depth step after depth step on the right. Panels that lie along
//! the rows (the gradient of a weight) are transposed on the way, which takes about as long as the products. The steps of the depth
//! that do not fill a tile are left to the vector kernel, which also finishes the sums.
//!
//! The compiler does not know these registers (its intrinsics are not stable), so it never touches them between the pieces of assembly.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

use std::arch::asm;
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use super::super::simd::{Avx512Bf16, Simd};
use super::kernel::{Pairs, Tile, TileMoments, run_from};

/// Rows, and words of a row, of a tile.
pub(crate) const SIDE: usize = 16;

/// Rows that the vector kernel finishes at a time.
const FINISHED: usize = 8;

/// Whether the processor has the tiles and the system lets this process use them. The first call asks for them.
pub(crate) fn available() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        let wanted = AMX_BF16 | AMX_TILE;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & wanted == wanted && permitted()
    })
}

/// Linux gives a process the 8 KiB of tile registers only when asked: `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let mut answer = ARCH_PRCTL;
    // SAFETY: the call has two numbers and no pointers; a system call overwrites rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inout("rax") answer,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Gives all eight registers their full size, once for each thread: the configuration is part of a thread's registers.
#[inline(always)]
fn configure() {
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }
    thread_local! {
        static CONFIGURED: Cell<bool> = const { Cell::new(false) };
    }
    if CONFIGURED.get() {
        return;
    }
    let mut configuration =
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    configuration.row_bytes[..8].fill((SIDE * size_of::<f32>()) as u16);
    configuration.rows[..8].fill(SIDE as u8);
    // SAFETY: callers have seen that the machine has tiles, and the layout is the processor's.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly)) };
    CONFIGURED.set(true);
}

/// A tile of `16·T` rows and `16·V` columns.
///
/// # Safety
/// [`available`] has been seen, and AVX512_BF16; otherwise as [`super::kernel::run`], with `16·T` rows of the left panel.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
pub(super) unsafe fn amx<const T: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>) {
    configure();
    let whole = tile.depth / SIDE;
    #[repr(C, align(64))]
    struct Sums([f32; 4 * SIDE * SIDE]);
    let mut sums = MaybeUninit::<Sums>::uninit();
    let (sums, stride) = (sums.as_mut_ptr().cast::<f32>(), V * SIDE);
    // SAFETY: the caller's promise; the sums have room for T·V tiles.
    unsafe {
        multiply::<T, V, ALONG_DEPTH>(tile, whole);
        store::<T, V>(sums, stride);
        let (done, count) = (whole * SIDE, tile.rows.len());
        for first in (0..count).step_by(FINISHED) {
            let rows = first..(first + FINISHED).min(count);
            let left = if ALONG_DEPTH { first * tile.left_stride + done } else { first + done * tile.left_stride };
            let rest = Tile {
                left: tile.left.wrapping_add(left),
                right: tile.right.wrapping_add(done * tile.right_stride),
                depth: tile.depth - done,
                rows: &tile.rows[rows.clone()],
                narrow: tile.narrow.map(|narrow| &narrow[rows]),
                moments: tile.moments.map(|moments| TileMoments { begins: moments.begins && first == 0, ..moments }),
                ahead: &[],
                ..*tile
            };
            let start = sums.add(first * stride);
            run_from::<Avx512Bf16, Pairs, FINISHED, V, ALONG_DEPTH>(&rest, Some(start.cast_const()));
        }
    }
}

/// Adds up `whole` blocks of sixteen steps in registers 0 to 3.
///
/// # Safety
/// As [`amx`], on a thread that is configured.
#[inline(always)]
unsafe fn multiply<const T: usize, const V: usize, const ALONG_DEPTH: bool>(tile: &Tile<'_>, whole: usize) {
    let bytes = size_of::<f32>();
    let mut turned = MaybeUninit::<[f32; 2 * SIDE * SIDE]>::uninit();
    let turned = turned.as_mut_ptr().cast::<f32>();
    let mut asked = Asked::new(tile);
    // SAFETY: the caller's promise; a row of a tile is sixteen words.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nomem, nostack));
        for block in 0..whole {
            let step = block * SIDE;
            let (left, left_bytes) = if ALONG_DEPTH {
                (tile.left.add(step), tile.left_stride * bytes)
            } else {
                for t in 0..T {
                    let from = tile.left.add(step * tile.left_stride + t * SIDE);
                    Avx512Bf16::transpose(from.cast(), tile.left_stride * bytes, turned.add(t * SIDE * SIDE), SIDE);
                }
                (turned.cast_const(), SIDE * bytes)
            };
            let right = tile.right.add(step * tile.right_stride);
            let right_bytes = tile.right_stride * bytes;
            asm!(
                "tileloadd tmm4, [{left} + {left_bytes}*1]",
                "tileloadd tmm6, [{right} + {right_bytes}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                left = in(reg) left, left_bytes = in(reg) left_bytes, right = in(reg) right, right_bytes = in(reg) right_bytes,
                options(nostack, readonly),
            );
            if V == 2 {
                asm!(
                    "tileloadd tmm7, [{right} + {right_bytes}*1]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    right = in(reg) right.add(SIDE), right_bytes = in(reg) right_bytes,
                    options(nostack, readonly),
                );
            }
            if T == 2 {
                asm!(
                    "tileloadd tmm5, [{left} + {left_bytes}*1]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    left = in(reg) left.wrapping_byte_add(SIDE * left_bytes), left_bytes = in(reg) left_bytes,
                    options(nostack, readonly),
                );
            }
            if T == 2 && V == 2 {
                asm!("tdpbf16ps tmm3, tmm5, tmm7", options(nomem, nostack));
            }
            asked.ask(SIDE);
        }
    }
}

/// Writes registers 0 to 3 as one block of rows.
///
/// # Safety
/// As [`multiply`]; the block has room.
#[inline(always)]
unsafe fn store<const T: usize, const V: usize>(sums: *mut f32, stride: usize) {
    let bytes = stride * size_of::<f32>();
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tilestored [{} + {}*1], tmm0", in(reg) sums, in(reg) bytes, options(nostack));
        if V == 2 {
            asm!("tilestored [{} + {}*1], tmm1", in(reg) sums.add(SIDE), in(reg) bytes, options(nostack));
        }
        if T == 2 {
            asm!("tilestored [{} + {}*1], tmm2", in(reg) sums.add(SIDE * stride), in(reg) bytes, options(nostack));
        }
        if T == 2 && V == 2 {
            asm!("tilestored [{} + {}*1], tmm3", in(reg) sums.add(SIDE * stride + SIDE), in(reg) bytes, options(nostack));
        }
    }
}

/// Products of tiles that never leave the registers, `repeats` of them.
///
/// # Panics
/// When there are no tiles.
pub(crate) fn spin(repeats: usize) {
    assert!(available(), "this machine has no AMX");
    configure();
    // SAFETY: the machine has tiles and the thread is configured; nothing is read or written.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nomem, nostack));
        asm!("tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7", options(nomem, nostack));
        for _ in 0..repeats.div_ceil(4) {
            asm!(
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                options(nomem, nostack),
            );
        }
    }
}

/// What a tile asks for, piece by piece, as [`super::kernel::run`] does.
struct Asked<'a> {
    pieces: &'a [(*const u8, usize)],
    depth: usize,
    step: usize,
}

impl<'a> Asked<'a> {
    fn new(tile: &Tile<'a>) -> Self {
        Self { pieces: tile.ahead, depth: tile.depth, step: 0 }
    }

    /// The share of the next `steps`.
    ///
    /// # Safety
    /// The machine has AVX-512.
    #[inline(always)]
    unsafe fn ask(&mut self, steps: usize) {
        let count = self.pieces.len();
        for step in self.step..self.step + steps {
            if count == 0 || step >= self.depth {
                break;
            }
            let piece = step * count / self.depth;
            let (start, pace) = self.pieces[piece];
            let first = (self.depth * piece).div_ceil(count);
            // SAFETY: the caller's promise; asking reads nothing.
            unsafe { Avx512Bf16::prefetch(start.wrapping_add((step - first) * pace)) };
        }
        self.step += steps;
    }
}
