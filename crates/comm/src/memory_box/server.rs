//! A box: the shell around `state.rs`. A thread greets whoever comes, and each connection has a thread that asks the state
//! machine, moves data and computes what was asked for on it.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as LocalAddress, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use paceline_system::clock::Clock;
use paceline_system::{clock, entropy, threads};

use super::extent::Extent;
use super::line::Line;
use super::pool::Pool;
use super::state::{Action, Call, Client, Event, Limits, MemoryBox};
use super::talk::{Answer, Ask, No, Usage};
use super::{BORROWER, BOX, identity, local_name};
use crate::error::CommError;
use crate::stop::Stop;
use crate::token::Token;
use crate::wait::Wait;
use crate::wire::lobby::{Greeted, lengthen_queue};
use crate::wire::stream::{Stream, Talk};
use crate::wire::{Lobby, Role, Socket, Tls};

use rustix::net::sockopt;

mod connection;
#[cfg(test)]
mod tests;

use connection::Connection;

/// Connections at a time; each has a thread.
const CONNECTIONS_MAX: usize = 1024;

/// How often the thread that greets looks up.
const LOOK: Duration = Duration::from_millis(50);

const GREETING_MAX: Duration = Duration::from_secs(10);

/// What a box lends, and to whom.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The secret that clients hold.
    pub token: Token,
    /// Whether and how connections of other hosts are secret.
    pub tls: Option<Tls>,
    /// Memory that is asked of the system in advance.
    pub pool_bytes: u64,
    /// What may be lent.
    pub limits: Limits,
}

/// A box that listens.
#[derive(Debug)]
pub struct BoxServer {
    listener: TcpListener,
    local: UnixListener,
    token: Token,
    tls: Option<Tls>,
    shared: Arc<Shared>,
    connections: Arc<AtomicUsize>,
}

/// What all threads of a box have.
#[derive(Debug)]
struct Shared {
    name: [u8; 16],
    state: Mutex<MemoryBox>,
    extents: Mutex<HashMap<u64, Arc<Extent>>>,
    mail: Mutex<HashMap<u64, Arc<Mailbox>>>,
    /// Clients by what they were told, and how many connections each has.
    clients: Mutex<HashMap<[u8; 16], (Client, usize)>>,
    pool: Mutex<Pool>,
    numbers: AtomicU64,
    clock: Clock,
    stop: Stop,
}

/// What others have left for a connection's thread.
#[derive(Debug, Default)]
struct Mailbox {
    actions: Mutex<Vec<Action>>,
    has_come: Condvar,
}

/// Bits of a call's number that count the calls of one connection.
const CALL_BITS: u32 = 40;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Has the state machine decide, and leaves what follows with those who do it.
    fn step(&self, event: Event) {
        let actions = locked(&self.state).step(event, self.clock.now());
        for action in actions {
            let call = match &action {
                Action::Answer(call, _) | Action::Run(call, _) => *call,
                Action::Discard(region) => {
                    let freed = locked(&self.extents).remove(region);
                    drop(freed);
                    self.settle();
                    continue;
                }
            };
            let mailbox = locked(&self.mail).get(&(call >> CALL_BITS)).map(Arc::clone);
            if let Some(mailbox) = mailbox {
                locked(&mailbox.actions).push(action);
                mailbox.has_come.notify_one();
            }
        }
    }

    /// What is kept in advance follows what is used.
    fn settle(&self) {
        let mut pool = locked(&self.pool);
        let used = locked(&self.state).usage().used;
        // What the system does not give again is missing in advance only.
        let _ = pool.settle(used);
    }

    fn extent(&self, region: u64) -> Option<Arc<Extent>> {
        locked(&self.extents).get(&region).map(Arc::clone)
    }

    /// Has the system give memory for places.
    fn ensure(&self, extent: &Extent, places: &[u32], page: u64) -> Result<(), No> {
        // The pool shrinks first, so that what it had kept is there for these.
        self.settle();
        extent.ensure(places, page).map_err(|_| No::Memory)
    }

    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }
}

