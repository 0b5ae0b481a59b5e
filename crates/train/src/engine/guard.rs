//! Looks after a replica's way to the other GPUs, on a thread of its own: a GPU waits for the others without
//! end, and so does whoever waits for that GPU. When something fails, somebody says stop or a step takes too
//! long, the guard leaves the group; all that waits then returns, and the replica asks here what happened
//! before it believes any result.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_comm::error::Party;
use paceline_comm::{CommError, Rank, Stop};
use paceline_system::clock::Clock;
use paceline_system::threads;

/// Between two looks: much less than the seconds after which heartbeats name a rank, and far too rare to be
/// felt.
const EVERY: Duration = Duration::from_millis(20);

/// When nothing is under way.
const IDLE: u64 = u64::MAX;

/// What ends every wait.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Set when another rank has failed.
    pub stop: Stop,
    /// How long the GPUs may take to meet.
    pub meeting: Duration,
    /// How long one step may take.
    pub step: Duration,
}

/// Why a replica left the others.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Trouble {
    Failed(String),
    Stopped(String),
    Late(Duration),
}

impl Trouble {
    fn error(&self, rank: Rank, phase: &'static str) -> CommError {
        match self.clone() {
            Self::Failed(what) => CommError::Failed { rank, phase, what },
            Self::Stopped(reason) => CommError::Stopped { rank, phase, reason },
            Self::Late(waited) => CommError::DeadlinePassed { rank, peer: Party::Anyone, phase, waited },
        }
    }
}

/// What to do about what is seen: an error of the group, a reason to stop, how long a step is under way.
fn judge(failed: Option<String>, stop: Option<&str>, under_way: Duration, limit: Duration) -> Option<Trouble> {
    // Who died is known better by those who say stop than by a connection that broke.
    if let Some(reason) = stop {
        return Some(Trouble::Stopped(reason.to_owned()));
    }
    failed.map(Trouble::Failed).or_else(|| (under_way > limit).then_some(Trouble::Late(under_way)))
}

