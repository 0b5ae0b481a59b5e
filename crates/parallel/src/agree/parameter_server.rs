//! Parameter server: workers push gradients, servers apply them and give back weights.
//!
//! Synchronous: the servers add up what all workers push for a bucket and make one step with the sum. Asynchronous: every push is a step
//! of its own, with the weights as they are; with a bound on staleness nobody gets further ahead of the slowest worker than that.
//! One server moves p·S bytes in and p·S out, p workers and S bytes of gradients; several servers share that equally.

pub mod server;
pub mod talk;
pub mod turns;
mod worker;

use std::time::Duration;

use paceline_comm::{CommError, Communicator};
pub use talk::Roles;

use super::courier::{BucketShape, Courier};

/// When pushes are applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// All workers' together.
    #[default]
    Synchronous,
    /// Each as it comes.
    Asynchronous {
        /// Steps that a worker may be ahead of the slowest; none is no bound.
        staleness: Option<u64>,
    },
}

impl Pace {
    /// `--staleness`: 0 is synchronous.
    pub fn from_staleness(staleness: Option<u64>) -> Self {
        match staleness {
            Some(0) => Self::Synchronous,
            staleness => Self::Asynchronous { staleness },
        }
    }
}

/// What follows a worker's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// The buckets of a step.
    Step,
    /// Nothing any more.
    Goodbye,
    /// Numbers to be added up over all workers.
    Sum,
    /// The optimizer's state goes to the first worker.
    State,
    /// The weights go to all workers.
    Weights,
}

/// Where the count of exchanges between steps begins: apart from the steps' own.
pub(super) const MEETS: u64 = 1 << 48;

/// Which of the shared numbers says what follows.
pub(super) const COMMAND: usize = super::SHARED - 1;

impl Command {
    fn number(self) -> f32 {
        match self {
            Self::Step => 0.0,
            Self::Goodbye => 1.0,
            Self::Sum => 2.0,
            Self::State => 3.0,
            Self::Weights => 4.0,
        }
    }

    fn from_number(number: f32) -> Option<Self> {
        let all = [Self::Step, Self::Goodbye, Self::Sum, Self::State, Self::Weights];
        all.into_iter().find(|command| command.number() == number)
    }
}

/// Joins as a worker; all ranks have the same buckets.
///
/// # Errors
/// When the operating system refuses a thread.
pub(super) fn join(
    communicator: Communicator,
    roles: Roles,
    buckets: &[BucketShape],
    deadline: Duration,
) -> Result<Courier, CommError> {
    worker::start(communicator, roles, buckets, deadline)
}
