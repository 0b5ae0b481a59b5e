//! What goes into a checkpoint, as it is in a replica now or as it was when a copy was taken: the copy can be written while the replica
//! trains on.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;

use paceline_nn::weights::{self, Inventory, Slot, WeightsError};
use paceline_nn::{ForeignLayout, Init, Parameter, State};
use paceline_system::checksum::Checksum;
use paceline_system::disk::{Disk, DiskError};
use paceline_system::memory::{self, OutOfMemory};
use paceline_tensor::plan::Layout;
use serde::Serialize;

use super::manifest::{MANIFEST, Manifest};
use super::{CARD_KEY, Card, POSITION_KEY, Position, STATE, WEIGHTS};
use crate::engine::Weights;
use crate::exchange::Exchange;
use crate::replica::Replica;

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
    optimizer: OptimizerState<'a>,
}

/// Where the optimizer's state is.
#[derive(Debug)]
enum OptimizerState<'a> {
    /// Here, slot by slot.
    Here(Vec<&'a [f32]>),
    /// Every replica has its chunks of it: tensors are gathered one at a time, as they are written. All replicas do
    /// so at the same point ([`Replica::give_optimizer`]).
    Divided(&'a Weights, RefCell<&'a mut Exchange>),
}

impl<'a> Contents<'a> {
    /// As they are now.
    pub fn of(replica: &'a mut Replica) -> Self {
        let divided = replica.has_shard();
        let (parameters, states, engine, exchange) = replica.for_saving();
        let weights = engine.weights();
        let store = &weights.store;
        Self {
            parameters,
            states,
            layout: store.layout(),
            states_layout: store.states_layout(),
            weights: &store.parameters,
            kept: &store.states,
            optimizer: match divided {
                true => OptimizerState::Divided(weights, RefCell::new(exchange)),
                false => OptimizerState::Here(weights.optimizer.iter().map(|slot| &slot[..]).collect()),
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
        let inventory = Inventory { parameters: self.parameters, states: self.states };
        let values = |slot: Slot| match slot {
            Slot::Parameter(index) => Cow::Borrowed(&self.weights[self.layout.range(index)]),
            Slot::State(index) => Cow::Borrowed(&self.kept[self.states_layout.range(index)]),
        };
        let metadata = BTreeMap::from([(CARD_KEY.to_owned(), to_json(card)), ("format".to_owned(), "pt".to_owned())]);
        disk_only(weights::write(disk, path, inventory, &values, &metadata))
    }

    fn write_state(&self, disk: &Disk, path: &Path, position: &Position) -> Result<Checksum, DiskError> {
        let slots = optimizer_inventory(self.parameters, self.optimizer.slots());
        let inventory = Inventory { parameters: &slots, states: &[] };
        let count = self.parameters.len();
        let mut values = |slot: Slot| {
            let Slot::Parameter(index) = slot else { unreachable!("the inventory has no states") };
            self.optimizer.tensor(index / count, self.layout.range(index % count))
        };
        let metadata = BTreeMap::from([(POSITION_KEY.to_owned(), to_json(position))]);
        disk_only(weights::write_with(disk, path, inventory, &mut values, &metadata))
    }
}

impl OptimizerState<'_> {
    fn slots(&self) -> usize {
        match self {
            Self::Here(slots) => slots.len(),
            Self::Divided(weights, _) => weights.optimizer.len(),
        }
    }

    /// One tensor's part of a slot.
    fn tensor(&self, slot: usize, elements: Range<usize>) -> io::Result<Cow<'_, [f32]>> {
        match self {
            Self::Here(slots) => Ok(Cow::Borrowed(&slots[slot][elements])),
            Self::Divided(weights, exchange) => {
                let gathered = exchange.borrow_mut().gather_state(weights, (slot, elements));
                gathered.map(Cow::Owned).map_err(io::Error::other)
            }
        }
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
            optimizer: OptimizerState::Here(self.optimizer.iter().map(Vec::as_slice).collect()),
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
