//! What this machine could do at best: multiply-adds that never leave the registers, and reading memory. Kernels are
//! compared with these, so they are measured on the device's own threads and instructions.
#![allow(unsafe_code)]

use std::hint::black_box;

use paceline_system::clock::Clock;

use super::Cpu;
use super::isa::Isa;
use super::simd::{Simd, Vectorised};
use crate::buffer::Buffer;

/// Independent sums in flight: enough for the latency of a multiply-add times the units that compute them.
const SUMS: usize = 12;

/// Multiply-adds of each sum in one task, some tenths of a millisecond.
const REPEATS: usize = 100_000;

/// Tasks for each thread, so that no thread is idle for long at the end.
const TASKS: usize = 8;

/// Measurements, of which the best counts.
const ROUNDS: usize = 20;

/// Floats of the array that is read: 256 MiB, more than any cache.
const READ_FLOATS: usize = 64 << 20;

/// The bounds of one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// Floating-point operations per second in f32, a multiply-add counting as two.
    pub f32_flops: f64,
    /// The same with the instruction that multiplies pairs of bf16, where the device has it.
    pub bf16_flops: Option<f64>,
    /// Bytes per second that can be read from memory.
    pub bytes: f64,
}

impl Cpu {
    /// Measures the bounds of this device: about a quarter of a second.
    pub fn peak(&self) -> Peak {
        let flops = |lanes: usize, task: &(dyn Fn() + Sync)| {
            let tasks = TASKS * self.pool().threads();
            let operations = 2 * tasks * REPEATS * SUMS * lanes;
            operations as f64 / self.least_seconds(ROUNDS, tasks, &|_| task())
        };
        let isa = self.isa();
        let f32_flops = flops(isa.lanes(), &|| isa.run(MultiplyAdd));
        let bf16_flops = match isa {
            Isa::Avx512Bf16 => Some(flops(2 * isa.lanes(), &pairs_of_bf16)),
            #[cfg(target_arch = "x86_64")]
            // A product of tiles is sixteen steps of sixteen rows: one in sixteen repeats, each worth 256 times a vector.
            Isa::Amx => {
                let repeats = REPEATS * SUMS / super::gemm::amx::SIDE;
                Some(flops(2 * isa.lanes() * super::gemm::amx::SIDE, &|| super::gemm::amx::spin(repeats)))
            }
            _ => None,
        };
        Peak { f32_flops, bf16_flops, bytes: self.read_speed() }
    }

    fn read_speed(&self) -> f64 {
        const PART: usize = 1 << 20;
        let mut memory = Buffer::zeroed(READ_FLOATS);
        // Memory that was never written may be one page of zeros.
        self.pool().chunks(&mut memory, PART, |_, part| part.fill(1.0));
        let (memory, isa): (&[f32], Isa) = (&memory, self.isa());
        let read = |task: usize| isa.run(Read(&memory[task * PART..][..PART]));
        size_of_val(memory) as f64 / self.least_seconds(3, READ_FLOATS / PART, &read)
    }

    fn least_seconds(&self, rounds: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> f64 {
        let clock = Clock::real();
        let round = |_| {
            let start = clock.seconds();
            self.pool().run(tasks, |number, _| task(number));
            clock.seconds() - start
        };
        (0..rounds).map(round).fold(f64::INFINITY, f64::min)
    }
}

/// Sums of products, all in registers.
struct MultiplyAdd;

impl Vectorised for MultiplyAdd {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller's promise; the last store has room for a vector.
        unsafe {
            let (a, b) = (S::splat(black_box(1e-3)), S::splat(black_box(1e-3)));
            let mut sums = [S::splat(1.0); SUMS];
            for _ in 0..REPEATS {
                for sum in &mut sums {
                    *sum = S::mul_add(a, b, *sum);
                }
            }
            let total = sums.into_iter().reduce(|total, sum| S::add(total, sum)).expect("there are sums");
            let mut out = [0.0f32; 16];
            S::store(out.as_mut_ptr(), total);
            black_box(out);
        }
    }
}

/// Reads floats and keeps only their sum.
struct Read<'a>(&'a [f32]);

impl Vectorised for Read<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller's promise; every vector that is read lies in the slice, and the store has room for one.
        unsafe {
            let mut sums = [S::splat(0.0); 4];
            for part in self.0.chunks_exact(4 * S::LANES) {
                for (index, sum) in sums.iter_mut().enumerate() {
                    *sum = S::add(*sum, S::load(part.as_ptr().add(index * S::LANES)));
                }
            }
            let total = sums.into_iter().reduce(|total, sum| S::add(total, sum)).expect("there are sums");
            let mut out = [0.0f32; 16];
            S::store(out.as_mut_ptr(), total);
            black_box(out);
        }
    }
}

/// [`MultiplyAdd`] with pairs of bf16. Only called where the device has the instruction.
fn pairs_of_bf16() {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m512bh, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_set1_ps};

        #[target_feature(enable = "avx512f,avx512bf16")]
        fn run() {
            // 2⁻¹⁰ twice in each word.
            let word = _mm512_set1_epi32(black_box(0x3A80_3A80));
            // SAFETY: both are 64 bytes of which every value is valid.
            let pairs: __m512bh = unsafe { std::mem::transmute(word) };
            let mut sums = [_mm512_set1_ps(1.0); SUMS];
            for _ in 0..REPEATS {
                for sum in &mut sums {
                    *sum = _mm512_dpbf16_ps(*sum, pairs, pairs);
                }
            }
            black_box(sums.into_iter().reduce(|total, sum| _mm512_add_ps(total, sum)));
        }
        assert!(Isa::Avx512Bf16.available(), "this machine has no AVX512_BF16");
        // SAFETY: the features were seen.
        unsafe { run() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_its_bounds() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let peak = Cpu::with_isa(1, isa).peak();
            assert!(peak.f32_flops > 1e8 && peak.f32_flops < 1e13, "{isa:?}: {peak:?}");
            assert!(peak.bytes > 1e8 && peak.bytes < 1e13, "{isa:?}: {peak:?}");
            assert_eq!(peak.bf16_flops.is_some(), isa.multiplies_pairs());
        }
    }
}
