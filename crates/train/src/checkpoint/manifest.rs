//! `manifest.json` of a checkpoint: which run and step it is of, and length and checksum of each file. Nothing of a checkpoint is used
//! before it was held against this, and what is held against it is what is used: files are read once.
//!
//! The manifest is written last, so a folder that has one was complete. Its own last field is the checksum of the text before.

use std::io::ErrorKind;
use std::path::Path;

use paceline_system::checksum::Checksum;
use paceline_system::disk::Disk;
use serde::{Deserialize, Serialize};

use super::step_of;
use crate::run::read_id;

/// The file's name.
pub const MANIFEST: &str = "manifest.json";

/// Raised when a field changes its meaning or goes away.
const FORMAT: u32 = 1;

/// What does not agree, as a sentence without its full stop that begins with the name of a file or folder.
#[derive(Debug)]
pub struct Damage(pub String);

/// What a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    /// The run's id.
    pub run: String,
    /// Updates that were made.
    pub step: u64,
    files: Vec<Entry>,
}

/// One of its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    name: String,
    bytes: u64,
    crc32c: String,
}

impl Manifest {
    /// Of files that were just written.
    pub fn new(run: &str, step: u64, files: &[(&str, Checksum)]) -> Self {
        let entry = |(name, sum): &(&str, Checksum)| Entry {
            name: (*name).to_owned(),
            bytes: sum.bytes,
            crc32c: sum.to_string(),
        };
        Self { format: FORMAT, run: run.to_owned(), step, files: files.iter().map(entry).collect() }
    }

    /// The file's text.
    pub fn to_text(&self) -> String {
        let mut text = serde_json::to_string(self).expect("a manifest holds nothing that JSON cannot");
        text.pop();
        let sum = Checksum::of(text.as_bytes());
        format!("{text},\"crc32c\":\"{sum}\"}}\n")
    }

    /// The manifest of a checkpoint's folder, or none: earlier versions wrote none.
    pub fn read(disk: &Disk, folder: &Path) -> Result<Option<Self>, Damage> {
        let path = folder.join(MANIFEST);
        let bytes = match disk.read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.source.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Damage(error.to_string())),
        };
        let manifest = Self::parse(&path, &bytes)?;
        manifest.check_place(disk, folder)?;
        Ok(Some(manifest))
    }

    fn parse(path: &Path, bytes: &[u8]) -> Result<Self, Damage> {
        let damaged = || Damage(format!("{} is damaged: its text does not agree with its checksum", path.display()));
        let manifest: Self = serde_json::from_slice(bytes).map_err(|_| damaged())?;
        if manifest.format > FORMAT {
            let format = manifest.format;
            return Err(Damage(format!(
                "{} is damaged, or of a later version of paceline: its format is {format}, and this one knows {FORMAT}",
                path.display()
            )));
        }
        // Written again it is the same text, bit for bit, or it was not written here.
        if manifest.to_text().as_bytes() == bytes { Ok(manifest) } else { Err(damaged()) }
    }

    /// Whether the folder it lies in is the one it was written for.
    fn check_place(&self, disk: &Disk, folder: &Path) -> Result<(), Damage> {
        let shown = folder.display();
        if let Some(step) = step_of(folder).filter(|&step| step != self.step) {
            return Err(Damage(format!(
                "{shown} is named after step {step}, and its manifest is of step {}",
                self.step
            )));
        }
        let run = folder.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "checkpoints"));
        let id = run.and_then(Path::parent).and_then(|run| read_id(disk, run));
        match id.filter(|id| *id != self.run) {
            Some(id) => Err(Damage(format!(
                "{shown} is of another run: its manifest is of run {}, and this one is {id}",
                self.run
            ))),
            None => Ok(()),
        }
    }

    /// Whether it tells of a file.
    pub fn names(&self, file: &str) -> bool {
        self.files.iter().any(|entry| entry.name == file)
    }

    /// Reads one of the files, and holds what was read against the manifest.
    pub fn read_file(&self, disk: &Disk, folder: &Path, name: &str) -> Result<Vec<u8>, Damage> {
        let path = folder.join(name);
        let Some(entry) = self.files.iter().find(|entry| entry.name == name) else {
            return Err(Damage(format!("{} is not in the manifest beside it", path.display())));
        };
        let bytes = read_plain(disk, &path)?;
        let shown = path.display();
        if bytes.len() as u64 != entry.bytes {
            let (found, expected) = (bytes.len(), entry.bytes);
            return Err(Damage(format!("{shown} is damaged: it has {found} bytes, and the manifest says {expected}")));
        }
        let (sum, expected) = (Checksum::of(&bytes).to_string(), &entry.crc32c);
        if sum != *expected {
            return Err(Damage(format!("{shown} is damaged: its checksum is {sum}, and the manifest says {expected}")));
        }
        Ok(bytes)
    }

    /// Whether every file agrees with it.
    pub fn agrees(&self, disk: &Disk, folder: &Path) -> bool {
        self.files.iter().all(|entry| self.read_file(disk, folder, &entry.name).is_ok())
    }
}

/// Reads a file that nothing can be held against.
pub fn read_plain(disk: &Disk, path: &Path) -> Result<Vec<u8>, Damage> {
    disk.read(path).map_err(|error| match error.source.kind() {
        ErrorKind::NotFound => Damage(format!("{} is missing", path.display())),
        _ => Damage(error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bit_of_a_manifest_can_flip_unseen() {
        let manifest = Manifest::new("00ff", 40, &[("weights.safetensors", Checksum::of(b"weights"))]);
        let (path, text) = (Path::new("manifest.json"), manifest.to_text());
        assert_eq!(Manifest::parse(path, text.as_bytes()).unwrap(), manifest);
        for bit in 0..8 * text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let Damage(what) = Manifest::parse(path, &bytes).unwrap_err();
            assert!(what.starts_with("manifest.json is damaged"), "{what}");
        }
        assert!(Manifest::parse(path, &text.as_bytes()[..text.len() - 1]).is_err());
        assert!(Manifest::parse(path, format!("{text} ").as_bytes()).is_err());
    }
}
