//! Real processes of a run, and what can be seen of them from outside: their lines, their end, their traces in /proc.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_cluster::launch::local::free_port;
use paceline_comm::Token;

/// A process; it is killed when the test lets go of it.
pub struct Process {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts this very program in a role.
    pub fn start(role: &str, mark: &str, variables: &[(&str, String)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env("FAULT_ROLE", role)
            .env("FAULT_MARK", mark)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let (source, target) = (BufReader::new(child.stdout.take().unwrap()), lines.clone());
        let reader = std::thread::spawn(move || {
            for line in source.lines().map_while(Result::ok) {
                target.lock().unwrap().push(line);
            }
        });
        Self { child, lines, reader: Some(reader) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn said(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }

    /// Waits until it has printed this.
    pub fn says(&self, words: &str, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.said().contains(words) {
            assert!(Instant::now() < until, "`{words}` was not said within {limit:?}:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it has ended and everything it said has been read.
    pub fn ends(&mut self, limit: Duration) -> ExitStatus {
        let until = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                if let Some(reader) = self.reader.take() {
                    reader.join().unwrap();
                }
                return status;
            }
            assert!(Instant::now() < until, "it goes on after {limit:?}:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A run to start members of.
pub struct Run {
    pub world: usize,
    pub port: u16,
    pub token: Token,
    pub mark: String,
}

impl Run {
    pub fn new(world: usize, mark: &str) -> Self {
        let port = free_port().unwrap();
        Self { world, port, token: Token::random(), mark: mark.to_owned() }
    }

    pub fn variables(&self, rank: usize) -> Vec<(&'static str, String)> {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.world.to_string()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", self.port.to_string()),
            ("PACELINE_TOKEN", self.token.to_hex()),
        ]
    }

    pub fn start(&self, rank: usize, more: &[(&'static str, String)]) -> Process {
        let mut variables = self.variables(rank);
        variables.extend_from_slice(more);
        Process::start("member", &self.mark, &variables)
    }

    /// All members, once they have met.
    pub fn start_all(&self, more: &[(&'static str, String)]) -> Vec<Process> {
        let members: Vec<Process> = (0..self.world).map(|rank| self.start(rank, more)).collect();
        members.iter().for_each(|member| member.says("joined", Duration::from_secs(20)));
        members
    }
}

/// Processes that carry the mark in their environment and still run.
pub fn with_mark(mark: &str) -> Vec<u32> {
    let wanted = format!("FAULT_MARK={mark}");
    let own = std::process::id();
    let numbers =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let marked = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        *pid != own && environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    };
    numbers.filter(marked).collect()
}

/// A line of /proc/PID/status.
pub fn status(pid: u32, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap_or_default();
    line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
}
