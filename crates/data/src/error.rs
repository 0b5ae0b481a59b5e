//! What can be wrong with data: the user's words, the disk, a file's bytes. Every sentence says what to type or which file.

use std::path::PathBuf;
use std::time::Duration;

use paceline_system::disk::DiskError;
use paceline_system::memory::OutOfMemory;
use paceline_system::printable::Shown;

use crate::dataset::Split;

/// Why data could not be had.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The user asked for something that does not exist or cannot work; the sentence says what to type instead.
    #[error("{0}")]
    Refused(String),
    /// The disk refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A file is not what its name promises.
    #[error("{} is not usable: {problem}", Shown(file))]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong with its bytes.
        problem: String,
    },
    /// More images are damaged than the user allowed.
    #[error(
        "{} is damaged ({problem}); {count} damaged so far, {allowed} allowed. \
         Repair or remove it, or type --damaged-max {count} to go on without it",
        Shown(file)
    )]
    Damaged {
        /// The image that was one too many.
        file: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// Damaged images seen, this one included.
        count: usize,
        /// How many the user allowed.
        allowed: usize,
    },
    /// A file of an opened set cannot be read in the middle of a run.
    #[error("{source} (epoch {epoch}, step {step})")]
    Reading {
        /// The epoch.
        epoch: u64,
        /// The step whose batch it belongs to.
        step: usize,
        /// What the disk said.
        source: DiskError,
    },
    /// Whoever has the data on another machine cannot be reached in the middle of a run, or does not answer as agreed.
    #[error("no data can be had from {place}: {problem}")]
    Far {
        /// Where it is.
        place: String,
        /// What went wrong.
        problem: String,
    },
    /// The loader delivered nothing for too long: a disk that hangs, or a machine that swaps.
    #[error("no batch arrived within {} s (epoch {epoch}, step {step}): the disk that holds the data may hang", waited.as_secs())]
    Stalled {
        /// The epoch.
        epoch: u64,
        /// The step whose batch did not come.
        step: usize,
        /// How long was waited.
        waited: Duration,
    },
    /// The user asked for an end while training waited for a batch.
    #[error("interrupted while waiting for data (epoch {epoch}, step {step})")]
    Interrupted {
        /// The epoch.
        epoch: u64,
        /// The step whose batch was waited for.
        step: usize,
    },
    /// Nobody says which portion of a batch comes next: the run ends.
    #[error("which data come next was not told: {why}")]
    NotTold {
        /// Why.
        why: String,
    },
    /// A batch could not be made because of a mistake in this program.
    #[error(
        "making a batch failed (epoch {epoch}, step {step}): {message}; this is a bug in Paceline, please report it"
    )]
    Panicked {
        /// The epoch.
        epoch: u64,
        /// The step whose batch it was.
        step: usize,
        /// What the panic said.
        message: String,
    },
    /// Code that gives samples has given one that cannot be used.
    #[error("sample {index} of {set} ({}) cannot be used: {problem}", half.name())]
    Sample {
        /// The set's name.
        set: String,
        /// Which half.
        half: Split,
        /// The sample's number.
        index: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// The system gave no memory for a batch or for a set.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// The operating system gave no thread.
    #[error("cannot start a loader thread: {0}; type fewer --loader-threads")]
    Thread(std::io::Error),
}

impl DataError {
    /// Whether the user's input was refused: a set that is not there or not usable, a wish that cannot work. Otherwise
    /// something failed, or was stopped, while a run that began well was going on.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Refused(_) | Self::Disk(_) | Self::Malformed { .. } | Self::Damaged { .. } => true,
            Self::Reading { .. } | Self::Far { .. } | Self::Stalled { .. } | Self::Interrupted { .. } => false,
            Self::NotTold { .. } | Self::Panicked { .. } | Self::Sample { .. } | Self::Memory(_) | Self::Thread(_) => {
                false
            }
        }
    }

    /// A sentence for the user.
    pub(crate) fn refused(sentence: impl Into<String>) -> Self {
        Self::Refused(sentence.into())
    }

    /// Wraps what a decoder said about bytes with the file they came from.
    pub(crate) fn malformed(file: &std::path::Path) -> impl FnOnce(String) -> Self {
        let file = file.to_owned();
        move |problem| Self::Malformed { file, problem }
    }
}
