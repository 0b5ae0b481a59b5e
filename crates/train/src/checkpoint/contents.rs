//! What goes into a checkpoint, as it is in a replica now or as it was when a copy was taken: the copy can be written while the replica
//! trains on.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;

use paceline_comm::CommError;
use paceline_nn::weights::{self, Inventory, Slot, WeightsError};
use paceline_nn::{ForeignLayout, Init, Parameter, State};
use paceline_parallel::siblings::Siblings;
use paceline_system::checksum::Checksum;
use paceline_system::disk::{Disk, DiskError};
use paceline_system::memory::{self, OutOfMemory};
use paceline_tensor::part::Piece;
use paceline_tensor::plan::Layout;
use serde::Serialize;

use super::manifest::{MANIFEST, Manifest};
use super::{CARD_KEY, Card, POSITION_KEY, Position, STATE, WEIGHTS};
use crate::engine::Weights;
use crate::error::TrainError;
use crate::exchange::Exchange;
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
    /// Of a stage or a part: what it is some of.
    whole: Option<&'a WholeModel>,
    layout: &'a Layout,
    states_layout: &'a Layout,
    weights: &'a [f32],
    state_values: &'a [f32],
    /// And behind it what the agreement keeps: so many slots.
    optimizer: OptimizerState<'a>,
    kept_slots: usize,
    /// Of a stage or a part: the whole model, and how the tensors of the others come.
    elsewhere: Option<(&'a WholeModel, &'a Others<'a>)>,
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

/// The other stages or parts, whose tensors are collected one after the other while the file is written.
#[derive(Debug)]
pub struct Others<'a> {
    links: RefCell<&'a mut Siblings>,
    failed: RefCell<Option<CommError>>,
}

impl<'a> Others<'a> {
    /// To be collected over these links.
    pub fn new(links: &'a mut Siblings) -> Self {
        Self { links: RefCell::new(links), failed: RefCell::default() }
    }

    /// What went wrong meanwhile: then nothing was written.
    pub fn failure(&self) -> Option<CommError> {
        self.failed.take()
    }

    /// Takes what another has of a tensor.
    fn collect(&self, from: usize, tag: u64, elements: usize) -> io::Result<Vec<f32>> {
        let mut tensor = vec![0.0; elements];
        match self.links.borrow_mut().collect(from, tag, &mut tensor) {
            Ok(()) => Ok(tensor),
            Err(error) => {
                let told = io::Error::other(error.to_string());
                *self.failed.borrow_mut() = Some(error);
                Err(told)
            }
        }
    }
}

/// Gives what a stage or a part has to the one that writes the files of a checkpoint, in the order in which it wants it.
///
/// # Errors
/// When that one, or the way to it, has failed.
pub fn hand_in(replica: &mut Replica, links: &mut Siblings) -> Result<(), TrainError> {
    let contents = Contents::of(replica);
    let Some(whole) = contents.whole else { return Ok(()) };
    let parameters = whole.parameters.len();
    let tensors = (0..parameters).map(Tensor::Parameter).chain((0..whole.states.len()).map(Tensor::State));
    let slots = contents.optimizer.slots();
    let state = (0..slots).flat_map(|slot| (0..parameters).map(move |index| Tensor::Optimizer { slot, index }));
    for tensor in tensors.chain(state) {
        let Some(&(own, _)) = whole.own(tensor) else { continue };
        // Where every worker has chunks of the optimizer's state, all of a part's workers gather it, given away or not.
        let data = contents.own(tensor, own).map_err(|error| gathering(&error))?;
        if whole.gives(tensor) {
            links.hand_in(whole.tag(tensor), &data)?;
        }
    }
    Ok(())
}

/// The chunks of other replicas did not come.
fn gathering(error: &io::Error) -> TrainError {
    TrainError::Refused(format!("the optimizer's state could not be gathered: {error}"))
}

impl<'a> Contents<'a> {
    /// As they are now, in a stage or a part and in the others.
    pub fn of_all(replica: &'a mut Replica, others: &'a Others<'a>) -> Self {
        let own = Self::of(replica);
        Self { elsewhere: own.whole.map(|whole| (whole, others)), ..own }
    }

