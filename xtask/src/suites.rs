//! The tests of `cargo x ci`: those of `cargo test --workspace`, the wide suites that it leaves out because they take
//! minutes, and the kernels of processors that have less than this one.
//!
//! A test of a wide suite is marked `#[ignore = "cargo x ci: SUITE"]`. CONTRIBUTING.md lists the suites, which
//! `cargo x tidy` checks.

use anyhow::Result;

use crate::cargo;

/// Marked as ignored, and not for CI either: a process that tests beside it start, and a measurement that is made by
/// hand (CONTRIBUTING.md).
const LEFT_OUT: [&str; 2] = ["links::one_host", "overlap::messages_of_a_large_classifier"];

/// Runs all of them.
pub fn run() -> Result<()> {
    let mut all = vec!["test", "--workspace", "--", "--include-ignored"];
    all.extend(LEFT_OUT.iter().flat_map(|test| ["--skip", test]));
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
