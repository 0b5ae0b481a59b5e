//! Whoever asks a server of samples. Threads ask at the same time, each over a connection of its own that is kept for the next question.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use paceline_comm::wire::stream::Talk;
use paceline_comm::wire::{Framed, Role, Socket, Tls, greet};
use paceline_comm::{CommError, Stop, Token, Wait};

use super::talk::{Answer, Line, PIECE_BYTES, QUESTION, Question, gather};
use super::{ASKER, GREETING_MAX, PIECE_MAX, SERVER, identity};
use crate::spec::Address;

/// How long a connection may take to be there.
const DIAL_MAX: Duration = Duration::from_secs(5);

/// Where samples are, and the connections that nobody uses at the moment.
pub struct Client {
    address: Address,
    token: Token,
    tls: Option<Tls>,
    stop: Stop,
    idle: Mutex<Vec<Line>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({})", self.address)
    }
}

impl Client {
    /// Of the server at an address; nothing is dialled before something is asked for.
    pub const fn new(address: Address, token: Token, tls: Option<Tls>, stop: Stop) -> Self {
        Self { address, token, tls, stop, idle: Mutex::new(Vec::new()) }
    }

    /// Where the server is.
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// Asks, over a connection that is there, or else over a new one. A server may have closed one that was silent for long: then once
    /// more, over a new one.
    ///
    /// # Errors
    /// When nobody answers there in time, or not as agreed.
    pub fn ask(&self, question: &Question) -> Result<Answer, CommError> {
        let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(mut line) = kept
            && let Ok(answer) = self.exchange(&mut line, question)
        {
            self.keep(line);
            return Ok(answer);
        }
        let mut line = self.dial()?;
        let answer = self.exchange(&mut line, question)?;
        self.keep(line);
        Ok(answer)
    }

    fn keep(&self, line: Line) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn exchange(&self, line: &mut Line, question: &Question) -> Result<Answer, CommError> {
        line.send(QUESTION, &question.encode(), &self.stop)?;
        let talk = line.talk.clone();
        gather(question.bytes_max, || line.next(PIECE_MAX, &self.stop), |what| talk.violation(what))
    }

    fn dial(&self) -> Result<Line, CommError> {
        let talk = Talk { rank: ASKER, peer: SERVER.into(), phase: "connecting" };
        let places =
            (self.address.host.as_str(), self.address.port).to_socket_addrs().map_err(|error| talk.gone(error))?;
        let mut why = talk.gone("its name has no address");
        for place in places {
            match TcpStream::connect_timeout(&place, DIAL_MAX).and_then(|stream| {
                stream.set_nodelay(true)?;
                Socket::dialled(stream, self.tls.as_ref())
            }) {
                Ok(mut socket) => {
                    let wait = Wait::new(GREETING_MAX, &self.stop);
                    greet(&mut socket, &identity(&self.token, Role::Dialler), &wait)?;
                    let talk = Talk { phase: "reading samples", ..talk };
                    return Ok(Line { framed: Framed::new(socket, PIECE_BYTES as u32), talk });
                }
                Err(error) => why = talk.gone(error),
            }
        }
        Err(why)
    }
}
