//! `cargo +nightly fuzz run --features libfuzzer global`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_fuzz::run("global", bytes));
