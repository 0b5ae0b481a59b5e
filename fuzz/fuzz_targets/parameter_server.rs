//! `cargo +nightly fuzz run --features libfuzzer parameter_server`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_fuzz::run("parameter_server", bytes));
