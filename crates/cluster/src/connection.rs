//! A control connection that never blocks: what cannot be sent yet waits in a bounded buffer, what has not come whole is
//! kept until it has. One thread tends many of them.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use paceline_comm::wire::frame::{Decoded, Header};
use paceline_comm::wire::{Decoder, Socket, Stream};
use paceline_system::ready::Interest;

use crate::message::{KIND, Message};

/// More than any sequence of messages that a peer which reads lets pile up; a table may come on top.
const OUTBOX_BYTES_MAX: usize = 1 << 16;

/// A connected peer.
#[derive(Debug)]
pub struct Connection {
    stream: Socket,
    decoder: Decoder,
    sent: u64,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    outbox_max: usize,
    /// Since when nothing that waits could be sent.
    stuck: Option<Duration>,
}

impl Connection {
    /// Takes over a stream at which both sides have greeted; no payload longer than `limit` is taken.
    ///
    /// # Errors
    /// When the socket cannot be configured.
    pub fn new(stream: Socket, limit: u32) -> std::io::Result<Self> {
        stream.tcp().set_nonblocking(true)?;
        stream.tcp().set_nodelay(true)?;
        let decoder = Decoder::new(limit);
        let (inbox, outbox, outbox_max) = (Vec::new(), Vec::new(), OUTBOX_BYTES_MAX);
        Ok(Self { stream, decoder, sent: 0, inbox, outbox, outbox_max, stuck: None })
    }

    /// The socket.
    pub fn stream(&self) -> &TcpStream {
        self.stream.tcp()
    }

    /// What to wait for before trying again.
    pub fn interest(&self) -> Interest<'_> {
        Interest { fd: self.fd(), write: !self.outbox.is_empty() || self.stream.is_sending() }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.stream.tcp().as_fd()
    }

    /// Queues a message and sends what can be sent.
    ///
    /// # Errors
    /// Why the connection is of no use any more.
    pub fn push(&mut self, message: &Message, now: Duration) -> Result<(), String> {
        let payload = message.encode();
        if matches!(message, Message::Table { .. }) {
            self.outbox_max = OUTBOX_BYTES_MAX + payload.len();
        }
        let length = u32::try_from(payload.len()).map_err(|_| "a message is too long".to_owned())?;
        self.outbox.extend_from_slice(&Header { kind: KIND, sequence: self.sent, length }.encode());
        self.outbox.extend_from_slice(&payload);
        self.sent += 1;
        self.flush(now)?;
        match self.outbox.len() > self.outbox_max {
            true => Err(format!("it does not read: {} bytes wait", self.outbox.len())),
            false => Ok(()),
        }
    }

    /// Sends what can be sent.
    ///
    /// # Errors
    /// Why the connection is of no use any more.
    pub fn flush(&mut self, now: Duration) -> Result<(), String> {
        while !self.outbox.is_empty() {
            match self.stream.write(&self.outbox) {
                Ok(0) => return Err("it takes no more bytes".into()),
                Ok(count) => {
                    self.outbox.drain(..count);
                    self.stuck = None;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.stuck.get_or_insert(now);
                    return Ok(());
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        if self.stream.has_sent().map_err(|error| error.to_string())? {
            self.stuck = None;
        } else {
            self.stuck.get_or_insert(now);
        }
        Ok(())
    }

    /// For how long nothing could be sent although something waits.
    pub fn stuck_for(&self, now: Duration) -> Duration {
        self.stuck.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    /// The next message, if it has come whole.
    ///
    /// # Errors
    /// Why the connection is of no use any more: closed, broken, or what came is no message.
    pub fn pull(&mut self, world: usize) -> Result<Option<Message>, String> {
        loop {
            match self.decoder.decode(&self.inbox).map_err(|error| error.to_string())? {
                Decoded::Frame { kind, payload, taken } => {
                    if kind != KIND {
                        return Err(format!("a frame of the unknown kind {kind}"));
                    }
                    let message = Message::decode(payload, world)?;
                    self.inbox.drain(..taken);
                    return Ok(Some(message));
                }
                // At most what the frame still lacks is read, so the inbox never outgrows one frame.
                Decoded::Needs(bytes) => {
                    let mut chunk = [0; 4096];
                    let missing = (bytes - self.inbox.len()).min(chunk.len());
                    match self.stream.read(&mut chunk[..missing]) {
                        Ok(0) => return Err("it closed the connection".into()),
                        Ok(count) => self.inbox.extend_from_slice(&chunk[..count]),
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                        Err(error) => return Err(error.to_string()),
                    }
                }
            }
        }
    }

    /// Says that nothing more will be written.
    pub fn finish_writing(&mut self) {
        self.stream.finish_writing();
    }

    /// Throws away what comes; whether the other side has closed. A socket that is closed with bytes unread takes back
    /// what was written to it.
    pub fn drained(&mut self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Connection::new(Socket::Plain(listener.accept().unwrap().0), 1000).unwrap(), far)
    }

    /// Pulls until something comes of it.
    fn read(connection: &mut Connection) -> Result<Message, String> {
        let clock = paceline_system::clock::Clock::real();
        loop {
            if let Some(message) = connection.pull(2)? {
                return Ok(message);
            }
            assert!(clock.seconds() < 10.0, "nothing came");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_peer_that_does_not_read_costs_bounded_memory_and_no_time() {
        let (mut connection, _far) = pair();
        let why = "x".repeat(2000);
        let clock = paceline_system::clock::Clock::real();
        let error = loop {
            match connection.push(&Message::Refused { why: why.clone() }, Duration::ZERO) {
                Ok(()) => assert!(connection.outbox.len() <= OUTBOX_BYTES_MAX),
                Err(error) => break error,
            }
        };
        assert!(error.starts_with("it does not read: ") && clock.seconds() < 10.0, "{error}");
        assert_eq!(connection.stuck_for(Duration::from_secs(4)), Duration::from_secs(4));
    }

    #[test]
    fn messages_come_in_pieces_and_whole() {
        let (mut connection, mut far) = pair();
        let payload = Message::Goodbye.encode();
        let header = Header { kind: KIND, sequence: 0, length: payload.len() as u32 }.encode();
        far.write_all(&header[..10]).unwrap();
        while connection.inbox.len() < 10 {
            assert_eq!(connection.pull(2), Ok(None));
        }
        assert_eq!(connection.pull(2), Ok(None), "half a header is no message");
        far.write_all(&[&header[10..], &payload].concat()).unwrap();
        assert_eq!(read(&mut connection), Ok(Message::Goodbye));
        far.write_all(&[&header[..], &payload].concat()).unwrap();
        assert_eq!(read(&mut connection), Err("frame number 0 where number 1 must come".into()), "a replay");
    }

    #[test]
    fn oversized_unknown_truncated_and_senseless_frames_end_the_connection() {
        let answer = |bytes: &[u8]| {
            let (mut connection, mut far) = pair();
            far.write_all(bytes).unwrap();
            drop(far);
            let error = read(&mut connection).unwrap_err();
            assert!(connection.inbox.capacity() < 8192);
            error
        };
        let header = |kind, length| Header { kind, sequence: 0, length }.encode();
        assert!(answer(&header(KIND, u32::MAX)).contains("at most 1000 may come"));
        assert!(answer(&header(9, 0)).contains("unknown kind 9"));
        assert!(answer(&[&header(KIND, 2)[..], b"{}"].concat()).contains("no message"));
        assert!(answer(&header(KIND, 100)).contains("closed the connection"));
        assert!(answer(&[7; 64]).contains("no frame begins here"));
    }
}
