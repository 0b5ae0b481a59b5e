//! Other processes: cores for them, signals to them, and an end that comes with their parent's.

use std::io;

use rustix::process::{Pid, Signal};
use rustix::thread::CpuSet;

/// The cores that this thread may run on.
pub fn cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

/// Keeps this thread, and threads and processes that it starts, on these cores.
///
/// # Errors
/// When the machine does not have them or the kernel refuses.
pub fn stay_on(cores: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().filter(|&&core| core < CpuSet::MAX_CPU).for_each(|&core| set.set(core));
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Seconds that all threads of this process have worked, on any core.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// What a process can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tell {
    /// Save and end: what Ctrl-C says.
    Interrupt,
    /// Save and end: what a terminal says that is closed.
    HangUp,
    /// End.
    Terminate,
    /// End at once.
    Kill,
    /// Stand still until told to go on.
    Stop,
    /// Go on.
    Continue,
}

/// Sends a signal to a process; one that is gone already is fine.
pub fn tell(pid: u32, what: Tell) {
    let signal = match what {
        Tell::Interrupt => Signal::INT,
        Tell::HangUp => Signal::HUP,
        Tell::Terminate => Signal::TERM,
        Tell::Kill => Signal::KILL,
        Tell::Stop => Signal::STOP,
        Tell::Continue => Signal::CONT,
    };
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Whether a process stands still because somebody told it to; false where the system does not say.
pub fn is_stopped(pid: u32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name of the program is in parentheses and may hold anything; the state follows.
    text.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

/// Asks the kernel to kill this process when its parent ends, however that ends. Returns whether `parent` is still the
/// parent: it may have ended before the kernel was asked.
///
/// # Errors
/// When the kernel refuses.
pub fn end_with(parent: u32) -> io::Result<bool> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(rustix::process::getppid().is_some_and(|pid| pid.as_raw_nonzero().get().unsigned_abs() == parent))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_is_seen() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let seen = |stopped: bool| {
            (0..1000).any(|_| {
                crate::clock::sleep(std::time::Duration::from_millis(5));
                is_stopped(child.id()) == stopped
            })
        };
        assert!(!is_stopped(child.id()) && !is_stopped(std::process::id()));
        tell(child.id(), Tell::Stop);
        assert!(seen(true));
        tell(child.id(), Tell::Continue);
        assert!(seen(false));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_stopped(child.id()));
    }
}
