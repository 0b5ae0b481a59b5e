//! Joining MPI's world before a deadline, which MPI itself does not know.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::comm::error::Party;
use crate::comm::transport::{Membership, mpi};
use crate::comm::{CommError, Rank, Stop, Wait};
use crate::system::threads;

use crate::failure::Failure;

/// How long MPI may take to start a world of so many ranks, all of which run and have met: it takes seconds, and more where there are many.
fn start_max(world: usize) -> Duration {
    Duration::from_secs(15) + Duration::from_millis(100) * u32::try_from(world).unwrap_or(u32::MAX)
}

/// Joins. MPI's start cannot be given up, so where it takes too long, or the run has ended meanwhile, this ends the process.
pub fn connect(membership: &Membership, stop: &Stop) -> Result<mpi::Port, CommError> {
    let rank = membership.rank;
    let (joined, over) = channel::<()>();
    let limit = Wait::new(start_max(membership.world), stop);
    let watch = move || {
        while over.recv_timeout(limit.slice()) == Err(RecvTimeoutError::Timeout) {
            if let Err(error) = limit.check(rank, Party::Anyone, "MPI_Init") {
                give_up(rank, &error);
            }
        }
    };
    threads::spawn("watching MPI", watch).map_err(|source| CommError::System {
        rank,
        what: "start a thread",
        source,
    })?;
    let port = mpi::connect(membership);
    drop(joined);
    port
}

fn give_up(rank: Rank, error: &CommError) -> ! {
    let mut why = error.to_string();
    if matches!(error, CommError::DeadlinePassed { .. }) {
        why += &format!(
            "; {rank} could not start MPI: check that mpirun starts nothing but paceline, that it is the mpirun of the MPI that this \
             paceline was built with, and that the hosts reach each other over the interfaces that MPI takes"
        );
    }
    // The failure is what `main` would say and answer, if it were reached.
    let _ = Failure::failed(why).report();
    std::process::exit(1)
}
