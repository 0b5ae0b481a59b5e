//! The folder a run lives in: `config.toml`, `id`, `events/`, `checkpoints/`, TensorBoard files and `report.html`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use paceline_data::order::LastBatch;
use paceline_system::disk::Disk;
use paceline_system::lock::Lock;
use paceline_system::printable::Shown;
use paceline_system::{clock, entropy};

use crate::config::{CONFIG_BYTES_MAX, Config};
use crate::error::TrainError;

/// The file with the run's id, which its checkpoints carry.
const ID: &str = "id";
/// The file that is locked.
const LOCK: &str = "lock";
/// The folder for runs that nobody named.
const RUNS: &str = "runs";

/// A run's folder. Whoever has one that may be written holds its lock.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: Option<Lock>,
}

impl RunDir {
    /// Makes the folder of a new run: the one asked for, or one named by time and model under `runs/`.
    ///
    /// # Errors
    /// When the folder holds anything, or cannot be written; nothing is overwritten, and nothing is left behind.
    pub fn create(disk: &Disk, asked: Option<&Path>, config: &Config) -> Result<Self, TrainError> {
        match asked {
            Some(path) => Self::create_at(disk, path, config),
            None => {
                let path = reserve(disk, &config.model)?;
                Self::create_at(disk, &path, config).inspect_err(|_| {
                    // Only if nothing is in it.
                    let _ = disk.remove_empty_dir(&path);
                })
            }
        }
    }

    fn create_at(disk: &Disk, path: &Path, config: &Config) -> Result<Self, TrainError> {
        let is_new = !disk.exists(path);
        disk.create_dir(path).map_err(|error| cannot_write(&error))?;
        check_free(disk, path)?;
        let filled = Self::lock(path).and_then(|run| {
            // Another process may have been as quick as this one.
            if disk.exists(&run.config_path()) {
                return Err(TrainError::RunExists { run: path.to_owned() });
            }
            let made = disk
                .create_dir(&run.checkpoints())
                .and_then(|()| disk.write(&run.path.join(ID), new_id().as_bytes()))
                .and_then(|()| disk.write(&run.config_path(), config.to_toml().as_bytes()));
            made.map(|()| run).map_err(|error| {
                // A refusal leaves things as they were, as far as the disk lets it.
                let made = ["checkpoints", ID, "config.toml", LOCK].map(|name| path.join(name));
                made.iter().for_each(|name| drop(disk.remove(name)));
                cannot_write(&error)
            })
        });
        if filled.is_err() && is_new && disk.list(path).is_ok_and(|entries| entries.is_empty()) {
            let _ = disk.remove(path);
        }
        filled
    }

    fn lock(path: &Path) -> Result<Self, TrainError> {
        let lock = Lock::take(&path.join(LOCK)).map_err(|error| {
            TrainError::Refused(format!(
                "cannot write to {}: {error}; a run needs a folder that can be written",
                path.display()
            ))
        })?;
        if lock.is_none() {
            let sentence = "another process is training in this folder; wait for it or type another --run";
            return Err(TrainError::Refused(format!("{}: {sentence}", path.display())));
        }
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// The folder of a run that another rank of the same run has made and holds; this one only adds its events. It may be on
    /// another machine, where the folder is made.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn join(disk: &Disk, path: &Path) -> Result<Self, TrainError> {
        disk.create_dir(path)?;
        Ok(Self { path: path.to_owned(), _lock: None })
    }

    /// As [`RunDir::join`], of the run with this id: on a machine with files of its own, another may be kept under that name.
    ///
    /// # Errors
    /// When another run is kept there, or it cannot be written.
    pub fn join_run(disk: &Disk, path: &Path, id: &str) -> Result<Self, TrainError> {
        // A run of an earlier version has no id yet.
        if !id.is_empty() && disk.exists(&path.join("config.toml")) && read_id(disk, path).as_deref() != Some(id) {
            return Err(TrainError::Refused(format!(
                "{} holds another run on this machine than on that of rank 0; type --run with a name that is free on all",
                Shown(path)
            )));
        }
        Self::join(disk, path)
    }

