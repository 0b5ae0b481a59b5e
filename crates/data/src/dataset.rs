//! A data set opened for reading: one closed enum over the sets this crate knows, with what a model has to know of them.
//!
//! Adding a set is adding a file and one arm to each `match` here. Sets decode; they do not augment, order or batch.

use std::path::{Path, PathBuf};

use paceline_system::disk::Disk;
use paceline_system::memory;
use paceline_system::printable::Shown;
use serde::Serialize;

use crate::cifar10::Cifar10;
use crate::far::Elsewhere;
use crate::folder::{Damage, Folder};
use crate::mnist::Mnist;
use crate::own::{Own, OwnData, Treatment};
use crate::pixels::Pixels;
use crate::shapes::Shapes;
use crate::synthetic::Synthetic;
use crate::text::Text;
use crate::{DataError, Spec};

/// The most classes a set or a weights file may name (Google Landmarks, the largest set in common use, has 203,094), and
/// the most bytes of all their names. A header of a weights file holds them all, and has a bound of its own.
pub const CLASSES_MAX: usize = 1 << 18;
/// See [`CLASSES_MAX`].
pub const CLASS_NAMES_BYTES_MAX: usize = 4 << 20;

/// Which half of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// For training.
    Train,
    /// For evaluation.
    Val,
}

impl Split {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Val => "val",
        }
    }
}

/// What one sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SampleKind {
    /// An image with one class. A folder's images have many sizes; this is then the customary size to bring them to.
    Image {
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
        /// Values per pixel.
        channels: usize,
    },
    /// A sequence of tokens, each with the next token as its target.
    Tokens {
        /// Tokens of a sample.
        sequence: usize,
    },
}

/// Which family a set belongs to: decides the customary augmentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Source {
    Shapes,
    Cifar10,
    Mnist,
    Folder,
    Text,
    Synthetic,
    Own(Treatment),
}

/// What a model, a report or a person has to know of a set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Info {
    /// The family.
    pub source: Source,
    /// The set's name, as in the spec.
    pub name: String,
    /// Which half this is.
    pub split: Split,
    /// How many samples.
    pub len: usize,
    /// What a sample is.
    pub kind: SampleKind,
    /// How many classes, or tokens in the vocabulary.
    pub classes: usize,
    /// Their names, in the order of their numbers.
    pub class_names: Vec<String>,
    /// Mean per channel that normalisation should use; empty for tokens.
    pub mean: Vec<f32>,
    /// Standard deviation per channel that normalisation should use; empty for tokens.
    pub std: Vec<f32>,
}

impl Info {
    /// The same, with a mean and a standard deviation of the user's.
    ///
    /// # Errors
    /// When there is not one of each per channel, or one of them makes no sense.
    pub fn with_normalisation(self, mean: Vec<f32>, std: Vec<f32>) -> Result<Self, DataError> {
        let SampleKind::Image { channels, .. } = self.kind else {
            return Err(DataError::refused(format!(
                "{} holds tokens, which are not normalised; give no mean and no std",
                self.name
            )));
        };
        for (name, given) in [("mean", &mean), ("std", &std)] {
            if given.len() != channels {
                return Err(DataError::refused(format!(
                    "{} has {channels} channels, and {name} has {} values; give one for each channel",
                    self.name,
                    given.len()
                )));
            }
        }
        if mean.iter().any(|mean| !mean.is_finite()) || std.iter().any(|std| !std.is_finite() || *std <= 0.0) {
            return Err(DataError::refused(format!(
                "values of a pixel count from 0 to 1: mean {mean:?} must be numbers and std {std:?} above 0"
            )));
        }
        Ok(Self { mean, std, ..self })
    }
}

/// What the user may say about opening a set.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The user's data folder (`PACELINE_DATA`), where a set without a place, or with a relative one, is looked for.
    pub data_home: Option<PathBuf>,
    /// How many damaged images are skipped before a run is refused.
    pub damaged_max: usize,
    /// Tokens per sample of a text.
    pub sequence: usize,
    /// The side that pictures will be brought to, if it is known: it bounds how large they may be.
    pub size: Option<usize>,
    /// Threads that generate or convert samples while a set is opened.
    pub threads: usize,
    /// How data on other machines are reached.
    pub elsewhere: Elsewhere,
}

impl Default for OpenOptions {
    fn default() -> Self {
        let elsewhere = Elsewhere::default();
        Self { data_home: None, damaged_max: 0, sequence: 128, size: None, threads: 1, elsewhere }
    }
}

/// One half of an opened set.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum Dataset {
    Shapes(Shapes),
    Cifar10(Cifar10),
    Mnist(Mnist),
    Folder(Folder),
    Text(Text),
    Synthetic(Synthetic),
    /// What a program brings: see [`crate::own`].
    Own(Own),
}

