//! Processes of a run that were started by hand, each in a terminal of its own: what each says, and how it ends.

use std::fs::File;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use paceline::cluster::launch::local::free_port;
use paceline::comm::Token;

use crate::place::Place;

/// Endless steps of a small network.
const TRAIN: &str = "train --model mlp --data synthetic:8x8x3/10/480 --batch 12 --epochs 100000 --evaluate-every 100000 \
                     --threads 1 --pin off --carry tcp --silent 2s --late 500ms";

/// A process; it is killed when the test lets go of it.
pub struct Process<'a> {
    place: &'a Place,
    child: Child,
    file: String,
}

impl Process<'_> {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn said(&self) -> String {
        self.place.read_text(&self.file)
    }

    /// Waits until it has printed this.
    pub fn says(&self, words: &str, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.said().contains(words) {
            assert!(Instant::now() < until, "`{words}` was not said within {limit:?}:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it has ended.
    pub fn ends(&mut self, limit: Duration) -> ExitStatus {
        let until = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "it goes on after {limit:?}:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A run to start members of.
pub struct Run {
    pub place: Place,
    pub world: usize,
    pub port: u16,
    pub token: Token,
}

impl Run {
    pub fn new(world: usize) -> Self {
        Self { place: Place::new(), world, port: free_port().unwrap(), token: Token::random() }
    }

    /// Starts a rank; variables override the usual ones.
    pub fn start(&self, rank: usize, more: &str, variables: &[(&str, String)]) -> Process<'_> {
        let folder = if rank == 0 { "--run run" } else { "" };
        let file = format!("said-{rank}-{}.txt", self.place.files().len());
        self.place.write(&file, "");
        let out = || Stdio::from(File::options().append(true).open(self.place.path(&file)).unwrap());
        let mut command = self.place.command(&format!("{TRAIN} {folder} {more}"));
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", self.world.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", self.port.to_string());
        command.env("PACELINE_TOKEN", self.token.to_hex());
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let child = command.stdin(Stdio::null()).stdout(out()).stderr(out()).spawn().unwrap();
        Process { place: &self.place, child, file }
    }

    /// Waits until all have made steps, and heartbeats have told of them.
    pub fn steps(&self, first: &Process<'_>) {
        let until = Instant::now() + Duration::from_secs(60);
        let events = self.place.path("run/events/rank-0.jsonl");
        let steps = || std::fs::read_to_string(&events).unwrap_or_default().matches("\"event\":\"step\"").count();
        while steps() < 100 {
            assert!(Instant::now() < until, "no steps:\n{}", first.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// All members, once they make steps.
    pub fn start_all(&self) -> Vec<Process<'_>> {
        let members: Vec<Process<'_>> = (0..self.world).map(|rank| self.start(rank, "", &[])).collect();
        self.steps(&members[0]);
        members
    }
}
