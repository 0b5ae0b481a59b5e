//! The loader: in order whatever the threads do, resumable, and gone when dropped.

use super::*;
use crate::augment::Op;
use crate::dataset::OpenOptions;
use crate::{AugmentChoice, Spec};
use paceline_system::disk::Disk;
use std::path::Path;
use std::sync::mpsc;

fn synthetic(count: usize) -> Arc<Dataset> {
    let spec: Spec = format!("synthetic:6x4x3/5/{count}").parse().unwrap();
    Arc::new(Dataset::open(&spec, &OpenOptions::default(), &Disk::real()).unwrap().0)
}

fn crops() -> Augment {
    let normalise = Op::Normalise { mean: vec![0.5; 3], std: vec![0.25; 3] };
    Augment::new(vec![Op::RandomCrop { pad: 1 }, Op::HorizontalFlip, normalise]).unwrap()
}

fn loader(count: usize, options: LoaderOptions) -> Loader {
    Loader::new(synthetic(count), crops(), options, Clock::real()).unwrap()
}

fn batches(loader: &mut Loader, epoch: u64, from_step: usize) -> Vec<Batch> {
    loader.epoch(epoch, from_step).map(Result::unwrap).collect()
}

#[test]
fn threads_and_prefetch_change_nothing() {
    let expected = batches(&mut loader(100, LoaderOptions::training(7, 3)), 2, 0);
    assert_eq!(expected.iter().map(|batch| batch.size).collect::<Vec<_>>(), [vec![7; 14], vec![2]].concat());
    for (threads, prefetch) in [(1, 1), (2, 1), (3, 4), (8, 2), (4, 64)] {
        let options = LoaderOptions { threads, prefetch, ..LoaderOptions::training(7, 3) };
        assert!(batches(&mut loader(100, options), 2, 0) == expected, "{threads} threads, prefetch {prefetch}");
    }
}

#[test]
fn a_resumed_epoch_continues_with_the_same_bits() {
    let options = LoaderOptions { threads: 2, ..LoaderOptions::training(9, 1) };
    let whole = batches(&mut loader(100, options.clone()), 4, 0);
    for step in 0..=whole.len() {
        assert!(batches(&mut loader(100, options.clone()), 4, step) == whole[step..], "from step {step}");
    }
}

#[test]
fn an_abandoned_epoch_leaves_no_trace_in_the_next() {
    let options = LoaderOptions { threads: 3, prefetch: 5, ..LoaderOptions::training(4, 1) };
    let mut loader = loader(200, options);
    let expected = batches(&mut loader, 1, 0);
    for taken in 0..6 {
        let first: Vec<_> = loader.epoch(0, 0).take(taken).map(Result::unwrap).collect();
        assert_eq!(first.len(), taken);
        assert!(batches(&mut loader, 1, 0) == expected);
    }
}

#[test]
fn recycled_buffers_are_used_again() {
    let options = LoaderOptions { prefetch: 1, ..LoaderOptions::training(10, 1) };
    let mut loader = loader(100, options);
    let mut seen = std::collections::BTreeSet::new();
    let mut epoch = loader.epoch(0, 0);
    while let Some(batch) = epoch.next() {
        let batch = batch.unwrap();
        seen.insert(batch.images.as_ptr() as usize);
        epoch.recycle(batch);
    }
    assert!(seen.len() <= 3, "{} buffers for 10 batches", seen.len());
}

#[test]
fn no_thread_rests_for_a_small_prefetch() {
    let mut loader = loader(100, LoaderOptions { threads: 3, prefetch: 1, ..LoaderOptions::training(10, 1) });
    let shared = Arc::clone(&loader.shared);
    let _epoch = loader.epoch(0, 0);
    let few = |desk: &mut Desk| desk.shelf.len() < 6;
    let waited = shared.ready.wait_timeout_while(shared.lock(), Duration::from_secs(20), few).unwrap();
    assert_eq!(waited.0.shelf.len(), 6, "two batches for each thread");
}

#[test]
fn evaluation_sees_every_sample_once_in_order() {
    let all = batches(&mut loader(25, LoaderOptions::evaluation(8)), 0, 0);
    assert_eq!(all.iter().map(|batch| batch.size).collect::<Vec<_>>(), [8, 8, 8, 1]);
    assert_eq!(all[3].images.len(), 6 * 4 * 3);
    assert_eq!(all.iter().flat_map(|batch| batch.samples.clone()).collect::<Vec<_>>(), (0..25).collect::<Vec<_>>());
}

