//! Between nodes: whether several nodes that train together, each with the set-up that is fastest on it, are faster than the best of them
//! alone. A pure function of what each node takes, of the bytes of all gradients, and of the link.
//!
//! Between nodes there is data parallelism with one task a node: each takes its share of the batch, and the sums of all gradients travel
//! by the all-reduce that is cheapest on the link. Gradients travel while the backward pass goes on, which is two thirds of a step; the
//! first layers' are final last, and wait for the link by themselves.

use crate::comm::describe::plan;
use crate::comm::{Choice, Collective, Links};
use crate::system::limits::in_words;

/// Of both passes, the backward pass, in which messages travel.
const HIDDEN: f64 = 2.0 / 3.0;

/// Nodes whose times differ by less are alike.
const ALIKE: f64 = 1.02;

/// What a node takes by the set-up that is fastest on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Node {
    /// For the whole batch.
    pub alone_s: f64,
    /// For its share of it.
    pub share_s: f64,
}

/// What nodes would send each other in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gradients {
    /// Numbers of all of them.
    pub elements: usize,
    /// Numbers of the message that leaves last.
    pub last: usize,
}

/// What the gradients of a step take on their way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// Seconds that all of them travel.
    pub all_s: f64,
    /// Seconds of the message that leaves last.
    pub last_s: f64,
    /// Seconds by which passes take longer, since sending, receiving and adding up take their share of the same cores.
    pub busy_s: f64,
    /// Bytes that a node sends.
    pub sent_bytes: u64,
}

impl Exchange {
    /// By what links are known to take; they do not tell what it costs the cores.
    pub fn by_links(gradients: Gradients, links: &Links) -> Self {
        if links.nodes.world() == 1 {
            return Self { all_s: 0.0, last_s: 0.0, busy_s: 0.0, sent_bytes: 0 };
        }
        let choice = Choice::by_cost(links.clone());
        let of = |elements| plan(Collective::AllReduce, &choice, elements, size_of::<f32>());
        let all = of(gradients.elements);
        let sent_bytes = all.ranks[0].forecast.sent_bytes as u64;
        Self { all_s: all.seconds(), last_s: of(gradients.last).seconds(), busy_s: 0.0, sent_bytes }
    }
}

/// Whether to distribute.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Seconds of a step by all nodes together.
    pub together_s: f64,
    /// Seconds of a step by the best node alone, and which it is.
    pub alone: (usize, f64),
    /// Seconds that the gradients of a step travel.
    pub exchange_s: f64,
    /// Bytes that a node sends for them.
    pub sent_bytes: u64,
}

impl Decision {
    /// For these nodes, whose gradients take so long on their way.
    ///
    /// # Panics
    /// Without a node: a bug.
    pub fn new(nodes: &[Node], exchange: &Exchange) -> Self {
        let best_s = nodes.iter().map(|node| node.alone_s).fold(f64::INFINITY, f64::min);
        // Of nodes alike the first: its user has typed the command.
        let alone = nodes.iter().map(|node| node.alone_s).enumerate().find(|(_, alone_s)| *alone_s <= ALIKE * best_s);
        let alone = alone.expect("a node");
        let Exchange { all_s, last_s, busy_s, sent_bytes } = *exchange;
        if nodes.len() == 1 {
            return Self { together_s: alone.1, alone, exchange_s: 0.0, sent_bytes: 0 };
        }
        // All wait for the slowest.
        let share_s = nodes.iter().map(|node| node.share_s).fold(0.0, f64::max);
        let waits_s = (all_s - HIDDEN * share_s - busy_s).max(last_s);
        Self { together_s: share_s + busy_s + waits_s, alone, exchange_s: all_s, sent_bytes }
    }

    /// Whether all nodes together are faster than the best of them alone.
    pub fn distributes(&self) -> bool {
        self.together_s < self.alone.1
    }

