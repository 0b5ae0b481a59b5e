//! A weights file to be used: of a run, which has a manifest beside it, or from anywhere.

use std::path::{Path, PathBuf};

use paceline_nn::weights::{self, Inventory, Loaded, Slot};
use paceline_system::disk::Disk;
use paceline_system::printable::Shown;
use paceline_tensor::part::Piece;

use super::manifest::{Damage, MANIFEST, Manifest};
use super::{CARD_KEY, Card, Checkpoints, Purpose, WEIGHTS};
use crate::error::TrainError;
use crate::replica::Replica;
use crate::stage::{self, Tensor};

/// A weights file that agrees with the manifest beside it, if that tells of it.
#[derive(Debug)]
pub struct CheckedWeights {
    path: PathBuf,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// Read once, and held against a manifest.
    Checked(Vec<u8>),
    /// From anywhere: its header is looked at before the rest is read.
    Foreign(Disk),
}

impl CheckedWeights {
    /// Reads and checks it.
    ///
    /// # Errors
    /// When it cannot be read, or is not what the manifest says; the sentence then names the last good checkpoint beside it.
    pub fn open(disk: &Disk, path: &Path) -> Result<Self, TrainError> {
        // A bare name lies in the folder that the process is in.
        let folder = path.parent().unwrap_or(Path::new(""));
        let manifest = match Manifest::read(disk, folder) {
            // Many a program calls a file of its own manifest.json. In a checkpoint's folder it is ours.
            Err(_) if !looks_like_ours(folder) => Ok(None),
            manifest => manifest,
        };
        let checked = manifest.and_then(|manifest| {
            let name = path.file_name().and_then(|name| name.to_str());
            match (manifest, name) {
                (Some(manifest), Some(name)) if manifest.names(name) => {
                    manifest.read_file(disk, folder, name).map(Some)
                }
                _ => Ok(None),
            }
        });
        match checked {
            Ok(Some(bytes)) => Ok(Self::of(path, bytes)),
            Ok(None) => Ok(Self { path: path.to_owned(), source: Source::Foreign(disk.clone()) }),
            Err(Damage(what)) => {
                let checkpoints = Checkpoints::new(disk, folder.parent().unwrap_or(Path::new("")).to_owned());
                let offer = checkpoints.offer(folder, Purpose::Use);
                Err(TrainError::Damaged { what, offer })
            }
        }
    }

    /// Bytes that were checked already.
    pub(super) fn of(path: &Path, bytes: Vec<u8>) -> Self {
        Self { path: path.to_owned(), source: Source::Checked(bytes) }
    }

    /// What the file says of itself.
    ///
    /// # Errors
    /// When it is damaged, or says nothing.
    pub fn card(&self) -> Result<Card, TrainError> {
        let metadata = match &self.source {
            Source::Checked(bytes) => weights::parse_metadata(&self.path, bytes)?,
            Source::Foreign(disk) => weights::read_metadata(disk, &self.path)?,
        };
        let refused = |why: String| {
            TrainError::Refused(format!("{} {why}; type a checkpoint of `paceline train`", Shown(&self.path)))
        };
        let text = metadata.get(CARD_KEY).ok_or_else(|| refused("does not say which model it is for".into()))?;
        serde_json::from_str(text).map_err(|error| refused(format!("describes a model that cannot be: {error}")))
    }

    /// A model's tensors.
    ///
    /// # Errors
    /// As [`weights::read`].
    pub fn read(&self, inventory: Inventory<'_>, except: &[&str]) -> Result<Loaded, TrainError> {
        Ok(match &self.source {
            Source::Checked(bytes) => weights::parse(&self.path, bytes, inventory, except)?,
            Source::Foreign(disk) => weights::read(disk, &self.path, inventory, except)?,
        })
    }

    /// Those that a replica has, of a file that holds the whole model's.
    fn read_own(&self, replica: &Replica, except: &[&str]) -> Result<Loaded, TrainError> {
        let Some(whole) = &replica.whole else {
            return self.read(Inventory { parameters: &replica.parameters, states: &replica.states }, except);
        };
        let inventory = Inventory { parameters: &whole.parameters, states: &whole.states };
        let is_own = |slot: Slot| match slot {
            Slot::Parameter(index) => whole.own(Tensor::Parameter(index)).is_some(),
            Slot::State(index) => whole.own(Tensor::State(index)).is_some(),
        };
        Ok(match &self.source {
            Source::Checked(bytes) => weights::parse_some(&self.path, bytes, (inventory, &is_own), except)?,
            Source::Foreign(disk) => weights::read_some(disk, &self.path, (inventory, &is_own), except)?,
        })
    }

    /// Loads it into a replica; tensors whose names start with one of `except` keep their start. Returns those.
    ///
    /// # Errors
    /// When the file is damaged or does not fit.
    pub fn load(&self, replica: &mut Replica, except: &[&str]) -> Result<Vec<String>, TrainError> {
        let loaded = self.read_own(replica, except)?;
        // Of a stage's or a part's replica, what is there of the whole model's tensors is what it has some of, in its order.
        let whole = replica.whole.as_ref();
        let own = |tensors: Vec<Option<Vec<f32>>>, tensor: fn(usize) -> Tensor| {
            let cut = |(index, data): (usize, Option<Vec<f32>>)| {
                let (number, piece) = stage::held(whole, tensor(index))?;
                Some((number, cut_out(&piece, data?)))
            };
            tensors.into_iter().enumerate().filter_map(cut).collect::<Vec<_>>()
        };
        let parameters = own(loaded.parameters, Tensor::Parameter);
        let states = own(loaded.states, Tensor::State);
        for (index, data) in parameters {
            replica.store_mut().parameter_mut(index).copy_from_slice(&data);
        }
        for (index, data) in states {
            replica.store_mut().state_mut(index).copy_from_slice(&data);
        }
        replica.engine.load();
        Ok(loaded.left_out)
    }
}

/// What a part has of a tensor.
pub(super) fn cut_out(piece: &Piece, whole: Vec<f32>) -> Vec<f32> {
    if *piece == Piece::Whole {
        return whole;
    }
    let mut own = vec![0.0; piece.elements(whole.len())];
    piece.take(&whole, &mut own);
    own
}

/// Whether a folder has the name of a checkpoint, or had it.
fn looks_like_ours(folder: &Path) -> bool {
    folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"))
}

/// What a weights file written here says of itself.
///
/// # Errors
/// When the file cannot be read, is not what its manifest says, or says nothing.
pub fn read_card(disk: &Disk, path: &Path) -> Result<Card, TrainError> {
    CheckedWeights::open(disk, path)?.card()
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
    if disk.exists(&path.join(WEIGHTS)) || disk.exists(&path.join(MANIFEST)) {
        return Ok(path.join(WEIGHTS));
    }
    let checkpoints = Checkpoints::new(disk, path.join("checkpoints"));
    let last = || checkpoints.last().ok().flatten();
    checkpoints.best().or_else(last).map(|path| path.join(WEIGHTS)).ok_or_else(|| no_weights(path))
}

fn no_weights(path: &Path) -> TrainError {
    TrainError::Refused(format!(
        "there are no weights at {}; type a run's folder, a checkpoint's, or a .safetensors file",
        Shown(path)
    ))
}
