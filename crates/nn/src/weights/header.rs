//! The header of a safetensors file, read alone: what it announces is held against the file's length and against a bound
//! before any tensor is read. Weights of many gigabytes say in kilobytes which model they are for.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use paceline_system::disk::{Disk, DiskError};
use safetensors::tensor::Metadata;

use super::{WeightsError, not_safetensors};

/// The longest header. A tensor takes about 100 bytes of it, and the names of the most classes that a data set may have
/// (`CLASS_NAMES_BYTES_MAX` of `paceline-data`) at most 30 MB, should every byte of them need an escape.
const HEADER_BYTES_MAX: u64 = 32 << 20;
/// The header's length, in front of it.
const LENGTH_BYTES: u64 = size_of::<u64>() as u64;

/// What a file says of itself.
pub(super) struct Header {
    /// Tensors and notes.
    pub metadata: Metadata,
    /// The length of the whole file.
    pub file_bytes: u64,
}

impl Header {
    /// The file's own notes.
    pub fn notes(&self) -> BTreeMap<String, String> {
        self.metadata.metadata().iter().flatten().map(|(key, note)| (key.clone(), note.clone())).collect()
    }
}

/// Reads the header and nothing else.
pub(super) fn read(disk: &Disk, path: &Path) -> Result<Header, WeightsError> {
    let mut file = disk.open(path)?;
    let file_bytes = disk.length(path)?;
    let unreadable = |source| DiskError { verb: "read", path: path.to_owned(), source };
    if file_bytes < LENGTH_BYTES {
        return Err(not_safetensors(path, &"it is too short for a header"));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(unreadable)?;
    let length = u64::from_le_bytes(length);
    if length > file_bytes - LENGTH_BYTES {
        return Err(not_safetensors(path, &format!("it announces a header of {length} bytes and is shorter")));
    }
    if length > HEADER_BYTES_MAX {
        return Err(WeightsError::Header { path: path.to_owned(), bytes: length, most: HEADER_BYTES_MAX });
    }
    let mut text = Vec::new();
    file.take(length).read_to_end(&mut text).map_err(unreadable)?;
    let metadata: Metadata = serde_json::from_slice(&text).map_err(|error| not_safetensors(path, &error))?;
    let announced = (metadata.data_len() as u64).checked_add(LENGTH_BYTES + length);
    if announced != Some(file_bytes) {
        let reason = format!("it has {file_bytes} bytes, and its header announces {}", announced.unwrap_or(u64::MAX));
        return Err(not_safetensors(path, &reason));
    }
    Ok(Header { metadata, file_bytes })
}
