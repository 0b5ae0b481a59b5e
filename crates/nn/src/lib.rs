//! Layers, models, initialisers, optimizers and learning-rate schedules.
//!
//! A model is a function that adds layers to a [`Net`]; the net is a checked graph plus what training needs to know of
//! each parameter. What is absent: devices (crate `tensor`), data (crate `data`) and any parallelism: a model knows
//! nothing of how it is split or how replicas agree.

pub mod init;
pub mod layer;
pub mod models;
pub mod net;
pub mod onnx;
pub mod optim;
pub mod parameter;
pub mod part;
pub mod schedule;
pub mod stage;
pub mod weights;
pub mod zoo;

pub use init::Init;
pub use net::{Input, Mode, Model, Net, Network};
pub use parameter::{ForeignLayout, Parameter, State};
pub use part::{PartForm, PartPieces, StagePieces};
pub use stage::StageNetwork;
