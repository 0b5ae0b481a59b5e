//! One process at a time: an advisory lock on a file, released when the holder ends, however it ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// A lock that is held until it is dropped or its process ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a file, creating it if needed; none if another process holds it.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn take(path: &Path) -> io::Result<Option<Self>> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            // A file system without locks: better to train than to refuse.
            Err(_) => Ok(Some(Self { _file: file })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_by_one_and_released_when_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = Lock::take(&path).unwrap();
        assert!(first.is_some());
        assert!(Lock::take(&path).unwrap().is_none());
        drop(first);
        assert!(Lock::take(&path).unwrap().is_some());
    }
}
