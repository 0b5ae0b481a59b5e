//! Joining the world that `mpirun` made.

use std::collections::VecDeque;
use std::io::Error;

use super::Port;
use super::raw::World;
use crate::error::CommError;
use crate::transport::Membership;

/// Joins MPI's world; all its ranks call this. MPI itself waits here for all ranks, without a deadline, and cannot be stopped: who
/// calls this watches the time and ends the process.
///
/// # Errors
/// When MPI does not start, or its world is another: the processes were not started with the `mpirun` of this MPI.
pub fn connect(membership: &Membership) -> Result<Port, CommError> {
    let Membership { rank, world, .. } = *membership;
    let failed = |why: String| CommError::System { rank, what: "join MPI's world", source: Error::other(why) };
    let joined = World::join().map_err(failed)?;
    if (joined.rank(), joined.size()) != (rank.index(), world) {
        let why = format!(
            "MPI says rank {} of {} where this is rank {} of {world}; start all processes with the mpirun of the MPI that \
             this paceline was built with ({})",
            joined.rank(),
            joined.size(),
            rank.0,
            joined.version()
        );
        return Err(failed(why));
    }
    let sends = (0..world).map(|_| VecDeque::new()).collect();
    Ok(Port { world: joined, sends, arrivals: (0..world).map(|_| None).collect() })
}
