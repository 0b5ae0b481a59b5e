//! `cargo x choices`: whether `paceline choose` finds the fastest set-up. For each of eight models and two batches it chooses, and then
//! every set-up that applies is measured in turns, by the same few steps of `paceline train`.
//!
//! All set-ups have the first turn; those within half as much again of the best have two more, there and back. A pick is right where its
//! median is within 5% of the least median, or its turns and those of the least overlap. Forecasts are held against what `choose` measured
//! itself right behind them, and against the medians of the turns.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Model and data; `text` stands for a file that is made here.
const MODELS: [(&str, &str); 8] = [
    ("lenet5", "synthetic:32x32x1/10"),
    ("cnn5", "synthetic:32x32x3/10"),
    ("resnet20", "synthetic:32x32x3/10"),
    ("alexnet", "synthetic:64x64x3/10"),
    ("vgg11", "synthetic:32x32x3/10"),
    ("googlenet", "synthetic:64x64x3/10"),
    ("mobilenet", "synthetic:64x64x3/10"),
    ("lstm", "text"),
];

const BATCHES: [u32; 2] = [8, 32];

/// What a pick may be slower than the best.
const CLOSE: f64 = 1.05;

/// Set-ups that have more turns than one.
const AGAIN: f64 = 1.5;

/// Steps of a turn that do not count, those that do, and the seconds that they take at least.
const STEPS: (usize, usize, f64) = (2, 3, 0.5);

struct Grid {
    paceline: PathBuf,
    folder: PathBuf,
    turns: usize,
    budget: String,
}

/// A set-up of a cell, with its turns.
struct SetUp {
    name: String,
    flags: Vec<String>,
    forecast_s: Option<f64>,
    /// The forecast's error by what `choose` measured.
    error: Option<f64>,
    seconds: Vec<f64>,
}

/// What all cells come to.
#[derive(Default)]
struct Sums {
    cells: usize,
    right: usize,
    errors: Vec<f64>,
    grid_errors: Vec<f64>,
}

/// Runs the command; `cells` are parts of names such as `resnet20 8`, or none for all. `TURNS` and `BUDGET` change how long it takes.
pub fn run(root: &Path, cells: &[&str]) -> Result<()> {
    crate::cargo(&["build", "--release"], &[])?;
    let variable = |name: &str| std::env::var(name).ok();
    let turns = variable("TURNS").and_then(|turns| turns.parse().ok()).unwrap_or(3);
    let budget = variable("BUDGET").unwrap_or_else(|| "60s".into());
    let folder = root.join("target/choices");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("text.txt"), std::fs::read_to_string(root.join("README.md"))?.repeat(20))?;
    let grid = Grid { paceline: root.join("target/release/paceline"), folder, turns, budget };
    println!(
        "| model | batch | pick | ms | best | ms | pick/best | right | choose, s | forecasts off by, in choose | by turns |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let mut sums = Sums::default();
    for (model, data) in MODELS {
        for batch in BATCHES {
            let name = format!("{model} {batch}");
            if cells.is_empty() || cells.iter().any(|part| name.contains(part)) {
                grid.cell((model, data, batch), &mut sums)?;
            }
        }
    }
    let Sums { cells, right, errors, grid_errors } = sums;
    println!(
        "\n{right} of {cells} picks are within {:.0}% of the best, or within the spread of the turns",
        100.0 * (CLOSE - 1.0)
    );
    println!("forecasts, of set-ups that choose measured: {}", spread(&errors));
    println!("forecasts, of all set-ups by the medians of turns: {}", spread(&grid_errors));
    Ok(())
}

