//! The greeting that opens every connection: both sides say who they are and prove that they hold the run's token.
//!
//! 1. The dialler sends a greeting: magic, protocol version, length, then Paceline's version, purpose, role, lane, rank,
//!    world, generation, run and 32 fresh random bytes. The listener, which says nothing before, answers with its own.
//! 2. The dialler checks it and sends a proof, HMAC-SHA256 under the token of its own greeting, the other's, and the keys.
//!    The listener checks that, and only then sends its own proof and a welcome: it proves nothing to strangers.
//! 3. The dialler checks the proof and sends its welcome.
//!
//! A proof covers both greetings, and so both roles, both ranks, the run and a fresh nonce of each side, and the keys of the
//! connection where it is encrypted: an old proof proves nothing, and what one listener says is worth nothing to another,
//! whoever relays it. Whoever is refused learns
//! why. Two round trips, under 250 bytes each way. What follows is not encrypted.

use std::ops::Range;

use crate::error::{CommError, Refusal};
use crate::rank::{Generation, Rank, RunId};
use crate::token::Token;
use crate::wait::Wait;

use super::stream::Stream;

mod greeting;
mod handshake;
#[cfg(test)]
mod tests;

use greeting::Greeting;
pub use greeting::{PROTOCOL_VERSION, Purpose, Role};
pub use handshake::Handshake;

/// Who this side is and whom it is willing to talk to.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The secret both sides must hold.
    pub token: Token,
    /// What the connection is for; both sides must agree.
    pub purpose: Purpose,
    /// Which end of the connection this side is at; the other must be at the other.
    pub role: Role,
    /// Which of several connections for that purpose this is; told to the other side. The side that accepts sends 0.
    pub lane: u16,
    /// This side's rank.
    pub rank: Rank,
    /// How many ranks there are; both sides must agree.
    pub world: u32,
    /// The incarnation of the world; both sides must agree.
    pub generation: Generation,
    /// The run; both sides must agree. Who dials for [`Purpose::Control`] may not know it yet, and learns it.
    pub run: RunId,
    /// The ranks that may answer.
    pub expected: Range<u32>,
    /// Ranks that are here already and may not come again.
    pub taken: Vec<Rank>,
}

impl Identity {
    /// A rank that talks to anyone else of its world.
    pub fn new(token: &Token, purpose: Purpose, role: Role, rank: Rank, world: u32) -> Self {
        Self {
            token: token.clone(),
            purpose,
            role,
            lane: 0,
            rank,
            world,
            generation: Generation::default(),
            run: RunId::UNKNOWN,
            expected: 0..world,
            taken: Vec::new(),
        }
    }

    /// The same, but only this rank may answer.
    #[must_use]
    pub fn expecting(self, rank: Rank) -> Self {
        Self { expected: rank.0..rank.0.saturating_add(1), ..self }
    }
}

/// The other side, proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its rank.
    pub rank: Rank,
    /// Which of its connections this is.
    pub lane: u16,
    /// The run it belongs to.
    pub run: RunId,
}

/// Greets the other side of a fresh connection. Both sides call this. The socket's timeouts are left changed.
///
/// # Errors
/// When the other side is refused or refuses, closes, sends something else, or does not answer in time.
pub fn greet(stream: &mut dyn Stream, identity: &Identity, wait: &Wait) -> Result<Peer, CommError> {
    let mut handshake = Handshake::new(identity.clone(), stream.address(), wait.clone());
    loop {
        // A socket that fails here fails in the handshake as well, which says so.
        let _ = stream.set_timeouts(wait.slice());
        if let Some(peer) = handshake.advance(stream)? {
            return Ok(peer);
        }
    }
}

/// Why a greeting is refused, with both sides' values.
#[derive(Debug)]
struct No {
    reason: Refusal,
    detail: String,
}

fn check(identity: &Identity, ours: &Greeting, theirs: &Greeting) -> Result<(), No> {
    let no = |reason, detail: String| Err(No { reason, detail });
    let differ = |ours: &dyn ToString, theirs: &dyn ToString| {
        format!("ours is {}, theirs {}", ours.to_string(), theirs.to_string())
    };
    if theirs.version != ours.version {
        return no(Refusal::Version, differ(&ours.version_text(), &theirs.version_text()));
    }
    if theirs.purpose != ours.purpose {
        return no(Refusal::Purpose, differ(&ours.purpose, &theirs.purpose));
    }
    if theirs.world != ours.world {
        return no(Refusal::World, differ(&ours.world, &theirs.world));
    }
    if theirs.generation != ours.generation {
        return no(Refusal::Generation, differ(&ours.generation.0, &theirs.generation.0));
    }
    let rank = theirs.rank;
    if rank == ours.rank {
        return no(Refusal::Rank, format!("it says it is {rank} as well"));
    }
    if theirs.role == ours.role {
        return no(Refusal::Role, format!("{rank} is at the same end of its connection as {}", ours.rank));
    }
    let dialler = if ours.role == Role::Dialler { ours } else { theirs };
    let still_unknown = dialler.run == RunId::UNKNOWN && ours.purpose == Purpose::Control;
    if theirs.run != ours.run && !still_unknown {
        return no(Refusal::Run, differ(&ours.run, &theirs.run));
    }
    if rank.0 >= ours.world {
        return no(Refusal::Rank, format!("it says it is {rank} of {}", ours.world));
    }
    if !identity.expected.contains(&rank.0) {
        return no(Refusal::Rank, format!("it says it is {rank}, which is not expected here"));
    }
    if identity.taken.contains(&rank) {
        return no(Refusal::Rank, format!("{rank} is here already"));
    }
    Ok(())
}
