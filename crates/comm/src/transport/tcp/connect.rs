//! The mesh: a rank dials those above it and is dialled by those below it, so many sockets for each pair. Rank 0, whose known port is
//! that of the rendezvous, so needs none for data.
//!
//! Listening begins before addresses are told to anyone. All greetings, with those it dialled and those that dialled, go
//! on at the same time ([`crate::wire::lobby`]): one that stays silent or sends garbage keeps nobody else waiting.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::sockopt::{
    set_socket_recv_buffer_size, set_socket_send_buffer_size, set_tcp_congestion, tcp_congestion,
};

use super::{Cable, Port};
use crate::error::{CommError, Refusal};
use crate::rank::Rank;
use crate::transport::Membership;
use crate::wait::Wait;
use crate::wire::hello::{Identity, Purpose, Role};
use crate::wire::lobby::{Greeted, Lobby, lengthen_queue};
use crate::wire::socket::Socket;
use crate::wire::stream::{Talk, is_retry};
use crate::wire::tls::Tls;

mod reception;

pub(super) use reception::Reception;

const PHASE: &str = "connecting";

/// How long a connection may take to be there: a round trip, and another if a packet is lost.
const DIAL_MAX: Duration = Duration::from_secs(2);

/// Connections taken before those that are being greeted have their turn.
const TURN_MAX: usize = 32;

/// Between two attempts of a rank that has come back to reach one that does not know it yet.
const AGAIN: Duration = Duration::from_millis(20);

/// How often ranks may come back, so that the number of a return and of a connection fit in one.
pub const LIVES_MAX: u16 = 1000;

/// How to connect.
#[derive(Clone, Debug)]
pub struct Config {
    /// Connections between every two ranks, the same on all ranks.
    pub sockets: u16,
    /// How many groups any two ranks can be in together, the same on all ranks: each takes a connection more,
    /// which is opened now.
    pub groups: u16,
    /// Bytes the kernel may hold for each connection and direction; none leaves it to the kernel.
    pub buffer_bytes: Option<usize>,
    /// Whether and how connections are secret, the same on all ranks.
    pub tls: Option<Tls>,
    /// Whether this rank goes on listening, for ranks below it that are lost and come back ([`rejoin`]). Such a run has no
    /// groups.
    pub keeps_listening: bool,
    /// Who is told of connections that were turned away.
    pub report: Report,
}

impl Config {
    /// All connections between two ranks.
    fn lanes(&self) -> u16 {
        self.sockets.saturating_add(self.groups)
    }
}

/// Somebody who is told, in a sentence. Nobody by default.
#[derive(Clone)]
pub struct Report(Arc<dyn Fn(&str) + Send + Sync>);

impl Default for Report {
    fn default() -> Self {
        Self::new(|_| {})
    }
}

impl Report {
    /// Calls this with every sentence.
    pub fn new(write: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(write))
    }

    fn write(&self, sentence: &str) {
        (self.0)(sentence);
    }
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Report")
    }
}

impl Default for Config {
    /// One socket, no groups, and the kernel's own buffers: the fastest on loopback; long or fast links want
    /// more of both.
    fn default() -> Self {
        let (buffer_bytes, tls, keeps_listening) = (None, None, false);
        Self { sockets: 1, groups: 0, buffer_bytes, tls, keeps_listening, report: Report::default() }
    }
}

/// A port that waits for the ranks below.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens on an interface, by default loopback, on a port of the kernel's choice.
    ///
    /// # Errors
    /// When the system refuses, say because the address is no interface of this machine.
    pub fn bind(rank: Rank, interface: Option<IpAddr>) -> Result<Self, CommError> {
        Self::at(rank, SocketAddr::new(interface.unwrap_or(Ipv4Addr::LOCALHOST.into()), 0))
    }

    /// Listens at an address; port 0 leaves the port to the kernel.
    ///
    /// # Errors
    /// As [`Listener::bind`], and when somebody else listens there.
    pub fn at(rank: Rank, address: SocketAddr) -> Result<Self, CommError> {
        let bind = || {
            let socket = TcpListener::bind(address)?;
            socket.set_nonblocking(true)?;
            lengthen_queue(&socket)?;
            let address = socket.local_addr()?;
            Ok(Self { socket, address })
        };
        bind().map_err(|source| CommError::System { rank, what: "listen for other ranks", source })
    }

    /// Where it listens: what the others must be told.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Connects a rank with all others, given everyone's address by rank.
///
/// # Errors
/// When a rank does not come or answer in time, or refuses.
///
/// # Panics
/// When the table of addresses is for another world: a bug.
pub fn connect(
    listener: Listener,
    addresses: &[SocketAddr],
    membership: &Membership,
    config: Config,
    wait: &Wait,
) -> Result<Port, CommError> {
    let world = membership.world;
    assert_eq!(addresses.len(), world, "a table of addresses has one for each rank");
    let all = Life { number: 0, peers: 0..world };
    let (listener, mut port) = Mesh::new(listener, membership, &config, all).join(addresses, wait)?;
    if config.keeps_listening {
        let reception = Reception::start(listener, membership.clone(), config, wait.stop().clone());
        let failed = |source| CommError::System { rank: membership.rank, what: "go on listening", source };
        port.reception = Some(reception.map_err(failed)?);
    }
    Ok(port)
}

