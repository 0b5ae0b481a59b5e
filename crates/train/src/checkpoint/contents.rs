//! What goes into a checkpoint, as it is in a replica now or as it was when a copy was taken: the copy can be written while the replica
//! trains on.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use paceline_comm::CommError;
use paceline_nn::weights::{self, Inventory, Slot, WeightsError};
use paceline_nn::{ForeignLayout, Init, Parameter, State};
use paceline_parallel::stage::StageLinks;
use paceline_system::checksum::Checksum;
use paceline_system::disk::{Disk, DiskError};
use paceline_system::memory::{self, OutOfMemory};
use paceline_tensor::plan::Layout;
use serde::Serialize;

use super::manifest::{MANIFEST, Manifest};
use super::{CARD_KEY, Card, POSITION_KEY, Position, STATE, WEIGHTS};
use crate::engine::Weights;
use crate::replica::Replica;
use crate::stage::{Tensor, WholeModel};

/// What is written beside the tensors.
#[derive(Clone, Debug)]
pub struct Label {
    /// The run's id.
    pub run: String,
    /// Where the run stands.
    pub position: Position,
    /// What the weights are for.
    pub card: Card,
    /// Whether they are the best so far.
    pub best: bool,
    /// How many of the last checkpoints are kept.
    pub keep: usize,
}

/// The tensors of a checkpoint.
#[derive(Debug)]
pub struct Contents<'a> {
    parameters: &'a [Parameter],
    states: &'a [State],
    layout: &'a Layout,
    states_layout: &'a Layout,
    weights: &'a [f32],
    kept: &'a [f32],
    optimizer: Vec<&'a [f32]>,
    /// Of a stage: the whole model, and how the tensors of other stages come.
    elsewhere: Option<(&'a WholeModel, &'a Stages<'a>)>,
}

/// The other stages, whose tensors are collected one after the other while the file is written.
#[derive(Debug)]
pub struct Stages<'a> {
    links: RefCell<&'a mut StageLinks>,
    failed: RefCell<Option<CommError>>,
}

impl<'a> Stages<'a> {
    /// To be collected over these links.
    pub fn new(links: &'a mut StageLinks) -> Self {
        Self { links: RefCell::new(links), failed: RefCell::default() }
    }

    /// What went wrong meanwhile: then what was written is not to be used.
    pub fn failure(&self) -> Option<CommError> {
        self.failed.take()
    }

    /// Takes a tensor from the stage that has it.
    fn collect(&self, stage: usize, tag: u64, elements: usize) -> Vec<f32> {
        let mut tensor = vec![0.0; elements];
        if self.failed.borrow().is_none() {
            let collected = self.links.borrow_mut().collect(stage, tag, &mut tensor);
            *self.failed.borrow_mut() = collected.err();
        }
        tensor
    }
}

/// Gives a stage's tensors to the one that writes the files of a checkpoint, in the order in which it wants them.
///
/// # Errors
/// When that one, or the way to it, has failed.
pub fn hand_in(replica: &Replica, links: &mut StageLinks) -> Result<(), CommError> {
    let (Some(whole), Weights { store, optimizer }) = (&replica.whole, replica.engine.weights()) else { return Ok(()) };
    let own = |numbers: &[Option<usize>]| {
        numbers.iter().enumerate().filter_map(|(index, own)| Some((index, (*own)?))).collect::<Vec<_>>()
    };
    let parameters = own(&whole.own_parameters);
    for &(index, own) in &parameters {
        links.hand_in(whole.tag(Tensor::Parameter(index)), store.parameter(own))?;
    }
    for (index, own) in own(&whole.own_states) {
        links.hand_in(whole.tag(Tensor::State(index)), store.state(own))?;
    }
    for (slot, buffer) in optimizer.iter().enumerate() {
        for &(index, own) in &parameters {
            links.hand_in(whole.tag(Tensor::Optimizer { slot, index }), &buffer[store.layout().range(own)])?;
        }
    }
    Ok(())
}

impl<'a> Contents<'a> {
    /// As they are now, in a stage and in the others.
    pub fn of_stages(replica: &'a Replica, stages: &'a Stages<'a>) -> Self {
        Self { elsewhere: replica.whole.as_ref().map(|whole| (whole, stages)), ..Self::of(replica) }
    }

    /// As they are now.
    pub fn of(replica: &'a Replica) -> Self {
        Self {
            parameters: &replica.parameters,
            states: &replica.states,
            layout: replica.store().layout(),
            states_layout: replica.store().states_layout(),
            weights: &replica.store().parameters,
            kept: &replica.store().states,
            optimizer: replica.engine.weights().optimizer.iter().map(|slot| &slot[..]).collect(),
            elsewhere: None,
        }
    }

