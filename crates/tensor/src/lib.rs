//! The engine: a static [`graph`] becomes its [`gradient`], is [fused](fuse), given its [types](mixed), [planned](plan), and run by a [`device`].
//!
//! Everything about a training step is known before it runs, so all of it can be printed, costed and tested as plain
//! values. What is absent: ranks, machines and messages (crate `parallel` knows both), and models (crate `nn`).

pub mod bf16;
pub mod buffer;
pub mod cut;
pub mod device;
pub mod dtype;
pub mod execute;
pub mod fuse;
pub mod gradient;
pub mod graph;
pub mod mixed;
pub mod op;
pub mod part;
pub mod plan;
pub mod recompute;
pub mod shape;
mod split;
pub mod store;
pub mod unary;
pub mod window;

pub use bf16::Bf16;
pub use buffer::Buffer;
pub use device::Device;
pub use dtype::{DType, Element, Float};
pub use execute::{Executor, Pass, Slot};
pub use graph::{Graph, GraphError, Node, Source, Value};
pub use mixed::Precision;
pub use op::Op;
pub use plan::{Plan, Wanted};
pub use recompute::MemoryUse;
pub use shape::Shape;
pub use store::Store;
pub use unary::Unary;
