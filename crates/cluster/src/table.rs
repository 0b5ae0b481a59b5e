//! Who is where: what every member says of itself at the rendezvous and learns of the others.

use std::net::{IpAddr, SocketAddr};

use paceline_comm::Rank;
use serde::{Deserialize, Serialize};

use crate::spec::Local;

/// What a member says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Where it listens for data, if it does.
    pub data: Option<SocketAddr>,
    /// Its host's name.
    pub host: String,
    /// The same for members on one machine, and only for them.
    pub node: String,
    /// Its process.
    pub pid: u32,
    /// Its version of Paceline.
    pub version: String,
}

impl Entry {
    /// Fills in the address that others see, where the member only knows that it listens on all of them.
    pub(crate) fn seen_from(&mut self, address: IpAddr) {
        if let Some(data) = self.data.as_mut().filter(|data| data.ip().is_unspecified()) {
            data.set_ip(address);
        }
    }

    /// Whether everything has a length that it can have.
    pub(crate) fn is_sound(&self) -> bool {
        self.host.len() <= 255 && self.node.len() <= 512 && self.version.len() <= 64
    }
}

/// All members, by rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    entries: Vec<Entry>,
    nodes: Vec<usize>,
}

impl Table {
    /// The table of these members.
    pub fn new(entries: Vec<Entry>) -> Self {
        let mut names: Vec<&str> = Vec::new();
        let nodes = entries
            .iter()
            .map(|entry| {
                names.iter().position(|name| *name == entry.node).unwrap_or_else(|| {
                    names.push(&entry.node);
                    names.len() - 1
                })
            })
            .collect();
        Self { entries, nodes }
    }

    /// How many members there are.
    pub fn world(&self) -> usize {
        self.entries.len()
    }

    /// What a member said.
    pub fn entry(&self, rank: Rank) -> &Entry {
        &self.entries[rank.index()]
    }

    /// All that was said, by rank.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The machine of each rank, numbered from 0 in the order in which ranks meet them.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// A rank's place on its machine.
    pub fn local(&self, rank: Rank) -> Local {
        let here = |other: &usize| self.nodes[*other] == self.nodes[rank.index()];
        Local { rank: (0..rank.index()).filter(here).count(), world: (0..self.world()).filter(here).count() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_numbered_as_ranks_meet_them() {
        let entry = |node: &str| Entry { data: None, host: "h".into(), node: node.into(), pid: 1, version: "0".into() };
        let table = Table::new(["x", "y", "x", "z", "y"].map(entry).to_vec());
        assert_eq!(table.nodes(), [0, 1, 0, 2, 1]);
        assert_eq!(table.local(Rank(4)), Local { rank: 1, world: 2 });
        assert_eq!(table.local(Rank(3)), Local { rank: 0, world: 1 });
    }

    #[test]
    fn an_open_address_becomes_the_one_that_others_see() {
        let data = Some("0.0.0.0:7000".parse().unwrap());
        let mut entry = Entry { data, host: "h".into(), node: "n".into(), pid: 1, version: "0".into() };
        entry.seen_from("10.0.0.7".parse().unwrap());
        entry.seen_from("10.0.0.8".parse().unwrap());
        assert_eq!(entry.data.unwrap().to_string(), "10.0.0.7:7000");
    }
}
