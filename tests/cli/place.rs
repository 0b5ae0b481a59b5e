//! A folder of its own for each test, in which the real binary is run.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Random images that a small network is through with in milliseconds: eight steps of eight an epoch.
pub const QUICK: &str = "--model mlp --data synthetic:8x8x3/10/64 --batch 8";

/// A folder that is removed at the end, and another for what the binary keeps from one command to the next.
pub struct Place(tempfile::TempDir, tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap())
    }

    /// A place with a finished run of [`QUICK`] in `run`.
    pub fn with_run() -> Self {
        let place = Self::new();
        place.run(&format!("train {QUICK} --epochs 1 --run run --quiet"));
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The binary's cache.
    pub fn cache(&self) -> PathBuf {
        self.1.path().join("cache")
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub fn read_text(&self, name: &str) -> String {
        String::from_utf8(self.read(name)).unwrap()
    }

    /// The binary with arguments separated by spaces, in this folder.
    pub fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
        command.args(arguments.split_whitespace()).current_dir(self.0.path()).env_remove("PACELINE_DATA");
        command.env("PACELINE_CACHE", self.cache()).env_remove("PACELINE_ISA");
        command
    }

    /// Runs the binary, whatever comes of it.
    pub fn output(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs the binary, which must succeed, and gives what it printed.
    pub fn run(&self, arguments: &str) -> String {
        let output = self.output(arguments);
        let (said, wrong) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "paceline {arguments}: {}\n{said}{wrong}", output.status);
        said
    }

    /// Runs the binary, which must print one JSON value.
    pub fn json(&self, arguments: &str) -> Value {
        let said = self.run(arguments);
        assert_eq!(said.lines().count(), 1, "{said}");
        serde_json::from_str(&said).unwrap()
    }

    /// Runs the binary, which must fail with exit code `code` and one error with all of `words`.
    pub fn fails(&self, arguments: &str, code: i32, words: &[&str]) -> String {
        let output = self.output(arguments);
        let wrong = text(&output.stderr);
        let shown = format!("paceline {arguments}: {}\n{}{wrong}", output.status, text(&output.stdout));
        assert_eq!(output.status.code(), Some(code), "{shown}");
        assert!(wrong.starts_with("error: ") && wrong.matches("error: ").count() == 1, "one error: {shown}");
        for word in words {
            assert!(wrong.contains(word), "`{word}` is missing: {shown}");
        }
        wrong
    }

    /// Runs the binary, which must refuse with all of `words` and leave every file as it was.
    pub fn refuses(&self, arguments: &str, words: &[&str]) {
        let before = self.files();
        self.fails(arguments, 2, words);
        let after = self.files();
        let changed: Vec<_> = after.iter().filter(|(path, bytes)| before.get(*path) != Some(bytes)).collect();
        let names: Vec<_> = changed.iter().map(|(path, _)| path).collect();
        assert!(changed.is_empty() && before.len() == after.len(), "paceline {arguments} changed {names:?}");
    }

    /// Every file and folder here with its bytes.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        collect(self.0.path(), &mut found);
        found
    }

    /// The lines of a run's event file.
    pub fn events(&self, run: &str) -> Vec<Value> {
        let text = self.read_text(&format!("{run}/events/rank-0.jsonl"));
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The weights of a run's checkpoint of a step.
    pub fn weights(&self, run: &str, step: u64) -> Vec<u8> {
        self.read(&format!("{run}/checkpoints/step-{step:08}/weights.safetensors"))
    }

    /// Writes a PNG with a coloured square whose place depends on `class`, different for each `number`.
    pub fn write_png(&self, name: &str, side: u32, class: u32, number: u32) {
        let pixel = |x: u32, y: u32| {
            let inside = x / (side / 2) == class % 2 && y / (side / 2) == class / 2 % 2;
            image::Rgb(if inside { [250, (number * 40) as u8, 10] } else { [20, 20, (number * 30) as u8] })
        };
        let mut bytes = std::io::Cursor::new(Vec::new());
        image::RgbImage::from_fn(side, side, pixel).write_to(&mut bytes, image::ImageFormat::Png).unwrap();
        self.write(name, bytes.into_inner());
    }
}

fn collect(folder: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, found);
            found.insert(path, Vec::new());
        } else {
            let bytes = std::fs::read(&path).unwrap();
            found.insert(path, bytes);
        }
    }
}

/// Bytes that must be text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Whether a program is there; a test that needs it says so and passes where it is not.
pub fn has(program: &str, test: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        skip(test, &format!("needs `{program}`"));
    }
    found
}

/// How so many processes are started by an `mpirun`. Ranks of OpenMPI meet at a port of their job's, and MPICH has none.
pub fn mpirun(program: &str, processes: usize) -> String {
    if !program.contains("mpich") {
        return format!("{program} -n {processes} --allow-run-as-root --oversubscribe");
    }
    let port = paceline::cluster::launch::local::free_port().unwrap();
    format!("MASTER_PORT={port} {program} -n {processes}")
}

/// Says that a test is skipped, straight to the terminal: the harness keeps what a passing test prints.
pub fn skip(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}
