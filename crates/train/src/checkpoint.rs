//! Checkpoints: `checkpoints/step-00000120/` with `weights.safetensors` (PyTorch's names and layouts, and what is
//! needed to use them), `state.safetensors` (optimizer state and the position in the run) and `manifest.json` (checksums).
//!
//! The folder is written under a temporary name, each file synced, and then renamed: a checkpoint is there whole or
//! not at all. There is no random state to save, because randomness is a function of the seed and the step.
//! docs/checkpoints.md says it for users.

mod card;
mod checked_weights;
mod contents;
mod load;
pub mod manifest;

use std::path::{Path, PathBuf};

pub use card::{Card, Evaluated, Position};
pub use checked_weights::{CheckedWeights, find_weights, read_card};
pub use contents::{Contents, Label, Others, Snapshot, hand_in};
use paceline_system::disk::{Disk, DiskError};
use paceline_system::shell;

const WEIGHTS: &str = "weights.safetensors";
const STATE: &str = "state.safetensors";
const BEST: &str = "best.txt";
/// Keys of the files' metadata.
const POSITION_KEY: &str = "paceline.position";
const CARD_KEY: &str = "paceline.model";

/// What a checkpoint was wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To go on training.
    Resume,
    /// For its weights.
    Use,
}

/// The checkpoints of one run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    disk: Disk,
    folder: PathBuf,
}

impl Checkpoints {
    /// Those in a folder.
    pub fn new(disk: &Disk, folder: PathBuf) -> Self {
        Self { disk: disk.clone(), folder }
    }

    /// Saves, then removes what is neither among the last that are kept nor the best. Returns the checkpoint's folder.
    ///
    /// # Errors
    /// When the disk refuses; earlier checkpoints are untouched then.
    pub fn save(&self, contents: &Contents<'_>, label: &Label) -> Result<PathBuf, DiskError> {
        let step = label.position.step;
        let (target, part) = (self.folder.join(folder_name(step)), self.hidden(step, "part"));
        let published = contents.write(&self.disk, &part, label).and_then(|()| self.publish(step));
        if let Err(error) = published {
            // Best effort: the first failure is the one to tell.
            let _ = self.disk.remove(&part);
            return Err(error);
        }
        if label.best {
            self.mark_best(step)?;
        }
        self.prune(label.keep)?;
        Ok(target)
    }

    /// The folder of a step under a name that [`Checkpoints::list`] does not know.
    fn hidden(&self, step: u64, what: &str) -> PathBuf {
        self.folder.join(format!(".{}.{what}", folder_name(step)))
    }

    /// Marks a step's checkpoint as the best. A resumed run does it again, in case the mark was lost in a crash.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn mark_best(&self, step: u64) -> Result<(), DiskError> {
        let path = self.folder.join(folder_name(step));
        if self.disk.is_dir(&path) && self.best() != Some(path) {
            self.disk.write(&self.folder.join(BEST), folder_name(step).as_bytes())?;
        }
        Ok(())
    }

    /// Gives a finished folder its name. A step that is saved again, such as before and after its epoch's evaluation, takes the place of
    /// the folder that was there in one moment. Where the file system cannot, a crash between two renames leaves the old folder, whole, as
    /// `.step-N.swap`, which [`Checkpoints::clean_up`] brings back.
    fn publish(&self, step: u64) -> Result<(), DiskError> {
        let (target, part, swap) =
            (self.folder.join(folder_name(step)), self.hidden(step, "part"), self.hidden(step, "swap"));
        if !self.disk.is_dir(&target) {
            return self.disk.rename(&part, &target);
        }
        if self.disk.exchange(&part, &target).is_ok() {
            return self.disk.remove(&part);
        }
        self.disk.remove(&swap)?;
        self.disk.rename(&target, &swap)?;
        self.disk.rename(&part, &target).inspect_err(|_| {
            // The first failure is the one to tell; the old checkpoint has its name again, here or when the run is resumed.
            let _ = self.disk.rename(&swap, &target);
        })?;
        self.disk.remove(&swap)
    }

    /// Checkpoints, oldest first, with their steps.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>, DiskError> {
        let entries = self.disk.list(&self.folder)?.into_iter();
        let mut found: Vec<(u64, PathBuf)> = entries.filter_map(|path| Some((step_of(&path)?, path))).collect();
        found.retain(|(_, path)| self.disk.is_dir(path));
        found.sort();
        Ok(found)
    }

    /// The newest checkpoint.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn last(&self) -> Result<Option<PathBuf>, DiskError> {
        Ok(self.list()?.pop().map(|(_, path)| path))
    }

    /// The checkpoint with the best validation accuracy, if one was marked.
    pub fn best(&self) -> Option<PathBuf> {
        let name = self.disk.read_text(&self.folder.join(BEST)).ok()?;
        Some(self.folder.join(name.trim())).filter(|path| self.disk.is_dir(path))
    }

    /// A sentence on what is safe: for errors.
    pub fn survivor(&self) -> String {
        match self.last() {
            Ok(Some(path)) => format!("The last good checkpoint is {}", path.display()),
            _ => "There is no checkpoint yet".into(),
        }
    }

    /// A sentence on what to use instead of a checkpoint that cannot be used. It is only offered: which steps to lose is for the user to say.
    pub fn offer(&self, instead_of: &Path, purpose: Purpose) -> String {
        let others = self.list().unwrap_or_default().into_iter().rev();
        let mut others = others.filter(|(_, path)| path.file_name() != instead_of.file_name());
        match (others.find(|(_, path)| self.is_whole(path)), purpose) {
            (Some((step, path)), Purpose::Resume) => {
                let line = shell::resume_line(&path);
                format!("The last good checkpoint is of step {step}; to go on from it, type: {line}")
            }
            (Some((_, path)), Purpose::Use) => {
                let path = shell::quote(&path.display().to_string());
                format!("The last good checkpoint is {path}; type that instead")
            }
            (None, _) => format!("There is no other good checkpoint in {}", self.folder.display()),
        }
    }

    fn prune(&self, keep: usize) -> Result<(), DiskError> {
        let (all, best) = (self.list()?, self.best());
        let old = all.len().saturating_sub(keep);
        for (step, path) in all[..old].iter().filter(|(_, path)| Some(path) != best.as_ref()) {
            // Under a name that `list` does not know, so that a crash half-way leaves nothing that looks whole.
            let doomed = self.hidden(*step, "old");
            self.disk.remove(&doomed)?;
            self.disk.rename(path, &doomed)?;
            self.disk.remove(&doomed)?;
        }
        Ok(())
    }

    /// Removes what a process that was killed left half-written or half-removed, and brings back what it was about to replace. Only for
    /// whoever holds the run's lock.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn clean_up(&self) -> Result<(), DiskError> {
        for path in self.disk.list(&self.folder)? {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let hidden = name.strip_prefix(".step-").and_then(|rest| rest.rsplit_once('.'));
            match hidden {
                Some((number, "swap")) => {
                    let target = self.folder.join(format!("step-{number}"));
                    if self.disk.is_dir(&target) {
                        self.disk.remove(&path)?;
                    } else {
                        self.disk.rename(&path, &target)?;
                    }
                }
                Some((_, "part" | "old")) => self.disk.remove(&path)?,
                None if name.starts_with(BEST) && name.ends_with(".part") => self.disk.remove(&path)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Gives the checkpoints after a step other names, `step-N.replaced`: the run goes on from that step, and what came after it is no longer
    /// its future. Returns the new names.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn set_aside_after(&self, step: u64) -> Result<Vec<PathBuf>, DiskError> {
        let best = self.best();
        let mut renamed = Vec::new();
        for (later, path) in self.list()?.into_iter().filter(|(later, _)| *later > step) {
            let name = |number: u64| match number {
                1 => self.folder.join(format!("{}.replaced", folder_name(later))),
                _ => self.folder.join(format!("{}.replaced-{number}", folder_name(later))),
            };
            let free = (1..).map(name).find(|name| !self.disk.exists(name)).expect("an endless list");
            if best.as_ref() == Some(&path) {
                self.disk.remove(&self.folder.join(BEST))?;
            }
            self.disk.rename(&path, &free)?;
            renamed.push(free);
        }
        Ok(renamed)
    }
}

fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step that a checkpoint's folder is named after.
fn step_of(folder: &Path) -> Option<u64> {
    let digits = folder.file_name()?.to_str()?.strip_prefix("step-")?;
    digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of checkpoints that only have names.
    fn folder(names: &[&str]) -> (tempfile::TempDir, Checkpoints) {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            Disk::real().create_dir(&folder.path().join(name)).unwrap();
            Disk::real().write(&folder.path().join(name).join("file"), name.as_bytes()).unwrap();
        }
        let checkpoints = Checkpoints::new(&Disk::real(), folder.path().to_owned());
        (folder, checkpoints)
    }

    fn names(checkpoints: &Checkpoints) -> Vec<String> {
        let entries = Disk::real().list(&checkpoints.folder).unwrap();
        entries.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn what_a_crash_left_is_cleaned_up_and_what_it_was_about_to_replace_comes_back() {
        let left = [".step-00000001.old", ".step-00000002.part", ".step-00000003.swap", ".step-00000004.swap"];
        let (_folder, checkpoints) = folder(&left);
        Disk::real().create_dir(&checkpoints.folder.join("step-00000004")).unwrap();
        Disk::real().write(&checkpoints.folder.join("best.txt.17.part"), b"").unwrap();
        Disk::real().create_dir(&checkpoints.folder.join("my notes")).unwrap();
        checkpoints.clean_up().unwrap();
        assert_eq!(names(&checkpoints), ["my notes", "step-00000003", "step-00000004"]);
    }

    #[test]
    fn a_step_that_is_saved_again_takes_the_place_of_the_folder_that_was_there() {
        let (_folder, checkpoints) = folder(&["step-00000003", ".step-00000003.part"]);
        checkpoints.publish(3).unwrap();
        assert_eq!(names(&checkpoints), ["step-00000003"]);
        let text = Disk::real().read_text(&checkpoints.folder.join("step-00000003/file")).unwrap();
        assert_eq!(text, ".step-00000003.part");
    }

    #[test]
    fn a_future_that_is_being_replaced_is_kept_under_another_name() {
        let (_folder, checkpoints) = folder(&["step-00000001", "step-00000002", "step-00000003"]);
        checkpoints.mark_best(3).unwrap();
        assert_eq!(checkpoints.set_aside_after(1).unwrap().len(), 2);
        let expected = ["step-00000001", "step-00000002.replaced", "step-00000003.replaced"];
        assert_eq!(names(&checkpoints), expected, "the mark went with what it marked");
        assert_eq!(checkpoints.list().unwrap().len(), 1);
        Disk::real().create_dir(&checkpoints.folder.join("step-00000002")).unwrap();
        checkpoints.set_aside_after(1).unwrap();
        assert!(names(&checkpoints).contains(&"step-00000002.replaced-2".to_owned()));
    }
}
