//! The checks behind the sentences of ARCHITECTURE.md. Each rule returns its complaints; none is a matter of taste.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Files that may contain `unsafe`, each block with its reason. Keep this list short.
const UNSAFE_FILES: &[&str] = &[
    // Its callers are in C.
    "crates/capi/src/calls.rs",
    "crates/comm/src/memory_box/extent.rs",
    "crates/comm/src/transport/mpi/raw.rs",
    "crates/comm/src/transport/mpi/raw/window.rs",
    "crates/comm/src/transport/shm/direct.rs",
    "crates/comm/src/transport/shm/memory.rs",
    "crates/comm/src/transport/shm/one_copy.rs",
    "crates/comm/src/transport/shm/registered.rs",
    "crates/comm/src/transport/shm/ring.rs",
    // Lends shared memory to an engine, whose turns it knows.
    "crates/parallel/src/agree.rs",
    "crates/parallel/src/agree/shares.rs",
    "crates/tensor/src/buffer.rs",
    "crates/tensor/src/device/cpu/batch_norm.rs",
    "crates/tensor/src/device/cpu/batch_norm/passes.rs",
    "crates/tensor/src/device/cpu/elementwise/plain.rs",
    "crates/tensor/src/device/cpu/pooling/rows.rs",
    "crates/tensor/src/device/cpu/gemm.rs",
    "crates/tensor/src/device/cpu/isa.rs",
    "crates/tensor/src/device/cpu/memory.rs",
    "crates/tensor/src/device/cpu/moments.rs",
    "crates/tensor/src/device/cpu/peak.rs",
    "crates/tensor/src/device/cpu/pool.rs",
    "crates/tensor/src/device/cpu/reduce.rs",
    "crates/tensor/src/device/cpu/rows.rs",
    "crates/tensor/src/device/cpu/scratch.rs",
    "crates/tensor/src/device/cpu/simd.rs",
    "crates/tensor/src/device/cpu/stream.rs",
    "crates/tensor/src/device/cpu/vectorize.rs",
    "crates/tensor/src/device/cuda/compile.rs",
    "crates/tensor/src/device/cuda/cudnn.rs",
    "crates/tensor/src/device/cuda/driver.rs",
    "crates/tensor/src/device/cuda/graph.rs",
    "crates/tensor/src/device/cuda/library.rs",
    "crates/tensor/src/device/cuda/nccl.rs",
    "crates/tensor/src/device/cuda/nvml.rs",
    "crates/tensor/src/device/cuda/product.rs",
    "crates/train/src/engine/shared.rs",
    "crates/train/tests/allocations.rs",
    "crates/train/tests/together/main.rs",
    "src/allocator.rs",
];

/// Folders of kernels that work on raw panels and vector registers.
const UNSAFE_FOLDERS: &[&str] =
    &["crates/tensor/src/device/cpu/conv/", "crates/tensor/src/device/cpu/gemm/", "crates/tensor/src/device/cpu/simd/"];

/// Crates in which ranks meet, and which may therefore touch the network.
const MEETS_RANKS: &[&str] = &["crates/comm/", "crates/cluster/"];

/// Names that say nothing.
const BANNED_MODULES: &[&str] =
    &["base", "common", "core", "utils", "util", "helpers", "types", "manager", "mod", "misc"];

const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 70;

/// A source file of the workspace.
struct Source {
    path: String,
    text: String,
}

impl Source {
    fn is_test(&self) -> bool {
        self.path.contains("/tests/") || self.path.ends_with("tests.rs")
    }

    /// The part before the unit tests.
    fn code(&self) -> &str {
        self.text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(&self.text)
    }
}

