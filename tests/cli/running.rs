//! A run of several processes under way: what it says, its processes by rank, its events as they come, and its end.

use std::fs::File;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use paceline::system::process::{Tell, tell};
use serde_json::Value;

use crate::place::Place;

/// For what happens at once on a machine with time to spare.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A command that was started in a place. It is killed when the test lets go of it.
pub struct Running<'a> {
    place: &'a Place,
    child: Child,
}

/// Waits until something is so.
pub fn within(limit: Duration, what: &str, mut is_so: impl FnMut() -> bool, said: impl Fn() -> String) {
    let until = Instant::now() + limit;
    while !is_so() {
        assert!(Instant::now() < until, "{what}: not within {limit:?}:\n{}", said());
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl<'a> Running<'a> {
    /// Starts the binary; what it says goes into a file.
    pub fn start(place: &'a Place, arguments: &str) -> Self {
        place.write("said.txt", "");
        let out = || Stdio::from(File::options().append(true).open(place.path("said.txt")).unwrap());
        let child = place.command(arguments).stdin(Stdio::null()).stdout(out()).stderr(out()).spawn().unwrap();
        Self { place, child }
    }

    /// All that it has said so far, on both outputs.
    pub fn said(&self) -> String {
        self.place.read_text("said.txt")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process of a rank: one that works in this place and has that rank in its environment.
    pub fn process_of(&self, rank: usize) -> u32 {
        let folder = self.place.path("").canonicalize().unwrap();
        let wanted = format!("RANK={rank}");
        let is = |pid: &u32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|path| path == folder)
                && environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
        };
        let pids = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.find(is).unwrap_or_else(|| panic!("no process of rank {rank}:\n{}", self.said()))
    }

    /// A rank's events of a kind.
    pub fn events(&self, rank: usize, kind: &str) -> Vec<Value> {
        let path = self.place.path(&format!("run/events/rank-{rank}.jsonl"));
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|event| event["event"] == kind).collect()
    }

    /// Waits until rank 0 has logged so many steps.
    pub fn steps(&self, count: usize) {
        within(PATIENCE, "steps", || self.events(0, "step").len() >= count, || self.said());
    }

    /// Whether it has not ended yet.
    pub fn goes_on(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits until it has ended.
    pub fn ends(&mut self, limit: Duration) -> ExitStatus {
        let until = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "it goes on after {limit:?}:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// It fails, with one sentence in all that was said, which has all of these words.
    pub fn fails_once(&mut self, limit: Duration, words: &[&str]) -> String {
        let status = self.ends(limit);
        let said = self.said();
        assert_eq!(status.code(), Some(1), "{said}");
        let errors: Vec<&str> = said.lines().filter(|line| line.contains("error: ")).collect();
        assert_eq!(errors.len(), 1, "one sentence:\n{said}");
        for word in words {
            assert!(errors[0].contains(word), "`{word}` is missing:\n{said}");
            assert_eq!(said.matches(word).count(), 1, "`{word}` is said once:\n{said}");
        }
        errors[0].to_owned()
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process at a tenth of its processor: it is stopped for 0.9 s of every second, until this is dropped.
pub struct Slowed {
    pid: u32,
    going: std::sync::mpsc::Sender<()>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Slowed {
    pub fn new(pid: u32) -> Self {
        let (going, ended) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            loop {
                tell(pid, Tell::Stop);
                let over = ended.recv_timeout(Duration::from_millis(900)).is_ok();
                tell(pid, Tell::Continue);
                if over || ended.recv_timeout(Duration::from_millis(100)).is_ok() {
                    return;
                }
            }
        });
        Self { pid, going, thread: Some(thread) }
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        let _ = self.going.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        tell(self.pid, Tell::Continue);
    }
}
