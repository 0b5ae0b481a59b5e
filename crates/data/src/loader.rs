//! The loader: makes batches ahead of training on threads of its own and hands them over strictly in order.
//!
//! Every thread takes the next step's number, makes that batch whole and puts it on a shelf; training takes them from
//! the shelf by number. A bounded number of batches is made or waiting at any moment, and their buffers come back
//! through [`Epoch::recycle`], so batches are allocated only while the first ones are made. An error, or a panic while a
//! batch is made, takes the place of the batch it belongs to. Which thread made a batch changes nothing: a batch is a
//! pure function of (seed, epoch, step, rank).
//!
//! A thread inside a disk that hangs cannot be ended. Training gives up on it after a deadline, or at once when the user
//! asks for a stop, and the dropped loader leaves it behind.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_system::clock::Clock;
use paceline_system::signal::Stop;
use paceline_system::threads;

use crate::augment::{Augment, Scratch};
use crate::batch::{Batch, Recipe};
use crate::order::{self, LastBatch, Layout, Order, Portion, Shard};
use crate::{DataError, Dataset};

/// How often a waiting consumer looks whether its deadline has passed or a stop was asked for.
const LOOK: Duration = Duration::from_millis(100);

/// How long a dropped loader waits for its threads. Making one batch takes much less; a hung disk takes forever.
const FAREWELL: Duration = Duration::from_secs(2);

/// Hands out the portions of a stretch of an epoch, each to one rank.
pub trait Portions: std::fmt::Debug + Send + Sync {
    /// The number of the next one, for this rank alone, which has finished so many of those before; none when all are
    /// taken, and from then on. May wait.
    ///
    /// # Errors
    /// When whoever hands them out cannot be asked.
    fn next(&self, finished: usize) -> Result<Option<usize>, DataError>;
}

/// How batches are made.
#[derive(Clone, Debug)]
pub struct LoaderOptions {
    /// The run's seed.
    pub seed: u64,
    /// Samples per batch of all ranks.
    pub batch: usize,
    /// Which rank of how many.
    pub shard: Shard,
    /// Whether epochs are shuffled.
    pub shuffle: bool,
    /// What happens to samples that fill no batch.
    pub last: LastBatch,
    /// Threads that make batches.
    pub threads: usize,
    /// Batches that may be made or waiting at once; at least two for each thread, so that none has to rest.
    pub prefetch: usize,
    /// How long training waits for one batch before it gives up.
    pub deadline: Duration,
    /// What ends a wait before its deadline.
    pub stop: Option<Stop>,
    /// Ranks whose parts of a batch are one to the others: what each has counts among theirs.
    pub group: usize,
    /// Whether the device has the images: batches then say how to look at them.
    pub views: bool,
}

impl LoaderOptions {
    /// For training: shuffled, every sample once.
    pub fn training(batch: usize, seed: u64) -> Self {
        let (shard, last, deadline) = (Shard::WHOLE, LastBatch::Keep, Duration::from_secs(600));
        let (threads, prefetch, group) = (1, 4, 1);
        Self { seed, batch, shard, shuffle: true, last, threads, prefetch, deadline, stop: None, group, views: false }
    }

    /// For evaluation: in file order, every sample once.
    pub fn evaluation(batch: usize) -> Self {
        Self { shuffle: false, ..Self::training(batch, 0) }
    }
}

/// A data set as a stream of batches. Dropping it ends its threads.
#[derive(Debug)]
pub struct Loader {
    shared: Arc<LoaderState>,
    threads: Vec<JoinHandle<()>>,
    order: Order,
    /// How many samples of a whole batch each rank has, where they are not shared evenly.
    lengths: Option<Arc<[usize]>>,
    clock: Clock,
    waited: Duration,
}

#[derive(Debug)]
struct LoaderState {
    dataset: Arc<Dataset>,
    augment: Augment,
    options: LoaderOptions,
    layout: Layout,
    desk: Mutex<Desk>,
    /// Signalled when there may be work: an epoch began, a batch was taken, or the loader closes.
    work: Condvar,
    /// Signalled when a batch was put on the shelf.
    ready: Condvar,
}

