//! How the machine is built and what part of it this process may use: sockets, NUMA nodes, cores, memory, and the limits
//! of a container. What the system does not say stays zero or none.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::limits::Limits;
use crate::{cores, host, threads};

/// The machine's parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Processors.
    pub sockets: usize,
    /// NUMA nodes with cores that this process may use.
    pub nodes: usize,
    /// Physical cores.
    pub cores: usize,
    /// Threads that the cores run at once.
    pub threads: usize,
    /// Threads of the cores that this process may run on.
    pub allowed: usize,
    /// The same, if a container's quota is smaller.
    pub usable: usize,
    /// Memory that could be had now.
    pub memory_free_bytes: u64,
    /// What this process may use of all this, and who says so.
    pub limits: Limits,
}

impl Machine {
    /// Looks at this machine.
    pub fn look() -> Self {
        let (mut sockets, mut cores_seen) = (BTreeSet::new(), BTreeSet::new());
        for number in cores::online_numbers() {
            let topology = PathBuf::from(format!("/sys/devices/system/cpu/cpu{number}/topology"));
            sockets.insert(read(&topology.join("physical_package_id")));
            cores_seen.insert(read(&topology.join("thread_siblings_list")));
        }
        let allowed = cores::allowed();
        let nodes: BTreeSet<usize> = allowed.iter().map(|core| core.node).collect();
        Self {
            sockets: sockets.len(),
            nodes: nodes.len(),
            cores: cores_seen.len(),
            threads: cores::online(),
            allowed: allowed.len(),
            usable: threads::available(),
            memory_free_bytes: host::free_memory_bytes(),
            limits: Limits::look(),
        }
    }
}

/// Where the dynamic loader would find a library: in `LD_LIBRARY_PATH` or by its cache. It is not loaded.
pub fn find_library(name: &str) -> Option<PathBuf> {
    let listed = host::variable("LD_LIBRARY_PATH").unwrap_or_default();
    let listed = listed.split(':').filter(|folder| !folder.is_empty()).map(|folder| Path::new(folder).join(name));
    // The cache holds the paths of all libraries, each with a zero behind it.
    let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
    let ending = format!("/{name}");
    let cached = cache.split(|&byte| byte == 0).filter_map(|text| {
        let text = std::str::from_utf8(text).ok()?;
        Some(PathBuf::from(&text[text.find('/')?..])).filter(|_| text.ends_with(&ending))
    });
    listed.chain(cached).find(|path| path.exists())
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_has_parts_that_fit_together() {
        let machine = Machine::look();
        assert!(machine.sockets >= 1 && machine.nodes >= 1, "{machine:?}");
        assert!(machine.sockets <= machine.cores && machine.cores <= machine.threads, "{machine:?}");
        assert!(machine.usable <= machine.allowed && machine.allowed <= machine.threads, "{machine:?}");
        assert!(machine.memory_free_bytes > 0 && machine.memory_free_bytes <= host::Host::look().memory_bytes);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_is_found_where_the_loader_finds_it() {
        let c = find_library("libc.so.6");
        assert!(c.is_none_or(|path| path.is_absolute() && path.ends_with("libc.so.6")));
        assert_eq!(find_library("libno-such-thing.so.1"), None);
    }
}
