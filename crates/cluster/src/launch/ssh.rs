//! `--hosts a,b:2,c`: processes on other machines over ssh, with the token on their standard input.
//!
//! Each host has the program at the same path and the folder of the run's data and results mounted or copied; ssh must
//! work without a password (`ssh HOST true`).

use std::path::PathBuf;

use paceline_comm::Token;

use super::group::Start;
use super::line;
use crate::ClusterError;
use crate::spec::Hosts;
use crate::token;

/// What to start on which hosts.
#[derive(Clone, Debug)]
pub struct Ssh {
    /// The hosts, with how many processes each.
    pub hosts: Hosts,
    /// The port that rank 0 listens on.
    pub port: u16,
    /// The program on the hosts.
    pub program: PathBuf,
    /// Its arguments, the same for all.
    pub arguments: Vec<String>,
    /// The folder to work in on the hosts.
    pub folder: PathBuf,
    /// The ssh client and options for it, such as `ssh -p 2222`.
    pub ssh: Vec<String>,
}

impl Ssh {
    /// The ssh processes.
    ///
    /// # Errors
    /// When the hosts are too many.
    pub fn starts(&self) -> Result<Vec<Start>, ClusterError> {
        let token = Token::random();
        let hosts = self.hosts.by_rank();
        let start = |(rank, host): (usize, &String)| {
            let member = self.hosts.member(rank, self.port)?;
            let local = member.local.unwrap_or(crate::Local { rank: 0, world: 1 });
            let variables = [
                format!("RANK={rank}"),
                format!("WORLD_SIZE={}", member.world),
                format!("LOCAL_RANK={}", local.rank),
                format!("LOCAL_WORLD_SIZE={}", local.world),
                format!("MASTER_ADDR={}", member.rendezvous.host),
                format!("MASTER_PORT={}", member.rendezvous.port),
                format!("{}=stdin", token::VARIABLE),
            ];
            let program = vec![self.program.display().to_string()];
            let words = ["exec".into(), "env".into()].into_iter().chain(variables).chain(program);
            let words: Vec<String> = words.chain(self.arguments.iter().cloned()).collect();
            let folder = line(&["cd".into(), self.folder.display().to_string()]);
            let (ssh, options) = self.ssh.split_first().map_or(("ssh", &[][..]), |(ssh, rest)| (ssh.as_str(), rest));
            // -T: no terminal; BatchMode: a question nobody answers is a failure, not a wait.
            let fixed = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"];
            let arguments = options.iter().cloned().chain(fixed.map(str::to_owned));
            let target = ["--".to_owned(), host.clone(), format!("{folder} && {}", line(&words))];
            Ok(Start {
                rank,
                host: host.clone(),
                program: ssh.into(),
                arguments: arguments.chain(target).collect(),
                variables: Vec::new(),
                token: token.clone(),
                cores: Vec::new(),
                inherits: false,
                spare: false,
                signals: false,
            })
        };
        hosts.iter().enumerate().map(start).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_told_everything_but_the_token() {
        let ssh = Ssh {
            hosts: Hosts::parse("a,b:2").unwrap(),
            port: 29_400,
            program: "/opt/paceline".into(),
            arguments: vec!["train".into(), "--data".into(), "folder:my photos".into()],
            folder: "/work/it's here".into(),
            ssh: vec!["ssh".into(), "-p".into(), "2222".into()],
        };
        let starts = ssh.starts().unwrap();
        let last = starts[2].arguments.join(" ");
        assert!(last.starts_with("-p 2222 -T -o BatchMode=yes"), "{last}");
        assert!(last.contains("-- b cd '/work/it'\\''s here' && exec env RANK=2 WORLD_SIZE=3 LOCAL_RANK=1"), "{last}");
        assert!(last.contains("MASTER_ADDR=a MASTER_PORT=29400 PACELINE_TOKEN=stdin /opt/paceline train"), "{last}");
        assert!(last.ends_with("--data 'folder:my photos'"), "{last}");
        assert!(!format!("{starts:?}").contains(&starts[0].token.to_hex()));
    }
}
