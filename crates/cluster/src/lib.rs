//! Who is in a run, and whether they are alive.
//!
//! [`spec`] reads from flags, files and launchers' environments which member of a run this process is. What is
//! deliberately absent: bytes of gradients (`comm` carries them) and what to do about a fault beyond ending (`train`
//! resumes from a checkpoint).

mod error;
pub mod membership;
pub mod phase;
pub mod spec;

pub use error::ClusterError;
pub use spec::{Address, Job, Local, Member};
