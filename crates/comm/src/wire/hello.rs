//! The greeting that opens every connection: both sides say who they are and prove that they hold the run's token.
//!
//! 1. Each sends a greeting: magic, protocol version, length, then Paceline's version, purpose, lane, rank, world,
//!    generation and 32 fresh random bytes.
//! 2. Each checks the other's and answers with a proof, HMAC-SHA256 under the token of its own greeting followed by the
//!    other's, or with a refusal. Both nonces are in it, so an old proof proves nothing; its own greeting comes first
//!    and greetings with our own rank are refused, so our proofs cannot be sent back to us.
//! 3. Each checks the other's proof and answers with a welcome or a refusal.
//!
//! A refused side learns why. Two round trips, under 250 bytes each way. What follows is not encrypted.

use hmac::{Hmac, KeyInit, Mac};
use paceline_system::entropy;
use sha2::Sha256;

use super::stream::{Stream, Talk, read_exact, write_all};
use crate::error::{CommError, Party, Refusal};
use crate::rank::{Generation, Rank};
use crate::token::Token;
use crate::wait::Wait;

mod greeting;
#[cfg(test)]
mod tests;

use greeting::{BODY_BYTES, Greeting, PREFIX_BYTES, TLS_BYTES, is_tls};
pub use greeting::{PROTOCOL_VERSION, Purpose};

const PHASE: &str = "greeting";
const PROOF_BYTES: usize = 32;

/// What an answer's first byte says.
const PROOF: u8 = 0xA1;
const WELCOME: u8 = 0xA2;
const REFUSED: u8 = 0xA3;

/// Who this side is and whom it is willing to talk to.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The secret both sides must hold.
    pub token: Token,
    /// What the connection is for; both sides must agree.
    pub purpose: Purpose,
    /// Which of several connections for that purpose this is; told to the other side. The side that accepts sends 0.
    pub lane: u16,
    /// This side's rank.
    pub rank: Rank,
    /// How many ranks there are; both sides must agree.
    pub world: u32,
    /// The incarnation of the world; both sides must agree.
    pub generation: Generation,
    /// The rank that must answer, where only one may.
    pub expected: Option<Rank>,
    /// Ranks that are here already and may not come again.
    pub taken: Vec<Rank>,
}

impl Identity {
    /// A rank that talks to anyone else of its world.
    pub fn new(token: &Token, purpose: Purpose, rank: Rank, world: u32) -> Self {
        Self {
            token: token.clone(),
            purpose,
            lane: 0,
            rank,
            world,
            generation: Generation::default(),
            expected: None,
            taken: Vec::new(),
        }
    }
}

/// The other side, proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its rank.
    pub rank: Rank,
    /// Which of its connections this is.
    pub lane: u16,
}

/// Greets the other side of a fresh connection. Both sides call this. The socket's timeouts are left changed.
///
/// # Errors
/// When the other side is refused or refuses, closes, sends something else, or does not answer in time.
pub fn greet(stream: &mut dyn Stream, identity: &Identity, wait: &Wait) -> Result<Peer, CommError> {
    let talk = Talk { rank: identity.rank, peer: Party::Address(stream.address()), phase: PHASE };
    let ours = Greeting::of(identity, entropy::bytes());
    write_all(stream, &ours.encode(), &talk, wait)?;
    let theirs = match read_greeting(stream, &talk, wait)?.and_then(|theirs| {
        check(identity, &ours, &theirs)?;
        Ok(theirs)
    }) {
        Ok(theirs) => theirs,
        Err(no) => return Err(refuse(stream, &talk, wait, no)),
    };
    let talk = Talk { peer: theirs.rank.into(), ..talk };
    let proof = prove(identity, &ours, &theirs).finalize().into_bytes();
    write_all(stream, &[&[PROOF], &proof[..]].concat(), &talk, wait)?;
    expect(stream, PROOF, &talk, wait)?;
    let mut answer = [0; PROOF_BYTES];
    read_exact(stream, &mut answer, &talk, wait)?;
    if prove(identity, &theirs, &ours).verify_slice(&answer).is_err() {
        let no = No { reason: Refusal::Token, detail: "its proof does not hold".into() };
        // It has proven nothing, so it is an address and not a rank.
        let talk = Talk { peer: Party::Address(stream.address()), ..talk };
        return Err(refuse(stream, &talk, wait, no));
    }
    write_all(stream, &[WELCOME], &talk, wait)?;
    expect(stream, WELCOME, &talk, wait)?;
    Ok(Peer { rank: theirs.rank, lane: theirs.lane })
}

