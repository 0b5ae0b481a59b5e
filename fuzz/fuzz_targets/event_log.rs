//! `cargo +nightly fuzz run --features libfuzzer event_log`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_fuzz::run("event_log", bytes));