/// What the threads and training share.
#[derive(Debug, Default)]
struct Desk {
    /// Counts epochs begun, so that a batch of an abandoned one is not mistaken for one of the next.
    ticket: u64,
    epoch_work: Option<Arc<EpochWork>>,
    /// The next step to be made, and the next to be handed over.
    to_make: usize,
    to_give: usize,
    shelf: BTreeMap<usize, Result<Batch, DataError>>,
    free: Vec<Batch>,
    /// Whether a thread asks for a portion, and how many batches there are in all once none is left.
    asks: bool,
    ended: Option<usize>,
    closed: bool,
    /// Threads that have left since it closed.
    left: usize,
}

/// The batches of an epoch that are still to be made.
#[derive(Debug)]
struct EpochWork {
    number: u64,
    order: order::Epoch,
    steps: usize,
    /// What the run calls step 0 of this epoch.
    first_step: usize,
    /// Who hands out portions, if this rank has none of its own.
    portions: Option<Arc<dyn Portions>>,
    /// [`Loader::share_by`].
    lengths: Option<Arc<[usize]>>,
}

/// What a loader's thread does next.
enum Job {
    /// Makes the batch of this step.
    Make(usize),
    /// Asks for a portion.
    Ask(Arc<dyn Portions>),
}

impl Loader {
    /// Starts the threads; they rest until [`Loader::epoch`].
    ///
    /// # Errors
    /// When the batch does not fit the set, the augmentation leaves images of many sizes, or a thread cannot be started.
    pub fn new(
        dataset: Arc<Dataset>,
        augment: Augment,
        options: LoaderOptions,
        clock: Clock,
    ) -> Result<Self, DataError> {
        let layout = Layout { batch: options.batch, shard: options.shard, last: options.last };
        layout.check(dataset.len())?;
        if dataset.sizes_vary() && !augment.fixes_size() {
            return Err(DataError::refused(
                "images of many sizes do not stack; add a resize or a crop to the augmentation",
            ));
        }
        assert!(!options.views || augment.is_view(), "views are for augmentations that are one");
        let order = Order { seed: options.seed, len: dataset.len(), shuffle: options.shuffle };
        let count = options.threads.max(1);
        let (desk, work, ready) = (Mutex::default(), Condvar::new(), Condvar::new());
        let shared = Arc::new(LoaderState { dataset, augment, options, layout, desk, work, ready });
        let mut loader = Self { shared, threads: Vec::new(), order, lengths: None, clock, waited: Duration::ZERO };
        for number in 0..count {
            let shared = Arc::clone(&loader.shared);
            let thread =
                threads::spawn(&format!("loader-{number}"), move || shared.run()).map_err(DataError::Thread)?;
            loader.threads.push(thread);
        }
        Ok(loader)
    }

    /// Steps in a whole epoch.
    pub fn steps(&self) -> usize {
        self.shared.layout.steps(self.order.len)
    }

