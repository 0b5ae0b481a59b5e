//! The real world behind one door: clock, randomness, disk, threads, signals and the event log.
//!
//! No other crate reads a clock, draws entropy, touches the disk or spawns a protocol thread. That keeps everything
//! above this crate a function of its inputs, so that it can be replayed, simulated and compared bit for bit.
//! What is deliberately absent: networking (transports own it) and compute threads (the CPU device owns its pool).

pub mod checksum;
pub mod clock;
pub mod cores;
pub mod disk;
pub mod entropy;
pub mod event;
pub mod host;
pub mod inbox;
pub mod limits;
pub mod lock;
pub mod machine;
pub mod memory;
pub mod phase;
pub mod printable;
pub mod process;
pub mod progress;
pub mod random;
pub mod ready;
mod regular;
pub mod secret;
pub mod shell;
pub mod signal;
pub mod span;
pub mod threads;
