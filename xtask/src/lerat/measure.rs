//! One cell: its processes are started, watched until enough steps are done, and ended; what they came to, as JSON.
//!
//! The first step, in which memory is touched for the first time, does not count. Processes are ended in the middle of the epoch: nothing
//! is evaluated or saved.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::cells::{Cell, Place, Side};
use super::hosts::Hosts;
use super::processes::{Group, Look};
use super::sysstat::Watch;

/// A cell that has not done its steps by then has failed.
const PATIENCE: Duration = Duration::from_secs(300);

/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How often memory is.
const MEMORY: Duration = Duration::from_millis(500);

/// Where everything is.
pub struct Lab {
    /// The binary.
    pub paceline: PathBuf,
    /// An interpreter with PyTorch, and the script that it runs.
    pub python: Option<(String, PathBuf)>,
    /// Where runs are kept while they last.
    pub folder: PathBuf,
    /// Two hosts that compute and one that has samples, where they could be made.
    pub hosts: Option<Hosts>,
}

/// A secret for all processes of this script.
const TOKEN: &str = "1e7a71e7a71e7a71e7a71e7a71e7a71e7a71e7a71e7a71e7a71e7a71e7a71e7a";

/// The port of the first process, and of samples.
const PORT: u16 = 29_480;
const SAMPLES_PORT: u16 = 29_490;

/// The host that lends samples.
pub const LENDING: usize = 2;

impl Lab {
    /// Measures a cell.
    pub fn measure(&self, cell: &Cell, data: &Path) -> Result<Value> {
        let run = self.folder.join("run");
        let _ = std::fs::remove_dir_all(&run);
        let said = self.folder.join("said.txt");
        let _lending = match cell.place {
            Place::Remote => Some(self.lend(data)?),
            Place::Local | Place::Shared => None,
        };
        let spec = match cell.place {
            Place::Local | Place::Shared => format!("folder:{}", data.display()),
            Place::Remote => format!("remote:{}:{SAMPLES_PORT}", self.hosts()?.address(LENDING)),
        };
        let mut commands = self.commands(cell, &spec, data, &run)?;
        for command in &mut commands {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(&said)?;
            command.stderr(file.try_clone()?);
            command.stdout(if cell.side == Side::Torch {
                std::fs::File::create(self.folder.join("torch.json"))?
            } else {
                file
            });
        }
        let _ = std::fs::write(&said, "");
        let mut group = Group::start(&mut commands)?;
        let outcome = match cell.side {
            Side::Paceline => self.follow(cell, &mut group, &run),
            Side::Torch => self.wait_for_torch(cell, &mut group),
        };
        outcome.with_context(|| {
            std::fs::read_to_string(&said).unwrap_or_default().lines().rev().take(5).collect::<Vec<_>>().join(" | ")
        })
    }

    fn hosts(&self) -> Result<&Hosts> {
        self.hosts.as_ref().context("no hosts could be made")
    }

    /// A host with samples.
    fn lend(&self, data: &Path) -> Result<Group> {
        let hosts = self.hosts()?;
        let mut command = self.on_host(LENDING)?;
        command.args(["timeout", "-s", "KILL", &(PATIENCE.as_secs() + 20).to_string()]);
        command.arg(&self.paceline).args(["data", "serve", &format!("folder:{}", data.display()), "--listen"]);
        command.arg(format!("{}:{SAMPLES_PORT}", hosts.address(LENDING))).stdout(Stdio::null()).stderr(Stdio::null());
        let group = Group::start(&mut [command])?;
        std::thread::sleep(Duration::from_millis(500));
        Ok(group)
    }

