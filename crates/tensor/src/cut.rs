//! A graph in consecutive pieces: the stages of a pipeline, each a graph of its own.
//!
//! Nodes stand in an order in which they can run, so between any two of them the graph can be cut. What crosses a cut is every value that
//! is computed before it and read behind it; one that is read only two stages on (a skip connection) travels through the stage between.
//! Gradients cross the other way, for the same values, and each stage is differentiated by itself from the gradients of what it sent.
//! Parameters and states belong to the one stage that reads them.

use std::ops::Range;

use crate::graph::{Graph, GraphError, Node, Source, Value};
use crate::op::Op;

/// One piece.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Its nodes, with what it receives as inputs.
    pub graph: Graph,
    /// Which nodes of the whole graph they are.
    pub nodes: Range<usize>,
    /// Its parameters, by their numbers in the whole graph, rising.
    pub parameters: Vec<usize>,
    /// Its states, likewise.
    pub states: Vec<usize>,
    /// What comes from the stage before, in this stage's graph; none in the first.
    pub received: Vec<Crossing>,
    /// What goes to the stage behind, in this stage's graph: the same values in the same order as that one receives them.
    pub sent: Vec<Crossing>,
    /// Where values of the whole graph are in this one.
    values: Vec<Option<Value>>,
}

/// A value that crosses a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crossing {
    /// In the graph of the stage at hand.
    pub value: Value,
    /// Whether a gradient comes back for it: something before the cut is learned through it.
    pub has_gradient: bool,
}

impl Stage {
    /// A value of the whole graph in this stage's, if it is there.
    pub fn value(&self, whole: Value) -> Option<Value> {
        self.values[whole.index()]
    }
}

/// The node in front of which to cut for the next stage to begin behind a layer: behind its last node, and behind activations and poolings
/// that read its result directly, since less crosses there. A name in front of others (`features`, `layer2`) means all layers below it.
///
/// # Errors
/// When there is no such layer; the error says which there are.
pub fn behind_layer(graph: &Graph, name: &str) -> Result<usize, GraphError> {
    let below = format!("{name}.");
    let belongs = |layer: &str| layer == name || layer.starts_with(&below);
    let nodes = graph.nodes();
    let Some(last) = nodes.iter().rposition(|node| belongs(&node.layer)) else {
        return Err(error(
            name,
            format!("there is no such layer to cut behind; there are {}", names(graph).join(", ")),
        ));
    };
    let follows =
        |pair: &&[Node]| matches!(pair[1].op, Op::Unary(_) | Op::Pool2d(_)) && pair[1].inputs[0] == pair[0].outputs[0];
    Ok(last + 1 + nodes[last..].windows(2).take_while(follows).count())
}

/// The layers that have parameters, in order.
pub fn names(graph: &Graph) -> Vec<&str> {
    let is_parameter = |value: &Value| matches!(graph.info(*value).source, Source::Parameter(_));
    let with_parameters = graph.nodes().iter().filter(|node| node.inputs.iter().any(is_parameter));
    let mut names: Vec<&str> = with_parameters.map(|node| node.layer.as_str()).collect();
    names.dedup();
    names
}

/// The values that cross a cut in front of a node, in the order of creation.
pub fn crossing(graph: &Graph, node: usize) -> Vec<Value> {
    let uses = Uses::of(graph);
    graph.values().filter(|&value| uses.crosses(value, node)).collect()
}

/// Cuts a graph without gradients in front of some nodes.
///
/// # Errors
/// When a stage would have no nodes, or a parameter or a state is read in two stages; the error names a layer.
pub fn cut(graph: &Graph, before: &[usize]) -> Result<Vec<Stage>, GraphError> {
    let ends: Vec<usize> = before.iter().copied().chain([graph.nodes().len()]).collect();
    let starts: Vec<usize> = [0].into_iter().chain(before.iter().copied()).collect();
    let ranges: Vec<Range<usize>> = starts.into_iter().zip(ends).map(|(start, end)| start..end).collect();
    if let Some(empty) = ranges.iter().find(|range| range.start >= range.end) {
        let last = graph.nodes().len() - 1;
        let layer = graph.nodes()[empty.start.min(last)].layer.clone();
        let message = "cuts have to follow each other in the order of the layers, with a layer between any two and behind the last";
        return Err(error(&layer, message.into()));
    }
    let uses = Uses::of(graph);
    uses.check_owners(graph, &ranges)?;
    ranges.into_iter().map(|range| stage(graph, &uses, range)).collect()
}

