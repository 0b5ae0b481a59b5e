//! The compute threads of one CPU device.
//!
//! A kernel cuts its work into tasks whose results do not depend on who runs them; the pool hands task numbers out one
//! by one. So the bits of a result depend on the cut (a function of the shape) and never on the number of threads.
//! The caller works too. A waiting thread spins for a moment, because the next kernel is microseconds away, and then sleeps.
//!
//! Nobody waits for a thread that is not there: a helper joins a set of tasks while some are left, the caller
//! closes the set when there are none, and waits for those that joined. A helper that the system keeps from
//! running costs its share of the speed and no more.
//!
//! Threads may be bound to cores. Where these lie on several NUMA nodes, each node's threads begin with a part of the
//! tasks of their own, the same part of every kernel, so that they mostly meet memory that they touched before.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use paceline_system::cores::{self, Bound, Core};
use paceline_system::memory::OutOfMemory;

/// How often a waiting thread looks before it sleeps: about 50 µs, longer than the gap between two kernels of a step.
const SPINS: usize = 10_000;

/// Nodes that are told apart; the cores of more share numbers.
const NODES_MAX: usize = 16;

/// What the standard library asks of the system for a thread, unless `RUST_MIN_STACK` says otherwise.
const STACK_BYTES: usize = 2 << 20;

type Body<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A fixed set of threads that run the tasks of one kernel at a time.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<PoolState>,
    threads: Vec<JoinHandle<()>>,
    /// The core of each thread, the caller's first; empty if they are not bound.
    cores: Vec<usize>,
    /// Held while a kernel runs: two callers take turns, and a kernel that calls the pool again is a bug.
    turn: Mutex<()>,
}

struct PoolState {
    gate: Gate,
    set: UnsafeCell<Option<TaskSet>>,
    /// The next task of each node's part.
    next: [Counter; NODES_MAX],
    /// The node of each worker, from 0 on without gaps.
    node_of: Vec<usize>,
    nodes: usize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    bed: Mutex<()>,
    wake: Condvar,
}

/// A counter on a cache line of its own.
#[repr(align(64))]
#[derive(Default)]
struct Counter(AtomicUsize);

/// The number of the current set, how many helpers may still join it, and how many are at it, in one word:
/// 32, 16 and 16 bits.
#[derive(Default)]
struct Gate(AtomicU64);

impl Gate {
    const PLACE: u64 = 1 << 16;
    const PLACES: u64 = 0xffff << 16;
    const INSIDE: u64 = 0xffff;

    const fn number(state: u64) -> u64 {
        state >> 32
    }

    /// Begins the next set. Nobody is inside.
    fn open(&self, places: usize) {
        let number = Self::number(self.0.load(Ordering::Relaxed)) + 1;
        self.0.store(number << 32 | (places.min(0xffff) as u64 * Self::PLACE), Ordering::SeqCst);
    }

    /// Joins set `number`, if it is still open.
    fn join(&self, number: u64) -> bool {
        let enter =
            |state: u64| (Self::number(state) == number && state & Self::PLACES > 0).then(|| state - Self::PLACE + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, enter).is_ok()
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Lets nobody in any more and waits for those inside. All that they wrote is seen afterwards.
    fn close(&self) {
        let mut spins = 0;
        let mut state = self.0.fetch_and(!Self::PLACES, Ordering::AcqRel);
        while state & Self::INSIDE > 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
            state = self.0.load(Ordering::Acquire);
        }
    }
}

#[derive(Clone, Copy)]
struct TaskSet {
    body: *const Body<'static>,
    tasks: usize,
}

// SAFETY: `set` is written only by the caller that holds `turn`, while the gate is closed and nobody inside,
// and read by helpers that have joined through it with acquire ordering. `Body` is Sync, so it may be called
// from any thread.
unsafe impl Sync for PoolState {}
// SAFETY: as above; the raw pointer inside is only used while the caller of `Pool::run` keeps its target alive.
unsafe impl Send for PoolState {}

impl std::fmt::Debug for PoolState {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("PoolState").field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool in which `threads` threads work, the caller being one of them. The system decides where they run.
    ///
    /// # Panics
    /// When `threads` is 0, and with an [`OutOfMemory`] when the operating system refuses a thread.
    pub fn new(threads: usize) -> Self {
        Self::placed(threads, &[])
    }

