//! `cargo x gpu`: packs what a GPU machine without Rust needs (the binary, the tests that look for a GPU, a script that runs all of it) and, if
//! there is such a machine, runs it there.
//!
//! The pack is the folder target/gpu: `sh target/gpu/run.sh` in the root of this tree, or anywhere it was copied to.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The tests that run on a GPU if there is one, by package.
const TESTS: [(&str, &str); 3] = [("paceline-tensor", "ops"), ("paceline-nn", "models"), ("paceline-train", "gpu")];

/// What is measured: model, side, batch.
const MEASURED: [(&str, usize, usize); 6] = [
    ("resnet50", 224, 256),
    ("resnet152", 224, 128),
    ("vgg16", 224, 128),
    ("alexnet", 224, 512),
    ("resnet50", 32, 2048),
    ("resnet20", 32, 128),
];

/// Packs, and runs the pack here, on `host` by ssh, or nowhere.
pub fn run(root: &Path, arguments: &[&str]) -> Result<()> {
    let folder = root.join("target/gpu");
    pack(root, &folder)?;
    match arguments {
        [] => {
            println!("packed {}; `sh run.sh` there runs it, `cargo x gpu --here` does so now", folder.display());
            Ok(())
        }
        ["--here"] => start(Command::new("sh").arg("run.sh").current_dir(&folder)),
        ["--host", host] => {
            start(Command::new("ssh").args([host, "mkdir -p paceline-gpu"]))?;
            start(Command::new("scp").args(["-r", "-q"]).arg(folder.join(".")).arg(format!("{host}:paceline-gpu")))?;
            start(Command::new("ssh").args([host, "cd paceline-gpu && sh run.sh"]))
        }
        _ => bail!("usage: cargo x gpu [--here | --host NAME]"),
    }
}

fn pack(root: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    crate::cargo(&["build", "--release"], &[])?;
    take(&root.join("target/release/paceline"), &folder.join("paceline"))?;
    for (package, test) in TESTS {
        take(&test_binary(root, package, test)?, &folder.join(test))?;
    }
    // The models' numbers are read from the tree; where there is none, from here.
    let fixtures = folder.join("crates/nn/tests/fixtures");
    fs::create_dir_all(&fixtures)?;
    for entry in fs::read_dir(root.join("crates/nn/tests/fixtures"))? {
        let path = entry?.path();
        fs::copy(&path, fixtures.join(path.file_name().context("a file has a name")?))?;
    }
    let mut script =
        String::from("set -e\nexport PACELINE_CACHE=\"${PACELINE_CACHE:-$PWD/cache}\"\n./paceline doctor\n");
    TESTS.iter().for_each(|(_, test)| script += &format!("./{test} --test-threads 4\n"));
    for (model, side, batch) in MEASURED {
        let step = format!("bench step --device cuda --model {model} --size {side} --batch {batch}");
        script += &format!("./paceline {step} --classes 1000 --dtype bf16 --steps 5\n");
    }
    fs::write(folder.join("run.sh"), script)?;
    Ok(())
}

/// Copies a program without what only a debugger reads.
fn take(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    // Without `strip` the pack is larger, and works.
    let _ = Command::new("strip").arg(to).status();
    Ok(())
}

/// Builds a test and finds its program.
fn test_binary(root: &Path, package: &str, test: &str) -> Result<PathBuf> {
    let arguments = ["test", "--release", "--no-run", "--message-format=json", "-p", package, "--test", test];
    let output =
        Command::new(env!("CARGO")).args(arguments).current_dir(root).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let found = messages
        .filter(|message| message["target"]["name"] == test)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    found.with_context(|| format!("cargo did not say where the test `{test}` is"))
}

fn start(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if status.success() { Ok(()) } else { bail!("{command:?} failed") }
}
