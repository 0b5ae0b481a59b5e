//! `cargo +nightly fuzz run --features libfuzzer memory_box`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_fuzz::run("memory_box", bytes));
