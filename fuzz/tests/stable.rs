//! Every target on its corpus, and on bytes made from it by a seeded mutation, for a moment: `FUZZ_SECONDS`, a quarter by default and 2 in
//! `cargo x ci`. What fails is printed, and belongs into the corpus once it is mended.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use paceline_fuzz::{TARGETS, run};
use paceline_system::host;

/// No input is longer: most decoders refuse by the length alone.
const BYTES_MAX: usize = 16 << 10;

/// No input may take longer, on a busy machine.
const SLOW: Duration = Duration::from_secs(5);

/// No decoder may take so much more memory than its input; a picture is held to 512 MiB by its own library.
const MEMORY_BYTES_MAX: u64 = 1 << 30;

/// A small generator of numbers (xorshift): the same inputs on every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Changes an input a little, sometimes with a piece of another one.
fn mutate(bytes: &mut Vec<u8>, other: &[u8], numbers: &mut Numbers) {
    const EXTREMES: [u64; 8] = [0, 1, 0x7F, 0xFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 63, u64::MAX];
    const WORDS: [&str; 12] =
        ["-1", "1e999", "null", "[]", "{}", "\"", "99999999999999999999", "NaN", "\n", ",", "\\u0000", ":"];
    let at = numbers.below(bytes.len() + 1);
    let upto = (at + 1 + numbers.below(32)).min(bytes.len());
    match numbers.below(9) {
        0 if at < bytes.len() => bytes[at] ^= 1 << numbers.below(8),
        1 if at < bytes.len() => bytes[at] = numbers.next() as u8,
        2 if at < upto => drop(bytes.drain(at..upto)),
        3 => bytes.truncate(at),
        4 if at < upto => bytes.extend_from_within(at..upto),
        5 => {
            let (from, width) = (numbers.below(other.len() + 1), 1 + numbers.below(64));
            let piece = &other[from..(from + width).min(other.len())];
            bytes.splice(at..at, piece.iter().copied());
        }
        6 => {
            let extreme = EXTREMES[numbers.below(EXTREMES.len())].to_le_bytes();
            let width = [1, 2, 4, 8][numbers.below(4)];
            bytes.iter_mut().skip(at).zip(&extreme[..width]).for_each(|(byte, new)| *byte = *new);
        }
        7 => drop(bytes.splice(at..upto.max(at), WORDS[numbers.below(WORDS.len())].bytes())),
        _ => bytes.insert(at, numbers.next() as u8),
    }
    bytes.truncate(BYTES_MAX);
}

fn attempt(name: &str, bytes: &[u8]) {
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| run(name, bytes)));
    let slow = start.elapsed() > SLOW;
    if outcome.is_err() || slow {
        let shown: String = bytes.iter().flat_map(|&byte| std::ascii::escape_default(byte)).map(char::from).collect();
        println!("{name} {} on {} bytes: b\"{shown}\"", if slow { "is slow" } else { "fails" }, bytes.len());
    }
    outcome.unwrap_or_else(|failure| resume_unwind(failure));
    assert!(!slow, "{name} took {:?}", start.elapsed());
}

fn drive(name: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files.iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(!corpus.is_empty(), "no corpus for {name}");
    let memory = host::peak_memory_bytes();
    corpus.iter().for_each(|bytes| attempt(name, bytes));
    let seconds = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(0.25);
    let seed = std::env::var("FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1u64);
    let mut numbers = Numbers(0x9E37_79B9_7F4A_7C15 ^ seed.wrapping_mul(0x2545_F491_4F6C_DD1D));
    let (until, mut runs) = (Instant::now() + Duration::from_secs_f64(seconds), 0);
    while Instant::now() < until {
        let mut bytes = corpus[numbers.below(corpus.len())].clone();
        let other = &corpus[numbers.below(corpus.len())];
        for _ in 0..=numbers.below(6) {
            mutate(&mut bytes, other, &mut numbers);
        }
        attempt(name, &bytes);
        runs += 1;
    }
    println!("{name}: {runs} inputs");
    let grown = host::peak_memory_bytes().saturating_sub(memory);
    assert!(grown < MEMORY_BYTES_MAX, "{name} took {grown} bytes");
}

#[test]
fn every_decoder_takes_any_bytes() {
    let only = std::env::var("FUZZ_TARGET").ok();
    for (name, _) in TARGETS.iter().filter(|target| only.as_ref().is_none_or(|only| only == target.0)) {
        drive(name);
    }
}

#[test]
fn every_target_has_its_program() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    for (name, _) in TARGETS {
        let program = std::fs::read_to_string(folder.join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(program.contains(&format!("run(\"{name}\", bytes)")), "{name}");
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is no program of fuzz/Cargo.toml");
    }
    assert_eq!(std::fs::read_dir(folder.join("corpus")).unwrap().count(), TARGETS.len());
}