/// Why a greeting is refused, with both sides' values.
#[derive(Debug)]
struct No {
    reason: Refusal,
    detail: String,
}

/// Reads a greeting. The inner error is a reason to refuse it, the outer one the end of the connection.
fn read_greeting(stream: &mut dyn Stream, talk: &Talk, wait: &Wait) -> Result<Result<Greeting, No>, CommError> {
    let mut prefix = [0; PREFIX_BYTES];
    // An alert of TLS is shorter than a greeting.
    let (first, rest) = prefix.split_at_mut(TLS_BYTES);
    read_exact(stream, first, talk, wait)?;
    if is_tls(first) {
        return Ok(Err(No { reason: Refusal::Secrecy, detail: "it speaks TLS and this side does not".into() }));
    }
    read_exact(stream, rest, talk, wait)?;
    if let Err(no) = greeting::check_prefix(&prefix) {
        return Ok(Err(no));
    }
    let mut body = [0; BODY_BYTES];
    read_exact(stream, &mut body, talk, wait)?;
    Ok(Greeting::decode(&body))
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
    if rank.0 >= ours.world {
        return no(Refusal::Rank, format!("it says it is {rank} of {}", ours.world));
    }
    if identity.expected.is_some_and(|expected| expected != rank) {
        return no(Refusal::Rank, format!("it says it is {rank}, which is not expected here"));
    }
    if identity.taken.contains(&rank) {
        return no(Refusal::Rank, format!("{rank} is here already"));
    }
    Ok(())
}

/// What the speaker must send to show that it holds the token.
fn prove(identity: &Identity, speaker: &Greeting, listener: &Greeting) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(identity.token.bytes()).expect("a key may have any length");
    mac.update(&speaker.encode());
    mac.update(&listener.encode());
    mac
}

/// Tells the other side why it is refused, and waits a moment for it to read that before the socket closes: closing
/// with unread bytes would throw away what was written.
fn refuse(stream: &mut dyn Stream, talk: &Talk, wait: &Wait, no: No) -> CommError {
    let moment = wait.at_most(std::time::Duration::from_millis(200));
    if write_all(stream, &[REFUSED, no.reason as u8], talk, &moment).is_ok() {
        stream.finish_writing();
        let mut rest = [0; 256];
        for byte in &mut rest {
            if read_exact(stream, std::slice::from_mut(byte), talk, &moment).is_err() {
                break;
            }
        }
    }
    CommError::Refused { rank: talk.rank, peer: talk.peer.clone(), reason: no.reason, detail: no.detail }
}

/// Reads an answer's first byte, which should be `kind`.
fn expect(stream: &mut dyn Stream, kind: u8, talk: &Talk, wait: &Wait) -> Result<(), CommError> {
    let mut byte = [0; 1];
    read_exact(stream, &mut byte, talk, wait)?;
    if byte == [kind] {
        return Ok(());
    }
    if byte != [REFUSED] {
        return Err(talk.violation(format!("answer {:#04x} where {kind:#04x} must come", byte[0])));
    }
    read_exact(stream, &mut byte, talk, wait)?;
    Err(match Refusal::from_code(byte[0]) {
        Some(reason) => CommError::RefusedBy { rank: talk.rank, peer: talk.peer.clone(), reason },
        None => talk.violation(format!("a refusal for the unknown reason {}", byte[0])),
    })
}
