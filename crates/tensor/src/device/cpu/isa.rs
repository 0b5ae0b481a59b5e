//! The instruction sets the kernels are written for, and the choice between them at run time.
#![allow(unsafe_code)]

use serde::{Deserialize, Serialize};

use super::simd::{Portable, Vectorised};

/// An instruction set. Results differ between sets in their last bits; on one set they never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Isa {
    /// What every machine has.
    Portable,
    /// x86-64 with AVX2 and FMA: 8 lanes.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL, as every server since 2017 has: 16 lanes.
    Avx512,
    /// The same and AVX512_BF16.
    Avx512Bf16,
    /// The same and AMX with bf16 tiles, on Linux.
    Amx,
}

/// `PACELINE_ISA` cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PACELINE_ISA={name} is not an instruction set of this machine; write one of {}, or leave it out", available())]
pub struct IsaError {
    /// What it says.
    pub name: String,
}

fn available() -> String {
    let names: Vec<&str> = Isa::ALL.into_iter().filter(|isa| isa.available()).map(Isa::name).collect();
    names.join(", ")
}

impl Isa {
    /// Every set, the slowest first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The name in files, tables and `PACELINE_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Amx => "amx",
        }
    }

    /// The set that the environment variable `PACELINE_ISA` names, or without it the fastest: for tests of the slower paths
    /// and for the same bits on machines that differ.
    ///
    /// # Errors
    /// When it names no set, or one that this machine does not have.
    pub fn preferred() -> Result<Self, IsaError> {
        let Some(name) = paceline_system::host::variable("PACELINE_ISA") else { return Ok(Self::best()) };
        let found = Self::ALL.into_iter().find(|isa| isa.name() == name && isa.available());
        found.ok_or(IsaError { name })
    }

    /// The fastest set this machine has.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.available()).unwrap_or(Self::Portable)
    }

    /// Whether this machine has the set.
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return match self {
            Self::Portable => true,
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("fma")
            }
            Self::Avx512Bf16 => Self::Avx512.available() && is_x86_feature_detected!("avx512bf16"),
            Self::Amx => Self::Avx512Bf16.available() && super::gemm::amx::available(),
        };
        #[cfg(not(target_arch = "x86_64"))]
        return self == Self::Portable;
    }

    /// Floats in one vector.
    pub const fn lanes(self) -> usize {
        match self {
            Self::Portable => 4,
            Self::Avx2 => 8,
            Self::Avx512 | Self::Avx512Bf16 | Self::Amx => 16,
        }
    }

    /// Whether it multiplies pairs of bf16.
    pub(crate) const fn multiplies_pairs(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx)
    }

    /// Runs `work` compiled for this set.
    ///
    /// # Panics
    /// When the machine does not have the set.
    pub(crate) fn run<W: Vectorised>(self, work: W) {
        assert!(self.available(), "this machine has no {self:?}");
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` has seen the features that the function is compiled with.
            Self::Avx512Bf16 | Self::Amx => unsafe { avx512_bf16(work) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx512 => unsafe { avx512(work) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx2 => unsafe { avx2(work) },
            // SAFETY: portable vectors need nothing.
            _ => unsafe { work.run::<Portable>() },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
unsafe fn avx512_bf16<W: Vectorised>(work: W) {
    // SAFETY: the caller has seen the features.
    unsafe { work.run::<super::simd::Avx512Bf16>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn avx512<W: Vectorised>(work: W) {
    // SAFETY: the caller has seen the features.
    unsafe { work.run::<super::simd::Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<W: Vectorised>(work: W) {
    // SAFETY: the caller has seen the features.
    unsafe { work.run::<super::simd::Avx2>() }
}
