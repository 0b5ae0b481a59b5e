//! How a run answers the questions of more than one process: how replicas agree, how their bytes travel, how
//! they are squeezed.

mod slow;
mod split;

use std::fmt;
use std::str::FromStr;

use paceline_comm::transport;
use serde::{Deserialize, Serialize};

pub use slow::Slow;
pub use split::{PartSplit, Split};

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

/// A line of help: what a flag decides, and its answers.
pub fn help<'a>(what: &str, answers: impl Iterator<Item = &'a str>) -> String {
    format!("{what}: {}", answers.collect::<Vec<_>>().join(" | "))
}

/// The order in which a pipeline computes, by its name in files.
pub(crate) mod pipeline_schedule {
    use paceline_parallel::split::Kind;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(kind: &Kind, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(kind.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Kind, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// When gradients travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overlap {
    /// As they become final, while the backward pass goes on; what comes late is applied in the next forward
    /// pass.
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

/// How many samples of a batch each worker has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Balance {
    /// As many as the others, but for one.
    #[default]
    Even,
    /// As many as it computes while the others compute theirs.
    Speed,
}

impl FromStr for Balance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "even" => Ok(Self::Even),
            "speed" => Ok(Self::Speed),
            _ => Err("type even or speed".into()),
        }
    }
}

/// What is divided among workers instead of being there on each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharding {
    /// Nothing.
    #[default]
    None,
    /// The optimizer's state, and its steps.
    Optimizer,
}

impl FromStr for Sharding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "optimizer" => Ok(Self::Optimizer),
            _ => Err("type optimizer or none".into()),
        }
    }
}

/// How bytes travel: a transport's name, or a word for a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub struct Carry(&'static str);

impl<'de> Deserialize<'de> for Carry {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Carry {
    /// NCCL between GPUs; otherwise shared memory where all ranks are on one machine, else sockets.
    pub const AUTO: Self = Self("auto");
    /// All ranks are threads of one process, and share memory.
    pub const THREAD: Self = Self("thread");
    /// Shared memory.
    pub const SHM: Self = Self("shm");
    /// Sockets.
    pub const TCP: Self = Self("tcp");
    /// The MPI library that the binary was built with.
    pub const MPI: Self = Self("mpi");
    /// Between GPUs, by NCCL.
    pub const NCCL: Self = Self("nccl");

    /// Every word, in the order of the help.
    pub fn all() -> impl Iterator<Item = &'static str> {
        [Self::AUTO.0, Self::THREAD.0]
            .into_iter()
            .chain(transport::BETWEEN_PROCESSES.iter().copied())
            .chain([Self::NCCL.0])
    }

    /// The word in files and flags.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl Default for Carry {
    fn default() -> Self {
        Self::AUTO
    }
}

impl FromStr for Carry {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<&str> = Self::all().collect();
        Self::all().find(|name| *name == text).map(Self).ok_or_else(|| format!("type {}", names.join(" or ")))
    }
}

impl From<Carry> for String {
    fn from(carry: Carry) -> Self {
        carry.0.to_owned()
    }
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
