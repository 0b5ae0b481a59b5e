//! What can be typed behind `paceline choose`, and the words of a training to which a choice adds some.

use clap::{Args, Parser};

use super::{Cli, Command, Train};
use crate::failure::Failure;

const EXAMPLES: &str = "Examples:
  paceline choose --model alexnet --data folder:DIR --batch 32              which is fastest: threads, replicas, processes, stages
  paceline choose --model resnet20 --data cifar10:DIR --choose-budget 5m    more time, so that more is measured, and more often
  paceline choose --model resnet20 --data cifar10:DIR --workers 2           of those with two workers
  paceline train --model resnet20 --data cifar10:DIR --split auto           trains with what was chosen, or measures first

A few steps of every set-up are made by `paceline train` itself, data included; what is said with other flags (--workers, --threads,
--memory-limit, …) stays as it is. What was found is kept by model, data, batch, machine and version. docs/choose.md has more.";

/// `paceline choose`
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Choose {
    /// Measure anew, although a choice for this training is kept
    #[arg(long)]
    pub again: bool,
    /// What is trained, and what of the answer is said already.
    #[command(flatten)]
    pub train: Train,
}

impl Train {
    /// What this process was started with, and what `--split auto` has added.
    pub fn words(&self) -> Vec<String> {
        let own = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
        own.chain(self.chosen.iter().cloned()).collect()
    }

    /// This process's own words with some more behind them.
    ///
    /// # Errors
    /// When they contradict each other.
    pub fn with(&self, words: Vec<String>) -> Result<Self, Failure> {
        let all = std::env::args_os().chain(words.iter().map(Into::into));
        match Cli::try_parse_from(all).map_err(Failure::refused)?.command {
            Command::Train(train) => Ok(Self { chosen: words, ..*train }),
            _ => unreachable!("only a training is given more words"),
        }
    }
}
