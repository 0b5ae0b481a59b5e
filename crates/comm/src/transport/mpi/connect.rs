//! Joining the world that `mpirun` made.

use std::io::Error;
use std::time::Duration;

use paceline_system::clock;

use super::Port;
use super::raw::Comm;
use crate::error::{CommError, Refusal};
use crate::rank::Rank;
use crate::transport::Membership;

/// Joins MPI's world; all its ranks call this. MPI itself waits here for all ranks, without a deadline, and cannot be stopped: who
/// calls this watches the time and ends the process.
///
/// # Errors
/// When MPI does not start, or its world is another: the processes were not started with the `mpirun` of this MPI, or belong
/// to different runs.
pub fn connect(membership: &Membership) -> Result<Port, CommError> {
    let Membership { rank, world, .. } = *membership;
    let failed = |why: String| CommError::System { rank, what: "join MPI's world", source: Error::other(why) };
    let joined = Comm::join().map_err(failed)?;
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
    // Who may send here is decided by mpirun; that all belong to one run, as on other carries, by what rank 0 says.
    let mut said = joined.broadcast(0, membership.run.bytes().to_vec()).map_err(failed)?;
    while !said.is_done().map_err(failed)? {
        clock::sleep(Duration::from_micros(200));
    }
    if said.bytes() != membership.run.bytes() {
        let detail = format!("ours is {}", membership.run);
        return Err(CommError::Refused { rank, peer: Rank(0).into(), reason: Refusal::Run, detail });
    }
    drop(said);
    Ok(Port::new(joined))
}