    /// As they are now.
    pub fn of(replica: &'a mut Replica) -> Self {
        let divided = replica.has_shard();
        let (parameters, states, whole, engine, exchange) = replica.for_saving();
        let weights = engine.weights();
        let store = &weights.store;
        Self {
            parameters,
            states,
            whole,
            layout: store.layout(),
            states_layout: store.states_layout(),
            weights: &store.parameters,
            state_values: &store.states,
            optimizer: match divided {
                true => OptimizerState::Divided(weights, RefCell::new(exchange)),
                false => OptimizerState::Here(slots(weights).collect()),
            },
            kept_slots: weights.kept.len(),
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

    /// A tensor by its number among all, from here, from another rank, or put together.
    fn tensor(&self, tensor: Tensor) -> io::Result<Cow<'_, [f32]>> {
        let (Tensor::Parameter(number) | Tensor::State(number) | Tensor::Optimizer { index: number, .. }) = tensor;
        let Some((whole, others)) = self.elsewhere else { return self.own(tensor, number) };
        let (found, tag, elements) = (whole.tensor(tensor), whole.tag(tensor), whole.elements(tensor));
        let own = |from: usize| found.own.as_ref().filter(|_| from == whole.own_rank).map(|&(own, _)| own);
        let get = |from: usize, elements: usize| match own(from) {
            Some(own) => self.own(tensor, own),
            None => others.collect(from, tag, elements).map(Cow::Owned),
        };
        if let [(from, Piece::Whole)] = found.sources[..] {
            return get(from, elements);
        }
        let mut all = vec![0.0; elements];
        for (from, piece) in &found.sources {
            piece.put(&get(*from, piece.elements(elements))?, &mut all);
        }
        Ok(Cow::Owned(all))
    }

    /// A tensor that is here, by its number here.
    fn own(&self, tensor: Tensor, own: usize) -> io::Result<Cow<'_, [f32]>> {
        match tensor {
            Tensor::Parameter(_) => Ok(Cow::Borrowed(&self.weights[self.layout.range(own)])),
            Tensor::State(_) => Ok(Cow::Borrowed(&self.state_values[self.states_layout.range(own)])),
            Tensor::Optimizer { slot, .. } => self.optimizer.tensor(slot, self.layout.range(own)),
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
        let mut values = |slot: Slot| match slot {
            Slot::Parameter(index) => self.tensor(Tensor::Parameter(index)),
            Slot::State(index) => self.tensor(Tensor::State(index)),
        };
        let metadata = BTreeMap::from([(CARD_KEY.to_owned(), to_json(card)), ("format".to_owned(), "pt".to_owned())]);
        disk_only(weights::write_with(disk, path, self.inventory(), &mut values, &metadata))
    }

    fn write_state(&self, disk: &Disk, path: &Path, position: &Position) -> Result<Checksum, DiskError> {
        let parameters = self.inventory().parameters;
        let slots = optimizer_inventory(parameters, self.optimizer.slots());
        let inventory = Inventory { parameters: &slots, states: &[] };
        let count = parameters.len();
        let mut values = |slot: Slot| {
            let Slot::Parameter(index) = slot else { unreachable!("the inventory has no states") };
            self.tensor(Tensor::Optimizer { slot: index / count, index: index % count })
        };
        let position = Position { kept_slots: self.kept_slots, ..position.clone() };
        let metadata = BTreeMap::from([(POSITION_KEY.to_owned(), to_json(&position))]);
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
    state_values: Vec<f32>,
    optimizer: Vec<Vec<f32>>,
    kept_slots: usize,
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
            state_values: copy(&replica.store().states)?,
            optimizer: slots(replica.engine.weights()).map(copy).collect::<Result<_, _>>()?,
            kept_slots: replica.engine.weights().kept.len(),
        })
    }

    /// Fills it again, from the same replica.
    pub fn fill(&mut self, replica: &Replica) {
        self.weights.copy_from_slice(&replica.store().parameters);
        self.state_values.copy_from_slice(&replica.store().states);
        for (copy, slot) in self.optimizer.iter_mut().zip(slots(replica.engine.weights())) {
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
            state_values: &self.state_values,
            optimizer: OptimizerState::Here(self.optimizer.iter().map(Vec::as_slice).collect()),
            kept_slots: self.kept_slots,
            whole: None,
            elsewhere: None,
        }
    }
}

/// The optimizer's buffers, and behind them those of the agreement.
fn slots(weights: &Weights) -> impl Iterator<Item = &[f32]> {
    let Weights { optimizer, kept, .. } = weights;
    optimizer.iter().map(|slot| &slot[..]).chain(kept.iter().map(Vec::as_slice))
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
