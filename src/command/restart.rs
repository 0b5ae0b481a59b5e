//! `--restart N`: a run that has failed is started again from its last checkpoint, by whoever started its processes: the launcher of
//! this machine or over ssh (also of a single process), or Slurm (`slurm.rs`).
//!
//! A launcher has to know the run's folder before rank 0 has made it, so it names it. When a process fails, the others end by
//! themselves, as without `--restart`; then all are started with `train --resume`, and what was typed that a run's config.toml does not
//! keep. `--restart` is not kept there: it decides nothing of a run's result, and a run that is resumed may be asked for another number.

mod slurm;

use std::path::PathBuf;

use crate::cluster::launch::Output;
use crate::cluster::launch::group::{self, Ended};
use crate::cluster::spec::Variables;
use crate::system::clock::Clock;
use crate::system::disk::Disk;
use crate::system::signal::Stop;
use crate::train::Config;
use crate::train::checkpoint::Checkpoints;
use crate::train::run::{self as run_folder, ResumeFrom};
use crate::train::trainer::Restarts;
use clap::{Parser, ValueEnum};

pub use slurm::Requeue;

use super::{Outcome, team};
use crate::arguments::{Cli, Command, Train};
use crate::failure::Failure;
use crate::output::note;
use crate::run::surroundings;

/// Whether this process, if it starts others, is to start them again.
pub fn is_asked(arguments: &Train) -> bool {
    arguments.restart.is_some_and(|most| most > 0) && arguments.restarted.is_none()
}

/// The folder of a run that may be started again.
struct Folder {
    disk: Disk,
    path: PathBuf,
    /// It was made here, for a run that nobody named.
    is_ours: bool,
}

impl Folder {
    fn find(arguments: &Train, config: &Config) -> Result<Self, Failure> {
        let disk = surroundings().disk;
        let (path, is_ours) = match (&arguments.resume, &arguments.run) {
            (Some(path), _) => (ResumeFrom::find(&disk, path).run, false),
            (None, Some(path)) => (path.clone(), false),
            (None, None) => (run_folder::reserve(&disk, &config.model)?, true),
        };
        Ok(Self { disk, path, is_ours })
    }

    fn has_run(&self) -> bool {
        self.disk.exists(&self.path.join("config.toml"))
    }

    /// The step of the last checkpoint; 0 if there is none.
    fn step(&self) -> u64 {
        let checkpoints = Checkpoints::new(&self.disk, self.path.join("checkpoints"));
        checkpoints.list().ok().and_then(|list| list.last().map(|(step, _)| *step)).unwrap_or(0)
    }

    /// What the processes are started with, after so many restarts.
    fn words(&self, arguments: &Train, config: &Config, restarts: Restarts) -> Vec<String> {
        let Restarts { number, spent_s, .. } = restarts;
        let path = self.path.display().to_string();
        let mut words = match &arguments.resume {
            // Flags beside it may lengthen the run, and do nothing the second time.
            Some(_) if number > 0 => with_resume(team::words(arguments, config), &path),
            None if number > 0 && self.has_run() => {
                let mut words = vec!["train".to_owned(), "--resume".to_owned(), path];
                words.extend(unkept(arguments));
                words
            }
            _ => {
                let mut words = team::words(arguments, config);
                if self.is_ours {
                    words.extend(["--run".to_owned(), path]);
                }
                words
            }
        };
        words.push(format!("--restarted={number}:{spent_s:.3}"));
        words
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.is_ours {
            // Only if nothing is in it: a refused run leaves nothing behind.
            let _ = self.disk.remove_empty_dir(&self.path);
        }
    }
}

/// The words with another run to resume.
fn with_resume(words: Vec<String>, run: &str) -> Vec<String> {
    let mut is_value = false;
    let replace = |word: String| {
        let is_path = std::mem::replace(&mut is_value, word == "--resume");
        match word {
            _ if is_path => run.to_owned(),
            word if word.starts_with("--resume=") => format!("--resume={run}"),
            word => word,
        }
    };
    words.into_iter().map(replace).collect()
}

/// What was typed that config.toml does not keep, and the processes of a resumed run want to know.
fn unkept(arguments: &Train) -> Vec<String> {
    let Train { calibrate, restart, bind, tls, quiet, json, .. } = arguments;
    let mut words = Vec::new();
    let calibrate = calibrate.to_possible_value().map(|value| value.get_name().to_owned());
    words.extend(calibrate.map(|how| format!("--calibrate={how}")));
    words.extend(restart.map(|most| format!("--restart={most}")));
    words.extend(bind.map(|address| format!("--bind={address}")));
    words.extend(tls.as_ref().map(|files| if files.is_empty() { "--tls".into() } else { format!("--tls={files}") }));
    words.extend(quiet.then(|| "--quiet".to_owned()));
    words.extend(json.then(|| "--json".to_owned()));
    words
}