    /// What the loader reads.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.shared.dataset
    }

    /// The batches of an epoch from step `from_step` on: the same ones, bit for bit, that a run never stopped would get.
    pub fn epoch(&mut self, epoch: u64, from_step: usize) -> Epoch<'_> {
        let seen = from_step.saturating_mul(self.shared.layout.batch);
        self.epoch_after(epoch, seen, from_step)
    }

    /// The batches of an epoch once `seen` of its samples were seen, in batches of any size by a world of any size.
    /// Steps are counted from `first_step` on.
    pub fn epoch_after(&mut self, epoch: u64, seen: usize, first_step: usize) -> Epoch<'_> {
        let order = self.order.epoch(epoch).after(seen);
        let steps = order.steps(&self.shared.layout);
        let lengths = self.lengths.clone();
        self.begin(EpochWork { number: epoch, order, steps, first_step, portions: None, lengths }, steps)
    }

    /// Gives each rank so many samples of a whole batch, from the next call of [`Loader::epoch`] on: the same on all ranks.
    ///
    /// # Panics
    /// When they are not those of a batch: a bug.
    pub fn share_by(&mut self, lengths: &[usize]) {
        let Layout { batch, shard, .. } = self.shared.layout;
        assert_eq!((lengths.len(), lengths.iter().sum::<usize>()), (shard.world, batch), "parts of one batch");
        self.lengths = Some(lengths.into());
    }

    /// Samples of a whole batch of all ranks.
    pub fn batch(&self) -> usize {
        self.shared.layout.batch
    }

    /// The portions of an epoch from step `from_step` on that fall to this rank, as they are handed out. Numbers count
    /// from the first portion of that step on.
    pub fn portions(&mut self, epoch: u64, from_step: usize, portions: Arc<dyn Portions>) -> Epoch<'_> {
        let order = self.order.epoch(epoch).after(from_step.saturating_mul(self.shared.layout.batch));
        let steps = order.steps(&self.shared.layout);
        let work =
            EpochWork { number: epoch, order, steps, first_step: from_step, portions: Some(portions), lengths: None };
        // As many as there are steps in all would be one rank's who takes every portion.
        self.begin(work, usize::MAX)
    }

    fn begin(&mut self, work: EpochWork, steps: usize) -> Epoch<'_> {
        let (epoch, first_step) = (work.number, work.first_step);
        let mut desk = self.shared.lock();
        desk.abandon();
        desk.epoch_work = Some(Arc::new(work));
        drop(desk);
        self.shared.work.notify_all();
        Epoch { loader: self, epoch, step: 0, steps, first_step, ahead: None }
    }

    /// Seconds that training has waited for batches since the loader was made.
    pub fn waited_s(&self) -> f64 {
        self.waited.as_secs_f64()
    }

    /// The batch with its images, where it only says how to look at them.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn with_images(&self, epoch: u64, mut batch: Batch) -> Result<Batch, DataError> {
        if batch.views.is_empty() {
            return Ok(batch);
        }
        let LoaderState { dataset, augment, options, .. } = &*self.shared;
        let samples: Vec<u32> = batch.samples.iter().map(|&sample| sample as u32).collect();
        let (share, recipe) = (batch.share, Recipe { dataset, augment, seed: options.seed, epoch, views: false });
        batch.fill(&recipe, &samples, &mut Scratch::default())?;
        batch.share = share;
        Ok(batch)
    }

    /// Swaps left and right of a batch's images. Tokens stay as they are.
    pub fn mirror(&self, batch: &mut Batch) {
        batch.views.iter_mut().for_each(|view| view.mirrored = !view.mirrored);
        if let Some([_, width, channels]) = self.shared.augment.output(self.shared.dataset.info().kind) {
            for row in batch.images.chunks_exact_mut(width * channels) {
                row.reverse();
                row.chunks_exact_mut(channels).for_each(<[f32]>::reverse);
            }
        }
    }

    fn take(&mut self, epoch: u64, step: usize) -> Option<Result<Batch, DataError>> {
        let start = self.clock.now();
        let result = self.wait_for(epoch, step, start);
        self.waited += self.clock.now() - start;
        self.shared.work.notify_one();
        result
    }

    /// The batch, or none where the last portion was taken before.
    fn wait_for(&self, epoch: u64, step: usize, start: Duration) -> Option<Result<Batch, DataError>> {
        let options = &self.shared.options;
        let mut desk = self.shared.lock();
        let named = step + desk.epoch_work.as_ref().map_or(0, |work| work.first_step);
        loop {
            if let Some(result) = desk.shelf.remove(&step) {
                desk.to_give = step + 1;
                return Some(result);
            }
            if desk.ended.is_some_and(|end| step >= end) {
                return None;
            }
            // Portions that are taken are computed: whoever hands them out hears of the wish.
            let waits = desk.epoch_work.as_ref().is_some_and(|work| work.portions.is_some());
            if !waits && options.stop.as_ref().is_some_and(Stop::requested) {
                return Some(Err(DataError::Interrupted { epoch, step: named }));
            }
            let waited = self.clock.now() - start;
            if waited > options.deadline {
                return Some(Err(DataError::Stalled { epoch, step: named, waited }));
            }
            desk = self.shared.ready.wait_timeout(desk, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        let mut desk = self.shared.lock();
        desk.closed = true;
        self.shared.work.notify_all();
        let stays = |desk: &mut Desk| desk.left < self.threads.len();
        let waited = self.shared.ready.wait_timeout_while(desk, FAREWELL, stays);
        let all_left = !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out();
        for thread in self.threads.drain(..) {
            // A thread in a disk that hangs is left behind: it holds its own share of everything it touches, and ends
            // when the disk answers. Joining it would keep the user from seeing why the run ended.
            if all_left || thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

/// One epoch's batches, in order.
#[derive(Debug)]
pub struct Epoch<'a> {
    loader: &'a mut Loader,
    epoch: u64,
    step: usize,
    steps: usize,
    first_step: usize,
    /// The next batch, if somebody has looked at it.
    ahead: Option<Batch>,
}

impl Epoch<'_> {
    /// A look at the next batch, if it is made already and nothing went wrong.
    pub fn peek(&mut self) -> Option<&Batch> {
        let made = |epoch: &Self| matches!(epoch.loader.shared.lock().shelf.get(&epoch.step), Some(Ok(_)));
        if self.ahead.is_none() && self.step < self.steps && made(self) {
            self.ahead = self.next().and_then(Result::ok);
        }
        self.ahead.as_ref()
    }

    /// As [`Loader::mirror`].
    pub fn mirror(&self, batch: &mut Batch) {
        self.loader.mirror(batch);
    }

    /// The step of the next batch.
    pub fn step(&self) -> usize {
        self.first_step + self.step - usize::from(self.ahead.is_some())
    }

    /// One past the last step.
    pub fn end(&self) -> usize {
        self.first_step + self.steps
    }

    /// Gives a batch's buffers back to be filled again.
    pub fn recycle(&self, batch: Batch) {
        let mut desk = self.loader.shared.lock();
        if desk.free.len() < self.loader.shared.prefetch() + 1 {
            desk.free.push(batch);
        }
    }

    /// Seconds that training has waited for batches since the loader was made.
    pub fn waited_s(&self) -> f64 {
        self.loader.waited_s()
    }
}

impl Iterator for Epoch<'_> {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(batch) = self.ahead.take() {
            return Some(Ok(batch));
        }
        if self.step == self.steps {
            return None;
        }
        let Some(result) = self.loader.take(self.epoch, self.step) else {
            self.steps = self.step;
            return None;
        };
        // After an error there is nothing more to come: what follows it was ordered by a run that ends here.
        self.step = if result.is_ok() { self.step + 1 } else { self.steps };
        Some(result)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.steps - self.step + usize::from(self.ahead.is_some())))
    }
}

