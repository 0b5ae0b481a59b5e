//! Limits of machines that are folders of files, and of this one.

use super::groups::{Group, chain};
use super::*;

/// Files below a folder that stands for `/`.
fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = root.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    root
}

const UNIFIED: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const FIRST: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
    32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
    35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
const GIB: u64 = 1 << 30;

fn folders(groups: &[Group]) -> Vec<String> {
    groups.iter().map(|group| group.folder.display().to_string()).collect()
}

#[test]
fn every_group_of_version_2_up_the_tree_counts() {
    let root = machine(&[
        ("proc/self/cgroup", "0::/jobs/a/b\n"),
        ("proc/self/mountinfo", UNIFIED),
        ("sys/fs/cgroup/jobs/a/b/memory.max", "max\n"),
        ("sys/fs/cgroup/jobs/a/b/cpu.max", "350000 100000\n"),
        ("sys/fs/cgroup/jobs/a/memory.max", "600000000\n"),
        ("sys/fs/cgroup/jobs/a/cpu.max", "150000 100000\n"),
        ("sys/fs/cgroup/jobs/memory.max", "8000000000\n"),
        ("sys/fs/cgroup/jobs/memory.high", "1000\n"),
        ("sys/fs/cgroup/jobs/cpu.max", "max 100000\n"),
    ]);
    let limits = Limits::at(root.path(), 16 * GIB, None);
    assert_eq!(limits.shared, Some(Memory { bytes: 600_000_000, source: Source::Cgroup("/jobs/a".into()) }));
    assert_eq!(limits.quota, Some(Quota { cores: 1.5, group: "/jobs/a".into() }));
    assert_eq!(limits.quota.unwrap().threads(1), 2, "rounded up");
}

#[test]
fn version_1_and_both_at_once_are_understood() {
    let both = format!("{FIRST}41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    let root = machine(&[
        ("proc/self/cgroup", "9:name=systemd:/\n4:memory:/x/y\n1:cpu,cpuacct:/z\n0::/u\n"),
        ("proc/self/mountinfo", &both),
        ("sys/fs/cgroup/memory/x/y/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2147483648\n"),
        ("sys/fs/cgroup/cpu,cpuacct/z/cpu.cfs_quota_us", "50000\n"),
        ("sys/fs/cgroup/cpu,cpuacct/z/cpu.cfs_period_us", "100000\n"),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ("sys/fs/cgroup/unified/u/memory.max", "3000000000\n"),
    ]);
    let limits = Limits::at(root.path(), 16 * GIB, None);
    assert_eq!(limits.shared, Some(Memory { bytes: 2 * GIB, source: Source::Cgroup("/x".into()) }));
    assert_eq!(limits.quota, Some(Quota { cores: 0.5, group: "/z".into() }));
    assert_eq!(limits.quota.unwrap().threads(1), 1, "at least one");
}

#[test]
fn a_container_that_sees_its_own_part_of_the_tree_is_understood() {
    // A bind mount of the container's group, whose path is told from the host's root.
    let bound = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let groups = "4:memory:/docker/abc/inner\n";
    let found = chain(groups, bound, Some("memory"));
    assert_eq!(folders(&found), ["/sys/fs/cgroup/memory/inner", "/sys/fs/cgroup/memory/"]);
    // A namespace: the group is outside of it, or its path cannot be followed.
    for groups in ["0::/../../other\n", "0::/\n", "0::/nowhere\n"] {
        let mounts = "29 23 0:26 /../../x /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(folders(&chain(groups, mounts, None)), ["/sys/fs/cgroup/"], "{groups}");
    }
    // The limit of a group above, which only the innermost group's statistics tell.
    let root = machine(&[
        ("proc/self/cgroup", groups),
        ("proc/self/mountinfo", bound),
        ("sys/fs/cgroup/memory/inner/memory.stat", "cache 0\nhierarchical_memory_limit 1000000000\n"),
    ]);
    let limits = Limits::at(root.path(), GIB, None);
    assert_eq!(limits.shared.unwrap().source, Source::Cgroup("/inner".into()));
}

#[test]
fn the_least_limit_is_told_with_its_source() {
    let none = machine(&[]);
    let limits = Limits::at(none.path(), 4 * GIB, None);
    assert_eq!(limits.memory(), Some(&Memory { bytes: 4 * GIB, source: Source::Machine }));
    let limits = Limits::at(none.path(), 4 * GIB, Some(GIB));
    assert_eq!(limits.memory(), Some(&Memory { bytes: GIB, source: Source::Ulimit }));
    assert_eq!(Limits::at(none.path(), 0, None), Limits::default());
    let whole = machine(&[
        ("proc/self/cgroup", "0::/\n"),
        ("proc/self/mountinfo", UNIFIED),
        ("sys/fs/cgroup/memory.max", "4294967296\n"),
    ]);
    assert_eq!(Limits::at(whole.path(), 4 * GIB, None).memory().unwrap().source, Source::Machine);
}

#[test]
fn files_that_make_no_sense_are_passed_over() {
    for (groups, mounts) in [("", ""), ("0:/x\n:::\n0::/x", "a b\n - \n1 2 3 - cgroup2"), ("0::/x", " - cgroup2 c o")] {
        assert!(chain(groups, mounts, None).is_empty() && chain(groups, mounts, Some("cpu")).is_empty());
    }
    let root = machine(&[
        ("proc/self/cgroup", "0::/x\n"),
        ("proc/self/mountinfo", UNIFIED),
        ("sys/fs/cgroup/x/memory.max", "lots\n"),
        ("sys/fs/cgroup/x/cpu.max", "0 0\n"),
    ]);
    assert_eq!(Limits::at(root.path(), 0, None), Limits::default());
    let spaced = "29 23 0:26 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw\n";
    assert_eq!(folders(&chain("0::/", spaced, None)), ["/sys/fs/c group/"]);
}

#[test]
fn a_quota_is_shared_by_processes() {
    let quota = Quota { cores: 6.0, group: "/".into() };
    assert_eq!([1, 2, 4, 6, 7, 0].map(|processes| quota.threads(processes)), [6, 3, 2, 1, 1, 6]);
}

#[test]
fn bytes_are_said_as_people_do() {
    let table = [(600_000_000, "600 MB"), (999_600_000, "1.0 GB"), (19_700_000_000, "19.7 GB"), (0, "0 MB")];
    for (bytes, words) in table {
        assert_eq!(in_words(bytes), words);
    }
}

#[test]
fn a_group_with_a_name_that_a_terminal_would_obey_is_shown_escaped() {
    let shown = Source::Cgroup("/a\u{1b}[31m".into()).to_string();
    assert!(!shown.contains('\u{1b}') && shown.contains("[31m"), "{shown}");
}

#[cfg(target_os = "linux")]
#[test]
fn this_process_has_some_memory() {
    let limits = Limits::look();
    assert!(limits.memory().is_some_and(|limit| limit.bytes > 0), "{limits:?}");
}
