//! A graph in parts: what each of several devices computes of every layer, as a graph of its own.
//!
//! A pure function of the whole forward graph, of a form for every layer ([`Form`]) and of the number of parts. Every value stands in the
//! parts in one of three states: whole (all have the same bits), by channels or by samples (each has its share). `rule` says in which ways
//! a node can be computed from what; where a value is needed as it does not stand, nodes of their own change that ([`crate::op::Together`]).
//! They are conjugate under differentiation, so that the graph of a part is differentiated by itself, by the one table of
//! [`crate::gradient`]. Logits and loss are whole.
//!
//! A layer by its output channels needs all of its input, and one by its input channels gives a sum; of two that follow each other, the
//! first by outputs and the second by inputs, only the second has to wait for the other parts. Which is which is chosen for the fewest bytes
//! (`choose`). Branches that meet in a concatenation are one part's each (`branch`).
//!
//! What is absent: who the parts are, and what travels how.

mod branch;
mod build;
mod choose;
mod form;
mod piece;
mod rule;
mod search;
mod traffic;

pub use choose::{MemoryLimit, Prices};
pub use form::Form;
pub use piece::{PartTensor, Piece};
pub use rule::{Way, share};
pub use search::{Proposal, search};
pub use traffic::{Exchange, ExchangeKind, Traffic, traffic};

use crate::graph::{Graph, GraphError, Node, Source, Value};
use crate::op::Op;
use rule::Facts;

/// One part.
#[derive(Clone, Debug)]
pub struct Part {
    /// Its nodes.
    pub graph: Graph,
    /// Its parameters, in the order of the whole graph.
    pub parameters: Vec<PartTensor>,
    /// Its states, likewise.
    pub states: Vec<PartTensor>,
    /// Where values of the whole graph are in this one, as they stand.
    values: Vec<Option<Value>>,
}

impl Part {
    /// A value of the whole graph in this part's; one that is not whole there is this part's share.
    pub fn value(&self, whole: Value) -> Option<Value> {
        self.values[whole.index()]
    }
}

/// The ways that the nodes of a forward graph take in so many parts, for layers of these forms: of the longest name that fits a layer, or is
/// in front of its; an empty name means all.
///
/// # Errors
/// When there is no such layer, or it cannot have the form; the error names it.
pub fn ways(graph: &Graph, forms: &[(String, Form)], parts: usize) -> Result<Vec<Way>, GraphError> {
    ways_with(graph, forms, parts, None)
}

/// As [`ways`] for another graph of the same model, whose parameters have to stand as in `trained`, by their numbers.
///
/// # Errors
/// As [`ways`].
pub fn ways_like(
    graph: &Graph,
    forms: &[(String, Form)],
    parts: usize,
    trained: (&Graph, &[Way]),
) -> Result<Vec<Way>, GraphError> {
    let facts = Facts::new(trained.0, parts);
    let pieces = build::pieces(&facts, trained.1, 0, trained.0.parameters());
    ways_with(graph, forms, parts, Some(&pieces))
}

fn ways_with(
    graph: &Graph,
    forms: &[(String, Form)],
    parts: usize,
    pieces: Option<&[Piece]>,
) -> Result<Vec<Way>, GraphError> {
    let facts = Facts::new(graph, parts);
    let forms = form::of_nodes(graph, forms)?;
    check(&facts, &forms)?;
    let branches = branch::ways(&facts, &forms);
    let stands = |index: usize, way: &Way| pieces.is_none_or(|pieces| stands(&facts, index, way, pieces));
    let options = |index: usize, unit: usize| match (&branches[index], forms[index]) {
        (Some(way), _) => vec![way.clone()],
        (None, Some(Form::Channel)) => {
            by_channels(&facts, index, unit).into_iter().filter(|way| stands(index, way)).collect()
        }
        (None, Some(Form::Replicate)) if facts.batch >= parts && facts.samples(&graph.nodes()[index]) => {
            vec![Way::Samples]
        }
        _ => vec![Way::Whole],
    };
    let prices = Prices::of_bytes(graph, facts.batch);
    let (ways, _) = choose::choose(&facts, &prices, &options).expect("without a limit, there is always a way");
    Ok(ways)
}