/// Connects a rank that was lost and has come back, for the so-manieth time, with some of the ranks above it, which go on
/// listening ([`Config::keeps_listening`]) and know that it is back. It has no links to the others.
///
/// # Errors
/// As [`connect`].
///
/// # Panics
/// As [`connect`], and when the ranks are not above it: a bug.
pub fn rejoin(
    listener: Listener,
    addresses: &[SocketAddr],
    membership: &Membership,
    config: Config,
    (life, wait): (Life, &Wait),
) -> Result<Port, CommError> {
    assert_eq!(addresses.len(), membership.world, "a table of addresses has one for each rank");
    assert!(life.number > 0 && life.peers.start > membership.rank.index(), "a rank comes back to those above it");
    Mesh::new(listener, membership, &config, life).join(addresses, wait).map(|(_, port)| port)
}

/// For the so-manieth time that a rank is there, from 0, and whom it has links to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Life {
    /// At most [`LIVES_MAX`].
    pub number: u16,
    /// Ranks.
    pub peers: Range<usize>,
}

fn prepare(socket: &TcpStream, config: &Config) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_nonblocking(true)?;
    if socket.peer_addr()?.ip().is_loopback() {
        // Nothing is lost inside a machine; algorithms that pace what they send only slow it down. Reno is always there.
        let _ = set_tcp_congestion(socket, "reno");
    } else if tcp_congestion(socket).is_ok_and(|name| name == "bbr") {
        // It takes the pauses between messages for a slow link: four servers beside four workers had 90 % of their cables' rate,
        // and 95 % without. Most systems have the first of these, and all have the second.
        let _ = set_tcp_congestion(socket, "cubic").or_else(|_| set_tcp_congestion(socket, "reno"));
    }
    if let Some(bytes) = config.buffer_bytes {
        set_socket_send_buffer_size(socket, bytes)?;
        set_socket_recv_buffer_size(socket, bytes)?;
    }
    Ok(())
}

/// The mesh in the making.
struct Mesh<'a> {
    listener: Listener,
    membership: &'a Membership,
    config: &'a Config,
    life: Life,
    lobby: Lobby<Socket>,
    /// By rank and lane.
    sockets: Vec<Vec<Option<Socket>>>,
}

impl<'a> Mesh<'a> {
    fn new(listener: Listener, membership: &'a Membership, config: &'a Config, life: Life) -> Self {
        let mut sockets: Vec<Vec<Option<Socket>>> = Vec::new();
        sockets.resize_with(membership.world, || (0..config.lanes()).map(|_| None).collect());
        let lobby = Lobby::new(membership.rank.index() * usize::from(config.lanes()));
        Self { listener, membership, config, life, lobby, sockets }
    }

    /// Makes all links; the listener is given back.
    fn join(mut self, addresses: &[SocketAddr], wait: &Wait) -> Result<(Listener, Port), CommError> {
        let rank = self.membership.rank;
        let mut to_dial = self.places_above();
        while let Some(missing) = self.missing() {
            wait.check(rank, missing, PHASE)?;
            if let Some(&(peer, lane)) = to_dial.last()
                && self.dial(addresses[peer.index()], (peer, lane), wait)?
            {
                to_dial.pop();
            }
            self.accept(wait);
            // Whoever has closed the connection while others crowded its port is dialled again, until the deadline.
            let again = self.collect()?;
            let unknown = self.life.number > 0 && !again.is_empty();
            to_dial.extend(again);
            let pause = match to_dial.is_empty() {
                true => wait.slice(),
                false if unknown => AGAIN,
                false => Duration::from_millis(1),
            };
            if self.missing().is_some() {
                self.lobby.sleep(&self.listener.socket, pause);
            }
        }
        self.into_port()
    }

    fn into_port(self) -> Result<(Listener, Port), CommError> {
        let Self { listener, membership: &Membership { rank, world, .. }, config, life, sockets, .. } = self;
        let (mut cables, mut spares) = (Vec::with_capacity(world), Vec::with_capacity(world));
        for (peer, lanes) in sockets.into_iter().enumerate() {
            let mut lanes: Vec<Socket> = lanes.into_iter().flatten().collect();
            for socket in &lanes {
                prepare(socket.tcp(), config).map_err(|error| {
                    let talk = Talk { rank, peer: Rank::at(peer).into(), phase: PHASE };
                    talk.gone(error)
                })?;
            }
            spares.push(lanes.split_off(usize::from(config.sockets).min(lanes.len())));
            cables.push((peer != rank.index() && life.peers.contains(&peer)).then(|| Cable::new(lanes)));
        }
        let members = (0..world).map(Rank::at).collect();
        let spares = Arc::new(Mutex::new(spares));
        Ok((listener, Port { rank: rank.index(), cables, members, spares, reception: None }))
    }

