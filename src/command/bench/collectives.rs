//! `paceline bench collectives`: all-reduces between processes of this machine, each pinned to a core of its own.
//!
//! This file starts the ranks, passes their addresses around and prints what rank 0 measured (`rank.rs`). The ranks
//! read from a pipe of this process, and end when it does.

pub(super) mod measure;
pub(super) mod rank;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::Duration;

use crate::comm::transport::{Transport, thread};
use crate::comm::{Choice, Communicator, Link, Links, Options, Stop, Token};
use crate::system::host::Host;
use crate::system::{cores, threads};
use serde_json::{Value, json};

use self::measure::{Row, measure};
use super::super::team::room;
use super::super::{Outcome, print, print_json};
use crate::arguments::{BenchCollectives, Carry};
use crate::failure::Failure;

/// The environment variable that passes the token to the ranks.
const TOKEN: &str = "PACELINE_TOKEN";
/// How long one all-reduce may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs the command.
pub fn run(arguments: &BenchCollectives) -> Outcome {
    let most = arguments.workers.iter().copied().max().unwrap_or(0);
    let in_processes_too = arguments.carry.iter().any(|&carry| carry != Carry::Thread);
    room::cores_suffice(if in_processes_too { most } else { 0 }, arguments.oversubscribe)?;
    let mut rows = Vec::new();
    if !arguments.json {
        let host = Host::look();
        print(&format!("{} cores of {}\n{}", host.cores, host.cpu, head()));
    }
    for &carry in &arguments.carry {
        for &workers in &arguments.workers {
            let one = BenchCollectives { workers: vec![workers], carry: vec![carry], ..arguments.clone() };
            let measured = if carry == Carry::Thread { in_threads(&one)? } else { in_processes(&one)? };
            for row in &measured {
                if !arguments.json {
                    print(&line(row));
                }
            }
            rows.extend(measured);
        }
    }
    if arguments.json {
        print_json(&document(&rows));
    }
    Ok(ExitCode::SUCCESS)
}

fn options(world: usize, stop: &Stop) -> Options {
    // Every measured algorithm is named, so the links of this choice are never asked.
    let choice = Choice::by_cost(Links::uniform(world, Link::new(10e-6, 1e9)));
    Options { timeout: TIMEOUT, stop: stop.clone(), choice }
}

fn in_threads(arguments: &BenchCollectives) -> Result<Vec<Row>, Failure> {
    let world = arguments.workers[0];
    let ranks = thread::mesh(world).into_iter().map(|port| {
        let mut comm = Communicator::new(Transport::Thread(port), options(world, &Stop::new()));
        let arguments = arguments.clone();
        threads::spawn("rank", move || measure(&mut comm, &arguments)).map_err(Failure::failed)
    });
    let ranks: Vec<_> = ranks.collect::<Result<_, _>>()?;
    let mut results = Vec::new();
    for rank in ranks {
        results.push(rank.join().map_err(|_| Failure::failed("a rank panicked"))??);
    }
    Ok(results.swap_remove(0))
}

/// A rank's process. It ends with this value, if not before.
struct Started {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Drop for Started {
    fn drop(&mut self) {
        // Closing its input ends it; killing makes sure. It may have ended already.
        drop(self.child.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Started {
    fn line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(1..) => Ok(line.trim().to_owned()),
            Ok(0) | Err(_) => Err(Failure::failed("a rank ended before it had measured anything; its error is above")),
        }
    }
}

fn in_processes(arguments: &BenchCollectives) -> Result<Vec<Row>, Failure> {
    let world = arguments.workers[0];
    let token = Token::random();
    let mut ranks = Vec::new();
    for rank in 0..world {
        ranks.push(start(rank, arguments, &token)?);
    }
    let mut addresses = Vec::new();
    for rank in &mut ranks {
        addresses.push(rank.line()?);
    }
    for rank in &mut ranks {
        let input = rank.child.stdin.as_mut().ok_or_else(|| Failure::failed("a rank has no input"))?;
        writeln!(input, "{}", addresses.join(" ")).map_err(Failure::failed)?;
    }
    let found = ranks[0].line()?;
    let rows: Vec<Value> = serde_json::from_str(&found).map_err(Failure::failed)?;
    rows.iter()
        .map(|row| Row::from_json(row).ok_or_else(|| Failure::failed("a rank's measurement is unreadable")))
        .collect()
}

fn start(rank: usize, arguments: &BenchCollectives, token: &Token) -> Result<Started, Failure> {
    let list = |items: Vec<String>| items.join(",");
    let carry = if arguments.carry[0] == Carry::Shm { "shm" } else { "tcp" };
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let mut command = Command::new(program);
    command
        .args(["bench", "collectives-rank", "--rank", &rank.to_string()])
        .args(["--workers", &arguments.workers[0].to_string(), "--carry", carry])
        .args(["--bytes", &list(arguments.bytes.iter().map(ToString::to_string).collect())])
        .args(["--sockets", &arguments.sockets.to_string()]);
    if arguments.tls {
        command.arg("--tls");
    }
    if let Some(bytes) = arguments.buffer_bytes {
        command.args(["--buffer-bytes", &bytes.to_string()]);
    }
    if !arguments.algorithm.is_empty() {
        command.args(["--algorithm", &list(arguments.algorithm.iter().map(ToString::to_string).collect())]);
    }
    command.env(TOKEN, token.to_hex()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(Failure::failed)?;
    let output = child.stdout.take().ok_or_else(|| Failure::failed("a rank has no output"))?;
    Ok(Started { child, output: BufReader::new(output) })
}

/// The core for a rank: one of its own, where there are enough.
fn core(rank: usize, world: usize) -> Option<usize> {
    let allowed = cores::allowed();
    (allowed.len() >= world).then(|| allowed[rank].number)
}

fn head() -> String {
    format!(
        "{:<7}{:>5}{:>12}  {:<20}{:>12}{:>12}{:>12}  {}\n",
        "carry",
        "ranks",
        "bytes",
        "algorithm",
        "median ms",
        "least ms",
        "bus GB/s",
        "of a copy or stream of as many bytes"
    )
}

fn line(row: &Row) -> String {
    let name = if row.shared { format!("{}, shared", row.algorithm) } else { row.algorithm.clone() };
    let share = 100.0 * row.bus_bytes_per_s() / row.bound_bytes_per_s;
    let bound = match row.workers {
        1 => String::new(),
        _ => format!("{share:>4.0}% of a {} at {:.3} GB/s", row.bound.name(), row.bound_bytes_per_s / 1e9),
    };
    format!(
        "{:<7}{:>5}{:>12}  {name:<20}{:>12.4}{:>12.4}{:>12.3}  {bound}\n",
        row.carry,
        row.workers,
        row.bytes,
        row.median_s * 1e3,
        row.least_s * 1e3,
        row.bus_bytes_per_s() / 1e9
    )
}

fn document(rows: &[Row]) -> Value {
    let host = Host::look();
    let best = rows.iter().max_by(|a, b| a.bus_bytes_per_s().total_cmp(&b.bus_bytes_per_s()));
    json!({
        "host": host,
        "bus_bytes_per_s": best.map(Row::bus_bytes_per_s),
        "best": best.map(Row::to_json),
        "rows": rows.iter().map(Row::to_json).collect::<Vec<_>>(),
    })
}
