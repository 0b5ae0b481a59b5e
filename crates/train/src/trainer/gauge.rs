//! Looks at the GPU of a run about once a second, on a thread of its own: a step never waits for it.
//!
//! What was seen waits in a short queue until the journal writes its next event. A machine that cannot tell has no such thread for long.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use paceline_system::clock::Clock;
use paceline_system::event::GpuUse;
use paceline_system::threads;
use paceline_tensor::device::cuda::nvml::Monitor;

/// Between two looks. NVML itself takes the mean over about as long.
const EVERY: Duration = Duration::from_secs(1);

/// What may wait to be written: an evaluation of some minutes. Later ones are left out.
const WAITING_MAX: usize = 256;

/// Looks at a GPU until it is dropped.
#[derive(Debug)]
pub(super) struct Gauge {
    seen: Receiver<(f64, GpuUse)>,
    /// Its end tells the thread to end.
    _going: SyncSender<()>,
}

impl Gauge {
    /// Watches the GPU at this place on the bus; none if the system refuses a thread.
    pub fn of_gpu(bus: &str, clock: &Clock) -> Option<Self> {
        let bus = bus.to_owned();
        // Opening NVML takes a while, so the thread does it.
        Self::start(clock, EVERY, move || Monitor::open(&bus).map(|monitor| move || monitor.look()))
    }

    fn start<L: FnMut() -> GpuUse>(
        clock: &Clock,
        every: Duration,
        open: impl FnOnce() -> Option<L> + Send + 'static,
    ) -> Option<Self> {
        let ((to, seen), (going, ended)) = (sync_channel(WAITING_MAX), sync_channel(0));
        let clock = clock.clone();
        let body = move || {
            let Some(look) = open() else { return };
            watch(look, &clock, every, (&to, &ended));
        };
        threads::spawn("paceline-gauge", body).ok()?;
        Some(Self { seen, _going: going })
    }

    /// What was seen since the last call, and when.
    pub fn take(&self) -> impl Iterator<Item = (f64, GpuUse)> + '_ {
        self.seen.try_iter()
    }
}

fn watch(
    mut look: impl FnMut() -> GpuUse,
    clock: &Clock,
    every: Duration,
    (to, ended): (&SyncSender<(f64, GpuUse)>, &Receiver<()>),
) {
    while ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
        let seen = look();
        // A GPU that tells nothing is not worth a line.
        if seen != GpuUse::default()
            && matches!(to.try_send((clock.seconds(), seen)), Err(TrySendError::Disconnected(_)))
        {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const HOT: GpuUse =
        GpuUse { busy: Some(1.0), memory_used_bytes: None, memory_bytes: None, power_w: None, temperature_c: None };

    #[test]
    fn what_is_seen_waits_until_it_is_taken_and_the_thread_ends_with_its_owner() {
        let (alive, ended) = mpsc::channel::<()>();
        let gauge = Gauge::start(&Clock::real(), Duration::from_millis(1), move || {
            Some(move || {
                let _ = &alive;
                HOT
            })
        });
        let gauge = gauge.unwrap();
        let (_, first) = gauge.seen.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(first, HOT);
        drop(gauge);
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn a_machine_that_cannot_tell_is_asked_nothing() {
        let gauge = Gauge::start(&Clock::real(), Duration::from_millis(1), || None::<fn() -> GpuUse>).unwrap();
        assert_eq!(gauge.seen.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
        let silent = Gauge::start(&Clock::real(), Duration::from_millis(1), || Some(GpuUse::default)).unwrap();
        assert_eq!(silent.seen.recv_timeout(Duration::from_millis(50)), Err(RecvTimeoutError::Timeout));
    }

    #[test]
    fn a_full_queue_leaves_out_what_comes_later() {
        let ((to, seen), (going, ended)) = (sync_channel(2), sync_channel(0));
        let mut looks = 0;
        let mut going = Some(going);
        watch(
            || {
                looks += 1;
                if looks == 5 {
                    going = None;
                }
                HOT
            },
            &Clock::manual(),
            Duration::from_millis(1),
            (&to, &ended),
        );
        assert_eq!((looks, seen.try_iter().count()), (5, 2));
    }
}
