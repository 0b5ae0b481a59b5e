//! How a command ends badly: a sentence on standard error and an exit code.

use std::fmt::Display;
use std::process::ExitCode;

use crate::cluster::ClusterError;
use crate::comm::CommError;
use crate::data::DataError;
use crate::lab::LabError;
use crate::system::disk::DiskError;
use crate::system::printable::{printable, printable_lines};
use crate::tensor::GraphError;
use crate::train::TrainError;
use clap::Parser;

use crate::arguments::Cli;

/// A command did not do what was asked.
#[derive(Debug)]
pub struct Failure {
    message: String,
    refused: bool,
    /// Another process says it.
    silent: bool,
}

impl Failure {
    /// The user's input cannot work; the sentence says what to type.
    pub fn refused(message: impl Display) -> Self {
        Self { message: message.to_string(), refused: true, silent: false }
    }

    /// The input was fine and something broke.
    pub fn failed(message: impl Display) -> Self {
        Self { message: message.to_string(), refused: false, silent: false }
    }

    /// Of a run that has begun: whatever ends it is no refusal.
    pub fn after_start(self) -> Self {
        Self { refused: false, ..self }
    }

    /// Ends without a word: another process of the run tells the user.
    pub fn silently(self) -> Self {
        Self { silent: true, ..self }
    }

    /// Says more.
    pub fn and(mut self, sentence: &str) -> Self {
        self.message += sentence;
        self
    }

    /// Whether it says something already.
    pub fn says(&self, words: &str) -> bool {
        self.message.contains(words)
    }

    /// Says it.
    pub fn report(self) -> ExitCode {
        if !self.silent {
            // Names of files and classes stand in sentences, and a terminal would obey what is in them.
            eprintln!("error: {}", printable_lines(&self.message));
        }
        ExitCode::from(if self.refused { 2 } else { 1 })
    }
}

/// Says what is wrong with the words that were typed, or shows the help that was asked for.
pub fn report_usage(error: clap::Error) -> ExitCode {
    // The sentence repeats words; made again from words that can be shown, it holds nothing else.
    let words = std::env::args_os().map(|word| printable(&word.to_string_lossy()));
    let error = Cli::try_parse_from(words).err().unwrap_or(error);
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Self {
        Self { refused: error.is_refusal(), message: error.to_string(), silent: false }
    }
}

impl From<CommError> for Failure {
    fn from(error: CommError) -> Self {
        Self::failed(error)
    }
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        Self { refused: error.is_refusal(), message: error.to_string(), silent: false }
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        TrainError::from(error).into()
    }
}

impl From<GraphError> for Failure {
    fn from(error: GraphError) -> Self {
        TrainError::from(error).into()
    }
}

impl From<DiskError> for Failure {
    fn from(error: DiskError) -> Self {
        // What was asked for may be right; there is no room for it.
        if error.is_full() { Self::failed(error) } else { Self::refused(error) }
    }
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Self {
        Self::refused(error)
    }
}
