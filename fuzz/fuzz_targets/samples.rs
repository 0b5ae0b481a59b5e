//! `cargo +nightly fuzz run --features libfuzzer samples`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_fuzz::run("samples", bytes));
