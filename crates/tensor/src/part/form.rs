//! How layers are computed by several parts, as it is asked for: by name.

use crate::cut;
use crate::graph::{Graph, GraphError, Node, Source, Value};

/// See the variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// Each part has all weights and computes its share of the samples.
    Replicate,
    /// Each part has and computes its share of the channels.
    Channel,
    /// Each part has and computes some of the branches that meet in one place.
    Branch,
}

impl Form {
    /// Every form.
    pub const ALL: [Self; 3] = [Self::Replicate, Self::Channel, Self::Branch];
}

impl std::fmt::Display for Form {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(match self {
            Self::Replicate => "replicate",
            Self::Channel => "channel",
            Self::Branch => "branch",
        })
    }
}

impl std::str::FromStr for Form {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|form| form.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is not a form of a layer; type replicate, channel or branch"))
    }
}

/// The form of each node. A name stands for a layer and all below it, an empty one for all layers; the longest that fits counts. What has no
/// parameters follows the layer that it reads, unless it is named itself.
///
/// # Errors
/// When there is no such layer; the error says which there are.
pub(super) fn of_nodes(graph: &Graph, forms: &[(String, Form)]) -> Result<Vec<Option<Form>>, GraphError> {
    let names = cut::names(graph);
    if let Some((name, _)) = forms.iter().find(|(name, _)| !names.iter().any(|layer| is_below(layer, name))) {
        let message = format!("there is no such layer; there are {}", names.join(", "));
        return Err(GraphError { layer: name.clone(), op: "split".to_owned(), message });
    }
    let named = |layer: &str, least: usize| {
        let fitting = forms.iter().filter(|(name, _)| name.len() >= least && is_below(layer, name));
        fitting.max_by_key(|(name, _)| name.len()).map(|&(_, form)| form)
    };
    let mut found: Vec<Option<Form>> = Vec::with_capacity(graph.nodes().len());
    for node in graph.nodes() {
        let form = if has_parameters(graph, node) {
            named(&node.layer, 0)
        } else {
            let before = node.inputs.iter().find_map(|&input| maker(graph, input));
            named(&node.layer, 1).or_else(|| before.map_or_else(|| named("", 0), |before| found[before]))
        };
        found.push(form);
    }
    Ok(found)
}

fn is_below(layer: &str, name: &str) -> bool {
    let rest = layer.strip_prefix(name);
    name.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn has_parameters(graph: &Graph, node: &Node) -> bool {
    node.inputs.iter().any(|&input| matches!(graph.info(input).source, Source::Parameter(_)))
}

/// The node that makes a value.
pub(super) fn maker(graph: &Graph, value: Value) -> Option<usize> {
    match graph.info(value).source {
        Source::Node { node, .. } => Some(node),
        _ => None,
    }
}