    /// Why, in a sentence.
    pub fn reason(&self, nodes: usize) -> String {
        let Self { together_s, alone: (_, alone_s), exchange_s, sent_bytes } = self;
        let ms = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        let travels = format!("gradients travel for {} ({} from each node)", ms(*exchange_s), in_words(*sent_bytes));
        match self.distributes() {
            true if alone_s.is_infinite() => {
                format!(
                    "no node could train the whole batch alone; {nodes} are expected to take {}: {travels}",
                    ms(*together_s)
                )
            }
            true => format!(
                "{nodes} nodes are expected to take {} a step, {:.2}× one node alone ({}): {travels}, most of it behind the backward pass",
                ms(*together_s),
                alone_s / together_s,
                ms(*alone_s)
            ),
            false => format!(
                "one node alone is faster: {nodes} nodes are expected to take {} a step, and one takes {}, since {travels}",
                ms(*together_s),
                ms(*alone_s)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::comm::Link;

    use super::*;

    fn links(count: usize, gbit: f64) -> Links {
        Links::uniform(count, Link::new(50e-6, gbit * 1e9 / 8.0))
    }

    /// Nodes alike, which take a share of the time for a share of the batch, and a tenth of all besides.
    fn alike(count: usize, alone_s: f64) -> Vec<Node> {
        vec![Node { alone_s, share_s: alone_s * (0.1 + 0.9 / count as f64) }; count]
    }

    fn decided(count: usize, alone_s: f64, (elements, last): (usize, usize), gbit: f64) -> Decision {
        Decision::new(&alike(count, alone_s), &Exchange::by_links(Gradients { elements, last }, &links(count, gbit)))
    }

    #[test]
    fn a_model_of_many_weights_distributes_over_fast_links_alone() {
        // AlexNet: 61 million numbers, a second a step.
        let alexnet = (61_100_000, 23_296);
        for count in [2, 4] {
            let on = |gbit| decided(count, 1.0, alexnet, gbit).distributes();
            assert_eq!([0.1, 1.0, 10.0].map(on), [false, false, true], "{count} nodes");
        }
    }

    #[test]
    fn a_model_of_few_weights_distributes_over_any_link() {
        // ResNet-20: 272,474 numbers, 80 ms a step: 17 ms by 100 Mbit/s hide behind the backward pass.
        let resnet = (272_474, 464);
        for (count, gbit) in [(2, 1.0), (2, 10.0), (4, 1.0), (4, 10.0), (2, 0.1)] {
            let found = decided(count, 0.4, resnet, gbit);
            assert!(found.distributes(), "{count} nodes at {gbit}: {found:?}");
            assert!(found.alone.1 / found.together_s > 1.4, "{found:?}");
        }
    }

    #[test]
    fn a_step_of_a_millisecond_does_not_distribute_over_slow_links() {
        // LeNet-5: 61,706 numbers.
        let lenet = (61_706, 156);
        assert!(!decided(2, 1e-3, lenet, 0.1).distributes());
        assert!(!decided(4, 1e-3, lenet, 1.0).distributes());
        assert!(decided(2, 20e-3, lenet, 10.0).distributes());
    }

    #[test]
    fn the_best_node_is_what_all_are_compared_with_and_the_slowest_what_they_wait_for() {
        let nodes = [Node { alone_s: 1.0, share_s: 0.5 }, Node { alone_s: 4.0, share_s: 2.0 }];
        let few = |count| Exchange::by_links(Gradients { elements: 1000, last: 10 }, &links(count, 10.0));
        let found = Decision::new(&nodes, &few(2));
        assert_eq!(found.alone, (0, 1.0));
        assert!(!found.distributes() && found.together_s > 2.0, "{found:?}");
        let slower_first = [nodes[1], nodes[0]];
        let found_there = Decision::new(&slower_first, &few(2));
        assert_eq!(found_there.alone, (1, 1.0));
        assert!(found.reason(2).starts_with("one node alone is faster: 2 nodes"), "{}", found.reason(2));
        let one = Decision::new(&nodes[..1], &few(1));
        assert_eq!((one.together_s, one.exchange_s, one.distributes()), (1.0, 0.0, false));
    }

    #[test]
    fn what_messages_cost_the_cores_comes_on_top_until_the_link_is_what_all_wait_for() {
        let nodes = alike(2, 1.0);
        let step_s =
            |all_s, busy_s| Decision::new(&nodes, &Exchange { all_s, last_s: 0.01, busy_s, sent_bytes: 1 }).together_s;
        assert!((step_s(0.2, 0.1) - (0.55 + 0.1 + 0.01)).abs() < 1e-9, "{}", step_s(0.2, 0.1));
        assert!((step_s(2.0, 0.1) - step_s(2.0, 0.0)).abs() < 1e-9, "a core that waits for a link has time to send");
    }

    #[test]
    fn bytes_are_those_of_a_ring() {
        let found = decided(4, 1.0, (1_000_000, 1000), 1.0);
        assert_eq!(found.sent_bytes, 6_000_000, "2·(p − 1)/p of four million bytes");
    }
}
