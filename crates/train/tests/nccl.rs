//! Gradients added up by NCCL: alone, and by two ranks on one GPU where NCCL allows that. On a machine without a GPU the tests say that
//! they are skipped.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use paceline_comm::transport::{Transport, thread};
use paceline_comm::{Choice, Communicator, Link, Links, Stop};
use paceline_data::batch::Batch;
use paceline_nn::layer::{Conv, Window};
use paceline_nn::optim::{HyperParameters, Moment, Optimizer};
use paceline_nn::{Input, Net, zoo};
use paceline_parallel::Agreement;
use paceline_system::clock::Clock;
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::{self, Cuda, Options, nccl};
use paceline_tensor::{GraphError, MemoryUse, Precision, Value};
use paceline_train::phases::Phases;
use paceline_train::replica::guard::Limits;
use paceline_train::replica::{Replica, ReplicaOptions};

const CLASSES: usize = 10;
const BATCH: usize = 16;

fn gpu(test: &str) -> Option<Arc<Cuda>> {
    if cuda::count().is_ok_and(|count| count > 0) {
        let options = Options { tf32: false, deterministic: true, tune: false };
        return Some(Arc::new(Cuda::new(0, options).unwrap_or_else(|error| panic!("{error}"))));
    }
    let _ = writeln!(std::io::stderr(), "skipped: {test}: no GPU");
    None
}

fn options(optimizer: Optimizer, precision: Precision) -> ReplicaOptions {
    ReplicaOptions {
        input: Input::Image { size: [32, 32], channels: 3 },
        classes: CLASSES,
        micro_batch: BATCH,
        accumulate: 1,
        smoothing: 0.1,
        seed: 3,
        rule: optimizer.rule(&HyperParameters::default()).unwrap(),
        precision,
        memory: MemoryUse::Normal,
        sync_batch_norm: false,
        clip_norm: None,
    }
}

/// No batch-norm and no dropout, which are each replica's own; three buckets of gradients.
fn plain(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv1", x, Conv::new(8, 3).pad(1))?;
    let x = net.relu(x)?;
    let x = net.max_pool(x, Window::new(2))?;
    let x = net.flatten(x)?;
    let x = net.linear("fc1", x, 3300)?;
    let x = net.relu(x)?;
    let x = net.linear("fc2", x, 2000)?;
    let x = net.relu(x)?;
    net.linear("fc3", x, classes)
}

/// A rank's part of a batch.
fn part(whole: &Batch, rank: usize, world: usize) -> Batch {
    let (size, pixels) = (whole.size / world, whole.images.len() / world);
    Batch {
        size,
        images: whole.images[rank * pixels..][..pixels].to_vec(),
        targets: whole.targets[rank * size..][..size].to_vec(),
        ..Batch::default()
    }
}

/// Images whose brightness tells their class, so that there is something to learn.
fn batch(step: u64) -> Batch {
    let mut random = Random::new(&[7, step]);
    let targets: Vec<i32> = (0..BATCH).map(|_| random.below(CLASSES) as i32).collect();
    let images = targets.iter().enumerate().flat_map(|(index, &target)| {
        let mut noise = Random::new(&[9, step, index as u64]);
        (0..32 * 32 * 3).map(move |_| 0.3 * noise.normal() + target as f32 / 5.0 - 1.0)
    });
    Batch { size: BATCH, images: images.collect(), targets, ..Batch::default() }
}

fn losses(replica: &mut Replica, rate: f32) -> Vec<f64> {
    losses_of(replica, rate, 0, 1)
}

fn losses_of(replica: &mut Replica, rate: f32, rank: usize, world: usize) -> Vec<f64> {
    let clock = Clock::real();
    let steps = (0..20).map(|step| {
        let (moment, batch) = (Moment { step, learning_rate: rate }, part(&batch(step), rank, world));
        let (tally, result) = replica.step(&batch, moment, &mut Phases::start(&clock)).unwrap();
        assert_eq!(result, Ok(()));
        assert!(tally.top1 <= tally.top5 && tally.rows == BATCH as u64);
        tally.mean_loss()
    });
    steps.collect()
}

fn limits() -> Limits {
    Limits { stop: Stop::new(), meeting: Duration::from_secs(60), step: Duration::from_secs(60) }
}

