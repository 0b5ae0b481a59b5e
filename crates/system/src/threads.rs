//! Threads that are not compute threads: loaders, writers, protocol shells. Each has a name that shows up in tools.

use std::thread::JoinHandle;

/// Starts a named thread.
///
/// # Errors
/// When the operating system refuses another thread.
pub fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}

/// How many threads can run at once here, by the scheduler's affinity mask and the container's quota.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// How many cores the machine has, whatever part of them this process may use.
pub fn available_to_host() -> usize {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let count = |range: &str| -> Option<usize> {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()?.saturating_sub(first.parse().ok()?) + 1)
    };
    let online: Option<usize> = text.trim().split(',').map(count).sum();
    online.filter(|&cores| cores > 0).unwrap_or_else(available)
}
