//! `cargo x pipelines`: two stages on two cores against one process on one core, at the same micro-batching: the cuts of the literature and the
//! balanced ones, by every schedule, a row of a table for each.
//!
//! Every turn runs one process on each of two cores at the same time (the reference, with both cores busy), then the pipeline by each
//! schedule. Medians of the turns' median steps count. The bound of a row follows from the stages' measured shares a ≥ b of the work, which
//! the pipeline's own event tells: 1/(a + b/m) for gpipe and 1f1b, 1/(a + b/3m) for zero-bubble, with m micro-batches.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Model, the layer behind which it is cut, batch, micro-batches and steps.
const ROWS: [(&str, &str, u32, u32, u32); 4] = [
    ("alexnet", "features.8", 64, 8, 5),
    ("alexnet", "features.6", 64, 8, 5),
    ("vgg16", "features.17", 16, 4, 3),
    ("vgg16", "features.12", 16, 4, 3),
];

const SCHEDULES: [&str; 3] = ["gpipe", "1f1b", "zero-bubble"];

/// The first steps of a run, in which memory is touched for the first time.
const WARM_UP: usize = 1;

struct Runs {
    paceline: PathBuf,
    folder: PathBuf,
}

/// Runs the command; `rows` are parts of names of models and cuts, or none for all.
pub fn run(root: &Path, arguments: &[&str]) -> Result<()> {
    crate::cargo(&["build", "--release"], &[])?;
    let runs = Runs { paceline: root.join("target/release/paceline"), folder: root.join("target/pipelines") };
    let turns: usize = std::env::var("TURNS").ok().and_then(|turns| turns.parse().ok()).unwrap_or(3);
    println!(
        "| model | cut | m | shares | one process, s | schedule | s | speed-up | bound by shares and m | reached |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for row in ROWS {
        let name = format!("{} {}", row.0, row.1);
        if arguments.is_empty() || arguments.iter().any(|part| name.contains(part)) {
            runs.row(row, turns)?;
        }
    }
    Ok(())
}

impl Runs {
    fn row(&self, row: (&str, &str, u32, u32, u32), turns: usize) -> Result<()> {
        let (model, cut, _, micro_batches, _) = row;
        let (mut alone, mut staged, mut shares) = (Vec::new(), vec![Vec::new(); SCHEDULES.len()], Vec::new());
        for _ in 0..turns {
            alone.push(self.two_alone(row)?);
            for (schedule, seconds) in SCHEDULES.iter().zip(&mut staged) {
                let (step, share) = self.pipeline(row, schedule)?;
                seconds.push(step);
                shares.push(share);
            }
        }
        let (one, a, m) = (median(&mut alone), median(&mut shares), f64::from(micro_batches));
        for (schedule, seconds) in SCHEDULES.iter().zip(&mut staged) {
            let step = median(seconds);
            let fill = if *schedule == "zero-bubble" { 3.0 * m } else { m };
            let (speedup, bound) = (one / step, 1.0 / (a + (1.0 - a) / fill));
            println!(
                "| {model} | {cut} | {m} | {:.0}:{:.0} | {one:.2} | {schedule} | {step:.2} | {speedup:.2} | {bound:.2} | {:.0}% |",
                100.0 * a,
                100.0 * (1.0 - a),
                100.0 * speedup / bound
            );
        }
        Ok(())
    }

    fn command(&self, (model, _, batch, micro_batches, steps): (&str, &str, u32, u32, u32), run: &str) -> Command {
        let folder = self.folder.join(run);
        // What was there is of an earlier turn.
        let _ = std::fs::remove_dir_all(&folder);
        let mut command = Command::new(&self.paceline);
        let data = format!("synthetic:224x224x3/1000/{}", batch * steps);
        command.args(["train", "--model", model, "--data", &data, "--batch", &batch.to_string(), "--epochs", "1"]);
        command.args(["--accumulate", &micro_batches.to_string(), "--optimizer", "momentum", "--lr", "0.001"]);
        command.args(["--threads", "1", "--quiet", "--augment", "none", "--evaluate-every", "1000", "--max-steps"]);
        command.args([&steps.to_string(), "--run"]).arg(&folder).stdin(Stdio::null());
        command
    }

    /// Seconds of a step of one process on a core, while another does the same on the other.
    fn two_alone(&self, row: (&str, &str, u32, u32, u32)) -> Result<f64> {
        let start = |core: usize| -> Result<Child> {
            let inner = self.command(row, &format!("alone-{core}"));
            let mut command = Command::new("taskset");
            command.args(["-c", &core.to_string()]).arg(inner.get_program()).args(inner.get_args());
            command.spawn().context("taskset")
        };
        let both = [start(0)?, start(1)?];
        for mut child in both {
            if !child.wait()?.success() {
                bail!("{} alone failed", row.0);
            }
        }
        let mut seconds = [self.step("alone-0")?, self.step("alone-1")?];
        Ok(median(&mut seconds))
    }

    /// Seconds of a step of two stages, and the larger share of the work.
    fn pipeline(&self, row: (&str, &str, u32, u32, u32), schedule: &str) -> Result<(f64, f64)> {
        let mut command = self.command(row, "staged");
        command.args(["--split", "pipeline:2", "--cuts", row.1, "--schedule", schedule]);
        if !command.status()?.success() {
            bail!("{} {schedule} failed", row.0);
        }
        let events = self.events("staged")?;
        let found = events.iter().find(|event| event["event"] == "pipeline").context("no event of the pipeline")?;
        let of = |stage: &Value| -> f64 {
            ["forward_s", "inputs_s", "weights_s"].iter().filter_map(|field| stage[field].as_f64()).sum()
        };
        let times: Vec<f64> = found["stages"].as_array().context("stages")?.iter().map(of).collect();
        let (largest, all) = (times.iter().copied().fold(0.0, f64::max), times.iter().sum::<f64>());
        Ok((self.step("staged")?, largest / all))
    }

    fn step(&self, run: &str) -> Result<f64> {
        let events = self.events(run)?;
        let steps =
            events.iter().filter(|event| event["event"] == "step").filter_map(|event| event["seconds"].as_f64());
        let mut seconds: Vec<f64> = steps.skip(WARM_UP).collect();
        if seconds.is_empty() {
            bail!("{run} has no steps");
        }
        Ok(median(&mut seconds))
    }

    fn events(&self, run: &str) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(self.folder.join(run).join("events/rank-0.jsonl"))?;
        Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }
}

fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}
