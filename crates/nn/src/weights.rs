//! Weights files: safetensors with PyTorch's names and layouts.
//!
//! What is written here loads with `model.load_state_dict(safetensors.torch.load_file(path))`, and what PyTorch writes
//! loads here. A file is checked against the model before anything is used: a strict load is all or nothing, and its
//! refusal lists every kind of difference. Callers: training (checkpoints, `--weights`), export, the examples.
//! What is absent: optimizer state and data positions, which are not weights.

mod convert;
mod header;
mod mismatch;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use paceline_system::checksum::{Checksum, Summing};
use paceline_system::disk::{Disk, DiskError};
use paceline_system::printable::Shown;
use paceline_tensor::Shape;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::json;

use crate::parameter::{ForeignLayout, Parameter, State};
pub use mismatch::{Mismatch, OtherShape};

/// PyTorch counts the batches of each normalisation under this name; nothing here depends on it.
const BATCH_COUNTER: &str = "num_batches_tracked";
/// What PyTorch's parallel wrappers put in front of every name.
const WRAPPER: &str = "module.";

/// Which tensor of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// The parameter of this number.
    Parameter(usize),
    /// The state of this number.
    State(usize),
}

/// Where the elements of a model's tensors come from, in this engine's layout. Called once for each tensor, so that a
/// device's memory can be fetched piece by piece.
pub type Values<'f, 'data> = &'f dyn Fn(Slot) -> Cow<'data, [f32]>;

/// The tensors of a model: what a file must hold.
#[derive(Clone, Copy, Debug)]
pub struct Inventory<'a> {
    /// What is trained.
    pub parameters: &'a [Parameter],
    /// What is kept.
    pub states: &'a [State],
}

impl Inventory<'_> {
    /// Slot, name, shape and layout of every tensor, parameters first.
    fn entries(&self) -> impl Iterator<Item = (Slot, &str, &Shape, ForeignLayout)> {
        let parameters = self.parameters.iter().enumerate();
        let states = self.states.iter().enumerate();
        parameters
            .map(|(index, parameter)| {
                (Slot::Parameter(index), parameter.name.as_str(), &parameter.shape, parameter.layout)
            })
            .chain(states.map(|(index, state)| (Slot::State(index), state.name.as_str(), &state.shape, state.layout)))
    }
}

/// A weights file could not be written or used.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The disk refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The bytes are not a safetensors file.
    #[error("{} is not a safetensors file: {reason}; convert others with safetensors.torch.save_file", Shown(path))]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The header is longer than any that a model and its classes need.
    #[error(
        "{}: its header has {bytes} bytes, and at most {most} are possible; it names too many tensors or classes",
        Shown(path)
    )]
    Header {
        /// The file.
        path: PathBuf,
        /// How long it is.
        bytes: u64,
        /// How long it may be.
        most: u64,
    },
    /// A tensor's elements are of a type that weights do not have.
    #[error("{}: `{name}` holds {dtype} elements; save it as f32, f16, bf16 or f64", Shown(path))]
    ElementType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        dtype: String,
    },
    /// A tensor holds something that is not a number.
    #[error(
        "{}: `{name}` holds values that are not numbers; take the file from where it came from once more",
        Shown(path)
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// The file is for another model.
    #[error("{} does not fit the model{mismatch}", Shown(path))]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The differences.
        mismatch: Mismatch,
    },
    /// A layer to leave out is in neither the model nor the file.
    #[error(
        "no tensor of the model or of {} starts with `{prefix}`; write the beginning of a name, such as `fc`",
        Shown(path)
    )]
    NothingLeftOut {
        /// The file.
        path: PathBuf,
        /// What was to be left out.
        prefix: String,
    },
}

/// What a file held, in this engine's layout and in the model's order.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// The parameters; none for those left out.
    pub parameters: Vec<Option<Vec<f32>>>,
    /// The states; none for those left out.
    pub states: Vec<Option<Vec<f32>>>,
    /// The names of the model's tensors that were left out and keep their start.
    pub left_out: Vec<String>,
    /// The file's own notes.
    pub metadata: BTreeMap<String, String>,
}

/// Writes a model's tensors, whole or not at all. Returns the file's length and checksum.
///
/// # Errors
/// When the disk refuses; a file that was there before is untouched.
pub fn write(
    disk: &Disk,
    path: &Path,
    inventory: Inventory<'_>,
    values: Values<'_, '_>,
    metadata: &BTreeMap<String, String>,
) -> Result<Checksum, WeightsError> {
    write_with(disk, path, inventory, &mut |slot| Ok(values(slot)), metadata)
}

