//! Worlds of threads for the tests: the same body on every rank of a transport.
#![allow(dead_code, missing_docs)]

use std::ops::Range;
use std::thread;
use std::time::Duration;

use paceline_comm::reduce::{round_bf16, widen_bf16};
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

pub fn transports(carry: Carry, world: usize, groups: u16) -> Vec<Transport> {
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
                    let config = tcp::Config { sockets, groups, tls, ..tcp::Config::default() };
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
    communicators_for(carry, options, 0)
}

/// With connections for so many groups that two ranks are both in.
pub fn communicators_for(carry: Carry, options: &Options, groups: u16) -> Vec<Communicator> {
    let world = options.choice.links().nodes.world();
    transports(carry, world, groups)
        .into_iter()
        .map(|transport| Communicator::new(transport, options.clone()))
        .collect()
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
    expected_of(collective, rank, &(0..world).collect::<Vec<_>>(), length)
}

/// The same where rank r has the numbers of the r-th of `names`.
pub fn expected_of(collective: Collective, rank: usize, names: &[usize], length: usize) -> (Range<usize>, Vec<f32>) {
    let world = names.len();
    let sum = |index: usize| names.iter().map(|&name| number(name, index)).sum::<f32>();
    let all = 0..length;
    match collective {
        Collective::AllReduce => (all.clone(), all.map(sum).collect()),
        Collective::ReduceScatter => {
            let own = chunk(length, world, rank);
            (own.clone(), own.map(sum).collect())
        }
        Collective::AllGather => {
            let owned = |owner| chunk(length, world, owner).map(move |index| number(names[owner], index));
            (all, (0..world).flat_map(owned).collect())
        }
        Collective::Broadcast { root } => (all.clone(), all.map(|index| number(names[root.index()], index)).collect()),
        Collective::Barrier => (0..0, Vec::new()),
        Collective::AllToAll => {
            let each = length / world;
            let from = |index: usize| number(names[index / each], rank * each + index % each);
            (all, (0..length).map(from).collect())
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
/// Ranks of a group have the numbers of their ranks in the world.
pub fn check(comm: &mut Communicator, collective: Collective, length: usize, how: &str) {
    let (rank, world) = (comm.rank().index(), comm.world());
    let names: Vec<usize> = (0..world).map(|rank| comm.world_rank(Rank::at(rank)).index()).collect();
    let mut buffer = input(names[rank], length);
    run(comm, collective, &mut buffer);
    let (range, expected) = expected_of(collective, rank, &names, length);
    let same = buffer[range].iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same, "{collective} by {how}, ranks {names:?}, {length} elements");
}

/// The same of halves whose sums are exact.
pub fn check_bf16(comm: &mut Communicator, length: usize, how: &str) {
    let names: Vec<usize> = (0..comm.world()).map(|rank| comm.world_rank(Rank::at(rank)).index()).collect();
    let half = |name: usize, index: usize| ((name * 5 + index * 7) % 32) as f32 - 10.0;
    let own = names[comm.rank().index()];
    let mut halves: Vec<u16> = (0..length).map(|index| round_bf16(half(own, index))).collect();
    comm.all_reduce_bf16(&mut halves).unwrap();
    for (index, &found) in halves.iter().enumerate() {
        let sum: f32 = names.iter().map(|&name| half(name, index)).sum();
        assert_eq!(widen_bf16(found), sum, "halves by {how}, ranks {names:?}, {length} elements, {index}");
    }
}

/// The ranks of this rank's row and of its column, where a world is two rows.
pub fn row_and_column(rank: Rank, world: usize) -> [Vec<Rank>; 2] {
    let across = world / 2;
    let (row, column) = (rank.index() / across, rank.index() % across);
    let row = (row * across..(row + 1) * across).map(Rank::at).collect();
    [row, vec![Rank::at(column), Rank::at(column + across)]]
}

/// Every collective inside a row, inside a column and in the whole world, in turns.
pub fn check_groups(comm: &mut Communicator, how: &str) {
    let [mut row, mut column] = row_and_column(comm.rank(), comm.world()).map(|members| comm.group(&members).unwrap());
    let choices = [&*comm, &row, &column].map(|comm| comm.choice().clone());
    for algorithm in std::iter::once(None).chain(Algorithm::ALL.map(Some)) {
        let how = format!("{algorithm:?} on {how}");
        for collective in Collective::ALL {
            for length in [1, 7919, 100_000] {
                for (comm, choice) in [&mut row, &mut *comm, &mut column].into_iter().zip([1, 0, 2]) {
                    comm.set_choice(choices[choice].clone().forced(algorithm));
                    let length = if collective == Collective::AllToAll { length / 12 * 12 } else { length };
                    check(comm, collective, length, &how);
                }
            }
        }
        for comm in [&mut column, &mut *comm, &mut row] {
            check_bf16(comm, 7919, &how);
        }
    }
    comm.set_choice(choices[0].clone());
    // Nobody leaves a group in which others still work.
    comm.barrier().unwrap();
}

/// A row and a column used by two threads at once, many times.
pub fn check_groups_at_once(comm: &mut Communicator, how: &str) {
    let groups = row_and_column(comm.rank(), comm.world()).map(|members| comm.group(&members).unwrap());
    thread::scope(|scope| {
        for (nth, mut group) in groups.into_iter().enumerate() {
            scope.spawn(move || {
                for round in 0..60 {
                    let length = [17, 100_001, 3][(round + nth) % 3];
                    check(&mut group, Collective::AllReduce, length, how);
                    check(&mut group, Collective::Broadcast { root: Rank(1) }, length, how);
                }
                group.barrier().unwrap();
            });
        }
    });
    comm.barrier().unwrap();
}
