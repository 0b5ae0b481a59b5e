//! What can go wrong in a run, told apart by who has to act: the user (refused), or whoever looks into a failure.

use std::path::PathBuf;

use paceline_comm::CommError;
use paceline_data::DataError;
use paceline_nn::weights::WeightsError;
use paceline_system::disk::DiskError;
use paceline_tensor::GraphError;
use paceline_tensor::device::cuda::CudaError;

/// Why a run did not start or did not go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The user asked for something that cannot work; the sentence says what to type. Nothing was overwritten.
    #[error("{0}")]
    Refused(String),
    /// The folder for a new run holds one already.
    #[error("{} already holds a run; type paceline train --resume {} to continue it, or another --run", run.display(), run.display())]
    RunExists {
        /// The folder.
        run: PathBuf,
    },
    /// The data cannot be had.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model does not fit its input.
    #[error("{0}")]
    Graph(#[from] GraphError),
    /// A weights file does not fit.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Another rank, or the way to it, has failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The GPU, or one of its libraries, failed during the run.
    #[error("the GPU failed: {0}; what was saved before is whole: paceline train --resume continues from it")]
    Gpu(#[from] CudaError),
    /// The disk refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A checkpoint could not be saved; the one before is whole.
    #[error("the checkpoint of step {step} could not be saved: {source}. {survivor}. Free some space, then type: paceline train --resume {}", run.display())]
    CheckpointNotSaved {
        /// The step that was to be saved.
        step: u64,
        /// What the disk said.
        source: DiskError,
        /// Which checkpoint is still there, as a sentence.
        survivor: String,
        /// The run's folder.
        run: PathBuf,
    },
    /// An event could not be written, or not be told to a listener that writes it.
    #[error("the events of step {step} could not be written: {source}. {survivor}. Free some space, then type: paceline train --resume {}", run.display())]
    EventNotWritten {
        /// The step that was to be told.
        step: u64,
        /// What the disk said.
        source: DiskError,
        /// Which checkpoint is there, as a sentence.
        survivor: String,
        /// The run's folder.
        run: PathBuf,
    },
    /// The loss or a gradient stopped being a number.
    #[error(
        "the loss is not a number at step {step}: the first layer with such a result is `{layer}` ({op}). {survivor}. \
         Try a smaller learning rate (--lr), a warm-up (--warmup-epochs) or --clip-norm 1"
    )]
    NotANumber {
        /// The update that could not be made.
        step: u64,
        /// The first layer whose result is not finite.
        layer: String,
        /// Its operation.
        op: String,
        /// The last good checkpoint, as a sentence.
        survivor: String,
    },
}

impl TrainError {
    /// Whether the user's input was refused (exit code 2) rather than the run failing (exit code 1).
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Refused(_) | Self::RunExists { .. } | Self::Graph(_) | Self::Weights(_) | Self::Disk(_) => true,
            Self::CheckpointNotSaved { .. } | Self::EventNotWritten { .. } => true,
            Self::Data(error) => error.is_refusal(),
            Self::Comm(error) => error.is_refusal(),
            Self::NotANumber { .. } | Self::Gpu(_) => false,
        }
    }
}
