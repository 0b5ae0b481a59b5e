//! The folder a run lives in: `config.toml`, `events/`, `checkpoints/`, TensorBoard files and `report.html`.

use std::path::{Path, PathBuf};

use paceline_system::clock;
use paceline_system::disk::Disk;
use paceline_system::lock::Lock;

use crate::config::Config;
use crate::error::TrainError;

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
    /// When the folder already holds a run, or cannot be written; nothing is overwritten.
    pub fn create(disk: &Disk, asked: Option<&Path>, config: &Config) -> Result<Self, TrainError> {
        match asked {
            Some(path) => Self::create_at(disk, path, config),
            None => free_names(&config.model)
                .map(|path| Self::create_at(disk, &path, config))
                .find(|made| !matches!(made, Err(TrainError::RunExists { .. })))
                .expect("an endless list"),
        }
    }

    fn create_at(disk: &Disk, path: &Path, config: &Config) -> Result<Self, TrainError> {
        let refuse = |error: &dyn std::fmt::Display| {
            TrainError::Refused(format!("{error}; type --run with a folder that can be written"))
        };
        disk.create_dir(path).map_err(|error| refuse(&error))?;
        let run = Self::lock(path)?;
        if disk.exists(&run.config_path()) {
            return Err(TrainError::RunExists { run: path.to_owned() });
        }
        disk.create_dir(&run.checkpoints())
            .and_then(|()| disk.write(&run.config_path(), config.to_toml().as_bytes()))
            .map_err(|error| refuse(&error))?;
        Ok(run)
    }

    fn lock(path: &Path) -> Result<Self, TrainError> {
        let lock = Lock::take(&path.join("lock")).map_err(|error| {
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

    /// The folder of a run that exists, to go on with it.
    ///
    /// # Errors
    /// When there is no run, its configuration cannot be read, or another process is at it.
    pub fn open(disk: &Disk, path: &Path) -> Result<(Self, Config), TrainError> {
        let config = read_config(disk, path)?;
        Ok((Self::lock(path)?, config))
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
    Config::from_toml(&disk.read_text(&file)?)
        .map_err(|error| TrainError::Refused(format!("{}: {error}", file.display())))
}

/// A name for a new run that is free now.
pub fn free_name(disk: &Disk, model: &str) -> PathBuf {
    free_names(model).find(|path| !disk.exists(path)).expect("an endless list")
}

/// `runs/2026-11-15-083000-resnet20`, then with numbers behind it.
fn free_names(model: &str) -> impl Iterator<Item = PathBuf> {
    let time = clock::format_utc(clock::unix_seconds()).replace(' ', "-").replace(':', "");
    let name = format!("{time}-{model}");
    let numbered = {
        let name = name.clone();
        (2..).map(move |number| format!("{name}-{number}"))
    };
    std::iter::once(name).chain(numbered).map(|name| Path::new("runs").join(name))
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
