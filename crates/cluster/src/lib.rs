//! Who is in a run, and whether they are alive.
//!
//! [`spec`] reads from flags, files and launchers' environments which member of a run this process is;
//! [`rendezvous::join`] meets the other members; the [`Control`] it returns sends heartbeats and names whoever is late,
//! stalled or gone, as the pure state machine in [`membership`] decides. What is deliberately absent: bytes of gradients
//! (`comm` carries them) and what to do about a fault beyond ending, or going on without a rank that the others can do
//! without (`train` resumes from a checkpoint).

mod connection;
pub mod control;
mod error;
pub mod interface;
pub mod launch;
pub mod ledger;
pub mod membership;
pub mod message;
pub mod notice;
pub mod rendezvous;
pub mod samples;
pub mod speaker;
pub mod spec;
pub mod table;
pub mod token;
pub mod waiting;

pub use control::Control;
pub use error::ClusterError;
pub use ledger::{Claim, Counted, Given, Take};
pub use membership::{Limits, Verdict};
pub use message::{Admission, Folder};
pub use notice::{Log, Notice};
pub use paceline_system::phase::Phase;
pub use paceline_system::progress::{Position, Progress};
pub use rendezvous::{JoinOptions, join};
pub use spec::{Address, Job, Local, Member};
pub use table::{Entry, Table};
