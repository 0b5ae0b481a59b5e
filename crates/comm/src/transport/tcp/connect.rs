//! The mesh: a rank dials those above it and is dialled by those below it, so many sockets for each pair. Rank 0, whose known port is
//! that of the rendezvous, so needs none for data.
//!
//! Listening begins before addresses are told to anyone. Each connection that comes in is greeted on its own thread,
//! a bounded number at a time: one that stays silent or sends garbage keeps nobody else waiting.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use paceline_system::{clock, threads};
use rustix::net::sockopt::{
    set_socket_recv_buffer_size, set_socket_send_buffer_size, set_tcp_congestion, tcp_congestion,
};

use super::{Cable, Port};
use crate::error::CommError;
use crate::rank::Rank;
use crate::transport::Membership;
use crate::wait::Wait;
use crate::wire::hello::{Identity, Peer, Purpose, greet};
use crate::wire::socket::Socket;
use crate::wire::stream::{Talk, is_retry};
use crate::wire::tls::Tls;

const PHASE: &str = "connecting";
/// Greetings at a time beyond those that are expected.
const STRANGERS_MAX: usize = 16;
/// How long one greeting may take.
const GREETING_MAX: Duration = Duration::from_secs(5);

/// How to connect.
#[derive(Clone, Debug)]
pub struct Config {
    /// Connections between every two ranks, the same on all ranks.
    pub sockets: u16,
    /// Bytes the kernel may hold for each connection and direction; none leaves it to the kernel.
    pub buffer_bytes: Option<usize>,
    /// Whether and how connections are secret, the same on all ranks.
    pub tls: Option<Tls>,
    /// Who is told of connections that were turned away.
    pub report: Report,
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
    pub fn new(tell: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    fn tell(&self, sentence: &str) {
        (self.0)(sentence);
    }
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Report")
    }
}

impl Default for Config {
    /// One socket and the kernel's own buffers: the fastest on loopback; long or fast links want more of both.
    fn default() -> Self {
        Self { sockets: 1, buffer_bytes: None, tls: None, report: Report::default() }
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
    let Membership { rank, world, .. } = *membership;
    assert_eq!(addresses.len(), world, "a table of addresses has one for each rank");
    let (sender, greeted) = channel();
    let mut sockets: Vec<Vec<Option<Socket>>> = Vec::new();
    sockets.resize_with(world, || (0..config.sockets).map(|_| None).collect());
    let mut accepting = Accepting { listener, membership, config: &config, sender, active: 0 };
    for peer in (rank.index() + 1..world).map(Rank::at) {
        for lane in 0..config.sockets {
            // Those below must not wait for us while we wait for those above.
            accepting.accept(wait);
            let stream = dial(addresses[peer.index()], (peer, lane), membership, config.tls.as_ref(), wait)?;
            sockets[peer.index()][usize::from(lane)] = Some(stream);
        }
    }
    loop {
        accepting.collect(&greeted, &mut sockets);
        let empty = |lanes: &Vec<Option<Socket>>| lanes.iter().any(Option::is_none);
        let missing = (0..rank.index()).find(|&peer| empty(&sockets[peer]));
        let Some(missing) = missing else { break };
        wait.check(rank, Rank::at(missing), PHASE)?;
        if !accepting.accept(wait) {
            clock::sleep(Duration::from_micros(200));
        }
    }
    let mut cables = Vec::with_capacity(world);
    for (peer, lanes) in sockets.into_iter().enumerate() {
        let lanes: Vec<Socket> = lanes.into_iter().flatten().collect();
        for socket in &lanes {
            prepare(socket.tcp(), &config).map_err(|error| {
                let talk = Talk { rank, peer: Rank::at(peer).into(), phase: PHASE };
                talk.gone(error)
            })?;
        }
        cables.push((peer != rank.index()).then(|| Cable::new(lanes)));
    }
    Ok(Port { rank: rank.index(), cables })
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

/// Dials until somebody answers, and greets.
fn dial(
    address: SocketAddr,
    (peer, lane): (Rank, u16),
    membership: &Membership,
    tls: Option<&Tls>,
    wait: &Wait,
) -> Result<Socket, CommError> {
    let talk = Talk { rank: membership.rank, peer: peer.into(), phase: PHASE };
    let identity = Identity { lane, expected: Some(peer), ..membership.identity(Purpose::Data) };
    loop {
        talk.check(wait)?;
        match TcpStream::connect_timeout(&address, wait.slice().max(Duration::from_millis(10))) {
            Ok(stream) => {
                let mut socket = Socket::dialled(stream, tls).map_err(|error| talk.gone(error))?;
                greet(&mut socket, &identity, wait)?;
                return Ok(socket);
            }
            // Nobody there yet, or too far for one slice: try again until the deadline.
            Err(_) => clock::sleep(Duration::from_millis(1)),
        }
    }
}

type Greeted = Result<(Peer, Socket), CommError>;

/// The side that is dialled.
struct Accepting<'a> {
    listener: Listener,
    membership: &'a Membership,
    config: &'a Config,
    sender: Sender<Greeted>,
    active: usize,
}

impl Accepting<'_> {
    /// Starts greeting one who has come; whether anyone had.
    fn accept(&mut self, wait: &Wait) -> bool {
        if self.active >= self.membership.world + STRANGERS_MAX {
            return false;
        }
        let stream = match self.listener.socket.accept() {
            Ok((stream, _)) => stream,
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock && is_retry(&error),
        };
        let (identity, sender) = (self.membership.identity(Purpose::Data), self.sender.clone());
        let (wait, tls) = (wait.at_most(GREETING_MAX), self.config.tls.clone());
        let body = move || {
            // An accepted socket may have inherited that it does not block.
            let prepared = stream.set_nonblocking(false).and_then(|()| Socket::accepted(stream, tls.as_ref()));
            let prepared =
                prepared.map_err(|source| CommError::System { rank: identity.rank, what: "prepare a socket", source });
            let greeted = prepared.and_then(|mut socket| Ok((greet(&mut socket, &identity, &wait)?, socket)));
            // Nobody listens any more when the mesh is complete or given up.
            let _ = sender.send(greeted);
        };
        if threads::spawn("greeting", body).is_ok() {
            self.active += 1;
        }
        true
    }

    /// Puts those who were greeted into their places. Strangers, and whoever has a place already, are turned away.
    fn collect(&mut self, greeted: &Receiver<Greeted>, sockets: &mut [Vec<Option<Socket>>]) {
        while let Ok(outcome) = greeted.try_recv() {
            self.active -= 1;
            match outcome {
                Ok((Peer { rank, lane }, socket)) => {
                    let place = if rank < self.membership.rank { sockets.get_mut(rank.index()) } else { None };
                    match place.and_then(|lanes| lanes.get_mut(usize::from(lane))) {
                        Some(place @ None) => *place = Some(socket),
                        _ => self.config.report.tell(&format!("{rank} has no place for another connection ({lane})")),
                    }
                }
                Err(error) => self.config.report.tell(&error.to_string()),
            }
        }
    }
}
