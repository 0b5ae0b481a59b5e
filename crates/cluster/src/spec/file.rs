//! The cluster file: `{"worker": ["host:port", …], "ps": ["host:port", …]}`, the same for every process, which says
//! with `--job` and `--task` which line it is.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::{Address, Job, Local, Member, Source, place};
use crate::ClusterError;
use crate::error::refused;

/// A cluster file as read and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterFile {
    workers: Vec<Address>,
    servers: Vec<Address>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    worker: Vec<String>,
    #[serde(default)]
    ps: Vec<String>,
}

impl ClusterFile {
    /// Reads the JSON form.
    ///
    /// # Errors
    /// When it is not JSON of that form, has no worker, or names an address twice.
    pub fn parse(text: &str) -> Result<Self, ClusterError> {
        let written: Written = serde_json::from_str(text).map_err(|error| {
            ClusterError::Refused(format!(
                "the cluster file is not {{\"worker\": [\"host:port\", …], \"ps\": [\"host:port\", …]}}: {error}"
            ))
        })?;
        let read = |list: &[String]| list.iter().map(|text| Address::parse(text)).collect::<Result<Vec<_>, _>>();
        let file = Self { workers: read(&written.worker)?, servers: read(&written.ps)? };
        if file.workers.is_empty() {
            return refused("the cluster file names no worker; add \"worker\": [\"host:port\"]");
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = file.all().find(|address| !seen.insert(*address)) {
            return refused(format!("the cluster file names {twice} twice; give each process its own port"));
        }
        Ok(file)
    }

    fn all(&self) -> impl Iterator<Item = &Address> {
        self.workers.iter().chain(&self.servers)
    }

    /// The member that does `job` with number `task`. Rank 0 is worker 0 and listens for the others at its address;
    /// the others listen for data at theirs.
    ///
    /// # Errors
    /// When the file has no such task.
    pub fn member(&self, job: Job, task: usize) -> Result<Member, ClusterError> {
        let (list, before) = match job {
            Job::Worker => (&self.workers, 0),
            Job::Server => (&self.servers, self.workers.len()),
        };
        let name = job.name();
        let Some(own) = list.get(task) else {
            return refused(match list.len() {
                0 => format!("the cluster file has no \"{name}\"; type --job worker, or add it"),
                count => format!("the cluster file has {count} of \"{name}\"; type --task with 0 to {}", count - 1),
            });
        };
        let (rank, world) = place(before + task, self.all().count(), "the cluster file")?;
        let hosts: Vec<String> = self.all().map(|address| address.host.clone()).collect();
        let here = |rank: &usize| hosts[*rank] == own.host;
        let local = Local { rank: (0..rank.index()).filter(here).count(), world: (0..world).filter(here).count() };
        Ok(Member {
            rank,
            world,
            servers: self.servers.len(),
            local: Some(local),
            rendezvous: self.workers[0].clone(),
            data: (rank.index() > 0).then(|| own.clone()),
            hosts,
            source: Source::File,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"worker": ["a:2222", "b:2222", "b:2223"], "ps": ["a:2224", "c:2222"]}"#;

    #[test]
    fn workers_come_first_and_hosts_are_counted() {
        let file = ClusterFile::parse(FILE).unwrap();
        let member = file.member(Job::Worker, 2).unwrap();
        assert_eq!((member.rank.index(), member.world, member.workers()), (2, 5, 3));
        assert_eq!(member.local, Some(Local { rank: 1, world: 2 }));
        assert_eq!((member.job(), member.task()), (Job::Worker, 2));
        assert_eq!(member.rendezvous.to_string(), "a:2222");
        assert_eq!(member.data.unwrap().to_string(), "b:2223");
        let server = file.member(Job::Server, 0).unwrap();
        assert_eq!((server.rank.index(), server.job(), server.task()), (3, Job::Server, 0));
        assert_eq!(server.local, Some(Local { rank: 1, world: 2 }));
        assert!(server.spans_machines());
        let first = file.member(Job::Worker, 0).unwrap();
        assert_eq!((first.rank.index(), first.data), (0, None));
    }

    #[test]
    fn what_cannot_work_is_refused_with_what_to_type() {
        let refusal = |text: &str| ClusterFile::parse(text).unwrap_err().to_string();
        assert!(refusal("{}").contains("missing field `worker`"));
        assert!(refusal("[1").contains("is not {"));
        assert!(refusal(r#"{"worker": []}"#).contains("add \"worker\""));
        assert!(refusal(r#"{"worker": ["a"]}"#).contains("write HOST:PORT"));
        assert!(refusal(r#"{"worker": ["a:1"], "chief": ["b:1"]}"#).contains("unknown field `chief`"));
        assert!(refusal(r#"{"worker": ["a:1"], "ps": ["a:1"]}"#).contains("names a:1 twice"));
        let file = ClusterFile::parse(r#"{"worker": ["a:1", "b:1"]}"#).unwrap();
        assert!(file.member(Job::Worker, 2).unwrap_err().to_string().contains("--task with 0 to 1"));
        assert!(file.member(Job::Server, 0).unwrap_err().to_string().contains("has no \"ps\""));
        assert!(file.member(Job::Worker, 0).unwrap().with_servers(1).is_err());
    }
}
