//! Faults in the middle of `paceline train --workers 3`: all end soon, one says who failed where, nothing stays behind, and the command that was printed ends the run with the weights of one that was never stopped.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::ground::{Done, Ground, PATIENCE, Running, say, signal, within};

const RUN: &str = "train --model lenet5 --data shapes --batch 48 --max-steps 80 --checkpoint-every 4 --threads 1 \
                   --optimizer momentum --lr 0.02 --workers 3 --quiet --silent 3s";

/// A fault is named within five seconds; the rest is for a busy machine.
pub const SOON: Duration = Duration::from_secs(5 + 4);

/// What tells the processes of a run from all others: the folder in which they were started.
pub fn processes(ground: &Ground) -> BTreeMap<u32, Option<usize>> {
    let folder = ground.path("").canonicalize().unwrap();
    let numbers = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let look = |pid: u32| {
        let inside = std::fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
        let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        let ranks = ["RANK=", "OMPI_COMM_WORLD_RANK=", "PMI_RANK="].map(str::as_bytes);
        let named = |variable| ranks.iter().find_map(|name| <[u8]>::strip_prefix(variable, *name));
        let rank = environment.split(|&byte| byte == 0).find_map(named);
        let rank = rank.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        (inside == folder).then_some((pid, rank))
    };
    numbers.filter_map(look).collect()
}

/// A run that has saved its eighth step, and the process of one of its ranks.
fn start(ground: &Ground, rank: usize) -> (Running, u32) {
    let running = ground.start(&mut ground.command(&format!("PACELINE {RUN} --run run")), "said.txt");
    let saved = ground.path("run/checkpoints/step-00000008");
    within(PATIENCE, || saved.exists(), || running.said());
    let found = processes(ground).into_iter().find(|(_, of)| *of == Some(rank));
    let (pid, _) = found.unwrap_or_else(|| panic!("no process of rank {rank}: {}", running.said()));
    (running, pid)
}

/// Waits until the processes other than these have ended.
pub fn only_left(ground: &Ground, limit: Duration, left: &[u32]) {
    let others = || -> Vec<u32> { processes(ground).into_keys().filter(|pid| !left.contains(pid)).collect() };
    within(limit, || others().is_empty(), || format!("processes {:?} are left", others()));
}

fn shared_memory() -> Vec<PathBuf> {
    let ours = |path: &PathBuf| path.to_string_lossy().contains("paceline");
    std::fs::read_dir("/dev/shm").into_iter().flatten().flatten().map(|entry| entry.path()).filter(ours).collect()
}

/// Exit code 1, and one sentence names the rank and what it did.
fn named(done: &Done, rank: usize) {
    assert_eq!(done.status.code(), Some(1), "{}", done.said);
    let errors: Vec<&str> = done.said.lines().filter(|line| line.contains("error: ")).collect();
    assert_eq!(errors.len(), 1, "{}", done.said);
    // The first rank writes straight to the terminal, the second through the launcher.
    let mark = if rank == 0 { "[1] " } else { "" };
    assert!(errors[0].starts_with(&format!("{mark}error: rank {rank} on ")), "{}", done.said);
    assert!(errors[0].contains("it was last in phase ") && errors[0].contains(" after step "), "{}", done.said);
}

/// The command that the survivors printed.
fn advice(done: &Done) -> String {
    let found = done.said.lines().find_map(|line| line.split_once("type: paceline "));
    found.unwrap_or_else(|| panic!("no command to resume with:\n{}", done.said)).1.to_owned()
}

/// The weights that a run ends with.
fn weights(ground: &Ground, run: &str) -> Vec<u8> {
    std::fs::read(ground.path(run).join("checkpoints/step-00000080/weights.safetensors")).unwrap()
}

/// Those of a run that was never stopped, which is made once for all tests.
fn straight(ground: &Ground) -> &'static [u8] {
    static WEIGHTS: OnceLock<Vec<u8>> = OnceLock::new();
    WEIGHTS.get_or_init(|| {
        ground.run(&format!("PACELINE {RUN} --run straight"));
        weights(ground, "straight")
    })
}

/// Resumes and compares.
fn goes_on(ground: &Ground, command: &str) {
    assert!(!ground.path("run/checkpoints/step-00000080").exists(), "the fault came before the end");
    ground.run(&format!("PACELINE {command} --quiet"));
    assert!(weights(ground, "run") == straight(ground), "resumed, it ends with other weights");
    assert!(shared_memory().is_empty(), "left in shared memory: {:?}", shared_memory());
    only_left(ground, Duration::ZERO, &[]);
}

fn killed(rank: usize) {
    let ground = Ground::new();
    let (running, pid) = start(&ground, rank);
    signal("KILL", &pid.to_string());
    let done = running.ends(SOON);
    named(&done, rank);
    only_left(&ground, Duration::ZERO, &[]);
    goes_on(&ground, &advice(&done));
}

#[test]
fn a_killed_worker_is_named_and_the_run_goes_on_from_its_checkpoint() {
    killed(1);
}

#[test]
#[ignore = "cargo x ci: field"]
fn the_first_worker_killed_is_named_too() {
    killed(0);
}

#[test]
fn a_stopped_worker_is_named_and_ended() {
    let ground = Ground::new();
    let (running, pid) = start(&ground, 1);
    let struck = Instant::now();
    signal("STOP", &pid.to_string());
    let done = running.ends(SOON);
    say(&format!("a stopped worker is named, and all have ended, within {:.1} s", struck.elapsed().as_secs_f64()));
    named(&done, 1);
    assert!(done.said.contains("is stalled: silent for"), "{}", done.said);
    only_left(&ground, Duration::ZERO, &[]);
    goes_on(&ground, &advice(&done));
}

#[test]
fn workers_end_with_their_launcher() {
    let ground = Ground::new();
    let (running, _) = start(&ground, 1);
    signal("KILL", &running.pid().to_string());
    only_left(&ground, SOON, &[running.pid()]);
    let done = running.ends(SOON);
    assert!(!done.status.success());
    goes_on(&ground, "train --resume run");
}