#[test]
fn ranks_share_an_epoch_and_a_changed_world_sees_the_rest() {
    let part = |rank, world| LoaderOptions {
        shard: Shard { rank, world },
        last: LastBatch::Keep,
        ..LoaderOptions::training(5 * world, 2)
    };
    let mut seen: Vec<usize> = Vec::new();
    for rank in 0..3 {
        seen.extend(loader(100, part(rank, 3)).epoch(0, 0).take(4).flat_map(|batch| batch.unwrap().samples));
    }
    for rank in 0..2 {
        seen.extend(loader(100, part(rank, 2)).epoch_after(0, 60, 4).flat_map(|batch| batch.unwrap().samples));
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..100).collect::<Vec<_>>());
}

/// Hands out portions to whoever asks, as rank 0 does between processes.
#[derive(Debug)]
struct Counter(std::sync::atomic::AtomicUsize, usize);

impl Portions for Counter {
    fn next(&self, _: usize) -> Result<Option<usize>, DataError> {
        let next = self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok((next < self.1).then_some(next))
    }
}

#[test]
fn portions_go_to_whoever_is_free_and_each_goes_once() {
    for threads in [1, 3] {
        let of = |rank| {
            let shard = Shard { rank, world: 3 };
            loader(100, LoaderOptions { shard, threads, ..LoaderOptions::training(10, 2) })
        };
        let mut loaders = [of(0), of(1), of(2)];
        let whole = batches(&mut loader(100, LoaderOptions::training(10, 2)), 1, 4);
        // Six steps of three portions, of which the second rank takes nearly all.
        let counter: Arc<dyn Portions> = Arc::new(Counter(Default::default(), 18));
        let [first, second, third] = &mut loaders;
        let mut epochs = [first, second, third].map(|loader| loader.portions(1, 4, Arc::clone(&counter)));
        let mut taken: Vec<Batch> = Vec::new();
        taken.extend(epochs[0].next().map(Result::unwrap));
        taken.extend(epochs[1].by_ref().map(Result::unwrap));
        taken.extend(epochs[0].by_ref().map(Result::unwrap));
        taken.extend(epochs[2].by_ref().map(Result::unwrap));
        taken.sort_by_key(|batch| batch.portion.map(|portion| (portion.step, portion.part)));
        assert_eq!(taken.len(), 18);
        let samples: Vec<usize> = taken.iter().flat_map(|batch| batch.samples.clone()).collect();
        let expected: Vec<usize> = whole.iter().flat_map(|batch| batch.samples.clone()).collect();
        assert_eq!(samples, expected);
        let images: Vec<f32> = taken.iter().flat_map(|batch| batch.images.clone()).collect();
        assert!(images == whole.iter().flat_map(|batch| batch.images.clone()).collect::<Vec<f32>>());
        assert_eq!(taken[4].portion, Some(Portion { step: 5, part: 1 }));
    }
}

#[test]
fn an_error_comes_in_the_place_of_its_batch_and_ends_the_epoch() {
    let folder = tempfile::tempdir().unwrap();
    for half in ["train", "val"] {
        std::fs::create_dir_all(folder.path().join(half).join("a")).unwrap();
        for number in 0..12 {
            let bytes = if number == 7 { Vec::new() } else { crate::decode::tests::jpeg(16, 16) };
            std::fs::write(folder.path().join(half).join(format!("a/{number:02}.jpg")), bytes).unwrap();
        }
    }
    let spec = Spec::Folder(Some(folder.path().into()));
    for (damaged_max, expected) in [(0, vec![true, true, true, false]), (1, vec![true; 6])] {
        let options = OpenOptions { damaged_max, ..OpenOptions::default() };
        let val = Arc::new(Dataset::open(&spec, &options, &Disk::real()).unwrap().1);
        let augment = Augment::training(AugmentChoice::Standard, val.info(), Some(8)).unwrap();
        let options = LoaderOptions { threads: 3, ..LoaderOptions::evaluation(2) };
        let mut loader = Loader::new(Arc::clone(&val), augment, options, Clock::real()).unwrap();
        assert_eq!(loader.epoch(0, 0).map(|batch| batch.is_ok()).collect::<Vec<_>>(), expected);
        assert_eq!(val.damaged().len(), 1);
    }
}

