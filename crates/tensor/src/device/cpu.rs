//! The CPU device.

pub mod pool;