impl Grid {
    fn cell(&self, (model, data, batch): (&str, &str, u32), sums: &mut Sums) -> Result<()> {
        let data =
            if data == "text" { format!("text:{}", self.folder.join("text.txt").display()) } else { data.into() };
        let training = ["--model", model, "--data", &data, "--batch", &batch.to_string()].map(str::to_owned);
        let found = self.choose(&training)?;
        let mut setups = setups(&found)?;
        for turn in 0..self.turns {
            let best = setups
                .iter()
                .filter(|one| turn > 0 && !one.seconds.is_empty())
                .map(SetUp::median)
                .fold(f64::INFINITY, f64::min);
            let mut order: Vec<usize> =
                (0..setups.len()).filter(|&index| turn == 0 || setups[index].median() <= AGAIN * best).collect();
            if turn % 2 == 1 {
                order.reverse();
            }
            for index in order {
                if let Some(seconds) = self.turn(&training, &setups[index])? {
                    setups[index].seconds.push(seconds);
                }
            }
        }
        setups.retain(|one| !one.seconds.is_empty());
        let chosen = found["chosen"].as_str().context("no choice")?;
        let pick =
            setups.iter().find(|one| one.name == chosen).with_context(|| format!("{chosen} could not be measured"))?;
        let best = setups.iter().min_by(|one, other| one.median().total_cmp(&other.median())).context("no set-up")?;
        let right = pick.median() <= CLOSE * best.median() || pick.least() <= best.most();
        let errors: Vec<f64> = setups.iter().filter_map(|one| one.error).collect();
        let by_turns = |one: &SetUp| Some(one.forecast_s? / one.median() - 1.0);
        let grid_errors: Vec<f64> = setups.iter().filter_map(by_turns).collect();
        println!(
            "| {model} | {batch} | {} | {:.2} | {} | {:.2} | {:.2} | {} | {:.0} | {} | {} |",
            pick.name,
            pick.median() * 1e3,
            best.name,
            best.median() * 1e3,
            pick.median() / best.median(),
            if right { "yes" } else { "no" },
            found["seconds"].as_f64().unwrap_or(0.0),
            spread(&errors),
            spread(&grid_errors)
        );
        sums.cells += 1;
        sums.right += usize::from(right);
        sums.errors.extend(errors);
        sums.grid_errors.extend(grid_errors);
        Ok(())
    }

    fn choose(&self, training: &[String]) -> Result<Value> {
        let mut command = Command::new(&self.paceline);
        command.arg("choose").args(training).args(["--again", "--json", "--choose-budget", &self.budget]);
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("choose")?;
        if !output.status.success() {
            bail!("choose {} failed", training.join(" "));
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// The median step of a few; none where the set-up does not run.
    fn turn(&self, training: &[String], setup: &SetUp) -> Result<Option<f64>> {
        let folder = self.folder.join("run");
        // What was there is of an earlier turn.
        let _ = std::fs::remove_dir_all(&folder);
        let (warm_up, steps, seconds) = STEPS;
        let mut command = Command::new(&self.paceline);
        command
            .arg("train")
            .args(training)
            .args(&setup.flags)
            .args(["--quiet", "--epochs", "1000000", "--run"])
            .arg(&folder);
        command.arg(format!("--rehearse={}:{seconds}", warm_up + steps)).stdin(Stdio::null());
        if !command.status().context("train")?.success() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(folder.join("events/rank-0.jsonl"))?;
        let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let step = |event: Value| event["seconds"].as_f64().filter(|_| event["event"] == "step");
        let all: Vec<f64> = events.filter_map(step).collect();
        let skipped = warm_up.max(all.len() / 10).min(all.len().saturating_sub(1));
        Ok(Some(median(all[skipped..].to_vec())))
    }
}

impl SetUp {
    fn median(&self) -> f64 {
        median(self.seconds.clone())
    }

    fn least(&self) -> f64 {
        self.seconds.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn most(&self) -> f64 {
        self.seconds.iter().copied().fold(0.0, f64::max)
    }
}

/// Those that apply.
fn setups(found: &Value) -> Result<Vec<SetUp>> {
    let all = found["setups"].as_array().context("no set-ups")?;
    let setup = |one: &Value| SetUp {
        name: one["setup"].as_str().unwrap_or_default().to_owned(),
        flags: one["flags"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|word| Some(word.as_str()?.to_owned()))
            .collect(),
        forecast_s: one["forecast_s"].as_f64(),
        error: one["forecast_error"].as_f64(),
        seconds: Vec::new(),
    };
    Ok(all.iter().filter(|one| one["applies"] == true).map(setup).collect())
}

/// The median and the worst of errors, without their signs.
fn spread(errors: &[f64]) -> String {
    if errors.is_empty() {
        return "–".into();
    }
    let sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
    let worst = sizes.iter().copied().fold(0.0, f64::max);
    format!("{:.0}%, at worst {:.0}%", 100.0 * median(sizes), 100.0 * worst)
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}
