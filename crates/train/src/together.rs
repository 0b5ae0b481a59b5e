//! How a run answers the questions of more than one process: how replicas agree, how their bytes travel, how they are squeezed.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An answer to one of the questions, by the word that names it.
macro_rules! answer {
    ($name:ident, $recipe:path, $module:path, $doc:literal) => {
        #[doc = $doc]
        #[derive(Clone, Copy, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(&'static dyn $recipe);

        impl $name {
            /// The word in files and flags.
            pub fn name(self) -> &'static str {
                self.0.name()
            }

            /// What it is.
            pub fn recipe(self) -> &'static dyn $recipe {
                self.0
            }

            /// All of them, each with a few words.
            pub fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
                use $module as answers;
                answers::ALL.iter().map(|answer| (answer.name(), answer.about()))
            }
        }

        impl Default for $name {
            fn default() -> Self {
                use $module as answers;
                Self(answers::ALL[0])
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.name() == other.name()
            }
        }

        impl Eq for $name {}

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                use $module as answers;
                let names: Vec<&str> = answers::ALL.iter().map(|answer| answer.name()).collect();
                answers::find(text).map(Self).ok_or_else(|| format!("type {}", names.join(" or ")))
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(answer: $name) -> Self {
                answer.name().to_owned()
            }
        }
    };
}

answer!(Agree, paceline_parallel::agree::Recipe, paceline_parallel::agree, "How replicas agree on the weights.");
answer!(Squeeze, paceline_parallel::squeeze::Squeeze, paceline_parallel::squeeze, "How messages are squeezed.");

/// When gradients travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overlap {
    /// As they become final, while the backward pass goes on; what comes late is applied in the next forward pass.
    #[default]
    On,
    /// All after the backward pass, and the next step waits for them: to compare with.
    Off,
}

impl FromStr for Overlap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err("type on or off".into()),
        }
    }
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
