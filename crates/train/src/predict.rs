//! A trained model used on single images.

use std::path::Path;
use std::sync::Arc;

use paceline_data::augment::{Augment, Op, SampleKey, Scratch};
use paceline_data::batch::Batch;
use paceline_data::decode::{DecodeLimits, decode_image};
use paceline_data::pixels::Pixels;
use paceline_nn::optim::{HyperParameters, Optimizer};
use paceline_nn::{Input, zoo};
use paceline_system::disk::Disk;
use paceline_system::printable::{Shown, printable};
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::Cuda;
use paceline_tensor::{MemoryUse, Precision};

use crate::checkpoint::{Card, CheckedWeights};
use crate::engine::Place;
use crate::error::TrainError;
use crate::metrics;
use crate::replica::{Replica, ReplicaOptions};

/// A model that answers for one image at a time.
#[derive(Debug)]
pub struct Predictor {
    replica: Replica,
    card: Card,
    augment: Augment,
    scratch: Scratch,
}

/// One guess.
#[derive(Clone, Debug, PartialEq)]
pub struct Guess {
    /// The class' number.
    pub class: usize,
    /// Its name.
    pub name: String,
    /// How sure the model is, from 0 to 1.
    pub probability: f64,
}

impl Predictor {
    /// Builds the model that a weights file of a run describes, on so many threads or on a GPU.
    ///
    /// # Errors
    /// When the file does not say which model it is for, or the model does not read images.
    pub fn open(
        disk: &Disk,
        weights: &Path,
        (threads, cuda): (usize, Option<&Arc<Cuda>>),
        precision: Precision,
    ) -> Result<Self, TrainError> {
        let file = CheckedWeights::open(disk, weights)?;
        let card = file.card()?;
        let Input::Image { channels, .. } = card.input()? else {
            return Err(TrainError::Refused(format!("{} reads text; predict works on images", printable(&card.model))));
        };
        if ![1, 3].contains(&channels) {
            return Err(TrainError::Refused(format!(
                "{} reads images of {channels} channels; predict works on grey and colour images",
                printable(&card.model)
            )));
        }
        let entry = zoo::find(&card.model).map_err(|error| TrainError::Refused(error.to_string()))?;
        let rule = Optimizer::Sgd.rule(&HyperParameters::default()).expect("the defaults are in range");
        let options = ReplicaOptions {
            input: card.input()?,
            classes: card.class_names.len(),
            micro_batch: 1,
            other_sizes: [0; 3],
            accumulate: 1,
            smoothing: 0.0,
            seed: 0,
            rule,
            precision,
            memory: MemoryUse::Normal,
            clip_norm: None,
            sync_batch_norm: false,
            overlap: true,
            hosted: false,
            separate_gradients: false,
        };
        let cpu = Arc::new(Cpu::new(threads));
        let place =
            cuda.map_or_else(|| Place::Cpu(Arc::clone(&cpu)), |cuda| Place::Cuda(Arc::clone(&cpu), Arc::clone(cuda)));
        let mut replica = Replica::for_evaluation(entry, options, &place)?;
        file.load(&mut replica, &[])?;
        let augment = evaluation_of(&card)?;
        Ok(Self { replica, card, augment, scratch: Scratch::default() })
    }

    /// What the weights file says of itself.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// The `count` best guesses for an image file, best first.
    ///
    /// # Errors
    /// When the file cannot be read or is not an image.
    pub fn predict(&mut self, disk: &Disk, image: &Path, count: usize) -> Result<Vec<Guess>, TrainError> {
        let limits = DecodeLimits::for_side(self.card.input[0].max(self.card.input[1]));
        let bytes = disk.read_within(image, limits.file_bytes())?;
        decode_image(&bytes, limits, &mut self.scratch.image).map_err(|problem| {
            TrainError::Refused(format!("{} is not a JPEG or PNG image: {problem}", Shown(image)))
        })?;
        if self.card.input[2] == 1 {
            make_grey(&mut self.scratch.image);
        }
        let mut batch = Batch { targets: vec![0], size: 1, ..Batch::default() };
        batch.images.resize(self.card.input.iter().product(), 0.0);
        self.augment.apply(&mut self.scratch, SampleKey { seed: 0, epoch: 0, sample: 0 }, &mut batch.images);
        let (logits, _) = self.replica.evaluate(&batch)?;
        let guess = |(class, probability): (usize, f64)| Guess {
            class,
            name: self.card.class_names[class].clone(),
            probability,
        };
        Ok(metrics::top(&logits, count).into_iter().map(guess).collect())
    }
}

/// What evaluation did to the images, for images of any size: where the data's own were of one size and not resized,
/// these are.
fn evaluation_of(card: &Card) -> Result<Augment, TrainError> {
    let (height, width) = (card.input[0], card.input[1]);
    let mut ops = card.preprocess.clone();
    if !ops.iter().any(|op| matches!(op, Op::Resize { .. } | Op::CentreCrop { .. })) {
        ops.insert(0, Op::Resize { height, width });
    }
    Ok(Augment::new(ops)?)
}

/// Colours to the grey that looks as bright (ITU-R BT.601, in thousandths).
fn make_grey(image: &mut Pixels) {
    let grey = |rgb: &[u8]| {
        let [red, green, blue] = [rgb[0], rgb[1], rgb[2]].map(u32::from);
        ((299 * red + 587 * green + 114 * blue + 500) / 1000) as u8
    };
    image.data = image.data.chunks_exact(3).map(grey).collect();
    image.channels = 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grey_keeps_black_white_and_brightness() {
        let data = [[0, 0, 0], [255, 255, 255], [0, 255, 0], [255, 0, 0]].concat();
        let mut image = Pixels { height: 2, width: 2, channels: 3, data };
        make_grey(&mut image);
        assert_eq!((image.channels, image.data), (1, vec![0, 255, 150, 76]));
    }
}
