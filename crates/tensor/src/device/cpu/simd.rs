//! Vectors of floats, written once for every instruction set.
//!
//! A kernel is generic over [`Simd`] and marked `#[inline(always)]` down to the intrinsics; [`super::isa::Isa::run`] calls it
//! from a function compiled with the set's features, so everything is inlined there and becomes that set's instructions.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512, Avx512Bf16};
pub(crate) use portable::Portable;

use crate::bf16::Bf16;
use crate::dtype::{DType, Float};

/// Work that can be compiled for any instruction set.
pub(crate) trait Vectorised {
    /// Does the work. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The machine has the instructions of `S`.
    #[allow(unsafe_code)]
    unsafe fn run<S: Simd>(self);
}

/// One instruction set's vectors of floats.
///
/// # Safety of the methods
/// The machine must have the instructions; pointers must be valid for the floats read or written; none need be aligned.
#[allow(unsafe_code)]
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A vector.
    type Vector: Copy;
    /// Floats in it.
    const LANES: usize;
    /// Whether one instruction rounds a vector to bf16.
    const ROUNDS: bool = false;

    /// All lanes equal to `value`.
    unsafe fn splat(value: f32) -> Self::Vector;
    /// `LANES` floats.
    unsafe fn load(source: *const f32) -> Self::Vector;
    /// The first `count` floats, zeros after them; memory behind them is not touched.
    unsafe fn load_first(source: *const f32, count: usize) -> Self::Vector;
    /// Writes `LANES` floats.
    unsafe fn store(target: *mut f32, vector: Self::Vector);
    /// Writes `LANES` floats past the caches, to an address that is a multiple of the vector's size; [`Simd::fence`] must follow
    /// before another thread may read them.
    unsafe fn stream(target: *mut f32, vector: Self::Vector);
    /// Ends a series of [`Simd::stream`].
    unsafe fn fence();
    /// Writes the first `count` floats.
    unsafe fn store_first(target: *mut f32, vector: Self::Vector, count: usize);
    /// `LANES` numbers of bf16.
    unsafe fn load_bf16(source: *const Bf16) -> Self::Vector;
    /// As [`Simd::load_first`].
    unsafe fn load_first_bf16(source: *const Bf16, count: usize) -> Self::Vector;
    /// Writes `LANES` numbers rounded to the nearest bf16, ties to even. A set's own conversion takes denormals for zero.
    unsafe fn store_bf16(target: *mut Bf16, vector: Self::Vector);
    /// As [`Simd::store_first`].
    unsafe fn store_first_bf16(target: *mut Bf16, vector: Self::Vector, count: usize);
    /// Writes two vectors side by side as [`Simd::store_bf16`] does, or if asked as [`Simd::stream`].
    unsafe fn store_bf16_twice(target: *mut Bf16, vectors: [Self::Vector; 2], stream: bool);
    /// a·b + c, rounded once where the set can.
    unsafe fn mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// a + b.
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Each lane, or that of `floor` where it is larger; what is not a number stays so.
    unsafe fn raise(vector: Self::Vector, floor: Self::Vector) -> Self::Vector;
    /// Each lane rounded to bf16.
    unsafe fn round(vector: Self::Vector) -> Self::Vector;
    /// Both rounded to bf16; each lane's `low` in the lower half of a word, its `high` in the upper.
    unsafe fn pair(low: Self::Vector, high: Self::Vector) -> Self::Vector;
    /// a − b.
    unsafe fn sub(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// a·b.
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The smaller of each lane and the ceiling; what is not a number stays so.
    unsafe fn at_most(vector: Self::Vector, ceiling: Self::Vector) -> Self::Vector;
    /// The gradient, but zero where the value is not above zero or not below the ceiling.
    unsafe fn gate(gradient: Self::Vector, value: Self::Vector, ceiling: Self::Vector) -> Self::Vector;
    /// The larger numbers and what comes with them; the second where they are equal. What is not a number counts as larger.
    unsafe fn larger(
        first: (Self::Vector, Self::Vector),
        second: (Self::Vector, Self::Vector),
    ) -> (Self::Vector, Self::Vector);
    /// Each number where the bits of `a` and `b` are the same, zero elsewhere.
    unsafe fn where_same(numbers: Self::Vector, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Writes `LANES` numbers rounded to bf16 as [`Simd::stream`] does, to an address that is a multiple of their size.
    unsafe fn stream_bf16(target: *mut Bf16, vector: Self::Vector);
    /// Brings the line at `address` into the second-level cache; the address need not be valid.
    unsafe fn prefetch(address: *const u8);
    /// Transposes a block of `LANES` × `LANES` words; rows lie `source_bytes` apart in the source and `target_stride` words in
    /// the target.
    unsafe fn transpose(source: *const u8, source_bytes: usize, target: *mut f32, target_stride: usize);

    /// The larger of each lane and zero; what is not a number stays so.
    #[inline(always)]
    unsafe fn relu(vector: Self::Vector) -> Self::Vector {
        // SAFETY: the caller's promise.
        unsafe { Self::raise(vector, Self::splat(0.0)) }
    }

    /// [`Simd::pair`] of numbers in memory.
    #[inline(always)]
    unsafe fn pair_bf16(low: *const Bf16, high: *const Bf16) -> Self::Vector {
        // SAFETY: the caller's promise.
        unsafe { Self::pair(Self::load_bf16(low), Self::load_bf16(high)) }
    }

    /// [`Simd::pair`] of numbers of either type in memory.
    #[inline(always)]
    unsafe fn read_pair<E: Float>(low: *const E, high: *const E) -> Self::Vector {
        // SAFETY: the caller's promise.
        unsafe {
            if is_f32::<E>() {
                Self::pair(Self::load(low.cast()), Self::load(high.cast()))
            } else {
                Self::pair_bf16(low.cast(), high.cast())
            }
        }
    }

    /// `LANES` numbers of either type.
    #[inline(always)]
    unsafe fn read<E: Float>(source: *const E) -> Self::Vector {
        // SAFETY: the caller's promise.
        unsafe { if is_f32::<E>() { Self::load(source.cast()) } else { Self::load_bf16(source.cast()) } }
    }

    /// As [`Simd::load_first`].
    #[inline(always)]
    unsafe fn read_first<E: Float>(source: *const E, count: usize) -> Self::Vector {
        // SAFETY: the caller's promise.
        unsafe {
            if is_f32::<E>() {
                Self::load_first(source.cast(), count)
            } else {
                Self::load_first_bf16(source.cast(), count)
            }
        }
    }

    /// Writes `LANES` numbers of either type.
    #[inline(always)]
    unsafe fn write<E: Float>(target: *mut E, vector: Self::Vector) {
        // SAFETY: the caller's promise.
        unsafe {
            if is_f32::<E>() { Self::store(target.cast(), vector) } else { Self::store_bf16(target.cast(), vector) }
        }
    }

    /// Writes `LANES` numbers of either type as [`Simd::stream`] does, to an address that is a multiple of their size.
    #[inline(always)]
    unsafe fn write_past<E: Float>(target: *mut E, vector: Self::Vector) {
        // SAFETY: the caller's promise.
        unsafe {
            if is_f32::<E>() { Self::stream(target.cast(), vector) } else { Self::stream_bf16(target.cast(), vector) }
        }
    }

    /// As [`Simd::store_first`].
    #[inline(always)]
    unsafe fn write_first<E: Float>(target: *mut E, vector: Self::Vector, count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if is_f32::<E>() {
                Self::store_first(target.cast(), vector, count);
            } else {
                Self::store_first_bf16(target.cast(), vector, count);
            }
        }
    }
}

/// Whether `E` is `f32`; the other type that kernels compute with is bf16.
pub(crate) const fn is_f32<E: Float>() -> bool {
    matches!(E::DTYPE, DType::F32)
}
