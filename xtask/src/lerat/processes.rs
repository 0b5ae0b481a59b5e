//! Processes that this script started, with all that those started: how long they computed, how much memory they have, and their end.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// Clock ticks of a second, as Linux counts them for programs.
const TICKS_PER_S: f64 = 100.0;

/// Started together; ended together when they are let go.
pub struct Group {
    children: Vec<Child>,
}

/// What all processes of a group have come to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Look {
    /// Seconds that their threads have computed, those of ended children included.
    pub cpu_s: f64,
    /// Memory that is theirs: what several share counts once.
    pub memory_bytes: u64,
}

impl Group {
    /// Starts all of them.
    pub fn start(commands: &mut [Command]) -> Result<Self> {
        let mut group = Self { children: Vec::new() };
        for command in commands {
            let child = command.stdin(Stdio::null()).spawn().with_context(|| format!("cannot start {command:?}"))?;
            group.children.push(child);
        }
        Ok(group)
    }

    /// The first that has ended badly, by its exit code.
    pub fn failure(&mut self) -> Option<i32> {
        let ended = self.children.iter_mut().filter_map(|child| child.try_wait().ok().flatten());
        ended.filter(|status| !status.success()).map(|status| status.code().unwrap_or(-1)).next()
    }

    /// Whether the first has ended.
    pub fn is_over(&mut self) -> bool {
        self.children[0].try_wait().is_ok_and(|ended| ended.is_some())
    }

    /// All of their numbers.
    pub fn pids(&self) -> BTreeSet<u32> {
        let mut all: BTreeSet<u32> = self.children.iter().map(Child::id).collect();
        let parents: BTreeMap<u32, u32> = numbers().filter_map(|pid| Some((pid, parent(pid)?))).collect();
        loop {
            let more: Vec<u32> =
                parents.iter().filter(|(_, parent)| all.contains(parent)).map(|(&pid, _)| pid).collect();
            let before = all.len();
            all.extend(more);
            if all.len() == before {
                return all;
            }
        }
    }

    /// What they have come to by now.
    pub fn look(&self) -> Look {
        self.pids().into_iter().fold(Look::default(), |sum, pid| Look {
            cpu_s: sum.cpu_s + cpu_s(pid).unwrap_or(0.0),
            memory_bytes: sum.memory_bytes + memory_bytes(pid).unwrap_or(0),
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let pids: Vec<String> = self.pids().iter().map(u32::to_string).collect();
        let alive = self.children.iter_mut().any(|child| child.try_wait().is_ok_and(|ended| ended.is_none()));
        if alive {
            let _ = Command::new("kill").arg("-KILL").args(&pids).stderr(Stdio::null()).status();
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

fn numbers() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
}

/// The fields of /proc/PID/stat behind the name, which may hold anything: the first is the state.
fn fields(pid: u32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(text.rsplit_once(") ")?.1.split_whitespace().map(str::to_owned).collect())
}

fn parent(pid: u32) -> Option<u32> {
    fields(pid)?.get(1)?.parse().ok()
}

fn cpu_s(pid: u32) -> Option<f64> {
    let ticks = fields(pid)?[11..15].iter().filter_map(|field| field.parse::<f64>().ok()).sum::<f64>();
    Some(ticks / TICKS_PER_S)
}

fn memory_bytes(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}
