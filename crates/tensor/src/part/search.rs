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
