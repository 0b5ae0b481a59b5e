//! Runs that are started to be timed: `paceline train`, this very program, as a child, whose events tell how long its steps took.
//! `bench scaling` and `choose` measure by these.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::cluster::ClusterError;
use crate::cluster::launch::child::PARENT;
use crate::cluster::launch::group::{self, Start};
use crate::cluster::launch::{Ended, Output};
use crate::comm::Token;
use crate::system::disk::Disk;
use crate::system::event::{Event, Line};
use crate::system::host;
use crate::system::phase::PhaseTimes;
use crate::system::secret;
use crate::system::signal::Stop;

use crate::failure::Failure;

/// Folders of runs, which go with this value: inside one that nobody else can read or has made.
pub struct Folders {
    _private: secret::Folder,
    paths: Vec<PathBuf>,
}

impl Folders {
    /// So many, named after what they are for.
    pub fn new(what: &str, count: usize) -> Result<Self, Failure> {
        let private = secret::Folder::new(&format!("paceline-{what}-{}", std::process::id()));
        let private =
            private.map_err(|error| Failure::failed(format!("no folder for runs that are timed: {error}")))?;
        let paths = (0..count).map(|number| private.path().join(number.to_string())).collect();
        Ok(Self { _private: private, paths })
    }

    /// Their paths, where nothing is yet.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }
}

/// After it was asked to end, a run that is timed may finish a step; it has nothing to save, so it is not waited for any longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// One that is to be started: its words behind the name of the program, and the cores it stays on, or all.
pub struct Timed {
    /// What it is started with, `train` first.
    pub words: Vec<String>,
    /// The cores; none for all.
    pub cores: Vec<usize>,
}

/// Runs them at the same time, to their end, or that of this process, however it ends; what they say goes where it is told.
pub fn run(all: Vec<Timed>, stop: &Stop, said: &Output) -> Result<Ended, Failure> {
    let program = host::own_program().map_err(Failure::failed)?;
    let start = |(rank, timed): (usize, Timed)| Start {
        rank,
        host: "this machine".into(),
        program: program.clone(),
        arguments: timed.words,
        variables: vec![(PARENT.into(), std::process::id().to_string())],
        token: Token::random(),
        cores: timed.cores,
        inherits: false,
        spare: false,
        signals: true,
    };
    let starts: Vec<Start> = all.into_iter().enumerate().map(start).collect();
    group::run_obeying(&starts, (stop, PATIENCE), said, said).map_err(|error: ClusterError| error.into())
}

/// Keeps the last words of a run, to be told where it fails.
#[derive(Clone, Default)]
pub struct Words(Arc<Mutex<Vec<u8>>>);

impl Words {
    /// The sentence with which it ended, without what marks it.
    pub fn last(&self) -> Option<String> {
        let said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&said).into_owned();
        let sentence = |line: &str| line.split_once("error: ").map(|(_, sentence)| sentence.trim().to_owned());
        text.lines().rev().find_map(sentence)
    }
}

impl std::io::Write for Words {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A step of a run.
pub struct TimedStep {
    /// What it took.
    pub seconds: f64,
    /// Where that went.
    pub phases: PhaseTimes,
}

/// The steps that rank 0 of a run has logged, without the first ones.
pub fn steps(folder: &Path, without: usize) -> Result<Vec<TimedStep>, Failure> {
    let events = Disk::real().read_text(&folder.join("events/rank-0.jsonl"))?;
    let step = |event| match event {
        Event::Step { seconds, phases, .. } => Some(TimedStep { seconds, phases }),
        _ => None,
    };
    let found: Vec<TimedStep> = lines(&events).filter_map(step).skip(without).collect();
    if found.is_empty() { Err(Failure::failed("the run logged no steps")) } else { Ok(found) }
}

/// The most memory that the processes of a run held: the sum of what each says of itself; ranks that are threads say the same of all.
pub fn peak_memory_bytes(folder: &Path, ranks: usize, is_one_process: bool) -> u64 {
    let disk = Disk::real();
    let of = |rank: usize| {
        let events = disk.read_text(&folder.join(format!("events/rank-{rank}.jsonl"))).unwrap_or_default();
        let peak = |event| match event {
            Event::RunFinished { peak_memory_bytes, .. } => Some(peak_memory_bytes),
            _ => None,
        };
        lines(&events).filter_map(peak).last().unwrap_or(0)
    };
    let all = (0..ranks).map(of);
    if is_one_process { all.max().unwrap_or(0) } else { all.sum() }
}

fn lines(events: &str) -> impl Iterator<Item = Event> {
    events.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()).map(|line| line.event)
}
