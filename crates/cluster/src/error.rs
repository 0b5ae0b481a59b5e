//! What can go wrong between members, told apart by who has to act.

use paceline_system::disk::DiskError;

use crate::membership::Verdict;

/// Why a process could not join its run, or a run could not go on.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The input cannot work; the sentence says what to set or type. Nothing was started.
    #[error("{0}")]
    Refused(String),
    /// The input was fine and something broke; the sentence names who and where.
    #[error("{0}")]
    Failed(String),
    /// Everybody ends, for the same reason.
    #[error("{0}")]
    Ended(Verdict),
    /// The disk refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

impl ClusterError {
    /// Whether the user's input was refused (exit code 2) rather than something failing (exit code 1).
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Refused(_) | Self::Disk(_) => true,
            Self::Failed(_) | Self::Ended(_) => false,
        }
    }
}

/// The short way to refuse.
pub(crate) fn refused<T>(sentence: impl Into<String>) -> Result<T, ClusterError> {
    Err(ClusterError::Refused(sentence.into()))
}
