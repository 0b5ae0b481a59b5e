//! `cargo +nightly fuzz run --features libfuzzer weights`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_fuzz::run("weights", bytes));
