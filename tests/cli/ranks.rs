//! Ranks as the documentation starts them: by `launch`, by variables, several runs at once. Rank 0 makes the run's folder, and
//! the others learn it.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::place::{Place, QUICK, text};

/// A secret for all runs of a test, as the token of a user is for all of theirs.
pub const TOKEN: &str = "5ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2";

/// A run whose ranks are described by variables.
pub struct Run {
    pub port: u16,
    pub world: usize,
    pub line: String,
}

impl Run {
    pub fn new(world: usize, line: &str) -> Self {
        Self { port: paceline::cluster::launch::local::free_port().unwrap(), world, line: line.to_owned() }
    }

    /// The command of a rank.
    pub fn rank(&self, place: &Place, rank: usize) -> Command {
        let mut command = place.command(&self.line);
        self.describe(&mut command, rank);
        command
    }

    /// Tells a command which rank it is.
    pub fn describe(&self, command: &mut Command, rank: usize) {
        let (rank, world) = (rank.to_string(), self.world.to_string());
        command.env("RANK", &rank).env("WORLD_SIZE", &world).env("LOCAL_RANK", &rank).env("LOCAL_WORLD_SIZE", &world);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", self.port.to_string());
        command.env("PACELINE_TOKEN", TOKEN).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    }
}

/// Waits until processes have ended, and says what those wrote that did not end well.
pub fn all_end_well(children: Vec<Child>) {
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    }
}

/// The folders under `runs/`, with the ranks whose events are there.
fn folders(place: &Place) -> Vec<Vec<String>> {
    let names = |folder: &std::path::Path| -> Vec<std::path::PathBuf> {
        let mut found: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        found.sort();
        found
    };
    let name = |path: &std::path::PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    names(&place.path("runs")).iter().map(|run| names(&run.join("events")).iter().map(name).collect()).collect()
}

#[test]
fn launched_ranks_train_in_one_folder_that_nobody_named() {
    let place = Place::new();
    place.run(&format!("launch --workers 2 -- train {QUICK} --epochs 1"));
    assert_eq!(folders(&place), [["rank-0.jsonl", "rank-1.jsonl"]]);
    // The model and data that `train` takes by itself, and servers.
    place.run("launch --workers 3 -- train --max-steps 3 --batch 32 --agree parameter-server --servers 1");
    // Both may have begun in one second, and then their names say nothing about their order.
    let found = folders(&place);
    assert!(found.iter().any(|ranks| *ranks == ["rank-0.jsonl", "rank-1.jsonl", "rank-2.jsonl"]), "{found:?}");
}

#[test]
fn ranks_that_variables_describe_train_in_one_folder_that_nobody_named() {
    let place = Place::new();
    let run = Run::new(3, "train --model mlp --data synthetic:8x8x3/10/64 --batch 6 --max-steps 3");
    all_end_well((0..3).rev().map(|rank| run.rank(&place, rank).spawn().unwrap()).collect());
    assert_eq!(folders(&place), [["rank-0.jsonl", "rank-1.jsonl", "rank-2.jsonl"]]);
}

#[test]
fn runs_that_start_in_the_same_second_have_folders_of_their_own() {
    let place = Place::new();
    let start = |line: &str| {
        let mut command = place.command(line);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let lines = [format!("train {QUICK} --max-steps 2"), format!("train {QUICK} --max-steps 2 --workers 2")];
    all_end_well((0..8).map(|number| start(&lines[number % 2])).collect());
    let found = folders(&place);
    assert_eq!(found.len(), 8, "{found:?}");
    assert_eq!(found.iter().filter(|ranks| ranks.len() == 2).count(), 4, "{found:?}");
}

/// Waits for something that happens soon.
pub fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "waited 30 s for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
