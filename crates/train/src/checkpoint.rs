//! Checkpoints: `checkpoints/step-00000120/` with `weights.safetensors` (PyTorch's names and layouts, and what is
//! needed to use them) and `state.safetensors` (optimizer state and the position in the run).
//!
//! The folder is written under a temporary name, each file synced, and then renamed: a checkpoint is there whole or
//! not at all. There is no random state to save, because randomness is a function of the seed and the step.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use paceline_data::augment::Op;
use paceline_nn::weights::{self, Inventory, Slot, WeightsError};
use paceline_nn::{ForeignLayout, Init, Input, Parameter};
use paceline_system::disk::{Disk, DiskError};
use serde::{Deserialize, Serialize};

use crate::config::SIDE_MAX;
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::replica::Replica;

const WEIGHTS: &str = "weights.safetensors";
const STATE: &str = "state.safetensors";
const BEST: &str = "best.txt";
/// Keys of the files' metadata.
const POSITION_KEY: &str = "paceline.position";
const CARD_KEY: &str = "paceline.model";

/// Where a run stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Updates done.
    pub step: u64,
    /// The current epoch's sums so far.
    pub tally: Tally,
    /// The current epoch's training seconds so far.
    pub epoch_s: f64,
    /// The current epoch's seconds of waiting for data so far.
    pub data_wait_s: f64,
    /// The best validation accuracy so far.
    pub best_top1: Option<f64>,
    /// The step whose checkpoint reached it.
    pub best_step: Option<u64>,
    /// Samples in the training set: another number would be another order.
    pub samples: u64,
    /// Epochs since it rose.
    pub stale_epochs: u64,
}

/// What somebody who finds a weights file needs to use it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// The model's name.
    pub model: String,
    /// Height, width and channels of the images, or the length of token sequences alone.
    pub input: Vec<usize>,
    /// The classes' names, or the vocabulary.
    pub class_names: Vec<String>,
    /// What evaluation does to an image before the model sees it; empty for text.
    pub preprocess: Vec<Op>,
    /// Updates made.
    pub step: u64,
}

/// The checkpoints of one run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    disk: Disk,
    folder: PathBuf,
}

impl Checkpoints {
    /// Those in a folder.
    pub fn new(disk: &Disk, folder: PathBuf) -> Self {
        Self { disk: disk.clone(), folder }
    }

    /// Saves, then removes what is neither among the last `keep` nor the best. Returns the checkpoint's folder.
    ///
    /// # Errors
    /// When the disk refuses; earlier checkpoints are untouched then.
    pub fn save(
        &self,
        replica: &Replica,
        position: &Position,
        card: &Card,
        best: bool,
        keep: usize,
    ) -> Result<PathBuf, DiskError> {
        let name = folder_name(position.step);
        let (target, part) = (self.folder.join(&name), self.folder.join(format!(".{name}.part")));
        let written = self.write(&part, replica, position, card);
        if let Err(error) = written {
            // Best effort: the first failure is the one to tell.
            let _ = self.disk.remove(&part);
            return Err(error);
        }
        self.publish(&part, &target)?;
        if best {
            self.mark_best(position.step)?;
        }
        self.prune(keep)?;
        Ok(target)
    }

