//! Runs a Python script from a test where a Python with the right packages exists: `PACELINE_PYTHON`, or `python3`.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

/// The Python that can import `packages`; without one, says that `test` is skipped and why.
pub fn with(test: &str, packages: &[&str]) -> Option<PathBuf> {
    let python = std::env::var_os("PACELINE_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    let import = format!("import {}", packages.join(", "));
    let found = Command::new(&python).args(["-c", &import]).output().is_ok_and(|output| output.status.success());
    if !found {
        // Straight to the terminal: the harness keeps what a passing test prints.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: {test}: `{}` cannot import {}",
            python.display(),
            packages.join(", ")
        );
    }
    found.then_some(python)
}

/// What the script prints; a script that fails is a failed test.
pub fn run(python: &PathBuf, script: &str, arguments: &[impl AsRef<OsStr>]) -> String {
    let output = Command::new(python).arg("-c").arg(script).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
