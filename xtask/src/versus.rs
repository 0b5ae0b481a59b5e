//! `cargo x versus`: Paceline and PyTorch alternately on the same cores, a row of a table for each model and element type.
//!
//! A row begins with a check: both sides compute two training steps from the same weights and the same batch (dropout off)
//! and must agree on the losses and on the gradient's norm; where they do not, nothing is timed. Then come rounds of
//! PyTorch channels_last, Paceline, PyTorch contiguous, each a process of its own, so that a machine that grows slower or
//! faster does so for all. PyTorch's better layout counts, by the medians. The peer is `tools/peer.py`.
//!
//! Both sides take every core that this process may use: `taskset -c 0,1 cargo x versus` measures on two.

mod options;
mod table;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

pub use options::Options;
use options::{Dtype, Row};
use table::{Measured, Sample};

/// PyTorch's layouts, in the order in which they stand around Paceline.
const LAYOUTS: [&str; 2] = ["channels_last", "contiguous"];

/// A layout that was so much slower in the first round is not run again: it cannot be the better one.
const HOPELESS: f64 = 1.3;

/// The two programs and what they are told.
struct Programs {
    paceline: PathBuf,
    python: String,
    peer: PathBuf,
    folder: PathBuf,
    threads: usize,
    steps: usize,
}

