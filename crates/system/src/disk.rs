//! The disk: files appear whole or not at all.
//!
//! [`Disk::write`] writes beside the target under a temporary name, syncs, renames and syncs the folder, so a crash at
//! any moment leaves either the old file or the new one. A [`Disk`] can be told to be full after so many bytes, or to hang:
//! the tests that fill a disk use production code. What is read is a regular file: a FIFO or a device is refused and never
//! waited for.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::printable::Shown;
use crate::{entropy, regular};

/// What went wrong, and where.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {}: {source}", Shown(path))]
pub struct DiskError {
    /// What was tried: read, write, create, list, …
    pub verb: &'static str,
    /// On which file or folder.
    pub path: PathBuf,
    /// What the operating system said.
    pub source: io::Error,
}

impl DiskError {
    fn on<'a>(verb: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + use<'a> {
        move |source| Self { verb, path: path.to_owned(), source }
    }

    /// Whether the disk was full.
    pub fn is_full(&self) -> bool {
        self.source.kind() == ErrorKind::StorageFull
    }

    /// What is wrong with the file itself, if that is why it could not be read: a link to nothing, one that leads to
    /// itself, no right to read it, no file at all, too long a one. Otherwise it is the disk's fault, or the moment's: a
    /// file that has vanished was there.
    pub fn of_the_file(&self) -> Option<String> {
        let of_the_file = match self.source.kind() {
            ErrorKind::NotFound => return self.path.is_symlink().then(|| "it is a link to nothing".into()),
            ErrorKind::PermissionDenied | ErrorKind::InvalidInput | ErrorKind::FileTooLarge => true,
            _ => self.source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()),
        };
        of_the_file.then(|| self.source.to_string())
    }
}

type Result<T> = std::result::Result<T, DiskError>;

/// What an entry of a folder is, once links are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file, or a link that leads nowhere: reading it says so.
    File,
    /// A folder.
    Folder,
    /// Something else, by its name: a device, a named pipe, a socket.
    Other(&'static str),
}

/// Access to the file system. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    /// Bytes that may still be written, or none for the real disk's own limit.
    room: Option<Arc<AtomicU64>>,
    /// Reading waits while somebody else has locked this.
    hold: Option<Arc<Mutex<()>>>,
}

impl Disk {
    /// The machine's disk.
    pub fn real() -> Self {
        Self::default()
    }

    /// The machine's disk, which says it is full once `bytes` have been written through this handle.
    pub fn full_after(bytes: u64) -> Self {
        Self { room: Some(Arc::new(AtomicU64::new(bytes))), ..Self::default() }
    }

    /// The machine's disk, which hangs in [`Disk::read`] while `hold` is locked.
    pub fn hanging_while(hold: &Arc<Mutex<()>>) -> Self {
        Self { hold: Some(Arc::clone(hold)), ..Self::default() }
    }

    /// Whether the limit of [`Disk::full_after`] was hit: a test of a full disk asserts that it really was.
    pub fn was_full(&self) -> bool {
        self.room.as_ref().is_some_and(|room| room.load(Ordering::SeqCst) == 0)
    }

