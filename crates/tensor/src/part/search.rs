//! Which form each layer should have: the fastest combination for measured times, links and memory.

use super::by_channels;
use super::choose::{Prices, choose};
use super::form::Form;
use super::rule::{Facts, Way};
use crate::cut;
use crate::graph::{Graph, Source};

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// The way of every node.
    pub ways: Vec<Way>,
    /// The form of every layer that has parameters and is divided.
    pub forms: Vec<(String, Form)>,
    /// Seconds of a step.
    pub seconds: f64,
}

/// The fastest ways in so many parts; none where nothing fits into memory. Branches are not looked at.
///
/// # Panics
/// When there is no price for every node.
pub fn search(graph: &Graph, parts: usize, prices: &Prices) -> Option<Proposal> {
    assert_eq!(prices.nodes.len(), graph.nodes().len(), "every node has a price");
    let facts = Facts::new(graph, parts);
    let (ways, seconds) = choose(&facts, prices, &|index, unit| options(&facts, index, unit))?;
    let mut forms: Vec<(String, Form)> = Vec::new();
    for name in cut::names(graph) {
        let is_parameter = |value: &_| matches!(graph.info(*value).source, Source::Parameter(_));
        let nodes = graph.nodes().iter().zip(&ways);
        let mut own = nodes.filter(|(node, _)| node.layer == name && node.inputs.iter().any(is_parameter));
        let form = own.find_map(|(_, way)| match way {
            Way::Column | Way::Row { .. } | Way::Channels { .. } => Some(Form::Channel),
            Way::Samples => Some(Form::Replicate),
            _ => None,
        });
        forms.extend(form.filter(|_| forms.iter().all(|(known, _)| known != name)).map(|form| (name.to_owned(), form)));
    }
    Some(Proposal { ways, forms, seconds })
}

