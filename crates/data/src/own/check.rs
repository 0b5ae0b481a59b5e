//! Whether what a program says of its data goes together, before any run starts.

use super::{OwnData, Sample, ask};
use crate::DataError;
use crate::dataset::{CLASSES_MAX, SampleKind, Split};
use crate::spec::SIDE_MAX;

/// Values per pixel: hyperspectral cameras have a few hundred.
pub const CHANNELS_MAX: usize = 1024;

/// Tokens of a sample.
const SEQUENCE_MAX: usize = 1 << 24;

impl OwnData {
    /// Refuses what cannot work.
    pub(super) fn check(&self, name: &str) -> Result<(), DataError> {
        let refuse = |sentence: String| Err(DataError::refused(format!("data `{name}`: {sentence}")));
        let within = |value: usize, most: usize| (1..=most).contains(&value);
        match self.kind {
            SampleKind::Image { height, width, channels } => {
                if !within(height, SIDE_MAX) || !within(width, SIDE_MAX) || !within(channels, CHANNELS_MAX) {
                    return refuse(format!(
                        "images of {height}×{width}×{channels} cannot be; sides are 1 to {SIDE_MAX}, channels 1 to {CHANNELS_MAX}"
                    ));
                }
            }
            SampleKind::Tokens { sequence } if !within(sequence, SEQUENCE_MAX) => {
                return refuse(format!("sequences of {sequence} tokens cannot be; they have 1 to {SEQUENCE_MAX}"));
            }
            SampleKind::Tokens { .. } => {}
        }
        if !within(self.classes, CLASSES_MAX) {
            return refuse(format!("{} classes cannot be; there are 1 to {CLASSES_MAX}", self.classes));
        }
        if let Some(names) = self.class_names.as_ref().filter(|names| names.len() != self.classes) {
            return refuse(format!("{} classes have {} names; give one for each", self.classes, names.len()));
        }
        for (half, samples) in [("training", &self.train), ("evaluation", &self.val)] {
            if samples.is_empty() {
                return refuse(format!("it has no sample for {half}; give at least one"));
            }
        }
        let first = ask(&*self.train, 0, |sample| matches!(sample, Sample::Tokens { .. }));
        let is_tokens = first.map_err(|problem| {
            let (set, half, index) = (name.to_owned(), Split::Train, 0);
            DataError::Sample { set, half, index, problem }
        })?;
        let is_image = matches!(self.kind, SampleKind::Image { .. });
        if is_image == is_tokens {
            return refuse(format!("its samples are announced as {:?}, and the first one is none", self.kind));
        }
        match &self.normalisation {
            Some((mean, std)) => self.info(name).with_normalisation(mean.clone(), std.clone()).map(drop),
            None => Ok(()),
        }
    }
}
