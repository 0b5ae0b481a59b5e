//! What can go wrong between ranks. Every variant says who noticed, with whom, and while doing what.

use std::fmt;
use std::time::Duration;

use crate::rank::Rank;

/// The other side of a conversation, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Party {
    /// A rank that has proven who it is, or that we were waiting for.
    Rank(Rank),
    /// Somebody at an address who has not said who they are.
    Address(String),
    /// No one in particular: whoever comes next.
    Anyone,
}

impl From<Rank> for Party {
    fn from(rank: Rank) -> Self {
        Self::Rank(rank)
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank(rank) => rank.fmt(f),
            Self::Address(address) => f.write_str(address),
            Self::Anyone => f.write_str("any rank"),
        }
    }
}

/// Why a greeting was refused. The numbers are what travels to the refused side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Refusal {
    /// What came first is not a greeting of Paceline.
    NotPaceline = 1,
    /// Another version of the protocol.
    Protocol = 2,
    /// Another version of Paceline.
    Version = 3,
    /// The token is not this run's.
    Token = 4,
    /// Another size of the world.
    World = 5,
    /// Another incarnation of the world.
    Generation = 6,
    /// The connection is for something else than what is served here.
    Purpose = 7,
    /// A rank that is our own, outside the world, not the one expected here, or here already.
    Rank = 8,
    /// One side encrypts and the other does not, or they do so by other keys.
    Secrecy = 9,
    /// Another run, with the same token.
    Run = 10,
    /// Both sides listened, or both dialled: somebody stands between them.
    Role = 11,
}

impl Refusal {
    /// The reason with this number, if there is one.
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::NotPaceline,
            2 => Self::Protocol,
            3 => Self::Version,
            4 => Self::Token,
            5 => Self::World,
            6 => Self::Generation,
            7 => Self::Purpose,
            8 => Self::Rank,
            9 => Self::Secrecy,
            10 => Self::Run,
            11 => Self::Role,
            _ => return None,
        })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotPaceline => "not a Paceline peer",
            Self::Protocol => "the two speak different protocols: install the same Paceline everywhere",
            Self::Version => "Paceline versions differ: install the same one everywhere",
            Self::Token => "wrong token: start all ranks with the token of this run",
            Self::World => "the number of ranks differs: start all with the same one",
            Self::Generation => "it belongs to another generation of this run",
            Self::Purpose => "the connection is for another purpose",
            Self::Rank => "its rank is our own, out of range, unexpected or already taken",
            Self::Secrecy => "the two do not encrypt alike: start all ranks with the same --tls and token",
            Self::Run => "it belongs to another run",
            Self::Role => "both sides were dialled, so somebody relays between them",
        })
    }
}

/// A failure between ranks.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// We refused the other side's greeting.
    #[error("{rank} refused {peer}: {reason} ({detail})")]
    Refused {
        /// Who refused.
        rank: Rank,
        /// The side whose greeting it was.
        peer: Party,
        /// What was wrong with it.
        reason: Refusal,
        /// Both sides' values.
        detail: String,
    },
    /// The other side refused our greeting.
    #[error("{rank} was refused by {peer}: {reason}")]
    RefusedBy {
        /// Who was refused.
        rank: Rank,
        /// The side that refused.
        peer: Party,
        /// Why, in its words.
        reason: Refusal,
    },
    /// Nothing came in time.
    #[error("{rank} waited {waited_ms} ms for {peer} in {phase}: deadline passed", waited_ms = waited.as_millis())]
    DeadlinePassed {
        /// Who waited.
        rank: Rank,
        /// The side that was waited for.
        peer: Party,
        /// While doing what.
        phase: &'static str,
        /// For how long.
        waited: Duration,
    },
    /// The other side's process ended or its connection broke.
    #[error("{rank} lost {peer} in {phase}: {reason}")]
    PeerGone {
        /// Who noticed.
        rank: Rank,
        /// Who is gone.
        peer: Party,
        /// While doing what.
        phase: &'static str,
        /// What the connection said.
        reason: String,
    },
    /// Somebody in this process asked for the end of all waits.
    #[error("{rank} was stopped in {phase}: {reason}")]
    Stopped {
        /// Who was stopped.
        rank: Rank,
        /// While doing what.
        phase: &'static str,
        /// What the stop was set with.
        reason: String,
    },
    /// The other side sent what the protocol does not allow at this point.
    #[error("{rank} got a message from {peer} in {phase} that breaks the protocol: {what}")]
    Protocol {
        /// Who noticed.
        rank: Rank,
        /// Whose message it was.
        peer: Party,
        /// While doing what.
        phase: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// The operating system refused something that concerns no peer.
    #[error("{rank} cannot {what}: {source}")]
    System {
        /// Whom it happened to.
        rank: Rank,
        /// What was tried.
        what: &'static str,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A library that moves bytes by itself has failed.
    #[error("{rank} failed in {phase}: {what}")]
    Failed {
        /// Whom it happened to.
        rank: Rank,
        /// While doing what.
        phase: &'static str,
        /// What the library said.
        what: String,
    },
    /// The communicator failed before and cannot be used again: messages may be lost in the middle.
    #[error("{rank} cannot go on with {phase}: an earlier message failed")]
    Broken {
        /// Whose communicator.
        rank: Rank,
        /// What was asked of it.
        phase: &'static str,
    },
}

impl CommError {
    /// The rank at fault, where one is known.
    pub fn peer(&self) -> Option<Rank> {
        match self {
            Self::Refused { peer, .. }
            | Self::RefusedBy { peer, .. }
            | Self::DeadlinePassed { peer, .. }
            | Self::PeerGone { peer, .. }
            | Self::Protocol { peer, .. } => match peer {
                Party::Rank(rank) => Some(*rank),
                Party::Address(_) | Party::Anyone => None,
            },
            Self::Stopped { .. } | Self::System { .. } | Self::Failed { .. } | Self::Broken { .. } => None,
        }
    }

    /// The same with ranks by their numbers in the world, given those of a group's ranks in their order.
    pub(crate) fn renumbered(mut self, members: &[Rank]) -> Self {
        let number = |rank: &mut Rank| *rank = members.get(rank.index()).copied().unwrap_or(*rank);
        match &mut self {
            Self::Refused { rank, peer, .. }
            | Self::RefusedBy { rank, peer, .. }
            | Self::DeadlinePassed { rank, peer, .. }
            | Self::PeerGone { rank, peer, .. }
            | Self::Protocol { rank, peer, .. } => {
                number(rank);
                if let Party::Rank(peer) = peer {
                    number(peer);
                }
            }
            Self::Stopped { rank, .. }
            | Self::System { rank, .. }
            | Self::Failed { rank, .. }
            | Self::Broken { rank, .. } => number(rank),
        }
        self
    }

    /// Whether the input was at fault (a wrong token, version or table) and not the world.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::RefusedBy { .. })
    }
}