/// All ways that a node may take.
pub(super) fn options(facts: &Facts<'_>, index: usize, unit: usize) -> Vec<Way> {
    let mut ways = by_channels(facts, index, unit);
    if facts.batch >= facts.parts && facts.samples(&facts.graph.nodes()[index]) {
        ways.push(Way::Samples);
    }
    if !ways.contains(&Way::Whole) {
        ways.push(Way::Whole);
    }
    ways
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::gradient;
    use crate::graph::Value;
    use crate::op::{BatchNorm, Op, Rectifier};
    use crate::part::{MemoryLimit, build, traffic};
    use crate::shape::Shape;
    use crate::unary::Unary;
    use crate::window::{Conv2d, Padding, Pool2d, PoolKind};

    const PARTS: usize = 2;

    fn push(graph: &mut Graph, layer: &str, op: Op, inputs: &[Value]) -> Value {
        graph.push_one(layer, op, inputs).unwrap()
    }

    fn conv(graph: &mut Graph, layer: &str, x: Value, outputs: usize) -> Value {
        let weight = graph.parameter(&format!("{layer}.weight"), [3, 3, graph.shape(x).last(), outputs]);
        let conv = Conv2d { padding: Padding::all(1), ..Conv2d::square(3) };
        push(graph, layer, Op::Conv2d { conv, bias: false, relu: false, moments: false }, &[x, weight])
    }

    fn linear(graph: &mut Graph, layer: &str, x: Value, outputs: usize) -> Value {
        let weight = graph.parameter(&format!("{layer}.weight"), [outputs, graph.shape(x).last()]);
        push(graph, layer, Op::MatMul { trans_a: false, trans_b: true, bias: false, relu: false }, &[x, weight])
    }

    /// A chain: convolution, batch-norm, convolution, maximum, linear layers and a loss.
    fn chain() -> (Graph, Value) {
        let mut graph = Graph::new();
        let x = graph.input("x", [4, 4, 4, 2], DType::F32);
        let y = conv(&mut graph, "conv1", x, 4);
        let y = conv(&mut graph, "conv2", y, 8);
        let y = push(&mut graph, "pool", Op::Pool2d(Pool2d::sliding(PoolKind::Max, 2, 2)), &[y]);
        let y = push(&mut graph, "flat", Op::Reshape(Shape::from([4, 32])), &[y]);
        let y = linear(&mut graph, "fc1", y, 64);
        let y = linear(&mut graph, "fc2", y, 2);
        let targets = graph.input("targets", [4], DType::I32);
        let loss = push(&mut graph, "loss", Op::CrossEntropy { smoothing: 0.0 }, &[y, targets]);
        (graph, loss)
    }

    /// A residual block with a batch-norm.
    fn block() -> (Graph, Value) {
        let mut graph = Graph::new();
        let x = graph.input("x", [4, 4, 4, 4], DType::F32);
        let x = conv(&mut graph, "stem", x, 4);
        let y = conv(&mut graph, "conv1", x, 8);
        let beta = graph.parameter("norm.beta", [8]);
        let states = ["mean", "variance"].map(|name| graph.state(name, [8]));
        let norm = BatchNorm {
            epsilon: 0.1,
            momentum: 0.1,
            scale: false,
            residual: false,
            rectifier: Rectifier::None,
            moments: false,
        };
        let y = push(&mut graph, "norm", Op::BatchNorm(norm), &[y, beta, states[0], states[1]]);
        let y = conv(&mut graph, "conv2", y, 4);
        let y = push(&mut graph, "add", Op::Add, &[y, x]);
        let y = push(&mut graph, "relu", Op::Unary(Unary::Relu), &[y]);
        let y = push(&mut graph, "mean", Op::Pool2d(Pool2d::global(PoolKind::Average)), &[y]);
        let y = push(&mut graph, "flat", Op::Reshape(Shape::from([4, 4])), &[y]);
        let targets = graph.input("targets", [4], DType::I32);
        let loss = push(&mut graph, "loss", Op::CrossEntropy { smoothing: 0.0 }, &[y, targets]);
        (graph, loss)
    }

    fn prices(graph: &Graph, per_flop: f64, per_byte: f64, per_message: f64) -> Prices {
        let nodes = graph.nodes().iter().map(|node| 3.0 * graph.flops(node) as f64 * per_flop).collect();
        Prices { nodes, per_byte, per_message, samples: 4.0, memory: None }
    }

    /// Calls `each` with all ways that the nodes can take together.
    fn each_way(facts: &Facts<'_>, ways: &mut Vec<Way>, each: &mut dyn FnMut(&[Way])) {
        let node = &facts.graph.nodes()[ways.len()];
        let before = facts.activations(node).filter_map(|input| super::super::form::maker(facts.graph, input));
        let units = before.filter_map(|maker| match super::super::choose::state(facts, maker, &ways[maker]) {
            super::super::choose::State::Channels(unit) => Some(unit),
            _ => None,
        });
        let least = facts.activations(node).map(|input| facts.graph.shape(input).last()).min().unwrap_or(1);
        for way in options(facts, ways.len(), units.max().unwrap_or(least)) {
            ways.push(way);
            if ways.len() == facts.graph.nodes().len() {
                each(ways)
            } else {
                each_way(facts, ways, each)
            }
            ways.pop();
        }
    }

    fn cost(facts: &Facts<'_>, prices: &Prices, ways: &[Way]) -> Option<f64> {
        choose(facts, prices, &|index, _| vec![ways[index].clone()]).map(|(_, seconds)| seconds)
    }

    #[test]
    fn the_fastest_of_all_ways_is_found() {
        for (graph, _) in [chain(), block()] {
            let facts = Facts::new(&graph, PARTS);
            let mut all = Vec::new();
            each_way(&facts, &mut Vec::new(), &mut |ways| all.push(ways.to_vec()));
            assert!(all.len() > 500, "{}", all.len());
            let mut kinds = std::collections::BTreeSet::new();
            for (per_flop, per_byte, per_message) in [
                (1e-9, 1e-12, 0.0),
                (1e-9, 1e-8, 0.0),
                (1e-9, 1e-9, 1e-6),
                (1e-9, 1e-7, 1e-7),
                (1e-9, 1.0, 0.0),
                (1e-10, 1e-8, 1e-8),
            ] {
                let mut prices = prices(&graph, per_flop, per_byte, per_message);
                for limit in [None, Some(12_000.0), Some(6_000.0)] {
                    prices.memory = limit.map(|bytes_max| MemoryLimit { bytes_max, bytes_per_weight: 12.0 });
                    let best = all.iter().filter_map(|ways| cost(&facts, &prices, ways)).fold(f64::INFINITY, f64::min);
                    let found = search(&graph, PARTS, &prices);
                    let seconds = found.as_ref().map_or(f64::INFINITY, |found| found.seconds);
                    assert!(
                        seconds == best || (seconds - best).abs() < 1e-9 * best,
                        "{seconds} is not {best} ({limit:?})"
                    );
                    kinds.extend(found.map(|found| found.forms));
                }
            }
            assert!(kinds.len() > 2, "prices matter: {kinds:?}");
        }
    }

    #[test]
    fn what_is_counted_is_what_travels() {
        for (graph, loss) in [chain(), block()] {
            let facts = Facts::new(&graph, PARTS);
            let prices = prices(&graph, 0.0, 1.0, 0.0);
            let mut checked = 0;
            each_way(&facts, &mut Vec::new(), &mut |ways| {
                checked += 1;
                if checked % 7 > 0 {
                    return;
                }
                let mut part = build::build(&facts, ways, 0).unwrap();
                let here = part.value(loss).unwrap();
                gradient::of_loss(&mut part.graph, here).unwrap();
                let sent = traffic(&part.graph).bytes_sent(PARTS);
                assert_eq!(cost(&facts, &prices, ways), Some(sent as f64), "{ways:?}");
            });
        }
    }
}
