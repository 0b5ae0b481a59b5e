//! AVX-512: sixteen floats; with AVX512_BF16, its conversions.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]
// Every block below holds for the reason the trait gives: the machine has the features and the pointers are valid.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::arch::x86_64::*;

use super::Simd;
use crate::bf16::Bf16;

/// Sixteen floats in a 512-bit register; `BF16` says whether the machine has instructions for that type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vectors<const BF16: bool>;

/// Without AVX512_BF16.
pub(crate) type Avx512 = Vectors<false>;

/// With AVX512_BF16.
pub(crate) type Avx512Bf16 = Vectors<true>;

/// Sixteen numbers rounded to bf16.
#[inline(always)]
unsafe fn rounded<const BF16: bool>(vector: __m512) -> __m256i {
    unsafe {
        if BF16 {
            return std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(vector));
        }
        // As `Bf16::from_f32`: half of the last place kept, or a hair less where that place is even.
        let bits = _mm512_castps_si512(vector);
        let upper = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        let sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(vector, vector);
        let words = _mm512_mask_or_epi32(_mm512_srli_epi32::<16>(sum), nan, upper, _mm512_set1_epi32(0x40));
        _mm512_cvtepi32_epi16(words)
    }
}

/// Sixteen numbers of bf16 as floats.
#[inline(always)]
unsafe fn widened(numbers: __m256i) -> __m512 {
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(numbers))) }
}

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    if count >= 16 { u16::MAX } else { (1u16 << count) - 1 }
}

/// The rounded numbers of `low` before those of `high`.
#[inline(always)]
unsafe fn both<const BF16: bool>(low: __m512, high: __m512) -> __m512i {
    unsafe {
        if BF16 {
            return std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        }
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(rounded::<BF16>(low)), rounded::<BF16>(high))
    }
}

/// Words of the numbers i and 16 + i.
#[inline(always)]
unsafe fn zipped(numbers: __m512i) -> __m512 {
    unsafe {
        #[rustfmt::skip]
        let words = _mm512_set_epi32(
            0x001f_000f, 0x001e_000e, 0x001d_000d, 0x001c_000c, 0x001b_000b, 0x001a_000a, 0x0019_0009, 0x0018_0008,
            0x0017_0007, 0x0016_0006, 0x0015_0005, 0x0014_0004, 0x0013_0003, 0x0012_0002, 0x0011_0001, 0x0010_0000,
        );
        _mm512_castsi512_ps(_mm512_permutexvar_epi16(words, numbers))
    }
}

impl Avx512Bf16 {
    /// a · b + c, where the words of a and b are pairs of bf16.
    ///
    /// # Safety
    /// The machine has AVX512_BF16.
    #[inline(always)]
    pub unsafe fn dot(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe {
            let pairs = |words: __m512| std::mem::transmute::<__m512, __m512bh>(words);
            _mm512_dpbf16_ps(c, pairs(a), pairs(b))
        }
    }
}