    /// All parameters and states, in the order of files.
    fn inventory(&self) -> Inventory<'a> {
        match self.elsewhere {
            Some((whole, _)) => Inventory { parameters: &whole.parameters, states: &whole.states },
            None => Inventory { parameters: self.parameters, states: self.states },
        }
    }

    /// What belongs to a parameter, of a buffer that holds a number for each element: by its number among all.
    fn parameter(&self, index: usize, tensor: Tensor, buffer: &'a [f32]) -> Cow<'a, [f32]> {
        match self.elsewhere {
            None => Cow::Borrowed(&buffer[self.layout.range(index)]),
            Some((whole, stages)) => match whole.own_parameters[index] {
                Some(own) => Cow::Borrowed(&buffer[self.layout.range(own)]),
                None => {
                    let elements = whole.parameters[index].shape.elements();
                    Cow::Owned(stages.collect(whole.parameter_stages[index], whole.tag(tensor), elements))
                }
            },
        }
    }

    /// A state, by its number among all.
    fn state(&self, index: usize) -> Cow<'a, [f32]> {
        match self.elsewhere {
            None => Cow::Borrowed(&self.kept[self.states_layout.range(index)]),
            Some((whole, stages)) => match whole.own_states[index] {
                Some(own) => Cow::Borrowed(&self.kept[self.states_layout.range(own)]),
                None => {
                    let (stage, elements) = (whole.state_stages[index], whole.states[index].shape.elements());
                    Cow::Owned(stages.collect(stage, whole.tag(Tensor::State(index)), elements))
                }
            },
        }
    }

    /// Writes the files of a checkpoint into a new folder, the manifest last.
    pub fn write(&self, disk: &Disk, folder: &Path, label: &Label) -> Result<(), DiskError> {
        disk.remove(folder)?;
        disk.create_dir_inside(folder)?;
        let weights = self.write_weights(disk, &folder.join(WEIGHTS), &label.card)?;
        let state = self.write_state(disk, &folder.join(STATE), &label.position)?;
        let manifest = Manifest::new(&label.run, label.position.step, &[(WEIGHTS, weights), (STATE, state)]);
        disk.write(&folder.join(MANIFEST), manifest.to_text().as_bytes())
    }

    fn write_weights(&self, disk: &Disk, path: &Path, card: &Card) -> Result<Checksum, DiskError> {
        let values = |slot: Slot| match slot {
            Slot::Parameter(index) => self.parameter(index, Tensor::Parameter(index), self.weights),
            Slot::State(index) => self.state(index),
        };
        let metadata = BTreeMap::from([(CARD_KEY.to_owned(), to_json(card)), ("format".to_owned(), "pt".to_owned())]);
        disk_only(weights::write(disk, path, self.inventory(), &values, &metadata))
    }

    fn write_state(&self, disk: &Disk, path: &Path, position: &Position) -> Result<Checksum, DiskError> {
        let parameters = self.inventory().parameters;
        let slots = optimizer_inventory(parameters, self.optimizer.len());
        let inventory = Inventory { parameters: &slots, states: &[] };
        let count = parameters.len();
        let values = |slot: Slot| {
            let Slot::Parameter(index) = slot else { unreachable!("the inventory has no states") };
            let (slot, index) = (index / count, index % count);
            self.parameter(index, Tensor::Optimizer { slot, index }, self.optimizer[slot])
        };
        let metadata = BTreeMap::from([(POSITION_KEY.to_owned(), to_json(position))]);
        disk_only(weights::write(disk, path, inventory, &values, &metadata))
    }
}

/// A copy of what goes into a checkpoint: as large as the weights and the optimizer together. It is taken once and filled again.
#[derive(Debug)]
pub struct Snapshot {
    parameters: Vec<Parameter>,
    states: Vec<State>,
    layout: Layout,
    states_layout: Layout,
    weights: Vec<f32>,
    kept: Vec<f32>,
    optimizer: Vec<Vec<f32>>,
}

impl Snapshot {
    /// Takes the memory and fills it.
    ///
    /// # Errors
    /// When the system refuses the memory.
    pub fn new(replica: &Replica) -> Result<Self, OutOfMemory> {
        let copy = |numbers: &[f32]| {
            let mut copy = Vec::new();
            memory::reserve(&mut copy, numbers.len(), "the copy that is saved beside training")?;
            copy.extend_from_slice(numbers);
            Ok(copy)
        };
        Ok(Self {
            parameters: replica.parameters.clone(),
            states: replica.states.clone(),
            layout: replica.store().layout().clone(),
            states_layout: replica.store().states_layout().clone(),
            weights: copy(&replica.store().parameters)?,
            kept: copy(&replica.store().states)?,
            optimizer: replica.engine.weights().optimizer.iter().map(|slot| copy(slot)).collect::<Result<_, _>>()?,
        })
    }

    /// Fills it again, from the same replica.
    pub fn fill(&mut self, replica: &Replica) {
        self.weights.copy_from_slice(&replica.store().parameters);
        self.kept.copy_from_slice(&replica.store().states);
        for (copy, slot) in self.optimizer.iter_mut().zip(&replica.engine.weights().optimizer) {
            copy.copy_from_slice(slot);
        }
    }

    /// The tensors as they were.
    pub fn contents(&self) -> Contents<'_> {
        Contents {
            parameters: &self.parameters,
            states: &self.states,
            layout: &self.layout,
            states_layout: &self.states_layout,
            weights: &self.weights,
            kept: &self.kept,
            optimizer: self.optimizer.iter().map(Vec::as_slice).collect(),
            elsewhere: None,
        }
    }
}

/// The optimizer's buffers as tensors with names: slot by slot, in the order of the parameters.
pub fn optimizer_inventory(parameters: &[Parameter], slots: usize) -> Vec<Parameter> {
    let tensor = |slot: usize, parameter: &Parameter| Parameter {
        name: format!("slot{slot}.{}", parameter.name),
        shape: parameter.shape.clone(),
        init: Init::Constant(0.0),
        decay: false,
        layout: ForeignLayout::Same,
    };
    (0..slots).flat_map(|slot| parameters.iter().map(move |parameter| tensor(slot, parameter))).collect()
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("positions and cards hold nothing that JSON cannot")
}

fn disk_only(result: Result<Checksum, WeightsError>) -> Result<Checksum, DiskError> {
    match result {
        Ok(sum) => Ok(sum),
        Err(WeightsError::Disk(error)) => Err(error),
        Err(error) => unreachable!("writing weights only fails on the disk: {error}"),
    }
}
