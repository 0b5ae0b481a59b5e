//! The CPU device.

pub mod context;
pub mod conv;
pub mod gemm;
pub mod isa;
pub mod pool;
pub mod scratch;
pub(crate) mod simd;
