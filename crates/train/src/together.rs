//! How a run answers the questions of more than one process: how replicas agree, and how their bytes travel.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How replicas agree on the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Agree {
    /// Every rank gets the sum of all gradients and makes the same step.
    #[default]
    AllReduce,
    /// Workers push gradients to servers, which make the steps.
    ParameterServer,
}

/// How bytes travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carry {
    /// NCCL between GPUs; otherwise shared memory where all ranks are on one machine, else sockets.
    #[default]
    Auto,
    /// Shared memory.
    Shm,
    /// Sockets.
    Tcp,
    /// The MPI library that the binary was built with.
    Mpi,
    /// Between GPUs, by NCCL.
    Nccl,
}

/// Steps that a worker of a parameter server may be ahead of the slowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Staleness(pub Option<u64>);

impl Default for Staleness {
    /// Synchronous.
    fn default() -> Self {
        Self(Some(0))
    }
}

impl fmt::Display for Staleness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(steps) => write!(f, "{steps}"),
            None => f.write_str("none"),
        }
    }
}

impl FromStr for Staleness {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            _ => text
                .parse()
                .map(|steps| Self(Some(steps)))
                .map_err(|_| "type a number of steps, 0 for synchronous steps, or none for no bound".to_owned()),
        }
    }
}

impl TryFrom<String> for Staleness {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Staleness> for String {
    fn from(staleness: Staleness) -> Self {
        staleness.to_string()
    }
}

impl Agree {
    /// The word in files and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ParameterServer => "parameter-server",
        }
    }
}

impl FromStr for Agree {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::AllReduce, Self::ParameterServer];
        all.into_iter().find(|agree| agree.name() == text).ok_or_else(|| "type all-reduce or parameter-server".into())
    }
}

impl Carry {
    /// The word in files and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
        }
    }
}

impl FromStr for Carry {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Auto, Self::Shm, Self::Tcp, Self::Mpi, Self::Nccl];
        all.into_iter().find(|carry| carry.name() == text).ok_or_else(|| "type auto, shm, tcp, mpi or nccl".into())
    }
}
