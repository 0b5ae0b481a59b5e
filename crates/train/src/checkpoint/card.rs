//! What a checkpoint says of itself: where its run stands, and how its weights are to be used.

use paceline_data::augment::Op;
use paceline_data::own::CHANNELS_MAX;
use paceline_nn::Input;
use paceline_system::printable::printable;
use serde::{Deserialize, Serialize};

use crate::class_names;
use crate::config::SIDE_MAX;
use crate::error::TrainError;
use crate::metrics::Tally;

/// Where a run stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Updates done.
    pub step: u64,
    /// The current epoch's sums so far.
    pub tally: Tally,
    /// The current epoch's training seconds so far.
    pub epoch_s: f64,
    /// The current epoch's seconds of waiting for data so far.
    pub data_wait_s: f64,
    /// The best validation accuracy at an epoch's end so far.
    pub best_top1: Option<f64>,
    /// The step whose checkpoint reached it.
    pub best_step: Option<u64>,
    /// A better one where a limit had ended the run between two of those evaluations. By itself, so that when to stop early does not
    /// depend on where a run was stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_between: Option<Evaluated>,
    /// Samples in the training set: another number would be another order.
    pub samples: u64,
    /// Epochs since it rose.
    pub stale_epochs: u64,
    /// Slots behind the optimizer's that the agreement keeps.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub kept_slots: usize,
}

impl Position {
    /// As a worker begins with it that takes part from here on: the epoch's sums are of what it has computed itself.
    pub fn at_joining(&self) -> Self {
        Self { tally: Tally::default(), epoch_s: 0.0, data_wait_s: 0.0, ..self.clone() }
    }
}

/// More slots than any agreement keeps.
pub const KEPT_SLOTS_MAX: usize = 8;

fn is_zero(slots: &usize) -> bool {
    *slots == 0
}

/// An accuracy, and the step that has it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// The share of the validation set whose best guess was right.
    pub top1: f64,
    /// Updates done.
    pub step: u64,
}

impl Position {
    /// The best evaluation so far, wherever it was.
    pub fn best(&self) -> Option<Evaluated> {
        let at_epoch = self.best_top1.zip(self.best_step).map(|(top1, step)| Evaluated { top1, step });
        [at_epoch, self.best_between].into_iter().flatten().reduce(|a, b| if b.top1 > a.top1 { b } else { a })
    }

    /// Whether an accuracy is better than all so far.
    pub fn is_best(&self, top1: f64) -> bool {
        self.best().is_none_or(|best| top1 > best.top1)
    }
}

/// What somebody who finds a weights file needs to use it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// The model's name.
    pub model: String,
    /// Height, width and channels of the images, or the length of token sequences alone.
    pub input: Vec<usize>,
    /// The classes' names, or the vocabulary.
    #[serde(deserialize_with = "class_names::within_bounds")]
    pub class_names: Vec<String>,
    /// What evaluation does to an image before the model sees it; empty for text.
    pub preprocess: Vec<Op>,
    /// Updates made.
    pub step: u64,
}

impl Card {
    /// The model's input.
    ///
    /// # Errors
    /// When the card does not describe one, or contradicts itself: it came from a file.
    pub fn input(&self) -> Result<Input, TrainError> {
        let refuse = |what: &str| {
            Err(TrainError::Refused(format!("the weights file is for {}, but {what}", printable(&self.model))))
        };
        if self.class_names.is_empty() {
            return refuse("it names no classes");
        }
        match *self.input.as_slice() {
            [sequence] if sequence > 0 => Ok(Input::Tokens { sequence }),
            [height, width, channels] if (1..=SIDE_MAX).contains(&height) && (1..=SIDE_MAX).contains(&width) => {
                let channels_fit = |op: &Op| !matches!(op, Op::Normalise { mean, .. } if mean.len() != channels);
                if self.preprocess.iter().all(channels_fit) && (1..=CHANNELS_MAX).contains(&channels) {
                    Ok(Input::Image { size: [height, width], channels })
                } else {
                    refuse("its means are not those of its channels")
                }
            }
            _ => refuse("it describes an input that is neither image nor text"),
        }
    }
}
