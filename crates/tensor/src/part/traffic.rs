//! What the parts of a graph exchange in one run of it: a list, known before it runs.

use crate::dtype::DType;
use crate::graph::Graph;
use crate::op::{Op, Together};

/// One sum or one gather.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The layer that it is for.
    pub layer: String,
    /// Which of the two.
    pub kind: ExchangeKind,
    /// The size of what all parts have afterwards.
    pub bytes: usize,
}

/// See the variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    /// All parts get the sum of what they have.
    Sum,
    /// All parts get the pieces of all.
    Gather,
}

/// What the parts exchange, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Each sum and each gather.
    pub exchanges: Vec<Exchange>,
}

impl Traffic {
    /// The bytes that a part sends, and as many that it receives, of so many parts that share the work evenly: of a sum 2(n−1)/n, of a
    /// gather (n−1)/n.
    pub fn bytes_sent(&self, parts: usize) -> usize {
        let rounds = |exchange: &Exchange| match exchange.kind {
            ExchangeKind::Sum => 2,
            ExchangeKind::Gather => 1,
        };
        self.exchanges.iter().map(|exchange| rounds(exchange) * exchange.bytes * (parts - 1) / parts).sum()
    }

    /// How many exchanges there are.
    pub fn messages(&self) -> usize {
        self.exchanges.len()
    }

    /// Of those that are for a layer, or those below it.
    #[must_use]
    pub fn of(&self, name: &str) -> Self {
        let below = format!("{name}.");
        let is_below = |exchange: &&Exchange| exchange.layer == name || exchange.layer.starts_with(&below);
        Self { exchanges: self.exchanges.iter().filter(is_below).cloned().collect() }
    }
}

/// What one run of a part's graph exchanges: forwards, and backwards if it has gradients.
pub fn traffic(graph: &Graph) -> Traffic {
    let exchange = |node: &crate::graph::Node| {
        let kind = match node.op {
            Op::Together(Together::Sum) => ExchangeKind::Sum,
            Op::Together(Together::Gather(_)) => ExchangeKind::Gather,
            _ => return None,
        };
        let bytes = graph.shape(node.outputs[0]).elements() * DType::F32.bytes();
        Some(Exchange { layer: node.layer.clone(), kind, bytes })
    };
    Traffic { exchanges: graph.nodes().iter().filter_map(exchange).collect() }
}