/// Runs every rule over the workspace at `root`.
pub fn check(root: &Path) -> Result<()> {
    let sources = read_sources(root)?;
    let rules: [fn(&Source) -> Vec<String>; 8] = [
        opens_with_prose,
        names,
        sizes,
        unsafe_is_listed,
        doors_to_the_world,
        ranks_and_tensors,
        kinds_stay_home,
        x86_is_guarded,
    ];
    let mut complaints: Vec<String> = sources
        .iter()
        .flat_map(|source| {
            rules.iter().flat_map(|rule| rule(source)).map(|complaint| format!("{}: {complaint}", source.path))
        })
        .collect();
    let contributing = fs::read_to_string(root.join("CONTRIBUTING.md")).context("cannot read CONTRIBUTING.md")?;
    complaints.extend(sources.iter().filter_map(|source| suite_is_named(source, &contributing)));
    complaints.extend(architecture(root)?);
    complaints.extend(dependencies(root)?);
    if complaints.is_empty() {
        return Ok(());
    }
    bail!("tidy found {} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

fn read_sources(root: &Path) -> Result<Vec<Source>> {
    let mut files = Vec::new();
    for folder in ["crates", "src", "fuzz", "xtask", "examples", "tests"] {
        collect(&root.join(folder), &mut files)?;
    }
    files.sort();
    files
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let path = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
            Ok(Source { path, text })
        })
        .collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target" && name != "fixtures") {
                collect(&path, files)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Which engine computes, and which agreement settles, is asked by their own folders alone: everybody else calls them.
fn kinds_stay_home(source: &Source) -> Vec<String> {
    const ENGINES: [&str; 3] = ["Engine::Cpu", "Engine::Cuda", "Engine::Null"];
    const AGREEMENTS: [&str; 4] =
        ["\"all-reduce\"", "\"parameter-server\"", "all_reduce::RECIPE", "parameter_server::RECIPE"];
    let trains = source.path.starts_with("crates/train/src/") || source.path.starts_with("src/");
    if !trains || source.is_test() {
        return vec![];
    }
    let at_home = source.path.starts_with("crates/train/src/engine");
    let kinds = ENGINES.iter().filter(|_| !at_home).chain(&AGREEMENTS);
    let found = kinds.filter(|kind| source.code().contains(**kind));
    found.map(|kind| format!("`{kind}`: ask the engine or the agreement, not which one it is")).collect()
}

fn opens_with_prose(source: &Source) -> Vec<String> {
    let opens = source.text.starts_with("//! ");
    if opens { vec![] } else { vec!["a file opens with `//!`: what it is, what it is not, who calls it".into()] }
}

fn names(source: &Source) -> Vec<String> {
    let stem = source.path.rsplit('/').next().unwrap_or_default().trim_end_matches(".rs");
    if BANNED_MODULES.contains(&stem) {
        vec![format!("`{stem}` is not a module name that tells anything")]
    } else {
        vec![]
    }
}

fn sizes(source: &Source) -> Vec<String> {
    let mut complaints = Vec::new();
    let lines = source.text.lines().count();
    if lines > FILE_LINES_MAX {
        complaints.push(format!("{lines} lines; at most {FILE_LINES_MAX}"));
    }
    let mut start: Option<(usize, usize, &str)> = None;
    for (number, line) in source.code().lines().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let text = line.trim_start();
        if start.is_none() && is_function(text) && !text.ends_with('}') && !text.ends_with(';') {
            start = Some((number, indent, text));
        } else if let Some((first, depth, head)) = start
            && indent == depth
            && (text == "}" || text.ends_with(';'))
        {
            if number - first + 1 > FUNCTION_LINES_MAX && !source.is_test() {
                let name = head.split("fn ").nth(1).unwrap_or(head).split(['(', '<']).next().unwrap_or(head);
                complaints.push(format!("`{name}` has {} lines; at most {FUNCTION_LINES_MAX}", number - first + 1));
            }
            start = None;
        }
    }
    complaints
}

fn is_function(line: &str) -> bool {
    let head = line.split("fn ").next().unwrap_or_default();
    line.contains("fn ")
        && head.split_whitespace().all(|word| matches!(word, "const" | "unsafe" | "async") || word.starts_with("pub"))
}

