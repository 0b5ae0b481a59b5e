//! Whoever has samples: a thread that greets, and one for each connection that has been greeted.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use paceline_comm::wire::lobby::{Greeted, lengthen_queue};
use paceline_comm::wire::stream::Talk;
use paceline_comm::wire::{Framed, Lobby, Role, Socket, Tls};
use paceline_comm::{CommError, Stop, Token, Wait};
use paceline_system::{signal, threads};

use super::talk::{Answer, HEAD, Head, Line, PIECE, PIECE_BYTES, QUESTION, Question};
use super::{ASKER, SERVER, identity};
use crate::ClusterError;
use crate::error::refused;

/// Connections at a time: as many loader threads as a large cluster has on some of its machines; each takes a thread here.
const CONNECTIONS_MAX: usize = 512;

/// How long a connection may be silent. Whoever asks later dials again.
const SILENT_MAX: Duration = Duration::from_secs(15 * 60);

/// How often the thread that greets looks up.
const LOOK: Duration = Duration::from_millis(200);

/// What answers questions; several threads ask at once.
pub type Answers = dyn Fn(&Question) -> Answer + Send + Sync;

/// Who may ask.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The secret that askers hold.
    pub token: Token,
    /// Whether and how connections are secret.
    pub tls: Option<Tls>,
}

/// A port at which samples are asked for.
pub struct Server {
    listener: TcpListener,
    options: ServerOptions,
    answers: Arc<Answers>,
    connections: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("listener", &self.listener).finish_non_exhaustive()
    }
}

impl Server {
    /// Listens at an address and a port, of which 0 leaves the choice to the system.
    ///
    /// # Errors
    /// When it is no address of this machine, or somebody else listens there.
    pub fn bind(
        address: &str,
        options: ServerOptions,
        answers: impl Fn(&Question) -> Answer + Send + Sync + 'static,
    ) -> Result<Self, ClusterError> {
        let Ok(place) = address.parse::<SocketAddr>() else {
            return refused(format!("`{address}` is no address and port; type --listen such as 10.0.0.1:29410"));
        };
        let listen = || {
            let listener = TcpListener::bind(place)?;
            listener.set_nonblocking(true)?;
            lengthen_queue(&listener)?;
            Ok(listener)
        };
        match listen() {
            Ok(listener) => Ok(Self { listener, options, answers: Arc::new(answers), connections: Arc::default() }),
            Err(error) => {
                let error: std::io::Error = error;
                refused(format!("cannot listen at {address}: {error}; type --listen with an address of this machine"))
            }
        }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn address(&self) -> Result<SocketAddr, ClusterError> {
        self.listener.local_addr().map_err(|error| ClusterError::Failed(error.to_string()))
    }

    /// Answers until somebody asks for an end; `report` is told who was turned away, and why.
    pub fn serve(&self, stop: &signal::Stop, report: &mut dyn FnMut(&str)) {
        let mut lobby = Lobby::new(1);
        let comm_stop = Stop::new();
        while !stop.requested() {
            lobby.sleep(&self.listener, LOOK);
            self.open(&mut lobby, &comm_stop, report);
            for Greeted { outcome, .. } in lobby.advance() {
                let begun = outcome.map_err(|error| error.to_string()).and_then(|(_, socket)| self.begin(socket));
                if let Err(why) = begun {
                    report(&why);
                }
            }
        }
    }

    /// Begins to greet whoever is there.
    fn open(&self, lobby: &mut Lobby<Socket>, stop: &Stop, report: &mut dyn FnMut(&str)) {
        let prepare = |stream: TcpStream| {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            Socket::accepted(stream, self.options.tls.as_ref())
        };
        loop {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    let Ok(socket) = prepare(stream) else { continue };
                    let wait = Wait::new(super::GREETING_MAX, stop);
                    let identity = identity(&self.options.token, Role::Listener);
                    if let Some(left) = lobby.enter(socket, identity, (Some(from.ip()), &wait)) {
                        report(&format!("{left} said too little while many others came"));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    lobby.make_way();
                    report(&format!("a connection could not be accepted: {error}"));
                    return;
                }
            }
        }
    }

    /// Gives a connection a thread.
    fn begin(&self, socket: Socket) -> Result<(), String> {
        socket.tcp().set_nonblocking(false).map_err(|error| error.to_string())?;
        let place = Connection::new(&self.connections);
        if self.connections.load(Ordering::SeqCst) > CONNECTIONS_MAX {
            return Err(format!("{CONNECTIONS_MAX} connections are open already; one more was closed"));
        }
        let answers = Arc::clone(&self.answers);
        let talk = Talk { rank: SERVER, peer: ASKER.into(), phase: "handing out samples" };
        let line = Line { framed: Framed::new(socket, Question::BYTES as u32), talk };
        let work = move || {
            // Whoever asked is gone, was silent for too long, or talks nonsense: the connection ends, and nobody else minds.
            let _ = answer(line, &*answers);
            drop(place);
        };
        threads::spawn("samples", work).map(drop).map_err(|error| format!("no thread for a connection: {error}"))
    }
}

/// A connection that is counted until it ends, however it does.
struct Connection(Arc<AtomicUsize>);

impl Connection {
    fn new(open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(open))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Answers on one connection until it ends.
fn answer(mut line: Line, answers: &Answers) -> Result<(), CommError> {
    let stop = Stop::new();
    loop {
        let (kind, payload) = line.next(SILENT_MAX, &stop)?;
        if kind != QUESTION {
            return Err(line.talk.violation(format!("a frame of kind {kind} where a question belongs")));
        }
        let question = Question::decode(&payload).map_err(|what| line.talk.violation(what))?;
        let (head, bytes) = match answers(&question) {
            Answer::Bytes(bytes) if bytes.len() as u64 <= question.bytes_max => {
                (Head::Bytes(bytes.len() as u64), bytes)
            }
            Answer::Bytes(bytes) => {
                let sentence = format!("it has {} bytes, and {} may come", bytes.len(), question.bytes_max);
                (Head::Failed(sentence), Vec::new())
            }
            Answer::Damaged(text) => (Head::Damaged(text), Vec::new()),
            Answer::Failed(text) => (Head::Failed(text), Vec::new()),
        };
        line.send(HEAD, &head.encode(), &stop)?;
        for piece in bytes.chunks(PIECE_BYTES) {
            line.send(PIECE, piece, &stop)?;
        }
    }
}

#[cfg(test)]
mod tests;
