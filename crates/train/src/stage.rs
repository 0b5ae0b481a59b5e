//! Which part of a model a replica computes: all of it, one stage of a pipeline, or a part of every layer.

pub mod parts;
pub mod plan;

use std::ops::Range;

use paceline_nn::{Mode, Model, Network, Parameter, PartForm, PartPieces, StageNetwork, StagePieces, State};
use paceline_parallel::split::StageTimes;
use paceline_tensor::execute::Profile;
use paceline_tensor::part::{PartTensor, Piece};
use paceline_tensor::{GraphError, Plan, Store, Value};

use crate::replica::ReplicaOptions;

/// A model, or one stage of it.
#[derive(Clone, Copy)]
pub struct ModelStage<'a> {
    /// The whole model.
    pub model: &'a dyn Model,
    /// The layers behind which it is cut; none if it is whole.
    pub cuts: &'a [String],
    /// Which of the stages.
    pub number: usize,
    /// What is computed of every layer; none if all is.
    pub part: Option<&'a PartForm>,
}

impl<'a> ModelStage<'a> {
    /// All of a model.
    pub const fn whole(model: &'a dyn Model) -> Self {
        Self { model, cuts: &[], number: 0, part: None }
    }

    /// The same with so much of every layer.
    #[must_use]
    pub const fn in_parts(self, part: Option<&'a PartForm>) -> Self {
        Self { part, ..self }
    }

    /// The network of this stage for so many samples.
    ///
    /// # Errors
    /// When a layer does not fit, or the model cannot be split so; the error names it.
    pub fn network(&self, mode: Mode, samples: usize, options: &ReplicaOptions) -> Result<StageNetwork, GraphError> {
        let ReplicaOptions { input, classes, smoothing, .. } = *options;
        let smoothing = if mode == Mode::Train { smoothing } else { 0.0 };
        let data = (input, classes, smoothing);
        if let Some(form) = self.part {
            return StageNetwork::part(self.model, mode, samples, data, form);
        }
        let mut stages = StageNetwork::all(self.model, mode, samples, data, self.cuts)?;
        Ok(stages.swap_remove(self.number))
    }

    /// What the tensors of the whole model are, if this is not all of it.
    ///
    /// # Errors
    /// As [`ModelStage::network`].
    pub fn inventory(&self, options: &ReplicaOptions) -> Result<Option<WholeModel>, GraphError> {
        let ReplicaOptions { input, classes, .. } = *options;
        let data = (input, classes, 0.0);
        let whole = Network::without_gradients(self.model, Mode::Eval, 1, input, classes, 0.0)?;
        let ranks = match self.part {
            Some(form) => form.pieces(self.model, input, classes)?,
            None if self.cuts.is_empty() => return Ok(None),
            None => {
                let stages = StageNetwork::all(self.model, Mode::Eval, 1, data, self.cuts)?;
                stages.iter().map(|stage| pieces_of(stage, &whole)).collect()
            }
        };
        let own = self.part.map_or(self.number, |form| form.own);
        let tensors = |count: usize, of: fn(&PartPieces) -> &Vec<Piece>| {
            let mut found: Vec<WholeTensor> = Vec::with_capacity(count);
            for index in 0..count {
                let number = found.iter().filter(|tensor| tensor.own.is_some()).count();
                let pieces = ranks.iter().map(|rank| of(rank)[index].clone());
                found.push(WholeTensor::of(pieces.collect(), (own, number)));
            }
            found
        };
        Ok(Some(WholeModel {
            own_rank: own,
            parameter_tensors: tensors(whole.parameters.len(), |rank| &rank.parameters),
            state_tensors: tensors(whole.states.len(), |rank| &rank.states),
            parameters: whole.parameters,
            states: whole.states,
        }))
    }
}