    /// Takes the place of rank 0, which is lost: whether the run is kept here, and rank 0 holds it no longer.
    pub fn take_over(&mut self, disk: &Disk) -> bool {
        if disk.exists(&self.config_path()) {
            self._lock = Lock::take(&self.path.join(LOCK)).ok().flatten();
        }
        self._lock.is_some()
    }

    /// The folder of a run that exists, to go on with it.
    ///
    /// # Errors
    /// When there is no run, its configuration cannot be read, or another process is at it.
    pub fn open(disk: &Disk, path: &Path) -> Result<(Self, Config), TrainError> {
        let config = read_config(disk, path)?;
        Ok((Self::lock(path)?, config))
    }

    /// The run's id. A run without one, of an earlier version, gets the one that its checkpoint names, or a new one.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn ensure_id(&self, disk: &Disk, named: Option<String>) -> Result<String, TrainError> {
        if let Some(id) = read_id(disk, &self.path) {
            return Ok(id);
        }
        let id = named.unwrap_or_else(new_id);
        disk.write(&self.path.join(ID), id.as_bytes())?;
        Ok(id)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The resolved configuration.
    pub fn config_path(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// Where checkpoints are.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }
}

/// What `--resume` names: a run, to go on from its last checkpoint, or one of its checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResumeFrom {
    /// The run's folder.
    pub run: PathBuf,
    /// The checkpoint, if one was named.
    pub checkpoint: Option<PathBuf>,
}

impl ResumeFrom {
    /// Finds out which of them a path is.
    pub fn find(disk: &Disk, path: &Path) -> Self {
        let folder = path.parent().filter(|folder| folder.file_name().is_some_and(|name| name == "checkpoints"));
        match folder.and_then(Path::parent) {
            Some(run) if disk.exists(&run.join("config.toml")) && !disk.exists(&path.join("config.toml")) => {
                // A bare `checkpoints/step-N` is of the run in the folder that the process is in.
                let run = if run.as_os_str().is_empty() { Path::new(".") } else { run };
                Self { run: run.to_owned(), checkpoint: Some(path.to_owned()) }
            }
            _ => Self { run: path.to_owned(), checkpoint: None },
        }
    }
}

/// Refuses a folder for a new run that holds anything, whatever it is. Other workers write into it only once rank 0 has made it.
///
/// # Errors
/// When it does.
pub fn check_free(disk: &Disk, path: &Path) -> Result<(), TrainError> {
    if disk.exists(&path.join("config.toml")) {
        return Err(TrainError::RunExists { run: path.to_owned() });
    }
    if !disk.is_dir(path) {
        return Ok(());
    }
    match disk.list(path).map_err(|error| cannot_write(&error))?.first() {
        None => Ok(()),
        Some(entry) => Err(TrainError::NotEmpty { folder: path.to_owned(), entry: entry.clone() }),
    }
}

fn cannot_write(error: &dyn std::fmt::Display) -> TrainError {
    TrainError::Refused(format!("{error}; type --run with a folder that can be written"))
}

/// The id of the run in a folder, if it has one.
pub fn read_id(disk: &Disk, run: &Path) -> Option<String> {
    let text = disk.read_text(&run.join(ID)).ok()?;
    Some(text.trim().to_owned()).filter(|id| !id.is_empty())
}

