//! `cargo x gpu`: packs what a GPU machine without Rust needs (the binary, the tests that look for a GPU, a script that runs all of it) and, if
//! there is such a machine, runs it there.
//!
//! The pack is the folder target/gpu, at most 64 MiB: `sh target/gpu/run.sh` here, or wherever it was copied to. The script (`gpu/run.sh`) gives
//! every part a time limit, keeps each part's output in `logs/`, goes on after a failure, and ends with counts; its exit code is 1 if
//! anything failed. Where the machine's Python has PyTorch, it measures both in turns and ends with a table.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The tests that run on a GPU if there is one: package, name, seconds that they may take there.
const TESTS: [(&str, &str, u32); 9] = [
    ("paceline-tensor", "ops", 300),
    ("paceline-tensor", "large", 120),
    ("paceline-tensor", "dropout", 60),
    ("paceline-nn", "models", 900),
    ("paceline-nn", "hosted", 300),
    ("paceline-train", "gpu", 300),
    ("paceline-train", "together", 300),
    ("paceline-train", "pipeline", 300),
    ("paceline-train", "nccl", 120),
];

/// What a pack may take: as much as travels to a borrowed machine.
const PACK_BYTES_MAX: u64 = 64 << 20;

/// What is measured: model, side, batch, and the seconds that PyTorch may take to compile it and to be timed. What takes longest comes last, so
/// that a run that is cut short loses that.
const MEASURED: [(&str, usize, usize, u32, u32); 6] = [
    ("resnet50", 224, 256, 240, 120),
    ("vgg16", 224, 128, 240, 80),
    ("alexnet", 224, 512, 240, 80),
    ("resnet20", 32, 128, 240, 80),
    ("resnet50", 32, 2048, 240, 120),
    ("resnet152", 224, 128, 300, 160),
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
    for (package, test, _) in TESTS {
        take(&test_binary(root, package, test)?, &folder.join(test))?;
    }
    // The models' numbers are read from the tree; where there is none, from here.
    let fixtures = folder.join("crates/nn/tests/fixtures");
    fs::create_dir_all(&fixtures)?;
    for entry in fs::read_dir(root.join("crates/nn/tests/fixtures"))? {
        let path = entry?.path();
        fs::copy(&path, fixtures.join(path.file_name().context("a file has a name")?))?;
    }
    fs::copy(root.join("tools/peer_gpu.py"), folder.join("peer_gpu.py"))?;
    fs::write(folder.join("run.sh"), script())?;
    let bytes = size(folder)?;
    println!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    if bytes > PACK_BYTES_MAX {
        bail!("a pack of {bytes} bytes is too large (at most {PACK_BYTES_MAX}); is `strip` there?");
    }
    Ok(())
}

/// Bytes of all files that are packed; what runs left behind does not count.
fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        bytes += match path.metadata()? {
            what if what.is_dir() && (name == "cache" || name == "logs") => 0,
            what if what.is_dir() => size(&path)?,
            what => what.len(),
        };
    }
    Ok(bytes)
}

/// The script: each part with a limit, and counts at the end.
fn script() -> String {
    let sanitizer = "compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9";
    let mut tests = vec!["part doctor 120 ./paceline doctor".to_owned()];
    tests.extend(
        TESTS.map(|(_, test, seconds)| format!("part {test} {seconds} ./{test} --include-ignored --test-threads 4")),
    );
    tests.push(format!("part sanitizer 900 {sanitizer} ./ops --test-threads 1"));
    // What takes longest begins first.
    let prepare = MEASURED
        .iter()
        .rev()
        .map(|(model, side, batch, seconds, _)| format!("prepare {model} {side} {batch} {seconds}"));
    let rows = MEASURED.iter().map(|(model, side, batch, _, seconds)| format!("row {model} {side} {batch} {seconds}"));
    let lines = |lines: Vec<String>, indent: &str| lines.join(&format!("\n{indent}"));
    include_str!("gpu/run.sh")
        .replace("@TESTS@", &lines(tests, "  "))
        .replace("@PREPARE@", &lines(prepare.collect(), "    "))
        .replace("@ROWS@", &lines(rows.collect(), "  "))
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// What the packed programs do in a test: as much as the script looks at.
    const WORKS: &str = r#"case "$*" in
  *check*) echo 'losses 6.9 then 6.8' ;;
  *json*) echo '{"device":"cuda","images_per_s":12345.6,"peak_bytes":2147483648}' ;;
  *) echo 'test result: ok. 3 passed; 0 failed; 1 ignored'; echo 'skipped: a: no GPU' ;;