    /// As [`Pool::new`], each thread bound to a core of its own among those that this process may use, if they are most of
    /// them; see [`cores::for_threads`]. The caller is bound while it is inside [`Pool::enter`].
    ///
    /// # Panics
    /// As [`Pool::new`].
    pub fn pinned(threads: usize) -> Self {
        let cores = cores::for_threads(&cores::allowed(), threads);
        Self::placed(threads, cores.as_deref().unwrap_or_default())
    }

    /// A pool on these cores, one for each thread, or anywhere if there are none.
    fn placed(threads: usize, cores: &[Core]) -> Self {
        assert!(threads > 0, "a pool needs at least one thread");
        let node_of = if cores.is_empty() { vec![0; threads] } else { node_numbers(cores) };
        let shared = Arc::new(PoolState {
            gate: Gate::default(),
            set: UnsafeCell::new(None),
            next: std::array::from_fn(|_| Counter::default()),
            nodes: node_of.iter().max().map_or(1, |last| last + 1),
            node_of,
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            bed: Mutex::new(()),
            wake: Condvar::new(),
        });
        let cores: Vec<usize> = cores.iter().map(|core| core.number).collect();
        let threads = (1..threads)
            .map(|worker| {
                let (shared, core) = (Arc::clone(&shared), cores.get(worker).copied());
                std::thread::Builder::new()
                    .name(format!("compute-{worker}"))
                    .spawn(move || {
                        let _bound = core.and_then(cores::bind);
                        shared.work(worker);
                    })
                    .unwrap_or_else(|_| OutOfMemory { what: "a compute thread", bytes: STACK_BYTES }.unwind())
            })
            .collect();
        Self { shared, threads, cores, turn: Mutex::new(()) }
    }

    /// The cores that the threads are bound to; none if the system decides.
    pub fn cores(&self) -> &[usize] {
        &self.cores
    }

    /// On how many NUMA nodes the threads are bound.
    pub fn nodes(&self) -> usize {
        self.shared.nodes
    }

    /// Binds the calling thread to its core as long as the answer lives, if the pool's threads are bound. Around a step
    /// and not around a kernel, because it costs system calls; not around the start of threads, which would be bound too.
    pub fn enter(&self) -> Option<Bound> {
        self.cores.first().copied().and_then(cores::bind)
    }

    /// Has memory that was not touched before touched by the threads that work on that part of a tensor, so that it lies
    /// near them. The memory is zeros, and stays so.
    pub fn touch(&self, zeros: &mut [f32]) {
        const PAGE: usize = 4096 / size_of::<f32>();
        if self.nodes() > 1 {
            let _bound = self.enter();
            self.chunks(zeros, 64 * PAGE, |_, piece| piece.iter_mut().step_by(PAGE).for_each(|first| *first = 0.0));
        }
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
        let set = TaskSet { body, tasks };
        self.shared.start(set, self.threads.len());
        let mine = catch_unwind(AssertUnwindSafe(|| self.shared.take_tasks(set, 0)));
        self.shared.gate.close();
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
        drop(self.shared.bed.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A helper's panic was reported by `run` already.
            let _ = thread.join();
        }
    }
}

/// Nodes counted from 0 without gaps, in the order of the cores.
fn node_numbers(cores: &[Core]) -> Vec<usize> {
    let mut known = Vec::new();
    let number = |core: &Core| {
        known.iter().position(|&node| node == core.node).unwrap_or_else(|| {
            known.push(core.node);
            known.len() - 1
        })
    };
    cores.iter().map(number).map(|number: usize| number % NODES_MAX).collect()
}

