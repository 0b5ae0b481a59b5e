//! What can be typed behind `paceline choose`, and the words of a training to which a choice adds some.

use clap::{Args, Parser};

use super::{Cli, Command, Train, parse};
use crate::failure::Failure;

const EXAMPLES: &str = "Examples:
  paceline choose --model alexnet --data folder:DIR --batch 32              which is fastest: threads, replicas, processes, stages
  paceline choose --model resnet20 --data cifar10:DIR --choose-budget 5m    more time, so that more is measured, and more often
  paceline choose --model resnet20 --data cifar10:DIR --workers 2           of those with two workers
  paceline choose --model alexnet --data folder:DIR --nodes 4 --link-bandwidth 10   and whether four such machines are faster
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
    /// Say too whether so many machines like this one are faster together
    #[arg(long, value_name = "N", value_parser = parse::workers, allow_negative_numbers = true, conflicts_with = "hosts")]
    pub nodes: Option<usize>,
    /// Bandwidth of the links between them, in Gbit/s [default: 1]
    #[arg(long, value_name = "GBIT", value_parser = parse::positive, requires = "nodes")]
    pub link_bandwidth: Option<f64>,
    /// Latency of the links between them, in microseconds [default: 50]
    #[arg(long, value_name = "MICROSECONDS", value_parser = parse::positive, requires = "nodes")]
    pub link_latency: Option<f64>,
    /// What is trained, and what of the answer is said already.
    #[command(flatten)]
    pub train: Train,
}

/// Flags with a value, and what stands behind them, taken out of some words.
pub fn without(words: impl Iterator<Item = String>, flags: &[&str]) -> Vec<String> {
    let mut is_value = false;
    let stays = |word: &String| {
        let belongs = std::mem::take(&mut is_value);
        is_value = !belongs && flags.contains(&word.as_str());
        let is_joined = word.split_once('=').is_some_and(|(flag, _)| flags.contains(&flag));
        !belongs && !is_value && !is_joined
    };
    words.filter(stays).collect()
}

impl Train {
    /// What this process was started with, and what `--split auto` has come to: all of it on this machine.
    pub fn words(&self) -> Vec<String> {
        let own = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
        if self.chosen.is_empty() {
            return own.collect();
        }
        without(own, &["--hosts"]).into_iter().chain(self.chosen.iter().cloned()).collect()
    }

    /// This process's own words with what `--split auto` has come to, on this machine.
    ///
    /// # Errors
    /// When they contradict each other.
    pub fn with(&self, chosen: Vec<String>) -> Result<Self, Failure> {
        let own = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
        let all = without(own, &["--hosts"]).into_iter().chain(chosen.iter().cloned());
        match Cli::try_parse_from(all).map_err(Failure::refused)?.command {
            Command::Train(train) => Ok(Self { chosen, ..*train }),
            _ => unreachable!("only a training is given more words"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_taken_out_with_their_values() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let left = without(
            words("train --hosts a,b --batch 8 --split=auto --hosts=c -q").into_iter(),
            &["--hosts", "--split"],
        );
        assert_eq!(left, words("train --batch 8 -q"));
    }
}