fn bits(replica: &Replica) -> Vec<u32> {
    replica.store.parameters.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn alone_through_nccl_gives_the_same_bits_as_without() {
    let test = "alone_through_nccl_gives_the_same_bits_as_without";
    let Some(cuda) = gpu(test) else { return };
    if let Err(error) = nccl::version() {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {error}");
        return;
    }
    let (cpu, limits) = (Arc::new(Cpu::new(4)), limits());
    // Several buckets, one of which is a large matrix, and one bucket with batch-norms.
    for (model, precision) in [("vgg11", Precision::Bf16), ("resnet20", Precision::F32)] {
        let (entry, options) = (zoo::find(model).unwrap(), options(Optimizer::Momentum, precision));
        let mut without = Replica::on_gpu(entry, options, &cpu, &cuda).unwrap();
        let mut with = Replica::on_gpu(entry, options, &cpu, &cuda).unwrap();
        with.join_gpus(None, &[], &limits).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(losses(&mut without, 1e-3), losses(&mut with, 1e-3), "{model}: the same losses");
        without.fetch().unwrap();
        with.fetch().unwrap();
        assert!(bits(&without) == bits(&with), "{model}: the same weights");
    }
}

/// A replica that is one of two ranks, each with its half of every batch.
fn one_of_two(key: nccl::Key, communicator: Communicator, limits: &Limits) -> Replica {
    let rank = communicator.rank().index();
    let cuda = gpu("one of two").expect("a GPU");
    let options = ReplicaOptions { micro_batch: BATCH / 2, ..options(Optimizer::Momentum, Precision::F32) };
    let mut replica = Replica::on_gpu(&plain, options, &Arc::new(Cpu::new(2)), &cuda).unwrap();
    assert!(replica.buckets().len() >= 2, "sums overlap with the backward pass");
    replica.take_seat(key, nccl::Seat { number: rank, of: 2 }, limits).unwrap_or_else(|error| panic!("{error}"));
    replica.agree(Agreement::all_reduce(communicator, &[], Duration::from_secs(60)).unwrap());
    replica.begin_together(0, 20).unwrap();
    replica
}

/// Whether two ranks can be tested on one GPU: before 2.30, NCCL has no way to do that.
fn shares(test: &str) -> bool {
    let asked = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
    let shares = asked && nccl::version().unwrap_or(0) >= 23_000;
    if !shares {
        let why = "needs NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1 to put two ranks on one GPU";
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
    }
    shares
}

/// Runs two ranks as threads.
fn two<T: Send>(rank: impl Fn(nccl::Key, Communicator) -> T + Sync) -> Vec<T> {
    let key = nccl::key().unwrap_or_else(|error| panic!("{error}"));
    let choice = Choice::by_cost(Links::uniform(2, Link::new(20e-6, 2e9)));
    let options = paceline_comm::Options { timeout: Duration::from_secs(60), stop: Stop::new(), choice };
    std::thread::scope(|scope| {
        let (rank, options) = (&rank, &options);
        let start = |transport| {
            let communicator = Communicator::new(Transport::Thread(transport), options.clone());
            scope.spawn(move || rank(key, communicator))
        };
        let ranks: Vec<_> = thread::mesh(2).into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn two_ranks_through_nccl_follow_one_process() {
    let test = "two_ranks_through_nccl_follow_one_process";
    let Some(cuda) = gpu(test).filter(|_| shares(test)) else { return };
    let options = options(Optimizer::Momentum, Precision::F32);
    let mut alone = Replica::on_gpu(&plain, options, &Arc::new(Cpu::new(2)), &cuda).unwrap();
    let expected = losses(&mut alone, 1e-3);
    let found = two(|key, communicator| {
        let rank = communicator.rank().index();
        let mut replica = one_of_two(key, communicator, &limits());
        let losses = losses_of(&mut replica, 1e-3, rank, 2);
        replica.settle().unwrap().unwrap();
        replica.fetch().unwrap();
        (losses, bits(&replica))
    });
    assert!(found[0] == found[1], "both ranks have the same losses and the same bits");
    for (step, (expected, found)) in expected.iter().zip(&found[0].0).enumerate() {
        assert!((found / expected - 1.0).abs() < 1e-4, "step {step}: {found} by two, {expected} by one");
    }
}

#[test]
fn a_rank_that_stays_away_from_a_sum_ends_the_waiting_on_the_gpu() {
    let test = "a_rank_that_stays_away_from_a_sum_ends_the_waiting_on_the_gpu";
    if gpu(test).is_none() || !shares(test) {
        return;
    }
    let (stop, clock) = (Stop::new(), Clock::real());
    let errors = two(|key, communicator| {
        let rank = communicator.rank().index();
        let limits =
            Limits { stop: stop.clone(), step: Duration::from_secs(if rank == 0 { 3 } else { 60 }), ..limits() };
        let mut replica = one_of_two(key, communicator, &limits);
        let mut step = |step| {
            let (moment, batch) = (Moment { step, learning_rate: 1e-3 }, part(&batch(step), rank, 2));
            replica.step(&batch, moment, &mut Phases::start(&clock)).map(|_| ())
        };
        // The third step is a graph that was recorded.
        step(0).and_then(|()| step(1)).unwrap();
        if rank == 0 {
            let error = step(2).unwrap_err();
            stop.set("rank 0 has given up");
            return error.to_string();
        }
        while stop.reason().is_none() {
            paceline_system::clock::sleep(Duration::from_millis(10));
        }
        step(2).unwrap_err().to_string()
    });
    assert!(errors[0].starts_with("rank 0 waited 3") && errors[0].contains("in nccl-all-reduce"), "{errors:?}");
    assert!(errors[1].starts_with("rank 1") && errors[1].contains("rank 0 has given up"), "{errors:?}");
}
