//! What is read from files: kept choices, weights, event logs, data sets.

use std::path::PathBuf;

use paceline_comm::wire::Tls;
use paceline_data::decode::{DecodeLimits, decode_image};
use paceline_data::pixels::Pixels;
use paceline_data::{cifar10, mnist};
use paceline_lab::{Summary, log, report};
use paceline_nn::weights::{self, Inventory};
use paceline_nn::{ForeignLayout, Init, Parameter, State};
use paceline_system::disk::Disk;
use paceline_tensor::device::cpu::choice::Choices;
use paceline_tensor::device::cuda::kept;
use paceline_train::checkpoint;
use paceline_train::checkpoint::manifest::Manifest;

/// The bytes as a file in a folder of its own.
fn with_file(name: &str, bytes: &[u8], body: impl FnOnce(&Disk, PathBuf)) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    std::fs::create_dir_all(path.parent().expect("a file is in a folder")).expect("a folder");
    std::fs::write(&path, bytes).expect("a file");
    body(&Disk::real(), path);
}

/// Certificates and a key, all in one text.
pub fn certificates(bytes: &[u8]) {
    let _ = Tls::from_pem(bytes, bytes, bytes);
}

/// The file of measured algorithms: written again, it is read again.
pub fn choices(bytes: &[u8]) {
    if let Ok(choices) = Choices::from_json(bytes, "processor") {
        let again = Choices::from_json(choices.to_json().as_bytes(), "processor").expect("what was written is read");
        assert_eq!(again.to_json(), choices.to_json());
    }
}

/// The file of a GPU's engines: written again, it is the same.
pub fn engines(bytes: &[u8]) {
    if let Ok(engines) = kept::read_engines(bytes) {
        let again = kept::read_engines(&kept::write_engines(&engines)).expect("what was written is read");
        assert_eq!(again, engines);
    }
}

/// A weights file for a small model, and its card.
pub fn weights(bytes: &[u8]) {
    let parameter = |name: &str, shape: &[usize], layout| Parameter {
        name: name.into(),
        shape: shape.into(),
        init: Init::Constant(0.0),
        decay: false,
        layout,
    };
    let parameters = [
        parameter("conv.weight", &[3, 3, 2, 4], ForeignLayout::Convolution),
        parameter("fc.bias", &[5], ForeignLayout::Same),
    ];
    let states: [State; 0] = [];
    with_file("weights.safetensors", bytes, |disk, path| {
        let inventory = Inventory { parameters: &parameters, states: &states };
        if let Ok(loaded) = weights::read(disk, &path, inventory, &["fc"]) {
            assert_eq!(loaded.parameters.len(), 2);
            assert!(loaded.parameters[0].as_ref().is_some_and(|numbers| numbers.len() == 72));
        }
        if let Ok(card) = checkpoint::read_card(disk, &path) {
            let _ = card.input();
        }
    });
}

/// The manifest of a checkpoint: one that is taken is written again as it was.
pub fn manifest(bytes: &[u8]) {
    with_file("checkpoints/step-00000008/manifest.json", bytes, |disk, path| {
        let folder = path.parent().expect("a file is in a folder");
        if let Ok(Some(manifest)) = Manifest::read(disk, folder) {
            assert_eq!(manifest.to_text().as_bytes(), bytes);
            assert!(!manifest.names("weights.safetensors") || !manifest.agrees(disk, folder), "there is no such file");
        }
    });
}

/// The event log of a run, its summary and its report.
pub fn event_log(bytes: &[u8]) {
    with_file("run/events/rank-0.jsonl", bytes, |disk, path| {
        if let Ok(lines) = log::read(disk, &path) {
            let _ = Summary::of(&lines);
            let run = path.ancestors().nth(2).expect("a run's folder");
            report::write(disk, run).expect("a log that is read has a report");
        }
    });
}

/// Records of CIFAR-10.
pub fn cifar10(bytes: &[u8]) {
    let _ = cifar10::Records::default().decode(bytes);
}

/// An idx file of images and one of labels.
pub fn idx(bytes: &[u8]) {
    if let Ok((dims, data)) = mnist::decode::<3>(bytes) {
        assert_eq!(dims.iter().product::<usize>(), data.len());
    }
    let _ = mnist::decode::<1>(bytes);
}

/// A picture.
pub fn image(bytes: &[u8]) {
    let mut image = Pixels::default();
    if decode_image(bytes, DecodeLimits::for_side(224), &mut image).is_ok() {
        assert_eq!(image.data.len(), image.height * image.width * 3);
    }
}
