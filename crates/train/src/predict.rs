//! A trained model used on single samples: image files, pixels, numbers, tokens.

use std::path::Path;
use std::sync::Arc;

use paceline_data::augment::{Augment, Op, SampleKey, Scratch};
use paceline_data::batch::Batch;
use paceline_data::decode::{DecodeLimits, decode_image};
use paceline_data::pixels::Pixels;
use paceline_nn::Input;
use paceline_nn::optim::{HyperParameters, Optimizer};
use paceline_system::disk::Disk;
use paceline_system::printable::{Shown, printable};
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::Cuda;
use paceline_tensor::{MemoryUse, Precision};

use crate::checkpoint::{Card, CheckedWeights};
use crate::engine::Place;
use crate::error::TrainError;
use crate::metrics;
use crate::registry::Registry;
use crate::replica::{Replica, ReplicaOptions};

/// A model that answers for one sample at a time.
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

/// Where and how a model answers.
#[derive(Clone, Debug)]
pub struct PredictorOptions<'a> {
    /// The models that can be named.
    pub registry: &'a Registry,
    /// Threads that compute, or prepare what a GPU computes on.
    pub threads: usize,
    /// The GPU, if it answers there.
    pub cuda: Option<&'a Arc<Cuda>>,
    /// What activations are stored as.
    pub precision: Precision,
}

