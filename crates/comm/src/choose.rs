//! Which algorithm: the one with the lowest forecast for the size and the measured links, unless the user names one.

use std::fmt;

use crate::collective::{Algorithm, Collective};
use crate::cost::{Links, seconds};
use crate::rank::Rank;

/// How a communicator picks algorithms. Every rank must hold the same value: they do not ask each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    links: Links,
    forced: Option<Algorithm>,
}

impl Choice {
    /// By forecast on these links.
    pub const fn by_cost(links: Links) -> Self {
        Self { links, forced: None }
    }

    /// This algorithm wherever it can do what is asked, else by forecast.
    #[must_use]
    pub const fn forced(mut self, algorithm: Option<Algorithm>) -> Self {
        self.forced = algorithm;
        self
    }

    /// The same for some of the ranks, which are numbered anew in this order.
    #[must_use]
    pub fn restricted_to(&self, members: &[Rank]) -> Self {
        Self { links: self.links.restricted_to(members), forced: self.forced }
    }

    /// Whether an algorithm was named.
    pub const fn is_forced(&self) -> bool {
        self.forced.is_some()
    }

    /// The links it decides by.
    pub const fn links(&self) -> &Links {
        &self.links
    }

    /// The algorithm for a buffer of so many bytes.
    pub fn algorithm(&self, collective: Collective, bytes: usize) -> Algorithm {
        let world = self.links.nodes.world();
        if let Some(algorithm) = self.forced.filter(|algorithm| algorithm.supports(collective, world)) {
            return algorithm;
        }
        let cost = |algorithm: &Algorithm| seconds(collective, *algorithm, &self.links, bytes);
        // Two levels on one node are one level with a longer name.
        let levels = |algorithm: Algorithm| algorithm != Algorithm::Hierarchical || self.links.nodes.groups().len() > 1;
        let able = Algorithm::ALL.into_iter().filter(|&able| able.supports(collective, world) && levels(able));
        able.min_by(|a, b| cost(a).total_cmp(&cost(b))).expect("direct does everything")
    }
}

/// The all-reduce's choices by size, as ranges: `up to 4 KiB recursive-doubling, above ring`.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<usize> = (8..=32).map(|power| 1 << power).collect();
        let mut current = self.algorithm(Collective::AllReduce, sizes[0]);
        for pair in sizes.windows(2) {
            let next = self.algorithm(Collective::AllReduce, pair[1]);
            if next != current {
                write!(f, "up to {} {current}, ", size(pair[0]))?;
                current = next;
            }
        }
        write!(f, "above {current}")
    }
}

fn size(bytes: usize) -> String {
    match bytes {
        1_048_576.. => format!("{} MiB", bytes >> 20),
        1024.. => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Nodes;
    use crate::cost::Link;

    #[test]
    fn small_messages_take_few_steps_and_large_ones_few_bytes() {
        let choice = Choice::by_cost(Links::uniform(64, Link::new(50e-6, 1e9)));
        assert_eq!(choice.algorithm(Collective::AllReduce, 64), Algorithm::RecursiveDoubling);
        let large = choice.algorithm(Collective::AllReduce, 1 << 28);
        assert!(matches!(large, Algorithm::Ring | Algorithm::HalvingDoubling | Algorithm::Direct), "{large}");
        let text = choice.to_string();
        assert!(text.contains("recursive-doubling, ") && text.contains("above "), "{text}");
    }

    #[test]
    fn slow_links_between_nodes_ask_for_two_levels() {
        let nodes = Nodes::new((0..32).map(|rank| rank / 8).collect());
        let links = Links { nodes, within: Link::new(1e-6, 2e10), between: Link::new(50e-6, 1e8) };
        assert_eq!(Choice::by_cost(links).algorithm(Collective::AllReduce, 1 << 26), Algorithm::Hierarchical);
    }

    #[test]
    fn a_group_on_one_node_asks_for_one_level_and_one_across_for_two() {
        let nodes = Nodes::new((0..32).map(|rank| rank / 8).collect());
        let links = Links { nodes, within: Link::new(1e-6, 2e10), between: Link::new(50e-6, 1e8) };
        let choice = Choice::by_cost(links);
        let some = |ranks: &[u32]| choice.restricted_to(&ranks.iter().map(|&rank| Rank(rank)).collect::<Vec<_>>());
        let (inside, across) = (some(&[8, 9, 10, 11]), some(&[0, 1, 2, 3, 24, 25, 26, 27]));
        assert_eq!((inside.links().nodes.groups().len(), across.links().nodes.groups().len()), (1, 2));
        assert_ne!(inside.algorithm(Collective::AllReduce, 1 << 26), Algorithm::Hierarchical);
        assert_eq!(across.algorithm(Collective::AllReduce, 1 << 26), Algorithm::Hierarchical);
    }

    #[test]
    fn a_named_algorithm_is_taken_where_it_can() {
        let choice = Choice::by_cost(Links::uniform(6, Link::new(50e-6, 1e9))).forced(Some(Algorithm::DoubleTree));
        assert_eq!(choice.algorithm(Collective::AllReduce, 64), Algorithm::DoubleTree);
        assert_ne!(choice.algorithm(Collective::AllGather, 64), Algorithm::DoubleTree);
    }
}