#[test]
fn waiting_is_measured_on_the_given_clock() {
    let clock = Clock::manual();
    let mut loader = Loader::new(synthetic(20), crops(), LoaderOptions::training(5, 1), clock.clone()).unwrap();
    assert_eq!(batches(&mut loader, 0, 0).len(), 4);
    assert_eq!(loader.waited_s(), 0.0, "the clock stood still");
}

#[test]
fn a_loader_that_delivers_nothing_gives_up_at_its_deadline() {
    let options = LoaderOptions { deadline: Duration::ZERO, ..LoaderOptions::training(5, 1) };
    let mut loader = loader(20, options);
    // A step that nobody will ever make.
    assert!(matches!(loader.take(0, 999), Some(Err(DataError::Stalled { step: 999, .. }))));
    assert!(loader.waited_s() > 0.0);
}

/// A set of photographs on a disk that hangs.
fn hanging_set(folder: &Path, disk: &Disk) -> Arc<Dataset> {
    for half in ["train", "val"] {
        let class = folder.join(half).join("a");
        std::fs::create_dir_all(&class).unwrap();
        std::fs::write(class.join("0.jpg"), crate::decode::tests::jpeg(16, 16)).unwrap();
    }
    let spec = Spec::Folder(Some(folder.into()));
    Arc::new(Dataset::open(&spec, &OpenOptions::default(), disk).unwrap().1)
}

/// Takes the first batch of a hanging set and drops the loader, all within a bound that the hang does not know.
fn first_error_of_a_hanging_set(options: LoaderOptions) -> DataError {
    let folder = tempfile::tempdir().unwrap();
    let hold = Arc::new(Mutex::new(()));
    let held = hold.lock().unwrap();
    let val = hanging_set(folder.path(), &Disk::hanging_while(&hold));
    let (sender, receiver) = mpsc::channel();
    threads::spawn("consumer", move || {
        let augment = Augment::evaluation(AugmentChoice::Standard, val.info(), Some(8)).unwrap();
        let mut loader = Loader::new(val, augment, options, Clock::real()).unwrap();
        let shared = Arc::clone(&loader.shared);
        let mut epoch = loader.epoch_after(3, 0, 40);
        while shared.lock().to_make == 0 {
            std::thread::yield_now();
        }
        let error = epoch.next().unwrap().unwrap_err();
        drop(epoch);
        drop(loader);
        sender.send(error).unwrap();
    })
    .unwrap();
    let error = receiver.recv_timeout(Duration::from_secs(20)).expect("a hung thread keeps the error from the user");
    // The disk answers at last: the thread that was left behind ends too.
    drop(held);
    error
}

#[test]
fn a_disk_that_hangs_is_reported_and_left_behind() {
    let deadline = Duration::from_millis(1);
    let error = first_error_of_a_hanging_set(LoaderOptions { deadline, ..LoaderOptions::evaluation(1) });
    assert!(matches!(error, DataError::Stalled { epoch: 3, step: 40, .. }) && !error.is_refusal(), "{error}");
}

#[test]
fn a_stop_ends_the_wait_for_a_disk_that_hangs() {
    let stop = Stop::new();
    stop.request();
    let error = first_error_of_a_hanging_set(LoaderOptions { stop: Some(stop), ..LoaderOptions::evaluation(1) });
    assert!(matches!(error, DataError::Interrupted { epoch: 3, step: 40 }) && !error.is_refusal(), "{error}");
}

#[test]
fn a_panic_while_a_batch_is_made_comes_in_its_place() {
    // Tables for one channel, images with three.
    let augment = Augment::new(vec![Op::Normalise { mean: vec![0.5], std: vec![0.25] }]).unwrap();
    let mut loader = Loader::new(synthetic(20), augment, LoaderOptions::training(5, 1), Clock::real()).unwrap();
    for epoch in 0..2 {
        let mut batches = loader.epoch(epoch, 2);
        let error = batches.next().unwrap().unwrap_err();
        assert!(matches!(error, DataError::Panicked { step: 2, .. }) && !error.is_refusal(), "{error}");
        assert!(error.to_string().contains("one mean and one std per channel"), "{error}");
        assert!(batches.next().is_none());
    }
}

