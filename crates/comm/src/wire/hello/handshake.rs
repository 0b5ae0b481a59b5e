//! A greeting in progress. It reads what has come and writes what the socket takes, so that one thread can tend many of
//! them ([`crate::wire::lobby`]); over a socket that blocks for a while it is the blocking greeting ([`super::greet`]).
//!
//! It takes not one byte more than belongs to the greeting: what follows is for whoever has the connection next.

use std::io;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use paceline_system::entropy;
use sha2::Sha256;

use super::greeting::{self, GREETING_BYTES, Greeting, PREFIX_BYTES, TLS_BYTES, is_tls};
use super::{Identity, No, Peer, Role, check};
use crate::error::{CommError, Party, Refusal};
use crate::rank::Rank;
use crate::wait::Wait;
use crate::wire::frame::array;
use crate::wire::stream::{Stream, Talk, is_retry};

const PHASE: &str = "greeting";
const PROOF_BYTES: usize = 32;

/// What an answer's first byte says.
const PROOF: u8 = 0xA1;
const WELCOME: u8 = 0xA2;
pub(super) const REFUSED: u8 = 0xA3;

/// How long whoever is refused may take to read why: closing with unread bytes would throw away what was written.
const LINGER_MAX: Duration = Duration::from_millis(200);

/// What has to come next.
#[derive(Clone, Debug)]
enum Stage {
    Greeting,
    Proof(Greeting),
    Welcome(Greeting),
    /// This side has refused the other, and waits for it to read that.
    Refused {
        reason: Refusal,
        detail: String,
    },
}

/// A greeting in progress.
#[derive(Debug)]
pub struct Handshake {
    identity: Identity,
    ours: Greeting,
    address: String,
    talk: Talk,
    wait: Wait,
    stage: Stage,
    /// See [`Stream::binding`].
    binding: [u8; 32],
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// Whether whoever was refused has been told that nothing more comes.
    finished: bool,
    /// Bytes that came after the refusal: strangers do not talk for ever.
    ignored: usize,
}

impl Handshake {
    /// Begins one with somebody at an address.
    pub fn new(identity: Identity, address: String, wait: Wait) -> Self {
        let ours = Greeting::of(&identity, entropy::bytes());
        let talk = Talk { rank: identity.rank, peer: Party::Address(address.clone()), phase: PHASE };
        let outbox = if identity.role == Role::Dialler { ours.encode().to_vec() } else { Vec::new() };
        let (stage, binding, inbox, wait) = (Stage::Greeting, [0; 32], Vec::new(), wait.for_whoever_comes());
        Self { identity, ours, address, talk, wait, stage, binding, inbox, outbox, finished: false, ignored: 0 }
    }

    /// Which end of the connection this side is at.
    pub const fn role(&self) -> Role {
        self.identity.role
    }

    /// Whom this side has dialled, and by which of its connections; none if it was dialled.
    pub fn dialled(&self) -> Option<(Rank, u16)> {
        let Identity { role, lane, ref expected, .. } = self.identity;
        (role == Role::Dialler).then_some((Rank(expected.start), lane))
    }

