//! AVX2 with FMA: eight floats.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]
// Every block below holds for the reason the trait gives: the machine has AVX2 and FMA and the pointers are valid.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::arch::x86_64::*;

use super::Simd;
use crate::bf16::Bf16;

/// Eight floats in a 256-bit register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2;

#[inline(always)]
unsafe fn mask(count: usize) -> __m256i {
    let lanes = unsafe { _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7) };
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(count.min(8) as i32), lanes) }
}

/// Each lane rounded to bf16, in the lower half of a word.
#[inline(always)]
unsafe fn rounded(vector: __m256) -> __m256i {
    unsafe {
        // As `Bf16::from_f32`: half of the last place kept, or a hair less where that place is even.
        let bits = _mm256_castps_si256(vector);
        let upper = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        let sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(vector, vector));
        _mm256_blendv_epi8(_mm256_srli_epi32::<16>(sum), quiet, nan)
    }
}

impl Simd for Avx2 {
    type Vector = __m256;
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(source) }
    }

    #[inline(always)]
    unsafe fn load_first(source: *const f32, count: usize) -> __m256 {
        unsafe { _mm256_maskload_ps(source, mask(count)) }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, vector: __m256) {
        unsafe { _mm256_storeu_ps(target, vector) }
    }

    #[inline(always)]
    unsafe fn stream(target: *mut f32, vector: __m256) {
        unsafe { _mm256_stream_ps(target, vector) }
    }

    #[inline(always)]
    unsafe fn fence() {
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    unsafe fn store_first(target: *mut f32, vector: __m256, count: usize) {
        unsafe { _mm256_maskstore_ps(target, mask(count), vector) }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const Bf16) -> __m256 {
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn load_first_bf16(source: *const Bf16, count: usize) -> __m256 {
        let mut numbers = [Bf16::default(); 8];
        unsafe {
            std::ptr::copy_nonoverlapping(source, numbers.as_mut_ptr(), count.min(8));
            Self::load_bf16(numbers.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(target: *mut Bf16, vector: __m256) {
        unsafe {
            let words = rounded(vector);
            // Four words of each half become the lower 64 bits of that half.
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(words, words));
            _mm_storeu_si128(target.cast(), _mm256_castsi256_si128(packed));
        }
    }

    #[inline(always)]
    unsafe fn store_first_bf16(target: *mut Bf16, vector: __m256, count: usize) {
        let mut numbers = [Bf16::default(); 8];
        unsafe {
            Self::store_bf16(numbers.as_mut_ptr(), vector);
            std::ptr::copy_nonoverlapping(numbers.as_ptr(), target, count.min(8));
        }
    }

    #[inline(always)]
    unsafe fn store_bf16_twice(target: *mut Bf16, [first, second]: [__m256; 2], stream: bool) {
        unsafe {
            // Four words of each half of both, then the halves in order.
            let packed = _mm256_packus_epi32(rounded(first), rounded(second));
            let packed = _mm256_permute4x64_epi64::<0b1101_1000>(packed);
            if stream {
                _mm256_stream_si256(target.cast(), packed);
            } else {
                _mm256_storeu_si256(target.cast(), packed);
            }
        }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn raise(vector: __m256, floor: __m256) -> __m256 {
        // The second operand is returned when either is not a number.
        unsafe { _mm256_max_ps(floor, vector) }
    }

    #[inline(always)]
    unsafe fn round(vector: __m256) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(rounded(vector))) }
    }

    #[inline(always)]
    unsafe fn pair(low: __m256, high: __m256) -> __m256 {
        unsafe {
            let high = _mm256_slli_epi32::<16>(rounded(high));
            _mm256_castsi256_ps(_mm256_or_si256(rounded(low), high))
        }
    }

    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn at_most(vector: __m256, ceiling: __m256) -> __m256 {
        // The second operand is returned when either is not a number.
        unsafe { _mm256_min_ps(ceiling, vector) }
    }

    #[inline(always)]
    unsafe fn gate(gradient: __m256, value: __m256, ceiling: __m256) -> __m256 {
        unsafe {
            let above = _mm256_cmp_ps::<_CMP_NLE_UQ>(value, _mm256_setzero_ps());
            let below = _mm256_cmp_ps::<_CMP_NGE_UQ>(value, ceiling);
            _mm256_and_ps(_mm256_and_ps(above, below), gradient)
        }
    }

    #[inline(always)]
    unsafe fn larger(first: (__m256, __m256), second: (__m256, __m256)) -> (__m256, __m256) {
        unsafe {
            let larger = _mm256_cmp_ps::<_CMP_GT_OQ>(first.0, second.0);
            let won = _mm256_or_ps(larger, _mm256_cmp_ps::<_CMP_UNORD_Q>(first.0, first.0));
            (_mm256_blendv_ps(second.0, first.0, won), _mm256_blendv_ps(second.1, first.1, won))
        }
    }

    #[inline(always)]
    unsafe fn where_same(numbers: __m256, a: __m256, b: __m256) -> __m256 {
        unsafe {
            let same = _mm256_cmpeq_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
            _mm256_and_ps(_mm256_castsi256_ps(same), numbers)
        }
    }

    #[inline(always)]
    unsafe fn stream_bf16(target: *mut Bf16, vector: __m256) {
        unsafe {
            let words = rounded(vector);
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(words, words));
            _mm_stream_si128(target.cast(), _mm256_castsi256_si128(packed));
        }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }

    #[inline(always)]
    unsafe fn transpose(source: *const u8, source_bytes: usize, target: *mut f32, target_stride: usize) {
        unsafe {
            // Rows r and r+4 side by side, 128 bits each; then two 4×4 transposes in both halves at once.
            for half in 0..2 {
                let gather = |row: usize| {
                    let at = |lane: usize| _mm_loadu_ps(source.add((row + 4 * lane) * source_bytes + 16 * half).cast());
                    _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(at(0)), at(1))
                };
                let (r0, r1, r2, r3) = (gather(0), gather(1), gather(2), gather(3));
                let (low01, high01) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
                let (low23, high23) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
                let pairs = |a: __m256, b: __m256| {
                    let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
                    let (low, high) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
                    (_mm256_castpd_ps(low), _mm256_castpd_ps(high))
                };
                let ((c0, c1), (c2, c3)) = (pairs(low01, low23), pairs(high01, high23));
                for (column, vector) in [c0, c1, c2, c3].into_iter().enumerate() {
                    _mm256_storeu_ps(target.add((4 * half + column) * target_stride), vector);
                }
            }
        }
    }
}