impl Predictor {
    /// Builds the model that a weights file of a run describes.
    ///
    /// # Errors
    /// When the file does not say which model it is for, or nobody knows that model.
    pub fn open(disk: &Disk, weights: &Path, place: &PredictorOptions<'_>) -> Result<Self, TrainError> {
        let PredictorOptions { registry, threads, cuda, precision } = *place;
        let file = CheckedWeights::open(disk, weights)?;
        let card = file.card()?;
        let model = registry.find_model(&card.model)?;
        let rule = Optimizer::Sgd.rule(&HyperParameters::default()).expect("the defaults are in range");
        let options = ReplicaOptions {
            input: card.input()?,
            classes: card.class_names.len(),
            micro_batch: 1,
            other_sizes: Default::default(),
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
            slots: 0,
            shard: None,
        };
        let cpu = Arc::new(Cpu::new(threads));
        let place =
            cuda.map_or_else(|| Place::Cpu(Arc::clone(&cpu)), |cuda| Place::Cuda(Arc::clone(&cpu), Arc::clone(cuda)));
        let mut replica = Replica::for_evaluation(&model, options, &place)?;
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
    /// When the file cannot be read or is not an image, or the model does not read grey or colour images.
    pub fn predict(&mut self, disk: &Disk, image: &Path, count: usize) -> Result<Vec<Guess>, TrainError> {
        let channels = self.channels()?;
        if ![1, 3].contains(&channels) {
            return Err(TrainError::Refused(format!(
                "{} reads images of {channels} channels; predict works on grey and colour images",
                printable(&self.card.model)
            )));
        }
        let limits = DecodeLimits::for_side(self.card.input[0].max(self.card.input[1]));
        let bytes = disk.read_within(image, limits.file_bytes())?;
        decode_image(&bytes, limits, &mut self.scratch.image).map_err(|problem| {
            TrainError::Refused(format!("{} is not a JPEG or PNG image: {problem}", Shown(image)))
        })?;
        if channels == 1 {
            make_grey(&mut self.scratch.image);
        }
        self.answer_image(count)
    }

    /// The `count` best guesses for an image of bytes, best first. It is brought to the model's size as in evaluation.
    ///
    /// # Errors
    /// When it is empty or has other channels than the model reads.
    pub fn predict_pixels(&mut self, image: &Pixels, count: usize) -> Result<Vec<Guess>, TrainError> {
        let (channels, bytes) = (self.channels()?, image.height * image.width * image.channels);
        if image.channels != channels || image.data.len() != bytes || bytes == 0 {
            return Err(TrainError::Refused(format!(
                "{} reads images of {channels} channels, and this one is {}×{}×{} with {} bytes",
                printable(&self.card.model),
                image.height,
                image.width,
                image.channels,
                image.data.len()
            )));
        }
        self.scratch.image.clone_from(image);
        self.answer_image(count)
    }

    /// The `count` best guesses for a sample of numbers of the model's own size, best first. They are normalised as in training.
    ///
    /// # Errors
    /// When there are more or fewer of them, or the model reads tokens.
    pub fn predict_values(&mut self, values: &[f32], count: usize) -> Result<Vec<Guess>, TrainError> {
        self.channels()?;
        self.check_length(values.len())?;
        let mut images = values.to_vec();
        self.augment.normalise(&mut images);
        self.answer(Batch { images, targets: vec![0], size: 1, ..Batch::default() }, count)
    }

    /// The `count` best guesses for what follows a sequence of tokens of the model's own length, best first.
    ///
    /// # Errors
    /// When there are more or fewer of them, one is no token of the vocabulary, or the model reads images.
    pub fn predict_tokens(&mut self, tokens: &[i32], count: usize) -> Result<Vec<Guess>, TrainError> {
        let Input::Tokens { .. } = self.card.input()? else {
            return Err(TrainError::Refused(format!("{} reads images, not tokens", printable(&self.card.model))));
        };
        self.check_length(tokens.len())?;
        let known = 0..self.card.class_names.len() as i32;
        if let Some(token) = tokens.iter().find(|token| !known.contains(token)) {
            return Err(TrainError::Refused(format!("token {token} is none of the {} that there are", known.end)));
        }
        let (tokens, targets) = (tokens.to_vec(), vec![0; tokens.len()]);
        self.answer(Batch { tokens, targets, size: 1, ..Batch::default() }, count)
    }

    fn channels(&self) -> Result<usize, TrainError> {
        match self.card.input()? {
            Input::Image { channels, .. } => Ok(channels),
            Input::Tokens { .. } => {
                let model = printable(&self.card.model);
                Err(TrainError::Refused(format!("{model} reads text; predict works on images")))
            }
        }
    }

    fn check_length(&self, found: usize) -> Result<(), TrainError> {
        let wanted: usize = self.card.input.iter().product();
        if found == wanted {
            return Ok(());
        }
        let model = printable(&self.card.model);
        Err(TrainError::Refused(format!(
            "{model} reads samples of {wanted} values ({:?}), not {found}",
            self.card.input
        )))
    }

    /// Answers for the image in the scratch memory.
    fn answer_image(&mut self, count: usize) -> Result<Vec<Guess>, TrainError> {
        let mut images = vec![0.0; self.card.input.iter().product()];
        self.augment.apply(&mut self.scratch, SampleKey { seed: 0, epoch: 0, sample: 0 }, &mut images);
        self.answer(Batch { images, targets: vec![0], size: 1, ..Batch::default() }, count)
    }

    /// The best of the last answer: of images there is one, of tokens one for each.
    fn answer(&mut self, batch: Batch, count: usize) -> Result<Vec<Guess>, TrainError> {
        let (logits, _) = self.replica.evaluate(&batch)?;
        let last = &logits[logits.len() - self.card.class_names.len()..];
        let guess = |(class, probability): (usize, f64)| Guess {
            class,
            name: self.card.class_names[class].clone(),
            probability,
        };
        Ok(metrics::top(last, count).into_iter().map(guess).collect())
    }
}

/// What evaluation did to the images, for images of any size: where the data's own were of one size and not resized,
/// these are.
fn evaluation_of(card: &Card) -> Result<Augment, TrainError> {
    let [height, width, _] = card.input[..] else {
        // Of tokens nothing is made that could be looked at; any table will do.
        return Ok(Augment::new(vec![Op::Normalise { mean: vec![0.0], std: vec![1.0] }])?);
    };
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
