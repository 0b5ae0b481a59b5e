//! The links: inside this machine (loopback and shared memory, between two threads of this process), or between ranks that
//! a launcher started, for every pair, both ways, over 1, 2, 4 and 8 sockets.

use std::net::{IpAddr, SocketAddr};

use crate::cluster::Control;
use crate::comm::probe::{self, Effort};
use crate::comm::transport::{Membership, Transport, shm, tcp};
use crate::comm::{CommError, Communicator, Generation, Link, Links, Nodes, Options, Rank, RunId, Stop, Token, Wait};
use crate::system::threads;
use serde_json::{Value, json};

use crate::command::team::guess;
use crate::failure::Failure;
use crate::train::deadlines::Deadlines;

/// Numbers of sockets that are tried.
pub const SOCKETS: [u16; 4] = [1, 2, 4, 8];

/// More ranks measure only the link of each to the next: pairs grow with the square.
const ALL_PAIRS_MAX: usize = 8;

/// The longest description of a machine.
const DESCRIPTION_BYTES_MAX: u64 = 1 << 16;

/// One direction of a link.
#[derive(Debug, Default)]
pub struct Row {
    /// From whom to whom.
    pub name: String,
    /// How bytes travelled.
    pub carry: &'static str,
    /// Half of the fastest answer to a short message.
    pub latency_s: f64,
    /// By number of sockets.
    pub bytes_per_s: Vec<(u16, f64)>,
}

/// What was measured.
#[derive(Debug)]
pub struct Found {
    /// Every link.
    pub rows: Vec<Row>,
    /// By what algorithms are chosen: the slowest inside and the slowest between machines.
    pub links: Links,
}

impl Row {
    /// For scripts.
    pub fn to_json(&self) -> Value {
        let speeds: serde_json::Map<String, Value> =
            self.bytes_per_s.iter().map(|(sockets, speed)| (sockets.to_string(), json!(speed))).collect();
        json!({"link": self.name, "carry": self.carry, "latency_s": self.latency_s, "bytes_per_s": speeds})
    }

    fn note(&mut self, sockets: u16, link: Link) {
        self.latency_s = if self.bytes_per_s.is_empty() { link.latency_s } else { self.latency_s.min(link.latency_s) };
        self.bytes_per_s.push((sockets, 1.0 / link.seconds_per_byte));
    }

    fn best(&self) -> Link {
        Link::new(self.latency_s, self.bytes_per_s.iter().map(|(_, speed)| *speed).fold(0.0, f64::max))
    }
}

/// All links, for people.
pub fn lines(rows: &[Row]) -> String {
    let head: String = SOCKETS.iter().map(|sockets| format!("{sockets:>9}")).collect();
    let mut text = format!("links     {:<24}{:>12}   MB/s by sockets:{head}\n", "", "latency");
    for row in rows {
        let speeds: String = row.bytes_per_s.iter().map(|(_, speed)| format!("{:>9.1}", speed / 1e6)).collect();
        let latency = format!("{:.1} µs", row.latency_s * 1e6);
        text += &format!("          {:<24}{latency:>12}                   {speeds}\n", row.name);
    }
    text
}

/// Loopback and shared memory.
pub fn inside() -> Result<Found, Failure> {
    let mut loopback = Row { name: "loopback".into(), carry: "tcp", ..Row::default() };
    for sockets in SOCKETS {
        loopback.note(sockets, two_threads(Some(sockets))?);
    }
    let mut memory = Row { name: "shared memory".into(), carry: "shm", ..Row::default() };
    memory.note(1, two_threads(None)?);
    let links = Links::uniform(2, memory.best());
    Ok(Found { rows: vec![loopback, memory], links })
}

/// The link between two threads of this process, over so many sockets, or through shared memory.
fn two_threads(sockets: Option<u16>) -> Result<Link, Failure> {
    let (token, run, stop) = (Token::random(), RunId::random(), Stop::new());
    let listeners = [tcp::Listener::bind(Rank(0), None)?, tcp::Listener::bind(Rank(1), None)?];
    let addresses = listeners.each_ref().map(tcp::Listener::address);
    let mut ends = listeners.into_iter().zip([Rank(0), Rank(1)]).map(|(listener, rank)| {
        let membership = Membership { token: token.clone(), run, rank, world: 2, generation: Generation::default() };
        let stop = stop.clone();
        move || -> Result<Link, CommError> {
            let wait = Wait::new(Deadlines::default().connect, &stop);
            let transport = match sockets {
                Some(sockets) => {
                    let config = tcp::Config { sockets, ..tcp::Config::default() };
                    Transport::Tcp(tcp::connect(listener, &addresses, &membership, config, &wait)?)
                }
                None => Transport::Shm(shm::connect(&membership, &wait)?),
            };
            let options = Options { timeout: Deadlines::default().message, stop, choice: guess(Nodes::one(2)) };
            probe::link(&mut Communicator::new(transport, options), Rank(0), Rank(1), Effort::THOROUGH)
        }
    });
    let (near, far) = (ends.next().expect("two ends"), ends.next().expect("two ends"));
    let far = threads::spawn("far-end", far).map_err(Failure::failed)?;
    let found = near();
    far.join().map_err(|_| Failure::failed("the far end panicked"))??;
    Ok(found?)
}

/// Ranks that a launcher started, joined by sockets.
pub struct Mesh<'a> {
    control: &'a Control,
    membership: Membership,
    /// Where this rank can be reached.
    interface: IpAddr,
    comm: Communicator,
}

