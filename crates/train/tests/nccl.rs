//! Gradients added up by NCCL: alone, and by two ranks on one GPU where NCCL allows that. On a machine without a GPU the tests say that
//! they are skipped.

#[path = "shared/on_gpu.rs"]
mod on_gpu;

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use on_gpu::{BATCH, batch, gpu, options};
use paceline_comm::transport::{Membership, Transport, shm};
use paceline_comm::{Choice, Communicator, Generation, Link, Links, Rank, RunId, Stop, Token, Wait};
use paceline_data::batch::Batch;
use paceline_nn::layer::{Conv, Window};
use paceline_nn::optim::{Moment, Optimizer};
use paceline_nn::{Net, zoo};
use paceline_parallel::agree::{self, IDENTITY, Join, Recipe, Roles, Shape, all_reduce};
use paceline_system::clock::Clock;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::nccl;
use paceline_tensor::{GraphError, Precision, Value};
use paceline_train::TrainError;
use paceline_train::engine::StepOutput;
use paceline_train::engine::guard::Limits;
use paceline_train::phases::Phases;
use paceline_train::replica::{Replica, ReplicaOptions};

const LONG: Duration = Duration::from_secs(60);

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

fn losses(replica: &mut Replica, rate: f32) -> Vec<f64> {
    losses_of(replica, rate, 0, 1)
}

fn losses_of(replica: &mut Replica, rate: f32, rank: usize, world: usize) -> Vec<f64> {
    let clock = Clock::real();
    let steps = (0..20).map(|step| {
        let (moment, batch) = (Moment { step, learning_rate: rate }, part(&batch(step), rank, world));
        let StepOutput { tally, updated: result } = replica.step(&batch, moment, &mut Phases::start(&clock)).unwrap();
        assert_eq!(result, Ok(()));
        assert!(tally.top1 <= tally.top5 && tally.rows == BATCH as u64);
        tally.mean_loss()
    });
    steps.collect()
}

/// The same batch, computed in parts.
fn in_parts(options: ReplicaOptions, parts: usize) -> ReplicaOptions {
    ReplicaOptions { micro_batch: options.micro_batch / parts, accumulate: parts, ..options }
}

fn limits() -> Limits {
    Limits { stop: Stop::new(), meeting: LONG, step: LONG }
}

fn bits(replica: &Replica) -> Vec<u32> {
    replica.store().parameters.iter().map(|x| x.to_bits()).collect()
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
    // Several buckets, one of which is a large matrix, and one bucket with batch-norms; as a whole and in parts.
    let models = [("vgg11", Precision::Bf16), ("resnet20", Precision::F32)];
    for ((model, precision), parts) in models.into_iter().flat_map(|model| [(model, 1), (model, 2)]) {
        let options = in_parts(options(Optimizer::Momentum, precision), parts);
        let entry = zoo::find(model).unwrap();
        let mut without = on_gpu::replica(entry, options, &cpu, &cuda);
        let mut with = on_gpu::replica(entry, options, &cpu, &cuda);
        with.engine.cuda_mut().unwrap().join_gpus(None, &[], &limits).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(losses(&mut without, 1e-3), losses(&mut with, 1e-3), "{model} in {parts}: the same losses");
        without.engine.fetch().unwrap();
        with.engine.fetch().unwrap();
        assert!(bits(&without) == bits(&with), "{model} in {parts}: the same weights");
    }
}