impl<const BF16: bool> Simd for Vectors<BF16> {
    type Vector = __m512;
    const LANES: usize = 16;
    const ROUNDS: bool = BF16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(source) }
    }

    #[inline(always)]
    unsafe fn load_first(source: *const f32, count: usize) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps(mask(count), source) }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, vector: __m512) {
        unsafe { _mm512_storeu_ps(target, vector) }
    }

    #[inline(always)]
    unsafe fn stream(target: *mut f32, vector: __m512) {
        unsafe { _mm512_stream_ps(target, vector) }
    }

    #[inline(always)]
    unsafe fn fence() {
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    unsafe fn store_first(target: *mut f32, vector: __m512, count: usize) {
        unsafe { _mm512_mask_storeu_ps(target, mask(count), vector) }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const Bf16) -> __m512 {
        unsafe { widened(_mm256_loadu_si256(source.cast())) }
    }

    #[inline(always)]
    unsafe fn load_first_bf16(source: *const Bf16, count: usize) -> __m512 {
        unsafe { widened(_mm256_maskz_loadu_epi16(mask(count), source.cast())) }
    }

    #[inline(always)]
    unsafe fn store_bf16(target: *mut Bf16, vector: __m512) {
        unsafe { _mm256_storeu_si256(target.cast(), rounded::<BF16>(vector)) }
    }

    #[inline(always)]
    unsafe fn store_first_bf16(target: *mut Bf16, vector: __m512, count: usize) {
        unsafe { _mm256_mask_storeu_epi16(target.cast(), mask(count), rounded::<BF16>(vector)) }
    }

    #[inline(always)]
    unsafe fn store_bf16_twice(target: *mut Bf16, [first, second]: [__m512; 2], stream: bool) {
        unsafe {
            let numbers = both::<BF16>(first, second);
            if stream {
                _mm512_stream_si512(target.cast(), numbers)
            } else {
                _mm512_storeu_si512(target.cast(), numbers)
            }
        }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn raise(vector: __m512, floor: __m512) -> __m512 {
        // The second operand is returned when either is not a number.
        unsafe { _mm512_max_ps(floor, vector) }
    }

    #[inline(always)]
    unsafe fn round(vector: __m512) -> __m512 {
        unsafe { widened(rounded::<BF16>(vector)) }
    }

    #[inline(always)]
    unsafe fn pair(low: __m512, high: __m512) -> __m512 {
        unsafe { zipped(both::<BF16>(low, high)) }
    }

    #[inline(always)]
    unsafe fn pair_bf16(low: *const Bf16, high: *const Bf16) -> __m512 {
        unsafe {
            let low = _mm512_castsi256_si512(_mm256_loadu_si256(low.cast()));
            zipped(_mm512_inserti64x4::<1>(low, _mm256_loadu_si256(high.cast())))
        }
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn at_most(vector: __m512, ceiling: __m512) -> __m512 {
        // The second operand is returned when either is not a number.
        unsafe { _mm512_min_ps(ceiling, vector) }
    }

    #[inline(always)]
    unsafe fn gate(gradient: __m512, value: __m512, ceiling: __m512) -> __m512 {
        unsafe {
            let above = _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(value, _mm512_setzero_ps());
            let inside = _mm512_mask_cmp_ps_mask::<_CMP_NGE_UQ>(above, value, ceiling);
            _mm512_maskz_mov_ps(inside, gradient)
        }
    }

    #[inline(always)]
    unsafe fn larger(first: (__m512, __m512), second: (__m512, __m512)) -> (__m512, __m512) {
        unsafe {
            let larger = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(first.0, second.0);
            let won = larger | _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(first.0, first.0);
            (_mm512_mask_mov_ps(second.0, won, first.0), _mm512_mask_mov_ps(second.1, won, first.1))
        }
    }

    #[inline(always)]
    unsafe fn where_same(numbers: __m512, a: __m512, b: __m512) -> __m512 {
        unsafe {
            let same = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(a), _mm512_castps_si512(b));
            _mm512_maskz_mov_ps(same, numbers)
        }
    }

    #[inline(always)]
    unsafe fn stream_bf16(target: *mut Bf16, vector: __m512) {
        unsafe { _mm256_stream_si256(target.cast(), rounded::<BF16>(vector)) }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }

    #[inline(always)]
    unsafe fn transpose(source: *const u8, source_bytes: usize, target: *mut f32, target_stride: usize) {
        unsafe {
            // Rows r, r+4, r+8, r+12 side by side, 128 bits each; then four 4×4 transposes in every 128-bit lane at once.
            for quarter in 0..4 {
                let gather = |row: usize| {
                    let at =
                        |lane: usize| _mm_loadu_ps(source.add((row + 4 * lane) * source_bytes + 16 * quarter).cast());
                    let low = _mm512_castps128_ps512(at(0));
                    let low = _mm512_insertf32x4::<1>(low, at(1));
                    let low = _mm512_insertf32x4::<2>(low, at(2));
                    _mm512_insertf32x4::<3>(low, at(3))
                };
                let (r0, r1, r2, r3) = (gather(0), gather(1), gather(2), gather(3));
                let (low01, high01) = (_mm512_unpacklo_ps(r0, r1), _mm512_unpackhi_ps(r0, r1));
                let (low23, high23) = (_mm512_unpacklo_ps(r2, r3), _mm512_unpackhi_ps(r2, r3));
                let pairs = |a: __m512, b: __m512| {
                    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                    let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
                    (_mm512_castpd_ps(low), _mm512_castpd_ps(high))
                };
                let ((c0, c1), (c2, c3)) = (pairs(low01, low23), pairs(high01, high23));
                for (column, vector) in [c0, c1, c2, c3].into_iter().enumerate() {
                    _mm512_storeu_ps(target.add((4 * quarter + column) * target_stride), vector);
                }
            }
        }
    }
}
