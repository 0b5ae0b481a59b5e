//! A folder of photographs on another machine: what whoever has it tells ([`Listing`], read once) and lends (encoded files, by number),
//! and what whoever trains on it asks ([`Far`]). How bytes travel is not known here: a program brings [`Elsewhere`].

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_system::disk::Disk;
use paceline_system::printable::Shown;
use serde::{Deserialize, Serialize};

use crate::dataset::{CLASSES_MAX, OpenOptions, Split, check_class_names};
use crate::folder::Folder;
use crate::{DataError, Spec};

/// The longest name of a file or a set: what file systems allow, and text that is a few times longer.
const NAME_BYTES_MAX: usize = 1024;

/// What is in a folder of photographs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listing {
    /// The folder's name.
    pub name: String,
    /// The classes, in order.
    pub class_names: Vec<String>,
    /// The class and the name of every file of the training half, in order.
    pub train: Vec<(u32, String)>,
    /// The same of the validation half.
    pub val: Vec<(u32, String)>,
}

impl Listing {
    /// As it travels.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and names are JSON")
    }

    /// Reads one, whatever the bytes are.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let listing: Self = serde_json::from_slice(bytes).map_err(|error| format!("no listing: {error}"))?;
        let classes = listing.class_names.len();
        if !(1..=CLASSES_MAX).contains(&classes) {
            return Err(format!("a listing of {classes} classes"));
        }
        check_class_names(&listing.class_names).map_err(|error| error.to_string())?;
        for (half, files) in [(Split::Train, &listing.train), (Split::Val, &listing.val)] {
            if files.is_empty() || u32::try_from(files.len()).is_err() {
                return Err(format!("a listing of {} files in {}", files.len(), half.name()));
            }
            if let Some((class, _)) = files.iter().find(|(class, _)| *class as usize >= classes) {
                return Err(format!("a file of class {class}, of which there are {classes}"));
            }
        }
        let is_odd = |name: &String| name.is_empty() || name.len() > NAME_BYTES_MAX;
        let has_odd = |files: &[(u32, String)]| files.iter().any(|(_, name)| is_odd(name));
        if is_odd(&listing.name) || has_odd(&listing.train) || has_odd(&listing.val) {
            return Err("a listing with a name without letters, or with too many".into());
        }
        Ok(listing)
    }

    /// Names for messages, with the classes.
    pub(crate) fn files(&self, half: Split) -> Vec<(PathBuf, u32)> {
        let files = if half == Split::Train { &self.train } else { &self.val };
        let place = |class: u32| Path::new(half.name()).join(&self.class_names[class as usize]);
        files.iter().map(|(class, name)| (place(*class).join(name), *class)).collect()
    }
}

/// Somebody who has a folder of photographs.
pub trait Far: fmt::Debug + Send + Sync {
    /// What is in it.
    ///
    /// # Errors
    /// When it cannot be had, or makes no sense.
    fn listing(&self) -> Result<Listing, DataError>;

    /// The bytes of a file, at most so many, or what is wrong with it; called by several threads at once.
    ///
    /// # Errors
    /// When they cannot be had, whatever is in them.
    fn read(&self, half: Split, number: usize, bytes_max: u64) -> Result<Result<Vec<u8>, String>, DataError>;
}

type Connect = dyn Fn(&str) -> Result<Arc<dyn Far>, DataError> + Send + Sync;

/// How a program reaches those who have data elsewhere: from `HOST:PORT` to somebody who answers. By default it cannot.
#[derive(Clone, Default)]
pub struct Elsewhere(Option<Arc<Connect>>);

impl Elsewhere {
    /// By this code.
    pub fn new(connect: impl Fn(&str) -> Result<Arc<dyn Far>, DataError> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(connect)))
    }

    /// Somebody at an address.
    pub(crate) fn connect(&self, address: &str) -> Result<Arc<dyn Far>, DataError> {
        let Some(connect) = &self.0 else {
            return Err(DataError::refused(format!(
                "this program has no way to remote:{address}; type --data folder:DIR"
            )));
        };
        connect(address)
    }
}

impl fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Elsewhere({})", if self.0.is_some() { "reachable" } else { "nowhere" })
    }
}

/// A folder of photographs that is lent to others.
#[derive(Debug)]
pub struct Lender {
    train: Folder,
    val: Folder,
}

impl Lender {
    /// Lists both halves of what a spec names.
    ///
    /// # Errors
    /// When it names no folder of photographs, or that cannot be listed.
    pub fn open(spec: &Spec, options: &OpenOptions, disk: &Disk) -> Result<Self, DataError> {
        let Spec::Folder(place) = spec else {
            return Err(DataError::refused(format!("{spec} is no folder of photographs; type data serve folder:DIR")));
        };
        let (train, val) = Folder::open(place.as_deref(), options, disk)?;
        Ok(Self { train, val })
    }

    /// What is in it.
    ///
    /// # Errors
    /// When a file's name is no text.
    pub fn listing(&self) -> Result<Listing, DataError> {
        let files = |folder: &Folder| {
            let of = |(path, class): &(PathBuf, u32)| match path.file_name().and_then(|name| name.to_str()) {
                Some(name) => Ok((*class, name.to_owned())),
                None => Err(DataError::refused(format!("the name of {} is not UTF-8; give it another", Shown(path)))),
            };
            folder.files().iter().map(of).collect::<Result<Vec<_>, _>>()
        };
        let info = self.train.info();
        let (name, class_names) = (info.name.clone(), info.class_names.clone());
        Ok(Listing { name, class_names, train: files(&self.train)?, val: files(&self.val)? })
    }

    /// The bytes of a file, or what is wrong with it.
    ///
    /// # Errors
    /// When there is no such number, or the disk fails.
    pub fn read(&self, half: Split, number: u64, bytes_max: u64) -> Result<Result<Vec<u8>, String>, DataError> {
        let folder = if half == Split::Train { &self.train } else { &self.val };
        let number = usize::try_from(number).ok().filter(|&number| number < folder.files().len());
        let missing = || DataError::refused(format!("there is no such file in {}", half.name()));
        folder.encoded(number.ok_or_else(missing)?, bytes_max)
    }
}

#[cfg(test)]
mod tests;