impl Drop for Epoch<'_> {
    fn drop(&mut self) {
        self.loader.shared.lock().abandon();
    }
}

impl Desk {
    /// Forgets the current epoch; what is being made for it will be recycled.
    fn abandon(&mut self) {
        self.ticket += 1;
        self.epoch_work = None;
        (self.to_make, self.to_give, self.asks, self.ended) = (0, 0, false, None);
        let left = std::mem::take(&mut self.shelf);
        self.free.extend(left.into_values().filter_map(Result::ok));
    }

    fn next_work(&mut self, prefetch: usize, threads: usize) -> Option<(Arc<EpochWork>, Job)> {
        let work = self.epoch_work.as_ref()?;
        if let Some(portions) = &work.portions {
            // One asks at a time, and each makes one ahead: what a slow rank has taken, the others cannot take.
            if self.asks || self.ended.is_some() || self.to_make >= self.to_give + threads {
                return None;
            }
            self.asks = true;
            return Some((Arc::clone(work), Job::Ask(Arc::clone(portions))));
        }
        if self.to_make == work.steps || self.to_make >= self.to_give + prefetch {
            return None;
        }
        self.to_make += 1;
        Some((Arc::clone(work), Job::Make(self.to_make - 1)))
    }

    /// What was said to one who asked for a portion: where its batch goes, and which one it is.
    fn answered(&mut self, answer: Result<Option<usize>, DataError>) -> Option<(usize, usize)> {
        self.asks = false;
        let place = self.to_make;
        match answer {
            Ok(Some(number)) => {
                self.to_make += 1;
                return Some((place, number));
            }
            Ok(None) => self.ended = Some(place),
            Err(error) => {
                self.shelf.insert(place, Err(error));
                self.ended = Some(place + 1);
            }
        }
        None
    }
}

