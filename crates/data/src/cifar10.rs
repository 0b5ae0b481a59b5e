//! CIFAR-10 (Krizhevsky, 2009) from its official binary files: 50,000 + 10,000 images of 32 × 32 RGB in ten classes.
//!
//! A record is one byte of class and three planes of 1,024 bytes. They are turned into pixels once, at opening, and held
//! in memory (180 MB). Lengths and classes are always checked; checksums only on request ([`verify`]), since they cost
//! a third of a second.

use std::path::{Path, PathBuf};

use md5::{Digest, Md5};
use paceline_system::disk::Disk;
use paceline_system::memory;
use serde::Serialize;

use crate::DataError;
use crate::dataset::{self, Info, OpenOptions, SampleKind, Source, Split};
use crate::pixels::Pixels;

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
const IMAGE: usize = 3 * PLANE;
const RECORD: usize = 1 + IMAGE;
const RECORDS_PER_FILE: usize = 10_000;
const FILE_BYTES: u64 = (RECORDS_PER_FILE * RECORD) as u64;
/// The folder that the official archive unpacks to.
const FOLDER: &str = "cifar-10-batches-bin";

/// The files of the official archive, training first, and their MD5.
const FILES: [(&str, &str); 6] = [
    ("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25"),
    ("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692"),
    ("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421"),
    ("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb"),
    ("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d"),
    ("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d"),
];

const CLASSES: [&str; 10] = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

/// One half of CIFAR-10, in memory.
#[derive(Debug)]
pub struct Cifar10 {
    info: Info,
    records: Records,
}

/// Decoded records: a class each, and pixels with interleaved channels.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Records {
    labels: Vec<u8>,
    pixels: Vec<u8>,
}

impl Records {
    /// Appends the records in `bytes`.
    ///
    /// # Errors
    /// When they are not whole records of known classes; nothing is appended then.
    pub fn decode(&mut self, bytes: &[u8]) -> Result<(), String> {
        if !bytes.len().is_multiple_of(RECORD) {
            return Err(format!("{} bytes are not whole records of {RECORD}", bytes.len()));
        }
        if let Some(at) = bytes.chunks_exact(RECORD).position(|record| usize::from(record[0]) >= CLASSES.len()) {
            return Err(format!("record {at} has class {}, the greatest is 9", bytes[at * RECORD]));
        }
        let start = self.pixels.len();
        self.pixels.resize(start + bytes.len() / RECORD * IMAGE, 0);
        for (record, image) in bytes.chunks_exact(RECORD).zip(self.pixels[start..].chunks_exact_mut(IMAGE)) {
            self.labels.push(record[0]);
            let (red, rest) = record[1..].split_at(PLANE);
            let (green, blue) = rest.split_at(PLANE);
            for (((pixel, &red), &green), &blue) in
                image.as_chunks_mut::<3>().0.iter_mut().zip(red).zip(green).zip(blue)
            {
                *pixel = [red, green, blue];
            }
        }
        Ok(())
    }
}

impl Cifar10 {
    /// Training images.
    pub(crate) const TRAIN_LEN: usize = 5 * RECORDS_PER_FILE;
    /// Of both halves, in memory.
    pub(crate) const BYTES: usize = FILES.len() * RECORDS_PER_FILE * IMAGE;

    /// Reads both halves from a folder that holds the files, or holds the folder that does.
    ///
    /// # Errors
    /// When files are missing, or are not 10,000 records long.
    pub fn open(place: Option<&Path>, options: &OpenOptions, disk: &Disk) -> Result<(Self, Self), DataError> {
        let folder = find(place, options.data_home.as_deref(), disk)?;
        let half = |split, files: &[(&str, &str)]| {
            let mut records = Records::default();
            records.labels.reserve_exact(files.len() * RECORDS_PER_FILE);
            memory::reserve(&mut records.pixels, files.len() * RECORDS_PER_FILE * IMAGE, "the images of cifar10")?;
            for (name, _) in files {
                let file = folder.join(name);
                check_length(&file, disk)?;
                records.decode(&disk.read_within(&file, FILE_BYTES)?).map_err(DataError::malformed(&file))?;
            }
            Ok::<_, DataError>(Self { info: info(split, records.labels.len()), records })
        };
        let (train, test) = FILES.split_at(5);
        Ok((half(Split::Train, train)?, half(Split::Val, test)?))
    }

    pub(crate) fn info(&self) -> &Info {
        &self.info
    }

