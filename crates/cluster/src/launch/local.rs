//! `--workers N`: processes on this machine, each on cores of its own, meeting on loopback.

use std::net::TcpListener;
use std::path::PathBuf;

use paceline_comm::Token;
use paceline_system::{entropy, process};

use super::child::PARENT;
use super::group::Start;
use crate::ClusterError;
use crate::error::refused;
use crate::token;

/// What to start here.
#[derive(Clone, Debug)]
pub struct Local {
    /// How many processes.
    pub workers: usize,
    /// How many of them, the last ones, hold parameters: they compute little, and have no cores of their own.
    pub servers: usize,
    /// The program; usually this one.
    pub program: PathBuf,
    /// Its arguments, the same for all.
    pub arguments: Vec<String>,
    /// Whether each gets cores of its own.
    pub pin: bool,
}

impl Local {
    /// The processes, with a port and a token of their own.
    ///
    /// # Errors
    /// When there are to be none, or no port is free.
    pub fn starts(&self) -> Result<Vec<Start>, ClusterError> {
        if self.workers == 0 || self.workers > crate::spec::WORLD_MAX {
            return refused(format!("--workers {} cannot be; type a number from 1", self.workers));
        }
        let (port, token) = (free_port()?, Token::random());
        let mut shares = Vec::new();
        if self.pin {
            shares = share(&process::cores(), self.workers.saturating_sub(self.servers).max(1));
        }
        shares.resize(self.workers, Vec::new());
        let start = |(rank, cores): (usize, Vec<usize>)| Start {
            rank,
            host: "this machine".into(),
            program: self.program.clone(),
            arguments: self.arguments.clone(),
            variables: self.variables(rank, port),
            token: token.clone(),
            cores,
            inherits: false,
            spare: false,
            signals: true,
        };
        Ok(shares.into_iter().enumerate().map(start).collect())
    }

    fn variables(&self, rank: usize, port: u16) -> Vec<(String, String)> {
        let (rank, world) = (rank.to_string(), self.workers.to_string());
        [
            ("RANK", rank.clone()),
            ("WORLD_SIZE", world.clone()),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", world),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", port.to_string()),
            (token::VARIABLE, "stdin".into()),
            (PARENT, std::process::id().to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }
}

/// The cores in equal parts that follow each other, so that neighbours share caches; the first parts get what is left over.
/// With more processes than cores nobody is pinned: the scheduler shares better than a table.
pub fn share(cores: &[usize], parts: usize) -> Vec<Vec<usize>> {
    if cores.len() < parts {
        return vec![Vec::new(); parts];
    }
    let (each, more) = (cores.len() / parts, cores.len() % parts);
    let mut rest = cores;
    (0..parts)
        .map(|part| {
            let (own, others) = rest.split_at(each + usize::from(part < more));
            rest = others;
            own.to_vec()
        })
        .collect()
}

/// A port that nobody listens on: drawn below the range from which Linux takes ports for outgoing connections, so that
/// nothing but another listener can take it before rank 0 does.
///
/// # Errors
/// When a hundred draws find none.
pub fn free_port() -> Result<u16, ClusterError> {
    for _ in 0..100 {
        let port = 20_000 + u16::from_le_bytes(entropy::bytes()) % 9_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(ClusterError::Failed("no port from 20000 to 29000 is free on this machine".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_shared_without_overlap() {
        assert_eq!(share(&[0, 1, 2, 3, 8], 2), [vec![0, 1, 2], vec![3, 8]]);
        assert_eq!(share(&[4, 5], 2), [[4], [5]]);
        assert_eq!(share(&[4, 5], 3), [[0usize; 0]; 3]);
    }

    #[test]
    fn the_token_is_in_no_argument_and_no_variable() {
        let local = Local { workers: 2, servers: 0, program: "p".into(), arguments: vec!["train".into()], pin: true };
        let starts = local.starts().unwrap();
        let token = starts[0].token.to_hex();
        assert_eq!(starts[1].token.to_hex(), token);
        assert!(!format!("{starts:?}").contains(&token));
        assert!(Local { workers: 0, ..local }.starts().is_err());
    }
}
