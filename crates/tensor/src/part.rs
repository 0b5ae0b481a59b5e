//! A graph in parts: what each of several devices computes of every layer, as a graph of its own.

mod form;
mod piece;

pub use form::Form;
pub use piece::{PartTensor, Piece};
