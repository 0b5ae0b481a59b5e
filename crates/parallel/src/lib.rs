//! How replicas agree on the weights, and how their messages are squeezed. The only crate that knows both of
//! gradients and of ranks.
//!
//! It works on flat slices of gradients and on the order in which they become final, which a plan knows
//! before the first step. So it serves any engine that can say the same of its gradients; it never sees a
//! graph. [`split`] lists the order in which the stages of a split model work. What is deliberately absent:
//! negotiation while a step runs. What travels is a list ([`agree::Protocol`], [`schedule`]), the same on every
//! rank.

pub mod agree;
pub mod forecast;
pub mod lock_free;
pub mod mesh;
pub mod ownership;
pub mod part;
pub mod schedule;
pub mod siblings;
pub mod split;
pub mod squeeze;
pub mod stage;

pub use agree::{Agreement, Settled};
pub use ownership::{Owned, Ownership};
