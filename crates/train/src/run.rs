//! The folder a run lives in: `config.toml`, `events/`, `checkpoints/`, TensorBoard files and `report.html`.

use std::path::{Path, PathBuf};

use paceline_system::clock;
use paceline_system::disk::Disk;

use crate::config::Config;
use crate::error::TrainError;

/// A run's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
}

impl RunDir {
    /// Makes the folder of a new run: the one asked for, or one named by time and model under `runs/`.
    ///
    /// # Errors
    /// When the folder already holds a run, or cannot be written; nothing is overwritten.
    pub fn create(disk: &Disk, asked: Option<&Path>, config: &Config) -> Result<Self, TrainError> {
        let path = match asked {
            Some(path) => path.to_owned(),
            None => free_name(disk, &config.model),
        };
        let run = Self { path };
        if disk.exists(&run.config_path()) {
            let shown = run.path.display();
            return Err(TrainError::Refused(format!(
                "{shown} already holds a run; type paceline train --resume {shown} to continue it, or another --run"
            )));
        }
        let made = disk
            .create_dir(&run.checkpoints())
            .and_then(|()| disk.write(&run.config_path(), config.to_toml().as_bytes()));
        made.map_err(|error| TrainError::Refused(format!("{error}; type --run with a folder that can be written")))?;
        Ok(run)
    }

    /// The folder of a run that exists.
    ///
    /// # Errors
    /// When there is no run, or its configuration cannot be read.
    pub fn open(disk: &Disk, path: &Path) -> Result<(Self, Config), TrainError> {
        let run = Self { path: path.to_owned() };
        if !disk.exists(&run.config_path()) {
            return Err(TrainError::Refused(format!(
                "{} holds no run (no config.toml); type the folder that `paceline train` printed, or list runs/",
                path.display()
            )));
        }
        let file = run.config_path();
        let config = Config::from_toml(&disk.read_text(&file)?)
            .map_err(|error| TrainError::Refused(format!("{}: {error}", file.display())))?;
        Ok((run, config))
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

/// `runs/2026-11-15-083000-resnet20`, with a number behind it if that is taken.
fn free_name(disk: &Disk, model: &str) -> PathBuf {
    let time = clock::format_utc(clock::unix_seconds()).replace(' ', "-").replace(':', "");
    let name = format!("{time}-{model}");
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    let mut names = std::iter::once(name.clone()).chain(numbered);
    names
        .find_map(|name| Some(Path::new("runs").join(name)).filter(|path| !disk.exists(path)))
        .expect("an endless list")
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
        RunDir::create(&disk, Some(&path), &config).unwrap();
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
    fn a_folder_without_a_run_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(RunDir::open(&Disk::real(), folder.path()).unwrap_err().is_refusal());
    }
}
