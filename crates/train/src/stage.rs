//! Which part of a model a replica computes: all of it, or one stage of a pipeline.

pub mod plan;

use std::ops::Range;

use paceline_nn::{Mode, Model, Network, Parameter, StageNetwork, State};
use paceline_parallel::split::StageTimes;
use paceline_tensor::execute::Profile;
use paceline_tensor::{GraphError, Plan};

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
}

impl<'a> ModelStage<'a> {
    /// All of a model.
    pub const fn whole(model: &'a dyn Model) -> Self {
        Self { model, cuts: &[], number: 0 }
    }

    /// The network of this stage for so many samples.
    ///
    /// # Errors
    /// When a layer does not fit, or the model cannot be cut there; the error names it.
    pub fn network(&self, mode: Mode, samples: usize, options: &ReplicaOptions) -> Result<StageNetwork, GraphError> {
        let ReplicaOptions { input, classes, smoothing, .. } = *options;
        let smoothing = if mode == Mode::Train { smoothing } else { 0.0 };
        let mut stages = StageNetwork::all(self.model, mode, samples, (input, classes, smoothing), self.cuts)?;
        Ok(stages.swap_remove(self.number))
    }

    /// What the tensors of the whole model are, if this is not all of it.
    ///
    /// # Errors
    /// As [`ModelStage::network`].
    pub fn inventory(&self, options: &ReplicaOptions) -> Result<Option<WholeModel>, GraphError> {
        if self.cuts.is_empty() {
            return Ok(None);
        }
        let ReplicaOptions { input, classes, .. } = *options;
        let whole = Network::without_gradients(self.model, Mode::Eval, 1, input, classes, 0.0)?;
        let stages = StageNetwork::all(self.model, Mode::Eval, 1, (input, classes, 0.0), self.cuts)?;
        let owner = |name: &str, names: &dyn Fn(&StageNetwork) -> Vec<String>| {
            stages.iter().position(|stage| names(stage).iter().any(|own| own == name)).unwrap_or(0)
        };
        let parameters = |stage: &StageNetwork| stage.parameters.iter().map(|own| own.name.clone()).collect();
        let states = |stage: &StageNetwork| stage.states.iter().map(|own| own.name.clone()).collect();
        let parameter_stages: Vec<usize> = whole.parameters.iter().map(|one| owner(&one.name, &parameters)).collect();
        let state_stages: Vec<usize> = whole.states.iter().map(|one| owner(&one.name, &states)).collect();
        Ok(Some(WholeModel {
            own_parameters: own(&parameter_stages, self.number),
            own_states: own(&state_stages, self.number),
            parameters: whole.parameters,
            states: whole.states,
            parameter_stages,
            state_stages,
        }))
    }
}

/// The tensors of a model of which a replica has some.
#[derive(Debug)]
pub struct WholeModel {
    /// All parameters, in the order of files.
    pub parameters: Vec<Parameter>,
    /// All states.
    pub states: Vec<State>,
    /// The stage that has each parameter.
    pub parameter_stages: Vec<usize>,
    /// The stage that has each state.
    pub state_stages: Vec<usize>,
    /// The number of each parameter in this replica, if it has it.
    pub own_parameters: Vec<Option<usize>>,
    /// The number of each state in this replica, if it has it.
    pub own_states: Vec<Option<usize>>,
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

impl Tensor {
    /// The number of the parameter or state that it belongs to.
    pub const fn number(self) -> usize {
        match self {
            Self::Parameter(index) | Self::State(index) | Self::Optimizer { index, .. } => index,
        }
    }
}

impl WholeModel {
    /// How many elements a tensor has.
    pub fn elements(&self, tensor: Tensor) -> usize {
        match tensor {
            Tensor::State(index) => self.states[index].shape.elements(),
            Tensor::Parameter(index) | Tensor::Optimizer { index, .. } => self.parameters[index].shape.elements(),
        }
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

/// The numbers that tensors have in one stage, which keeps their order.
fn own(stages: &[usize], number: usize) -> Vec<Option<usize>> {
    let before = |index: usize| stages[..index].iter().filter(|&&stage| stage == number).count();
    stages.iter().enumerate().map(|(index, &stage)| (stage == number).then(|| before(index))).collect()
}
