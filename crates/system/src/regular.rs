//! Opening what is a file and nothing else.
//!
//! A name that a user types, or that a data set holds, may be that of a FIFO, whose opening waits for a writer; of a
//! device, which never ends or begins to move; or of a folder. They are told apart before anything is opened, and once more
//! after, in case another took the file's place meanwhile. Called by [`crate::disk`] and [`crate::secret`].

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file for reading.
///
/// # Errors
/// When it is missing, unreadable or something else than a file.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    refuse_others(fs::metadata(path)?.file_type())?;
    // Without waiting: a FIFO that has just come in the file's place has perhaps no writer.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    refuse_others(file.metadata()?.file_type())?;
    Ok(file)
}

/// The whole of a regular file that has at most `bytes_max` bytes, however many it said.
///
/// # Errors
/// As [`open`], or when there are more.
pub(crate) fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    let too_large = |length: u64| {
        let words = format!("it has {length} bytes or more, and at most {bytes_max} are possible");
        Err(io::Error::new(ErrorKind::FileTooLarge, words))
    };
    if length > bytes_max {
        return too_large(length);
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length as usize)?;
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max { too_large(bytes.len() as u64) } else { Ok(bytes) }
}

/// What something is called that is no regular file; nothing for one that is.
pub(crate) fn other_kind(kind: FileType) -> Option<&'static str> {
    match kind {
        kind if kind.is_file() => None,
        kind if kind.is_dir() => Some("a folder"),
        kind if kind.is_fifo() => Some("a named pipe"),
        kind if kind.is_socket() => Some("a socket"),
        _ => Some("a device"),
    }
}

/// The error for something that is no regular file.
pub(crate) fn refuse_others(kind: FileType) -> io::Result<()> {
    match other_kind(kind) {
        None => Ok(()),
        Some(kind) => Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {kind}, not a file"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let said = |path: &Path| open(path).unwrap_err().to_string();
        assert_eq!(said(&pipe), "it is a named pipe, not a file");
        assert_eq!(said(folder.path()), "it is a folder, not a file");
        assert_eq!(said(Path::new("/dev/zero")), "it is a device, not a file");
    }

    #[test]
    fn a_bound_holds_whatever_the_length_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, [7; 100]).unwrap();
        assert_eq!(read(&path, 100).unwrap().len(), 100);
        assert!(read(&path, 99).unwrap_err().to_string().contains("at most 99"));
        // Files of /proc say that they are empty.
        assert_eq!(read(Path::new("/proc/self/maps"), 10).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }
}
