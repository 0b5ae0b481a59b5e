//! Data of a program's own: samples that some code gives by number, in both halves of a set with a name.
//!
//! What `torch.utils.data.Dataset` is to PyTorch, [`Samples`] is here. Order, sharding, batches, augmentation and resuming are those of
//! every other set, since a sample is asked for by its number; so the same number must give the same sample, in every process of a run and
//! in every run that goes on from it. What code gives is held against what was announced: a bug there ends a run with a sentence.

mod check;
mod memory;

use std::borrow::Cow;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use paceline_system::random;
use serde::Serialize;

use crate::DataError;
use crate::dataset::{Info, SampleKind, Source, Split};
use crate::inspect::Moments;
use crate::loader::words_of;
use crate::outline::Outline;
use crate::pixels::Pixels;

pub use check::CHANNELS_MAX;

/// One sample, lent or made.
#[derive(Clone, Debug, PartialEq)]
pub enum Sample<'a> {
    /// An image of bytes: row after row, a pixel's channels side by side. It can be cropped, mirrored and resized.
    Image {
        /// Height × width × channels bytes.
        pixels: Cow<'a, [u8]>,
        /// Its class.
        label: usize,
    },
    /// The same in numbers, which are taken as they are, up to a mean and a deviation. A vector of n numbers has height 1, width n and
    /// one channel.
    Values {
        /// Height × width × channels numbers.
        values: Cow<'a, [f32]>,
        /// Its class.
        label: usize,
    },
    /// A sequence of tokens.
    Tokens {
        /// So many as a sample has.
        tokens: Cow<'a, [i32]>,
        /// What the model should answer at each of them, such as the token that follows.
        targets: Cow<'a, [i32]>,
    },
}

/// One half of a set, by number. All samples of both halves are of the same kind and size.
///
/// ```
/// use paceline_data::own::{Sample, Samples};
///
/// /// Sums of two digits, made when they are asked for.
/// struct Sums;
///
/// impl Samples for Sums {
///     fn len(&self) -> usize {
///         100
///     }
///
///     fn sample(&self, index: usize) -> Sample<'_> {
///         let (a, b) = (index / 10, index % 10);
///         Sample::Values { values: vec![a as f32, b as f32].into(), label: a + b }
///     }
/// }
/// assert!(!Sums.is_empty());
/// ```
pub trait Samples: Send + Sync {
    /// How many samples there are.
    fn len(&self) -> usize;

    /// The sample of a number below [`Samples::len`]: always the same. Called by several threads at once.
    fn sample(&self, index: usize) -> Sample<'_>;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that the samples keep in memory: whether a run fits a machine is asked before it starts.
    fn held_bytes(&self) -> usize {
        0
    }
}

/// How images of a set of one's own are treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Treatment {
    /// Black pixels on every side, before a random window of the old size is taken; 0 for none.
    pub pad: usize,
    /// Whether every other image is mirrored.
    pub flip: bool,
    /// Whether they are numbers, which are not cropped, mirrored or resized.
    pub numbers: bool,
}

/// Both halves of a set of one's own, with what a model has to know of it.
///
/// ```
/// use paceline_data::own::OwnData;
///
/// // Two grey images of 2×2 pixels and their classes for training, one for evaluation.
/// let data = OwnData::images([2, 2, 1], (vec![0, 9, 9, 0, 9, 0, 0, 9], vec![0, 1]), (vec![0, 9, 9, 0], vec![0]))
///     .class_names(["falling", "rising"]);
/// let (train, val) = data.open("diagonals")?;
/// # Ok::<(), paceline_data::DataError>(())
/// ```
#[derive(Clone)]
pub struct OwnData {
    train: Arc<dyn Samples>,
    val: Arc<dyn Samples>,
    kind: SampleKind,
    classes: usize,
    class_names: Option<Vec<String>>,
    normalisation: Option<(Vec<f32>, Vec<f32>)>,
    treatment: Treatment,
}

impl OwnData {
    /// A set of samples of this kind and so many classes (of tokens: the vocabulary), from two pieces of code.
    pub fn new(kind: SampleKind, classes: usize, train: impl Samples + 'static, val: impl Samples + 'static) -> Self {
        let (train, val) = (Arc::new(train), Arc::new(val));
        Self { train, val, kind, classes, class_names: None, normalisation: None, treatment: Treatment::default() }
    }

    /// Names the classes, in the order of their numbers; otherwise their numbers are their names.
    pub fn class_names(self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { class_names: Some(names.into_iter().map(Into::into).collect()), ..self }
    }

    /// What is subtracted from each channel and what it is then divided by. Values of a pixel of bytes count from 0 to 1. Otherwise bytes
    /// have the mean and deviation of the training half, and numbers stay as they are.
    pub fn normalise(self, mean: impl Into<Vec<f32>>, std: impl Into<Vec<f32>>) -> Self {
        Self { normalisation: Some((mean.into(), std.into())), ..self }
    }

