//! Loading a checkpoint to go on from it: its files agree with the manifest and with each other, or nothing is loaded.

use std::path::Path;

use paceline_nn::weights::{self, Inventory, Slot, WeightsError};
use paceline_parallel::Owned;
use paceline_tensor::part::Piece;

use super::card::KEPT_SLOTS_MAX;
use super::checked_weights::cut_out;
use super::contents::optimizer_inventory;
use super::manifest::{Damage, Manifest, read_plain};
use super::{CheckedWeights, Checkpoints, POSITION_KEY, Position, Purpose, STATE, WEIGHTS};
use crate::engine::Weights;
use crate::error::TrainError;
use crate::replica::Replica;
use crate::stage::{self, Tensor};

/// Why a run cannot go on from a checkpoint.
enum Unfit {
    /// It is not what was saved.
    Damaged(String),
    /// It is another model's.
    Refused(String),
}

impl From<Damage> for Unfit {
    fn from(Damage(what): Damage) -> Self {
        Self::Damaged(what)
    }
}

/// Both files of a checkpoint, checked.
struct Files {
    weights: CheckedWeights,
    state: Vec<u8>,
    position: Position,
}

impl Checkpoints {
    /// Loads a checkpoint into a replica.
    ///
    /// # Errors
    /// When it is damaged or of another model; the replica may then hold a part of it and must not be used.
    pub fn load(&self, path: &Path, replica: &mut Replica) -> Result<Position, TrainError> {
        self.load_checked(path, replica).map_err(|unfit| match unfit {
            Unfit::Damaged(what) => TrainError::Damaged { what, offer: self.offer(path, Purpose::Resume) },
            Unfit::Refused(sentence) => TrainError::Refused(sentence),
        })
    }

    /// The id of the run that a checkpoint says it is of; none if it says nothing, as those of earlier versions.
    pub fn run_of(&self, path: &Path) -> Option<String> {
        Manifest::read(&self.disk, path).ok().flatten().map(|manifest| manifest.run)
    }

    fn load_checked(&self, path: &Path, replica: &mut Replica) -> Result<Position, Unfit> {
        let Files { weights, state, position } = self.read_files(path)?;
        let parameters = replica.whole.as_ref().map_or(&replica.parameters, |whole| &whole.parameters);
        let count = parameters.len();
        let held = |index: usize| stage::held(replica.whole.as_ref(), Tensor::Parameter(index));
        let pieces: Vec<Option<(usize, Piece)>> = (0..count).map(held).collect();
        let optimizer_slots = replica.engine.weights().optimizer.len();
        let slots = optimizer_inventory(parameters, optimizer_slots + position.kept_slots);
        let inventory = Inventory { parameters: &slots, states: &[] };
        let is_own = |slot: Slot| matches!(slot, Slot::Parameter(index) if pieces[index % count].is_some());
        let loaded = weights::parse_some(&path.join(STATE), &state, (inventory, &is_own), &[]);
        let loaded = loaded.map_err(|error| unfit(path, error))?;
        weights.load(replica, &[]).map_err(|error| match error {
            TrainError::Weights(error) => unfit(path, error),
            other => Unfit::Damaged(other.to_string()),
        })?;
        for (index, data) in loaded.parameters.into_iter().enumerate() {
            // A part takes its piece.
            let (Some((number, piece)), Some(data)) = (pieces[index % count].clone(), data) else { continue };
            let data = cut_out(&piece, data);
            let range = replica.store().layout().range(number);
            let Weights { store, optimizer, owned, kept } = replica.engine.weights_mut();
            let slot = index / count;
            // An agreement of another kind lets go of what this one has kept.
            if let Some(slot) = slot.checked_sub(optimizer.len()) {
                if kept.len() <= slot {
                    kept.push(vec![0.0; store.parameters.len()]);
                }
                kept[slot][range].copy_from_slice(&data);
                continue;
            }
            for Owned { elements, place } in owned.within(range.clone()) {
                let held = elements.start - range.start..elements.end - range.start;
                optimizer[slot][place].copy_from_slice(&data[held]);
            }
        }
        Ok(position)
    }

    /// Reads both files, once, and holds them against the manifest, if there is one, and against each other.
    fn read_files(&self, path: &Path) -> Result<Files, Damage> {
        let manifest = Manifest::read(&self.disk, path)?;
        let read = |name: &str| match &manifest {
            Some(manifest) => manifest.read_file(&self.disk, path, name),
            None => read_plain(&self.disk, &path.join(name)),
        };
        let weights = CheckedWeights::of(&path.join(WEIGHTS), read(WEIGHTS)?);
        let state = read(STATE)?;
        let card = weights.card().map_err(|error| Damage(error.to_string()))?;
        let metadata = weights::parse_metadata(&path.join(STATE), &state);
        let metadata = metadata.map_err(|error| Damage(error.to_string()))?;
        let position = metadata.get(POSITION_KEY).and_then(|text| serde_json::from_str::<Position>(text).ok());
        let position = position
            .ok_or_else(|| Damage(format!("{} does not say where the run stood", path.join(STATE).display())))?;
        if position.kept_slots > KEPT_SLOTS_MAX {
            let slots = position.kept_slots;
            return Err(Damage(format!("{} has {slots} slots of an agreement", path.join(STATE).display())));
        }
        let (weights_step, state_step) = (card.step, position.step);
        let expected = manifest.map_or(state_step, |manifest| manifest.step);
        if weights_step != state_step || state_step != expected {
            return Err(Damage(format!(
                "{}: {WEIGHTS} is of step {weights_step}, and {STATE} of step {state_step}",
                path.display()
            )));
        }
        Ok(Files { weights, state, position })
    }

    /// Whether a checkpoint is what was saved, as far as can be seen.
    pub(super) fn is_whole(&self, path: &Path) -> bool {
        match Manifest::read(&self.disk, path) {
            Ok(Some(manifest)) => manifest.agrees(&self.disk, path),
            Ok(None) => self.read_files(path).is_ok(),
            Err(_) => false,
        }
    }
}

/// The sentence for a checkpoint that a run cannot go on from: it is another model's, or damaged.
fn unfit(path: &Path, error: WeightsError) -> Unfit {
    match error {
        WeightsError::Mismatch { mismatch, .. } => {
            let count = mismatch.missing.len() + mismatch.unexpected.len() + mismatch.shapes.len();
            Unfit::Refused(format!(
                "{} is not of the model and optimizer that the run's config.toml names ({count} tensors differ); \
                 put that file back as it was, or start a new run with another --run",
                path.display()
            ))
        }
        WeightsError::NotFinite { path, name } => {
            Unfit::Damaged(format!("{} is damaged: `{name}` holds values that are not numbers", path.display()))
        }
        other => Unfit::Damaged(other.to_string()),
    }
}