impl Dataset {
    /// Opens both halves of a set: for training and for evaluation.
    ///
    /// # Errors
    /// When it is not there, or its files are not what they should be; the sentence says what to type.
    pub fn open(spec: &Spec, options: &OpenOptions, disk: &Disk) -> Result<(Self, Self), DataError> {
        let (train, val) = match spec {
            Spec::Shapes => pair(Shapes::open(options.threads)?, Self::Shapes),
            Spec::Cifar10(place) => pair(Cifar10::open(place.as_deref(), options, disk)?, Self::Cifar10),
            Spec::Mnist(place) => pair(Mnist::open(place.as_deref(), options, disk)?, Self::Mnist),
            Spec::Folder(place) => pair(Folder::open(place.as_deref(), options, disk)?, Self::Folder),
            Spec::Remote(address) => {
                pair(Folder::open_far(options.elsewhere.connect(address)?, options)?, Self::Folder)
            }
            Spec::Text(file) => pair(Text::open(file, options, disk)?, Self::Text),
            Spec::Synthetic(shape) => pair(Synthetic::pair(*shape), Self::Synthetic),
        };
        Self::checked(train, val)
    }

    /// Opens both halves of a program's own set.
    ///
    /// # Errors
    /// When what the program says of it does not go together.
    pub fn open_own(name: &str, data: &OwnData) -> Result<(Self, Self), DataError> {
        let (train, val) = pair(data.open(name)?, Self::Own);
        Self::checked(train, val)
    }

    fn checked(train: Self, val: Self) -> Result<(Self, Self), DataError> {
        for half in [&train, &val] {
            assert!(!half.is_empty(), "a set that opens has samples in both halves");
            assert_eq!(half.info().classes, half.info().class_names.len(), "every class has a name");
        }
        check_class_names(&train.info().class_names)?;
        Ok((train, val))
    }

    /// What there is to know of this half.
    pub fn info(&self) -> &Info {
        match self {
            Self::Shapes(set) => set.info(),
            Self::Cifar10(set) => set.info(),
            Self::Mnist(set) => set.info(),
            Self::Folder(set) => set.info(),
            Self::Text(set) => set.info(),
            Self::Synthetic(set) => set.info(),
            Self::Own(set) => set.info(),
        }
    }

    /// How many samples.
    pub fn len(&self) -> usize {
        self.info().len
    }

    /// Whether there is none; never so for a set that [`Dataset::open`] gave.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether images come in many sizes, so that augmentation has to bring them to one.
    pub fn sizes_vary(&self) -> bool {
        matches!(self, Self::Folder(_))
    }

    /// Decodes one image and gives its class. A damaged one is counted and replaced while the user's limit lasts.
    ///
    /// # Errors
    /// When a file cannot be read or too many are damaged.
    ///
    /// # Panics
    /// When `sample` is not below [`Dataset::len`], or on a text.
    pub fn read_image(&self, sample: usize, image: &mut Pixels) -> Result<i32, DataError> {
        match self {
            Self::Shapes(set) => Ok(set.read(sample, image)),
            Self::Cifar10(set) => Ok(set.read(sample, image)),
            Self::Mnist(set) => Ok(set.read(sample, image)),
            Self::Folder(set) => set.read(sample, image),
            Self::Synthetic(set) => Ok(set.read(sample, image)),
            Self::Own(set) => set.read(sample, image),
            Self::Text(_) => panic!("a text has no images"),
        }
    }

    /// Bytes of all images, where they have one size and are bytes.
    pub fn image_bytes(&self) -> Option<usize> {
        let SampleKind::Image { height, width, channels } = self.info().kind else { return None };
        let are_bytes = !matches!(self, Self::Own(set) if set.holds_numbers());
        (!self.sizes_vary() && are_bytes).then(|| self.len() * height * width * channels)
    }

    /// Bytes of samples that stay in memory while the set is open.
    pub fn held_bytes(&self) -> usize {
        match self {
            Self::Shapes(_) | Self::Cifar10(_) | Self::Mnist(_) => self.image_bytes().unwrap_or(0),
            Self::Text(set) => set.held_bytes(),
            Self::Own(set) => set.held_bytes(),
            Self::Folder(_) | Self::Synthetic(_) => 0,
        }
    }

    /// All images one after the other, where they have one size.
    ///
    /// # Errors
    /// As [`Dataset::read_image`].
    pub fn images(&self) -> Result<Option<Vec<u8>>, DataError> {
        let Some(bytes) = self.image_bytes() else { return Ok(None) };
        let (mut all, mut image) = (Vec::new(), Pixels::default());
        memory::reserve(&mut all, bytes, "all images of the set")?;
        for sample in 0..self.len() {
            self.read_image(sample, &mut image)?;
            all.extend_from_slice(&image.data);
        }
        Ok(Some(all))
    }

