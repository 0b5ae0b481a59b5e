//! What machine this is: for the event log, the report and the bounds that measurements are compared with.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The machine a run was made on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The machine's name.
    pub name: String,
    /// The processor's model name.
    pub cpu: String,
    /// Threads that can run at once.
    pub cores: usize,
    /// Physical memory.
    pub memory_bytes: u64,
    /// Operating system and architecture.
    pub system: String,
    /// The GPU that the process computes on, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
}

impl Host {
    /// Looks at this machine. What cannot be found out stays empty or zero.
    pub fn look() -> Self {
        let uname = rustix::system::uname();
        Self {
            name: uname.nodename().to_string_lossy().into_owned(),
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_default(),
            cores: crate::threads::available(),
            memory_bytes: memory_bytes(),
            system: format!("{} {}", uname.sysname().to_string_lossy(), uname.machine().to_string_lossy()),
            gpu: None,
        }
    }
}

/// What an environment variable says, if it is set and not empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The environment of this process; what is not text is left out.
pub fn variables() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// The path of the binary that runs.
///
/// # Errors
/// When the operating system does not say.
pub fn own_program() -> std::io::Result<PathBuf> {
    std::env::current_exe()
}

/// The folder this process works in.
///
/// # Errors
/// When it has been removed.
pub fn own_folder() -> std::io::Result<PathBuf> {
    std::env::current_dir()
}

/// What is the same for two processes exactly if they run on one machine and see the same network: the boot, the name and
/// the network namespace.
pub fn node_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{}/{name}/{}", boot.trim(), network.display())
}

/// Physical memory; zero where the system does not say.
pub fn memory_bytes() -> u64 {
    kilobytes("/proc/meminfo", "MemTotal")
}

/// Memory that could be had now without taking any from another process.
pub fn free_memory_bytes() -> u64 {
    kilobytes("/proc/meminfo", "MemAvailable")
}

/// The most memory this process has held so far.
pub fn peak_memory_bytes() -> u64 {
    kilobytes("/proc/self/status", "VmHWM")
}

fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn kilobytes(path: &str, name: &str) -> u64 {
    let value = field(path, name).unwrap_or_default();
    value.split(' ').next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cores_and_a_name() {
        let host = Host::look();
        assert!(host.cores >= 1);
        assert!(!host.name.is_empty() && !host.system.is_empty());
    }
}