fn unsafe_is_listed(source: &Source) -> Vec<String> {
    let uses = source.text.contains("allow(unsafe_code)");
    let in_folder = UNSAFE_FOLDERS.iter().any(|folder| source.path.starts_with(folder));
    let listed = in_folder || UNSAFE_FILES.contains(&source.path.as_str());
    if uses && !listed && !source.path.starts_with("xtask") {
        return vec!["allows unsafe code but is not in tidy's list; is there a safe way?".into()];
    }
    vec![]
}

/// Only `system` reads a clock, draws entropy, touches the disk or spawns a thread; the CPU pool is exempt.
fn doors_to_the_world(source: &Source) -> Vec<String> {
    let exempt = ["crates/system/", "xtask/"].iter().any(|folder| source.path.starts_with(folder));
    if exempt || source.path.contains("/examples/") || source.is_test() || !source.path.starts_with("crates/") {
        return vec![];
    }
    let doors = [
        "std::fs",
        "std::time::Instant",
        "SystemTime",
        "thread::spawn",
        "thread::Builder",
        "std::env",
        "std::net",
        "File::open",
    ];
    doors
        .iter()
        .filter(|door| {
            // A `WeightsFile::open` is another's.
            let begins = |at: usize| !source.code()[..at].ends_with(char::is_alphanumeric);
            source.code().match_indices(*door).any(|(at, _)| begins(at))
        })
        .filter(|_| source.path != "crates/tensor/src/device/cpu/pool.rs")
        // Greetings and transports are where ranks meet.
        .filter(|door| **door != "std::net" || !MEETS_RANKS.iter().any(|folder| source.path.starts_with(folder)))
        .map(|door| format!("`{door}` belongs behind the crate `system`"))
        .collect()
}

/// `tensor` never names a rank; `comm` never names a tensor.
fn ranks_and_tensors(source: &Source) -> Vec<String> {
    // A vendor's function is called what it is called.
    let code = source.code().replace("ncclCommInitRank", "");
    let says = |word: &str| code.lines().any(|line| !line.trim_start().starts_with("//") && line.contains(word));
    if source.path.starts_with("crates/tensor/src/") && (says("Rank") || says(" rank") || says("world_size")) {
        return vec!["the engine never names a rank".into()];
    }
    if source.path.starts_with("crates/comm/src/") && (says("Tensor") || says("tensor::")) {
        return vec!["communication never names a tensor".into()];
    }
    vec![]
}

/// Code for one processor stands under a guard for it: of the whole file, or of the item or block it is in.
fn x86_is_guarded(source: &Source) -> Vec<String> {
    const MARKS: [&str; 4] = ["std::arch::x86_64", "core::arch::x86_64", "is_x86_feature_detected!", "target_feature("];
    let is_guard = |line: &str| line.contains("target_arch = \"x86_64\"") && !line.contains("not(");
    let whole_file = source.text.lines().any(|line| line.starts_with("#![cfg(") && is_guard(line));
    if whole_file || source.path.starts_with("xtask/") {
        return vec![];
    }
    let mut complaints = Vec::new();
    let mut guarded: Option<usize> = None;
    for (number, line) in source.text.lines().enumerate() {
        let (text, indent) = (line.trim(), line.len() - line.trim_start().len());
        if text.starts_with("#[cfg(") && is_guard(text) {
            guarded = guarded.or(Some(indent));
        } else if !text.starts_with("//") && guarded.is_none() && MARKS.iter().any(|mark| text.contains(mark)) {
            complaints
                .push(format!("line {}: x86 code without `#[cfg(target_arch = \"x86_64\")]` above it", number + 1));
        }
        // The guarded item ends where a line at its indent ends a statement, a block or a match arm.
        let ends = text.ends_with([';', '}', ',']) && !text.starts_with("//");
        if ends && guarded.is_some_and(|depth| indent <= depth) {
            guarded = None;
        }
    }
    complaints
}

