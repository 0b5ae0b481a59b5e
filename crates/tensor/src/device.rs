//! The devices that run a plan.

pub mod cpu;
