//! Worlds of threads for the tests: the same body on every rank of a transport.
#![allow(dead_code, missing_docs)]

use std::thread;
use std::time::Duration;

use paceline_comm::transport::{Membership, Transport, shm, tcp, thread as threads};
use paceline_comm::{Algorithm, Choice, Communicator, Generation, Link, Links, Options, Rank, Stop, Token, Wait};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carry {
    Thread,
    Shm,
    Tcp,
    /// Three sockets for each pair.
    TcpStriped,
}

impl Carry {
    pub const ALL: [Self; 4] = [Self::Thread, Self::Shm, Self::Tcp, Self::TcpStriped];
}

pub const TIMEOUT: Duration = Duration::from_secs(20);

pub fn options(world: usize, algorithm: Option<Algorithm>, timeout: Duration) -> Options {
    let links = Links::uniform(world, Link::new(20e-6, 2e9));
    Options { timeout, stop: Stop::new(), choice: Choice::by_cost(links).forced(algorithm) }
}

pub fn transports(carry: Carry, world: usize) -> Vec<Transport> {
    if carry == Carry::Thread {
        return threads::mesh(world).into_iter().map(Transport::Thread).collect();
    }
    let token = Token::random();
    let member = |rank| Membership { token: token.clone(), rank: Rank::at(rank), world, generation: Generation(1) };
    let mut listeners: Vec<Option<tcp::Listener>> =
        (0..world).map(|rank| Some(tcp::Listener::bind(Rank::at(rank), None).unwrap())).collect();
    let addresses: Vec<_> = listeners.iter().flatten().map(tcp::Listener::address).collect();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let (member, listener, addresses) = (member(rank), listeners[rank].take().unwrap(), &addresses);
                scope.spawn(move || {
                    let wait = Wait::new(TIMEOUT, &Stop::new());
                    let sockets = if carry == Carry::TcpStriped { 3 } else { 1 };
                    let config = tcp::Config { sockets, ..tcp::Config::default() };
                    match carry {
                        Carry::Shm => Transport::Shm(shm::connect(&member, &wait).unwrap()),
                        _ => Transport::Tcp(tcp::connect(listener, addresses, &member, config, &wait).unwrap()),
                    }
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub fn communicators(carry: Carry, options: &Options) -> Vec<Communicator> {
    let world = options.choice.links().nodes.world();
    transports(carry, world).into_iter().map(|transport| Communicator::new(transport, options.clone())).collect()
}

/// Runs the body on every rank at once; the results by rank. The communicators live until all are done.
pub fn on_all<T: Send>(ranks: &mut [Communicator], body: impl Fn(&mut Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let running: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(move || body(rank))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
