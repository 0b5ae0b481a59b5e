//! A network whose layers are computed by several parts: what one process of them computes.

use paceline_tensor::part::{self, Form, PartTensor, Piece, Way};
use paceline_tensor::{GraphError, Value};

use crate::net::{Input, Mode, Model, Network};
use crate::stage::{Head, StageGradients, StageNetwork};

/// How layers are computed by several parts, and which part this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartForm {
    /// The form of each layer, by its name or one in front of others; an empty name means all. The longest that fits counts.
    pub forms: Vec<(String, Form)>,
    /// How many parts there are.
    pub parts: usize,
    /// The number of this part.
    pub own: usize,
}

/// What a part has of the tensors that it has some of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePieces {
    /// Of each parameter.
    pub parameters: Vec<PartTensor>,
    /// Of each state.
    pub states: Vec<PartTensor>,
}

/// What a part has of every tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartPieces {
    /// Of each parameter.
    pub parameters: Vec<Piece>,
    /// Of each state.
    pub states: Vec<Piece>,
}

impl PartForm {
    /// What every part has of every tensor of a model, by the part's number.
    ///
    /// # Errors
    /// As [`StageNetwork::part`].
    pub fn pieces(&self, model: &dyn Model, input: Input, classes: usize) -> Result<Vec<PartPieces>, GraphError> {
        let whole = self.standard(model, input, classes)?;
        let ways = part::ways(&whole.graph, &self.forms, self.parts)?;
        let of = |own| {
            let (parameters, states) = part::pieces(&whole.graph, &ways, self.parts, own);
            PartPieces { parameters, states }
        };
        Ok((0..self.parts).map(of).collect())
    }

    /// The network that says how tensors stand: for training, of a sample for each part.
    fn standard(&self, model: &dyn Model, input: Input, classes: usize) -> Result<Network, GraphError> {
        Network::without_gradients(model, Mode::Train, self.parts, input, classes, 0.0)
    }

    /// The ways of a network's nodes, for whatever number of samples and whatever it is for: tensors stand as in the one standard network, since
    /// costs that are equal but for rounding could decide otherwise for every number of samples.
    fn ways(&self, whole: &Network, standard: &Network) -> Result<Vec<Way>, GraphError> {
        let ways = part::ways(&standard.graph, &self.forms, self.parts)?;
        part::ways_like(&whole.graph, &self.forms, self.parts, (&standard.graph, &ways))
    }
}

impl StageNetwork {
    /// What one part computes of a model. With gradients in [`Mode::Train`]. Logits, loss and inputs are whole, and targets are.
    ///
    /// # Errors
    /// When a layer does not fit, is not there, or cannot have its form; the error names it.
    pub fn part(
        model: &dyn Model,
        mode: Mode,
        batch: usize,
        (input, classes, smoothing): (Input, usize, f32),
        form: &PartForm,
    ) -> Result<Self, GraphError> {
        let whole = Network::without_gradients(model, mode, batch, input, classes, smoothing)?;
        if mode == Mode::Train {
            part::check_samples(&whole.graph, &form.forms, form.parts)?;
        }
        let ways = form.ways(&whole, &form.standard(model, input, classes)?)?;
        let part = part::part(&whole.graph, &ways, form.parts, form.own)?;
        let here = |value: Value| part.value(value).expect("inputs, logits and loss are in every part");
        let head = Head { targets: here(whole.targets), logits: here(whole.logits), loss: here(whole.loss) };
        let x = here(whole.x);
        let parameters = part.parameters.iter().map(|own| whole.parameters[own.whole].clone()).collect();
        let states = part.states.iter().map(|own| whole.states[own.whole].clone()).collect();
        let pieces = StagePieces { parameters: part.parameters, states: part.states };
        let mut graph = part.graph;
        let gradients = match mode {
            Mode::Train => Some(StageGradients::add(&mut graph, Some(head), &[], &[])?),
            Mode::Eval => None,
        };
        let (received, sent) = (Vec::new(), Vec::new());
        Ok(Self {
            graph,
            parameters,
            states,
            pieces: Some(pieces),
            x: Some(x),
            head: Some(head),
            received,
            sent,
            gradients,
        })
    }
}
