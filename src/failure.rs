//! How a command ends badly: a sentence on standard error and an exit code.

use std::fmt::Display;
use std::process::ExitCode;
use std::time::Duration;

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
use crate::cluster::speaker::ends_with_the_first;
use crate::run::team::variables;
use crate::system::clock::sleep;

/// Until a launcher has read what a process wrote. MPICH's tears its pipes down as soon as it knows of a process
/// that has failed: on busy cores it once came to know before it had read.
const TO_BE_READ: Duration = Duration::from_millis(500);

/// A command did not do what was asked.
#[derive(Debug)]
pub struct Failure {
    message: String,
    refused: bool,
    /// What it comes from, as long as nothing was added to it.
    cause: Option<Box<TrainError>>,
    /// It would come again if the same were done again.
    in_vain: bool,
    /// It is said for all processes of a run, by one of them.
    for_all: bool,
    /// Another process says it.
    silent: bool,
}

impl Failure {
    /// The user's input cannot work; the sentence says what to type.
    pub fn refused(message: impl Display) -> Self {
        Self { message: message.to_string(), refused: true, in_vain: true, for_all: false, silent: false, cause: None }
    }

    /// The input was fine and something broke.
    pub fn failed(message: impl Display) -> Self {
        Self {
            message: message.to_string(),
            refused: false,
            in_vain: false,
            for_all: false,
            silent: false,
            cause: None,
        }
    }

    /// Of processes that have said what is wrong themselves.
    pub fn said(refused: bool, in_vain: bool) -> Self {
        Self { refused, in_vain, silent: true, ..Self::failed("other ranks have failed, and have said why above") }
    }

    /// Of a run that has begun: whatever ends it is no refusal.
    pub fn after_start(self) -> Self {
        Self { refused: false, ..self }
    }

    /// Whether the same, done again, would fail again: a refusal, or a loss that is not a number.
    pub fn is_in_vain(&self) -> bool {
        self.in_vain
    }

    /// The same, done again, would fail again, or not.
    pub fn in_vain(self, in_vain: bool) -> Self {
        Self { in_vain, ..self }
    }

    /// Whether it is a refusal.
    pub fn is_refusal(&self) -> bool {
        self.refused
    }

    /// Of several processes that fail together, one speaks for all.
    pub fn for_all(self, for_all: bool) -> Self {
        Self { for_all, ..self }
    }

    /// Whether it is said for all.
    pub fn is_for_all(&self) -> bool {
        self.for_all
    }

    /// Ends without a word: another process of the run tells the user.
    pub fn silently(self) -> Self {
        Self { silent: true, ..self }
    }

    /// Says it here after all.
    pub fn aloud(self) -> Self {
        Self { silent: false, ..self }
    }

    /// Says more.
    pub fn and(mut self, sentence: &str) -> Self {
        self.message += sentence;
        self.cause = None;
        self
    }

    /// Whether it says something already.
    pub fn says(&self, words: &str) -> bool {
        self.message.contains(words)
    }

    /// The exit code of a process that ends with it.
    pub fn code(&self) -> u8 {
        if self.refused { 2 } else { 1 }
    }

    /// As a value, for a program that goes on.
    pub fn into_error(self) -> TrainError {
        match self {
            Self { cause: Some(cause), .. } => *cause,
            Self { message, refused: true, .. } => TrainError::Refused(message),
            Self { message, .. } => TrainError::Failed(message),
        }
    }

    /// Says it, and stays until a launcher has read it that would otherwise clean up first.
    pub fn report(self) -> ExitCode {
        if !self.silent {
            // Names of files and classes stand in sentences, and a terminal would obey what is in them.
            eprintln!("error: {}", printable_lines(&self.message));
            if ends_with_the_first(&variables()) {
                sleep(TO_BE_READ);
            }
        }
        ExitCode::from(self.code())
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
        let refused = error.is_refusal();
        let in_vain = error.is_in_vain();
        let (message, cause) = (error.to_string(), Some(Box::new(error)));
        Self { refused, in_vain, for_all: false, silent: false, message, cause }
    }
}

impl From<CommError> for Failure {
    fn from(error: CommError) -> Self {
        Self::failed(error)
    }
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        let refused = error.is_refusal();
        Self { refused, in_vain: refused, for_all: false, silent: false, message: error.to_string(), cause: None }
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
