//! The control groups of a process, as `/proc/self/cgroup` and `/proc/self/mountinfo` tell of them: version 2, version 1, or
//! some controllers in one and some in the other.
//!
//! A group is a folder below a mount. Which one, follows from the group's path in its tree and from the part of the tree that
//! the mount shows: a container may see only its own part, by a bind mount or by a namespace of its own. Then the groups
//! above cannot be asked, and the mount's own folder is the highest that can.

use std::path::{Path, PathBuf};

/// More than any memory: what version 1 says for "no limit" is above this.
const UNLIMITED_BYTES: u64 = 1 << 60;

/// The folders to ask, from the process's own group up.
#[derive(Debug)]
pub(super) struct Groups {
    /// By version 2, for all controllers.
    unified: Vec<Group>,
    /// By version 1.
    memory: Vec<Group>,
    cpu: Vec<Group>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) folder: PathBuf,
    /// Its path below the mount.
    path: String,
}

impl Groups {
    /// The groups of this process, with `/proc` and `/sys` below a folder.
    pub fn look(root: &Path) -> Self {
        let (groups, mounts) = (read(&root.join("proc/self/cgroup")), read(&root.join("proc/self/mountinfo")));
        let of = |controller| {
            let found = chain(&groups, &mounts, controller).into_iter();
            let inside = |folder: PathBuf| folder.strip_prefix("/").map_or(folder.clone(), |folder| root.join(folder));
            found.map(|group| Group { folder: inside(group.folder), path: group.path }).collect()
        };
        Self { unified: of(None), memory: of(Some("memory")), cpu: of(Some("cpu")) }
    }

    /// The least memory that a group allows, and which.
    pub fn memory(&self) -> Option<(u64, String)> {
        let unified = self.unified.iter().map(|group| (bytes(&read(&group.folder.join("memory.max"))), group));
        let own = self.memory.iter().map(|group| (bytes(&read(&group.folder.join("memory.limit_in_bytes"))), group));
        // What holds for the innermost group counts groups above that cannot be seen.
        let inherited = self.memory.first().map(|group| {
            let stat = read(&group.folder.join("memory.stat"));
            let line = stat.lines().find_map(|line| line.strip_prefix("hierarchical_memory_limit "));
            (line.and_then(bytes), group)
        });
        let limits = unified.chain(own).chain(inherited);
        let limits = limits.filter_map(|(bytes, group)| Some((bytes?, group.path.clone())));
        limits.min_by_key(|(bytes, _)| *bytes)
    }

    /// The least processor time that a group allows, in cores, and which.
    pub fn quota(&self) -> Option<(f64, String)> {
        let unified = self.unified.iter().map(|group| (cpu_max(&read(&group.folder.join("cpu.max"))), group));
        let first = self.cpu.iter().map(|group| {
            let number = |name: &str| read(&group.folder.join(name)).parse::<f64>().ok();
            (ratio(number("cpu.cfs_quota_us"), number("cpu.cfs_period_us")), group)
        });
        let quotas = unified.chain(first).filter_map(|(cores, group)| Some((cores?, group.path.clone())));
        quotas.min_by(|one, other| one.0.total_cmp(&other.0))
    }
}

/// The folders of a process's group for a controller of version 1, or of version 2 (none), from its own up to the mount's.
/// Empty where there is no such tree.
pub(super) fn chain(groups: &str, mounts: &str, controller: Option<&str>) -> Vec<Group> {
    let named = |list: &str| controller.is_some_and(|name| list.split(',').any(|other| other == name));
    // Lines are `4:cpu,cpuacct:/a/b`, and `0::/a/b` for version 2.
    let path = groups.lines().find_map(|line| {
        let (list, path) = line.split_once(':')?.1.split_once(':')?;
        (named(list) || controller.is_none() && line.starts_with("0::")).then_some(path)
    });
    // Lines are `36 35 98:0 ROOT POINT OPTIONS [FIELDS] - TYPE SOURCE OPTIONS`.
    let mount = mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let (mut fields, mut kind) = (before.split(' ').skip(3), after.split(' '));
        let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
        let matches = match (kind.next()?, kind.nth(1)) {
            ("cgroup2", _) => controller.is_none(),
            ("cgroup", options) => options.is_some_and(named),
            _ => false,
        };
        matches.then_some((root, point))
    });
    let (Some(path), Some((root, point))) = (path, mount) else { return Vec::new() };
    // A group outside of what the mount shows: the mount's own folder is the nearest.
    let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
    let plain = below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
    let below = if plain { below } else { Path::new("") };
    let group = |below: &Path| Group { folder: Path::new(&point).join(below), path: format!("/{}", below.display()) };
    below.ancestors().map(group).collect()
}

/// The kernel writes a blank, a tab, a line's end and a backslash in a path as three octal digits.
fn unescape(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(field.to_owned(), |text, (code, sign)| text.replace(code, sign))
}

/// A limit in bytes; none for `max`, and for a number that is none.
fn bytes(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|&bytes| bytes < UNLIMITED_BYTES)
}

/// `50000 100000` is half a core; `max 100000` no limit.
fn cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    ratio(quota.parse().ok(), period.parse().ok())
}

/// Cores by a quota and its period; version 1 says −1 for "no limit".
fn ratio(quota: Option<f64>, period: Option<f64>) -> Option<f64> {
    quota.zip(period).filter(|&(quota, period)| quota > 0.0 && period > 0.0).map(|(quota, period)| quota / period)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}