impl BoxServer {
    /// Listens at an address, whose port may be 0 for any, and takes the memory that it lends in advance.
    ///
    /// # Errors
    /// When somebody else listens there, or the system has not as much memory.
    pub fn bind(address: SocketAddr, options: ServerOptions) -> std::io::Result<Self> {
        let ServerOptions { token, tls, pool_bytes, limits } = options;
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        lengthen_queue(&listener)?;
        let name = entropy::bytes();
        let local = UnixListener::bind_addr(&LocalAddress::from_abstract_name(local_name(&name))?)?;
        local.set_nonblocking(true)?;
        let shared = Shared {
            name,
            state: Mutex::new(MemoryBox::new(limits)),
            extents: Mutex::default(),
            mail: Mutex::default(),
            clients: Mutex::default(),
            pool: Mutex::new(Pool::new(pool_bytes)?),
            numbers: AtomicU64::new(1),
            clock: Clock::real(),
            stop: Stop::new(),
        };
        Ok(Self { listener, local, token, tls, shared: Arc::new(shared), connections: Arc::default() })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// What is lent at the moment.
    pub fn usage(&self) -> Usage {
        locked(&self.shared.state).usage()
    }

    /// Ends [`BoxServer::serve`] and all connections when it is set.
    pub fn stop(&self) -> Stop {
        self.shared.stop.clone()
    }

    /// Lends until `over` says that it is over; `report` is told who was turned away, and why.
    pub fn serve(&self, over: &mut dyn FnMut() -> bool, report: &mut dyn FnMut(&str)) {
        let mut strangers = Lobby::new(1);
        let mut neighbours = Lobby::new(1);
        while !over() && self.shared.stop.reason().is_none() {
            self.sleep(&strangers, &neighbours);
            self.greet_strangers(&mut strangers, report);
            self.greet_neighbours(&mut neighbours, report);
            for Greeted { outcome, .. } in strangers.advance() {
                let begun = outcome.map_err(|error| error.to_string()).and_then(|(_, socket)| {
                    socket.tcp().set_nonblocking(false).map_err(|error| error.to_string())?;
                    self.begin(Box::new(socket), None)
                });
                begun.unwrap_or_else(|why| report(&why));
            }
            for Greeted { outcome, .. } in neighbours.advance() {
                let begun = outcome.map_err(|error| error.to_string()).and_then(|(_, stream)| {
                    let failed = |error: std::io::Error| error.to_string();
                    stream.set_nonblocking(false).map_err(failed)?;
                    let files = stream.try_clone().map_err(failed)?;
                    self.begin(Box::new(stream), Some(files))
                });
                begun.unwrap_or_else(|why| report(&why));
            }
        }
        self.shared.stop.set("the memory box has ended");
    }

    fn sleep(&self, strangers: &Lobby<Socket>, neighbours: &Lobby<UnixStream>) {
        use std::os::fd::AsFd;

        use paceline_system::ready::{self, Interest};
        let knocks = [self.listener.as_fd(), self.local.as_fd()].map(|fd| Interest { fd, write: false });
        let interests: Vec<Interest<'_>> =
            knocks.into_iter().chain(strangers.interests()).chain(neighbours.interests()).collect();
        ready::wait(&interests, LOOK);
    }

    fn greet_strangers(&self, lobby: &mut Lobby<Socket>, report: &mut dyn FnMut(&str)) {
        let prepare = |stream: TcpStream| {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            keep_alive(&stream)?;
            Socket::accepted(stream, self.tls.as_ref())
        };
        loop {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    let Ok(socket) = prepare(stream) else { continue };
                    self.enter(lobby, socket, Some(from.ip()), report);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    lobby.make_way();
                    // It stays as it is for a while, where descriptors have run out.
                    clock::sleep(LOOK);
                    return report(&format!("a connection could not be accepted: {error}"));
                }
            }
        }
    }

    fn greet_neighbours(&self, lobby: &mut Lobby<UnixStream>, report: &mut dyn FnMut(&str)) {
        loop {
            match self.local.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        self.enter(lobby, stream, None, report);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    lobby.make_way();
                    // It stays as it is for a while, where descriptors have run out.
                    clock::sleep(LOOK);
                    return report(&format!("a connection could not be accepted: {error}"));
                }
            }
        }
    }

    fn enter<S: Stream + std::os::fd::AsFd>(
        &self,
        lobby: &mut Lobby<S>,
        stream: S,
        from: Option<std::net::IpAddr>,
        report: &mut dyn FnMut(&str),
    ) {
        let wait = Wait::new(GREETING_MAX, &self.shared.stop);
        if let Some(left) = lobby.enter(stream, identity(&self.token, Role::Listener), (from, &wait)) {
            report(&format!("{left} said too little while many others came"));
        }
    }

    /// Gives a connection a thread.
    fn begin(&self, stream: Box<dyn Stream + Send>, files: Option<UnixStream>) -> Result<(), String> {
        if self.connections.load(Ordering::SeqCst) >= CONNECTIONS_MAX {
            return Err(format!("{CONNECTIONS_MAX} connections are open already; one more was closed"));
        }
        let talk = Talk { rank: BOX, peer: BORROWER.into(), phase: "lending memory" };
        let line = Line::new(stream, files, (talk, self.shared.stop.clone())).map_err(|error| error.to_string())?;
        let (shared, open) = (Arc::clone(&self.shared), Arc::clone(&self.connections));
        open.fetch_add(1, Ordering::SeqCst);
        let place = Place(open);
        let work = move || {
            // Whoever is gone or talks nonsense loses its connection, and what it held; nobody else minds.
            let _ = Connection::run(line, &shared);
            drop(place);
        };
        threads::spawn("memory box", work).map(drop).map_err(|error| format!("no thread for a connection: {error}"))
    }
}

/// Has the system ask now and then whether the other end is still there: one that lost its power says nothing.
fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 6)?)
}

/// A connection that is counted until it ends, however it does.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