#[test]
fn a_file_that_vanishes_in_mid_run_is_a_failure_and_no_refusal() {
    let folder = tempfile::tempdir().unwrap();
    for half in ["train", "val"] {
        std::fs::create_dir_all(folder.path().join(half).join("a")).unwrap();
        std::fs::write(folder.path().join(half).join("a/0.jpg"), crate::decode::tests::jpeg(16, 16)).unwrap();
    }
    let spec = Spec::Folder(Some(folder.path().into()));
    let val = Arc::new(Dataset::open(&spec, &OpenOptions::default(), &Disk::real()).unwrap().1);
    std::fs::remove_file(folder.path().join("val/a/0.jpg")).unwrap();
    let augment = Augment::evaluation(AugmentChoice::Standard, val.info(), Some(8)).unwrap();
    let mut loader = Loader::new(val, augment, LoaderOptions::evaluation(1), Clock::real()).unwrap();
    let error = loader.epoch(0, 0).next().unwrap().unwrap_err();
    assert!(matches!(error, DataError::Reading { .. }) && !error.is_refusal(), "{error}");
    assert!(error.to_string().contains("val/a/0.jpg"), "{error}");
    let missing = Dataset::open(&Spec::Folder(Some("no/such".into())), &OpenOptions::default(), &Disk::real());
    assert!(missing.unwrap_err().is_refusal());
}

#[test]
fn dropping_a_loader_in_the_middle_ends_its_threads() {
    for taken in [0, 1, 3] {
        let options = LoaderOptions { threads: 4, prefetch: 2, ..LoaderOptions::training(3, 1) };
        let mut loader = loader(300, options);
        let weak = Arc::downgrade(&loader.shared);
        assert_eq!(loader.epoch(0, 0).take(taken).count(), taken);
        drop(loader);
        assert!(weak.upgrade().is_none(), "a thread still holds the loader");
    }
}

#[test]
fn impossible_wishes_are_refused() {
    let options = LoaderOptions { last: LastBatch::Drop, ..LoaderOptions::training(101, 1) };
    assert!(
        Loader::new(synthetic(100), crops(), options, Clock::real()).unwrap_err().to_string().contains("--batch 100")
    );
}

#[test]
fn batches_of_views_are_those_of_images() {
    let mut with_images = loader(50, LoaderOptions::training(8, 3));
    let mut with_views = loader(50, LoaderOptions { views: true, ..LoaderOptions::training(8, 3) });
    let expected = batches(&mut with_images, 1, 0);
    let found = batches(&mut with_views, 1, 0);
    for (found, expected) in found.into_iter().zip(expected) {
        assert!(found.images.is_empty() && found.views.len() == expected.size);
        assert_eq!(with_views.with_images(1, found).unwrap(), expected);
    }
}

#[test]
fn a_mirrored_batch_has_its_images_mirrored() {
    let flips = |chance: bool| {
        let normalise = Op::Normalise { mean: vec![0.5; 3], std: vec![0.25; 3] };
        let ops = if chance { vec![Op::AlternatingFlip, normalise] } else { vec![normalise] };
        Loader::new(synthetic(40), Augment::new(ops).unwrap(), LoaderOptions::evaluation(40), Clock::real()).unwrap()
    };
    let (mut plain, mut alternating) = (flips(false), flips(true));
    let straight = batches(&mut plain, 0, 0).remove(0);
    let mut mirrored = straight.clone();
    plain.mirror(&mut mirrored);
    let (even, odd) = (batches(&mut alternating, 0, 0).remove(0), batches(&mut alternating, 1, 0).remove(0));
    let length = 6 * 4 * 3;
    for at in (0..40 * length).step_by(length) {
        let [straight, mirrored, even, odd] =
            [&straight, &mirrored, &even, &odd].map(|batch| &batch.images[at..at + length]);
        assert!((straight, mirrored) == (even, odd) || (straight, mirrored) == (odd, even));
    }
}

#[test]
fn the_next_batch_is_given_only_if_it_is_there() {
    let mut loader = loader(32, LoaderOptions::training(8, 3));
    let expected = batches(&mut loader, 0, 0);
    let mut epoch = loader.epoch(0, 0);
    let mut found = vec![epoch.next().unwrap().unwrap()];
    while found.len() < 4 {
        if epoch.peek().is_some() {
            found.extend(epoch.next().map(Result::unwrap));
        }
    }
    assert!(epoch.peek().is_none() && epoch.next().is_none());
    drop(epoch);
    assert!(found == expected);
}
