//! The developers' commands: `cargo x ci` is exactly what CI runs, `cargo x tidy` checks the invariants of ARCHITECTURE.md.

mod choices;
mod gpu;
mod lerat;
mod mpi;
mod pipelines;
mod suites;
mod tidy;
mod versus;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

const USAGE: &str = "usage: cargo x <command>

  ci       format, lints, tidy, docs, another processor, then every test, with slower kernels too: what CI runs
  choices  whether `paceline choose` finds the fastest set-up of eight models and two batches: docs/choose.md
  gpu      pack the binary and the tests that look for a GPU for a machine without Rust; --here or --host NAME runs them
  lerat    two models by every set-up of two cores and between two hosts, PyTorch beside: docs/reports/lerat.md
  long     as root: measurements between hosts that take minutes, on a quiet machine
  mpi      the feature mpi with each MPI that is installed (part of ci)
  pipelines  two stages on two cores against one process on one core, by every schedule: docs/split.md
  tidy     the invariants, file and function sizes, ARCHITECTURE.md
  versus   Paceline and PyTorch alternately on the same cores, after both computed the same losses";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["ci"] => ci(),
        ["choices", ref rest @ ..] => choices::run(&root(), rest),
        ["gpu", ref rest @ ..] => gpu::run(&root(), rest),
        ["lerat", ref rest @ ..] => lerat::run(&root(), rest),
        ["long"] => suites::long(),
        ["mpi"] => mpi::run(),
        ["pipelines", ref rest @ ..] => pipelines::run(&root(), rest),
        ["tidy"] => tidy::check(&root()).map(|()| println!("tidy: ok")),
        ["versus", ref rest @ ..] => versus::Options::parse(rest).and_then(|options| versus::run(&root(), &options)),
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
    other_processors()?;
    suites::run()?;
    mpi::run()
}

/// Checks that the workspace compiles for a processor without the instructions that the fast kernels are written for.
fn other_processors() -> Result<()> {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    let installed = Command::new("rustup").args(["target", "list", "--installed"]).output();
    let found =
        installed.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).lines().any(|line| line == TARGET));
    if !found {
        println!("skipped: the check for {TARGET} needs `rustup target add {TARGET}`");
        return Ok(());
    }
    let check = ["check", "--workspace", "--all-targets", "--target", TARGET, "--target-dir", "target/other"];
    // A check links nothing, so what would compile the C parts of dependencies for that processor need not be there.
    cargo(&check, &[("RUSTFLAGS", "-D warnings"), ("TARGET_CC", "true"), ("TARGET_AR", "true")])
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
