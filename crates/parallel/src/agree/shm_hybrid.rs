//! ShmCaffe's SEASGD, hybrid (H): the workers of a node add up their gradients and step as one, and the first of them
//! exchanges with the memory box and gives the others what has become of the weights.
//!
//! It is `shm_async.rs` in groups (`center/grouped.rs`): two of them if nobody says otherwise, and as a rule one for each machine.

use super::shm_async::ShmAsync;

/// What the command line offers.
pub const RECIPE: ShmAsync = ShmAsync::new(
    "shm-hybrid",
    "workers of a --group step together as with all-reduce, and one of them exchanges with a memory box, every --period",
    true,
);