impl PoolState {
    fn start(&self, set: TaskSet, helpers: usize) {
        // SAFETY: the caller holds `turn` and the previous set was closed, so nobody reads `set` now.
        unsafe { *self.set.get() = Some(set) };
        for node in 0..self.nodes {
            self.next[node].0.store(self.part(set.tasks, node).start, Ordering::Relaxed);
        }
        let places = helpers.min(set.tasks - 1);
        self.gate.open(places);
        // Whoever goes to sleep counts itself first and then looks at the gate once more, so that one of the two sees the other.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.bed.lock().unwrap_or_else(PoisonError::into_inner));
            (0..places).for_each(|_| self.wake.notify_one());
        }
    }

    /// The tasks with which a node's threads begin.
    fn part(&self, tasks: usize, node: usize) -> Range<usize> {
        node * tasks / self.nodes..(node + 1) * tasks / self.nodes
    }

    /// Runs tasks until there are none: those of the own node, then those of others.
    fn take_tasks(&self, set: TaskSet, worker: usize) {
        // SAFETY: `Pool::run` keeps the body alive until its own call of this function has ended and all that joined
        // have left.
        let body = unsafe { &*set.body };
        for distance in 0..self.nodes {
            let node = (self.node_of[worker] + distance) % self.nodes;
            let end = self.part(set.tasks, node).end;
            loop {
                let task = self.next[node].0.fetch_add(1, Ordering::Relaxed);
                if task >= end {
                    break;
                }
                body(task, worker);
            }
        }
    }

    fn work(&self, worker: usize) {
        let mut seen = 0;
        while let Some(number) = self.next_job(seen) {
            seen = number;
            if !self.gate.join(number) {
                continue;
            }
            // SAFETY: this thread has joined, so `start` has written the set and does not touch it before it
            // leaves.
            let set = unsafe { *self.set.get() }.expect("a gate opens for a set");
            if catch_unwind(AssertUnwindSafe(|| self.take_tasks(set, worker))).is_err() {
                self.panicked.store(true, Ordering::SeqCst);
            }
            self.gate.leave();
        }
    }

    /// Waits for a set with another number; none when the pool ends.
    fn next_job(&self, seen: u64) -> Option<u64> {
        let look = || {
            let number = Gate::number(self.gate.0.load(Ordering::SeqCst));
            (number != seen).then_some(number)
        };
        for _ in 0..SPINS {
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            if let Some(number) = look() {
                return Some(number);
            }
            std::hint::spin_loop();
        }
        let mut bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            if self.stop.load(Ordering::SeqCst) {
                break None;
            }
            if let Some(number) = look() {
                break Some(number);
            }
            bed = self.wake.wait(bed).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        found
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

    /// A pool on cores that lie on as many nodes as there are different numbers; they may not exist.
    fn on_nodes(nodes: &[usize]) -> Pool {
        let cores = nodes.iter().enumerate().map(|(index, &node)| Core { number: 1 << 20 | index, node, sibling: 0 });
        Pool::placed(nodes.len(), &cores.collect::<Vec<_>>())
    }

    #[test]
    fn threads_of_several_nodes_run_every_task_once_and_begin_with_their_own() {
        let pool = on_nodes(&[4, 4, 7]);
        assert_eq!((pool.nodes(), &pool.shared.node_of[..]), (2, &[0, 0, 1][..]));
        assert_eq!([0, 1].map(|node| pool.shared.part(7, node)), [0..3, 3..7]);
        for tasks in [1, 2, 3, 7, 100] {
            let mut hits = vec![0u8; tasks];
            pool.chunks(&mut hits, 1, |_, piece| piece[0] += 1);
            assert!(hits.iter().all(|&hit| hit == 1));
        }
        let mut zeros = vec![0.0; 1 << 20];
        pool.touch(&mut zeros);
        assert!(zeros.iter().all(|&x| x == 0.0));
    }

    #[test]
    fn a_caller_does_not_wait_for_a_helper_that_does_not_come() {
        let gate = Gate::default();
        gate.open(3);
        let late = Gate::number(gate.0.load(Ordering::SeqCst));
        assert!(gate.join(late));
        gate.leave();
        gate.close();
        assert!(!gate.join(late), "the set is over");
        gate.open(1);
        assert!(!gate.join(late), "another set");
        assert!(gate.join(late + 1) && !gate.join(late + 1), "one place");
        gate.leave();
        gate.close();
    }

    #[test]
    fn bound_threads_run_on_their_cores_and_the_caller_is_freed() {
        let before = cores::allowed();
        let pool = Pool::pinned(before.len());
        if pool.cores().is_empty() {
            eprintln!("skipped: this process may use one core only, or the system does not say which");
            return;
        }
        assert_eq!(pool.cores().len(), before.len());
        let bound = pool.enter().expect("an allowed core");
        let meeting = std::sync::Barrier::new(pool.threads());
        pool.run(pool.threads(), |_, worker| {
            meeting.wait();
            let here: Vec<usize> = cores::allowed().iter().map(|core| core.number).collect();
            assert_eq!(here, [pool.cores()[worker]]);
        });
        drop(bound);
        assert_eq!(cores::allowed(), before);
    }
}