    /// Writes `bytes` to `target`, or, as a full disk does, the first of them that fit.
    fn fill(&self, target: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
        let Some(room) = &self.room else { return target.write_all(bytes) };
        let take = |left: u64| Some(left.saturating_sub(bytes.len() as u64));
        let left = room.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).expect("the new room is never none");
        if left >= bytes.len() as u64 {
            return target.write_all(bytes);
        }
        target.write_all(&bytes[..left as usize])?;
        Err(io::Error::new(ErrorKind::StorageFull, "no space left on device"))
    }

    /// Replaces `path` by what `body` writes, whole or not at all.
    ///
    /// # Errors
    /// When the disk is full or refuses; the file that was there before is untouched and the temporary one is removed.
    pub fn write_with(&self, path: &Path, body: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let part = part_path(path);
        let attempt = || -> io::Result<()> {
            let file = File::create(&part)?;
            let mut writer = Metered { disk: self, file: io::BufWriter::with_capacity(1 << 20, file) };
            body(&mut writer)?;
            writer.flush()?;
            writer.file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            fs::rename(&part, path)
        };
        if let Err(source) = attempt() {
            // Best effort: the caller hears of the first failure, not of the clean-up's.
            let _ = fs::remove_file(&part);
            return Err(DiskError { verb: "write", path: path.to_owned(), source });
        }
        sync_folder(path);
        Ok(())
    }

    /// Replaces `path` by `bytes`, whole or not at all.
    ///
    /// # Errors
    /// As [`Disk::write_with`].
    pub fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        self.write_with(path, |writer| writer.write_all(bytes))
    }

    /// Opens `path` for appending, creating it if needed.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn append(&self, path: &Path) -> Result<Append> {
        let open = || {
            // Opening a FIFO would wait for its reader.
            fs::metadata(path).map_or(Ok(()), |found| regular::refuse_others(found.file_type()))?;
            OpenOptions::new().create(true).append(true).open(path)
        };
        let file = open().map_err(DiskError::on("append to", path))?;
        Ok(Append { disk: self.clone(), path: path.to_owned(), file })
    }

    /// The whole file.
    ///
    /// # Errors
    /// When it is missing, unreadable or no regular file.
    pub fn read(&self, path: &Path) -> Result<Vec<u8>> {
        self.read_within(path, u64::MAX)
    }

    /// The whole file, which has at most `bytes_max` bytes: more is refused before it is read.
    ///
    /// # Errors
    /// As [`Disk::read`], or when it is longer.
    pub fn read_within(&self, path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
        if let Some(hold) = &self.hold {
            drop(hold.lock().unwrap_or_else(PoisonError::into_inner));
        }
        regular::read(path, bytes_max).map_err(DiskError::on("read", path))
    }

    /// The whole file as text.
    ///
    /// # Errors
    /// When it is missing, unreadable, no regular file or not UTF-8.
    pub fn read_text(&self, path: &Path) -> Result<String> {
        self.read_text_within(path, u64::MAX)
    }

    /// The whole file as text, which has at most `bytes_max` bytes.
    ///
    /// # Errors
    /// As [`Disk::read_text`], or when it is longer.
    pub fn read_text_within(&self, path: &Path, bytes_max: u64) -> Result<String> {
        let not_text = |_| DiskError::on("read", path)(io::Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"));
        String::from_utf8(self.read_within(path, bytes_max)?).map_err(not_text)
    }

    /// Opens a file for buffered reading.
    ///
    /// # Errors
    /// When it is missing, unreadable or no regular file.
    pub fn open(&self, path: &Path) -> Result<impl Read + use<>> {
        Ok(BufReader::with_capacity(1 << 18, regular::open(path).map_err(DiskError::on("read", path))?))
    }

    /// The file's length in bytes.
    ///
    /// # Errors
    /// When it is missing.
    pub fn length(&self, path: &Path) -> Result<u64> {
        Ok(fs::metadata(path).map_err(DiskError::on("look at", path))?.len())
    }

    /// Whether a file ends in a line break, or is empty.
    ///
    /// # Errors
    /// When it is missing or unreadable.
    pub fn ends_with_newline(&self, path: &Path) -> Result<bool> {
        let last = || -> io::Result<bool> {
            let mut file = regular::open(path)?;
            if file.metadata()?.len() == 0 {
                return Ok(true);
            }
            file.seek(SeekFrom::End(-1))?;
            let mut byte = [0];
            file.read_exact(&mut byte)?;
            Ok(byte == *b"\n")
        };
        last().map_err(DiskError::on("read", path))
    }

    /// Whether something is there.
    pub fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    /// Whether a file written there would replace something: also a link that leads nowhere.
    pub fn is_taken(&self, path: &Path) -> bool {
        path.symlink_metadata().is_ok()
    }

    /// Whether a folder is there.
    pub fn is_dir(&self, path: &Path) -> bool {
        path.is_dir()
    }

    /// Creates a folder and those above it.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn create_dir(&self, path: &Path) -> Result<()> {
        fs::create_dir_all(path).map_err(DiskError::on("create", path))
    }

    /// Creates a folder inside one that is there: where that was removed, it is not made again.
    ///
    /// # Errors
    /// When the folder above is missing, something is there already, or the disk refuses.
    pub fn create_dir_inside(&self, path: &Path) -> Result<()> {
        fs::create_dir(path).map_err(DiskError::on("create", path))
    }

    /// Removes a folder that holds nothing.
    ///
    /// # Errors
    /// When something is in it, or the disk refuses.
    pub fn remove_empty_dir(&self, path: &Path) -> Result<()> {
        fs::remove_dir(path).map_err(DiskError::on("remove", path))
    }

    /// The entries of a folder, sorted by name.
    ///
    /// # Errors
    /// When it is missing or unreadable.
    pub fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let mut entries = fs::read_dir(path)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>())
            .map_err(DiskError::on("list", path))?;
        entries.sort();
        Ok(entries)
    }

    /// The entries of a folder, sorted by name, with what they are. None of them is opened.
    ///
    /// # Errors
    /// When it is missing or unreadable.
    pub fn list_kinds(&self, path: &Path) -> Result<Vec<(PathBuf, Kind)>> {
        let look = |entry: io::Result<fs::DirEntry>| {
            let entry = entry?;
            // Listing says what an entry is; only links have to be looked at one by one.
            let kind = entry.file_type()?;
            let target = if kind.is_symlink() { fs::metadata(entry.path()).ok() } else { None };
            let kind = target.map_or(kind, |target| target.file_type());
            let kind = match regular::other_kind(kind) {
                _ if kind.is_dir() => Kind::Folder,
                Some(other) if !kind.is_symlink() => Kind::Other(other),
                _ => Kind::File,
            };
            Ok((entry.path(), kind))
        };
        let mut entries = fs::read_dir(path)
            .and_then(|entries| entries.map(look).collect::<io::Result<Vec<_>>>())
            .map_err(DiskError::on("list", path))?;
        entries.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(entries)
    }

    /// Renames a file or folder and syncs the folder it is in.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        fs::rename(from, to).map_err(DiskError::on("rename", from))?;
        sync_folder(to);
        Ok(())
    }

    /// Gives two files or folders each other's names in one moment, and syncs the folder they are in. Not every file system can; nothing
    /// has happened then.
    ///
    /// # Errors
    /// When the disk refuses or cannot.
    pub fn exchange(&self, one: &Path, other: &Path) -> Result<()> {
        exchange(one, other).map_err(DiskError::on("exchange", one))?;
        sync_folder(other);
        Ok(())
    }

    /// Removes a file, or a folder with all it holds; nothing there is fine too.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn remove(&self, path: &Path) -> Result<()> {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(DiskError::on("remove", path)(error)),
            _ => Ok(()),
        }
    }
}

