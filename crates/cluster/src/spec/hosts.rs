//! `--hosts a,b:2,c`: one process on each host, or as many as stand behind the colon. The first host has rank 0.

use super::{Address, Local, Member, Source, place};
use crate::ClusterError;
use crate::error::refused;

/// The hosts of a run with how many processes each has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts(Vec<(String, usize)>);

impl Hosts {
    /// Reads `a,b:2,c`.
    ///
    /// # Errors
    /// When a name cannot be a host's, a count is not one, or a host is named twice.
    pub fn parse(text: &str) -> Result<Self, ClusterError> {
        let mut hosts: Vec<(String, usize)> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (name, count) = part.split_once(':').unwrap_or((part, "1"));
            if !Address::is_host(name) {
                return refused(format!("--hosts: `{part}` is not a host; type names with commas: --hosts a,b,c"));
            }
            let Some(count) = count.parse().ok().filter(|count| (1..=super::WORLD_MAX).contains(count)) else {
                return refused(format!("--hosts: `{part}` should be a host, or HOST:PROCESSES such as {name}:2"));
            };
            if hosts.iter().any(|(other, _)| other == name) {
                return refused(format!("--hosts names {name} twice; for two processes there, type {name}:2"));
            }
            hosts.push((name.to_owned(), count));
        }
        Ok(Self(hosts))
    }

    /// How many processes there are in all.
    pub fn world(&self) -> usize {
        self.0.iter().map(|(_, count)| count).sum()
    }

    /// The host of each rank.
    pub fn by_rank(&self) -> Vec<String> {
        self.0.iter().flat_map(|(name, count)| vec![name.clone(); *count]).collect()
    }

    /// The member with this rank; rank 0 listens on `port` of the first host.
    ///
    /// # Errors
    /// When there are not that many.
    pub fn member(&self, rank: usize, port: u16) -> Result<Member, ClusterError> {
        let (rank, world) = place(rank, self.world(), "--hosts")?;
        let mut first = 0;
        let local = self.0.iter().find_map(|(_, count)| {
            let inside = (first..first + count).contains(&rank.index());
            let local = Local { rank: rank.index().wrapping_sub(first), world: *count };
            first += count;
            inside.then_some(local)
        });
        Ok(Member {
            rank,
            world,
            servers: 0,
            local,
            hosts: self.by_rank(),
            rendezvous: Address { host: self.0[0].0.clone(), port },
            data: None,
            source: Source::Hosts,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_the_list() {
        let hosts = Hosts::parse("a, b:2,c").unwrap();
        assert_eq!(hosts.by_rank(), ["a", "b", "b", "c"]);
        let member = hosts.member(2, 29_400).unwrap();
        assert_eq!(member.local, Some(Local { rank: 1, world: 2 }));
        assert_eq!(member.rendezvous.to_string(), "a:29400");
        assert_eq!(hosts.member(3, 1).unwrap().local, Some(Local { rank: 0, world: 1 }));
        assert!(hosts.member(4, 1).unwrap_err().to_string().contains("the last is rank 3"));
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for text in ["", "a,,b", "-oProxyCommand=x", "a b", "a:0", "a:x", "a,a", "$(reboot)"] {
            assert!(Hosts::parse(text).is_err(), "{text}");
        }
    }
}
