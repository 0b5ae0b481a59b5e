//! What a parameter server does with its messages: a worker pushes numbers, and the server, which has to be there and
//! waiting, adds them to its own and answers with the sum.

use std::time::Duration;

use crate::comm::transfer::{Action, Transfer};
use crate::comm::transport::{Membership, Transport, shm, tcp};
use crate::comm::{Choice, CommError, Communicator, Generation, Link, Links, Options, Rank, RunId, Stop, Token, Wait};
use crate::system::threads;

use crate::failure::Failure;

pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// How messages travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A socket.
    Tcp,
    /// Shared memory.
    Shm,
}

/// A worker, whose servers are threads that wait for it.
pub struct Peers {
    tcp: Worker,
    shm: Worker,
}

pub struct Worker {
    communicator: Communicator,
    numbers: Vec<f32>,
    calls: u64,
}

fn transfer(action: Action, peer: u32, length: usize) -> Transfer {
    Transfer { step: 0, action, peer: Rank(peer), start: 0, length }
}

impl Peers {
    /// Starts both servers.
    pub fn start(largest: usize) -> Result<Self, Failure> {
        Ok(Self { tcp: Worker::start(Way::Tcp, largest)?, shm: Worker::start(Way::Shm, largest)? })
    }

    /// Pushes so many numbers, and takes as many back.
    pub fn push_pull(&mut self, way: Way, floats: usize) -> Result<(), Failure> {
        let worker = if way == Way::Tcp { &mut self.tcp } else { &mut self.shm };
        worker.push_pull(floats).map_err(Failure::from)
    }
}

impl Worker {
    fn start(way: Way, largest: usize) -> Result<Self, Failure> {
        let (token, run) = (Token::random(), RunId::UNKNOWN);
        let member =
            |rank| Membership { token: token.clone(), run, rank: Rank(rank), world: 2, generation: Generation(1) };
        let listeners = [0, 1].map(|rank| tcp::Listener::bind(Rank(rank), None));
        let [first, second] = listeners;
        let (first, second) = (first?, second?);
        let addresses = vec![first.address(), second.address()];
        let others = addresses.clone();
        let join = move |member: Membership, listener, addresses: Vec<_>| -> Result<Communicator, CommError> {
            let wait = Wait::new(TIMEOUT, &Stop::new());
            let transport = match way {
                Way::Tcp => Transport::Tcp(tcp::connect(listener, &addresses, &member, tcp::Config::default(), &wait)?),
                Way::Shm => Transport::Shm(shm::connect(&member, &wait)?),
            };
            let choice = Choice::by_cost(Links::uniform(2, Link::new(1e-5, 1e9)));
            Ok(Communicator::new(transport, Options { timeout: TIMEOUT, stop: Stop::new(), choice }))
        };
        let server = member(1);
        let body = move || {
            let Ok(mut communicator) = join(server, second, others) else { return };
            // Until the worker is gone.
            let _ = serve(&mut communicator, largest);
        };
        threads::spawn("server", body).map_err(Failure::failed)?;
        Ok(Self::over(join(member(0), first, addresses)?, largest))
    }

    /// One whose server is at the other end of a communicator.
    pub fn over(communicator: Communicator, largest: usize) -> Self {
        Self { communicator, numbers: vec![1.0; largest / 4 + 1], calls: 0 }
    }

    /// Says that nothing follows.
    ///
    /// # Errors
    /// When the server is gone.
    #[cfg(feature = "mpi")]
    pub fn end(&mut self) -> Result<(), CommError> {
        self.calls += 1;
        self.communicator.exchange(&[transfer(Action::Send, 1, 1)], 2 * self.calls, &mut [-1.0])
    }

    /// Pushes so many numbers, and takes as many back.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn push_pull(&mut self, floats: usize) -> Result<(), CommError> {
        self.calls += 1;
        let mut header = [floats as f32];
        self.communicator.exchange(&[transfer(Action::Send, 1, 1)], 2 * self.calls, &mut header)?;
        let list = [transfer(Action::Send, 1, floats), transfer(Action::Receive, 1, floats)];
        self.communicator.exchange(&list, 2 * self.calls + 1, &mut self.numbers[..floats])
    }
}

/// As a server of a centre does: hears what follows, takes it, adds it, answers.
pub fn serve(communicator: &mut Communicator, largest: usize) -> Result<(), CommError> {
    let (mut room, mut held) = (vec![0f32; largest / 4 + 1], vec![0f32; largest / 4 + 1]);
    for call in 1.. {
        let mut header = [0.0];
        communicator.wait_any(&[Rank(0)])?;
        communicator.exchange(&[transfer(Action::Receive, 0, 1)], 2 * call, &mut header)?;
        if header[0] < 0.0 {
            return Ok(());
        }
        let floats = (header[0] as usize).min(room.len());
        communicator.exchange(&[transfer(Action::Receive, 0, floats)], 2 * call + 1, &mut room[..floats])?;
        for (held, pushed) in held.iter_mut().zip(&mut room[..floats]) {
            *held += 0.5 * *pushed;
            *pushed = *held;
        }
        communicator.exchange(&[transfer(Action::Send, 0, floats)], 2 * call + 1, &mut room[..floats])?;
    }
    Ok(())
}
