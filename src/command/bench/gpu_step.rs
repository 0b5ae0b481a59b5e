//! `paceline bench step --device cuda`: how fast a training step is on a GPU, with the batch already there.
//!
//! Steps are started one after the other without waiting, as fast as the host can; a repeat is eight of them. Besides images per second
//! it says what the host needs to start a step.

use std::process::ExitCode;

use crate::nn::optim::Moment;
use crate::system::clock::Clock;
use crate::system::threads;
use crate::train::Registry;
use crate::train::replica::Replica;
use serde_json::json;

use super::super::{Outcome, plan, print, print_json};
use super::profile::Profile;
use super::{LEARNING_RATE, on_gpu, random_batch, replica};
use crate::arguments::BenchStep;
use crate::failure::Failure;

/// Steps of a repeat: as many as may be under way, so that starting one is never waiting for one.
const STEPS: usize = 8;

/// What was measured.
struct Times {
    /// Of one step, by repeat.
    seconds: Vec<f64>,
    /// What a core of the host works to start one, by repeat.
    starting: Vec<f64>,
    loss: f64,
}

/// Runs the command.
pub fn run(arguments: &BenchStep, registry: &Registry) -> Outcome {
    let entry = &registry.find_model(&arguments.model)?;
    let input = plan::input(entry, arguments.size)?;
    for &size in &arguments.batch {
        let mut replica = replica(arguments, entry, input, (size, None))?;
        let batch = random_batch(input, size, arguments.classes);
        on_gpu(&mut replica).fill_once(&batch, 1.0)?;
        let mut times = time(&mut replica, arguments.steps, size)?;
        let profile = arguments.profile.then(|| Profile::take(&mut replica, &batch)).transpose()?;
        show(arguments, &mut replica, &mut times, &plan::describe(input), profile.as_ref());
    }
    Ok(ExitCode::SUCCESS)
}

fn time(replica: &mut Replica, repeats: usize, batch: usize) -> Result<Times, Failure> {
    let clock = Clock::real();
    let mut times = Times { seconds: Vec::new(), starting: Vec::new(), loss: f64::NAN };
    let mut step = 0;
    for repeat in 0..=repeats {
        let (begin, busy) = (clock.seconds(), threads::cpu_seconds());
        for _ in 0..STEPS {
            on_gpu(replica).start(Moment { step, learning_rate: LEARNING_RATE })?;
            step += 1;
        }
        let starting = (threads::cpu_seconds() - busy) / STEPS as f64;
        let found = on_gpu(replica).session().finish().map_err(Failure::failed)?;
        let end = clock.seconds();
        if !found.loss_is_finite || !found.gradients_are_finite {
            return Err(Failure::failed(format!("step {step} is not a number: a time would mean nothing")));
        }
        if repeat > 0 {
            times.seconds.push((end - begin) / STEPS as f64);
            times.starting.push(starting);
        }
        times.loss = found.loss / batch as f64;
    }
    Ok(times)
}

fn show(arguments: &BenchStep, replica: &mut Replica, times: &mut Times, input: &str, profile: Option<&Profile>) {
    times.seconds.sort_by(f64::total_cmp);
    times.starting.sort_by(f64::total_cmp);
    let (median, starting) = (times.seconds[times.seconds.len() / 2], times.starting[times.starting.len() / 2]);
    let batch = replica.options().micro_batch;
    let report = replica.plan().report();
    let session = on_gpu(replica).session();
    let (bytes, calls) = (session.bytes(), session.calls());
    let images_per_s = batch as f64 / median;
    if arguments.json {
        let mut value = json!({
            "model": arguments.model, "input": input, "batch": batch, "dtype": arguments.dtype, "device": arguments.device,
            "step_s": median, "step_s_min": times.seconds[0], "step_s_max": times.seconds[times.seconds.len() - 1],
            "images_per_s": images_per_s, "start_s": starting, "calls": calls, "loss": times.loss,
            "step_gflop": report.flops as f64 / 1e9, "peak_bytes": bytes, "arena_bytes": report.arena_bytes,
            "memory_bytes": session.memory().into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        });
        if let Some(profile) = profile {
            value["profile"] = profile.to_json();
        }
        print_json(&value);
        return;
    }
    print(&format!(
        "{} {input} batch {batch} {} on {}: {images_per_s:.0} images/s, {:.3} ms a step ({:.3} to {:.3}), {:.1} TFLOP/s, {:.2} GB, loss {:.4}\n",
        arguments.model,
        arguments.dtype,
        arguments.device,
        median * 1e3,
        times.seconds[0] * 1e3,
        times.seconds[times.seconds.len() - 1] * 1e3,
        report.flops as f64 / median / 1e12,
        bytes as f64 / 1e9,
        times.loss
    ));
    print(&format!("{calls} calls in one graph; the host works {:.0} µs to start a step\n", starting * 1e6));
    if let Some(profile) = profile {
        profile.show(replica.plan().graph());
    }
}