impl<'a> Mesh<'a> {
    /// Connects all by one socket each.
    pub fn new(
        control: &'a Control,
        listener: Option<tcp::Listener>,
        token: Token,
        rank: usize,
    ) -> Result<Self, CommError> {
        let listener = listener.expect("a rank that has arrived listens for data");
        let table = control.table();
        let addresses: Vec<SocketAddr> = table.entries().iter().filter_map(|entry| entry.data).collect();
        let (rank, world) = (Rank::at(rank), table.entries().len());
        let membership = Membership { token, run: control.run(), rank, world, generation: Generation::default() };
        let interface = listener.address().ip();
        let comm = connect(control, &membership, listener, &addresses, 1)?;
        Ok(Self { control, membership, interface, comm })
    }

    /// What every rank says, by rank, on rank 0; nothing elsewhere.
    pub fn gather(&mut self, own: &Value) -> Result<Vec<Value>, CommError> {
        let text = own.to_string();
        if self.membership.rank != Rank(0) {
            self.comm.send(Rank(0), 0, &(text.len() as u64).to_le_bytes())?;
            self.comm.send(Rank(0), 1, text.as_bytes())?;
            return Ok(Vec::new());
        }
        let mut all = vec![own.clone()];
        for peer in (1..self.membership.world).map(Rank::at) {
            let violation =
                |what: String| CommError::Protocol { rank: Rank(0), peer: peer.into(), phase: "gather", what };
            let mut length = [0; 8];
            self.comm.recv(peer, 0, &mut length)?;
            let length = u64::from_le_bytes(length);
            if length > DESCRIPTION_BYTES_MAX {
                return Err(violation(format!("a description of {length} bytes")));
            }
            let mut text = vec![0; length as usize];
            self.comm.recv(peer, 1, &mut text)?;
            all.push(serde_json::from_slice(&text).map_err(|error| violation(error.to_string()))?);
        }
        Ok(all)
    }

    /// Measures the links; hosts have these names, or those they gave themselves.
    pub fn between(&mut self, hosts: &[String]) -> Result<Found, CommError> {
        let world = self.membership.world;
        let pairs = pairs(world);
        let entries = self.control.table().entries();
        let name = |rank: usize| hosts.get(rank).unwrap_or(&entries[rank].host);
        let row = |&(from, to): &(usize, usize)| Row {
            name: format!("{} [{from}] → {} [{to}]", name(from), name(to)),
            carry: "tcp",
            ..Row::default()
        };
        let mut rows: Vec<Row> = pairs.iter().map(row).collect();
        for sockets in SOCKETS {
            if sockets > 1 {
                self.reconnect(sockets)?;
            }
            for (&(from, to), row) in pairs.iter().zip(&mut rows) {
                row.note(sockets, probe::link(&mut self.comm, Rank::at(from), Rank::at(to), Effort::THOROUGH)?);
            }
        }
        let nodes = self.control.table().nodes();
        let slowest = |inside: bool| {
            let of_kind = pairs.iter().zip(&rows).filter(|((from, to), _)| (nodes[*from] == nodes[*to]) == inside);
            of_kind.map(|(_, row)| row.best()).max_by(|a, b| a.seconds_per_byte.total_cmp(&b.seconds_per_byte))
        };
        let (within, between) = (slowest(true), slowest(false));
        let any = within.or(between).expect("two ranks have a link");
        let nodes = Nodes::new(nodes.iter().map(|&node| node as u32).collect());
        Ok(Found { links: Links { nodes, within: within.unwrap_or(any), between: between.unwrap_or(any) }, rows })
    }

    /// Takes new connections, so many for each pair, in place of those that are there.
    fn reconnect(&mut self, sockets: u16) -> Result<(), CommError> {
        let listener = tcp::Listener::bind(self.membership.rank, Some(self.interface))?;
        let mut addresses = Vec::new();
        for rank in (0..self.membership.world).map(Rank::at) {
            let mut text = [b' '; 64];
            if rank == self.membership.rank {
                let own = listener.address().to_string();
                text[..own.len()].copy_from_slice(own.as_bytes());
            }
            self.comm.broadcast_bytes(rank, &mut text)?;
            let address = std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok());
            addresses.push(address.ok_or_else(|| CommError::Protocol {
                rank: self.membership.rank,
                peer: rank.into(),
                phase: "probe",
                what: "no address".into(),
            })?);
        }
        self.membership.generation.0 += 1;
        self.comm = connect(self.control, &self.membership, listener, &addresses, sockets)?;
        Ok(())
    }
}

fn connect(
    control: &Control,
    membership: &Membership,
    listener: tcp::Listener,
    addresses: &[SocketAddr],
    sockets: u16,
) -> Result<Communicator, CommError> {
    let wait = Wait::new(Deadlines::default().connect, control.stop());
    let config = tcp::Config { sockets, ..tcp::Config::default() };
    let port = tcp::connect(listener, addresses, membership, config, &wait)?;
    let choice = guess(Nodes::new(control.table().nodes().iter().map(|&node| node as u32).collect()));
    let options = Options { timeout: Deadlines::default().message, stop: control.stop().clone(), choice };
    Ok(Communicator::new(Transport::Tcp(port), options))
}

/// Which links are measured, each in both directions.
fn pairs(world: usize) -> Vec<(usize, usize)> {
    let all = (0..world).flat_map(|from| (0..world).map(move |to| (from, to)));
    let next = |from: usize, to: usize| (from + 1) % world == to || (to + 1) % world == from;
    all.filter(|&(from, to)| from != to && (world <= ALL_PAIRS_MAX || next(from, to))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_is_measured_both_ways_or_only_neighbours() {
        assert_eq!(pairs(2), [(0, 1), (1, 0)]);
        assert_eq!(pairs(8).len(), 56);
        assert_eq!(pairs(100).len(), 200);
    }
}