/// What `cargo test` leaves to `cargo x ci` stands in CONTRIBUTING.md, file by file.
fn suite_is_named(source: &Source, contributing: &str) -> Option<String> {
    let moved = !source.path.starts_with("xtask/") && source.text.contains("#[ignore = \"cargo x ci: ");
    let named = contributing.contains(&format!("`{}`", source.path));
    (moved && !named).then(|| format!("CONTRIBUTING.md does not name the suite of {}", source.path))
}

/// ARCHITECTURE.md names every crate.
fn architecture(root: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(root.join("ARCHITECTURE.md")).context("cannot read ARCHITECTURE.md")?;
    let mut complaints = Vec::new();
    for entry in fs::read_dir(root.join("crates"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !text.contains(&format!("`{name}`")) {
            complaints.push(format!("ARCHITECTURE.md does not name the crate `{name}`"));
        }
    }
    Ok(complaints)
}

/// docs/dependencies.md justifies every dependency of the workspace.
fn dependencies(root: &Path) -> Result<Vec<String>> {
    let manifest = fs::read_to_string(root.join("Cargo.toml"))?;
    let text = fs::read_to_string(root.join("docs/dependencies.md")).context("cannot read docs/dependencies.md")?;
    let section =
        manifest.split("[workspace.dependencies]").nth(1).unwrap_or_default().split("\n[").next().unwrap_or_default();
    Ok(section
        .lines()
        .filter_map(|line| line.split_once(" = ").map(|(name, _)| name.trim()))
        .filter(|name| !name.starts_with("paceline") && !text.contains(&format!("`{name}`")))
        .map(|name| format!("docs/dependencies.md does not say why `{name}`"))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.into(), text: text.into() }
    }

    #[test]
    fn the_workspace_is_tidy() {
        check(&crate::root()).unwrap();
    }

    #[test]
    fn a_long_function_is_found() {
        let body = "    let x = 1;\n".repeat(80);
        let text = format!("//! Prose.\npub fn long(a: u8) {{\n{body}}}\n");
        assert!(sizes(&source("crates/nn/src/a.rs", &text))[0].starts_with("`long` has 82 lines"));
    }

    #[test]
    fn each_rule_can_fail() {
        assert_eq!(opens_with_prose(&source("a.rs", "fn main() {}")).len(), 1);
        assert_eq!(names(&source("crates/nn/src/utils.rs", "")).len(), 1);
        assert_eq!(unsafe_is_listed(&source("crates/nn/src/a.rs", "#![allow(unsafe_code)]")).len(), 1);
        assert_eq!(doors_to_the_world(&source("crates/nn/src/a.rs", "use std::fs;")).len(), 1);
        assert_eq!(ranks_and_tensors(&source("crates/tensor/src/a.rs", "struct Rank;")).len(), 1);
        let moved = source("tests/a.rs", "#[ignore = \"cargo x ci: a\"]");
        assert!(suite_is_named(&moved, "").is_some() && suite_is_named(&moved, "| a | `tests/a.rs` |").is_none());
    }

    #[test]
    fn x86_code_is_guarded_where_it_stands() {
        let complaints = |text: &str| x86_is_guarded(&source("crates/tensor/src/a.rs", text)).len();
        let guard = "#[cfg(target_arch = \"x86_64\")]\n";
        assert_eq!(complaints("use std::arch::x86_64::*;"), 1);
        assert_eq!(complaints(&format!("{guard}use std::arch::x86_64::*;")), 0);
        assert_eq!(complaints("#![cfg(target_arch = \"x86_64\")]\nuse std::arch::x86_64::*;"), 0);
        let function = "#[target_feature(enable = \"avx2\")]\nunsafe fn run(\n    a: u8,\n) {\n    a();\n}\n";
        assert_eq!((complaints(function), complaints(&format!("{guard}{function}"))), (1, 0));
        assert_eq!(complaints(&format!("{guard}{function}{function}")), 1, "the guard is for the first alone");
        assert_eq!(complaints("#[cfg(not(target_arch = \"x86_64\"))]\nuse std::arch::x86_64::*;"), 1);
    }
}