/// What a stage has of the tensors of the whole model: all of some of them.
fn pieces_of(stage: &StageNetwork, whole: &Network) -> PartPieces {
    let piece = |has: bool| if has { Piece::Whole } else { Piece::Absent };
    let has_parameter = |name: &str| stage.parameters.iter().any(|own| own.name == name);
    let has_state = |name: &str| stage.states.iter().any(|own| own.name == name);
    PartPieces {
        parameters: whole.parameters.iter().map(|one| piece(has_parameter(&one.name))).collect(),
        states: whole.states.iter().map(|one| piece(has_state(&one.name))).collect(),
    }
}

/// The tensors of a model of which a replica has some.
#[derive(Debug)]
pub struct WholeModel {
    /// All parameters, in the order of files.
    pub parameters: Vec<Parameter>,
    /// All states.
    pub states: Vec<State>,
    /// The number of this rank among those that have the model together.
    pub own_rank: usize,
    /// Who has what of each parameter.
    parameter_tensors: Vec<WholeTensor>,
    /// And of each state.
    state_tensors: Vec<WholeTensor>,
}

/// Who has what of one tensor of a whole model.
#[derive(Debug)]
pub struct WholeTensor {
    /// Its number in this replica and what that has of it, if it has any.
    pub own: Option<(usize, Piece)>,
    /// The pieces that make it, each with the rank that gives it to a file: the first that has all of it, or all that have some.
    pub sources: Vec<(usize, Piece)>,
    /// Whether all ranks have all of it.
    is_everybodys: bool,
}

impl WholeTensor {
    /// Given what each rank has of it, and which rank this is, with the number that the tensor would have there.
    fn of(pieces: Vec<Piece>, (own, number): (usize, usize)) -> Self {
        let is_everybodys = pieces.iter().all(|piece| *piece == Piece::Whole);
        let held = Some(pieces[own].clone()).filter(|piece| *piece != Piece::Absent);
        let mut sources: Vec<_> = pieces.into_iter().enumerate().filter(|(_, piece)| *piece != Piece::Absent).collect();
        if let Some(whole) = sources.iter().position(|(_, piece)| *piece == Piece::Whole) {
            sources = vec![sources.swap_remove(whole)];
        }
        Self { own: held.map(|piece| (number, piece)), sources, is_everybodys }
    }
}

/// One of the tensors that a checkpoint holds, by its number in the whole model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensor {
    /// A parameter.
    Parameter(usize),
    /// A state.
    State(usize),
    /// A buffer of the optimizer for a parameter.
    Optimizer {
        /// Which buffer.
        slot: usize,
        /// The parameter.
        index: usize,
    },
}

impl WholeModel {
    /// How many elements a tensor has.
    pub fn elements(&self, tensor: Tensor) -> usize {
        match tensor {
            Tensor::State(index) => self.states[index].shape.elements(),
            Tensor::Parameter(index) | Tensor::Optimizer { index, .. } => self.parameters[index].shape.elements(),
        }
    }

    /// Who has what of a tensor.
    pub fn tensor(&self, tensor: Tensor) -> &WholeTensor {
        match tensor {
            Tensor::State(index) => &self.state_tensors[index],
            Tensor::Parameter(index) | Tensor::Optimizer { index, .. } => &self.parameter_tensors[index],
        }
    }

    /// Its number in this replica and what that has of it, if it has any.
    pub fn own(&self, tensor: Tensor) -> Option<&(usize, Piece)> {
        self.tensor(tensor).own.as_ref()
    }

    /// Whether this rank gives a tensor, or what it has of it, to files: where several have it, one does.
    pub fn gives(&self, tensor: Tensor) -> bool {
        self.tensor(tensor).sources.iter().any(|(rank, _)| *rank == self.own_rank)
    }

    /// Holds what this rank has to what its network has.
    ///
    /// # Panics
    /// When they differ: a bug.
    pub fn check_own(&self, pieces: &StagePieces) {
        let of = |tensors: &[WholeTensor]| {
            let own = tensors.iter().enumerate().filter_map(|(whole, tensor)| Some((whole, tensor.own.clone()?.1)));
            own.map(|(whole, piece)| PartTensor { whole, piece }).collect()
        };
        let own = StagePieces { parameters: of(&self.parameter_tensors), states: of(&self.state_tensors) };
        assert_eq!(own, *pieces, "a part has what its worker's inventory says");
    }