    /// Whether something waits to be written.
    pub fn is_sending(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Goes on as far as it can; the other side, once both are through.
    ///
    /// # Errors
    /// When the other side is refused or refuses, closes, sends something else, or does not answer in time.
    pub fn advance(&mut self, stream: &mut dyn Stream) -> Result<Option<Peer>, CommError> {
        loop {
            self.check_wait()?;
            self.flush(stream)?;
            if matches!(self.stage, Stage::Refused { .. }) {
                return self.linger(stream);
            }
            if let Stage::Welcome(theirs) = &self.stage
                && self.inbox.first() == Some(&WELCOME)
            {
                let peer = Peer { rank: theirs.rank, lane: theirs.lane, run: theirs.run };
                return Ok(self.outbox.is_empty().then_some(peer));
            }
            if !self.fill(stream)? {
                return Ok(None);
            }
            if matches!(self.stage, Stage::Greeting) {
                self.binding = stream.binding();
            }
            self.understand()?;
        }
    }

    fn check_wait(&self) -> Result<(), CommError> {
        match &self.stage {
            Stage::Refused { .. } if self.wait.left().is_zero() => Err(self.refusal()),
            _ => self.talk.check(&self.wait),
        }
    }

    fn flush(&mut self, stream: &mut dyn Stream) -> Result<(), CommError> {
        while !self.outbox.is_empty() {
            match stream.write(&self.outbox) {
                Ok(0) => return Err(self.talk.gone("it takes no more bytes")),
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(error) if is_retry(&error) => return Ok(()),
                Err(error) => return Err(self.broken(error)),
            }
        }
        // What TLS still holds goes out with the next call; a connection that is broken shows when it is read.
        let _ = stream.flush();
        Ok(())
    }

    /// How many bytes of the current message have to be here before it can be understood any further.
    fn needs(&self) -> usize {
        match (&self.stage, self.inbox.len()) {
            (Stage::Greeting, 0..TLS_BYTES) => TLS_BYTES,
            (Stage::Greeting, TLS_BYTES..PREFIX_BYTES) => PREFIX_BYTES,
            (Stage::Greeting, _) => GREETING_BYTES,
            _ => match self.inbox.first() {
                Some(&PROOF) => 1 + PROOF_BYTES,
                Some(&REFUSED) => 2,
                _ => 1,
            },
        }
    }

    /// Reads until enough has come; whether it has.
    fn fill(&mut self, stream: &mut dyn Stream) -> Result<bool, CommError> {
        let mut bytes = [0; GREETING_BYTES];
        let needs = self.needs();
        while self.inbox.len() < needs {
            match stream.read(&mut bytes[..needs - self.inbox.len()]) {
                Ok(0) => return Err(self.talk.gone("it closed the connection")),
                Ok(count) => self.inbox.extend_from_slice(&bytes[..count]),
                Err(error) if is_retry(&error) => return Ok(false),
                Err(error) => return Err(self.broken(error)),
            }
        }
        Ok(true)
    }

    fn understand(&mut self) -> Result<(), CommError> {
        match self.stage.clone() {
            Stage::Greeting => match self.greeting() {
                Ok(Some(theirs)) => self.greeted(theirs),
                Ok(None) => {}
                Err(no) => self.refuse(no),
            },
            Stage::Proof(theirs) => {
                if self.answer(PROOF)? {
                    self.proven(theirs);
                }
            }
            Stage::Welcome(_) => drop(self.answer(WELCOME)?),
            Stage::Refused { .. } => {}
        }
        Ok(())
    }

    /// The other side's greeting, once it is here whole. An alert of TLS is shorter than that.
    fn greeting(&self) -> Result<Option<Greeting>, No> {
        if is_tls(&self.inbox) {
            return Err(No { reason: Refusal::Secrecy, detail: "it speaks TLS and this side does not".into() });
        }
        if self.inbox.len() >= PREFIX_BYTES {
            greeting::check_prefix(&array(&self.inbox[..PREFIX_BYTES]))?;
        }
        if self.inbox.len() < GREETING_BYTES {
            return Ok(None);
        }
        let theirs = Greeting::decode(&array(&self.inbox[PREFIX_BYTES..]))?;
        check(&self.identity, &self.ours, &theirs)?;
        Ok(Some(theirs))
    }

    fn greeted(&mut self, theirs: Greeting) {
        self.talk.peer = theirs.rank.into();
        match self.identity.role {
            Role::Listener => self.outbox.extend_from_slice(&self.ours.encode()),
            Role::Dialler => self.send_proof(&theirs),
        }
        self.next(Stage::Proof(theirs));
    }

    fn proven(&mut self, theirs: Greeting) {
        if self.proof(&theirs, &self.ours).verify_slice(&self.inbox[1..]).is_err() {
            return self.refuse(No { reason: Refusal::Token, detail: "its proof does not hold".into() });
        }
        if self.identity.role == Role::Listener {
            self.send_proof(&theirs);
        }
        self.outbox.push(WELCOME);
        self.next(Stage::Welcome(theirs));
    }

    fn send_proof(&mut self, theirs: &Greeting) {
        let proof = self.proof(&self.ours, theirs).finalize().into_bytes();
        self.outbox.push(PROOF);
        self.outbox.extend_from_slice(&proof);
    }

    fn next(&mut self, stage: Stage) {
        self.inbox.clear();
        self.stage = stage;
    }

    /// What the speaker must send to show that it holds the token.
    fn proof(&self, speaker: &Greeting, listener: &Greeting) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.identity.token.bytes()).expect("a key may have any length");
        mac.update(&speaker.encode());
        mac.update(&listener.encode());
        mac.update(&self.binding);
        mac
    }

    /// Whether an answer of this kind is here whole; anything else, a refusal too, ends the greeting.
    fn answer(&self, kind: u8) -> Result<bool, CommError> {
        match self.inbox[..] {
            [first, ..] if first == kind => Ok(self.inbox.len() == self.needs()),
            [REFUSED] => Ok(false),
            [REFUSED, reason, ..] => Err(match Refusal::from_code(reason) {
                Some(reason) => CommError::RefusedBy { rank: self.talk.rank, peer: self.talk.peer.clone(), reason },
                None => self.talk.violation(format!("a refusal for the unknown reason {reason}")),
            }),
            [first, ..] => Err(self.talk.violation(format!("answer {first:#04x} where {kind:#04x} must come"))),
            [] => Ok(false),
        }
    }

    /// Tells the other side why it is refused. It has proven nothing, so it is an address and not a rank.
    fn refuse(&mut self, No { reason, detail }: No) {
        if matches!(self.stage, Stage::Greeting) && self.identity.role == Role::Listener {
            self.outbox.extend_from_slice(&self.ours.encode());
        }
        self.outbox.extend_from_slice(&[REFUSED, reason as u8]);
        self.talk.peer = Party::Address(self.address.clone());
        self.wait = self.wait.at_most(LINGER_MAX);
        self.next(Stage::Refused { reason, detail });
    }

    /// Waits a moment for the refusal to be read.
    fn linger(&mut self, stream: &mut dyn Stream) -> Result<Option<Peer>, CommError> {
        if !self.outbox.is_empty() {
            return Ok(None);
        }
        if !std::mem::replace(&mut self.finished, true) {
            stream.finish_writing();
        }
        let mut bytes = [0; 256];
        loop {
            match stream.read(&mut bytes) {
                Ok(count) if count > 0 && self.ignored < 4 * bytes.len() => self.ignored += count,
                Err(error) if is_retry(&error) => return Ok(None),
                _ => return Err(self.refusal()),
            }
        }
    }

    fn refusal(&self) -> CommError {
        let Stage::Refused { reason, detail } = &self.stage else {
            return self.talk.gone("it was not refused");
        };
        CommError::Refused {
            rank: self.talk.rank,
            peer: self.talk.peer.clone(),
            reason: *reason,
            detail: detail.clone(),
        }
    }

    fn broken(&self, error: io::Error) -> CommError {
        match &self.stage {
            Stage::Refused { .. } => self.refusal(),
            _ => self.talk.ended(error),
        }
    }
}
