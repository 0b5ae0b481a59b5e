//! A folder of its own for each test, and processes that end by themselves or are ended.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Six updates of a small network without batch normalisation; a batch can be shared by 2, 3, 4 and 6.
pub const TRAIN: &str =
    "train --model lenet5 --data shapes --batch 48 --max-steps 6 --threads 1 --optimizer sgd --lr 0.02 --quiet";

/// How long anything here may take before it counts as hanging.
pub const PATIENCE: Duration = Duration::from_secs(150);

/// One test at a time: some measure, and ports that launchers choose are the same for all.
static ALONE: Mutex<()> = Mutex::new(());

/// A folder that is removed at the end.
pub struct Ground {
    folder: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// What a command came to.
pub struct Done {
    pub status: ExitStatus,
    /// Its output and its errors.
    pub said: String,
}

impl Ground {
    pub fn new() -> Self {
        let alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        Self { folder: tempfile::tempdir().unwrap(), _alone: alone }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A command in this folder that leaves nothing in the user's, and knows of no launcher around the test.
    pub fn command(&self, words: &str) -> Command {
        let words = words.replace("PACELINE", env!("CARGO_BIN_EXE_paceline"));
        let mut words = words.split_whitespace();
        let mut command = Command::new(words.next().unwrap());
        command.args(words).current_dir(self.folder.path()).stdin(Stdio::null()).process_group(0);
        command.env("PACELINE_CACHE", self.path("cache")).env("XDG_CONFIG_HOME", self.path("config"));
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PACELINE_TOKEN", "PACELINE_ISA"] {
            command.env_remove(name);
        }
        command
    }

    /// Starts a command; what it says goes into the file `said`.
    pub fn start(&self, command: &mut Command, said: &str) -> Running {
        let path = self.path(said);
        let file = File::create(&path).unwrap();
        command.stdout(file.try_clone().unwrap()).stderr(file);
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Running { child, said: path }
    }

    /// Runs a command to its end.
    pub fn finish(&self, words: &str) -> Done {
        self.start(&mut self.command(words), "said.txt").ends(PATIENCE)
    }

    /// Runs a command, which must succeed.
    pub fn run(&self, words: &str) -> String {
        let done = self.finish(words);
        assert!(done.status.success(), "{words}: {}\n{}", done.status, done.said);
        done.said
    }

    /// The losses that a rank of a run wrote down, by step.
    pub fn losses(&self, run: &str, rank: usize) -> Vec<f64> {
        let path = self.path(&format!("{run}/events/rank-{rank}.jsonl"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["event"] == "step").map(|line| line["loss"].as_f64().unwrap()).collect()
    }

    /// The only run under `runs/`, which nobody named.
    pub fn unnamed_run(&self) -> String {
        let found: Vec<_> = std::fs::read_dir(self.path("runs")).unwrap().map(|entry| entry.unwrap()).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        format!("runs/{}", found[0].file_name().to_string_lossy())
    }

    /// Each of the workers of a run wrote down the losses of one process alone, up to rounding.
    pub fn same_as_one_process(&self, run: &str, workers: usize) {
        if !self.path("alone").exists() {
            self.run(&format!("PACELINE {TRAIN} --run alone"));
        }
        let alone = self.losses("alone", 0);
        assert_eq!(alone.len(), 6);
        for rank in 0..workers {
            let shared = self.losses(run, rank);
            assert_eq!(shared.len(), alone.len(), "rank {rank} of {run}");
            for (step, (one, other)) in alone.iter().zip(&shared).enumerate() {
                assert!((one - other).abs() <= 1e-5 * one, "rank {rank} of {run}, step {}: {one} {other}", step + 1);
            }
        }
    }
}

/// A process with all that it started, ended when the test lets go of it.
pub struct Running {
    child: Child,
    said: PathBuf,
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.said).unwrap()).into_owned()
    }

    /// Whether it has ended.
    pub fn ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until it has ended.
    pub fn ends(mut self, limit: Duration) -> Done {
        let path = self.said.clone();
        let said = || String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
        within(limit, || self.ended(), || format!("it goes on:\n{}", said()));
        let status = self.child.wait().unwrap();
        Done { status, said: said() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let group = format!("-{}", self.child.id());
        for name in ["TERM", "KILL"] {
            if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
                signal(name, &group);
            }
            for _ in 0..400 {
                if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Sends a signal to a process, or to a group of them if the number has a minus.
pub fn signal(name: &str, process: &str) {
    let _ = Command::new("kill").args([&format!("-{name}"), "--", process]).stderr(Stdio::null()).status();
}

/// Waits until something is so.
pub fn within(limit: Duration, mut so: impl FnMut() -> bool, otherwise: impl Fn() -> String) {
    let until = Instant::now() + limit;
    while !so() {
        assert!(Instant::now() < until, "not within {limit:?}: {}", otherwise());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Says that a test is skipped.
pub fn skip(test: &str, reason: &str) {
    say(&format!("skipped: {test} ({reason})"));
}

/// Says something not through the test's own output, which is shown only if it fails.
pub fn say(sentence: &str) {
    let _ = writeln!(std::io::stderr(), "{sentence}");
}

/// A port that nobody listens on.
pub fn free_port() -> u16 {
    paceline::cluster::launch::local::free_port().unwrap()
}

/// Whether programs are there; a test that needs them says so and passes where they are not.
pub fn has(programs: &[&str], test: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    match programs.iter().find(|program| !folders.iter().any(|folder| folder.join(program).exists())) {
        Some(missing) => skip(test, &format!("needs `{missing}`")),
        None => return true,
    }
    false
}
