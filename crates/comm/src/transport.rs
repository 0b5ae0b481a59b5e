//! How bytes travel: between any two ranks, first in, first out, without blocking. The interpreter does the rest.

use std::time::Duration;

use crate::error::CommError;
use crate::rank::{Generation, Rank, RunId};
use crate::token::Token;
use crate::wire::hello::{Identity, Purpose, Role};

#[cfg(feature = "mpi")]
pub mod mpi;
pub mod shm;
pub mod sim;
pub mod tcp;
pub mod thread;

/// The transports that join processes, by their names.
pub const BETWEEN_PROCESSES: &[&str] = &["shm", "tcp", "mpi"];

/// A rank's place in a world, and what lets it in.
#[derive(Clone, Debug)]
pub struct Membership {
    /// The secret of the run.
    pub token: Token,
    /// Which run, as rank 0 has drawn it.
    pub run: RunId,
    /// This rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: usize,
    /// The incarnation of the world.
    pub generation: Generation,
}

impl Membership {
    fn identity(&self, purpose: Purpose, role: Role) -> Identity {
        let world = u32::try_from(self.world).expect("a world fits 32 bits");
        let identity = Identity::new(&self.token, purpose, role, self.rank, world);
        Identity { run: self.run, generation: self.generation, ..identity }
    }
}

/// One peer a sleeping rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// The rank it waits for.
    pub peer: Rank,
    /// Whether bytes from it would help.
    pub receive: bool,
    /// Whether room for bytes to it would help.
    pub send: bool,
}

/// One rank's end of all its links.
#[derive(Debug)]
pub enum Transport {
    /// Ranks are threads of one process.
    Thread(thread::Port),
    /// Ranks are processes of one host.
    Shm(shm::Port),
    /// Ranks are joined by sockets.
    Tcp(tcp::Port),
    /// Ranks were started by `mpirun`.
    #[cfg(feature = "mpi")]
    Mpi(Box<mpi::Port>),
    /// Ranks, links and time are simulated.
    Sim(sim::Port),
}

impl Transport {
    /// Hands over as many of the bytes as fit; how many. The error says why the peer is gone.
    pub(crate) fn try_send(&mut self, peer: Rank, bytes: &[u8]) -> Result<usize, String> {
        match self {
            Self::Thread(port) => port.try_send(peer, bytes),
            Self::Shm(port) => port.try_send(peer, bytes),
            Self::Tcp(port) => port.try_send(peer, bytes),
            #[cfg(feature = "mpi")]
            Self::Mpi(port) => port.try_send(peer, bytes),
            Self::Sim(port) => port.try_send(peer, bytes),
        }
    }

    /// Takes as many bytes as have come and fit; how many. The error says why the peer is gone.
    pub(crate) fn try_receive(&mut self, peer: Rank, bytes: &mut [u8]) -> Result<usize, String> {
        match self {
            Self::Thread(port) => port.try_receive(peer, bytes),
            Self::Shm(port) => port.try_receive(peer, bytes),
            Self::Tcp(port) => port.try_receive(peer, bytes),
            #[cfg(feature = "mpi")]
            Self::Mpi(port) => port.try_receive(peer, bytes),
            Self::Sim(port) => port.try_receive(peer, bytes),
        }
    }

    /// Whether bytes from the peer have come. The error says why the peer is gone.
    pub(crate) fn has_bytes(&mut self, peer: Rank) -> Result<bool, String> {
        match self {
            Self::Thread(port) => port.has_bytes(peer),
            Self::Shm(port) => port.has_bytes(peer),
            Self::Tcp(port) => port.has_bytes(peer),
            #[cfg(feature = "mpi")]
            Self::Mpi(port) => port.has_bytes(peer),
            Self::Sim(port) => port.has_bytes(peer),
        }
    }

    /// Sleeps until one of the interests may have come true, at most for `limit`. May return for no reason.
    pub(crate) fn sleep(&mut self, interests: &[Interest], limit: Duration) {
        match self {
            Self::Thread(port) => port.sleep(limit),
            Self::Shm(port) => port.sleep(interests, limit),
            Self::Tcp(port) => port.sleep(interests, limit),
            #[cfg(feature = "mpi")]
            Self::Mpi(port) => port.sleep(limit),
            Self::Sim(_) => {}
        }
    }

    /// Whether everything handed over is out of this process's hands. Elsewhere the system carries it on by itself.
    pub(crate) fn has_sent(&mut self) -> Result<bool, String> {
        match self {
            Self::Tcp(port) => port.has_sent(),
            #[cfg(feature = "mpi")]
            Self::Mpi(port) => port.has_sent(),
            _ => Ok(true),
        }
    }

    /// A number by which the ranks of a new group find each other, where they need one.
    pub(crate) fn new_context(&self) -> u64 {
        match self {
            Self::Thread(port) => port.new_context(),
            Self::Shm(port) => port.new_context(),
            Self::Sim(port) => port.new_context(),
            Self::Tcp(_) => 0,
            #[cfg(feature = "mpi")]
            Self::Mpi(_) => 0,
        }
    }

    /// This rank's end in a group of these ranks, of which it is one. All members do this at the same point
    /// with the same number.
    pub(crate) fn group(&self, members: &[Rank], context: u64) -> Result<Self, CommError> {
        match self {
            Self::Thread(port) => Ok(Self::Thread(port.group(members, context))),
            Self::Shm(port) => port.group(members, context).map(Self::Shm),
            Self::Tcp(port) => port.group(members).map(Self::Tcp),
            #[cfg(feature = "mpi")]
            Self::Mpi(port) => port.group(members).map(|port| Self::Mpi(Box::new(port))),
            Self::Sim(port) => Ok(Self::Sim(port.group(members, context))),
        }
    }

    /// This rank, and how many there are.
    pub(crate) fn place(&self) -> (Rank, usize) {
        match self {
            Self::Thread(port) => (port.rank(), port.world()),
            Self::Shm(port) => (port.rank(), port.world()),
            Self::Tcp(port) => (port.rank(), port.world()),
            #[cfg(feature = "mpi")]
            Self::Mpi(port) => (port.rank(), port.world()),
            Self::Sim(port) => (port.rank(), port.world()),
        }
    }

    /// The name on the command line.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Thread(_) => "thread",
            Self::Shm(_) => "shm",
            Self::Tcp(_) => "tcp",
            #[cfg(feature = "mpi")]
            Self::Mpi(_) => "mpi",
            Self::Sim(_) => "sim",
        }
    }
}