    /// The parameters and states of which all ranks have all, in the order of files.
    pub fn everybodys(&self) -> Vec<Tensor> {
        let parameters = (0..self.parameters.len()).map(Tensor::Parameter);
        let all = parameters.chain((0..self.states.len()).map(Tensor::State));
        all.filter(|&tensor| self.tensor(tensor).is_everybodys).collect()
    }

    /// Which of this replica's parameters it counts where all ranks together count each once.
    pub fn counted(&self) -> Vec<bool> {
        let all = (0..self.parameters.len()).map(Tensor::Parameter);
        let mut counted: Vec<_> = all.filter_map(|one| Some((self.own(one)?.0, self.gives(one)))).collect();
        counted.sort_unstable();
        counted.into_iter().map(|(_, counts)| counts).collect()
    }

    /// What a tensor's message is marked with: another for each.
    pub fn tag(&self, tensor: Tensor) -> u64 {
        let (parameters, states) = (self.parameters.len(), self.states.len());
        (match tensor {
            Tensor::Parameter(index) => index,
            Tensor::State(index) => parameters + index,
            Tensor::Optimizer { slot, index } => parameters + states + slot * parameters + index,
        }) as u64
    }
}

/// What the parameters and states of a network are, as they are there: of a part, with the shape that it has of them.
pub(crate) fn tensors(network: &StageNetwork) -> (Vec<Parameter>, Vec<State>) {
    let StageNetwork { graph, parameters, states, .. } = network;
    let shape = |value: &Value| graph.shape(*value).clone();
    let parameters = parameters.iter().zip(graph.parameters());
    let states = states.iter().zip(graph.states());
    (
        parameters.map(|(whole, value)| Parameter { shape: shape(value), ..whole.clone() }).collect(),
        states.map(|(whole, value)| State { shape: shape(value), ..whole.clone() }).collect(),
    )
}

/// The number of a tensor in a replica and what that has of it, if it has any; one without others has all of the model.
pub(crate) fn held(whole: Option<&WholeModel>, tensor: Tensor) -> Option<(usize, Piece)> {
    let (Tensor::Parameter(number) | Tensor::State(number) | Tensor::Optimizer { index: number, .. }) = tensor;
    whole.map_or(Some((number, Piece::Whole)), |whole| whole.own(tensor).cloned())
}

/// Begins a replica's parameters as those of the whole model begin.
pub(crate) fn start(whole: Option<&WholeModel>, parameters: &[Parameter], seed: u64, store: &mut Store) {
    let mut all = Vec::new();
    let whole_parameters = whole.map_or(parameters, |whole| &whole.parameters);
    for (index, Parameter { init, name, shape, .. }) in whole_parameters.iter().enumerate() {
        match held(whole, Tensor::Parameter(index)) {
            None => {}
            Some((number, Piece::Whole)) => init.fill(seed, name, shape, store.parameter_mut(number)),
            Some((number, piece)) => {
                all.resize(shape.elements(), 0.0);
                init.fill(seed, name, shape, &mut all);
                piece.take(&all, store.parameter_mut(number));
            }
        }
    }
}

/// How long a stage's passes took, of what was measured node by node. Gradients that a plan does not separate count as those of weights.
pub(crate) fn times(plan: &Plan, profile: &Profile) -> StageTimes {
    // The sum of no numbers is −0.
    let sum = |nodes: Range<usize>| 0.0 + profile.seconds[nodes].iter().sum::<f64>();
    let backward = plan.forward_nodes()..plan.graph().nodes().len();
    let weights = if plan.weights_are_last() { plan.weight_gradient_nodes() } else { backward };
    StageTimes {
        forward_s: sum(0..plan.forward_nodes()),
        inputs_s: sum(plan.input_gradient_nodes()),
        weights_s: sum(weights),
    }
}
