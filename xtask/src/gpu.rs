//! `cargo x gpu`: packs what a GPU machine without Rust needs (the binary, the tests that look for a GPU, a script that runs all of it) and, if
//! there is such a machine, runs it there.
//!
//! The pack is the folder target/gpu, at most 64 MiB: `sh target/gpu/run.sh` here, or wherever it was copied to. The script gives every part
//! a time limit, keeps each part's output in `logs/`, goes on after a failure, and ends with counts; its exit code is 1 if anything failed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The tests that run on a GPU if there is one: package, name, seconds that they may take there.
const TESTS: [(&str, &str, u32); 4] = [
    ("paceline-tensor", "ops", 300),
    ("paceline-nn", "models", 900),
    ("paceline-train", "gpu", 300),
    ("paceline-train", "nccl", 120),
];

/// What a pack may take: as much as travels to a borrowed machine.
const PACK_BYTES_MAX: u64 = 64 << 20;

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

/// The script: everything once, each part with a limit, and counts at the end.
fn script() -> String {
    let mut script = String::from(BEGINNING);
    let mut part = |name: &str, seconds: u32, command: &str| script += &format!("part {name} {seconds} {command}\n");
    part("doctor", 120, "./paceline doctor");
    TESTS.iter().for_each(|(_, test, seconds)| part(test, *seconds, &format!("./{test} --test-threads 4")));
    let sanitizer = "compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9";
    part("sanitizer", 900, &format!("{sanitizer} ./ops --test-threads 1"));
    for (model, side, batch) in MEASURED {
        let step = format!("bench step --device cuda --model {model} --size {side} --batch {batch}");
        let step = format!("./paceline {step} --classes 1000 --dtype bf16 --steps 5");
        part(&format!("bench-{model}-{side}"), 300, &step);
    }
    script + END
}

/// What runs a part, and what knows where NVIDIA's libraries are if Python's packages brought them.
const BEGINNING: &str = r#"#!/bin/sh
# Made by `cargo x gpu`: tests and benches on a machine with a GPU. No Rust is needed.
cd "$(dirname "$0")" || exit 1
mkdir -p logs
export PACELINE_CACHE="${PACELINE_CACHE:-$PWD/cache}"
for folder in $(python3 -c 'import glob, sys; print(*[f for p in sys.path for f in glob.glob(p + "/nvidia/*/lib")])' 2>/dev/null); do
  LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
done
export LD_LIBRARY_PATH
passed=0 failed=0 skipped=0 failures=
# part NAME SECONDS COMMAND...
part() {
  name=$1 seconds=$2
  shift 2
  if ! command -v "$1" > /dev/null; then
    echo "skipped: $name: this machine has no $1"
    skipped=$((skipped + 1))
    return
  fi
  echo "== $name"
  timeout -k 10 "$seconds" "$@" > "logs/$name.log" 2>&1
  code=$?
  grep -E '^(test result:|skipped:|gpus )|cuda:|ERROR SUMMARY|images/s|panicked' "logs/$name.log"
  if [ $code -eq 0 ]; then
    passed=$((passed + 1))
  elif grep -q 'Device not supported' "logs/$name.log"; then
    echo "skipped: $name: $1 does not know this machine's GPU"
    skipped=$((skipped + 1))
  else
    [ $code -eq 124 ] && echo "$name was ended after $seconds s"
    tail -n 20 "logs/$name.log"
    failed=$((failed + 1)) failures="$failures $name"
  fi
}
"#;

/// Counts of parts and of the tests in them.
const END: &str = r#"
count() { cat logs/*.log | grep '^test result:' | sed "s/.* \([0-9]*\) $1.*/\1/" | awk '{ sum += $1 } END { print sum + 0 }'; }
echo "parts: $passed passed, $failed failed, $skipped skipped${failures:+; failed:$failures}"
echo "tests: $(count passed) passed, $(count failed) failed, $(cat logs/*.log | grep -c '^skipped:') reported themselves skipped"
[ $failed -eq 0 ]
"#;

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

    /// Runs the script with stand-ins for the packed programs, all of which do the same.
    fn played(program: &str) -> (String, bool) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["paceline", "ops", "models", "gpu", "nccl"] {
            let path = folder.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{program}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        // A machine with a real sanitizer is not asked to run it on these.
        fs::write(folder.path().join("run.sh"), script().replace("compute-sanitizer", "no-such-sanitizer")).unwrap();
        let output = Command::new("sh").arg(folder.path().join("run.sh")).output().unwrap();
        (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success())
    }

    #[test]
    fn the_script_counts_what_passed_and_names_what_is_missing() {
        let (text, succeeded) =
            played("echo 'test result: ok. 3 passed; 0 failed; 1 ignored'; echo 'skipped: a: no GPU'");
        assert!(succeeded, "{text}");
        assert!(text.contains("skipped: sanitizer: this machine has no no-such-sanitizer"), "{text}");
        assert!(text.contains("parts: 11 passed, 0 failed, 1 skipped\n"), "{text}");
        assert!(text.contains("tests: 33 passed, 0 failed, 11 reported themselves skipped"), "{text}");
    }

    #[test]
    fn the_script_goes_on_after_a_failure_and_fails_at_the_end() {
        let (text, succeeded) = played("echo 'test result: FAILED. 2 passed; 1 failed; 0 ignored'; exit 101");
        assert!(
            !succeeded
                && text.contains("parts: 0 passed, 11 failed, 1 skipped; failed: doctor ops models gpu nccl bench"),
            "{text}"
        );
        assert!(text.contains("tests: 22 passed, 11 failed"), "{text}");
    }
}
