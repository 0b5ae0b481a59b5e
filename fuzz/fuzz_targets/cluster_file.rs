//! `cargo +nightly fuzz run --features libfuzzer cluster_file`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_fuzz::run("cluster_file", bytes));
