//! One kernel body, compiled for each instruction set and chosen at run time.
//!
//! [`vectorized!`] wraps a function whose loops the compiler vectorises by itself. Bodies keep to plain IEEE operations
//! (no fused multiply-add) and spell out the order of their sums, so every set gives the same bits; the tests of
//! each kernel hold this.

/// Defines a function whose body is compiled once per [`super::isa::Isa`]; the set comes as an argument before the others.
/// What the body calls must be `#[inline(always)]` (or a closure small enough to be inlined anyway), otherwise it keeps the
/// portable code.
macro_rules! vectorized {
    ($(#[$attribute:meta])*
     fn $name:ident $(<$($generic:ident: $bound:path),+>)? ($($argument:ident: $kind:ty),* $(,)?) $(-> $output:ty)? $body:block) => {
        $(#[$attribute])*
        #[allow(unsafe_code, clippy::too_many_arguments)]
        fn $name $(<$($generic: $bound),+>)? (isa: $crate::device::cpu::isa::Isa, $($argument: $kind),*) $(-> $output)? {
            #[inline(always)]
            fn portable $(<$($generic: $bound),+>)? ($($argument: $kind),*) $(-> $output)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::device::cpu::isa::Isa;
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512 $(<$($generic: $bound),+>)? ($($argument: $kind),*) $(-> $output)? {
                    portable($($argument),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2 $(<$($generic: $bound),+>)? ($($argument: $kind),*) $(-> $output)? {
                    portable($($argument),*)
                }
                assert!(isa.available(), "this machine has no {isa:?}");
                match isa {
                    // SAFETY: `available` has seen the features that the function is compiled with.
                    Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => return unsafe { avx512($($argument),*) },
                    // SAFETY: as above.
                    Isa::Avx2 => return unsafe { avx2($($argument),*) },
                    Isa::Portable => {}
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = isa;
            portable($($argument),*)
        }
    };
}
pub(super) use vectorized;