    pub(crate) fn label(&self, sample: usize) -> i32 {
        i32::from(self.records.labels[sample])
    }

    pub(crate) fn read(&self, sample: usize, image: &mut Pixels) -> i32 {
        image.copy_from(SIDE, SIDE, 3, &self.records.pixels[sample * IMAGE..][..IMAGE]);
        self.label(sample)
    }
}

/// Whether one file is the published one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checksum {
    /// The file.
    pub file: PathBuf,
    /// Its MD5.
    pub md5: String,
    /// The published MD5.
    pub expected: String,
}

impl Checksum {
    /// Whether they agree.
    pub fn holds(&self) -> bool {
        self.md5 == self.expected
    }
}

/// The checksums of all six files. One that differs is reported, not refused.
///
/// # Errors
/// When a file is missing, unreadable or of another length.
pub fn verify(place: Option<&Path>, home: Option<&Path>, disk: &Disk) -> Result<Vec<Checksum>, DataError> {
    let folder = find(place, home, disk)?;
    let check = |(name, expected): &(&str, &str)| {
        let file = folder.join(name);
        check_length(&file, disk)?;
        let md5 = Md5::digest(disk.read_within(&file, FILE_BYTES)?).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Checksum { file, md5, expected: (*expected).into() })
    };
    FILES.iter().map(check).collect()
}

fn find(place: Option<&Path>, home: Option<&Path>, disk: &Disk) -> Result<PathBuf, DataError> {
    dataset::find(place, home, &[FOLDER], |folder| disk.exists(&folder.join(FILES[0].0))).ok_or_else(|| {
        dataset::missing("cifar10", place, home, "data_batch_1.bin … test_batch.bin of the binary version")
    })
}

fn check_length(file: &Path, disk: &Disk) -> Result<(), DataError> {
    let (length, expected) = (disk.length(file)?, FILE_BYTES);
    if length == expected {
        return Ok(());
    }
    let word = if length < expected { "truncated" } else { "too long" };
    let problem = format!("it is {word}: {length} bytes instead of {expected}; unpack cifar-10-binary.tar.gz again");
    Err(DataError::Malformed { file: file.to_owned(), problem })
}

pub(crate) fn info(split: Split, len: usize) -> Info {
    Info {
        source: Source::Cifar10,
        name: "cifar10".into(),
        split,
        len,
        kind: SampleKind::Image { height: SIDE, width: SIDE, channels: 3 },
        classes: CLASSES.len(),
        class_names: CLASSES.map(str::to_owned).to_vec(),
        // Over all pixels of the training half; the tests measure them again.
        mean: vec![0.4914, 0.4822, 0.4465],
        std: vec![0.2470, 0.2435, 0.2616],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn planes_become_pixels() {
        let mut bytes = vec![7u8];
        bytes.extend((0..IMAGE).map(|at| (at / PLANE * 100 + at % PLANE % 90) as u8));
        let mut records = Records::default();
        records.decode(&bytes).unwrap();
        assert_eq!(records.labels, [7]);
        assert_eq!(records.pixels[..6], [0, 100, 200, 1, 101, 201]);
    }

    #[test]
    fn a_truncated_file_is_named_with_both_sizes() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::real();
        for (name, _) in FILES {
            disk.write(&folder.path().join(name), &vec![0; if name == "data_batch_3.bin" { 777 } else { 30_730_000 }])
                .unwrap();
        }
        let error = Cifar10::open(Some(folder.path()), &OpenOptions::default(), &disk).unwrap_err().to_string();
        assert!(error.contains("data_batch_3.bin") && error.contains("777 bytes instead of 30730000"), "{error}");
    }

    #[test]
    fn a_missing_set_says_what_to_type() {
        let error = Cifar10::open(Some(Path::new("nowhere")), &OpenOptions::default(), &Disk::real()).unwrap_err();
        assert!(error.to_string().contains("no cifar10 data in nowhere; type --data cifar10:DIR"), "{error}");
        let error = Cifar10::open(None, &OpenOptions::default(), &Disk::real()).unwrap_err();
        assert!(error.to_string().contains("set PACELINE_DATA"), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..100), records in 0usize..3, class: u8) {
            prop_assert_eq!(Records::default().decode(&bytes).is_ok(), bytes.is_empty());
            let whole = vec![class; records * RECORD];
            prop_assert_eq!(Records::default().decode(&whole).is_ok(), records == 0 || class < 10);
        }
    }
}