fn new_id() -> String {
    entropy::bytes::<16>().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The configuration of a run that exists; the run may be in progress.
///
/// # Errors
/// When there is no run, or its configuration cannot be read.
pub fn read_config(disk: &Disk, path: &Path) -> Result<Config, TrainError> {
    let file = path.join("config.toml");
    if !disk.exists(&file) {
        return Err(TrainError::Refused(format!(
            "{} holds no run (no config.toml); type the folder that `paceline train` printed, or list runs/",
            path.display()
        )));
    }
    let text = disk.read_text_within(&file, CONFIG_BYTES_MAX)?;
    let config =
        Config::from_toml(&text).map_err(|error| TrainError::Refused(format!("{}: {error}", file.display())))?;
    // Runs that do not say it are of a version that left out what did not fill a batch; their steps were counted so.
    let says = text.lines().any(|line| line.starts_with("last-batch"));
    Ok(if says { config } else { Config { last_batch: LastBatch::Drop, ..config } })
}

/// Makes the first folder whose name is free: of two runs that begin in the same second, one gets it, and the other the next.
///
/// # Errors
/// When it cannot be made.
pub fn reserve(disk: &Disk, model: &str) -> Result<PathBuf, TrainError> {
    disk.create_dir(Path::new(RUNS)).map_err(|error| cannot_write(&error))?;
    for path in free_names(model) {
        match disk.create_dir_inside(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.source.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(cannot_write(&error)),
        }
    }
    unreachable!("an endless list")
}

/// `runs/2026-11-15-083000-resnet20`, then with numbers behind it.
fn free_names(model: &str) -> impl Iterator<Item = PathBuf> {
    let time = clock::format_utc(clock::unix_seconds()).replace(' ', "-").replace(':', "");
    let name = format!("{time}-{model}");
    let numbered = {
        let name = name.clone();
        (2..).map(move |number| format!("{name}-{number}"))
    };
    std::iter::once(name).chain(numbered).map(|name| Path::new(RUNS).join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_a_run_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let disk = Disk::real();
        let config = Config::default();
        drop(RunDir::create(&disk, Some(&path), &config).unwrap());
        let error = RunDir::create(&disk, Some(&path), &Config { epochs: 99, ..config.clone() }).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains("--resume"), "{error}");
        assert_eq!(RunDir::open(&disk, &path).unwrap().1, config);
    }

    #[test]
    fn a_folder_with_anything_in_it_is_refused_and_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::real();
        for entry in [".git/HEAD", "report.html", "events/rank-0.jsonl", "checkpoints/best.txt"] {
            for workers in [1, 2] {
                let path = folder.path().join(format!("{workers}{}", entry.replace('/', "-")));
                disk.create_dir(path.join(entry).parent().unwrap()).unwrap();
                disk.write(&path.join(entry), b"mine").unwrap();
                let error = RunDir::create(&disk, Some(&path), &Config { workers, ..Config::default() }).unwrap_err();
                assert!(error.is_refusal() && error.to_string().contains("another --run"), "{error}");
                assert_eq!(disk.list(&path).unwrap().len(), 1);
            }
        }
    }

    #[test]
    fn a_disk_that_is_full_from_the_start_leaves_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        for bytes in [0, 10, 40, 100] {
            let error = RunDir::create(&Disk::full_after(bytes), Some(&path), &Config::default()).unwrap_err();
            assert!(error.is_refusal() && !path.exists(), "{error}");
        }
        RunDir::create(&Disk::real(), Some(&path), &Config::default()).unwrap();
    }

    #[test]
    fn a_checkpoint_names_its_run() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, run) = (Disk::real(), folder.path().join("run"));
        drop(RunDir::create(&disk, Some(&run), &Config::default()).unwrap());
        let checkpoint = run.join("checkpoints/step-00000020");
        assert_eq!(ResumeFrom::find(&disk, &run), ResumeFrom { run: run.clone(), checkpoint: None });
        let found = ResumeFrom::find(&disk, &checkpoint);
        assert_eq!(found, ResumeFrom { run, checkpoint: Some(checkpoint) });
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        Disk::real().write(&file, b"").unwrap();
        let error = RunDir::create(&Disk::real(), Some(&file.join("run")), &Config::default()).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains("--run"), "{error}");
    }

    #[test]
    fn two_processes_do_not_train_in_one_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let run = RunDir::create(&Disk::real(), Some(&path), &Config::default()).unwrap();
        let error = RunDir::open(&Disk::real(), &path).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains("another process"), "{error}");
        drop(run);
        RunDir::open(&Disk::real(), &path).unwrap();
    }

    #[test]
    fn a_folder_without_a_run_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(RunDir::open(&Disk::real(), folder.path()).unwrap_err().is_refusal());
    }
}
