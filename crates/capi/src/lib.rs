//! The memory box for programs in C, and for those that can call C: `include/paceline.h` says what there is.
//!
//! | file | what it is |
//! |---|---|
//! | `boxes.rs` | boxes and regions as C sees them, with every argument looked at: safe code |
//! | `problem.rs` | what went wrong, as a number and a sentence |
//! | `calls.rs` | the functions of the header: pointers become references, panics become numbers |
//!
//! Programs in Rust use `paceline::comm::memory_box` and have no need of this.

mod boxes;
mod calls;
mod problem;
