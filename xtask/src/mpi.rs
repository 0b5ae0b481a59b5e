//! `cargo x mpi`: the feature `mpi`, built and tested with each MPI that is installed, one after the other.
//!
//! Two MPIs have different binary interfaces, so everything above the library is built again for the second; the rest of the
//! workspace is shared.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::cargo;

/// The MPIs of Debian and its relatives, by the ending of their programs' names.
const FLAVOURS: [(&str, &[&str]); 2] = [("openmpi", &["--allow-run-as-root", "--oversubscribe"]), ("mpich", &[])];

const FEATURES: [&str; 3] = ["--workspace", "--features", "paceline/mpi,paceline-comm/mpi"];

/// Checks, builds and tests.
pub fn run() -> Result<()> {
    let mut linted = false;
    for (flavour, options) in FLAVOURS {
        let (mpicc, mpirun) = (format!("mpicc.{flavour}"), format!("mpirun.{flavour}"));
        if let Some(missing) = missing(&mpicc, &mpirun) {
            println!("skipped: the carry mpi over {flavour} (needs {missing})");
            continue;
        }
        let environment = [("MPICC", mpicc.as_str())];
        // The build script of the bindings does not notice that the compiler is another one.
        cargo(&["clean", "-p", "mpi-sys", "-p", "mpi"], &[])?;
        if !linted {
            let lint = ["clippy", "-p", "paceline-comm", "--features", "mpi", "--all-targets", "--", "-D", "warnings"];
            cargo(&lint, &environment)?;
            linted = true;
        }
        for ranks in ["2", "3", "4", "6"] {
            let words: Vec<String> = [mpirun.as_str(), "-n", ranks]
                .into_iter()
                .chain(options.iter().copied())
                .map(|word| format!("'{word}'"))
                .collect();
            let runner = format!("target.'cfg(unix)'.runner=[{}]", words.join(","));
            cargo(&[&["test"], &FEATURES[..], &["--test", "mpi", "--config", &runner]].concat(), &environment)?;
        }
        let over_mpi = ["--test", "field", "--test", "cli", "over_mpi"];
        cargo(&[&["test"], &FEATURES[..], &over_mpi].concat(), &environment)?;
    }
    Ok(())
}

/// What is not installed of what one MPI needs.
fn missing(mpicc: &str, mpirun: &str) -> Option<String> {
    let runs = |program: &str, words: &[&str]| {
        Command::new(program).args(words).output().is_ok_and(|output| output.status.success())
    };
    if !runs(mpirun, &["--version"]) {
        return Some(format!("`{mpirun}`"));
    }
    if !runs(mpicc, &["-E", "-include", "mpi.h", "-x", "c", "/dev/null"]) {
        return Some(format!("`{mpicc}` and mpi.h"));
    }
    (!has_libclang()).then(|| "libclang".to_owned())
}

/// Whether bindings can be made: libclang is where the crate `clang-sys` looks for it on Linux.
fn has_libclang() -> bool {
    let has = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).any(|name| {
            name == "libclang.so" || (name.starts_with("libclang-") && name.contains(".so") && !name.contains("cpp"))
        })
    };
    let llvm = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path().join("lib"));
    let known = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];
    std::env::var_os("LIBCLANG_PATH").is_some()
        || known.map(Path::new).into_iter().any(has)
        || llvm.into_iter().any(|folder| has(&folder))
}
