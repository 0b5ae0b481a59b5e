//! What a collective will take, before it runs: steps, bytes and seconds by the α-β model.
//!
//! A message of n bytes takes α + nβ seconds, a rank sends and receives at the same time, and adding is free. The model
//! leaves out contention inside switches and the reduction itself; `paceline bench collectives` prints what it took.

use crate::collective::{Algorithm, Collective, Nodes};
use crate::rank::Rank;
use crate::transfer::{Action, Transfer};

/// A link, as measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// α: seconds before the first byte of a message is there.
    pub latency_s: f64,
    /// β: seconds for each further byte.
    pub seconds_per_byte: f64,
}

impl Link {
    /// A link by its latency and bandwidth.
    pub fn new(latency_s: f64, bytes_per_s: f64) -> Self {
        Self { latency_s, seconds_per_byte: 1.0 / bytes_per_s }
    }

    /// How long one message takes.
    pub fn message_s(&self, bytes: f64) -> f64 {
        self.latency_s + bytes * self.seconds_per_byte
    }
}

/// What one rank's list will take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forecast {
    /// Steps in which this rank does something.
    pub steps: usize,
    /// Messages it sends.
    pub messages: usize,
    /// Bytes it sends.
    pub sent_bytes: usize,
    /// Bytes it receives.
    pub received_bytes: usize,
    /// Seconds, if steps do not overlap.
    pub seconds: f64,
}

/// The forecast of one rank's list.
pub fn forecast(list: &[Transfer], element_bytes: usize, link: &Link) -> Forecast {
    let mut total = Forecast::default();
    for step in list.chunk_by(|a, b| a.step == b.step) {
        let (mut sent, mut received) = (0, 0);
        for transfer in step {
            let bytes = transfer.length * element_bytes;
            if transfer.action == Action::Send {
                sent += bytes;
                total.messages += 1;
            } else {
                received += bytes;
            }
        }
        total.steps += 1;
        total.sent_bytes += sent;
        total.received_bytes += received;
        total.seconds += link.message_s(sent.max(received) as f64);
    }
    total
}

/// The links of a cluster: inside a node and between nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    /// Which ranks share a node.
    pub nodes: Nodes,
    /// Between ranks of one node.
    pub within: Link,
    /// Between ranks of different nodes.
    pub between: Link,
}

impl Links {
    /// All ranks joined by the same kind of link.
    pub fn uniform(world: usize, link: Link) -> Self {
        Self { nodes: Nodes::one(world), within: link, between: link }
    }

    /// The links between some of the ranks, which are numbered anew in this order.
    #[must_use]
    pub fn restricted_to(&self, members: &[Rank]) -> Self {
        Self { nodes: self.nodes.restricted_to(members), ..self.clone() }
    }

    /// The slowest link a flat algorithm meets.
    fn slowest(&self) -> Link {
        if self.nodes.groups().len() > 1 { self.between } else { self.within }
    }
}

/// Seconds for the whole collective by the textbook formula, pipelined where the interpreter pipelines.
pub fn seconds(collective: Collective, algorithm: Algorithm, links: &Links, bytes: usize) -> f64 {
    let world = links.nodes.world();
    if world == 1 {
        return 0.0;
    }
    let Link { latency_s: alpha, seconds_per_byte: beta } = links.slowest();
    let (p, total) = (world as f64, bytes as f64 * beta);
    let (levels, up) = (f64::from(world.ilog2()), f64::from(world.next_power_of_two().ilog2()));
    let folds = if world.is_power_of_two() { 0.0 } else { 1.0 };
    let share = (p - 1.0) / p * total;
    match (collective, algorithm) {
        (Collective::AllReduce, Algorithm::Ring) => 2.0 * (p - 1.0) * alpha + 2.0 * share,
        (Collective::AllReduce, Algorithm::HalvingDoubling) => {
            let core = levels.exp2();
            2.0 * (levels + folds) * alpha + 2.0 * (core - 1.0) / core * total + 2.0 * folds * total
        }
        (Collective::AllReduce, Algorithm::RecursiveDoubling) => (levels + 2.0 * folds) * (alpha + total),
        (Collective::AllReduce, Algorithm::DoubleTree) => 2.0 * up * alpha + 2.0 * total,
        (Collective::AllReduce, Algorithm::Hierarchical) => hierarchical_s(links, bytes as f64),
        // Messages to different peers leave one after the other, but do not wait for each other's arrival.
        (Collective::AllReduce, Algorithm::Direct) => 2.0 * alpha + direct_s(p, alpha) * 2.0 + 2.0 * share,
        (Collective::ReduceScatter | Collective::AllGather, Algorithm::Ring) => (p - 1.0) * alpha + share,
        (Collective::ReduceScatter | Collective::AllGather, Algorithm::HalvingDoubling) => levels * alpha + share,
        (Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll, _) => {
            alpha + direct_s(p, alpha) + share
        }
        (Collective::Broadcast { .. }, Algorithm::Ring) => (p - 1.0) * alpha + total,
        (Collective::Broadcast { .. }, Algorithm::RecursiveDoubling) => up * (alpha + total),
        (Collective::Broadcast { .. }, _) => alpha + direct_s(p, alpha) + (p - 1.0) * total,
        (Collective::Barrier, Algorithm::RecursiveDoubling) => up * alpha,
        (Collective::Barrier, _) => alpha + direct_s(p, alpha),
    }
}

/// What a rank spends on handing over p−1 messages: about a quarter of a latency each, as measured on loopback.
fn direct_s(world: f64, alpha: f64) -> f64 {
    (world - 2.0).max(0.0) * alpha / 4.0
}

fn hierarchical_s(links: &Links, bytes: f64) -> f64 {
    let groups = links.nodes.groups();
    let shards = groups.iter().map(Vec::len).min().unwrap_or(1) as f64;
    let largest = groups.iter().map(Vec::len).max().unwrap_or(1) as f64;
    let n = groups.len() as f64;
    let inside = if largest > 1.0 {
        2.0 * links.within.latency_s + 2.0 * (largest - 1.0) / shards * bytes * links.within.seconds_per_byte
    } else {
        0.0
    };
    let between = &links.between;
    inside + 2.0 * (n - 1.0) * between.latency_s + 2.0 * (n - 1.0) / n * bytes / shards * between.seconds_per_byte
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::transfers;

    #[test]
    fn the_forecast_of_a_list_is_the_formula() {
        let link = Link::new(1e-5, 1e9);
        for world in [2, 4, 8, 64] {
            let links = Links::uniform(world, link);
            for algorithm in [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::RecursiveDoubling] {
                let length = 64 * world;
                let list = transfers(Collective::AllReduce, algorithm, Rank(1), &links.nodes, length);
                let (found, formula) =
                    (forecast(&list, 4, &link).seconds, seconds(Collective::AllReduce, algorithm, &links, 4 * length));
                assert!((found / formula - 1.0).abs() < 1e-9, "{algorithm} {world}: {found} {formula}");
            }
        }
    }

    #[test]
    fn a_forecast_counts_both_directions() {
        let nodes = Nodes::one(4);
        let list = transfers(Collective::AllReduce, Algorithm::Ring, Rank(0), &nodes, 400);
        let found = forecast(&list, 4, &Link::new(0.0, 1.0));
        assert_eq!((found.steps, found.messages, found.sent_bytes, found.received_bytes), (6, 6, 2400, 2400));
    }
}