    /// Whom this rank dials, and by which connection; the nearest rank last, since it is taken first.
    fn places_above(&self) -> Vec<(Rank, u16)> {
        let peers = &self.life.peers;
        let above = (peers.start.max(self.membership.rank.index() + 1)..peers.end).rev().map(Rank::at);
        above.flat_map(|peer| (0..self.config.lanes()).rev().map(move |lane| (peer, lane))).collect()
    }

    /// A rank to which a connection is missing.
    fn missing(&self) -> Option<Rank> {
        let own = self.membership.rank.index();
        let empty = |peer: &usize| *peer != own && self.sockets[*peer].iter().any(Option::is_none);
        self.life.peers.clone().find(empty).map(Rank::at)
    }

    /// Dials once and begins to greet; whether somebody was there.
    fn dial(&mut self, address: SocketAddr, (peer, lane): (Rank, u16), wait: &Wait) -> Result<bool, CommError> {
        let talk = Talk { rank: self.membership.rank, peer: peer.into(), phase: PHASE };
        // Everybody listens before addresses are told, so this takes a round trip.
        let limit = wait.left().clamp(Duration::from_millis(10), DIAL_MAX);
        let Ok(stream) = TcpStream::connect_timeout(&address, limit) else {
            return Ok(false);
        };
        let dialled = stream.set_nonblocking(true).and_then(|()| Socket::dialled(stream, self.config.tls.as_ref()));
        let socket = dialled.map_err(|error| talk.gone(error))?;
        let identity = self.membership.identity(Purpose::Data, Role::Dialler).expecting(peer);
        let lane = self.life.number * self.config.lanes() + lane;
        self.lobby.enter(socket, Identity { lane, ..identity }, (None, wait));
        Ok(true)
    }

    /// Begins to greet all who have come. Only ranks below dial this one.
    fn accept(&mut self, wait: &Wait) {
        let expected = 0..self.membership.rank.0;
        let identity = Identity { expected, ..self.membership.identity(Purpose::Data, Role::Listener) };
        accept(&self.listener, &mut self.lobby, &identity, (self.config, wait));
    }

    /// Puts those who were greeted into their places. Strangers, and whoever has a place already, are turned away; one whom
    /// this rank has dialled and who does not answer as it must is the end. Returns those that are to be dialled again.
    fn collect(&mut self) -> Result<Vec<(Rank, u16)>, CommError> {
        let mut again = Vec::new();
        for Greeted { dialled, outcome } in self.lobby.advance() {
            match outcome {
                Ok((peer, socket)) => {
                    let lane = dialled.map_or(peer.lane, |(_, lane)| lane % self.config.lanes());
                    let rank = dialled.map_or(peer.rank, |(rank, _)| rank);
                    match self.sockets[rank.index()].get_mut(usize::from(lane)) {
                        Some(place @ None) => *place = Some(socket),
                        _ => self.config.report.write(&format!("{rank} has no place for another connection ({lane})")),
                    }
                }
                Err(CommError::PeerGone { .. }) if dialled.is_some() => again.extend(self.place(dialled)),
                // It has not heard yet that this rank is back.
                Err(CommError::RefusedBy { reason: Refusal::Rank, .. })
                    if dialled.is_some() && self.life.number > 0 =>
                {
                    again.extend(self.place(dialled));
                }
                Err(error) if dialled.is_some() => return Err(error),
                Err(error) => self.config.report.write(&error.to_string()),
            }
        }
        Ok(again)
    }

    /// By which connection somebody was dialled.
    fn place(&self, dialled: Option<(Rank, u16)>) -> Option<(Rank, u16)> {
        dialled.map(|(peer, lane)| (peer, lane % self.config.lanes()))
    }
}

/// Begins to greet all who have come.
fn accept(listener: &Listener, lobby: &mut Lobby<Socket>, identity: &Identity, (config, wait): (&Config, &Wait)) {
    for _ in 0..TURN_MAX {
        let (stream, from) = match listener.socket.accept() {
            Ok(accepted) => accepted,
            Err(error) if is_retry(&error) => return,
            // No descriptor is left, or the stranger is gone again.
            Err(_) => return lobby.make_way(),
        };
        let accepted = stream.set_nonblocking(true);
        let accepted = accepted.and_then(|()| Socket::accepted(stream, config.tls.as_ref()));
        match accepted {
            Ok(socket) => {
                let left = lobby.enter(socket, identity.clone(), (Some(from.ip()), wait));
                if let Some(address) = left {
                    config.report.write(&format!("{address} said too little while many others came"));
                }
            }
            Err(error) => config.report.write(&format!("a socket cannot be used: {error}")),
        }
    }
}
