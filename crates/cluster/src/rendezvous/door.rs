//! Rank 0's open port. Whoever comes is greeted in a thread of their own with a deadline, so that a stranger who says
//! nothing holds up nobody; the number of such threads is bounded, and the rest wait in the kernel's own bounded queue.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use paceline_comm::wire::{Identity, Socket, Tls, greet};
use paceline_comm::{CommError, Rank, Stop, Wait};
use paceline_system::ready::Interest;
use paceline_system::threads;

/// Greetings at the same time.
const GREETERS_MAX: usize = 64;

/// A greeting is two round trips; whoever takes longer is no member.
const GREETING_MAX: Duration = Duration::from_secs(5);

/// Somebody who holds the token, or why not.
pub(crate) type Greeted = Result<(Socket, Rank), CommError>;

#[derive(Debug)]
pub(crate) struct Door {
    listener: TcpListener,
    wake: UnixStream,
    stop: Stop,
    tls: Option<Tls>,
    greeters: Arc<AtomicUsize>,
    sender: SyncSender<Greeted>,
    greeted: Receiver<Greeted>,
}

impl Door {
    pub(crate) fn new(listener: TcpListener, wake: UnixStream, stop: Stop, tls: Option<Tls>) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        // A full channel would block a greeter, so it has room for all of them.
        let (sender, greeted) = sync_channel(2 * GREETERS_MAX);
        Ok(Self { listener, wake, stop, tls, greeters: Arc::default(), sender, greeted })
    }

    /// The address that the door is at.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.listener.local_addr().ok().map(|address| address.ip())
    }

    pub(crate) fn interest(&self) -> Option<Interest<'_>> {
        let open = self.greeters.load(Ordering::SeqCst) < GREETERS_MAX;
        open.then(|| Interest { fd: self.listener.as_fd(), write: false })
    }

    /// Lets in whoever is there, as far as there are greeters; says what went wrong with some.
    pub(crate) fn open(&self, identity: &Identity) -> Vec<String> {
        let mut troubles = Vec::new();
        while self.greeters.load(Ordering::SeqCst) < GREETERS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) => troubles.extend(self.greet(stream, identity.clone()).err()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The stranger left again, or there are no descriptors: look again at the next turn.
                Err(error) => {
                    troubles.push(format!("a connection could not be accepted: {error}"));
                    break;
                }
            }
        }
        troubles
    }

    fn greet(&self, stream: TcpStream, identity: Identity) -> Result<(), String> {
        let accepted = Socket::accepted(stream, self.tls.as_ref());
        let mut socket = accepted.map_err(|error| format!("no secret connection can begin: {error}"))?;
        let (sender, stop) = (self.sender.clone(), self.stop.clone());
        let wake = self.wake.try_clone().map_err(|error| format!("no descriptor is left: {error}"))?;
        self.greeters.fetch_add(1, Ordering::SeqCst);
        let busy = Busy(self.greeters.clone());
        let body = move || {
            let greeted = greet(&mut socket, &identity, &Wait::new(GREETING_MAX, &stop));
            // Counted down first: a full channel must never be what a greeter waits for.
            drop(busy);
            let _ = sender.try_send(greeted.map(|peer| (socket, peer.rank)));
            let _ = (&wake).write(&[1]);
        };
        // If no thread can be had, `busy` is dropped with the body.
        threads::spawn("greeter", body).map(drop).map_err(|error| format!("no thread is left: {error}"))
    }

    pub(crate) fn greeted(&self) -> Option<Greeted> {
        self.greeted.try_recv().ok()
    }
}

/// Counts a greeter down when it is through, however it ends.
struct Busy(Arc<AtomicUsize>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
