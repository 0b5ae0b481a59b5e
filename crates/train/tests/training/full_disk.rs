//! A disk that fills up at any byte of a run: what was saved stays whole, and the run goes on once there is room.

use std::path::{Path, PathBuf};

use paceline_system::disk::Disk;
use paceline_system::shell::resume_line;
use paceline_train::checkpoint::Checkpoints;
use paceline_train::trainer::{Surroundings, prepare_with};
use paceline_train::{Config, TrainError, Trainer};

use crate::{bits, config, is_weights_file, resume, small, train};

/// How far apart the places are at which the disk fills up. A checkpoint here is about 8 kB.
const STRIDE: u64 = 577;

#[test]
fn whenever_the_disk_fills_up_the_checkpoint_before_survives() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { checkpoint_every: Some(2), epochs: 2, ..config() };
    let (expected, _) = train(config.clone(), &folder.path().join("straight")).unwrap();
    let (mut unsaved, mut unlogged) = (0, 0);
    for number in 0..200 {
        let run = folder.path().join(number.to_string());
        let disk = Disk::full_after(number * STRIDE);
        let around = Surroundings { disk: disk.clone(), ..Surroundings::default() };
        let ended = Trainer::start_with(&small, config.clone(), around, Some(run.clone())).and_then(|mut t| t.run());
        let Err(error) = ended else {
            assert!(!disk.was_full());
            assert!(unsaved > 3 && unlogged > 3, "checkpoints and events were both cut: {unsaved}, {unlogged}");
            return;
        };
        assert!(disk.was_full(), "{error}");
        if error.is_refusal() {
            assert!(!run.exists(), "a refusal leaves nothing behind: {error}");
            continue;
        }
        check_survivors(&config, &run, &error);
        match error {
            TrainError::CheckpointNotSaved { .. } => unsaved += 1,
            TrainError::EventNotWritten { .. } => unlogged += 1,
            _ => continue,
        }
        let (resumed, _) = match resume(&run) {
            Ok(resumed) => resumed,
            // Only the last words were lost: the last checkpoint, which was looked at above, is the end of the run.
            Err(error) => {
                assert!(error.to_string().starts_with("this run is done (6 steps)"), "{error}");
                continue;
            }
        };
        assert!(bits(resumed.replica()) == bits(expected.replica()), "full after {} bytes", number * STRIDE);
    }
    panic!("the disk never was large enough");
}

#[test]
fn a_disk_that_fills_up_while_a_copy_is_written_ends_the_run_and_what_was_saved_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    // Saved again as soon as the copy before is on the disk.
    let config = Config { checkpoint_minutes: Some(1e-9), epochs: 10, ..config() };
    let mut unsaved = 0;
    for number in 0..12 {
        let run = folder.path().join(number.to_string());
        let disk = Disk::full_after(8_000 + number * 9_001);
        let around = Surroundings { disk: disk.clone(), ..Surroundings::default() };
        let ended = Trainer::start_with(&small, config.clone(), around, Some(run.clone())).and_then(|mut t| t.run());
        let Err(error) = ended else { panic!("30 steps and their checkpoints fit into {} bytes", 9_001 * number) };
        assert!(disk.was_full() && !error.is_refusal(), "{error}");
        whole(&config, &run);
        unsaved += u32::from(matches!(error, TrainError::CheckpointNotSaved { .. }));
    }
    assert!(unsaved > 2, "checkpoints were cut: {unsaved}");
}

/// Every checkpoint that has its name is whole, and the error names the newest.
fn check_survivors(config: &Config, run: &Path, error: &TrainError) {
    let all = whole(config, run);
    let sentence = error.to_string();
    if matches!(error, TrainError::CheckpointNotSaved { .. } | TrainError::EventNotWritten { .. }) {
        match all.last() {
            Some((_, path)) => assert!(sentence.contains(&path.display().to_string()), "{sentence}"),
            None => assert!(sentence.contains("no checkpoint yet"), "{sentence}"),
        }
        assert!(sentence.ends_with(&resume_line(run)), "{sentence}");
    }
}

/// The checkpoints of a run, which are all whole.
fn whole(config: &Config, run: &Path) -> Vec<(u64, PathBuf)> {
    let checkpoints = Checkpoints::new(&Disk::real(), run.join("checkpoints"));
    let mut replica = prepare_with(&small, config, &Surroundings::default()).unwrap().replica;
    let all = checkpoints.list().unwrap();
    for (step, path) in &all {
        assert_eq!(checkpoints.load(path, &mut replica).unwrap().step, *step);
        assert!(is_weights_file(&path.join("weights.safetensors")));
    }
    all
}
