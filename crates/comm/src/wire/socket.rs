//! A TCP connection, plain or secret, that reads and writes the same way, whether it blocks or not.
//!
//! TLS has bytes of its own to send (the handshake, and records that the network did not take at once). They go out whenever
//! something is read or written, and [`Socket::has_sent`] says when none are left. Reading never waits for them: two sides that
//! both have much to send would wait for each other.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use rustls::Connection;

use super::stream::Stream;
use super::tls::Tls;

/// What the number that both ends of an encrypted connection derive from its keys is for (RFC 8446, 7.5).
const EXPORT_LABEL: &[u8] = b"EXPORTER-paceline-greeting";

/// One connection.
#[derive(Debug)]
pub enum Socket {
    /// Anyone on the way can read it.
    Plain(TcpStream),
    /// Nobody can.
    Secret(Box<Secret>),
}

/// A connection and its keys.
#[derive(Debug)]
pub struct Secret {
    tcp: TcpStream,
    tls: Connection,
}

/// Writes without a signal where the other side is gone: a program in C ends of that one unless it says otherwise, and the
/// standard library asks for none only where it writes a single slice.
struct Quiet<'a>(&'a TcpStream);

impl Write for Quiet<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        // The system takes no more slices at once.
        let slices = &slices[..slices.len().min(1024)];
        Ok(sendmsg(self.0, slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    /// The side that dialled.
    ///
    /// # Errors
    /// When TLS cannot begin.
    pub fn dialled(tcp: TcpStream, tls: Option<&Tls>) -> io::Result<Self> {
        Self::new(tcp, tls, true)
    }

    /// The side that was dialled.
    ///
    /// # Errors
    /// When TLS cannot begin.
    pub fn accepted(tcp: TcpStream, tls: Option<&Tls>) -> io::Result<Self> {
        Self::new(tcp, tls, false)
    }

    fn new(tcp: TcpStream, tls: Option<&Tls>, dialled: bool) -> io::Result<Self> {
        let Some(tls) = tls else { return Ok(Self::Plain(tcp)) };
        let tls = tls.begin(dialled).map_err(io::Error::other)?;
        Ok(Self::Secret(Box::new(Secret { tcp, tls })))
    }

    /// What the system knows of it.
    pub const fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Secret(secret) => &secret.tcp,
        }
    }

    /// Sends what was written and is still here; whether nothing is.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn has_sent(&mut self) -> io::Result<bool> {
        match self {
            Self::Plain(_) => Ok(true),
            Self::Secret(secret) => secret.push(),
        }
    }

    /// Whether something that was written is still here.
    pub fn is_sending(&self) -> bool {
        matches!(self, Self::Secret(secret) if secret.tls.wants_write())
    }
}

impl Secret {
    /// Sends what TLS has to send; whether nothing is left.
    fn push(&mut self) -> io::Result<bool> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Quiet(&self.tcp)) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return done,
            }
            // What cannot be sent shows when it is written; what has come is read first.
            let _ = self.push();
            if self.tls.read_tls(&mut self.tcp)? == 0 {
                return Ok(0);
            }
            if let Err(error) = self.tls.process_new_packets() {
                // The other side is told what is wrong, if it still listens.
                let _ = self.push();
                return Err(io::Error::new(ErrorKind::InvalidData, error));
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push()?;
        let count = self.tls.writer().write(bytes)?;
        self.push()?;
        if count == 0 && !bytes.is_empty() { Err(ErrorKind::WouldBlock.into()) } else { Ok(count) }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tcp().as_fd()
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(tcp) => tcp.read(bytes),
            Self::Secret(secret) => secret.read(bytes),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(tcp) => tcp.write(bytes),
            Self::Secret(secret) => secret.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.has_sent().map(drop)
    }
}

impl Stream for Socket {
    fn set_timeouts(&self, limit: Duration) -> io::Result<()> {
        self.tcp().set_timeouts(limit)
    }

    fn finish_writing(&mut self) {
        if let Self::Secret(secret) = self {
            secret.tls.send_close_notify();
            let _ = secret.push();
        }
        // The other side may be gone already; then nobody is left to tell.
        let _ = self.tcp().shutdown(Shutdown::Write);
    }

    fn address(&self) -> String {
        self.tcp().address()
    }

    fn is_sending(&self) -> bool {
        self.is_sending()
    }

    fn looks(&self) -> Option<OwnedFd> {
        if let Self::Plain(tcp) = self { tcp.as_fd().try_clone_to_owned().ok() } else { None }
    }

    fn binding(&self) -> [u8; 32] {
        match self {
            Self::Plain(_) => [0; 32],
            // Both ends have spoken by the time this is asked, so the keys are there; without them the proofs do not agree.
            Self::Secret(secret) => secret.tls.export_keying_material([0; 32], EXPORT_LABEL, None).unwrap_or([0; 32]),
        }
    }
}
