//! Rank 0's open port. Whoever comes is greeted beside all others ([`Lobby`]), so that a stranger who says nothing holds up
//! nobody.

use std::io::ErrorKind;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use paceline_comm::wire::lobby::{Greeted, lengthen_queue};
use paceline_comm::wire::{Identity, Lobby, Socket, Tls};
use paceline_comm::{CommError, Rank, Stop, Wait};
use paceline_system::ready::Interest;

/// Connections taken before the members that are here have their turn.
const TURN_MAX: usize = 32;

/// No greeting takes longer; the lobby's own limit is far below.
const GREETING_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Door {
    listener: TcpListener,
    stop: Stop,
    tls: Option<Tls>,
    lobby: Lobby<Socket>,
}

impl Door {
    /// The door of a run of so many.
    pub(crate) fn new(listener: TcpListener, world: usize, stop: Stop, tls: Option<Tls>) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        lengthen_queue(&listener)?;
        Ok(Self { listener, stop, tls, lobby: Lobby::new(world) })
    }

    /// The address that the door is at.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.listener.local_addr().ok().map(|address| address.ip())
    }

    /// What to wait for: somebody who knocks, or who goes on with a greeting.
    pub(crate) fn interests(&self) -> impl Iterator<Item = Interest<'_>> {
        let knocks = Interest { fd: self.listener.as_fd(), write: false };
        std::iter::once(knocks).chain(self.lobby.interests())
    }

    /// Begins to greet whoever is there; says what went wrong with some.
    pub(crate) fn open(&mut self, identity: &Identity) -> Vec<String> {
        let mut troubles = Vec::new();
        for _ in 0..TURN_MAX {
            match self.listener.accept() {
                Ok((stream, from)) => match self.prepare(stream) {
                    Ok(socket) => {
                        let wait = Wait::new(GREETING_MAX, &self.stop);
                        let left = self.lobby.enter(socket, identity.clone(), (Some(from.ip()), &wait));
                        troubles.extend(left.map(|left| format!("{left} said too little while many others came")));
                    }
                    Err(error) => troubles.push(format!("no connection can begin: {error}")),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The stranger left again, or there are no descriptors: one who has been here long gives up its own.
                Err(error) => {
                    self.lobby.make_way();
                    troubles.push(format!("a connection could not be accepted: {error}"));
                    break;
                }
            }
        }
        troubles
    }

    fn prepare(&self, stream: TcpStream) -> std::io::Result<Socket> {
        stream.set_nonblocking(true)?;
        Socket::accepted(stream, self.tls.as_ref())
    }

    /// Goes on with all greetings: those who hold the token, and why others were sent away.
    pub(crate) fn greeted(&mut self) -> Vec<Result<(Socket, Rank), CommError>> {
        let ended = self.lobby.advance().into_iter();
        ended.map(|Greeted { outcome, .. }| outcome.map(|(peer, socket)| (socket, peer.rank))).collect()
    }
}
