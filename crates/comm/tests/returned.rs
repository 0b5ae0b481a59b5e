//! A rank that was lost and has come back over sockets: it has links to whoever goes on listening, once that one takes it.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use paceline_comm::transport::{Membership, Transport, tcp};
use paceline_comm::wire::Tls;
use paceline_comm::{
    Choice, CommError, Communicator, Generation, Link, Links, Nodes, Options, Rank, RunId, Stop, Token, Wait,
};

/// Two workers and a server.
const WORLD: usize = 3;
const SERVER: Rank = Rank(2);

fn communicator(port: tcp::Port, stop: &Stop) -> Communicator {
    let link = Link::new(20e-6, 2e9);
    let links = Links { nodes: Nodes::new(vec![0; WORLD]), within: link, between: link };
    let (timeout, stop) = (Duration::from_secs(10), stop.clone());
    Communicator::new(Transport::Tcp(port), Options { timeout, stop, choice: Choice::by_cost(links) })
}

/// What all ranks of a run know.
struct World {
    token: Token,
    run: RunId,
    config: tcp::Config,
}

impl World {
    fn new(sockets: u16, encrypts: bool) -> Self {
        let (token, run) = (Token::random(), RunId::random());
        let tls = encrypts.then(|| Tls::from_token(&token));
        Self { token, run, config: tcp::Config { sockets, tls, ..tcp::Config::default() } }
    }

    fn membership(&self, rank: usize) -> Membership {
        let (token, run, rank) = (self.token.clone(), self.run, Rank::at(rank));
        Membership { token, run, rank, world: WORLD, generation: Generation::default() }
    }

    /// All ranks, each with its own stop, and where they listen.
    fn begin(&self) -> (Vec<(Communicator, Stop)>, Vec<SocketAddr>) {
        let listeners: Vec<_> = (0..WORLD).map(|rank| tcp::Listener::bind(Rank::at(rank), None).unwrap()).collect();
        let addresses: Vec<SocketAddr> = listeners.iter().map(tcp::Listener::address).collect();
        let ranks = thread::scope(|scope| {
            let begin = |(rank, listener)| {
                let addresses = &addresses;
                scope.spawn(move || {
                    let (stop, config) = (Stop::new(), self.config.clone());
                    let config = tcp::Config { keeps_listening: rank == SERVER.index(), ..config };
                    let wait = Wait::new(Duration::from_secs(10), &stop);
                    let port = tcp::connect(listener, addresses, &self.membership(rank), config, &wait).unwrap();
                    (communicator(port, &stop), stop)
                })
            };
            let threads: Vec<_> = listeners.into_iter().enumerate().map(begin).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (ranks, addresses)
    }

    fn rejoin(
        &self,
        rank: usize,
        life: u16,
        addresses: &[SocketAddr],
        limit: Duration,
    ) -> Result<Communicator, CommError> {
        let (stop, listener) = (Stop::new(), tcp::Listener::bind(Rank::at(rank), None)?);
        let wait = Wait::new(limit, &stop);
        let life = tcp::Life { number: life, peers: SERVER.index()..WORLD };
        let port = tcp::rejoin(listener, addresses, &self.membership(rank), self.config.clone(), (life, &wait))?;
        Ok(communicator(port, &stop))
    }
}

fn comes_back(sockets: u16, encrypts: bool) {
    let world = World::new(sockets, encrypts);
    let (mut ranks, addresses) = world.begin();
    let (mut server, server_stop) = ranks.pop().unwrap();
    drop(ranks.pop());
    let (mut first, _first_stop) = ranks.pop().unwrap();
    assert!(matches!(server.wait_any(&[Rank(1)]), Err(CommError::PeerGone { .. })));
    server_stop.lose(Rank(1));
    let (sent, mut got) = (vec![7; 3 << 20], vec![0; 3 << 20]);
    for life in [1, 2] {
        let mut back = world.rejoin(1, life, &addresses, Duration::from_secs(10)).unwrap();
        assert!(!server.readmit(Rank(1), life), "nobody has said that it is back");
        server_stop.let_return(Rank(1), life);
        assert!(!server.readmit(Rank(1), life + 1), "in another life");
        assert!(server_stop.has_lost(Rank(1)) && server.readmit(Rank(1), life));
        assert!(!server_stop.has_lost(Rank(1)));
        let sending = thread::spawn({
            let sent = sent.clone();
            move || back.send(SERVER, 5, &sent).unwrap()
        });
        assert_eq!(server.wait_any(&[Rank(1)]).unwrap(), Rank(1));
        server.recv(Rank(1), 5, &mut got).unwrap();
        assert_eq!(got, sent);
        sending.join().unwrap();
        got.fill(0);
        // The links of the others are what they were.
        first.send(SERVER, u64::from(life), &[life as u8]).unwrap();
        let mut byte = [0];
        server.recv(Rank(0), u64::from(life), &mut byte).unwrap();
        assert_eq!(byte, [life as u8]);
        assert!(server.wait_any(&[Rank(1)]).is_err(), "it is gone again");
        server_stop.lose(Rank(1));
    }
}

#[test]
fn a_lost_rank_comes_back_again_and_again() {
    comes_back(1, false);
    comes_back(3, false);
}

#[test]
fn a_lost_rank_comes_back_in_secret() {
    comes_back(2, true);
}

#[test]
fn nobody_takes_the_place_of_a_rank_that_is_there_or_comes_back_with_a_life_that_it_has_had() {
    let world = World::new(1, false);
    let (mut ranks, addresses) = world.begin();
    let (mut server, stop) = ranks.pop().unwrap();
    let (mut second, _second_stop) = ranks.pop().unwrap();
    // It is turned away until its own deadline, and the one whose name it has goes on.
    let refused = world.rejoin(1, 1, &addresses, Duration::from_millis(300)).unwrap_err();
    assert!(matches!(refused, CommError::DeadlinePassed { .. }), "{refused}");
    second.send(SERVER, 1, &[1]).unwrap();
    server.recv(Rank(1), 1, &mut [0]).unwrap();
    // Another secret.
    stop.lose(Rank(1));
    let stranger = World { token: Token::random(), run: world.run, config: world.config.clone() };
    assert!(stranger.rejoin(1, 1, &addresses, Duration::from_millis(300)).is_err());
    // The one who comes last has the place.
    let _first = world.rejoin(1, 2, &addresses, Duration::from_secs(10)).unwrap();
    let _older = world.rejoin(1, 1, &addresses, Duration::from_secs(10)).unwrap();
    stop.let_return(Rank(1), 2);
    assert!(server.readmit(Rank(1), 2));
}
