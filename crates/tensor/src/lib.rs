//! The engine: a static graph becomes its gradient, is fused, planned, and run by a device.

pub mod device;
pub mod unary;
pub mod window;
