//! `mpirun`: OpenMPI's or MPICH's. The token is in mpirun's environment, from where both carry it to the processes.

use std::process::Command;

use crate::ClusterError;
use crate::error::refused;
use crate::spec::Hosts;
use crate::token;

/// Whose `mpirun` it is; they name their options differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// OpenMPI.
    OpenMpi,
    /// MPICH's hydra, and Intel MPI's.
    Hydra,
}

impl Flavour {
    /// Asks the `mpirun` that is installed.
    ///
    /// # Errors
    /// When there is none, or it is neither.
    pub fn find(mpirun: &str) -> Result<Self, ClusterError> {
        let output = Command::new(mpirun).arg("--version").output().map_err(|error| {
            ClusterError::Refused(format!(
                "{mpirun} does not run ({error}); install openmpi-bin or mpich, or use --hosts"
            ))
        })?;
        Self::of(&String::from_utf8_lossy(&output.stdout))
    }

    fn of(version: &str) -> Result<Self, ClusterError> {
        if version.contains("Open MPI") || version.contains("OpenRTE") || version.contains("PRTE") {
            Ok(Self::OpenMpi)
        } else if version.contains("HYDRA") || version.contains("Intel(R) MPI") {
            Ok(Self::Hydra)
        } else {
            refused(
                "this mpirun is neither OpenMPI's nor MPICH's; start the processes with it yourself: it sets what is needed",
            )
        }
    }
}

/// What to start with mpirun.
#[derive(Clone, Debug)]
pub struct Mpirun {
    /// How many processes, where no hosts are named.
    pub workers: usize,
    /// On which hosts; none for this machine, or for what a scheduler around gives.
    pub hosts: Option<Hosts>,
    /// The port that rank 0 listens on.
    pub port: u16,
    /// The program and its arguments.
    pub command: Vec<String>,
}

impl Mpirun {
    /// The arguments of mpirun.
    pub fn arguments(&self, flavour: Flavour) -> Vec<String> {
        let world = self.hosts.as_ref().map_or(self.workers, Hosts::world);
        let mut words = vec!["-n".to_owned(), world.to_string()];
        if let Some(hosts) = &self.hosts {
            let by_rank = hosts.by_rank();
            let mut names: Vec<(String, usize)> = Vec::new();
            for host in &by_rank {
                match names.last_mut().filter(|(name, _)| name == host) {
                    Some((_, count)) => *count += 1,
                    None => names.push((host.clone(), 1)),
                }
            }
            let list = names.iter().map(|(name, count)| format!("{name}:{count}")).collect::<Vec<_>>().join(",");
            words.extend([if flavour == Flavour::OpenMpi { "--host" } else { "-hosts" }.to_owned(), list]);
            words.extend(match flavour {
                Flavour::OpenMpi => vec!["-x".to_owned(), format!("MASTER_ADDR={}", by_rank[0])],
                Flavour::Hydra => ["-genv", "MASTER_ADDR", by_rank[0].as_str()].map(str::to_owned).to_vec(),
            });
            words.extend(match flavour {
                Flavour::OpenMpi => vec!["-x".to_owned(), format!("MASTER_PORT={}", self.port)],
                Flavour::Hydra => vec!["-genv".to_owned(), "MASTER_PORT".to_owned(), self.port.to_string()],
            });
        }
        // By name only: the value stays in the environment.
        words.extend(match flavour {
            Flavour::OpenMpi => ["-x", token::VARIABLE].map(str::to_owned),
            Flavour::Hydra => ["-genvlist", token::VARIABLE].map(str::to_owned),
        });
        words.extend(self.command.iter().cloned());
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_flavours_are_known_by_their_words() {
        assert_eq!(Flavour::of("mpirun (Open MPI) 4.1.4").unwrap(), Flavour::OpenMpi);
        assert_eq!(Flavour::of("HYDRA build details:\n    Version: 4.0.2").unwrap(), Flavour::Hydra);
        assert!(Flavour::of("prun 1.0").is_err());
    }

    #[test]
    fn the_token_is_named_and_not_shown() {
        let command = ["paceline", "train"].map(str::to_owned).to_vec();
        let mut mpirun = Mpirun { workers: 4, hosts: None, port: 29_400, command };
        assert_eq!(mpirun.arguments(Flavour::OpenMpi).join(" "), "-n 4 -x PACELINE_TOKEN paceline train");
        mpirun.hosts = Some(Hosts::parse("a:2,b").unwrap());
        assert_eq!(
            mpirun.arguments(Flavour::Hydra).join(" "),
            "-n 3 -hosts a:2,b:1 -genv MASTER_ADDR a -genv MASTER_PORT 29400 -genvlist PACELINE_TOKEN paceline train"
        );
    }
}