/// As [`write()`], of tensors that are elsewhere and may not be had: each is asked for when its turn has come.
///
/// # Errors
/// When the disk refuses, or a tensor could not be had: then the error of the disk holds that one.
pub fn write_with<'data>(
    disk: &Disk,
    path: &Path,
    inventory: Inventory<'_>,
    values: &mut dyn FnMut(Slot) -> io::Result<Cow<'data, [f32]>>,
    metadata: &BTreeMap<String, String>,
) -> Result<Checksum, WeightsError> {
    let header = header(inventory, metadata);
    let mut sum = Checksum::default();
    disk.write_with(path, |target| {
        let mut writer = Summing::new(target);
        writer.write_all(&(header.len() as u64).to_le_bytes())?;
        writer.write_all(&header)?;
        for (slot, name, shape, layout) in inventory.entries() {
            let native = values(slot)?;
            assert_eq!(native.len(), shape.elements(), "`{name}` has the elements of its shape");
            let foreign = if layout == ForeignLayout::Same { native } else { layout.to_foreign(shape, &native).into() };
            write_elements(&mut writer, &foreign)?;
        }
        sum = writer.finish();
        Ok(())
    })?;
    Ok(sum)
}

/// The JSON that names each tensor's type, shape and place. Names are sorted, so equal weights are equal files; it is
/// padded with spaces to a multiple of 8 bytes, as the format asks.
fn header(inventory: Inventory<'_>, metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let mut entries = BTreeMap::new();
    if !metadata.is_empty() {
        entries.insert("__metadata__".to_owned(), json!(metadata));
    }
    let mut start = 0;
    for (_, name, shape, layout) in inventory.entries() {
        let end = start + shape.elements() * size_of::<f32>();
        let entry = json!({"dtype": "F32", "shape": &*layout.foreign_shape(shape), "data_offsets": [start, end]});
        assert!(entries.insert(name.to_owned(), entry).is_none(), "two tensors of the model are called `{name}`");
        start = end;
    }
    let mut header = serde_json::to_vec(&entries).expect("a map with text keys is JSON");
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

fn write_elements(writer: &mut dyn Write, elements: &[f32]) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(1 << 16);
    for block in elements.chunks((1 << 16) / size_of::<f32>()) {
        buffer.clear();
        block.iter().for_each(|element| buffer.extend(element.to_le_bytes()));
        writer.write_all(&buffer)?;
    }
    Ok(())
}

/// Reads a model's tensors. Every tensor of the model must be there with its shape, and nothing else, apart from names
/// that start with one of `except`: those of the model keep their start, those of the file are passed over.
///
/// # Errors
/// When the file is unreadable, damaged or for another model.
pub fn read(disk: &Disk, path: &Path, inventory: Inventory<'_>, except: &[&str]) -> Result<Loaded, WeightsError> {
    read_some(disk, path, (inventory, &|_| true), except)
}

/// As [`read`], of which only some tensors are wanted.
///
/// # Errors
/// As [`read`].
pub fn read_some(
    disk: &Disk,
    path: &Path,
    (inventory, is_wanted): (Inventory<'_>, &dyn Fn(Slot) -> bool),
    except: &[&str],
) -> Result<Loaded, WeightsError> {
    let header = header::read(disk, path)?;
    let infos = header.metadata.tensors();
    let shapes = by_name(infos.iter().map(|(name, info)| (name.as_str(), info.shape.as_slice())));
    // Before anything large is read: a file for another model may be of any length.
    check(path, inventory, &shapes, except)?;
    parse_some(path, &disk.read_within(path, header.file_bytes)?, (inventory, is_wanted), except)
}

/// As [`read`], of a file whose bytes were read, and maybe checked, before.
///
/// # Errors
/// As [`read`].
pub fn parse(path: &Path, bytes: &[u8], inventory: Inventory<'_>, except: &[&str]) -> Result<Loaded, WeightsError> {
    parse_some(path, bytes, (inventory, &|_| true), except)
}

/// As [`parse`], of which only some tensors are wanted: the file is checked as a whole, the others are not converted.
///
/// # Errors
/// As [`read`].
pub fn parse_some(
    path: &Path,
    bytes: &[u8],
    (inventory, is_wanted): (Inventory<'_>, &dyn Fn(Slot) -> bool),
    except: &[&str],
) -> Result<Loaded, WeightsError> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| not_safetensors(path, &error))?;
    let tensors = by_name(file.iter());
    let shapes = tensors.iter().map(|(name, tensor)| (*name, tensor.shape())).collect();
    check(path, inventory, &shapes, except)?;
    let mut loaded = Loaded { metadata: parse_metadata(path, bytes)?, ..Loaded::default() };
    for (slot, name, shape, layout) in inventory.entries() {
        let elements = match tensors.get(name).filter(|_| !is_left_out(name, except)) {
            Some(_) if !is_wanted(slot) => None,
            Some(tensor) => Some(elements(path, name, tensor, shape, layout)?),
            None => {
                loaded.left_out.push(name.to_owned());
                None
            }
        };
        match slot {
            Slot::Parameter(_) => loaded.parameters.push(elements),
            Slot::State(_) => loaded.states.push(elements),
        }
    }
    Ok(loaded)
}

