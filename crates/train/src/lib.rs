//! Training: one step, the loop around it, evaluation, checkpoints, and the folder a run lives in.
//!
//! `step.rs` is the journey of a mini-batch; everything else is about starting it, repeating it, and being able to
//! stop. What is absent: how events look to people (the binary and crate `lab`), and how replicas agree.

pub mod balance;
pub mod checkpoint;
mod class_names;
pub mod compute;
pub mod config;
pub mod deadlines;
pub mod engine;
pub mod error;
pub mod evaluate;
pub mod exchange;
pub mod export;
pub mod gpus;
pub mod metrics;
pub mod micro_batch;
pub mod phases;
pub mod portions;
pub mod predict;
pub mod registry;
pub mod rehearsal;
pub mod replica;
pub mod room;
pub mod run;
pub mod serve;
pub mod sizing;
pub mod stage;
pub mod step;
pub mod together;
pub mod trainer;

pub use config::Config;
pub use error::TrainError;
pub use registry::Registry;
pub use trainer::{Outcome, Reason, Trainer};