/// The ways of a node by channels, or the one that is left.
fn by_channels(facts: &Facts<'_>, index: usize, unit: usize) -> Vec<Way> {
    let node = &facts.graph.nodes()[index];
    let mut ways = Vec::new();
    ways.extend(facts.column(node).then_some(Way::Column));
    ways.extend(facts.row(node, unit).then_some(Way::Row { unit }));
    ways.extend(facts.channels(node, unit).map(|_| Way::Channels { unit }));
    let is_layer = matches!(node.op, Op::Conv2d { .. } | Op::MatMul { .. });
    if ways.is_empty() || !is_layer {
        ways.push(Way::Whole);
    }
    ways
}

/// Whether the parameters of a node stand as they are given, if it goes this way.
fn stands(facts: &Facts<'_>, index: usize, way: &Way, pieces: &[Piece]) -> bool {
    let node = &facts.graph.nodes()[index];
    node.inputs.iter().enumerate().all(|(position, &input)| match facts.graph.info(input).source {
        Source::Parameter(number) => facts.piece((node, position), way, 0) == pieces[number],
        _ => true,
    })
}

/// Refuses what a form cannot be.
fn check(facts: &Facts<'_>, forms: &[Option<Form>]) -> Result<(), GraphError> {
    let is_wrong =
        |(node, form): &(&Node, &Option<Form>)| **form == Some(Form::Replicate) && matches!(node.op, Op::BatchNorm(_));
    let Some((node, _)) = facts.graph.nodes().iter().zip(forms).find(is_wrong) else { return Ok(()) };
    let message = "a batch-norm takes its statistics over all samples, and here a part has its share of them; type channel for it";
    Err(refusal(node, message.into()))
}

/// Refuses a batch to train with that has too few samples for every part to have some, where a layer's form is by samples.
///
/// # Errors
/// Then, and as [`ways`]; the error names the layer.
pub fn check_samples(graph: &Graph, forms: &[(String, Form)], parts: usize) -> Result<(), GraphError> {
    let (facts, forms) = (Facts::new(graph, parts), form::of_nodes(graph, forms)?);
    let by_samples = graph.nodes().iter().zip(forms).find(|(_, form)| *form == Some(Form::Replicate));
    match by_samples {
        Some((node, _)) if facts.batch < parts => Err(refusal(node, too_few(facts.batch, parts))),
        _ => Ok(()),
    }
}

fn refusal(node: &Node, message: String) -> GraphError {
    GraphError { layer: node.layer.clone(), op: "split".to_owned(), message }
}

fn too_few(samples: usize, parts: usize) -> String {
    let are = if samples == 1 { "sample at once is" } else { "samples at once are" };
    format!(
        "{samples} {are} too few for {parts} parts to have some each; if an epoch's last batch is that small, type --last-batch drop, or a \
         --batch that divides the training samples; if every batch is, a larger --batch, or a smaller --accumulate; or channel for the layer"
    )
}

/// The graph of one part.
///
/// # Errors
/// When an operation does not fit, which its rule should have told.
pub fn part(graph: &Graph, ways: &[Way], parts: usize, own: usize) -> Result<Part, GraphError> {
    build::build(&Facts::new(graph, parts), ways, own)
}

/// What a part has of every parameter and of every state.
pub fn pieces(graph: &Graph, ways: &[Way], parts: usize, own: usize) -> (Vec<Piece>, Vec<Piece>) {
    let facts = Facts::new(graph, parts);
    let of = |tensors: &[Value]| build::pieces(&facts, ways, own, tensors);
    (of(graph.parameters()), of(graph.states()))
}
