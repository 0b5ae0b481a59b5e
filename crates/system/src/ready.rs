//! Waiting until one of several sockets can be read or written, with a deadline.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Something to wait for.
#[derive(Clone, Copy, Debug)]
pub struct Interest<'a> {
    /// The socket or pipe. It is always watched for bytes to read, and for its end.
    pub fd: BorrowedFd<'a>,
    /// Whether to watch for room to write, too.
    pub write: bool,
}

/// Whether something can be read, or its end, at this moment.
pub fn is(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|count| count > 0)
}

/// Returns when something is ready or the time is over: which of them are.
pub fn wait(interests: &[Interest<'_>], limit: Duration) -> Vec<bool> {
    let flags = |interest: &Interest| if interest.write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    let mut fds: Vec<PollFd<'_>> =
        interests.iter().map(|interest| PollFd::from_borrowed_fd(interest.fd, flags(interest))).collect();
    let seconds = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
    let timeout = Timespec { tv_sec: seconds, tv_nsec: limit.subsec_nanos().into() };
    // A signal ends the wait early, which is fine: the caller looks at everything and waits again.
    let _ = poll(&mut fds, Some(&timeout));
    fds.iter().map(|fd| !fd.revents().is_empty()).collect()
}
