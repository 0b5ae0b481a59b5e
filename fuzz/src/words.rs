//! What people and launchers write: cluster files, lists of hosts and nodes, variables, tokens, configurations.

use paceline_cluster::Job;
use paceline_cluster::spec::{Address, ClusterFile, Hosts, Variables, from_environment, nodelist};
use paceline_comm::Token;
use paceline_train::Config;

/// No world is larger.
const WORLD_MAX: usize = 1 << 14;

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

/// A cluster file: every member that it names has a place.
pub fn cluster_file(bytes: &[u8]) {
    let Some(Ok(file)) = text(bytes).map(ClusterFile::parse) else { return };
    for job in [Job::Worker, Job::Server] {
        for task in [0, 1, usize::MAX] {
            if let Ok(member) = file.member(job, task) {
                assert!(member.rank.index() < member.world && member.world <= WORLD_MAX);
                assert_eq!((member.job(), member.task()), (job, task));
            }
        }
    }
}

/// `--hosts`, and an address.
pub fn hosts(bytes: &[u8]) {
    let Some(text) = text(bytes) else { return };
    if let Ok(address) = Address::parse(text) {
        assert_eq!(Address::parse(&address.to_string()).ok(), Some(address));
    }
    if let Ok(hosts) = Hosts::parse(text)
        && hosts.world() <= WORLD_MAX
    {
        assert_eq!(hosts.by_rank().len(), hosts.world());
        let _ = hosts.member(hosts.world() - 1, 29_400);
    }
}

/// Slurm's list of nodes.
pub fn nodelist(bytes: &[u8]) {
    if let Some(Ok(names)) = text(bytes).map(nodelist::expand) {
        assert!(!names.is_empty() && names.len() <= 1 << 16 && names.iter().all(|name| !name.is_empty()));
    }
}

/// A launcher's variables, one a line.
pub fn environment(bytes: &[u8]) {
    let Some(text) = text(bytes) else { return };
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let variables: Variables = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    if let Ok(Some(member)) = from_environment(&variables) {
        assert!(member.rank.index() < member.world && member.world <= WORLD_MAX);
    }
}

/// A token.
pub fn token(bytes: &[u8]) {
    let Some(text) = text(bytes) else { return };
    if let Some(token) = Token::from_hex(text) {
        assert_eq!(token.to_hex(), text.trim().to_lowercase());
    }
}

/// A configuration: one that can be used is the same after it was written.
pub fn config(bytes: &[u8]) {
    let Some(Ok(config)) = text(bytes).map(Config::from_toml) else { return };
    if config.check().is_ok() {
        assert_eq!(Config::from_toml(&config.to_toml()).expect("what was written is read"), config);
        let _ = config.check_world(3);
    }
}
