//! The same by MPI, where `mpirun -n 2` has started this: one-sided, by a window of the other rank's memory, and two-sided,
//! by messages that the other rank has to take and answer.

use crate::cluster::spec::Variables;
use crate::comm::transport::mpi::Window;
use crate::comm::transport::{Membership, Transport};
use crate::comm::{Choice, CommError, Communicator, Generation, Link, Links, Options, Rank, RunId, Stop, Token};

use super::two_sided::{TIMEOUT, Worker, serve};
use crate::failure::Failure;
use crate::run::mpi::connect;

/// What rank 0 measures with; the other rank answers.
pub struct OverMpi {
    /// The other rank's memory.
    pub window: Window,
    /// The way to the other rank.
    pub worker: Worker,
}

/// Which of two ranks this is; none if `mpirun` has not started it.
fn rank(variables: &Variables) -> Result<Option<u32>, Failure> {
    let number = |names: [&str; 2]| names.iter().find_map(|name| variables.get(*name)?.parse::<u32>().ok());
    let place = (number(["OMPI_COMM_WORLD_RANK", "PMI_RANK"]), number(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]));
    match place {
        (Some(rank), Some(2)) => Ok(Some(rank)),
        (Some(_), Some(_)) => Err(Failure::refused("MPI is measured between two ranks; type mpirun -n 2")),
        _ => Ok(None),
    }
}

/// Joins MPI: rank 0 is given what it measures with, and the other one has answered it when this returns.
pub fn join(largest: usize) -> Result<Option<Option<OverMpi>>, Failure> {
    let Some(rank) = rank(&crate::run::team::variables())? else { return Ok(None) };
    let membership = Membership {
        token: Token::random(),
        run: RunId::UNKNOWN,
        rank: Rank(rank),
        world: 2,
        generation: Generation::default(),
    };
    let stop = Stop::new();
    let port = connect(&membership, &stop)?;
    let window = port.window(largest.max(8))?;
    let choice = Choice::by_cost(Links::uniform(2, Link::new(1e-5, 1e9)));
    let options = Options { timeout: TIMEOUT, stop, choice };
    let mut communicator = Communicator::new(Transport::Mpi(Box::new(port)), options);
    if rank == 0 {
        return Ok(Some(Some(OverMpi { window, worker: Worker::over(communicator, largest) })));
    }
    // Until the other rank says that it is through.
    let served: Result<(), CommError> = serve(&mut communicator, largest);
    served?;
    window.free().map_err(Failure::failed)?;
    Ok(Some(None))
}

impl OverMpi {
    /// Ends at both ranks.
    pub fn end(mut self) -> Result<(), Failure> {
        self.worker.end()?;
        self.window.free().map_err(Failure::failed)
    }
}
