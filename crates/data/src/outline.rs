//! A set from afar: what its samples look like and how much of it stays in memory, without drawing, decoding or listing it.
//!
//! A launcher asks for this before it starts anything, to see whether the processes of a run fit a machine; each of them opens
//! the set itself, and then knows better.

use paceline_system::disk::Disk;

use crate::cifar10::{self, Cifar10};
use crate::dataset::{Dataset, Info, OpenOptions, SampleKind, Source, Split};
use crate::spec::Spec;
use crate::synthetic::Synthetic;
use crate::{folder, shapes, text};

/// The classes of a folder that nobody has listed: as many as ImageNet has.
const FOLDER_CLASSES: usize = 1000;

/// Images and pixels of MNIST; the sets in its format have about as many.
const MNIST: (usize, usize) = (70_000, 28);

/// What is known of a set that was not opened.
#[derive(Clone, Debug)]
pub struct Outline {
    /// Of the training half. Where nobody has looked, classes have no names.
    pub info: Info,
    /// Bytes of samples that both halves keep in memory.
    pub held_bytes: usize,
}

/// What can be told of a set from its spec; nothing where it is not there: opening it says why.
pub fn outline(spec: &Spec, options: &OpenOptions, disk: &Disk) -> Option<Outline> {
    let (info, held_bytes) = match spec {
        Spec::Shapes => (shapes::outline(), shapes::BYTES),
        Spec::Cifar10(_) => (cifar10::info(Split::Train, Cifar10::TRAIN_LEN), Cifar10::BYTES),
        Spec::Mnist(_) => {
            let (count, side) = MNIST;
            (unseen(Source::Mnist, "mnist", [side, side, 1], 10), count * side * side)
        }
        Spec::Folder(_) | Spec::Remote(_) => {
            (unseen(Source::Folder, "folder", [folder::SIDE, folder::SIDE, 3], FOLDER_CLASSES), 0)
        }
        Spec::Text(file) => {
            let (train, val) = text::Text::open(file, options, disk).ok()?;
            let held = train.held_bytes() + val.held_bytes();
            (Dataset::Text(train).info().clone(), held)
        }
        Spec::Synthetic(shape) => (Synthetic::pair(*shape).0.info().clone(), 0),
    };
    Some(Outline { info, held_bytes })
}

fn unseen(source: Source, name: &str, [height, width, channels]: [usize; 3], classes: usize) -> Info {
    let (mean, std) = (vec![0.5; channels], vec![0.25; channels]);
    let kind = SampleKind::Image { height, width, channels };
    Info { source, name: name.into(), split: Split::Train, len: 0, kind, classes, class_names: Vec::new(), mean, std }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_afar_a_set_looks_as_it_does_when_it_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("text.txt");
        std::fs::write(&file, "to be or not to be, that is the question. ".repeat(20)).unwrap();
        let options = OpenOptions { sequence: 16, ..OpenOptions::default() };
        for spec in ["shapes".parse().unwrap(), "synthetic:8x6x3/5/40".parse().unwrap(), Spec::Text(file)] {
            let (train, val) = Dataset::open(&spec, &options, &Disk::real()).unwrap();
            let found = outline(&spec, &options, &Disk::real()).unwrap();
            assert_eq!(&found.info, train.info());
            assert_eq!(found.held_bytes, train.held_bytes() + val.held_bytes(), "{spec}");
        }
        assert!(outline(&Spec::Text("nowhere".into()), &options, &Disk::real()).is_none());
    }
}
