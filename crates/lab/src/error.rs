//! What can go wrong while a run is read or described.

use std::path::PathBuf;

use paceline_system::disk::DiskError;
use paceline_system::printable::Shown;

/// What went wrong, and where.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The disk refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A line in the middle of an event file is not an event.
    #[error("{}, line {line}: not an event: {problem}", Shown(path))]
    Line {
        /// The event file.
        path: PathBuf,
        /// The line's number, from 1.
        line: usize,
        /// What the parser said.
        problem: String,
    },
    /// The event file was written by a later Paceline, whose fields mean something else.
    #[error(
        "{}, line {line}: written with event schema {found}, and this paceline reads up to {known}; use a newer paceline",
        Shown(path)
    )]
    Schema {
        /// The event file.
        path: PathBuf,
        /// The line's number, from 1.
        line: usize,
        /// The version in the file.
        found: u32,
        /// The newest version this program reads.
        known: u32,
    },
    /// The folder is not a run.
    #[error("{} has no events/*.jsonl, so it is not a run; name the folder that `paceline train` printed", Shown(run))]
    NoEvents {
        /// The folder that was named.
        run: PathBuf,
    },
}
