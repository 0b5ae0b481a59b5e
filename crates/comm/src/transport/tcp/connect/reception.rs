//! A port that stays open after the mesh is there: ranks that were lost and have come back are greeted beside everything else,
//! and their connections wait until they are taken ([`Stop::readmit`]). Nobody is let in who is still there.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_system::threads;

use super::{Config, Listener, accept, prepare};
use crate::rank::Rank;
use crate::stop::Stop;
use crate::transport::Membership;
use crate::wait::Wait;
use crate::wire::hello::{Identity, Purpose, Role};
use crate::wire::lobby::{Greeted, Lobby};
use crate::wire::socket::Socket;

/// How often the thread looks whether it is to end.
const LOOK: Duration = Duration::from_millis(100);

/// Connections of ranks that have come back.
#[derive(Debug)]
pub(in super::super) struct Reception {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    arrived: Mutex<BTreeMap<Rank, Arrived>>,
    changed: Condvar,
    over: AtomicBool,
}

/// What a rank has brought that has come back for the so-manieth time.
#[derive(Debug, Default)]
struct Arrived {
    life: u16,
    sockets: Vec<Option<Socket>>,
}

impl Reception {
    /// Goes on listening, by a thread of its own.
    pub(super) fn start(listener: Listener, membership: Membership, config: Config, stop: Stop) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let lobby = Lobby::new(usize::from(config.lanes()));
        let mut host = Host { listener, membership, config, stop, lobby, shared: Arc::clone(&shared) };
        let thread = threads::spawn("reception", move || host.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The connections of a rank that has come back for the so-manieth time; waits for those that are still being greeted, for
    /// so long.
    pub(in super::super) fn take(&self, rank: Rank, life: u16, limit: Duration) -> Option<Vec<Socket>> {
        let arrived = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        let misses = |arrived: &mut BTreeMap<Rank, Arrived>| {
            let of = arrived.get(&rank).filter(|arrived| arrived.life == life);
            of.is_none_or(|arrived| arrived.sockets.iter().any(Option::is_none))
        };
        let waited = self.shared.changed.wait_timeout_while(arrived, limit, misses);
        let (mut arrived, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        arrived.remove(&rank).map(|arrived| arrived.sockets.into_iter().flatten().collect())
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Host {
    listener: Listener,
    membership: Membership,
    config: Config,
    stop: Stop,
    lobby: Lobby<Socket>,
    shared: Arc<Shared>,
}

impl Host {
    fn run(&mut self) {
        // One for all, since the end of each would say that nobody is waited for; the lobby bounds every greeting.
        let wait = Wait::new(Duration::MAX, &self.stop);
        while !self.shared.over.load(Ordering::Acquire) && self.stop.reason().is_none() {
            let identity = self.identity();
            accept(&self.listener, &mut self.lobby, &identity, (&self.config, &wait));
            for Greeted { outcome, .. } in self.lobby.advance() {
                match outcome {
                    Ok((peer, socket)) => self.seat(peer.rank, peer.lane, socket),
                    Err(error) => self.config.report.write(&error.to_string()),
                }
            }
            self.lobby.sleep(&self.listener.socket, LOOK);
        }
    }

    /// Only ranks below that are lost may greet.
    fn identity(&self) -> Identity {
        let below = 0..self.membership.rank.0;
        let taken = below.clone().map(Rank).filter(|rank| !self.stop.has_lost(*rank)).collect();
        Identity { expected: below, taken, ..self.membership.identity(Purpose::Data, Role::Listener) }
    }

    /// Keeps a connection until it is taken. Those of a return that is over are closed.
    fn seat(&self, rank: Rank, lane: u16, socket: Socket) {
        let lanes = self.config.lanes();
        let (life, lane) = (lane / lanes, usize::from(lane % lanes));
        if let Err(error) = prepare(socket.tcp(), &self.config) {
            return self.config.report.write(&format!("a connection of {rank} cannot be used: {error}"));
        }
        let mut arrived = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        let known = arrived.entry(rank).or_default();
        if life == 0 || life < known.life {
            return self.config.report.write(&format!("{rank} is another process since"));
        }
        if known.life != life {
            *known = Arrived { life, sockets: (0..lanes).map(|_| None).collect() };
        }
        match &mut known.sockets[lane] {
            place @ None => *place = Some(socket),
            Some(_) => self.config.report.write(&format!("{rank} has no place for another connection ({lane})")),
        }
        drop(arrived);
        self.shared.changed.notify_all();
    }
}