/// A file that grows at its end.
#[derive(Debug)]
pub struct Append {
    disk: Disk,
    path: PathBuf,
    file: File,
}

impl Append {
    /// Appends all of `bytes`, or nothing: what a full disk took of them is cut off again.
    ///
    /// # Errors
    /// When the disk is full or refuses.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let refused = DiskError::on("append to", &self.path);
        let length = match self.file.metadata() {
            // The system would go on taking bytes that nobody can ever read.
            Ok(metadata) if is_removed(&metadata) => return Err(refused(io::ErrorKind::NotFound.into())),
            Ok(metadata) => metadata.len(),
            Err(error) => return Err(refused(error)),
        };
        self.disk.fill(&mut self.file, bytes).map_err(|error| {
            // Best effort: the caller hears of the first failure. A reader knows what to do with half a line.
            let _ = self.file.set_len(length);
            refused(error)
        })
    }
}

/// Whether a file that is open has lost its last name.
fn is_removed(metadata: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.nlink() == 0
}

struct Metered<'a> {
    disk: &'a Disk,
    file: io::BufWriter<File>,
}

impl Write for Metered<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.disk.fill(&mut self.file, bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(target_os = "linux")]
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

#[cfg(not(target_os = "linux"))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

fn part_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    // Several threads of a process may write the same file, as several processes may: the last one's stays.
    name.push(format!(".{}-{:08x}.part", std::process::id(), u32::from_le_bytes(entropy::bytes())));
    path.with_file_name(name)
}

