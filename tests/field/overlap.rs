//! How much of the messages of a step hides behind its arithmetic: hosts with cables of 1 Gbit/s on which a device without memory takes
//! the time of a plan.

use std::sync::Arc;
use std::time::Instant;

use paceline::comm::Communicator;
use paceline::data::Batch;
use paceline::nn::optim::{HyperParameters, Moment, Optimizer};
use paceline::nn::{Input, zoo};
use paceline::parallel::agree::{self, IDENTITY, Join, Recipe, Roles, all_reduce};
use paceline::system::clock::Clock;
use paceline::tensor::device::cpu::Cpu;
use paceline::tensor::device::null::CostModel;
use paceline::tensor::{MemoryUse, Precision};
use paceline::train::engine::Place;
use paceline::train::phases::Phases;
use paceline::train::replica::{Replica, ReplicaOptions};

use crate::ground::{Ground, has, say};
use crate::links::{CABLE, LIMIT, measured};
use crate::network::Network;

/// Steps that put the messages in order, and steps that are timed.
const WARM_UP: usize = 5;
const STEPS: usize = 4;

/// How often a measurement that falls short is made again.
const ATTEMPTS_MAX: usize = 3;

const BATCH: usize = 8;

/// A replica that computes nothing and takes the time of a cost model.
fn replica(model: &str, cost: CostModel) -> Replica {
    let options = ReplicaOptions {
        input: Input::Image { size: [224; 2], channels: 3 },
        classes: 10,
        micro_batch: BATCH,
        other_sizes: Default::default(),
        accumulate: 1,
        smoothing: 0.0,
        seed: 1,
        rule: Optimizer::Momentum.rule(&HyperParameters::default()).unwrap(),
        precision: Precision::F32,
        memory: MemoryUse::Normal,
        clip_norm: None,
        sync_batch_norm: false,
        overlap: true,
        hosted: false,
        separate_gradients: false,
        slots: 0,
        shard: None,
    };
    Replica::at(zoo::find(model).unwrap(), options, &Place::Null(Arc::new(Cpu::new(1)), cost)).unwrap()
}

/// Seconds of some steps, each, through the code that training runs.
fn seconds_of_steps(replica: &mut Replica, steps: std::ops::Range<usize>) -> f64 {
    let (clock, start) = (Clock::real(), Instant::now());
    let batch = Batch { size: BATCH, targets: vec![0; BATCH], ..Batch::default() };
    let count = steps.len() as f64;
    for step in steps {
        let moment = Moment { step: step as u64, learning_rate: 0.1 };
        replica.step(&batch, moment, &mut Phases::start(&clock)).unwrap().updated.unwrap();
    }
    start.elapsed().as_secs_f64() / count
}

/// The part of one host, which [`crate::links::one_host`] runs: prints the seconds of arithmetic alone, of messages alone, and of steps.
pub fn one_host(communicator: Communicator, model: &str, compute_s: f64) {
    let base = CostModel::TWO_SERVER_CORES;
    let pace = base.plan_seconds(replica(model, base).plan()) / compute_s;
    let (flops_per_s, bytes_per_s) = (base.flops_per_s * pace, base.bytes_per_s * pace);
    let cost = CostModel { flops_per_s, bytes_per_s, launch_s: base.launch_s / pace, sleeps: true };
    let compute = seconds_of_steps(&mut replica(model, cost), 0..1);
    let mut trained = replica(model, cost);
    let (shape, world) = (trained.shape(), communicator.world());
    let join = Join {
        communicator,
        urgent: None,
        group: None,
        memory: None,
        lending: None,
        roles: Roles { workers: world, servers: 0 },
        shape: &shape,
        options: agree::Options::default(),
        deadline: LIMIT,
        clock: Clock::real(),
    };
    trained.agree(all_reduce::RECIPE.join(join).unwrap(), &Clock::real()).unwrap();
    trained.begin_together(0, [0; IDENTITY]).unwrap();
    // The order of messages is made from the times of the first steps.
    seconds_of_steps(&mut trained, 0..WARM_UP);
    let step = seconds_of_steps(&mut trained, WARM_UP..WARM_UP + STEPS);
    // The same messages, behind arithmetic that takes no time.
    trained.engine.set_cost(CostModel { flops_per_s: 1e18, bytes_per_s: 1e18, launch_s: 0.0, sleeps: true });
    seconds_of_steps(&mut trained, WARM_UP + STEPS..WARM_UP + STEPS + 1);
    let messages = seconds_of_steps(&mut trained, WARM_UP + STEPS + 1..WARM_UP + STEPS + 3);
    trained.settle().unwrap().unwrap();
    println!("\nseconds {compute}\nseconds {messages}\nseconds {step}");
}

/// With so many seconds of arithmetic in a step.
fn check(test: &str, model: &str, compute_s: &[f64]) {
    if !has(&["ip", "tc"], test) {
        return;
    }
    let ground = Ground::new();
    let Some(network) = Network::new(4, CABLE, test) else { return };
    for compute_s in compute_s {
        let mut over = f64::INFINITY;
        for _ in 0..ATTEMPTS_MAX {
            let told = measured(&ground, &network, 0..4, &format!("overlap {model} {compute_s}"));
            let slowest = |index: usize| told.iter().map(|told| told[index]).fold(0.0, f64::max);
            let [compute, messages, step] = [0, 1, 2].map(slowest);
            over = step / compute.max(messages);
            say(&format!(
                "{model} on four hosts, 1 Gbit/s: arithmetic {compute:.2} s, messages {messages:.2} s, a step {step:.2} s: {over:.2} of the longer"
            ));
            if over <= 1.1 {
                break;
            }
        }
        assert!(over <= 1.1, "messages do not hide: {over}");
    }
}

/// Messages take twice as long as the arithmetic, and about as long.
#[test]
#[ignore = "cargo x ci: field"]
fn messages_hide_behind_arithmetic() {
    check("messages_hide_behind_arithmetic", "resnet50", &[0.6, 1.2]);
}

#[test]
#[ignore = "cargo x long: half a gigabyte of gradients"]
fn messages_of_a_large_classifier_hide_behind_arithmetic() {
    check("messages_of_a_large_classifier_hide_behind_arithmetic", "vgg16", &[3.4]);
}
