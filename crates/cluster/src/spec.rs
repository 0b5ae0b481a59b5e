//! Which member of a run this process is: from a cluster file, from `--hosts`, or from what a launcher put into the
//! environment. Pure: the environment comes as a map (`system::host::variables`). Input that contradicts itself or is
//! half there is refused with a sentence that says what to set; nothing is guessed.

mod address;
mod environment;
mod file;
mod hosts;
pub mod nodelist;

use std::collections::BTreeMap;
use std::fmt;

use paceline_comm::Rank;

pub use address::Address;
pub use environment::from_environment;
pub use file::ClusterFile;
pub use hosts::Hosts;

use crate::ClusterError;
use crate::error::refused;

/// The environment of a process, by name.
pub type Variables = BTreeMap<String, String>;

/// The port that rank 0 listens on where nothing says otherwise.
pub const PORT: u16 = 29_400;

/// The largest world: the node table of a rendezvous stays a few megabytes.
pub const WORLD_MAX: usize = 1 << 14;

/// What a process does in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Job {
    /// Computes gradients.
    Worker,
    /// Holds parameters.
    #[serde(rename = "ps")]
    Server,
}

impl Job {
    /// The name in a cluster file and behind `--job`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Server => "ps",
        }
    }
}

impl std::str::FromStr for Job {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "worker" => Ok(Self::Worker),
            "ps" => Ok(Self::Server),
            _ => Err("type worker or ps".into()),
        }
    }
}

/// A process's number among those on its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// From 0.
    pub rank: usize,
    /// How many there are on the machine.
    pub world: usize,
}

/// One process of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its number. Workers come first, servers behind them.
    pub rank: Rank,
    /// How many processes there are.
    pub world: usize,
    /// How many of them are servers: the last ranks.
    pub servers: usize,
    /// Its place on its machine, where the source tells; the rendezvous finds out in any case.
    pub local: Option<Local>,
    /// The host of each rank, where the source tells; empty otherwise.
    pub hosts: Vec<String>,
    /// Where rank 0 listens for the others.
    pub rendezvous: Address,
    /// Where this process listens for data, if the source says so.
    pub data: Option<Address>,
    /// Who said all this.
    pub source: Source,
}

impl Member {
    /// What this process does.
    pub fn job(&self) -> Job {
        if self.rank.index() < self.workers() { Job::Worker } else { Job::Server }
    }

    /// Its number among those that do the same.
    pub fn task(&self) -> usize {
        let rank = self.rank.index();
        rank.checked_sub(self.workers()).unwrap_or(rank)
    }

    /// How many processes compute gradients.
    pub fn workers(&self) -> usize {
        self.world - self.servers
    }

    /// The same run, in which the last `servers` ranks hold parameters.
    ///
    /// # Errors
    /// When no worker would be left, or a cluster file has said otherwise.
    pub fn with_servers(self, servers: usize) -> Result<Self, ClusterError> {
        let world = self.world;
        if self.source == Source::File && servers != self.servers {
            return refused(format!(
                "the cluster file has {} servers and --servers says {servers}; leave --servers away",
                self.servers
            ));
        }
        if servers >= world {
            return refused(format!(
                "{servers} servers among {world} processes leave no worker; start {} processes or more",
                servers + 1
            ));
        }
        Ok(Self { servers, ..self })
    }

    /// Whether members are known to be on different machines, so that rank 0 has to listen on more than loopback.
    pub fn spans_machines(&self) -> bool {
        let apart = self.hosts.iter().any(|host| *host != self.hosts[0]);
        apart || self.local.is_some_and(|local| local.world < self.world) || !self.rendezvous.is_loopback()
    }
}

/// Where the description of a run came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `--cluster FILE`.
    File,
    /// `--hosts`.
    Hosts,
    /// `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`.
    Variables,
    /// OpenMPI's `mpirun`.
    OpenMpi,
    /// MPICH's `mpirun`, or another that speaks PMI.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
    /// The process whose threads all ranks are.
    Threads,
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::File => "--cluster",
            Self::Hosts => "--hosts",
            Self::Variables => "RANK and WORLD_SIZE",
            Self::OpenMpi => "OpenMPI",
            Self::Pmi => "PMI",
            Self::Slurm => "Slurm",
            Self::Threads => "--carry thread",
        })
    }
}

/// Checks a rank against its world.
fn place(rank: usize, world: usize, said: &str) -> Result<(Rank, usize), ClusterError> {
    if world == 0 || world > WORLD_MAX {
        return refused(format!("{said}: a run has 1 to {WORLD_MAX} processes, not {world}"));
    }
    if rank >= world {
        return refused(format!(
            "{said}: of {world} processes the last is rank {}, so rank {rank} cannot be",
            world - 1
        ));
    }
    Ok((Rank::at(rank), world))
}
