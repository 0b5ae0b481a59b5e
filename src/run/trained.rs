//! What a run leaves: a model that predicts, weights that can be copied, an ONNX file.

use std::path::{Path, PathBuf};

use crate::system::threads;
use crate::tensor::Precision;
use crate::train::checkpoint::{CheckedWeights, find_weights};
use crate::train::export::to_onnx;
use crate::train::predict::{Predictor, PredictorOptions};
use crate::train::{Outcome, Registry, TrainError};

use super::surroundings;

/// A run that has ended well, with the weights of its best checkpoint.
///
/// ```no_run
/// use paceline::prelude::*;
///
/// let trained = Run::new(Config { epochs: 2, ..Config::default() }).train()?;
/// let mut predictor = trained.predictor()?;
/// let guess = &predictor.predict_values(&[0.5; 32 * 32 * 3], 1)?[0];
/// println!("{} ({:.0}%)", guess.name, 100.0 * guess.probability);
/// trained.export_onnx("model.onnx")?;
/// # Ok::<(), TrainError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Trained {
    outcome: Outcome,
    registry: Registry,
}

impl Trained {
    pub(super) fn new(outcome: Outcome, registry: Registry) -> Self {
        Self { outcome, registry }
    }

    /// Why it ended, after how many steps, and the last evaluation.
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// The accuracy of the last evaluation, from 0 to 1; 0 where there was none.
    pub fn accuracy(&self) -> f64 {
        self.outcome.evaluation.as_ref().map_or(0.0, |tally| tally.accuracy())
    }

    /// The run's folder: configuration, events, checkpoints, report.
    pub fn folder(&self) -> &Path {
        &self.outcome.run
    }

    /// The weights file of the best checkpoint, in PyTorch's names and layouts.
    ///
    /// # Errors
    /// When the run has no checkpoint any more.
    pub fn weights(&self) -> Result<PathBuf, TrainError> {
        find_weights(&surroundings().disk, self.folder())
    }

    /// The trained model, ready to answer on this machine's processor.
    ///
    /// # Errors
    /// When the checkpoint is not what was saved.
    pub fn predictor(&self) -> Result<Predictor, TrainError> {
        let (threads, precision) = (threads::available(), Precision::F32);
        let options = PredictorOptions { registry: &self.registry, threads, cuda: None, precision };
        Predictor::open(&surroundings().disk, &self.weights()?, &options)
    }

    /// Writes the weights to a file of their own, replacing what is there.
    ///
    /// # Errors
    /// When the checkpoint is not what was saved, or the disk refuses.
    pub fn save_weights(&self, file: impl AsRef<Path>) -> Result<(), TrainError> {
        let (disk, weights) = (surroundings().disk, self.weights()?);
        CheckedWeights::open(&disk, &weights)?;
        Ok(disk.write(file.as_ref(), &disk.read(&weights)?)?)
    }

    /// Writes the model as an ONNX file, replacing what is there.
    ///
    /// # Errors
    /// When the checkpoint is not what was saved, ONNX has no word for an operation, or the disk refuses.
    pub fn export_onnx(&self, file: impl AsRef<Path>) -> Result<(), TrainError> {
        let disk = surroundings().disk;
        let (_, bytes) = to_onnx(&disk, &self.weights()?, &self.registry)?;
        Ok(disk.write(file.as_ref(), &bytes)?)
    }
}
