//! The tests of `cargo x ci`: those of `cargo test --workspace`, the wide suites that it leaves out because they take
//! minutes, and the kernels of processors that have less than this one.
//!
//! A test of a wide suite is marked `#[ignore = "cargo x ci: SUITE"]`. CONTRIBUTING.md lists the suites, which
//! `cargo x tidy` checks.

use anyhow::Result;

use crate::cargo;

/// Ignored by CI too: the part of one host, which is a process that tests beside it start.
const STARTED: &str = "links::one_host";

/// Measurements that take minutes, alone on a quiet machine.
const LONG: [&str; 2] = ["overlap::messages_of_a_large_classifier", "nodes::one_node_is_said"];

/// Runs all of them.
pub fn run() -> Result<()> {
    // All that fail are told, not only those of the first program.
    let mut all = vec!["test", "--workspace", "--no-fail-fast", "--", "--include-ignored"];
    all.extend([STARTED].iter().chain(&LONG).flat_map(|test| ["--skip", test]));
    cargo(&all, &[("FUZZ_SECONDS", "2")])?;
    if has_more_than_avx2() {
        let avx2 = [("PACELINE_ISA", "avx2")];
        // What looks for a GPU does not depend on the processor.
        slower(&["--test", "ops", "--test", "models", "--", "--include-ignored", "--skip", "on_a_gpu"], &avx2)?;
        slower(&["--test", "mixed"], &avx2)?;
    }
    // One model of each family.
    slower(&["--test", "models", "--", "follows_pytorch"], &[("PACELINE_ISA", "portable")])
}

/// Runs the measurements that take minutes, one after the other; what they found is printed.
pub fn long() -> Result<()> {
    let alone = ["test", "--test", "field", "--", "--ignored", "--nocapture", "--test-threads", "1"];
    cargo(&[&alone, &LONG[..]].concat(), &[])
}

/// Tests of the whole workspace by name: of one package alone they would be compiled again, with fewer features.
fn slower(tests: &[&str], instructions: &[(&str, &str)]) -> Result<()> {
    println!("with {}", instructions.iter().map(|(name, value)| format!("{name}={value}")).collect::<String>());
    cargo(&[&["test", "--workspace"], tests].concat(), instructions)
}

/// Whether the plain run used more than AVX2; without AVX2 there is nothing between it and portable kernels.
fn has_more_than_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}
