//! What was chosen, kept in the cache from one command to the next: a file for each kind of processor, an entry for each training. What
//! an entry is for is told by the whole configuration without what changes no step's time, and by the node and the version of this
//! program: whatever is added to a configuration tells entries apart by itself.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::system::disk::Disk;
use crate::system::host::Host;
use crate::train::Config;
use crate::train::deadlines::Deadlines;

use super::apply::{Node, Said};
use super::table::Row;

/// Raised when set-ups are measured or compared in another way, so that old entries mislead.
const VERSION: u32 = 2;

/// An entry has some kilobytes.
const BYTES_MAX: u64 = 16 << 20;

/// Entries that are kept; the oldest go first.
const ENTRIES_MAX: usize = 200;

/// What was found for one training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// What it is for.
    pub key: String,
    /// Every set-up, as it was shown.
    pub rows: Vec<Row>,
    /// The name of the one that was chosen.
    pub chosen: String,
    /// Seconds that finding it took.
    pub seconds: f64,
    /// Seconds that finding it could have taken.
    pub budget_s: f64,
    /// When, in seconds since 1970.
    pub unix_s: u64,
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    entries: Vec<Kept>,
}

/// What an entry is for.
pub fn key(config: &Config, said: &Said, node: Node, host: &Host) -> String {
    let usual = Config::default();
    let mut kept = Config {
        seed: usual.seed,
        epochs: usual.epochs,
        learning_rate: usual.learning_rate,
        hyper_parameters: usual.hyper_parameters,
        deadlines: Deadlines::default(),
        keep: usual.keep,
        evaluate_every: usual.evaluate_every,
        evaluate_mirrored: usual.evaluate_mirrored,
        weights_except: Vec::new(),
        label_smoothing: usual.label_smoothing,
        ..config.clone()
    };
    (kept.max_steps, kept.time_limit_s, kept.early_stop, kept.weights) = (None, None, None, None);
    (kept.checkpoint_every, kept.checkpoint_minutes) = (None, None);
    let Host { cpu, cores, memory_bytes, .. } = host;
    let version = env!("CARGO_PKG_VERSION");
    format!("{}{said:?}\n{node:?}\n{cpu}, {cores} cores, {memory_bytes} bytes\n{version}\n", kept.to_toml())
}

/// The file of this processor in a folder.
fn path(folder: &Path, host: &Host) -> PathBuf {
    let letter = |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' };
    let name: String = host.cpu.chars().map(letter).collect();
    let words: Vec<&str> = name.split('-').filter(|word| !word.is_empty()).collect();
    folder.join(format!("set-ups-{}.json", if words.is_empty() { "unknown".into() } else { words.join("-") }))
}

/// The entry of a key that was found with so many seconds or more, if there is one; a file that cannot be used is told of in a sentence.
pub fn load(disk: &Disk, folder: &Path, host: &Host, (key, budget_s): (&str, f64)) -> Result<Option<Kept>, String> {
    Ok(entries(disk, folder, host)?.into_iter().rev().find(|kept| kept.key == key && kept.budget_s >= budget_s))
}

fn entries(disk: &Disk, folder: &Path, host: &Host) -> Result<Vec<Kept>, String> {
    let path = path(folder, host);
    if !disk.exists(&path) {
        return Ok(Vec::new());
    }
    let bytes = disk.read_within(&path, BYTES_MAX).map_err(|error| error.to_string())?;
    let document: Document = serde_json::from_slice(&bytes).map_err(|error| format!("it is damaged: {error}"))?;
    Ok(if document.version == VERSION { document.entries } else { Vec::new() })
}

/// Adds an entry to the file, in place of one of the same key. A file that cannot be used is replaced.
pub fn save(disk: &Disk, folder: &Path, host: &Host, kept: Kept) -> Result<(), String> {
    let mut entries = entries(disk, folder, host).unwrap_or_default();
    entries.retain(|other| other.key != kept.key);
    entries.push(kept);
    entries.drain(..entries.len().saturating_sub(ENTRIES_MAX));
    let text = serde_json::to_string(&Document { version: VERSION, entries }).expect("entries are JSON");
    let written = disk.create_dir(folder).and_then(|()| disk.write(&path(folder, host), text.as_bytes()));
    written.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Node = Node { cores: 2, gpus: 0 };

    fn of(config: &Config) -> String {
        key(config, &Said::default(), NODE, &Host::default())
    }

    #[test]
    fn whatever_changes_a_step_is_another_entry_and_nothing_else_is() {
        let config = Config::default();
        let same = Config { seed: 7, epochs: 90, max_steps: Some(3), weights: Some("w".into()), ..config.clone() };
        assert_eq!(of(&config), of(&same));
        for other in [
            Config { batch: 8, ..config.clone() },
            Config { model: "lenet5".into(), ..config.clone() },
            Config { size: Some(64), ..config.clone() },
            Config { dtype: crate::tensor::Precision::Bf16, ..config.clone() },
            Config { optimizer: crate::nn::optim::Optimizer::Sgd, ..config.clone() },
            Config { memory_limit: Some(1 << 30), ..config.clone() },
            Config { loader_threads: 2, ..config.clone() },
        ] {
            assert_ne!(of(&config), of(&other), "{other:?}");
        }
        let node = Node { cores: 4, ..NODE };
        assert_ne!(of(&config), key(&config, &Said::default(), node, &Host::default()));
        let said = Said { threads: Some(1), ..Said::default() };
        assert_ne!(of(&config), key(&config, &said, NODE, &Host::default()));
        assert_ne!(of(&config), key(&config, &Said::default(), NODE, &Host { cpu: "other".into(), ..Host::default() }));
    }

    #[test]
    fn entries_are_found_again_and_replaced() {
        let (disk, folder, host) = (Disk::real(), tempfile::tempdir().unwrap(), Host::default());
        let entry = |key: &str, chosen: &str| Kept {
            key: key.into(),
            rows: Vec::new(),
            chosen: chosen.into(),
            seconds: 1.0,
            budget_s: 6.0,
            unix_s: 5,
        };
        for (key, chosen) in [("a", "one"), ("b", "two"), ("a", "three")] {
            save(&disk, folder.path(), &host, entry(key, chosen)).unwrap();
        }
        let found = |key: &str| load(&disk, folder.path(), &host, (key, 6.0)).unwrap().map(|kept| kept.chosen);
        assert_eq!((found("a"), found("b"), found("c")), (Some("three".into()), Some("two".into()), None));
        assert!(load(&disk, folder.path(), &host, ("a", 0.0)).unwrap().is_some());
        assert_eq!(
            load(&disk, folder.path(), &host, ("a", 60.0)),
            Ok(None),
            "it was found with less time than there is now"
        );
        std::fs::write(path(folder.path(), &host), "{").unwrap();
        assert!(load(&disk, folder.path(), &host, ("a", 0.0)).unwrap_err().contains("damaged"));
        save(&disk, folder.path(), &host, entry("d", "four")).unwrap();
        assert_eq!(found("d"), Some("four".into()), "a damaged file is replaced");
    }
}
