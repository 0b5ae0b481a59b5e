//! The compute threads of one CPU device.
//!
//! A kernel cuts its work into tasks whose results do not depend on who runs them; the pool hands task numbers out one
//! by one. So the bits of a result depend on the cut (a function of the shape) and never on the number of threads.
//! The caller works too. A waiting thread spins for a moment, because the next kernel is microseconds away, and then sleeps.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// How often a waiting thread looks before it sleeps: about 50 µs, longer than the gap between two kernels of a step.
const SPINS: usize = 10_000;

type Body<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A fixed set of threads that run the tasks of one kernel at a time.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held while a kernel runs: two callers take turns, and a kernel that calls the pool again is a bug.
    turn: Mutex<()>,
}

struct Shared {
    /// Counts jobs; a change tells the threads that `job` is new.
    epoch: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    next: AtomicUsize,
    /// Helper threads that have not finished the current job.
    running: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    tasks: usize,
}

// SAFETY: `job` is written only by the caller that holds `turn`, while no helper runs (`running` is 0), and read by helpers
// after they saw the new `epoch` with acquire ordering. `Body` is Sync, so it may be called from any thread.
unsafe impl Sync for Shared {}
// SAFETY: as above; the raw pointer inside is only used while the caller of `Pool::run` keeps its target alive.
unsafe impl Send for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Shared").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool in which `threads` threads work, the caller being one of them.
    ///
    /// # Panics
    /// When `threads` is 0 or the operating system refuses a thread.
    pub fn new(threads: usize) -> Self {
        assert!(threads > 0, "a pool needs at least one thread");
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
        });
        let threads = (1..threads)
            .map(|worker| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("compute-{worker}"))
                    .spawn(move || shared.work(worker))
                    .expect("the operating system refused a compute thread")
            })
            .collect();
        Self { shared, threads, turn: Mutex::new(()) }
    }

    /// How many threads work, the caller included. Worker numbers given to tasks are below this.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `body(task, worker)` once for every task in `0..tasks`, and returns when all have ended. Within one
    /// call of `run`, no two tasks with the same `worker` run at the same time, so `worker` may choose a scratch buffer that
    /// belongs to the call; results must not depend on it.
    ///
    /// # Panics
    /// When a task panics.
    pub fn run(&self, tasks: usize, body: impl Fn(usize, usize) + Sync) {
        if tasks <= 1 || self.threads.is_empty() {
            (0..tasks).for_each(|task| body(task, 0));
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let body: *const Body<'_> = &raw const body as *const Body<'_>;
        // SAFETY: only the lifetime changes. This function does not return (or unwind) before every helper has stopped
        // using the pointer, so `body` outlives every use.
        let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        let job = Job { body, tasks };
        self.shared.start(job, self.threads.len());
        let mine = catch_unwind(AssertUnwindSafe(|| self.shared.take_tasks(job, 0)));
        self.shared.wait();
        let panicked = self.shared.panicked.swap(false, Ordering::SeqCst);
        drop(turn);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!panicked, "a compute thread panicked; its message is above");
    }

    /// Cuts `data` into pieces of `chunk` elements (the last may be shorter) and calls `body(index, piece)` for each.
    ///
    /// # Panics
    /// When `chunk` is 0 or a call panics.
    pub fn chunks<T: Send>(&self, data: &mut [T], chunk: usize, body: impl Fn(usize, &mut [T]) + Sync) {
        self.chunks_in_order(data, chunk, |index, _| index, body);
    }

    /// As [`Pool::chunks`], the last piece first: what was written in order has its end still in the caches.
    ///
    /// # Panics
    /// As [`Pool::chunks`].
    pub fn chunks_backwards<T: Send>(&self, data: &mut [T], chunk: usize, body: impl Fn(usize, &mut [T]) + Sync) {
        self.chunks_in_order(data, chunk, |index, count| count - 1 - index, body);
    }

    /// `order(i, count)` is the piece that is handed out i-th; it gives each piece once.
    fn chunks_in_order<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        order: impl Fn(usize, usize) -> usize + Sync,
        body: impl Fn(usize, &mut [T]) + Sync,
    ) {
        assert!(chunk > 0, "chunks need a length");
        let (length, base) = (data.len(), SendPointer(data.as_mut_ptr()));
        let count = length.div_ceil(chunk);
        self.run(count, |task, _| {
            let index = order(task, count);
            let start = index * chunk;
            // SAFETY: `start < length`, the pieces of different indices do not overlap, each index is run once, and
            // `data` is borrowed mutably until `run` returns.
            let piece = unsafe { std::slice::from_raw_parts_mut(base.get().add(start), chunk.min(length - start)) };
            body(index, piece);
        });
    }

    /// As [`Pool::chunks`] over two slices at once, cut into the same number of pieces.
    ///
    /// # Panics
    /// When the slices do not give the same number of pieces, or a call panics.
    pub fn chunks2<T: Send, U: Send>(
        &self,
        (first, first_chunk): (&mut [T], usize),
        (second, second_chunk): (&mut [U], usize),
        body: impl Fn(usize, &mut [T], &mut [U]) + Sync,
    ) {
        assert_eq!(first.len().div_ceil(first_chunk), second.len().div_ceil(second_chunk), "pieces must pair up");
        let (length, base) = (second.len(), SendPointer(second.as_mut_ptr()));
        self.chunks(first, first_chunk, |index, piece| {
            let start = index * second_chunk;
            // SAFETY: as in `chunks`, for the second slice.
            let other =
                unsafe { std::slice::from_raw_parts_mut(base.get().add(start), second_chunk.min(length - start)) };
            body(index, piece, other);
        });
    }

    /// As [`Pool::chunks2`] over three slices.
    ///
    /// # Panics
    /// When the slices do not give the same number of pieces, or a call panics.
    pub fn chunks3<T: Send, U: Send, V: Send>(
        &self,
        first: (&mut [T], usize),
        second: (&mut [U], usize),
        (third, third_chunk): (&mut [V], usize),
        body: impl Fn(usize, &mut [T], &mut [U], &mut [V]) + Sync,
    ) {
        assert_eq!(first.0.len().div_ceil(first.1), third.len().div_ceil(third_chunk), "pieces must pair up");
        let (length, base) = (third.len(), SendPointer(third.as_mut_ptr()));
        self.chunks2(first, second, |index, piece, other| {
            let start = index * third_chunk;
            // SAFETY: as in `chunks`, for the third slice.
            let last =
                unsafe { std::slice::from_raw_parts_mut(base.get().add(start), third_chunk.min(length - start)) };
            body(index, piece, other, last);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        drop(self.shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A helper's panic was reported by `run` already.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn start(&self, job: Job, helpers: usize) {
        // SAFETY: the caller holds `turn` and the previous job has ended, so nobody reads `job` now.
        unsafe { *self.job.get() = Some(job) };
        self.next.store(0, Ordering::Relaxed);
        self.running.store(helpers, Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::SeqCst);
        if *self.sleepers.lock().unwrap_or_else(PoisonError::into_inner) > 0 {
            self.wake.notify_all();
        }
    }

    fn take_tasks(&self, job: Job, worker: usize) {
        // SAFETY: `Pool::run` keeps the body alive until `running` is 0 and its own call of this function has ended.
        let body = unsafe { &*job.body };
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= job.tasks {
                return;
            }
            body(task, worker);
        }
    }

    fn wait(&self) {
        let mut spins = 0;
        while self.running.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            seen = self.next_epoch(seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // SAFETY: the epoch changed, so `start` has written the job and will not touch it before `running` is 0.
            let job = unsafe { *self.job.get() }.expect("an epoch begins with a job");
            if catch_unwind(AssertUnwindSafe(|| self.take_tasks(job, worker))).is_err() {
                self.panicked.store(true, Ordering::SeqCst);
            }
            self.running.fetch_sub(1, Ordering::Release);
        }
    }

    fn next_epoch(&self, seen: u64) -> u64 {
        for _ in 0..SPINS {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        *sleepers += 1;
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                *sleepers -= 1;
                return epoch;
            }
            sleepers = self.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A pointer that tasks may carry; whoever uses it shows why the accesses do not overlap.
#[derive(Debug)]
pub struct SendPointer<T>(pub *mut T);

// SAFETY: a pointer is only an address; each use states its own reason.
unsafe impl<T> Send for SendPointer<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SendPointer<T> {}

impl<T> Clone for SendPointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SendPointer<T> {}

impl<T> SendPointer<T> {
    /// The address. A method, so that closures capture the wrapper and not the bare pointer.
    pub fn get(self) -> *mut T {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_over_many_jobs() {
        for threads in 1..=4 {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 7, 100] {
                for _ in 0..50 {
                    let mut hits = vec![0u8; tasks];
                    pool.chunks(&mut hits, 1, |_, piece| piece[0] += 1);
                    assert!(hits.iter().all(|&hit| hit == 1));
                }
            }
        }
    }

    #[test]
    fn workers_are_told_apart() {
        let pool = Pool::new(3);
        let busy: Vec<AtomicBool> = (0..3).map(|_| AtomicBool::new(false)).collect();
        pool.run(1000, |_, worker| {
            assert!(!busy[worker].swap(true, Ordering::SeqCst), "two tasks with one worker number at once");
            std::hint::spin_loop();
            busy[worker].store(false, Ordering::SeqCst);
        });
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(2);
        let attempt = catch_unwind(AssertUnwindSafe(|| pool.run(64, |task, _| assert!(task != 33))));
        assert!(attempt.is_err());
        let count = AtomicUsize::new(0);
        pool.run(10, |_, _| {
            count.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(count.into_inner(), 10);
    }

    #[test]
    fn a_sleeping_pool_wakes_up() {
        let pool = Pool::new(2);
        let clock = std::time::Instant::now();
        while clock.elapsed().as_millis() < 20 {
            std::thread::yield_now();
        }
        let mut data = vec![1u64; 1000];
        pool.chunks(&mut data, 10, |index, piece| piece.fill(index as u64));
        assert_eq!(data[999], 99);
    }
}
