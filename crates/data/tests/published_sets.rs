//! The sets as published, where this machine has them: in the folder that `PACELINE_DATA` names, or in `shared/datasets`
//! beside the workspace. Where it has none, a test says so by name and passes.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_data::inspect::{contact_sheet, inspect};
use paceline_data::pixels::Pixels;
use paceline_data::{Augment, AugmentChoice, Dataset, Loader, LoaderOptions, OpenOptions, Spec, cifar10};
use paceline_system::clock::Clock;
use paceline_system::disk::Disk;

/// The data folder, if it holds `wanted`; otherwise says that `test` is skipped.
fn home(test: &str, set: &str, wanted: &str) -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/datasets");
    let home = std::env::var_os("PACELINE_DATA").map(PathBuf::from).into_iter().chain([beside]);
    let found = home.into_iter().find(|home| home.join(wanted).exists());
    if found.is_none() {
        // Straight to the terminal: the harness keeps what a passing test prints.
        let _ = writeln!(std::io::stderr(), "skipped: {test}: no {set} (set PACELINE_DATA)");
    }
    found
}

fn open(spec: &str, home: &Path) -> (Dataset, Dataset) {
    let options = OpenOptions { data_home: Some(home.to_owned()), ..OpenOptions::default() };
    Dataset::open(&spec.parse::<Spec>().unwrap(), &options, &Disk::real()).unwrap()
}

#[test]
fn cifar10_is_the_published_one() {
    let Some(home) = home("cifar10_is_the_published_one", "cifar10", "cifar-10-batches-bin/test_batch.bin") else {
        return;
    };
    let checks = cifar10::verify(None, Some(&home), &Disk::real()).unwrap();
    assert_eq!(checks.len(), 6);
    assert!(checks.iter().all(cifar10::Checksum::holds), "{checks:?}");
    let (train, val) = open("cifar10", &home);
    assert_eq!((train.len(), val.len()), (50_000, 10_000));
    let found = inspect(&train).unwrap();
    assert!(found.classes.iter().all(|(_, count)| *count == 5_000));
    for channel in 0..3 {
        assert!((found.mean[channel] - f64::from(train.info().mean[channel])).abs() < 1e-4, "{:?}", found.mean);
        assert!((found.std[channel] - f64::from(train.info().std[channel])).abs() < 1e-4, "{:?}", found.std);
    }
    let name = |set: &Dataset, sample| set.info().class_names[set.label(sample).unwrap() as usize].clone();
    assert_eq!((name(&train, 0), name(&val, 0)), ("frog".into(), "cat".into()));
    // The archive's first image begins with these pixels.
    let mut image = Pixels::default();
    train.read_image(0, &mut image).unwrap();
    assert_eq!(image.data[..6], [59, 62, 63, 43, 46, 45]);
}

#[test]
fn cifar10_is_served_at_any_size() {
    let Some(home) = home("cifar10_is_served_at_any_size", "cifar10", "cifar-10-batches-bin/test_batch.bin") else {
        return;
    };
    let (_, val) = open(&format!("cifar10:{}", home.join("cifar-10-batches-bin").display()), Path::new("nowhere"));
    let augment = Augment::training(AugmentChoice::Standard, val.info(), Some(128)).unwrap();
    let mut loader = Loader::new(Arc::new(val), augment, LoaderOptions::training(16, 1), Clock::real()).unwrap();
    let batch = loader.epoch(0, 0).next().unwrap().unwrap();
    assert_eq!(batch.images.len(), 16 * 128 * 128 * 3);
    let mean = batch.images.iter().map(|&value| f64::from(value)).sum::<f64>() / batch.images.len() as f64;
    assert!(mean.abs() < 0.6, "normalised pixels have a mean near zero: {mean}");
}

#[test]
fn flowers_are_read_from_their_folders() {
    let Some(home) = home("flowers_are_read_from_their_folders", "flowers", "flower_photos_3class/val") else { return };
    let (train, val) = open("folder:flower_photos_3class", &home);
    assert_eq!(train.info().class_names, ["daisy", "roses", "sunflowers"]);
    assert_eq!((train.len(), val.len()), (600, 150));
    let found = inspect(&val).unwrap();
    assert!(found.damaged.is_empty() && found.imbalance() == 1.0);
    assert!(contact_sheet(&val, 4).unwrap().is_some());
    let augment = Augment::training(AugmentChoice::Standard, train.info(), Some(64)).unwrap();
    let options = LoaderOptions { threads: 2, ..LoaderOptions::training(20, 1) };
    let mut loader = Loader::new(Arc::new(train), augment, options, Clock::real()).unwrap();
    let first: Vec<_> = loader.epoch(0, 0).take(3).map(Result::unwrap).collect();
    let again: Vec<_> = loader.epoch(0, 0).take(3).map(Result::unwrap).collect();
    assert!(first == again && first[0].images.len() == 20 * 64 * 64 * 3);
}

#[test]
fn shakespeare_has_65_characters() {
    let Some(home) = home("shakespeare_has_65_characters", "tinyshakespeare", "tinyshakespeare/input.txt") else {
        return;
    };
    let (train, val) = open("text:tinyshakespeare/input.txt", &home);
    // 1,115,394 characters: 1,003,855 for training, 111,539 for evaluation, in windows of 128.
    assert_eq!((train.info().classes, train.len(), val.len()), (65, 7_842, 871));
}