    /// What `--augment standard` does to training images of bytes: a random window of an image with `pad` black pixels on every side, and
    /// if `flip`, a mirror image by chance. Otherwise nothing. `--augment strong` goes on from there.
    pub fn augment(self, pad: usize, flip: bool) -> Self {
        Self { treatment: Treatment { pad, flip, ..self.treatment }, ..self }
    }

    /// Opens both halves under a name.
    ///
    /// # Errors
    /// When samples, classes, names or means do not go together; the sentence says what is wrong.
    pub fn open(&self, name: &str) -> Result<(Own, Own), DataError> {
        self.check(name)?;
        let mut info = self.info(name);
        if !info.mean.is_empty() && self.normalisation.is_none() && !self.treatment_of_samples().numbers {
            (info.mean, info.std) = self.half(&info, Split::Train).moments()?;
        }
        Ok((self.half(&info, Split::Train), self.half(&info, Split::Val)))
    }

    /// What is known without a look at any sample but the first.
    ///
    /// # Errors
    /// As [`OwnData::open`].
    pub fn outline(&self, name: &str) -> Result<Outline, DataError> {
        self.check(name)?;
        Ok(Outline { info: self.info(name), held_bytes: self.train.held_bytes() + self.val.held_bytes() })
    }

    /// A number that differs where two processes bring different data under the same name: from what is announced and from the first, the
    /// middle and the last sample of each half.
    pub fn fingerprint(&self) -> u64 {
        let shape = match self.kind {
            SampleKind::Image { height, width, channels } => [height, width, channels],
            SampleKind::Tokens { sequence } => [sequence, 0, 0],
        };
        let mut words: Vec<u64> = shape.into_iter().chain([self.classes]).map(|word| word as u64).collect();
        for half in [&self.train, &self.val] {
            words.push(half.len() as u64);
            let last = half.len().saturating_sub(1);
            let some = [0, half.len() / 2, last].into_iter().filter(|&index| index < half.len());
            // One that panics is told of by name when the set is opened.
            words.extend(some.map(|index| ask(&**half, index, digest).unwrap_or_default()));
        }
        random::key(&words)
    }

    fn half(&self, info: &Info, split: Split) -> Own {
        let samples = match split {
            Split::Train => &self.train,
            Split::Val => &self.val,
        };
        Own { info: Info { split, len: samples.len(), ..info.clone() }, samples: Arc::clone(samples) }
    }

    /// Of the training half; bytes that nobody has looked at have means of the middle.
    fn info(&self, name: &str) -> Info {
        let treatment = self.treatment_of_samples();
        let channels = if let SampleKind::Image { channels, .. } = self.kind { channels } else { 0 };
        let as_they_are = if treatment.numbers { (0.0, 1.0) } else { (0.5, 0.25) };
        let (mean, std) = match &self.normalisation {
            Some((mean, std)) => (mean.clone(), std.clone()),
            None => (vec![as_they_are.0; channels], vec![as_they_are.1; channels]),
        };
        let numbered = || (0..self.classes).map(|class| class.to_string()).collect();
        Info {
            source: Source::Own(treatment),
            name: name.to_owned(),
            split: Split::Train,
            len: self.train.len(),
            kind: self.kind,
            classes: self.classes,
            class_names: self.class_names.clone().unwrap_or_else(numbered),
            mean,
            std,
        }
    }

    /// The first sample says whether they are bytes or numbers.
    fn treatment_of_samples(&self) -> Treatment {
        let is_values = |sample: &Sample<'_>| matches!(sample, Sample::Values { .. });
        let numbers = !self.train.is_empty() && ask(&*self.train, 0, is_values).unwrap_or(false);
        Treatment { numbers, ..self.treatment }
    }
}

impl fmt::Debug for OwnData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnData({} + {} of {:?})", self.train.len(), self.val.len(), self.kind)
    }
}

