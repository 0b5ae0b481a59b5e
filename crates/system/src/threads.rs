//! Threads that are not compute threads: loaders, writers, protocol shells. Each has a name that shows up in tools.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

use crate::cores;
use crate::limits::Limits;
use crate::memory::OutOfMemory;

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

/// Does something with each of a few, all at once; the last one on the caller's own thread.
///
/// # Panics
/// When one of them does, or no thread can be had.
pub fn all<T: Send, R: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut items: Vec<T> = items.collect();
    let Some(last) = items.pop() else { return Vec::new() };
    let work = &work;
    std::thread::scope(|scope| {
        let others: Vec<_> = items.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        let last = work(last);
        let join = |other: std::thread::ScopedJoinHandle<'_, R>| match other.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        others.into_iter().map(join).chain([last]).collect()
    })
}

/// Does something that may panic.
///
/// # Errors
/// When it did: in the words of the panic. What was being done is then half done, and must not be used.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let words = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
        let refused = panic.downcast_ref::<OutOfMemory>().map(ToString::to_string);
        refused.or_else(|| words.map(str::to_owned)).unwrap_or_else(|| "it did not say why".into())
    })
}

/// How many compute threads leave room for so many loaders: on more than four cores a core for each, up to a quarter of
/// them. A loader that shares a core with a compute thread makes all the others wait for that one; with few cores, their
/// work is worth more than the wait.
pub fn beside_loaders(loaders: usize) -> usize {
    compute(available(), loaders)
}

/// As [`beside_loaders`], in each of so many processes that share a container's quota.
pub fn beside_loaders_among(loaders: usize, processes: usize) -> usize {
    compute(available_among(processes), loaders)
}

/// As [`beside_loaders`], in each of so many processes between which the cores that are free here will be shared out.
pub fn beside_loaders_sharing(loaders: usize, processes: usize) -> usize {
    compute((available() / processes.max(1)).max(1), loaders)
}

const fn compute(cores: usize, loaders: usize) -> usize {
    let spare = if cores <= 4 { 0 } else { cores / 4 };
    cores - if loaders < spare { loaders } else { spare }
}

/// How many threads can run at once here, by the scheduler's affinity mask and the container's quota.
pub fn available() -> usize {
    available_among(1)
}

/// As [`available`], in each of so many processes that share the quota. Each has cores of its own already, if it is bound.
pub fn available_among(processes: usize) -> usize {
    let allowed = match cores::allowed_count() {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        count => count,
    };
    Limits::look().quota.map_or(allowed, |quota| quota.threads(processes).min(allowed))
}

/// Seconds that the calling thread has worked: on a core, not waiting.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_caught_with_its_words() {
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(caught(|| -> u8 { panic!("plain") }), Err("plain".into()));
        assert_eq!(caught(|| -> u8 { panic!("number {}", 3) }), Err("number 3".into()));
        let refused = OutOfMemory { what: "a test", bytes: 5 };
        assert!(caught(|| -> u8 { refused.unwind() }).unwrap_err().starts_with("no memory for a test"));
    }

    #[test]
    fn loaders_get_cores_where_there_are_many() {
        let table =
            [(1, 1, 1), (2, 1, 2), (4, 4, 4), (5, 1, 4), (8, 1, 7), (8, 2, 6), (8, 8, 6), (64, 4, 60), (64, 0, 64)];
        for (cores, loaders, expected) in table {
            assert_eq!(compute(cores, loaders), expected, "{loaders} loaders on {cores} cores");
        }
    }
}
