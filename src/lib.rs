//! Paceline: distributed deep-learning training, from a laptop core to a GPU cluster.
//!
//! This crate is the binary `paceline` and the library a Rust user depends on. Everything a program with a model and data of its own needs
//! is in the [`prelude`]: a [`run::Run`] trains, alone or by many processes, and [`cli::run_with`] is the command line with what the program
//! brings. The parts are the crates re-exported below, in the order in which a mini-batch meets them.
//!
//! ```no_run
//! use paceline::prelude::*;
//!
//! fn model(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
//!     let x = net.conv("conv", x, Conv::new(16, 3).pad(1))?;
//!     let x = net.relu(x)?;
//!     let x = net.global_average_pool(x)?;
//!     net.linear("fc", x, classes)
//! }
//!
//! # fn main() -> Result<(), TrainError> {
//! let config = Config { model: "mine".into(), data: "shapes".into(), workers: 2, epochs: 3, ..Config::default() };
//! let trained = Run::new(config).model("mine", model).train()?;
//! println!("{:.1}%", 100.0 * trained.accuracy());
//! # Ok(())
//! # }
//! ```

mod arguments;
mod choose;
pub mod cli;
mod command;
mod failure;
mod output;
pub mod run;
mod terminal;

pub use paceline_cluster as cluster;
pub use paceline_comm as comm;
pub use paceline_data as data;
pub use paceline_lab as lab;
pub use paceline_nn as nn;
pub use paceline_parallel as parallel;
pub use paceline_system as system;
pub use paceline_tensor as tensor;
pub use paceline_train as train;

/// What a program that trains a model of its own needs.
pub mod prelude {
    pub use crate::run::calibrate::Calibrate;
    pub use crate::run::{Run, Trained};
    pub use paceline_data::pixels::Pixels;
    pub use paceline_data::{AugmentChoice, Dataset, OwnData, Sample, SampleKind, Samples, Spec};
    pub use paceline_nn::init::Init;
    pub use paceline_nn::layer::{Conv, Norm, Window};
    pub use paceline_nn::models::Listing;
    pub use paceline_nn::optim::{HyperParameters, Optimizer};
    pub use paceline_nn::schedule::{LearningRate, Schedule, WarmUp};
    pub use paceline_nn::{Input, Mode, Model, Net, Network, zoo};
    pub use paceline_system::signal::Stop;
    pub use paceline_tensor::{DType, Device, Graph, GraphError, Shape, Unary, Value};
    pub use paceline_train::predict::{Guess, Predictor};
    pub use paceline_train::together::Carry;
    pub use paceline_train::trainer::{Observer, Surroundings};
    pub use paceline_train::{Config, Outcome, Reason, Registry, TrainError, Trainer};
}