/// A replica that is one of two ranks, each with its half of every batch, which it computes in parts.
fn one_of_two(mut communicator: Communicator, parts: usize, limits: &Limits) -> Replica {
    let rank = communicator.rank().index();
    let cuda = gpu("one of two").expect("a GPU");
    let options = ReplicaOptions { micro_batch: BATCH / 2, ..options(Optimizer::Momentum, Precision::F32) };
    let mut replica = on_gpu::replica(&plain, in_parts(options, parts), &Arc::new(Cpu::new(2)), &cuda);
    assert!(replica.buckets().len() >= 2, "sums overlap with the backward pass");
    let mut key = if rank == 0 { nccl::key().unwrap() } else { [0; nccl::KEY_BYTES] };
    communicator.broadcast_bytes(Rank(0), &mut key).unwrap();
    let placement = nccl::Placement { number: rank, of: 2 };
    replica.engine.cuda_mut().unwrap().join_group(key, placement, limits).unwrap_or_else(|error| panic!("{error}"));
    let (shape, options, clock) = (Shape::default(), agree::Options::default(), Clock::real());
    let roles = Roles { workers: 2, servers: 0 };
    let join = Join {
        communicator,
        urgent: None,
        group: None,
        memory: None,
        lending: None,
        roles,
        shape: &shape,
        options,
        deadline: LONG,
        clock,
    };
    replica.agree(all_reduce::RECIPE.join(join).unwrap(), &Clock::real()).unwrap();
    replica.begin_together(0, [0; IDENTITY]).unwrap();
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

fn meet(token: &str, rank: u32) -> Communicator {
    let token = Token::from_hex(token).unwrap();
    let member = Membership { token, run: RunId::UNKNOWN, rank: Rank(rank), world: 2, generation: Generation(0) };
    let transport = Transport::Shm(shm::connect(&member, &Wait::new(LONG, &Stop::new())).unwrap());
    let choice = Choice::by_cost(Links::uniform(2, Link::new(20e-6, 2e9)));
    Communicator::new(transport, paceline_comm::Options { timeout: LONG, stop: Stop::new(), choice })
}

/// The other rank: a process of its own, as in a run. In one process, the streams of two ranks share the GPU's queues, and a sum that
/// waits for the other rank can keep that rank's kernels waiting.
struct Other(Child);

impl Other {
    /// Starts it and meets it.
    fn start(what: &str) -> (Self, Communicator) {
        let token = Token::random().to_hex();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["child", "--exact", "--nocapture"]).env("PACELINE_TEST_RANK", format!("{what} {token}"));
        (Self(command.stdout(Stdio::piped()).spawn().unwrap()), meet(&token, 0))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test of its own: the body of the other rank.
#[test]
fn child() {
    let Ok(role) = std::env::var("PACELINE_TEST_RANK") else { return };
    let (what, token) = role.rsplit_once(' ').unwrap();
    let mut replica = one_of_two(meet(token, 1), if what == "follow in parts" { 2 } else { 1 }, &limits());
    if what.starts_with("follow") {
        println!("\nended with {}", follow(&mut replica, 1).1);
        return;
    }
    steps(&mut replica, 1, 0..2).unwrap();
    // Nothing is said any more; the parent ends this process.
    paceline_system::clock::sleep(LONG);
}

/// Trains for twenty steps; the losses, and a digest of them and of the weights.
fn follow(replica: &mut Replica, rank: usize) -> (Vec<f64>, u64) {
    let losses = losses_of(replica, 1e-3, rank, 2);
    replica.settle().unwrap().unwrap();
    replica.engine.fetch().unwrap();
    let words = losses.iter().map(|loss| loss.to_bits()).chain(bits(replica).into_iter().map(u64::from));
    let digest = words.fold(0u64, |digest, word| (digest ^ word).wrapping_mul(0x100_0000_01b3).rotate_left(23));
    (losses, digest)
}

fn steps(replica: &mut Replica, rank: usize, numbers: std::ops::Range<u64>) -> Result<(), TrainError> {
    for step in numbers {
        let (moment, batch) = (Moment { step, learning_rate: 1e-3 }, part(&batch(step), rank, 2));
        replica.step(&batch, moment, &mut Phases::start(&Clock::real()))?.updated.unwrap();
    }
    Ok(())
}

#[test]
fn two_ranks_through_nccl_follow_one_process() {
    let test = "two_ranks_through_nccl_follow_one_process";
    let Some(cuda) = gpu(test).filter(|_| shares(test)) else { return };
    let options = options(Optimizer::Momentum, Precision::F32);
    let mut alone = on_gpu::replica(&plain, options, &Arc::new(Cpu::new(2)), &cuda);
    let expected = losses(&mut alone, 1e-3);
    for (what, parts) in [("follow", 1), ("follow in parts", 2)] {
        let (mut other, communicator) = Other::start(what);
        let (found, digest) = follow(&mut one_of_two(communicator, parts, &limits()), 0);
        let mut said = String::new();
        other.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains(&format!("ended with {digest}\n")), "the same losses and bits: {digest}, {said}");
        for (step, (expected, found)) in expected.iter().zip(&found).enumerate() {
            assert!((found / expected - 1.0).abs() < 1e-4, "{what}, step {step}: {found} by two, {expected} by one");
        }
    }
}

#[test]
fn a_rank_that_stays_away_from_a_sum_ends_the_waiting_on_the_gpu() {
    let test = "a_rank_that_stays_away_from_a_sum_ends_the_waiting_on_the_gpu";
    if gpu(test).is_none() || !shares(test) {
        return;
    }
    let (_other, communicator) = Other::start("away");
    let mut replica = one_of_two(communicator, 1, &Limits { step: Duration::from_secs(5), ..limits() });
    // The third step is a graph that was recorded.
    steps(&mut replica, 0, 0..2).unwrap();
    let error = steps(&mut replica, 0, 2..3).unwrap_err().to_string();
    assert!(error.starts_with("rank 0 waited 5") && error.contains("in nccl-all-reduce: deadline passed"), "{error}");
}