/// Runs the command.
pub fn run(root: &Path, options: &Options) -> Result<()> {
    let python = python()?;
    crate::cargo(&["build", "--release"], &[])?;
    let programs = Programs {
        paceline: root.join("target/release/paceline"),
        python,
        peer: root.join("tools/peer.py"),
        folder: root.join("target/versus"),
        threads: std::thread::available_parallelism()?.get(),
        steps: options.steps,
    };
    std::fs::create_dir_all(&programs.folder)?;
    warn_of_calls(&programs.paceline);
    let mut measured = Vec::new();
    let mut failed = 0;
    for (row, dtype) in options.work() {
        match programs.row(&row, dtype, options) {
            Ok(found) => measured.extend(found),
            Err(error) => {
                eprintln!("{row} {dtype}: {error:#}");
                failed += 1;
            }
        }
        if let Some(file) = &options.json {
            let text = serde_json::to_string_pretty(&table::json(&measured, programs.threads))?;
            std::fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    if !measured.is_empty() {
        println!("\n{}", table::text(&measured));
    }
    if failed > 0 {
        bail!("{failed} rows could not be measured");
    }
    Ok(())
}

/// A vector instruction that the compiler left as a function call costs a kernel most of its speed, and nothing else shows
/// it: such functions have names in the binary. Says nothing where there is no `nm`.
fn warn_of_calls(binary: &Path) {
    let Ok(output) = Command::new("nm").arg("-C").arg(binary).output() else { return };
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    let calls: Vec<&str> = names
        .lines()
        .filter_map(|line| line.split_once("core::core_arch::x86::"))
        .map(|(_, name)| name)
        .filter(|name| !name.starts_with("cpuid") && !name.starts_with("xsave"))
        .collect();
    if let [first, ..] = calls[..] {
        println!("warning: {} vector instructions are function calls in this build, {first} among them", calls.len());
    }
}

/// The Python that has PyTorch.
fn python() -> Result<String> {
    const INSTALL: &str = "install PyTorch with `python3 -m venv venv && venv/bin/pip install torch torchvision` \
        and type PACELINE_PYTHON=venv/bin/python cargo x versus";
    let Ok(python) = std::env::var("PACELINE_PYTHON") else { bail!("PACELINE_PYTHON is not set; {INSTALL}") };
    let imports = Command::new(&python).args(["-c", "import torch, torchvision"]).output();
    if !imports.is_ok_and(|output| output.status.success()) {
        bail!("{python} cannot import torch and torchvision; {INSTALL}");
    }
    Ok(python)
}

impl Programs {
    /// Checks a row, then measures it; nothing is measured if only the check was asked for.
    fn row(&self, row: &Row, dtype: Dtype, options: &Options) -> Result<Option<Measured>> {
        self.check(row, dtype)?;
        if options.check_only {
            return Ok(None);
        }
        let mut measured = Measured::new(row, dtype);
        for round in 1..=options.rounds {
            let hopeless = measured.hopeless();
            for (side, layout) in LAYOUTS.into_iter().enumerate() {
                if hopeless != Some(side) {
                    measured.theirs[side].push(self.theirs(row, dtype, layout)?);
                }
                if side == 0 {
                    measured.ours.push(self.ours(row, dtype)?);
                }
            }
            println!("{row} {dtype} round {round}: {}", measured.round());
        }
        measured.profile = json(self.paceline(row, dtype).args(["--steps", "1", "--profile"]))?["profile"].take();
        Ok(Some(measured))
    }

    fn ours(&self, row: &Row, dtype: Dtype) -> Result<Sample> {
        let steps = self.steps.to_string();
        Sample::from_json(&json(self.paceline(row, dtype).args(["--steps", &steps]))?)
    }

    fn theirs(&self, row: &Row, dtype: Dtype, layout: &str) -> Result<Sample> {
        let steps = self.steps.to_string();
        Sample::from_json(&json(self.peer(row, dtype).args(["--steps", &steps, "--layout", layout]))?)
    }

    fn paceline(&self, row: &Row, dtype: Dtype) -> Command {
        let mut command = Command::new(&self.paceline);
        command.args(["bench", "step", "--json", "--model", &row.model, "--dtype", dtype.name()]);
        command.args(["--size", &row.size.to_string(), "--batch", &row.batch.to_string()]);
        command.args(["--threads", &self.threads.to_string()]);
        command
    }

    fn peer(&self, row: &Row, dtype: Dtype) -> Command {
        let mut command = Command::new(&self.python);
        command.arg(&self.peer).args([&row.model, "--dtype", dtype.name()]);
        command.args(["--size", &row.size.to_string(), "--batch", &row.batch.to_string()]);
        command.args(["--threads", &self.threads.to_string()]);
        command
    }

    /// Both sides compute the same two steps.
    fn check(&self, row: &Row, dtype: Dtype) -> Result<()> {
        let file = self.folder.join(format!("check-{}.safetensors", std::process::id()));
        let outcome = self.compare(row, dtype, &file);
        // It may not have been written; whatever happened, the outcome matters more.
        let _ = std::fs::remove_file(&file);
        println!("{row} {dtype}: the same losses without dropout: {}", outcome.context("not measured")?);
        Ok(())
    }

    fn compare(&self, row: &Row, dtype: Dtype, file: &Path) -> Result<String> {
        let ours = json(self.paceline(row, dtype).arg("--check").arg(file))?;
        let rate = ours["learning_rate"].to_string();
        let theirs = json(self.peer(row, dtype).args(["--rate", &rate, "--check"]).arg(file))?;
        let (loss, norm) = dtype.tolerances();
        let compared = [("losses", 0, loss), ("losses", 1, loss), ("gradient_norms", 0, norm)];
        let mut said = Vec::new();
        for (what, step, tolerance) in compared {
            let [ours, theirs] = [&ours, &theirs].map(|side| side[what][step].as_f64());
            let (ours, theirs) = ours.zip(theirs).context("a side printed no number")?;
            let apart = (ours / theirs - 1.0).abs();
            let text = format!("{ours:.6} and {theirs:.6} ({apart:.0e} apart)");
            if apart.is_nan() || apart > tolerance {
                bail!("{what} of step {}: Paceline {text}, at most {tolerance:.0e} is rounding", step + 1);
            }
            said.push(text);
        }
        Ok(format!("{}, then {}; norm of the gradient {}", said[0], said[1], said[2]))
    }
}

/// What a program prints as JSON.
fn json(command: &mut Command) -> Result<Value> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        // Paceline's sentence begins with "error:"; Python's stands last, behind a traceback.
        let sentence = said.lines().find(|line| line.starts_with("error:")).or(said.trim().lines().last());
        bail!("{command:?} failed: {}", sentence.unwrap_or("it said nothing"));
    }
    serde_json::from_slice(&output.stdout).with_context(|| format!("{command:?} printed no JSON"))
}