/// A rename is durable once its folder is synced. Some file systems refuse to sync a folder; the rename holds anyway.
fn sync_folder(path: &Path) {
    if let Some(folder) = path.parent()
        && let Ok(folder) = File::open(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
    {
        let _ = folder.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        Disk::real().write(&path, b"old").unwrap();
        let disk = Disk::full_after(10);
        let error = disk.write(&path, &[0; 100]).unwrap_err();
        assert!(error.is_full() && disk.was_full());
        assert_eq!(Disk::real().read(&path).unwrap(), b"old");
        assert_eq!(Disk::real().list(folder.path()).unwrap(), [path]);
    }

    #[test]
    fn an_error_names_the_file() {
        let error = Disk::real().read(Path::new("no/such/file")).unwrap_err();
        assert!(error.to_string().starts_with("cannot read no/such/file: "), "{error}");
    }

    #[test]
    fn a_listing_tells_files_folders_and_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("folder")).unwrap();
        fs::write(at("file"), b"").unwrap();
        for (name, target) in [("to-folder", "folder"), ("to-nothing", "nothing"), ("to-device", "/dev/null")] {
            std::os::unix::fs::symlink(target, at(name)).unwrap();
        }
        let found = Disk::real().list_kinds(folder.path()).unwrap();
        let kinds = [Kind::File, Kind::Folder, Kind::Other("a device"), Kind::Folder, Kind::File];
        let names = ["file", "folder", "to-device", "to-folder", "to-nothing"];
        assert_eq!(found, names.map(at).into_iter().zip(kinds).collect::<Vec<_>>());
        let of_the_file = |name: &str| Disk::real().read(&at(name)).unwrap_err().of_the_file();
        assert_eq!(of_the_file("to-nothing").as_deref(), Some("it is a link to nothing"));
        assert_eq!(of_the_file("to-device").as_deref(), Some("it is a device, not a file"));
        assert_eq!(of_the_file("vanished"), None);
        assert!(Disk::real().is_taken(&at("to-nothing")) && !Disk::real().exists(&at("to-nothing")));
    }

    #[test]
    fn appended_bytes_follow_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = Disk::real().append(&path).unwrap();
        log.write(b"one ").unwrap();
        log.write(b"two").unwrap();
        assert_eq!(Disk::real().read(&path).unwrap(), b"one two");
    }

    #[test]
    fn a_file_that_was_removed_is_not_appended_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = Disk::real().append(&path).unwrap();
        log.write(b"here").unwrap();
        Disk::real().remove(&path).unwrap();
        let error = log.write(b"gone").unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::NotFound, "{error}");
    }

    #[test]
    fn folders_can_exchange_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        let disk = Disk::real();
        for (path, text) in [(&one, "1"), (&other, "2")] {
            disk.create_dir_inside(path).unwrap();
            disk.write(&path.join("file"), text.as_bytes()).unwrap();
        }
        assert!(disk.create_dir_inside(&folder.path().join("no/such")).is_err());
        if disk.exchange(&one, &other).is_ok() {
            assert_eq!(disk.read(&one.join("file")).unwrap(), b"2");
        }
        assert_eq!(disk.list(&folder.path().join("one")).unwrap().len(), 1);
    }

    #[test]
    fn an_append_that_does_not_fit_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let disk = Disk::full_after(10);
        let mut log = disk.append(&path).unwrap();
        log.write(b"whole ").unwrap();
        assert!(log.write(b"cut off").unwrap_err().is_full() && disk.was_full());
        assert_eq!(Disk::real().read(&path).unwrap(), b"whole ");
    }
}
