//! `cargo +nightly fuzz run --features libfuzzer manifest`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_fuzz::run("manifest", bytes));
