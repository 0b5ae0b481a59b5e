//! Vectors of four floats in plain Rust. Compilers turn them into whatever the target has.
#![allow(unsafe_code)]

use super::Simd;
use crate::bf16::Bf16;

/// Four floats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

const LANES: usize = 4;

impl Simd for Portable {
    type Vector = [f32; LANES];
    const LANES: usize = LANES;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Vector {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self::Vector {
        // SAFETY: the caller gives four floats.
        unsafe { source.cast::<Self::Vector>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_first(source: *const f32, count: usize) -> Self::Vector {
        // SAFETY: only lanes below `count` are read.
        std::array::from_fn(|lane| if lane < count { unsafe { *source.add(lane) } } else { 0.0 })
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, vector: Self::Vector) {
        // SAFETY: the caller gives room for four floats.
        unsafe { target.cast::<Self::Vector>().write_unaligned(vector) }
    }

    #[inline(always)]
    unsafe fn stream(target: *mut f32, vector: Self::Vector) {
        // SAFETY: as `store`.
        unsafe { Self::store(target, vector) }
    }

    #[inline(always)]
    unsafe fn fence() {}

    #[inline(always)]
    unsafe fn store_first(target: *mut f32, vector: Self::Vector, count: usize) {
        for (lane, value) in vector.into_iter().enumerate().take(count) {
            // SAFETY: only lanes below `count` are written.
            unsafe { *target.add(lane) = value };
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const Bf16) -> Self::Vector {
        // SAFETY: the caller gives four numbers.
        unsafe { source.cast::<[Bf16; LANES]>().read_unaligned() }.map(Bf16::to_f32)
    }

    #[inline(always)]
    unsafe fn load_first_bf16(source: *const Bf16, count: usize) -> Self::Vector {
        // SAFETY: only lanes below `count` are read.
        std::array::from_fn(|lane| if lane < count { unsafe { *source.add(lane) }.to_f32() } else { 0.0 })
    }

    #[inline(always)]
    unsafe fn store_bf16(target: *mut Bf16, vector: Self::Vector) {
        // SAFETY: the caller gives room for four numbers.
        unsafe { target.cast::<[Bf16; LANES]>().write_unaligned(vector.map(Bf16::from_f32)) }
    }

    #[inline(always)]
    unsafe fn store_first_bf16(target: *mut Bf16, vector: Self::Vector, count: usize) {
        for (lane, value) in vector.into_iter().enumerate().take(count) {
            // SAFETY: only lanes below `count` are written.
            unsafe { *target.add(lane) = Bf16::from_f32(value) };
        }
    }

    #[inline(always)]
    unsafe fn store_bf16_twice(target: *mut Bf16, [first, second]: [Self::Vector; 2], _stream: bool) {
        // SAFETY: the caller gives room for eight numbers.
        unsafe {
            Self::store_bf16(target, first);
            Self::store_bf16(target.add(LANES), second);
        }
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] + b[lane])
    }

    #[inline(always)]
    unsafe fn raise(vector: Self::Vector, floor: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| if vector[lane] < floor[lane] { floor[lane] } else { vector[lane] })
    }

    #[inline(always)]
    unsafe fn round(vector: Self::Vector) -> Self::Vector {
        vector.map(|value| Bf16::from_f32(value).to_f32())
    }

    #[inline(always)]
    unsafe fn pair(low: Self::Vector, high: Self::Vector) -> Self::Vector {
        let bits = |value: f32| u32::from(Bf16::from_f32(value).to_bits());
        std::array::from_fn(|lane| f32::from_bits(bits(low[lane]) | bits(high[lane]) << 16))
    }

    #[inline(always)]
    unsafe fn sub(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] - b[lane])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    unsafe fn at_most(vector: Self::Vector, ceiling: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| if vector[lane] > ceiling[lane] { ceiling[lane] } else { vector[lane] })
    }

    #[inline(always)]
    unsafe fn gate(gradient: Self::Vector, value: Self::Vector, ceiling: Self::Vector) -> Self::Vector {
        let cut = |lane: usize| value[lane] <= 0.0 || value[lane] >= ceiling[lane];
        std::array::from_fn(|lane| if cut(lane) { 0.0 } else { gradient[lane] })
    }

    #[inline(always)]
    unsafe fn larger(
        first: (Self::Vector, Self::Vector),
        second: (Self::Vector, Self::Vector),
    ) -> (Self::Vector, Self::Vector) {
        let won = |lane: usize| first.0[lane] > second.0[lane] || first.0[lane].is_nan();
        let choose =
            |a: Self::Vector, b: Self::Vector| std::array::from_fn(|lane| if won(lane) { a[lane] } else { b[lane] });
        (choose(first.0, second.0), choose(first.1, second.1))
    }

    #[inline(always)]
    unsafe fn where_same(numbers: Self::Vector, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        let same = |lane: usize| a[lane].to_bits() == b[lane].to_bits();
        std::array::from_fn(|lane| if same(lane) { numbers[lane] } else { 0.0 })
    }

    #[inline(always)]
    unsafe fn stream_bf16(target: *mut Bf16, vector: Self::Vector) {
        // SAFETY: as `store_bf16`.
        unsafe { Self::store_bf16(target, vector) }
    }

    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}

    #[inline(always)]
    unsafe fn transpose(source: *const u8, source_bytes: usize, target: *mut f32, target_stride: usize) {
        for row in 0..LANES {
            for column in 0..LANES {
                // SAFETY: the caller gives two blocks of four rows of four words.
                unsafe {
                    let word = source.add(row * source_bytes).cast::<f32>().add(column).read_unaligned();
                    *target.add(column * target_stride + row) = word;
                }
            }
        }
    }
}
