//! A connected socket with bounded waits: bytes go out and come in whole, or the wait ends with an error.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::error::{CommError, Party, Refusal};
use crate::rank::Rank;
use crate::wait::Wait;

/// What a greeting needs of a socket.
pub trait Stream: Read + Write {
    /// Limits how long one read and one write may block.
    ///
    /// # Errors
    /// When the operating system refuses.
    fn set_timeouts(&self, limit: Duration) -> io::Result<()>;

    /// Says that nothing more will be written, so that the other side reads what was written and then the end.
    fn finish_writing(&mut self);

    /// Where the other side is, for messages.
    fn address(&self) -> String;

    /// What both ends of an encrypted connection, and nobody else, know of it; zeros where it is not encrypted. Proofs cover it, so that
    /// nobody who ends encryption on both sides can carry them across.
    fn binding(&self) -> [u8; 32] {
        [0; 32]
    }

    /// The same socket, to ask whether something has come; none where the system does not know, because it is encrypted.
    fn looks(&self) -> Option<OwnedFd> {
        None
    }

    /// Whether something that was written is still here and goes out when the socket is tried again.
    fn is_sending(&self) -> bool {
        false
    }
}

impl Stream for TcpStream {
    fn set_timeouts(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }

    fn finish_writing(&mut self) {
        // The other side may be gone already; then nobody is left to tell.
        let _ = self.shutdown(std::net::Shutdown::Write);
    }

    fn address(&self) -> String {
        self.peer_addr().map_or_else(|_| "a closed connection".into(), |address| address.to_string())
    }
}

impl Stream for UnixStream {
    fn set_timeouts(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }

    fn finish_writing(&mut self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }

    fn address(&self) -> String {
        "a process of this host".into()
    }

    fn looks(&self) -> Option<OwnedFd> {
        self.as_fd().try_clone_to_owned().ok()
    }
}

/// Who talks to whom and about what: the words of an error.
#[derive(Clone, Debug)]
pub struct Talk {
    /// This side.
    pub rank: Rank,
    /// The other side.
    pub peer: Party,
    /// What they are doing.
    pub phase: &'static str,
}

impl Talk {
    /// The connection broke.
    pub fn gone(&self, reason: impl ToString) -> CommError {
        CommError::PeerGone { rank: self.rank, peer: self.peer.clone(), phase: self.phase, reason: reason.to_string() }
    }

    /// The connection broke, or the two sides do not keep the same secret.
    pub(crate) fn ended(&self, error: io::Error) -> CommError {
        if error.kind() != ErrorKind::InvalidData {
            return self.gone(error);
        }
        let (peer, reason) = (self.peer.clone(), Refusal::Secrecy);
        CommError::Refused { rank: self.rank, peer, reason, detail: error.to_string() }
    }

    /// The other side broke the protocol.
    pub fn violation(&self, what: impl ToString) -> CommError {
        CommError::Protocol { rank: self.rank, peer: self.peer.clone(), phase: self.phase, what: what.to_string() }
    }

    /// Whether to go on waiting.
    ///
    /// # Errors
    /// As [`Wait::check`].
    pub fn check(&self, wait: &Wait) -> Result<(), CommError> {
        wait.check(self.rank, self.peer.clone(), self.phase)
    }
}

/// Whether a socket call should simply be made again.
pub(crate) fn is_retry(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Fills `bytes` from the stream.
///
/// # Errors
/// When the wait ends, or the other side closes or breaks the connection first.
pub fn read_exact(stream: &mut dyn Stream, bytes: &mut [u8], talk: &Talk, wait: &Wait) -> Result<(), CommError> {
    let mut filled = 0;
    while filled < bytes.len() {
        talk.check(wait)?;
        stream.set_timeouts(wait.slice()).map_err(|error| talk.gone(error))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(talk.gone("it closed the connection")),
            Ok(count) => filled += count,
            Err(error) if is_retry(&error) => {}
            Err(error) => return Err(talk.ended(error)),
        }
    }
    Ok(())
}

/// Writes all of `bytes` to the stream.
///
/// # Errors
/// When the wait ends, or the connection breaks first.
pub fn write_all(stream: &mut dyn Stream, bytes: &[u8], talk: &Talk, wait: &Wait) -> Result<(), CommError> {
    let mut written = 0;
    while written < bytes.len() {
        talk.check(wait)?;
        stream.set_timeouts(wait.slice()).map_err(|error| talk.gone(error))?;
        match stream.write(&bytes[written..]) {
            Ok(0) => return Err(talk.gone("it takes no more bytes")),
            Ok(count) => written += count,
            Err(error) if is_retry(&error) => {}
            Err(error) => return Err(talk.ended(error)),
        }
    }
    Ok(())
}