/// Starts the processes of a run, and again after failures, as often as was asked for.
pub fn launch(arguments: &Train, config: &Config) -> Outcome {
    let stop = Stop::on_signals().map_err(Failure::failed)?;
    let (out, err) = (Output::to(std::io::stdout()), Output::to(std::io::stderr()));
    let (folder, clock) = (Folder::find(arguments, config)?, Clock::real());
    let most = arguments.restart.unwrap_or(0);
    for number in 0.. {
        let restarts = Restarts { number, most, spent_s: clock.seconds() };
        let starts = team::starts(arguments, config, folder.words(arguments, config, restarts))?;
        let failure = match group::run(&starts, &stop, &out, &err) {
            Ok(Ended::Failed { refused, in_vain }) => Failure::said(refused, in_vain),
            Ok(ended) => return Ok(team::exit_code(ended, &stop)),
            Err(error) => Failure::from(error),
        };
        if number == 0 && failure.is_refusal() {
            return Err(failure);
        }
        if failure.is_in_vain() || stop.requested() || number == most {
            if number > 0 {
                let times = if number == 1 { "once".to_owned() } else { format!("{number} times") };
                note(&format!("the run was started again {times}, and has failed again"));
            }
            return Err(failure.after_start());
        }
        failure.report();
        note(&format!("starting again from step {} ({} of {most})", folder.step(), number + 1));
    }
    unreachable!("the last number is the most")
}

/// A run under Slurm whose job was queued again goes on where it was.
pub fn resumed(arguments: Train, variables: &Variables) -> Result<Train, Failure> {
    let Some(run) = arguments.run.as_ref().filter(|_| slurm::restarts(&arguments, variables) > 0) else {
        return Ok(arguments);
    };
    if !surroundings().disk.exists(&run.join("config.toml")) {
        return Ok(arguments);
    }
    let words = ["paceline", "train", "--resume"].map(Into::into).into_iter().chain([run.clone().into_os_string()]);
    let parsed = Cli::try_parse_from(words.chain(unkept(&arguments).into_iter().map(Into::into)));
    match parsed.map_err(Failure::failed)?.command {
        // Which process this is, it was told as before.
        Command::Train(resumed) => Ok(Train {
            cluster: arguments.cluster,
            job: arguments.job,
            task: arguments.task,
            hosts: arguments.hosts,
            port: arguments.port,
            oversubscribe: arguments.oversubscribe,
            ..*resumed
        }),
        _ => Err(Failure::failed("this is no training")),
    }
}

/// What this process knows of the restarts before it.
pub fn told(arguments: &Train, requeue: Option<&Requeue>) -> Restarts {
    let most = arguments.restart.unwrap_or(0);
    match (arguments.restarted, requeue) {
        (Some((number, spent_s)), _) => Restarts { number, most, spent_s },
        (None, Some(requeue)) => Restarts { number: requeue.count, most, spent_s: 0.0 },
        (None, None) => Restarts::default(),
    }
}

/// Has the job queued again, if that was asked for, may help, and nobody else does. Slurm then ends this process, so it says first what
/// happened.
pub fn ask(requeue: Option<&Requeue>, failure: Failure) -> Outcome {
    let is_worth = failure.is_for_all() && !failure.is_in_vain();
    let Some(requeue) = requeue.filter(|requeue| is_worth && requeue.may_ask()) else { return Err(failure) };
    let code = failure.report();
    requeue.ask();
    Ok(code)
}

/// Says that a job has begun again, and from where.
pub fn announce(requeue: Option<&Requeue>, arguments: &Train, config: &Config) {
    let Some(Requeue { count: count @ 1.., most, .. }) = requeue else { return };
    if let Ok(folder) = Folder::find(arguments, config) {
        note(&format!("starting again from step {} ({count} of {most})", folder.step()));
    }
}

/// What a process answers: to a launcher that would start it again, also that this would be in vain.
pub fn answer(ended: Outcome, is_restarted: bool) -> Outcome {
    match ended {
        Err(failure) if is_restarted && failure.is_in_vain() && !failure.is_refusal() => {
            failure.report();
            Ok(group::IN_VAIN.into())
        }
        ended => ended,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_run_is_resumed_with_the_same_flags() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let changed = with_resume(words("train --resume run/checkpoints/step-00000002 --epochs 4"), "run");
        assert_eq!(changed, words("train --resume run --epochs 4"));
        assert_eq!(with_resume(words("train --quiet --resume=x"), "run"), words("train --quiet --resume=run"));
    }
}
