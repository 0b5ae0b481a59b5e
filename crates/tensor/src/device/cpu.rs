//! The CPU device: compute threads, an instruction set and working memory, and the dispatch from operations to kernels.

pub mod batch_norm;
#[cfg(test)]
mod check;
pub mod context;
pub mod conv;
mod dispatch;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
pub mod isa;
pub mod layer_norm;
pub mod layout;
pub mod lstm;
mod memory;
pub mod pool;
pub mod pooling;
pub mod reduce;
pub mod scratch;
pub(crate) mod simd;
pub mod softmax;
mod special;
mod vectorize;
