//! What a run left behind, made readable: a report in one HTML file, TensorBoard files, a summary for the terminal.
//!
//! Everything here is a reader of [`paceline_system::event`] lines. Nothing here is asked while a step runs, and nothing
//! here looks into a model: a finished, a crashed and a live run look the same. Called by the binary and by `train`'s
//! owner of the run directory.
//!
//! What is deliberately absent: a plotting crate (a curve is a path; ticks are twenty lines) and any resource that the
//! report would have to fetch.

pub mod error;
mod gpu;
mod history;
pub mod log;
mod quantity;
pub mod report;
pub mod summary;
pub mod tensorboard;
mod waiting;

pub use error::LabError;
pub use summary::{Outcome, Summary, SummaryBuilder};
pub use tensorboard::TensorBoard;
