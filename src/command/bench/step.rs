//! `paceline bench step`: how fast a training step is on random data, for one batch size or a list of them.

use std::process::ExitCode;

use crate::data::Batch;
use crate::nn::optim::Moment;
use crate::system::clock::Clock;
use crate::system::host;
use crate::tensor::device::cpu::pool::Pool;
use crate::train::Registry;
use crate::train::phases::Phases;
use crate::train::replica::Replica;
use serde_json::json;

use super::super::{Outcome, plan, print, print_json};
use super::profile::Profile;
use super::{LEARNING_RATE, random_batch, replica};
use crate::arguments::BenchStep;
use crate::failure::Failure;

/// Steps before the clock starts: memory grows and caches fill.
const UNTIMED: usize = 2;

/// Runs the command.
pub fn run(arguments: &BenchStep, registry: &Registry) -> Outcome {
    let entry = &registry.find_model(&arguments.model)?;
    let input = plan::input(entry, arguments.size)?;
    for &size in &arguments.batch {
        let mut replica = replica(arguments, entry, input, (size, None))?;
        let batch = random_batch(input, size, arguments.classes);
        let mut seconds = time(&mut replica, &batch, arguments.steps)?;
        // What the process held at most until now: a batch behind a larger one in the list shows the larger one's.
        let peak = host::peak_memory_bytes();
        let profile = arguments.profile.then(|| Profile::take(&mut replica, &batch)).transpose()?;
        show(arguments, &replica, (&mut seconds, peak), plan::describe(input), profile.as_ref());
    }
    Ok(ExitCode::SUCCESS)
}

/// The seconds of each timed step.
fn time(replica: &mut Replica, batch: &Batch, steps: usize) -> Result<Vec<f64>, Failure> {
    let clock = Clock::real();
    let mut seconds = Vec::with_capacity(steps);
    for step in 0..UNTIMED + steps {
        let start = clock.seconds();
        let moment = Moment { step: step as u64, learning_rate: LEARNING_RATE };
        let updated = replica.step(batch, moment, &mut Phases::start(&clock))?.updated;
        if step >= UNTIMED {
            seconds.push(clock.seconds() - start);
        }
        if updated.is_err() {
            return Err(Failure::failed(format!("the loss of step {step} is not a number: a time would mean nothing")));
        }
    }
    Ok(seconds)
}

fn show(
    arguments: &BenchStep,
    replica: &Replica,
    (seconds, peak): (&mut [f64], u64),
    input: String,
    profile: Option<&Profile>,
) {
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let (report, batch) = (replica.plan().report(), replica.options().micro_batch);
    let images_per_s = batch as f64 / median;
    let gflops = report.flops as f64 / median / 1e9;
    let pool = replica.device().pool();
    if arguments.json {
        let mut value = json!({
            "model": arguments.model, "input": input, "batch": batch, "dtype": arguments.dtype, "memory": arguments.memory,
            "isa": replica.device().isa().name(), "threads": pool.threads(), "cores": pool.cores(), "steps": arguments.steps,
            "step_s": median, "step_s_min": seconds[0], "step_s_max": seconds[seconds.len() - 1],
            "images_per_s": images_per_s, "gflops": gflops, "step_gflop": report.flops as f64 / 1e9,
            "peak_bytes": peak, "arena_bytes": report.arena_bytes, "activation_bytes": report.activation_bytes,
        });
        if let Some(profile) = profile {
            value["profile"] = profile.to_json();
        }
        print_json(&value);
    } else {
        let spread = 100.0 * (seconds[seconds.len() - 1] / seconds[0] - 1.0);
        print(&format!(
            "{} {input} batch {batch} {}: {images_per_s:.2} images/s, {:.1} ms a step (spread {spread:.0}% over {}), {gflops:.1} GFLOP/s, peak {:.2} GB, {}\n",
            arguments.model,
            arguments.dtype,
            median * 1e3,
            arguments.steps,
            peak as f64 / 1e9,
            placement(pool)
        ));
        if let Some(profile) = profile {
            profile.show(replica.plan().graph());
        }
    }
}

/// How many threads compute, and where.
fn placement(pool: &Pool) -> String {
    let threads = format!("{} thread{}", pool.threads(), if pool.threads() == 1 { "" } else { "s" });
    match (pool.cores(), pool.nodes()) {
        ([], _) => format!("{threads}, not pinned"),
        (cores, 1) => format!("{threads} pinned to cores {}", ranges(cores)),
        (cores, nodes) => format!("{threads} pinned to cores {} on {nodes} nodes", ranges(cores)),
    }
}

/// Numbers as in `0-3,8-11`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        run => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    runs.collect::<Vec<_>>().join(",")
}
