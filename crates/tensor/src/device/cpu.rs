//! The CPU device.

pub mod batch_norm;
#[cfg(test)]
mod check;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod layer_norm;
pub mod layout;
pub mod lstm;
pub mod pool;
pub mod pooling;
pub mod reduce;
pub mod softmax;
mod special;
mod vectorize;
