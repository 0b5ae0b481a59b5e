//! How much memory and processor time this process may use, and who says so: the machine, a control group, or `ulimit -v`.
//!
//! A container's limit is a control group's. It holds for everything below it, so every group from the process's own up to
//! the root of the tree is asked (`groups.rs`). Only hard limits count: what lies above a soft one is slower and not refused.

mod groups;

use std::fmt;
use std::path::Path;

use groups::Groups;

use crate::host;

/// Who sets a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The machine itself.
    Machine,
    /// A control group, by its path in the tree.
    Cgroup(String),
    /// `ulimit -v`, for every process by itself.
    Ulimit,
    /// The user, for every process by itself.
    Asked,
}

/// As the subject of a sentence with a number behind it: "the cgroup /x allows".
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => f.write_str("this machine has"),
            // A group's name is anybody's: nothing that a terminal would obey is shown.
            Self::Cgroup(path) => write!(f, "the cgroup {} allows", path.escape_debug()),
            Self::Ulimit => f.write_str("`ulimit -v` allows each process"),
            Self::Asked => f.write_str("--memory-limit allows each process"),
        }
    }
}

/// A limit on memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// So much may be used.
    pub bytes: u64,
    /// Who says so.
    pub source: Source,
}

/// A limit on processor time.
#[derive(Clone, Debug, PartialEq)]
pub struct Quota {
    /// So many cores' worth of it.
    pub cores: f64,
    /// The control group's path in the tree.
    pub group: String,
}

impl Quota {
    /// How many threads of each of so many processes can use it: rounded up, since one that waits a little is worth more
    /// than a share that nobody uses, and at least one.
    pub fn threads(&self, processes: usize) -> usize {
        (self.cores / processes.max(1) as f64).ceil().max(1.0) as usize
    }
}

/// What this process may use.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    /// Memory that it has together with the others on the machine or in the group; none where nobody says.
    pub shared: Option<Memory>,
    /// Addresses that it may have by itself, touched or not.
    pub own: Option<Memory>,
    /// Memory that it may hold by itself, because the user says so.
    pub asked: Option<Memory>,
    /// Processor time that it has together with the others in the group.
    pub quota: Option<Quota>,
}

impl Limits {
    /// Looks at this process.
    pub fn look() -> Self {
        Self::at(Path::new("/"), host::memory_bytes(), address_bytes())
    }

    /// As [`Limits::look`], with the files of `/proc` and `/sys` below another folder.
    fn at(root: &Path, machine_bytes: u64, address_bytes: Option<u64>) -> Self {
        let groups = Groups::look(root);
        let machine = (machine_bytes > 0).then_some(Memory { bytes: machine_bytes, source: Source::Machine });
        let group = groups.memory().map(|(bytes, path)| Memory { bytes, source: Source::Cgroup(path) });
        // Of equal limits the machine's is told: a group that allows all of it limits nothing.
        let shared = machine.into_iter().chain(group).min_by_key(|limit| limit.bytes);
        let own = address_bytes.map(|bytes| Memory { bytes, source: Source::Ulimit });
        let quota = groups.quota().map(|(cores, group)| Quota { cores, group });
        Self { shared, own, asked: None, quota }
    }

    /// The least of all limits on memory.
    pub fn memory(&self) -> Option<&Memory> {
        self.shared.iter().chain(&self.own).min_by_key(|limit| limit.bytes)
    }
}

/// `ulimit -v`, where there is one.
fn address_bytes() -> Option<u64> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    return rustix::process::getrlimit(rustix::process::Resource::As).current;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    None
}

/// Bytes as people say them: 600 MB, 19.7 GB.
pub fn in_words(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 0.9995e9 => format!("{:.0} MB", bytes / 1e6),
        bytes => format!("{:.1} GB", bytes / 1e9),
    }
}

#[cfg(test)]
mod tests;
