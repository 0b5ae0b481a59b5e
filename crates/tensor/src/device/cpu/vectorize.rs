//! One kernel body, compiled for each vector width of the processor and chosen at run time.
//!
//! [`vectorized!`] wraps a function whose loops the compiler vectorises by itself. Bodies keep to plain IEEE operations
//! (no fused multiply-add) and spell out the order of their sums, so every level gives the same bits; the tests of
//! each kernel hold this.

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// What the compilation target guarantees.
    Portable,
    /// 256-bit vectors.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

/// The widest level this processor has.
#[inline]
fn detected() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx512 {
            return Level::Avx512;
        }
        if is_x86_feature_detected!("avx2") {
            return Level::Avx2;
        }
    }
    Level::Portable
}

/// The level to run now: never above what the processor has.
#[inline]
pub(super) fn level() -> Level {
    #[cfg(test)]
    if let Some(level) = forced::LEVEL.get() {
        return level;
    }
    detected()
}

/// Defines a function whose body is compiled once per [`Level`]. What the body calls must be `#[inline(always)]` (or a
/// closure small enough to be inlined anyway), otherwise it keeps the portable code.
macro_rules! vectorized {
    ($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $output:ty)? $body:block) => {
        $(#[$attribute])*
        #[allow(unsafe_code)]
        fn $name($($argument: $kind),*) $(-> $output)? {
            #[inline(always)]
            fn portable($($argument: $kind),*) $(-> $output)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::device::cpu::vectorize::{Level, level};
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($argument: $kind),*) $(-> $output)? {
                    portable($($argument),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($argument: $kind),*) $(-> $output)? {
                    portable($($argument),*)
                }
                match level() {
                    // SAFETY: `level` names only what the processor has.
                    Level::Avx512 => return unsafe { avx512($($argument),*) },
                    // SAFETY: as above.
                    Level::Avx2 => return unsafe { avx2($($argument),*) },
                    Level::Portable => {}
                }
            }
            portable($($argument),*)
        }
    };
}
pub(super) use vectorized;

#[cfg(test)]
pub(super) mod forced {
    //! Lets a test run a kernel at a lower level than the processor's, on the calling thread.

    use super::{Level, detected};
    use std::cell::Cell;

    thread_local! {
        pub(super) static LEVEL: Cell<Option<Level>> = const { Cell::new(None) };
    }

    /// Runs `body` on this thread at `level`, or not at all where the processor lacks it.
    pub(in super::super) fn at_level<T>(level: Level, body: impl FnOnce() -> T) -> Option<T> {
        (level <= detected()).then(|| {
            LEVEL.set(Some(level));
            let result = body();
            LEVEL.set(None);
            result
        })
    }
}
