//! Worlds of threads for the tests: the same body on every rank of a transport.
#![allow(dead_code, missing_docs)]

use std::ops::Range;
use std::thread;
use std::time::Duration;

use paceline_comm::transfer::chunk;
use paceline_comm::transport::{Membership, Transport, shm, tcp, thread as threads};
use paceline_comm::wire::Tls;
use paceline_comm::{
    Algorithm, Choice, Collective, Communicator, Generation, Link, Links, Options, Rank, RunId, Stop, Token, Wait,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carry {
    Thread,
    Shm,
    Tcp,
    /// Three sockets for each pair.
    TcpStriped,
    /// Two encrypted sockets for each pair.
    TcpSecret,
}

impl Carry {
    pub const ALL: [Self; 5] = [Self::Thread, Self::Shm, Self::Tcp, Self::TcpStriped, Self::TcpSecret];
}

/// Lengths of buffers, from nothing to a million.
pub const LENGTHS: [usize; 4] = [0, 1, 7919, 1_000_000];

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
    let member = |rank| Membership {
        token: token.clone(),
        run: RunId::UNKNOWN,
        rank: Rank::at(rank),
        world,
        generation: Generation(1),
    };
    let mut listeners: Vec<Option<tcp::Listener>> =
        (0..world).map(|rank| Some(tcp::Listener::bind(Rank::at(rank), None).unwrap())).collect();
    let addresses: Vec<_> = listeners.iter().flatten().map(tcp::Listener::address).collect();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let (member, listener, addresses) = (member(rank), listeners[rank].take().unwrap(), &addresses);
                scope.spawn(move || {
                    let wait = Wait::new(TIMEOUT, &Stop::new());
                    let sockets = match carry {
                        Carry::TcpStriped => 3,
                        Carry::TcpSecret => 2,
                        _ => 1,
                    };
                    let tls = (carry == Carry::TcpSecret).then(|| Tls::from_token(&member.token));
                    let config = tcp::Config { sockets, tls, ..tcp::Config::default() };
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

/// A number with few bits, so that sums are exact in any order.
fn number(rank: usize, index: usize) -> f32 {
    ((rank * 31 + index * 7) % 64) as f32 - 20.0
}

pub fn input(rank: usize, length: usize) -> Vec<f32> {
    (0..length).map(|index| number(rank, index)).collect()
}

/// What a rank must hold, and in which range.
pub fn expected(collective: Collective, rank: usize, world: usize, length: usize) -> (Range<usize>, Vec<f32>) {
    let sum = |index: usize| (0..world).map(|rank| number(rank, index)).sum::<f32>();
    let all = 0..length;
    match collective {
        Collective::AllReduce => (all.clone(), all.map(sum).collect()),
        Collective::ReduceScatter => {
            let own = chunk(length, world, rank);
            (own.clone(), own.map(sum).collect())
        }
        Collective::AllGather => {
            let owned = |owner| chunk(length, world, owner).map(move |index| number(owner, index));
            (all, (0..world).flat_map(owned).collect())
        }
        Collective::Broadcast { root } => (all.clone(), all.map(|index| number(root.index(), index)).collect()),
        Collective::Barrier => (0..0, Vec::new()),
        Collective::AllToAll => {
            let each = length / world;
            (all, (0..length).map(|index| number(index / each, rank * each + index % each)).collect())
        }
    }
}

fn run(comm: &mut Communicator, collective: Collective, buffer: &mut [f32]) {
    match collective {
        Collective::AllReduce => comm.all_reduce(buffer),
        Collective::ReduceScatter => comm.reduce_scatter(buffer),
        Collective::AllGather => comm.all_gather(buffer),
        Collective::Broadcast { root } => comm.broadcast(root, buffer),
        Collective::Barrier => comm.barrier(),
        Collective::AllToAll => comm.all_to_all(buffer),
    }
    .unwrap();
}

/// Runs a collective on a buffer of so many elements, and compares what this rank must hold, bit by bit.
pub fn check(comm: &mut Communicator, collective: Collective, length: usize, how: &str) {
    let (rank, world) = (comm.rank().index(), comm.world());
    let mut buffer = input(rank, length);
    run(comm, collective, &mut buffer);
    let (range, expected) = expected(collective, rank, world, length);
    let same = buffer[range].iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same, "{collective} by {how}, {world} ranks, {length} elements");
}