/// Watches until it is dropped.
#[derive(Debug)]
pub(super) struct Guard {
    rank: Rank,
    clock: Clock,
    /// When the step under way began, in nanoseconds.
    began: Arc<AtomicU64>,
    trouble: Arc<OnceLock<Trouble>>,
    /// Its end tells the thread to end.
    going: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    /// Watches what `look` finds, and calls `leave` once if that, or one of the limits, ends the waiting.
    pub fn start(
        rank: Rank,
        limits: &Limits,
        look: impl Fn() -> Option<String> + Send + 'static,
        leave: impl FnOnce() + Send + 'static,
    ) -> Result<Self, CommError> {
        let (going, ended) = sync_channel(0);
        let (clock, limits) = (Clock::real(), limits.clone());
        let (began, trouble) = (Arc::new(AtomicU64::new(IDLE)), Arc::new(OnceLock::new()));
        let mut guard = Self { rank, clock, began, trouble, going: Some(going), thread: None };
        let (clock, began, trouble) = (guard.clock.clone(), Arc::clone(&guard.began), Arc::clone(&guard.trouble));
        let body = move || {
            while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let since = began.load(Ordering::SeqCst);
                let under_way = clock.now().saturating_sub(Duration::from_nanos(since));
                if let Some(found) = judge(look(), limits.stop.reason(), under_way, limits.step) {
                    let _ = trouble.set(found);
                    return leave();
                }
            }
        };
        let started = threads::spawn("paceline-guard", body);
        let refused = |source| CommError::System { rank, what: "start a thread", source };
        guard.thread = Some(started.map_err(refused)?);
        Ok(guard)
    }

    /// Does something that may wait for the others, and believes it only if nothing went wrong meanwhile.
    pub fn during<T, E: From<CommError>>(
        &self,
        phase: &'static str,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let looked = || self.trouble.get().map_or(Ok(()), |trouble| Err(trouble.error(self.rank, phase)));
        looked()?;
        self.began.store(self.clock.now().as_nanos() as u64, Ordering::SeqCst);
        let done = work();
        self.began.store(IDLE, Ordering::SeqCst);
        looked()?;
        done
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // What the thread holds of the group is given back before the process goes on to its end.
        self.going = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Runs what has no deadline of its own on a thread, and waits so long for it. A thread that never comes back
/// is left behind; the process ends with its error.
pub(super) fn within<T: Send + 'static>(
    (rank, phase): (Rank, &'static str),
    limits: &Limits,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, CommError> {
    let (done, result): (SyncSender<T>, Receiver<T>) = sync_channel(1);
    let body = move || {
        let _ = done.send(work());
    };
    threads::spawn(phase, body).map_err(|source| CommError::System { rank, what: "start a thread", source })?;
    let clock = Clock::real();
    loop {
        match result.recv_timeout(EVERY) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(CommError::Failed { rank, phase, what: "a thread ended early".into() });
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Some(trouble) = judge(None, limits.stop.reason(), clock.now(), limits.meeting) {
                    return Err(trouble.error(rank, phase));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn limits(meeting: Duration, step: Duration) -> Limits {
        Limits { stop: Stop::new(), meeting, step }
    }

    #[test]
    fn the_verdict_on_a_rank_goes_before_what_a_connection_says() {
        let second = Duration::from_secs(1);
        assert_eq!(judge(None, None, second, second), None);
        assert_eq!(judge(None, None, 2 * second, second), Some(Trouble::Late(2 * second)));
        assert_eq!(judge(Some("reset".into()), None, second, second), Some(Trouble::Failed("reset".into())));
        let stopped = Some(Trouble::Stopped("rank 2 is gone".into()));
        assert_eq!(judge(Some("reset".into()), Some("rank 2 is gone"), 2 * second, second), stopped);
    }

    /// Waits for the guard to leave, as a GPU would.
    fn caught(limits: &Limits, look: impl Fn() -> Option<String> + Send + 'static) -> String {
        let (left, leaving) = mpsc::channel();
        let guard = Guard::start(Rank(1), limits, look, move || left.send(()).unwrap()).unwrap();
        let done = guard.during("nccl", || {
            leaving.recv_timeout(LONG).unwrap();
            Ok::<_, CommError>("nothing worth having")
        });
        done.unwrap_err().to_string()
    }

    #[test]
    fn an_error_a_stop_and_a_step_that_takes_too_long_end_the_waiting_and_name_rank_and_phase() {
        let error = caught(&limits(LONG, LONG), || Some("remote error: rank 0 closed".into()));
        assert_eq!(error, "rank 1 failed in nccl: remote error: rank 0 closed");
        let stopped = limits(LONG, LONG);
        stopped.stop.set("rank 0 is gone");
        assert_eq!(caught(&stopped, || None), "rank 1 was stopped in nccl: rank 0 is gone");
        let error = caught(&limits(LONG, Duration::from_millis(30)), || None);
        assert!(
            error.starts_with("rank 1 waited ") && error.contains("for any rank in nccl: deadline passed"),
            "{error}"
        );
    }

    #[test]
    fn a_step_that_goes_well_is_believed_and_time_between_steps_does_not_count() {
        let guard =
            Guard::start(Rank(0), &limits(LONG, Duration::from_millis(500)), || None, || panic!("left")).unwrap();
        assert_eq!(guard.during("nccl", || Ok::<_, CommError>(7)).unwrap(), 7);
        paceline_system::clock::sleep(Duration::from_millis(700));
        assert_eq!(guard.during("nccl", || Ok::<_, CommError>(8)).unwrap(), 8);
    }

    #[test]
    fn a_meeting_that_never_ends_has_a_deadline() {
        let (_never, ever) = mpsc::channel::<()>();
        let who = (Rank(2), "nccl-join");
        let error = within(who, &limits(Duration::from_millis(30), LONG), move || ever.recv()).unwrap_err();
        assert!(error.to_string().contains("rank 2 waited") && error.to_string().contains("in nccl-join"), "{error}");
        assert_eq!(within(who, &limits(LONG, LONG), || 5).unwrap(), 5);
    }
}
