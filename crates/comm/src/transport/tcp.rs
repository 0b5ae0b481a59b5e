//! Ranks joined by sockets: every two by one or several TCP connections, each opened with a greeting.
//!
//! Sockets never block. The bytes between two ranks are dealt out over their sockets in stripes, round robin;
//! both ends count bytes, so no stripe needs a header. With TLS each socket keeps its own secret. A group has
//! connections of its own, which were opened in advance. The calling thread itself moves the bytes: on one
//! core per rank a second thread would only take turns with it.

use std::io::{ErrorKind, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::error::CommError;
use crate::rank::Rank;
use crate::transport::Interest;
use crate::wire::socket::Socket;

mod connect;

use connect::Reception;
pub use connect::{Config, LIVES_MAX, Life, Listener, Report, connect, rejoin};

/// Bytes of a stripe: a few system calls' worth.
const STRIPE_BYTES: u64 = 1 << 20;
/// Reads below this go through a buffer, so that a header and a short message cost one system call.
const SHORT_BYTES: usize = 16 << 10;

/// The connections to one peer.
#[derive(Debug)]
struct Cable {
    sockets: Vec<Socket>,
    sent: u64,
    received: u64,
    /// Bytes read ahead, and how many of them are used up.
    ahead: Vec<u8>,
    used: usize,
}

impl Cable {
    fn new(sockets: Vec<Socket>) -> Self {
        Self { sockets, sent: 0, received: 0, ahead: Vec::new(), used: 0 }
    }

    /// The socket at a position of the stream, and how many bytes its stripe has left.
    fn socket(&mut self, position: u64) -> (&mut Socket, usize) {
        let stripe = position / STRIPE_BYTES;
        let count = self.sockets.len() as u64;
        // With one socket there is nothing to deal out.
        let left = if count == 1 { usize::MAX } else { ((stripe + 1) * STRIPE_BYTES - position) as usize };
        (&mut self.sockets[(stripe % count) as usize], left)
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<usize, String> {
        let (socket, left) = self.socket(self.received);
        let room = bytes.len().min(left);
        let count = outcome(socket.read(&mut bytes[..room]), "it closed the connection")?;
        self.received += count as u64;
        Ok(count)
    }

    /// Reads ahead if nothing is; whether anything is there then.
    fn fill(&mut self) -> Result<bool, String> {
        if self.used == self.ahead.len() {
            let mut ahead = std::mem::take(&mut self.ahead);
            ahead.resize(SHORT_BYTES, 0);
            let count = self.read(&mut ahead);
            ahead.truncate(*count.as_ref().unwrap_or(&0));
            self.ahead = ahead;
            self.used = 0;
            count?;
        }
        Ok(self.used < self.ahead.len())
    }
}

/// Would block: nothing. Nothing: the end.
fn outcome(result: std::io::Result<usize>, end: &str) -> Result<usize, String> {
    match result {
        Ok(0) => Err(end.into()),
        Ok(count) => Ok(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error.to_string()),
    }
}

/// One rank's end. Dropping it closes the connections, which tells the others that the rank is gone.
#[derive(Debug)]
pub struct Port {
    rank: usize,
    /// By rank; none for this one.
    cables: Vec<Option<Cable>>,
    /// The ranks' numbers in the world.
    members: Vec<Rank>,
    /// Connections for groups, by rank in the world; all of a rank's ports take from the same.
    spares: Arc<Mutex<Vec<Vec<Socket>>>>,
    /// Where ranks come back to, if they may.
    reception: Option<Reception>,
}

impl Port {
    /// This rank.
    pub fn rank(&self) -> Rank {
        Rank::at(self.rank)
    }

    /// How many ranks there are.
    pub const fn world(&self) -> usize {
        self.cables.len()
    }

    /// This rank's end in a group of these ranks, of which it is one: takes a spare connection to each of the
    /// others. Two ranks make the groups that they are both in in the same order, and so take the same one.
    pub(super) fn group(&self, members: &[Rank]) -> Result<Self, CommError> {
        let rank = members.iter().position(|member| member.index() == self.rank).expect("this rank is a member");
        let names: Vec<Rank> = members.iter().map(|member| self.members[member.index()]).collect();
        let mut spares = self.spares.lock().unwrap_or_else(PoisonError::into_inner);
        let others = || names.iter().enumerate().filter(|(place, _)| *place != rank);
        if let Some((_, peer)) = others().find(|(_, peer)| spares[peer.index()].is_empty()) {
            let source = std::io::Error::other(format!("no connection to {peer} is left; connect for more groups"));
            return Err(CommError::System { rank: Rank::at(self.rank), what: "make another group", source });
        }
        let mut cables: Vec<Option<Cable>> = names.iter().map(|_| None).collect();
        for (place, peer) in others() {
            cables[place] = Some(Cable::new(spares[peer.index()].pop().into_iter().collect()));
        }
        drop(spares);
        Ok(Self { rank, cables, members: names, spares: Arc::clone(&self.spares), reception: None })
    }

    /// Replaces the connections to a rank that was lost by those that it has made since, for the so-manieth time; whether they
    /// are there within this time.
    pub(crate) fn replace(&mut self, peer: Rank, life: u16, limit: Duration) -> bool {
        let sockets = self.reception.as_ref().and_then(|reception| reception.take(peer, life, limit));
        let Some(sockets) = sockets else { return false };
        self.cables[peer.index()] = Some(Cable::new(sockets));
        true
    }

    fn cable(&mut self, peer: Rank) -> &mut Cable {
        self.cables[peer.index()].as_mut().expect("a rank has no cable to itself")
    }

    pub(super) fn try_send(&mut self, peer: Rank, bytes: &[u8]) -> Result<usize, String> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let cable = self.cable(peer);
        let (socket, left) = cable.socket(cable.sent);
        let room = bytes.len().min(left);
        let count = outcome(socket.write(&bytes[..room]), "it takes no more bytes")?;
        cable.sent += count as u64;
        Ok(count)
    }

    pub(super) fn try_receive(&mut self, peer: Rank, bytes: &mut [u8]) -> Result<usize, String> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let cable = self.cable(peer);
        if cable.used == cable.ahead.len() && bytes.len() >= SHORT_BYTES {
            return cable.read(bytes);
        }
        if !cable.fill()? {
            return Ok(0);
        }
        let count = bytes.len().min(cable.ahead.len() - cable.used);
        bytes[..count].copy_from_slice(&cable.ahead[cable.used..cable.used + count]);
        cable.used += count;
        Ok(count)
    }

    /// Whether nothing is left of what was written; only TLS keeps something.
    pub(super) fn has_sent(&mut self) -> Result<bool, String> {
        let mut sent = true;
        for socket in self.cables.iter_mut().flatten().flat_map(|cable| &mut cable.sockets) {
            sent &= socket.has_sent().map_err(|error| error.to_string())?;
        }
        Ok(sent)
    }

    pub(super) fn has_bytes(&mut self, peer: Rank) -> Result<bool, String> {
        self.cable(peer).fill()
    }

    pub(super) fn sleep(&mut self, interests: &[Interest], limit: Duration) {
        let mut watched = Vec::with_capacity(2 * interests.len());
        for interest in interests {
            let cable = self.cables[interest.peer.index()].as_ref().expect("a rank has no cable to itself");
            if interest.receive && cable.used < cable.ahead.len() {
                return;
            }
            let socket = |position: u64| &cable.sockets[(position / STRIPE_BYTES) as usize % cable.sockets.len()];
            if interest.receive {
                watched.push(PollFd::new(socket(cable.received).tcp(), PollFlags::IN));
            }
            if interest.send {
                watched.push(PollFd::new(socket(cable.sent).tcp(), PollFlags::OUT));
            }
        }
        let sockets = self.cables.iter().flatten().flat_map(|cable| &cable.sockets);
        let sending = sockets.filter(|socket| socket.is_sending());
        watched.extend(sending.map(|socket| PollFd::new(socket.tcp(), PollFlags::OUT)));
        // Interrupted or refused, the caller looks again and has its own deadline.
        let _ = poll(&mut watched, limit.try_into().ok().as_ref());
        // A broken connection says so to whoever next reads or writes.
        let _ = self.has_sent();
    }
}
