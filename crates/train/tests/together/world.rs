//! Worlds of threads, joined in every way that bytes can travel.

use std::time::Duration;

use paceline_comm::transport::{Membership, Transport, shm, tcp, thread};
use paceline_comm::{Choice, Communicator, Generation, Link, Links, Options, Rank, RunId, Stop, Token, Wait};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carry {
    Thread,
    Shm,
    Tcp,
}

impl Carry {
    pub const ALL: [Self; 3] = [Self::Thread, Self::Shm, Self::Tcp];
}

pub const TIMEOUT: Duration = Duration::from_secs(60);

fn transports(carry: Carry, world: usize) -> Vec<Transport> {
    if carry == Carry::Thread {
        return thread::mesh(world).into_iter().map(Transport::Thread).collect();
    }
    let token = Token::random();
    let bind = |rank| tcp::Listener::bind(Rank::at(rank), None).unwrap();
    let listeners: Vec<tcp::Listener> = (0..world).map(bind).collect();
    let addresses: Vec<_> = listeners.iter().map(tcp::Listener::address).collect();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| {
                let (token, addresses) = (token.clone(), &addresses);
                scope.spawn(move || {
                    let member = Membership {
                        token,
                        run: RunId::UNKNOWN,
                        rank: Rank::at(rank),
                        world,
                        generation: Generation(1),
                    };
                    let wait = Wait::new(TIMEOUT, &Stop::new());
                    match carry {
                        Carry::Shm => Transport::Shm(shm::connect(&member, &wait).unwrap()),
                        _ => {
                            let config = tcp::Config { groups: 4, ..tcp::Config::default() };
                            Transport::Tcp(tcp::connect(listener, addresses, &member, config, &wait).unwrap())
                        }
                    }
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// One communicator for each rank.
pub fn communicators(carry: Carry, world: usize) -> Vec<Communicator> {
    let links = Links::uniform(world, Link::new(20e-6, 2e9));
    let options = Options { timeout: TIMEOUT, stop: Stop::new(), choice: Choice::by_cost(links) };
    transports(carry, world).into_iter().map(|transport| Communicator::new(transport, options.clone())).collect()
}
