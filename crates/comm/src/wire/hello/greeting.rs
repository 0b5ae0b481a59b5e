//! The greeting as bytes. The first twelve bytes keep their meaning in every version of the protocol.

use std::fmt;

use super::{Identity, No};
use crate::error::Refusal;
use crate::rank::{Generation, Rank, RunId};
use crate::wire::frame::array;

/// Grows when what is said after the greeting's first twelve bytes changes.
pub const PROTOCOL_VERSION: u16 = 2;

const MAGIC: [u8; 8] = *b"PACELINE";

/// Magic, protocol version, length of the rest.
pub(super) const PREFIX_BYTES: usize = 12;
/// Paceline's version (16), purpose (1), role (1), lane (2), rank (4), world (4), generation (8), run (16), nonce (32).
pub(super) const BODY_BYTES: usize = 84;
/// All of it.
pub(super) const GREETING_BYTES: usize = PREFIX_BYTES + BODY_BYTES;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// Rendezvous, membership, heartbeats.
    Control = 1,
    /// The messages of collectives and between two ranks.
    Data = 2,
    /// Handing over shared memory.
    Memory = 3,
    /// Handing out samples, to whoever trains on them.
    Samples = 4,
    /// Lending memory, to whoever has the token.
    MemoryBox = 5,
}

impl Purpose {
    const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Control),
            2 => Some(Self::Data),
            3 => Some(Self::Memory),
            4 => Some(Self::Samples),
            5 => Some(Self::MemoryBox),
            _ => None,
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Control => "control",
            Self::Data => "data",
            Self::Memory => "memory",
            Self::Samples => "samples",
            Self::MemoryBox => "memory box",
        })
    }
}

/// Which end of a connection a rank is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// It dialled.
    Dialler = 1,
    /// It was dialled.
    Listener = 2,
}

impl Role {
    const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Dialler),
            2 => Some(Self::Listener),
            _ => None,
        }
    }
}

/// What one side says first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) version: [u8; 16],
    pub(super) purpose: Purpose,
    pub(super) role: Role,
    pub(super) lane: u16,
    pub(super) rank: Rank,
    pub(super) world: u32,
    pub(super) generation: Generation,
    pub(super) run: RunId,
    pub(super) nonce: [u8; 32],
}

impl Greeting {
    pub(super) fn of(identity: &Identity, nonce: [u8; 32]) -> Self {
        let mut version = [0; 16];
        let text = env!("CARGO_PKG_VERSION").as_bytes();
        let length = text.len().min(version.len());
        version[..length].copy_from_slice(&text[..length]);
        Self {
            version,
            purpose: identity.purpose,
            role: identity.role,
            lane: identity.lane,
            rank: identity.rank,
            world: identity.world,
            generation: identity.generation,
            run: identity.run,
            nonce,
        }
    }

    /// The version for people; what is not printable is left out.
    pub(super) fn version_text(&self) -> String {
        self.version.iter().filter(|byte| byte.is_ascii_graphic()).map(|&byte| char::from(byte)).collect()
    }

    pub(super) fn encode(&self) -> [u8; GREETING_BYTES] {
        let parts: [&[u8]; 11] = [
            &MAGIC,
            &PROTOCOL_VERSION.to_le_bytes(),
            &(BODY_BYTES as u16).to_le_bytes(),
            &self.version,
            &[self.purpose as u8, self.role as u8],
            &self.lane.to_le_bytes(),
            &self.rank.0.to_le_bytes(),
            &self.world.to_le_bytes(),
            &self.generation.0.to_le_bytes(),
            self.run.bytes(),
            &self.nonce,
        ];
        array(&parts.concat())
    }

    pub(super) fn decode(body: &[u8; BODY_BYTES]) -> Result<Self, No> {
        let Some(purpose) = Purpose::from_code(body[16]) else {
            return Err(No { reason: Refusal::Purpose, detail: format!("purpose {} is unknown", body[16]) });
        };
        let Some(role) = Role::from_code(body[17]) else {
            return Err(No { reason: Refusal::Role, detail: format!("role {} is unknown", body[17]) });
        };
        Ok(Self {
            version: array(&body[..16]),
            purpose,
            role,
            lane: u16::from_le_bytes(array(&body[18..20])),
            rank: Rank(u32::from_le_bytes(array(&body[20..24]))),
            world: u32::from_le_bytes(array(&body[24..28])),
            generation: Generation(u64::from_le_bytes(array(&body[28..36]))),
            run: RunId::from_bytes(array(&body[36..52])),
            nonce: array(&body[52..]),
        })
    }
}

/// Bytes by which a record of TLS is known.
pub(super) const TLS_BYTES: usize = 3;

/// Whether this begins an alert or a handshake of TLS.
pub(super) fn is_tls(first: &[u8]) -> bool {
    matches!(first, [0x15 | 0x16, 3, _])
}

pub(super) fn check_prefix(prefix: &[u8; PREFIX_BYTES]) -> Result<(), No> {
    if prefix[..8] != MAGIC {
        return Err(No { reason: Refusal::NotPaceline, detail: "its first bytes are no greeting".into() });
    }
    let (version, length) = (u16::from_le_bytes(array(&prefix[8..10])), u16::from_le_bytes(array(&prefix[10..])));
    if version != PROTOCOL_VERSION {
        let detail = format!("ours is version {PROTOCOL_VERSION}, theirs {version}");
        return Err(No { reason: Refusal::Protocol, detail });
    }
    if usize::from(length) != BODY_BYTES {
        let detail =
            format!("both are version {version}, but its greeting has {length} bytes where ours has {BODY_BYTES}");
        return Err(No { reason: Refusal::Protocol, detail });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::token::Token;

    #[test]
    fn what_differs_between_protocols_is_said() {
        let identity = Identity::new(&Token::random(), Purpose::Data, Role::Dialler, Rank(0), 2);
        let bytes = Greeting::of(&identity, [9; 32]).encode();
        for (at, words) in [(8, "ours is version 2, theirs 3"), (10, "its greeting has 85 bytes where ours has 84")] {
            let mut prefix: [u8; PREFIX_BYTES] = array(&bytes[..PREFIX_BYTES]);
            prefix[at] ^= 1;
            let no = check_prefix(&prefix).unwrap_err();
            assert!(no.reason == Refusal::Protocol && no.detail.contains(words), "{no:?}");
        }
    }

    #[test]
    fn a_greeting_survives_the_wire() {
        let identity = Identity::new(&Token::random(), Purpose::Data, Role::Dialler, Rank(2), 5);
        let identity = Identity { lane: 3, run: RunId::random(), ..identity };
        let greeting = Greeting::of(&identity, [9; 32]);
        let bytes = greeting.encode();
        check_prefix(&array(&bytes[..PREFIX_BYTES])).unwrap();
        assert_eq!(Greeting::decode(&array(&bytes[PREFIX_BYTES..])).unwrap(), greeting);
        assert_eq!(greeting.version_text(), env!("CARGO_PKG_VERSION"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_greeting_or_refused(body in prop::array::uniform32(any::<u8>()), prefix in prop::array::uniform12(any::<u8>())) {
            let mut bytes = [0; BODY_BYTES];
            bytes[..32].copy_from_slice(&body);
            let _ = Greeting::decode(&bytes);
            prop_assert!(check_prefix(&prefix).is_err() || prefix[..8] == MAGIC);
        }
    }
}
