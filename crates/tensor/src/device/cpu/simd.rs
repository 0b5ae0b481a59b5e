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
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

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
    /// a·b + c, rounded once where the set can.
    unsafe fn mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// a + b.
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The larger of each lane and zero; what is not a number stays so.
    unsafe fn relu(vector: Self::Vector) -> Self::Vector;
    /// Brings the line at `address` into the second-level cache; the address need not be valid.
    unsafe fn prefetch(address: *const f32);
    /// Transposes a block of `LANES` × `LANES`; the strides are distances between rows, in floats.
    unsafe fn transpose(source: *const f32, source_stride: usize, target: *mut f32, target_stride: usize);
}
