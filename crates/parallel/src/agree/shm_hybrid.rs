//! ShmCaffe's SEASGD, hybrid (H): the workers of a node add up their gradients and step as one, and the first of them
//! exchanges with the memory box and gives the others what has become of the weights.
//!
//! It is `shm_async.rs` in groups (`center/grouped.rs`), which are the machines if nobody says otherwise.

use super::shm_async::ShmAsync;

/// What the command line offers.
pub const RECIPE: ShmAsync = ShmAsync::new(
    "shm-hybrid",
    "the workers of each machine step together as with all-reduce, and one of them exchanges with a memory box, every --period",
);
