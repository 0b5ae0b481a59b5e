//! Bytes between ranks. This crate knows ranks, ranges of elements, deadlines and links; it never names a tensor.
//!
//! A collective is a list of transfers (`transfer.rs`, `collective/`), a plain value that can be printed, costed and
//! tested; one small interpreter runs it on any transport. Nothing a peer sends is trusted, every wait has a deadline
//! and looks at the shared [`Stop`], and a fault names the rank and the phase.

pub mod awaited;
pub mod choose;
pub mod collective;
pub mod communicator;
pub mod cost;
pub mod describe;
pub mod error;
pub mod global;
pub mod memory_box;
pub mod probe;
pub mod rank;
pub mod reduce;
pub mod registered;
pub mod run;
pub mod stop;
pub mod token;
pub mod transfer;
pub mod transport;
pub mod wait;
pub mod wire;

pub use awaited::Awaited;
pub use choose::Choice;
pub use collective::{Algorithm, Collective, Nodes};
pub use communicator::{Communicator, Options};
pub use cost::{Link, Links};
pub use error::CommError;
pub use rank::{Generation, Rank, RunId};
pub use reduce::Kind;
pub use registered::RegisteredBuffer;
pub use stop::Stop;
pub use token::Token;
pub use transfer::{Action, Transfer};
pub use transport::Transport;
pub use transport::shm::{LentSlice, OneCopy, Piece, Shape as OneCopyShape};
pub use wait::Wait;