    /// Marks a step's checkpoint as the best. A resumed run does it again, in case the mark was lost in a crash.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn mark_best(&self, step: u64) -> Result<(), DiskError> {
        let path = self.folder.join(folder_name(step));
        if self.disk.is_dir(&path) && self.best() != Some(path) {
            self.disk.write(&self.folder.join(BEST), folder_name(step).as_bytes())?;
        }
        Ok(())
    }

    /// Gives a finished folder its name. A step that is saved twice, before and after its epoch's evaluation, has the same
    /// weights both times, so its files can be replaced one by one: the folder is whole at every moment.
    fn publish(&self, part: &Path, target: &Path) -> Result<(), DiskError> {
        if !self.disk.is_dir(target) {
            return self.disk.rename(part, target);
        }
        for name in [WEIGHTS, STATE] {
            self.disk.rename(&part.join(name), &target.join(name))?;
        }
        self.disk.remove(part)
    }

    fn write(&self, part: &Path, replica: &Replica, position: &Position, card: &Card) -> Result<(), DiskError> {
        self.disk.remove(part)?;
        self.disk.create_dir(part)?;
        let inventory = Inventory { parameters: &replica.parameters, states: &replica.states };
        let values = |slot: Slot| match slot {
            Slot::Parameter(index) => Cow::Borrowed(replica.store.parameter(index)),
            Slot::State(index) => Cow::Borrowed(replica.store.state(index)),
        };
        let metadata = BTreeMap::from([(CARD_KEY.to_owned(), to_json(card)), ("format".to_owned(), "pt".to_owned())]);
        disk_only(weights::write(&self.disk, &part.join(WEIGHTS), inventory, &values, &metadata))?;
        let slots = optimizer_inventory(replica);
        let inventory = Inventory { parameters: &slots, states: &[] };
        let count = replica.parameters.len();
        let values = |slot: Slot| {
            let Slot::Parameter(index) = slot else { unreachable!("the inventory has no states") };
            Cow::Borrowed(&replica.optimizer_state[index / count][replica.store.layout().range(index % count)])
        };
        let metadata = BTreeMap::from([(POSITION_KEY.to_owned(), to_json(position))]);
        disk_only(weights::write(&self.disk, &part.join(STATE), inventory, &values, &metadata))
    }

    /// Checkpoints, oldest first, with their steps.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>, DiskError> {
        let entries = self.disk.list(&self.folder)?.into_iter();
        let step = |path: &Path| path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok();
        let mut found: Vec<(u64, PathBuf)> = entries.filter_map(|path| Some((step(&path)?, path))).collect();
        found.sort();
        Ok(found)
    }

    /// The newest checkpoint.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn last(&self) -> Result<Option<PathBuf>, DiskError> {
        Ok(self.list()?.pop().map(|(_, path)| path))
    }

    /// The checkpoint with the best validation accuracy, if one was marked.
    pub fn best(&self) -> Option<PathBuf> {
        let name = self.disk.read_text(&self.folder.join(BEST)).ok()?;
        Some(self.folder.join(name.trim())).filter(|path| self.disk.is_dir(path))
    }

    /// A sentence on what is safe: for errors.
    pub fn survivor(&self) -> String {
        match self.last() {
            Ok(Some(path)) => format!("The last good checkpoint is {}", path.display()),
            _ => "There is no checkpoint yet".into(),
        }
    }

    fn prune(&self, keep: usize) -> Result<(), DiskError> {
        let (all, best) = (self.list()?, self.best());
        let old = all.len().saturating_sub(keep);
        for (step, path) in all[..old].iter().filter(|(_, path)| Some(path) != best.as_ref()) {
            // Under a name that `list` does not know, so that a crash half-way leaves nothing that looks whole.
            let doomed = self.folder.join(format!(".{}.old", folder_name(*step)));
            self.disk.rename(path, &doomed)?;
            self.disk.remove(&doomed)?;
        }
        Ok(())
    }

    /// Loads a checkpoint into a replica.
    ///
    /// # Errors
    /// When it is damaged or of another model; the replica may then hold a part of it and must not be used.
    pub fn load(&self, path: &Path, replica: &mut Replica) -> Result<Position, TrainError> {
        load_weights(&self.disk, &path.join(WEIGHTS), replica, &[]).map_err(|error| not_resumable(path, error))?;
        let slots = optimizer_inventory(replica);
        let state = path.join(STATE);
        let loaded = weights::read(&self.disk, &state, Inventory { parameters: &slots, states: &[] }, &[])
            .map_err(|error| not_resumable(path, error.into()))?;
        let count = replica.parameters.len();
        for (index, data) in loaded.parameters.into_iter().enumerate() {
            let range = replica.store.layout().range(index % count);
            if let Some(data) = data {
                replica.optimizer_state[index / count][range].copy_from_slice(&data);
            }
        }
        let position = loaded.metadata.get(POSITION_KEY).and_then(|text| serde_json::from_str(text).ok());
        position.ok_or_else(|| {
            TrainError::Refused(format!(
                "{} does not say where the run stood; remove {} to resume from the one before",
                state.display(),
                path.display()
            ))
        })
    }
}

/// The sentence for a checkpoint that a run cannot go on from: it is another model's, or damaged.
fn not_resumable(path: &Path, error: TrainError) -> TrainError {
    let path = path.display();
    TrainError::Refused(match error {
        TrainError::Weights(WeightsError::Mismatch { mismatch, .. }) => {
            let count = mismatch.missing.len() + mismatch.unexpected.len() + mismatch.shapes.len();
            format!(
                "{path} is not of the model and optimizer that the run's config.toml names ({count} tensors differ); \
                 put that file back as it was, or start a new run with another --run"
            )
        }
        other => format!("{other}; remove {path} to resume from the checkpoint before it"),
    })
}

fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

impl Card {
    /// The model's input.
    ///
    /// # Errors
    /// When the card does not describe one, or contradicts itself: it came from a file.
    pub fn input(&self) -> Result<Input, TrainError> {
        let refuse =
            |what: &str| Err(TrainError::Refused(format!("the weights file is for {}, but {what}", self.model)));
        if self.class_names.is_empty() {
            return refuse("it names no classes");
        }
        match *self.input.as_slice() {
            [sequence] if sequence > 0 => Ok(Input::Tokens { sequence }),
            [height, width, channels] if (1..=SIDE_MAX).contains(&height) && (1..=SIDE_MAX).contains(&width) => {
                let channels_fit = |op: &Op| !matches!(op, Op::Normalise { mean, .. } if mean.len() != channels);
                if self.preprocess.iter().all(channels_fit) && (1..=4).contains(&channels) {
                    Ok(Input::Image { size: [height, width], channels })
                } else {
                    refuse("its means are not those of its channels")
                }
            }
            _ => refuse("it describes an input that is neither image nor text"),
        }
    }
}

/// Loads a weights file into a replica; tensors whose names start with one of `except` keep their start. Returns those.
///
/// # Errors
/// When the file is damaged or does not fit.
pub fn load_weights(
    disk: &Disk,
    path: &Path,
    replica: &mut Replica,
    except: &[&str],
) -> Result<Vec<String>, TrainError> {
    let inventory = Inventory { parameters: &replica.parameters, states: &replica.states };
    let loaded = weights::read(disk, path, inventory, except)?;
    for (index, data) in loaded.parameters.into_iter().enumerate() {
        if let Some(data) = data {
            replica.store.parameter_mut(index).copy_from_slice(&data);
        }
    }
    for (index, data) in loaded.states.into_iter().enumerate() {
        if let Some(data) = data {
            replica.store.state_mut(index).copy_from_slice(&data);
        }
    }
    replica.changed();
    Ok(loaded.left_out)
}

/// The weights file of a path that names a run, a checkpoint or the file itself: of a run the best checkpoint, or the
/// last if none was marked.
///
/// # Errors
/// When there is none.
pub fn find_weights(disk: &Disk, path: &Path) -> Result<PathBuf, TrainError> {
    if !disk.is_dir(path) {
        return if disk.exists(path) { Ok(path.to_owned()) } else { Err(no_weights(path)) };
    }
    if disk.exists(&path.join(WEIGHTS)) {
        return Ok(path.join(WEIGHTS));
    }
    let checkpoints = Checkpoints::new(disk, path.join("checkpoints"));
    let last = || checkpoints.last().ok().flatten();
    checkpoints.best().or_else(last).map(|path| path.join(WEIGHTS)).ok_or_else(|| no_weights(path))
}

fn no_weights(path: &Path) -> TrainError {
    TrainError::Refused(format!(
        "there are no weights at {}; type a run's folder, a checkpoint's, or a .safetensors file",
        path.display()
    ))
}

/// What a weights file written here says of itself.
///
/// # Errors
/// When the file cannot be read, or says nothing.
pub fn read_card(disk: &Disk, path: &Path) -> Result<Card, TrainError> {
    let metadata = weights::read_metadata(disk, path)?;
    let card = metadata.get(CARD_KEY).and_then(|text| serde_json::from_str(text).ok());
    card.ok_or_else(|| {
        TrainError::Refused(format!(
            "{} does not say which model it is for; type a checkpoint of `paceline train`",
            path.display()
        ))
    })
}

/// The optimizer's buffers as tensors with names: slot by slot, in the order of the parameters.
fn optimizer_inventory(replica: &Replica) -> Vec<Parameter> {
    let tensor = |slot: usize, parameter: &Parameter| Parameter {
        name: format!("slot{slot}.{}", parameter.name),
        shape: parameter.shape.clone(),
        init: Init::Constant(0.0),
        decay: false,
        layout: ForeignLayout::Same,
    };
    (0..replica.optimizer_state.len())
        .flat_map(|slot| replica.parameters.iter().map(move |p| tensor(slot, p)))
        .collect()
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("positions and cards hold nothing that JSON cannot")
}

fn disk_only(result: Result<(), WeightsError>) -> Result<(), DiskError> {
    match result {
        Ok(()) => Ok(()),
        Err(WeightsError::Disk(error)) => Err(error),
        Err(error) => unreachable!("writing weights only fails on the disk: {error}"),
    }
}
