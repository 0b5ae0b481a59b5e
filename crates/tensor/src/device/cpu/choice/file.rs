//! Choices as a file: JSON, one line per choice, named after the processor. What is damaged, of another version or of
//! another processor is refused with a reason; the caller warns and measures again.

use std::path::{Path, PathBuf};

use paceline_system::disk::{Disk, DiskError};
use serde::{Deserialize, Serialize};

use super::{Choice, Choices, Key};

/// Raised when a kernel changes so much that old measurements mislead.
const VERSION: u32 = 2;

/// A choice takes some 400 bytes, and a model a few dozen choices.
const BYTES_MAX: u64 = 16 << 20;

/// A file of choices cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ChoicesError {
    /// The disk refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The bytes are not a table of choices.
    #[error("it is damaged: {0}")]
    Damaged(String),
    /// Its measurements are of other kernels or of another processor.
    #[error("it was measured {0}")]
    Foreign(String),
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    processor: String,
    choices: Vec<Line>,
}

#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    key: Key,
    #[serde(flatten)]
    choice: Choice,
}

impl Choices {
    /// The file of this processor's choices in a folder.
    pub fn path(&self, folder: &Path) -> PathBuf {
        let letter = |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' };
        let name: String = self.processor.chars().map(letter).collect();
        let words: Vec<&str> = name.split('-').filter(|word| !word.is_empty()).collect();
        folder.join(format!("choices-{}.json", if words.is_empty() { "unknown".into() } else { words.join("-") }))
    }

    /// Reads a processor's choices from a folder; none if there is no file.
    ///
    /// # Errors
    /// When the file is unreadable, damaged or foreign.
    pub fn load(disk: &Disk, folder: &Path, processor: &str) -> Result<Self, ChoicesError> {
        let path = Self::new(processor).path(folder);
        if !disk.exists(&path) {
            return Ok(Self::new(processor));
        }
        let length = disk.length(&path)?;
        if length > BYTES_MAX {
            return Err(ChoicesError::Damaged(format!("it has {length} bytes")));
        }
        Self::from_json(&disk.read(&path)?, processor)
    }

    /// Adds these choices to the processor's file in a folder, whole or not at all. A file that cannot be used is replaced.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn save(&self, disk: &Disk, folder: &Path) -> Result<(), DiskError> {
        disk.create_dir(folder)?;
        let mut all = self.clone();
        // Another process may have measured other shapes in the meantime.
        all.merge(Self::load(disk, folder, &self.processor).unwrap_or_default());
        disk.write(&all.path(folder), all.to_json().as_bytes())
    }

    /// From the bytes of a file.
    ///
    /// # Errors
    /// When they are damaged or foreign.
    pub fn from_json(bytes: &[u8], processor: &str) -> Result<Self, ChoicesError> {
        let document: Document =
            serde_json::from_slice(bytes).map_err(|error| ChoicesError::Damaged(error.to_string()))?;
        if document.version != VERSION {
            return Err(ChoicesError::Foreign(format!("for version {} of the kernels", document.version)));
        }
        if document.processor != processor {
            return Err(ChoicesError::Foreign(format!("on `{}`", document.processor)));
        }
        let choices = document.choices.into_iter().map(|line| (line.key, line.choice)).collect();
        Ok(Self { processor: processor.into(), choices })
    }

    /// As a file: the same choices are the same bytes.
    pub fn to_json(&self) -> String {
        let line = |(&key, choice): (&Key, &Choice)| Line { key, choice: choice.clone() };
        let mut lines: Vec<String> =
            self.choices.iter().map(|entry| serde_json::to_string(&line(entry)).expect("a choice is JSON")).collect();
        lines.sort();
        let processor = serde_json::to_string(&self.processor).expect("a name is JSON");
        let lines = lines.join(",\n");
        format!("{{\"version\":{VERSION},\"processor\":{processor},\"choices\":[\n{lines}\n]}}\n")
    }
}
