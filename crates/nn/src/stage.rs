//! A network in stages, each a graph of its own with the part of the parameters that it reads: what one process of a pipeline computes.
//! A network that is not cut is one stage.

use paceline_tensor::cut::{self, Crossing};
use paceline_tensor::fuse::MOMENTS_FROM;
use paceline_tensor::gradient::{self, Gradients};
use paceline_tensor::{Graph, GraphError, Value, Wanted};

use crate::net::{Input, Mode, Model, Network};
use crate::parameter::{Parameter, State};
use crate::part::StagePieces;

/// One stage of a network.
#[derive(Debug)]
pub struct StageNetwork {
    /// Its nodes, with gradients if it is for training.
    pub graph: Graph,
    /// What its parameters are, in the graph's order.
    pub parameters: Vec<Parameter>,
    /// What its states are, in the graph's order.
    pub states: Vec<State>,
    /// Where layers are computed by several parts: what this one has of each parameter and state, in the graph's order. What they
    /// are, above, is said of the whole tensors.
    pub pieces: Option<StagePieces>,
    /// The images or tokens, where they are read.
    pub x: Option<Value>,
    /// The right classes, the model's answer and the mean loss: in the last stage.
    pub head: Option<Head>,
    /// What comes from the stage before.
    pub received: Vec<Value>,
    /// What goes to the stage behind.
    pub sent: Vec<Value>,
    /// For training.
    pub gradients: Option<StageGradients>,
}

/// The end of a network.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// The right classes.
    pub targets: Value,
    /// The model's answer `[rows, classes]`.
    pub logits: Value,
    /// The mean loss over the rows.
    pub loss: Value,
}

/// What a stage's backward pass begins with and comes to.
#[derive(Debug, Default)]
pub struct StageGradients {
    /// What the gradients of the loss are multiplied by: in the last stage.
    pub seed: Option<Value>,
    /// Inputs for the gradients of what was sent, where there are such.
    pub arriving: Vec<Option<Value>>,
    /// Gradients of what was received, where something before is learned through it; `None` inside is a gradient of zero.
    pub leaving: Vec<Option<Option<Value>>>,
    /// Those of parameters.
    pub of: Gradients,
}

impl From<Network> for StageNetwork {
    fn from(network: Network) -> Self {
        let Network { graph, parameters, states, x, targets, logits, loss, gradients } = network;
        let gradients = gradients.map(|(seed, of)| StageGradients {
            seed: Some(seed),
            arriving: Vec::new(),
            leaving: Vec::new(),
            of,
        });
        let head = Some(Head { targets, logits, loss });
        Self {
            graph,
            parameters,
            states,
            pieces: None,
            x: Some(x),
            head,
            received: Vec::new(),
            sent: Vec::new(),
            gradients,
        }
    }
}

impl StageNetwork {
    /// The stages of a model that is cut behind these layers; one if there are none. With gradients in [`Mode::Train`].
    ///
    /// # Errors
    /// When a layer does not fit, or the model cannot be cut there; the error names it.
    pub fn all(
        model: &dyn Model,
        mode: Mode,
        batch: usize,
        (input, classes, smoothing): (Input, usize, f32),
        cuts: &[String],
    ) -> Result<Vec<Self>, GraphError> {
        if cuts.is_empty() {
            return Ok(vec![Network::new(model, mode, batch, input, classes, smoothing)?.into()]);
        }
        let whole = Network::without_gradients(model, mode, batch, input, classes, smoothing)?;
        let before = cuts.iter().map(|name| cut::behind_layer(&whole.graph, name)).collect::<Result<Vec<_>, _>>()?;
        let stages = cut::cut(&whole.graph, &before)?;
        stages.into_iter().map(|stage| Self::of(stage, &whole, mode)).collect()
    }

    fn of(stage: cut::Stage, whole: &Network, mode: Mode) -> Result<Self, GraphError> {
        let values = |crossings: &[Crossing]| crossings.iter().map(|crossing| crossing.value).collect::<Vec<_>>();
        let head = stage.value(whole.loss).map(|loss| {
            let here =
                |value| stage.value(value).expect("the loss is computed from the answer, which it therefore has");
            Head { targets: here(whole.targets), logits: here(whole.logits), loss }
        });
        let x = if stage.received.is_empty() { stage.value(whole.x) } else { None };
        let (received, sent) = (values(&stage.received), values(&stage.sent));
        let parameters = stage.parameters.iter().map(|&number| whole.parameters[number].clone()).collect();
        let states = stage.states.iter().map(|&number| whole.states[number].clone()).collect();
        let (crossings, mut graph) = ((stage.received, stage.sent), stage.graph);
        let gradients = match mode {
            Mode::Train => Some(StageGradients::add(&mut graph, head, &crossings.0, &crossings.1)?),
            Mode::Eval => None,
        };
        Ok(Self { graph, parameters, states, pieces: None, x, head, received, sent, gradients })
    }

    /// What a plan of this stage has to provide: what is sent on, logits and loss, and, for training, every gradient.
    pub fn wanted(&self, bucket_bytes_max: usize) -> Wanted {
        let head = self.head.map(|head| [head.logits, head.loss]).into_iter().flatten();
        let outputs = self.sent.iter().copied().chain(head).collect();
        let (mut gradients, mut input_gradients) = (Vec::new(), Vec::new());
        if let Some(found) = &self.gradients {
            gradients = self.graph.parameters().iter().map(|&parameter| found.of.of(parameter)).collect();
            input_gradients = found.leaving.iter().copied().flatten().flatten().collect();
        }
        let moments_from = MOMENTS_FROM;
        Wanted { outputs, input_gradients, gradients, bucket_bytes_max, moments_from, ..Wanted::default() }
    }

    /// Bytes of everything that goes to the stage behind, for one micro-batch.
    pub fn sent_bytes(&self) -> usize {
        self.sent.iter().map(|&value| self.graph.info(value).bytes()).sum()
    }

    /// The same with what comes from the stage before.
    pub fn crossing_bytes(&self) -> usize {
        self.sent_bytes() + self.received.iter().map(|&value| self.graph.info(value).bytes()).sum::<usize>()
    }
}

impl StageGradients {
    /// Appends the backward pass.
    pub(crate) fn add(
        graph: &mut Graph,
        head: Option<Head>,
        received: &[Crossing],
        sent: &[Crossing],
    ) -> Result<Self, GraphError> {
        let learned = |crossings: &[Crossing]| {
            crossings.iter().filter(|crossing| crossing.has_gradient).map(|crossing| crossing.value).collect::<Vec<_>>()
        };
        // The loss comes first, so that its seed has the name that it has in a whole network.
        let roots: Vec<Value> = head.map(|head| head.loss).into_iter().chain(learned(sent)).collect();
        let (seeds, of) = gradient::of_roots(graph, &roots, &learned(received))?;
        let mut seeds = seeds.into_iter();
        let seed = head.and_then(|_| seeds.next());
        let arriving = sent.iter().map(|crossing| if crossing.has_gradient { seeds.next() } else { None }).collect();
        let leaving = received.iter().map(|crossing| crossing.has_gradient.then(|| of.of(crossing.value))).collect();
        Ok(Self { seed, arriving, leaving, of })
    }
}