fn stage(whole: &Graph, uses: &Uses, nodes: Range<usize>) -> Result<Stage, GraphError> {
    let mut graph = Graph::new();
    let mut values = vec![None; whole.values().count()];
    let mut received = Vec::new();
    if nodes.start > 0 {
        for value in whole.values().filter(|&value| uses.crosses(value, nodes.start)) {
            let info = whole.info(value);
            let here = graph.input(&format!("received.{}", info.name), info.shape.clone(), info.dtype);
            values[value.index()] = Some(here);
            received.push(Crossing { value: here, has_gradient: uses.learns[value.index()] });
        }
    }
    // What nobody reads is kept by the first.
    let is_here = |value: Value| nodes.contains(&uses.first[value.index()].unwrap_or(0));
    for value in whole.inputs().iter().copied().filter(|&value| is_here(value)) {
        let info = whole.info(value);
        values[value.index()] = Some(graph.input(&info.name, info.shape.clone(), info.dtype));
    }
    let (mut parameters, mut states) = (Vec::new(), Vec::new());
    for (number, value) in whole.parameters().iter().copied().enumerate().filter(|(_, value)| is_here(*value)) {
        values[value.index()] = Some(graph.parameter(&whole.info(value).name, whole.shape(value).clone()));
        parameters.push(number);
    }
    for (number, value) in whole.states().iter().copied().enumerate().filter(|(_, value)| is_here(*value)) {
        values[value.index()] = Some(graph.state(&whole.info(value).name, whole.shape(value).clone()));
        states.push(number);
    }
    for node in &whole.nodes()[nodes.clone()] {
        let here = |input: &Value| values[input.index()].expect("a node reads what is here or was received");
        let inputs: Vec<Value> = node.inputs.iter().map(here).collect();
        let outputs = graph.push(&node.layer, node.op.clone(), &inputs)?;
        node.outputs.iter().zip(outputs).for_each(|(output, here)| values[output.index()] = Some(here));
    }
    let mut sent = Vec::new();
    if nodes.end < whole.nodes().len() {
        for value in whole.values().filter(|&value| uses.crosses(value, nodes.end)) {
            let here = values[value.index()].expect("what crosses a cut is here");
            sent.push(Crossing { value: here, has_gradient: uses.learns[value.index()] });
        }
    }
    Ok(Stage { graph, nodes, parameters, states, received, sent, values })
}

/// Where each value of a graph is read.
struct Uses {
    /// The node that makes it; none for inputs, parameters and states.
    maker: Vec<Option<usize>>,
    /// The node that reads it first.
    first: Vec<Option<usize>>,
    /// The node that reads it last.
    last: Vec<Option<usize>>,
    /// Whether a parameter is learned through it.
    learns: Vec<bool>,
    /// Whether it is a parameter or a state, which do not travel.
    stays: Vec<bool>,
}

impl Uses {
    fn of(graph: &Graph) -> Self {
        let count = graph.values().count();
        let (mut first, mut last) = (vec![None; count], vec![None; count]);
        let source = |value: Value| graph.info(value).source;
        let mut learns: Vec<bool> = graph.values().map(|value| matches!(source(value), Source::Parameter(_))).collect();
        for (index, node) in graph.nodes().iter().enumerate() {
            for input in &node.inputs {
                first[input.index()].get_or_insert(index);
                last[input.index()] = Some(index);
            }
            let learned = node.inputs.iter().any(|input| learns[input.index()]);
            node.outputs.iter().for_each(|output| learns[output.index()] = learned && graph.dtype(*output).is_float());
        }
        let maker = graph.values().map(|value| match source(value) {
            Source::Node { node, .. } => Some(node),
            _ => None,
        });
        let stays = |value| matches!(source(value), Source::Parameter(_) | Source::State(_));
        Self { maker: maker.collect(), first, last, learns, stays: graph.values().map(stays).collect() }
    }

    /// Whether a value is there before a node and read at it or later. An input is there from where it is read first.
    fn crosses(&self, value: Value, node: usize) -> bool {
        let index = value.index();
        let Some(last) = self.last[index].filter(|_| !self.stays[index]) else { return false };
        let is_there = match (self.maker[index], self.first[index]) {
            (Some(maker), _) => maker < node,
            (None, Some(first)) => first < node,
            (None, None) => false,
        };
        is_there && last >= node
    }

    /// A parameter's gradient is made, and a state updated, in one place.
    fn check_owners(&self, graph: &Graph, ranges: &[Range<usize>]) -> Result<(), GraphError> {
        let stage_of = |node: usize| ranges.iter().position(|range| range.contains(&node));
        for &value in graph.parameters().iter().chain(graph.states()) {
            let (Some(first), Some(last)) = (self.first[value.index()], self.last[value.index()]) else { continue };
            if stage_of(first) != stage_of(last) {
                let [first, last] = [first, last].map(|node| &graph.nodes()[node].layer);
                let name = &graph.info(value).name;
                let message = format!("both it and {last} read `{name}`; cut so that they are in one stage");
                return Err(error(first, message));
            }
        }
        Ok(())
    }
}

fn error(layer: &str, message: String) -> GraphError {
    GraphError { layer: layer.to_owned(), op: "cut".to_owned(), message }
}