/// The notes that a file carries about itself.
///
/// # Errors
/// When the file is unreadable or damaged.
pub fn read_metadata(disk: &Disk, path: &Path) -> Result<BTreeMap<String, String>, WeightsError> {
    Ok(header::read(disk, path)?.notes())
}

/// As [`read_metadata`], of a file whose bytes were read before.
///
/// # Errors
/// As [`read_metadata`].
pub fn parse_metadata(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, String>, WeightsError> {
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| not_safetensors(path, &error))?;
    Ok(header.metadata().clone().unwrap_or_default().into_iter().collect())
}

fn not_safetensors(path: &Path, reason: &impl Display) -> WeightsError {
    WeightsError::NotSafetensors { path: path.to_owned(), reason: reason.to_string() }
}

/// What belongs to the file's tensors under the names that a model uses: without batch counters, and without the
/// wrapper's prefix if all of them have it.
fn by_name<'a, T>(tensors: impl Iterator<Item = (&'a str, T)>) -> HashMap<&'a str, T> {
    let tensors: Vec<_> = tensors.collect();
    let wrapped = tensors.iter().all(|(name, _)| name.starts_with(WRAPPER));
    tensors
        .into_iter()
        .map(|(name, tensor)| (if wrapped { &name[WRAPPER.len()..] } else { name }, tensor))
        .filter(|(name, _)| name.rsplit('.').next() != Some(BATCH_COUNTER))
        .collect()
}

fn is_left_out(name: &str, except: &[&str]) -> bool {
    except.iter().any(|prefix| name.starts_with(prefix))
}

/// Compares the names and shapes of model and file.
fn check(
    path: &Path,
    inventory: Inventory<'_>,
    shapes: &HashMap<&str, &[usize]>,
    except: &[&str],
) -> Result<(), WeightsError> {
    let names: HashMap<&str, Shape> =
        inventory.entries().map(|(_, name, shape, layout)| (name, layout.foreign_shape(shape))).collect();
    let nothing = |prefix: &&&str| !names.keys().chain(shapes.keys()).any(|name| name.starts_with(**prefix));
    if let Some(prefix) = except.iter().find(nothing) {
        return Err(WeightsError::NothingLeftOut { path: path.to_owned(), prefix: (*prefix).to_owned() });
    }
    let mut mismatch = Mismatch::default();
    for (_, name, _, _) in inventory.entries().filter(|entry| !is_left_out(entry.1, except)) {
        let model = &names[name];
        match shapes.get(name) {
            None => mismatch.missing.push(name.to_owned()),
            Some(&shape) if *shape != **model => mismatch.shapes.push(OtherShape {
                name: name.to_owned(),
                file: Shape::from(shape),
                model: model.clone(),
            }),
            Some(_) => {}
        }
    }
    let unexpected = shapes.keys().filter(|name| !names.contains_key(*name) && !is_left_out(name, except));
    mismatch.unexpected = unexpected.map(|&name| name.to_owned()).collect();
    mismatch.unexpected.sort();
    if mismatch.is_empty() { Ok(()) } else { Err(WeightsError::Mismatch { path: path.to_owned(), mismatch }) }
}

fn elements(
    path: &Path,
    name: &str,
    tensor: &TensorView<'_>,
    shape: &Shape,
    layout: ForeignLayout,
) -> Result<Vec<f32>, WeightsError> {
    let foreign = convert::to_f32(tensor.dtype(), tensor.data()).ok_or_else(|| WeightsError::ElementType {
        path: path.to_owned(),
        name: name.to_owned(),
        dtype: tensor.dtype().to_string(),
    })?;
    // Without a branch per element, so that it runs at the speed of memory.
    if !foreign.iter().fold(true, |finite, value| finite & value.is_finite()) {
        return Err(WeightsError::NotFinite { path: path.to_owned(), name: name.to_owned() });
    }
    Ok(if layout == ForeignLayout::Same { foreign } else { layout.to_native(shape, &foreign) })
}
