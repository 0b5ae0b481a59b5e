//! The developers' commands: `cargo x ci` is exactly what CI runs, `cargo x tidy` checks the invariants of ARCHITECTURE.md.

mod tidy;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

const USAGE: &str = "usage: cargo x <command>

  ci       format, lints, tidy, docs, then every test: what CI runs
  tidy     the invariants, file and function sizes, ARCHITECTURE.md
  versus   Paceline and PyTorch alternately on the same cores (needs PACELINE_PYTHON with torch)";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["ci"] => ci(),
        ["tidy"] => tidy::check(&root()).map(|()| println!("tidy: ok")),
        ["versus", ref rest @ ..] => versus(rest),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's root folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask stands in the workspace").to_owned()
}

fn ci() -> Result<()> {
    cargo(&["fmt", "--all", "--check"], &[])?;
    tidy::check(&root())?;
    cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &[])?;
    cargo(&["doc", "--workspace", "--no-deps"], &[("RUSTDOCFLAGS", "-D warnings")])?;
    cargo(&["test", "--workspace"], &[])
}

fn cargo(arguments: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    println!("$ cargo {}", arguments.join(" "));
    let status = Command::new(env!("CARGO"))
        .args(arguments)
        .envs(environment.iter().copied())
        .current_dir(root())
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("cargo {} failed", arguments[0]);
    }
    Ok(())
}

/// Runs both sides in turns and prints the ratio of the medians, with the spread. The peer is any script that prints
/// `… N img/s …` for MODEL SIZE BATCH STEPS f32 channels_last.
fn versus(arguments: &[&str]) -> Result<()> {
    let [model, size, batch, peer] = arguments else {
        bail!("usage: cargo x versus MODEL SIZE BATCH PEER.py   (for example: resnet50 128 32 torch_cpu.py)");
    };
    let python = std::env::var("PACELINE_PYTHON").unwrap_or_else(|_| "python3".into());
    cargo(&["build", "--release"], &[])?;
    let binary = root().join("target/release/paceline");
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 1..=3 {
        let bench = ["bench", "step", "--model", model, "--size", size, "--batch", batch, "--steps", "5", "--json"];
        let text = output(Command::new(&binary).args(bench))?;
        let rate = text.split("\"images_per_s\":").nth(1).context("the bench printed no images_per_s")?;
        ours.push(rate.split([',', '}']).next().unwrap_or("").trim().parse::<f64>()?);
        let text = output(Command::new(&python).args([*peer, model, size, batch, "5", "f32", "channels_last"]))?;
        let rate = text
            .split(" img/s")
            .next()
            .and_then(|head| head.rsplit(' ').next())
            .context("no img/s in the peer's output")?;
        theirs.push(rate.parse::<f64>()?);
        println!("round {round}: paceline {:.2}, peer {:.2} images/s", ours[round - 1], theirs[round - 1]);
    }
    let median = |rates: &mut Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        (rates[rates.len() / 2], 100.0 * (rates[rates.len() - 1] / rates[0] - 1.0))
    };
    let ((ours, our_spread), (theirs, their_spread)) = (median(&mut ours), median(&mut theirs));
    println!(
        "{model} {size}² batch {batch} f32: {ours:.2} (spread {our_spread:.0}%) / {theirs:.2} (spread {their_spread:.0}%) = {:.2}",
        ours / theirs
    );
    Ok(())
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
