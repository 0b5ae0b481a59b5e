//! `cargo +nightly fuzz run --features libfuzzer cifar10`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_fuzz::run("cifar10", bytes));