impl LoaderState {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn prefetch(&self) -> usize {
        self.options.prefetch.max(2 * self.options.threads.max(1))
    }

    /// What a loader thread does until the loader closes.
    fn run(&self) {
        let mut scratch = Scratch::default();
        let mut desk = self.lock();
        while !desk.closed {
            let Some((work, job)) = desk.next_work(self.prefetch(), self.options.threads.max(1)) else {
                desk = self.work.wait(desk).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let ticket = desk.ticket;
            let (place, portion) = match job {
                Job::Make(step) => (step, Portion { step, part: self.layout.shard.rank }),
                Job::Ask(portions) => {
                    // The last one that was given is being computed.
                    let finished = desk.to_give.saturating_sub(1);
                    drop(desk);
                    let answer = portions.next(finished);
                    desk = self.lock();
                    if desk.ticket != ticket {
                        continue;
                    }
                    let Some((place, number)) = desk.answered(answer) else {
                        self.ready.notify_all();
                        continue;
                    };
                    (place, Portion::at(number, self.layout.shard.world))
                }
            };
            let mut batch = desk.free.pop().unwrap_or_default();
            drop(desk);
            let made = self.make(&work, portion, &mut batch, &mut scratch);
            desk = self.lock();
            match made {
                _ if desk.ticket != ticket => desk.free.push(batch),
                Ok(()) => drop(desk.shelf.insert(place, Ok(batch))),
                Err(error) => drop(desk.shelf.insert(place, Err(error))),
            }
            self.ready.notify_all();
        }
        desk.left += 1;
        self.ready.notify_all();
    }

    /// Makes the batch of one step, and names that step in what can go wrong on the way.
    fn make(
        &self,
        work: &EpochWork,
        portion: Portion,
        batch: &mut Batch,
        scratch: &mut Scratch,
    ) -> Result<(), DataError> {
        let (epoch, named) = (work.number, work.first_step + portion.step);
        let LoaderOptions { seed, views, .. } = self.options;
        let recipe = Recipe { dataset: &self.dataset, augment: &self.augment, seed, epoch, views };
        let (samples, share) = work.order.portion(&self.layout, portion, work.lengths.as_deref());
        let share = share.among(self.options.group, portion.part, self.layout.shard.world);
        // Unwind safe: after an error nobody reads the batch, and every image is written anew into the scratch.
        let made = catch_unwind(AssertUnwindSafe(|| batch.fill(&recipe, samples, scratch)));
        batch.share = Some(share);
        batch.portion = work.portions.as_ref().map(|_| Portion { step: named, ..portion });
        match made.unwrap_or_else(|panic| Err(DataError::Panicked { epoch, step: named, message: words_of(&*panic) })) {
            Err(DataError::Disk(source)) => Err(DataError::Reading { epoch, step: named, source }),
            made => made,
        }
    }
}

/// What a panic said.
pub(crate) fn words_of(panic: &(dyn Any + Send)) -> String {
    let literal = panic.downcast_ref::<&str>().map(|&words| words.to_owned());
    literal.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "it said nothing".to_owned())
}

#[cfg(test)]
mod tests;