    /// A command on a host, to be gone on with.
    fn on_host(&self, number: usize) -> Result<Command> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.hosts()?.host(number)]);
        self.equip(&mut command);
        Ok(command)
    }

    /// What all processes find around them.
    fn equip(&self, command: &mut Command) {
        for name in
            ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PACELINE_TOKEN"]
        {
            command.env_remove(name);
        }
        command.env("PACELINE_TOKEN_FILE", self.folder.join("token")).env("PACELINE_CACHE", self.folder.join("cache"));
    }

    /// Writes the secret.
    pub fn write_token(&self) -> Result<()> {
        use std::os::unix::fs::OpenOptionsExt;
        let file = self.folder.join("token");
        let _ = std::fs::remove_file(&file);
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
        Ok(std::io::Write::write_all(&mut file, TOKEN.as_bytes())?)
    }

    /// The processes of a cell.
    fn commands(&self, cell: &Cell, spec: &str, data: &Path, run: &Path) -> Result<Vec<Command>> {
        let world = cell.nodes * cell.processes;
        let mut commands = Vec::new();
        for rank in 0..world {
            let (node, local) = (rank / cell.processes, rank % cell.processes);
            let in_hosts = cell.nodes > 1 || cell.place == Place::Remote;
            let mut command = if in_hosts { self.on_host(node)? } else { Command::new("env") };
            self.equip(&mut command);
            let cores = match (cell.nodes, cell.side, world) {
                (1, Side::Torch, 2) => local.to_string(),
                (1, ..) => cell.cores.to_owned(),
                _ => node.to_string(),
            };
            // Should this script be killed, they end all the same.
            command.args(["timeout", "-s", "KILL", &(PATIENCE.as_secs() + 20).to_string(), "taskset", "-c", &cores]);
            match cell.side {
                Side::Paceline => {
                    command
                        .arg(&self.paceline)
                        .args(["train", "--model", cell.work.model, "--data", spec, "--run"])
                        .arg(run);
                    command.args(["--size", "224", "--batch", &cell.batch.to_string(), "--augment", "flip"]);
                    command.args([
                        "--optimizer",
                        "momentum",
                        "--lr",
                        "0.001",
                        "--momentum",
                        "0.9",
                        "--loader-threads",
                        "1",
                    ]);
                    command.args([
                        "--mean",
                        "0.485,0.456,0.406",
                        "--std",
                        "0.229,0.224,0.225",
                        "--quiet",
                        "--oversubscribe",
                    ]);
                    command.args(["--epochs", "100", "--evaluate-every", "100", "--checkpoint-minutes", "0"]);
                    command.args(&cell.arguments);
                }
                Side::Torch => {
                    let (python, script) = self.python.as_ref().context("no PyTorch")?;
                    command.arg(python).arg(script).args(["ddp", cell.work.model]).arg(data);
                    let threads = if world > 1 { "1" } else { "2" };
                    command.args([&cell.batch.to_string(), &cell.steps.to_string(), threads]);
                }
            }
            if world > 1 {
                let first = if cell.nodes > 1 { self.hosts()?.address(0) } else { "127.0.0.1".into() };
                command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
                command.env("LOCAL_RANK", local.to_string()).env("LOCAL_WORLD_SIZE", cell.processes.to_string());
                command.env("MASTER_ADDR", first).env("MASTER_PORT", PORT.to_string()).env("PACELINE_TOKEN", TOKEN);
            }
            commands.push(command);
        }
        Ok(commands)
    }

    /// Watches a run until enough steps are done.
    fn follow(&self, cell: &Cell, group: &mut Group, run: &Path) -> Result<Value> {
        let file = run.join("events/rank-0.jsonl");
        let (begun, mut last) = (Instant::now(), None::<Instant>);
        let mut first: Option<(Instant, Look, Vec<[u64; 2]>, Watch)> = None;
        let mut memory_bytes = 0;
        loop {
            let events = events(&file);
            let steps: Vec<&Value> = events.iter().filter(|event| event["event"] == "step").collect();
            if first.is_none() && !steps.is_empty() {
                let host = (cell.nodes > 1).then(|| self.hosts().map(|hosts| hosts.host(0))).transpose()?;
                let watch = Watch::begin(&group.pids(), host.as_deref());
                first = Some((Instant::now(), group.look(), self.traffic(cell)?, watch));
            }
            if steps.len() > cell.steps {
                let (start, before, traffic, watch) = first.context("steps without a first one")?;
                let (after, seconds) = (group.look(), start.elapsed().as_secs_f64());
                memory_bytes = memory_bytes.max(after.memory_bytes);
                let sent = self
                    .traffic(cell)?
                    .iter()
                    .zip(&traffic)
                    .map(|(now, then)| [now[0] - then[0], now[1] - then[1]])
                    .collect::<Vec<_>>();
                let cores = if cell.nodes > 1 { 2.0 } else { cell.cores.split(',').count() as f64 };
                let of = |name: &str| {
                    steps.iter().skip(1).take(cell.steps).map(|step| step[name].clone()).collect::<Vec<_>>()
                };
                let parameters = events.iter().find_map(|event| event["parameters"].as_u64());
                let pipeline = events.iter().find(|event| event["event"] == "pipeline").cloned();
                return Ok(json!({
                    "cell": cell.name(), "work": cell.work.name, "model": cell.work.model, "batch": cell.batch, "setup": cell.setup,
                    "side": "paceline", "place": cell.place.name(), "nodes": cell.nodes, "parameters": parameters, "seconds": of("seconds"), "phases": of("phases"),
                    "cpu_busy": (after.cpu_s - before.cpu_s) / seconds / cores, "memory_bytes": memory_bytes, "window_s": seconds,
                    "window_steps": steps.len() - 1, "host_bytes": sent, "pipeline": pipeline, "tools": watch.end(),
                }));
            }
            if let Some(code) = group.failure() {
                bail!("{} ended with {code}", cell.name());
            }
            if group.is_over() || begun.elapsed() > PATIENCE {
                bail!("{} did {} of {} steps in {:.0?}", cell.name(), steps.len(), cell.steps + 1, begun.elapsed());
            }
            if last.is_none_or(|last| last.elapsed() > MEMORY) {
                memory_bytes = memory_bytes.max(group.look().memory_bytes);
                last = Some(Instant::now());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// What each computing host has received and sent so far.
    fn traffic(&self, cell: &Cell) -> Result<Vec<[u64; 2]>> {
        let hosts = if cell.nodes > 1 { cell.nodes } else { usize::from(cell.place == Place::Remote) };
        (0..hosts).map(|number| self.hosts()?.traffic(number)).collect()
    }

    fn wait_for_torch(&self, cell: &Cell, group: &mut Group) -> Result<Value> {
        let begun = Instant::now();
        let mut memory_bytes = 0;
        while !group.is_over() {
            if begun.elapsed() > PATIENCE {
                bail!("{} goes on for {:.0?}", cell.name(), begun.elapsed());
            }
            memory_bytes = memory_bytes.max(group.look().memory_bytes);
            std::thread::sleep(MEMORY);
        }
        let text = std::fs::read_to_string(self.folder.join("torch.json"))?;
        let found: Value =
            serde_json::from_str(text.trim()).with_context(|| format!("{} said `{text}`", cell.name()))?;
        let seconds: Vec<Value> = found["seconds"].as_array().context("no seconds")?.iter().skip(1).cloned().collect();
        Ok(json!({
            "cell": cell.name(), "work": cell.work.name, "model": cell.work.model, "batch": cell.batch, "setup": cell.setup,
            "side": "torch", "place": cell.place.name(), "nodes": 1, "seconds": seconds, "memory_bytes": memory_bytes, "torch": found["torch"],
        }))
    }
}

fn events(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}