    /// Copies one window of a text, and the same window one token later.
    ///
    /// # Errors
    /// When a program's own set gives what was not announced.
    ///
    /// # Panics
    /// When `sample` is not below [`Dataset::len`], or on a set of images.
    pub fn read_tokens(&self, sample: usize, tokens: &mut [i32], targets: &mut [i32]) -> Result<(), DataError> {
        match self {
            Self::Text(set) => {
                set.read(sample, tokens, targets);
                Ok(())
            }
            Self::Own(set) => set.read_tokens(sample, tokens, targets),
            _ => panic!("{} has no tokens", self.info().name),
        }
    }

    /// The class of an image without decoding it; nothing for a text.
    pub fn label(&self, sample: usize) -> Option<i32> {
        match self {
            Self::Shapes(set) => Some(set.label(sample)),
            Self::Cifar10(set) => Some(set.label(sample)),
            Self::Mnist(set) => Some(set.label(sample)),
            Self::Folder(set) => Some(set.label(sample)),
            Self::Synthetic(set) => Some(set.label(sample)),
            Self::Own(set) => set.label(sample).ok(),
            Self::Text(_) => None,
        }
    }

    /// The damaged images met so far, by file name.
    pub fn damaged(&self) -> Vec<Damage> {
        match self {
            Self::Folder(set) => set.damaged(),
            _ => Vec::new(),
        }
    }
}

pub(crate) fn check_class_names(names: &[String]) -> Result<(), DataError> {
    let bytes: usize = names.iter().map(String::len).sum();
    if names.len() <= CLASSES_MAX && bytes <= CLASS_NAMES_BYTES_MAX {
        return Ok(());
    }
    Err(DataError::refused(format!(
        "it has {} classes with names of {bytes} bytes together; {CLASSES_MAX} classes and {CLASS_NAMES_BYTES_MAX} bytes \
         are possible, so use fewer classes or shorter names",
        names.len()
    )))
}

fn pair<T>((train, val): (T, T), wrap: fn(T) -> Dataset) -> (Dataset, Dataset) {
    (wrap(train), wrap(val))
}

/// Where a set lies: the first of the given place, the same under the user's data folder, and each with one of `inner`
/// appended, that `has` the files.
pub(crate) fn find(
    place: Option<&Path>,
    home: Option<&Path>,
    inner: &[&str],
    has: impl Fn(&Path) -> bool,
) -> Option<PathBuf> {
    let given = place.map(Path::to_owned);
    let at_home = home.map(|home| place.map_or_else(|| home.to_owned(), |place| home.join(place)));
    given.into_iter().chain(at_home).find_map(|folder| {
        let inside = inner.iter().map(|name| folder.join(name));
        std::iter::once(folder.clone()).chain(inside).find(|folder| has(folder))
    })
}

/// The sentence for a set that is nowhere.
pub(crate) fn missing(name: &str, place: Option<&Path>, home: Option<&Path>, holds: &str) -> DataError {
    let looked = match (place, home) {
        (Some(place), _) => format!("no {name} data in {}", Shown(place)),
        (None, Some(home)) => format!("no {name} data in PACELINE_DATA ({})", Shown(home)),
        (None, None) => format!("no folder was given for {name}"),
    };
    DataError::refused(format!(
        "{looked}; type --data {name}:DIR, where DIR holds {holds}, or set PACELINE_DATA to the folder above it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::{Augment, AugmentChoice, Op};

    fn info(spec: &str) -> Info {
        let spec: Spec = spec.parse().unwrap();
        Dataset::open(&spec, &OpenOptions::default(), &Disk::real()).unwrap().0.info().clone()
    }

    #[test]
    fn the_users_mean_and_std_reach_the_augmentation_or_are_refused() {
        let info = info("synthetic:6x4x3/5");
        let (mean, std) = (vec![0.1, 0.2, 0.3], vec![0.4, 0.5, 0.6]);
        let own = info.clone().with_normalisation(mean.clone(), std.clone()).unwrap();
        let augment = Augment::evaluation(AugmentChoice::Standard, &own, None).unwrap();
        assert_eq!(augment.ops(), [Op::Normalise { mean: mean.clone(), std: std.clone() }]);
        for (mean, std, words) in [
            (vec![0.1], std.clone(), "mean has 1 values"),
            (mean.clone(), vec![0.4; 4], "std has 4 values"),
            (mean.clone(), vec![0.4, 0.0, 0.6], "std [0.4, 0.0, 0.6] above 0"),
            (mean, vec![0.4, f32::NAN, 0.6], "above 0"),
            (vec![0.1, f32::INFINITY, 0.3], std, "must be numbers"),
        ] {
            let error = info.clone().with_normalisation(mean, std).unwrap_err();
            assert!(error.is_refusal() && error.to_string().contains(words), "{error}");
        }
    }
}
