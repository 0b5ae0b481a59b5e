//! Files that only their owner can read: for tokens; and folders for what goes again, in a place where everybody may write.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Error, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::{entropy, regular};

/// More than any secret; a file that is longer is something else.
const BYTES_MAX: u64 = 4096;

/// The text of a private file; none if it is not there.
///
/// # Errors
/// When it belongs to somebody else, others can read or write it, or it cannot be read.
pub fn read(path: &Path) -> io::Result<Option<String>> {
    let file = match regular::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let metadata = file.metadata()?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(Error::new(ErrorKind::PermissionDenied, "it is not a file of this user"));
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(Error::new(ErrorKind::PermissionDenied, "others can read it; type chmod 600 on it"));
    }
    let mut text = String::new();
    file.take(BYTES_MAX).read_to_string(&mut text)?;
    Ok(Some(text))
}

/// Writes a private file unless it is there already, whole or not at all; of several processes that try at once, one
/// wins, and all of them read the winner's afterwards.
///
/// # Errors
/// When the disk refuses.
pub fn create(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let attempt = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        match fs::hard_link(&part, path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        }
    };
    let done = attempt();
    let _ = fs::remove_file(&part);
    done
}

/// A folder among those for temporary files, which goes with this value. Nobody can guess its name, so nobody else has put anything there.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// A new one, whose name begins with what it is for.
    ///
    /// # Errors
    /// When the disk refuses, or something is there already.
    pub fn new(what: &str) -> io::Result<Self> {
        let number = u128::from_le_bytes(entropy::bytes());
        let path = std::env::temp_dir().join(format!("{what}-{number:032x}"));
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_first_writer_wins_and_only_the_owner_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/token");
        assert_eq!(read(&path).unwrap(), None);
        create(&path, "first").unwrap();
        create(&path, "second").unwrap();
        assert_eq!(read(&path).unwrap().as_deref(), Some("first"));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no part is left behind");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("chmod 600"));
    }

    #[test]
    fn a_folder_is_new_private_and_goes_with_what_is_in_it() {
        let (one, other) = (Folder::new("paceline-test").unwrap(), Folder::new("paceline-test").unwrap());
        assert_ne!(one.path(), other.path());
        assert_eq!(fs::metadata(one.path()).unwrap().permissions().mode() & 0o777, 0o700);
        let path = one.path().to_owned();
        fs::write(path.join("file"), "text").unwrap();
        drop(one);
        assert!(!path.exists() && other.path().exists());
    }
}
