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
        // A value may be joined to its flag: --workers=2, -w=2, -w2.
        let is_joined = flags.iter().any(|flag| match word.strip_prefix(flag) {
            Some(value) => value.starts_with('=') || !value.is_empty() && !flag.starts_with("--"),
            None => false,
        });
        !belongs && !is_value && !is_joined
    };
    words.flat_map(apart).filter(stays).collect()
}

/// `-qw2` is `-q` and `-w2`: of the flags with one letter, -q alone has no value.
fn apart(word: String) -> Vec<String> {
    let rest = word.trim_start_matches(['q', '-']);
    if word.starts_with("-q") && !rest.is_empty() { vec!["-q".into(), format!("-{rest}")] } else { vec![word] }
}

/// The words of a training with those of a choice behind them, in place of whatever was typed of the same.
pub fn chosen_instead(own: impl Iterator<Item = String>, chosen: &[String]) -> Vec<String> {
    let mut replaced = Vec::new();
    for flag in chosen.iter().step_by(2) {
        match flag.as_str() {
            "--workers" => replaced.extend(["--workers", "-w", "--replicas"]),
            "--replicas" => replaced.extend(["--workers", "-w", "--replicas", "--carry"]),
            "--micro-batches" => replaced.extend(["--micro-batches", "--accumulate"]),
            // Of a pipeline or of the learning rate: each has its last word.
            "--schedule" => {}
            other => replaced.push(other),
        }
    }
    without(own, &replaced).into_iter().chain(chosen.iter().cloned()).collect()
}

impl Train {
    /// What this process was started with, and what `--split auto` has come to: all of it on this machine.
    pub fn words(&self) -> Vec<String> {
        let own = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
        if self.chosen.is_empty() {
            return own.collect();
        }
        chosen_instead(without(own, &["--hosts"]).into_iter(), &self.chosen)
    }

    /// This process's own words with what `--split auto` has come to, on this machine.
    ///
    /// # Errors
    /// When they contradict each other.
    pub fn with(&self, chosen: Vec<String>) -> Result<Self, Failure> {
        let own = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
        let all = chosen_instead(without(own, &["--hosts"]).into_iter(), &chosen);
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
        let left = without(
            words("train --hosts a,b --batch 8 --split=auto --hosts=c -q").into_iter(),
            &["--hosts", "--split"],
        );
        assert_eq!(left, words("train --batch 8 -q"));
    }

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn what_is_chosen_stands_in_place_of_what_was_typed_of_the_same() {
        let threads = words("--split replicate --replicas 2 --threads 1");
        let processes = words("--split replicate --workers 2 --threads 1");
        for typed in ["--workers 2", "--workers=2", "-w 2", "-w2", "-w=2", "-qw2", "--replicas 2", "-w2 --carry thread"]
        {
            for chosen in [&threads, &processes] {
                let line = format!("paceline train --split auto {typed} --threads=1 --batch 8");
                let all = chosen_instead(words(&line).into_iter(), chosen).join(" ");
                let quiet = if typed.starts_with("-q") { "-q " } else { "" };
                let carry = if typed.contains("carry") && chosen == &processes { "--carry thread " } else { "" };
                assert_eq!(all, format!("paceline train {quiet}{carry}--batch 8 {}", chosen.join(" ")));
            }
        }
    }

    #[test]
    fn a_schedule_of_the_learning_rate_stays_beside_that_of_the_pipeline() {
        let chosen = words("--split pipeline:2 --workers 1 --micro-batches 4 --schedule zero-bubble");
        let typed = words("paceline train --split auto --accumulate 4 --schedule cosine --schedule 1f1b").into_iter();
        let cli = Cli::try_parse_from(chosen_instead(typed, &chosen)).unwrap();
        let Command::Train(train) = cli.command else { panic!("it is a training") };
        assert_eq!(
            format!("{:?}", train.schedule),
            "[LearningRate(Cosine { end: 0.0 }), Pipeline(OneForwardOneBackward), Pipeline(ZeroBubble)]"
        );
        assert_eq!((train.micro_batches, train.accumulate), (Some(4), None));
    }
}