/// Asks for a sample. Code that panics is answered as code that gives nonsense: it is not ours.
fn ask<T>(samples: &dyn Samples, index: usize, read: impl FnOnce(&Sample<'_>) -> T) -> Result<T, String> {
    let read = catch_unwind(AssertUnwindSafe(|| read(&samples.sample(index))));
    read.map_err(|panic| format!("the program panicked: {}", words_of(&*panic)))
}

fn digest(sample: &Sample<'_>) -> u64 {
    let words: Vec<u64> = match sample {
        Sample::Image { pixels, label } => pixels.iter().map(|&byte| byte.into()).chain([*label as u64]).collect(),
        Sample::Values { values, label } => {
            values.iter().map(|value| value.to_bits().into()).chain([*label as u64]).collect()
        }
        Sample::Tokens { tokens, targets } => tokens.iter().chain(&**targets).map(|&token| token as u64).collect(),
    };
    random::key(&words)
}

/// One half of a set of one's own, opened.
pub struct Own {
    info: Info,
    samples: Arc<dyn Samples>,
}

impl Own {
    pub(crate) fn info(&self) -> &Info {
        &self.info
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.samples.held_bytes()
    }

    /// Whether images are numbers instead of bytes.
    pub(crate) fn holds_numbers(&self) -> bool {
        matches!(self.info.source, Source::Own(Treatment { numbers: true, .. }))
    }

    pub(crate) fn label(&self, sample: usize) -> Result<i32, DataError> {
        self.with(sample, |found| match found {
            Sample::Image { label, .. } | Sample::Values { label, .. } => self.class(*label),
            Sample::Tokens { .. } => Err("it is a sequence of tokens".into()),
        })
    }

    /// An image of bytes; one of numbers as it looks where black is 0 and white is 1.
    pub(crate) fn read(&self, sample: usize, image: &mut Pixels) -> Result<i32, DataError> {
        let [height, width, channels] = self.shape();
        self.with(sample, |found| match found {
            Sample::Image { pixels, label } => {
                self.fits(pixels.len())?;
                image.copy_from(height, width, channels, pixels);
                self.class(*label)
            }
            Sample::Values { values, label } => {
                self.fits(values.len())?;
                image.reshape(height, width, channels);
                let seen = |value: &f32| (value * 255.0).round().clamp(0.0, 255.0) as u8;
                image.data.iter_mut().zip(&**values).for_each(|(byte, value)| *byte = seen(value));
                self.class(*label)
            }
            Sample::Tokens { .. } => Err("it is a sequence of tokens, and the set was announced to hold images".into()),
        })
    }

    /// An image of numbers.
    pub(crate) fn read_values(&self, sample: usize, out: &mut [f32]) -> Result<i32, DataError> {
        self.with(sample, |found| match found {
            Sample::Values { values, label } => {
                self.fits(values.len())?;
                out.copy_from_slice(values);
                self.class(*label)
            }
            _ => Err("it does not hold numbers, as the first one does".into()),
        })
    }

    pub(crate) fn read_tokens(&self, sample: usize, out: &mut [i32], next: &mut [i32]) -> Result<(), DataError> {
        self.with(sample, |found| {
            let Sample::Tokens { tokens, targets } = found else {
                return Err("it is no sequence of tokens, which the set was announced to hold".into());
            };
            for (given, taken) in [(tokens, out), (targets, next)] {
                if given.len() != taken.len() {
                    return Err(format!("it has {} tokens or targets instead of {}", given.len(), taken.len()));
                }
                given
                    .iter()
                    .try_for_each(|&token| self.class(usize::try_from(token).unwrap_or(usize::MAX)).map(drop))?;
                taken.copy_from_slice(given);
            }
            Ok(())
        })
    }

    /// Asks for a sample.
    fn with<T>(&self, index: usize, read: impl FnOnce(&Sample<'_>) -> Result<T, String>) -> Result<T, DataError> {
        assert!(index < self.info.len, "sample {index} of {}", self.info.len);
        let read = ask(&*self.samples, index, read).and_then(|read| read);
        read.map_err(|problem| DataError::Sample { set: self.info.name.clone(), half: self.info.split, index, problem })
    }

    fn shape(&self) -> [usize; 3] {
        match self.info.kind {
            SampleKind::Image { height, width, channels } => [height, width, channels],
            SampleKind::Tokens { .. } => [0; 3],
        }
    }

    fn fits(&self, length: usize) -> Result<(), String> {
        let [height, width, channels] = self.shape();
        if length == height * width * channels {
            return Ok(());
        }
        Err(format!("it has {length} values, and {height}×{width}×{channels} are {}", height * width * channels))
    }

    fn class(&self, label: usize) -> Result<i32, String> {
        if label < self.info.classes {
            return Ok(label as i32);
        }
        Err(format!("its class or token is {label}, and there are {} of them, from 0", self.info.classes))
    }

    /// Mean and deviation of every channel, from exact sums.
    fn moments(&self) -> Result<(Vec<f32>, Vec<f32>), DataError> {
        let (mut moments, mut image) = (Moments::default(), Pixels::default());
        for sample in 0..self.info.len {
            self.read(sample, &mut image)?;
            moments.add(&image);
        }
        let (mean, std) = moments.mean_and_std();
        // A channel that is the same everywhere says nothing; it is not divided by nothing.
        let std = std.into_iter().map(|std| if std > 0.0 { std as f32 } else { 1.0 });
        Ok((mean.into_iter().map(|mean| mean as f32).collect(), std.collect()))
    }
}

impl fmt::Debug for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Own").field("info", &self.info).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
