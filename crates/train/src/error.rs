//! What can go wrong in a run, told apart by who has to act: the user (refused), or whoever looks into a failure.

use std::path::PathBuf;

use paceline_comm::CommError;
use paceline_data::DataError;
use paceline_nn::weights::WeightsError;
use paceline_system::disk::DiskError;
use paceline_system::memory::OutOfMemory;
use paceline_system::shell::resume_line;
use paceline_tensor::GraphError;
use paceline_tensor::device::cuda::CudaError;

/// Why a run did not start or did not go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The user asked for something that cannot work; the sentence says what to type. Nothing was overwritten.
    #[error("{0}")]
    Refused(String),
    /// Something ended the run that this process can only tell of, such as the end of another process; the sentence names it.
    #[error("{0}")]
    Failed(String),
    /// The folder for a new run holds one already.
    #[error("{} already holds a run; type {} to continue it, or another --run", run.display(), resume_line(run))]
    RunExists {
        /// The folder.
        run: PathBuf,
    },
    /// The folder for a new run holds something else.
    #[error("{} is not empty (it holds {}), and a run overwrites nothing; type another --run", folder.display(), entry.display())]
    NotEmpty {
        /// The folder.
        folder: PathBuf,
        /// Something in it.
        entry: PathBuf,
    },
    /// A checkpoint, or a file of one, is not what was saved.
    #[error("{what}. {offer}")]
    Damaged {
        /// What does not agree, beginning with the file's name.
        what: String,
        /// What to use instead, as a sentence.
        offer: String,
    },
    /// The run's folder, or something in it, was taken away under it.
    #[error(
        "{} is gone: it was removed or renamed while the run was going on, at step {step}. What is left of it can be resumed from where it \
         is now", path.display()
    )]
    Gone {
        /// What is not there any more.
        path: PathBuf,
        /// Updates done.
        step: u64,
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
    /// The system gave no memory although the run should have fitted: others have taken it, or a limit fell.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// The disk refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A checkpoint could not be saved; the one before is whole.
    #[error(
        "the checkpoint of step {step} could not be saved: {source}. {survivor}. Free some space, then type: {}",
        resume_line(run)
    )]
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
    #[error(
        "the events of step {step} could not be written: {source}. {survivor}. Free some space, then type: {}",
        resume_line(run)
    )]
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
         {advice}"
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
        /// What to do about it, as a sentence.
        advice: String,
    },
}

impl TrainError {
    /// Whether the same would happen again if the run were started again: a refusal, or a loss that is not a number.
    pub fn is_in_vain(&self) -> bool {
        self.is_refusal() || matches!(self, Self::NotANumber { .. })
    }

    /// Whether the user's input was refused (exit code 2) rather than the run failing (exit code 1). Of an error before the run began:
    /// once it has begun, whatever ends it is a failure.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Refused(_) | Self::RunExists { .. } | Self::NotEmpty { .. } => true,
            Self::Graph(_) | Self::Weights(_) | Self::Disk(_) => true,
            Self::Damaged { .. } | Self::Gone { .. } | Self::Failed(_) => false,
            Self::CheckpointNotSaved { .. } | Self::EventNotWritten { .. } => false,
            Self::Data(error) => error.is_refusal(),
            Self::Comm(error) => error.is_refusal(),
            Self::NotANumber { .. } | Self::Gpu(_) | Self::Memory(_) => false,
        }
    }
}
