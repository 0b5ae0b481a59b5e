//! Greetings with many at once, by one thread: whoever is silent, slow or talks nonsense keeps nobody waiting.
//!
//! Every listener has a lobby: rank 0's for the rendezvous, each rank's for data, and that for handing over memory. Sockets
//! in it do not block; they are tried when something has come. There is room for a number of strangers beyond those that
//! are expected, in all and from each address; where more come, the one that has been there longest leaves, because
//! whoever belongs here is through within two round trips.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use paceline_system::ready::{self, Interest};

use super::hello::{Handshake, Identity, Peer, Role};
use super::stream::Stream;
use crate::error::CommError;
use crate::rank::Rank;
use crate::wait::Wait;

/// How long a greeting may take whose other side has dialled: two round trips, and a pause on a busy machine.
const GREETING_MAX: Duration = Duration::from_secs(5);

/// Strangers in a lobby at a time, of all addresses and of one. A connection is a descriptor, of which a process usually
/// has 1,024.
const STRANGERS_MAX: usize = 256;
const STRANGERS_OF_ADDRESS_MAX: usize = 128;

/// Connections that the kernel holds for a listener until they are taken: as many as it allows.
const BACKLOG: i32 = 4096;

/// Has the kernel hold many connections for a listener: strangers who come early must not keep others from being heard.
///
/// # Errors
/// When the operating system refuses.
pub fn lengthen_queue(listener: &impl AsFd) -> io::Result<()> {
    Ok(rustix::net::listen(listener, BACKLOG)?)
}

/// Connections on which somebody is being greeted.
#[derive(Debug)]
pub struct Lobby<S> {
    guests: Vec<Guest<S>>,
    /// Connections that ought to come.
    expected: usize,
}

#[derive(Debug)]
struct Guest<S> {
    stream: S,
    handshake: Handshake,
    /// None on this machine's own sockets.
    address: Option<IpAddr>,
}

/// How a greeting ended.
#[derive(Debug)]
pub struct Greeted<S> {
    /// Whom this side has dialled, and by which of its connections; none if it was dialled.
    pub dialled: Option<(Rank, u16)>,
    /// The other side and the connection to it, or why there is none.
    pub outcome: Result<(Peer, S), CommError>,
}

impl<S: Stream + AsFd> Lobby<S> {
    /// An empty one, to which so many connections should come.
    pub const fn new(expected: usize) -> Self {
        Self { guests: Vec::new(), expected }
    }

    /// Greets somebody on a connection that does not block. Whoever has dialled has a few seconds; whom this side has
    /// dialled has all of the wait. Returns an address that had to leave for it.
    pub fn enter(&mut self, stream: S, identity: Identity, (address, wait): (Option<IpAddr>, &Wait)) -> Option<String> {
        let (wait, left) = match identity.role {
            Role::Dialler => (wait.clone(), None),
            Role::Listener => (wait.at_most(GREETING_MAX), self.make_room(address)),
        };
        let handshake = Handshake::new(identity, stream.address(), wait);
        self.guests.push(Guest { stream, handshake, address });
        left
    }

    /// Sends away whoever has been here longest, of one address if too many came from there.
    fn make_room(&mut self, address: Option<IpAddr>) -> Option<String> {
        let came = |guest: &&Guest<S>| guest.handshake.role() == Role::Listener;
        let all = self.guests.iter().filter(came).count();
        let of_address = self.guests.iter().filter(came).filter(|guest| guest.address == address).count();
        let crowded = of_address >= self.expected + STRANGERS_OF_ADDRESS_MAX;
        if !crowded && all < self.expected + STRANGERS_MAX {
            return None;
        }
        self.send_away(|guest| !crowded || guest.address == address)
    }

    /// Sends away whoever has been here longest, where descriptors have run out.
    pub fn make_way(&mut self) {
        self.send_away(|_| true);
    }

    fn send_away(&mut self, who: impl Fn(&Guest<S>) -> bool) -> Option<String> {
        let leaves = |guest: &Guest<S>| guest.handshake.role() == Role::Listener && who(guest);
        let oldest = self.guests.iter().position(leaves)?;
        Some(self.guests.remove(oldest).stream.address())
    }

    /// Goes on with all greetings as far as they go; those that have ended.
    pub fn advance(&mut self) -> Vec<Greeted<S>> {
        let mut ended = Vec::new();
        for mut guest in std::mem::take(&mut self.guests) {
            let dialled = guest.handshake.dialled();
            match guest.handshake.advance(&mut guest.stream) {
                Ok(None) => self.guests.push(guest),
                Ok(Some(peer)) => ended.push(Greeted { dialled, outcome: Ok((peer, guest.stream)) }),
                Err(error) => ended.push(Greeted { dialled, outcome: Err(error) }),
            }
        }
        ended
    }

    /// What to wait for before going on.
    pub fn interests(&self) -> impl Iterator<Item = Interest<'_>> {
        let write = |guest: &Guest<S>| guest.handshake.is_sending() || guest.stream.is_sending();
        self.guests.iter().map(move |guest| Interest { fd: guest.stream.as_fd(), write: write(guest) })
    }

    /// Sleeps until somebody knocks at the listener or a greeting can go on, at most so long.
    pub fn sleep(&self, listener: &impl AsFd, limit: Duration) {
        let knocks = Interest { fd: listener.as_fd(), write: false };
        let interests: Vec<Interest<'_>> = std::iter::once(knocks).chain(self.interests()).collect();
        ready::wait(&interests, limit);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;
    use crate::stop::Stop;
    use crate::token::Token;
    use crate::wire::hello::{Purpose, greet};

    /// One who belongs here, after so many who say nothing.
    fn after_silence(silent: usize) -> usize {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (token, wait) = (Token::random(), Wait::new(Duration::from_secs(20), &Stop::new()));
        let identity = |role, rank| Identity::new(&token, Purpose::Control, role, Rank(rank), 2);
        let mut lobby = Lobby::new(1);
        let mut away = 0;
        let mut enter = |lobby: &mut Lobby<TcpStream>| {
            let (stream, from) = listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            away += usize::from(lobby.enter(stream, identity(Role::Listener, 0), (Some(from.ip()), &wait)).is_some());
        };
        let mut held = Vec::new();
        for _ in 0..silent {
            held.push(TcpStream::connect(address).unwrap());
            enter(&mut lobby);
        }
        let start = Instant::now();
        std::thread::scope(|scope| {
            let dialling =
                scope.spawn(|| greet(&mut TcpStream::connect(address).unwrap(), &identity(Role::Dialler, 1), &wait));
            enter(&mut lobby);
            let greeted = loop {
                if let Some(greeted) = lobby.advance().pop() {
                    break greeted;
                }
                lobby.sleep(&listener, Duration::from_millis(50));
            };
            assert_eq!((greeted.dialled, greeted.outcome.unwrap().0.rank), (None, Rank(1)));
            assert_eq!(dialling.join().unwrap().unwrap().rank, Rank(0));
        });
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        away
    }

    #[test]
    fn the_silent_cost_nothing_and_too_many_of_one_address_leave() {
        assert_eq!(after_silence(100), 0);
        assert_eq!(after_silence(200), 200 - STRANGERS_OF_ADDRESS_MAX);
    }
}