esac"#;

    /// A Python that knows of no libraries, has PyTorch, and prints what `peer_gpu.py` does.
    const TORCH: &str = r#"case "$*" in
  *glob*|*import*) ;;
  *prepare*) echo "prepared $*" ;;
  *) echo "torch $2 $3 $4 eager 800 images/s, 1.0 ms a step (1.0 to 1.0), 3.250 GiB"
     echo "torch $2 $3 $4 compile 10000 images/s, 1.0 ms a step (1.0 to 1.0), 2.500 GiB"
     echo "torch $2 $3 $4 graphs failed: TimeoutError" ;;
esac"#;

    /// Runs the script with stand-ins for the packed programs, all of which do the same, and for Python.
    fn played(arguments: &[&str], program: &str, python: &str) -> (String, Option<i32>) {
        let folder = tempfile::tempdir().unwrap();
        let stand_in = |name: &str, program: &str| {
            let path = folder.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{program}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        for name in ["paceline"].into_iter().chain(TESTS.map(|(_, test, _)| test)) {
            stand_in(name, program);
        }
        fs::create_dir(folder.path().join("bin")).unwrap();
        stand_in("bin/python3", python);
        // A machine with a real sanitizer is not asked to run it on these.
        fs::write(folder.path().join("run.sh"), script().replace("compute-sanitizer", "no-such-sanitizer")).unwrap();
        let path = format!("{}:{}", folder.path().join("bin").display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("sh");
        let output = command.arg(folder.path().join("run.sh")).args(arguments).env("PATH", path).output().unwrap();
        (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
    }

    #[test]
    fn the_script_counts_what_passed_and_names_what_is_missing() {
        let (text, code) = played(&[], WORKS, "exit 1");
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("skipped: sanitizer: this machine has no no-such-sanitizer"), "{text}");
        assert!(text.contains("skipped: PyTorch: this machine's python3 has no torch with CUDA"), "{text}");
        assert!(text.contains("parts: 28 passed, 0 failed, 2 skipped; "), "{text}");
        assert!(text.contains("tests: 30 passed, 0 failed, 10 reported themselves skipped"), "{text}");
        assert!(text.contains("| vgg16 224² b128 | 12,346 · 12,346 | – | – | 2.000 : – |"), "{text}");
    }

    #[test]
    fn the_script_goes_on_after_a_failure_and_fails_at_the_end() {
        let (text, code) = played(&[], "echo 'test result: FAILED. 2 passed; 1 failed; 0 ignored'; exit 101", "exit 1");
        assert_eq!(code, Some(1), "{text}");
        let failed = "parts: 0 passed, 28 failed, 2 skipped; failed: doctor ops large dropout models hosted gpu together pipeline nccl check";
        assert!(text.contains(failed), "{text}");
        assert!(text.contains("tests: 56 passed, 28 failed"), "{text}");
        assert!(text.contains("| vgg16 224² b128 | – | – | – | – : – |"), "{text}");
    }

    #[test]
    fn rows_are_paceline_beside_the_best_of_pytorch() {
        let (text, code) = played(&["rows"], WORKS, TORCH);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("parts: 24 passed, 0 failed, 0 skipped; "), "{text}");
        let row = "| resnet152 224² b128 | 12,346 · 12,346 | 10,000 (compile) | 1.23 | 2.000 : 2.500 |";
        assert_eq!(text.matches(row).count(), 2, "at once, and in the table: {text}");
        let order =
            ["PyTorch has compiled", "bench-resnet50-224-first", "torch-resnet50-224", "bench-resnet50-224-second"];
        let places = order.map(|part| text.find(part).unwrap_or_else(|| panic!("{part}: {text}")));
        assert!(places.is_sorted() && !text.contains("doctor"), "{text}");
    }

    #[test]
    fn tests_alone_ask_for_no_pytorch() {
        let (text, code) = played(&["tests"], WORKS, TORCH);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("parts: 10 passed, 0 failed, 1 skipped; ") && !text.contains("PyTorch"), "{text}");
        assert_eq!(played(&["everything"], WORKS, TORCH).1, Some(2));
    }
}
