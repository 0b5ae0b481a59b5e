//! `paceline bench step`: how fast a training step is on random data, for one batch size or a list of them.

use std::collections::BTreeMap;
use std::process::ExitCode;

use paceline::data::Batch;
use paceline::nn::zoo;
use paceline::system::clock::Clock;
use paceline::system::{host, threads};
use paceline::train::replica::Replica;
use serde_json::json;

use super::super::{Outcome, plan, print};
use super::{LEARNING_RATE, random_batch, replica};
use crate::cli::BenchStep;
use crate::failure::Failure;

/// Steps before the clock starts: memory grows and caches fill.
const UNTIMED: usize = 2;

/// Runs the command.
pub fn run(arguments: &BenchStep) -> Outcome {
    let entry = zoo::find(&arguments.model).map_err(Failure::refused)?;
    let input = plan::input(entry, arguments.size)?;
    for &size in &arguments.batch {
        let mut replica = replica(arguments, entry, input, size)?;
        let batch = random_batch(input, size, arguments.classes);
        let mut seconds = time(&mut replica, &batch, arguments.steps)?;
        show(arguments, &replica, &mut seconds, plan::describe(input));
        if arguments.profile {
            profile(&mut replica, &batch);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The seconds of each timed step.
fn time(replica: &mut Replica, batch: &Batch, steps: usize) -> Result<Vec<f64>, Failure> {
    let clock = Clock::real();
    let mut seconds = Vec::with_capacity(steps);
    for step in 0..UNTIMED + steps {
        let start = clock.seconds();
        let tally = replica.compute(batch, step as u64);
        replica.update(step as u64, LEARNING_RATE);
        if step >= UNTIMED {
            seconds.push(clock.seconds() - start);
        }
        if !tally.loss.is_finite() {
            return Err(Failure::failed(format!("the loss of step {step} is not a number: a time would mean nothing")));
        }
    }
    Ok(seconds)
}

fn show(arguments: &BenchStep, replica: &Replica, seconds: &mut [f64], input: String) {
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let (report, batch) = (replica.plan().report(), replica.options().micro_batch);
    let images_per_s = batch as f64 / median;
    let gflops = report.flops as f64 / median / 1e9;
    // What the process held at most, so a batch behind a larger one in the list shows the larger one's.
    let peak = host::peak_memory_bytes();
    if arguments.json {
        let value = json!({
            "model": arguments.model, "input": input, "batch": batch, "dtype": arguments.dtype,
            "threads": arguments.threads.unwrap_or_else(threads::available), "steps": arguments.steps,
            "step_s": median, "step_s_min": seconds[0], "step_s_max": seconds[seconds.len() - 1],
            "images_per_s": images_per_s, "gflops": gflops, "step_gflop": report.flops as f64 / 1e9,
            "peak_bytes": peak, "arena_bytes": report.arena_bytes, "activation_bytes": report.activation_bytes,
        });
        print(&format!("{value}\n"));
    } else {
        let spread = 100.0 * (seconds[seconds.len() - 1] / seconds[0] - 1.0);
        print(&format!(
            "{} {input} batch {batch} {}: {images_per_s:.2} images/s, {:.1} ms a step (spread {spread:.0}% over {}), {gflops:.1} GFLOP/s, peak {:.2} GB\n",
            arguments.model,
            arguments.dtype,
            median * 1e3,
            arguments.steps,
            peak as f64 / 1e9
        ));
    }
}

/// One more step, node by node, summed by operation and listed by layer, slowest first.
fn profile(replica: &mut Replica, batch: &Batch) {
    let seconds = replica.profile(batch, 0).seconds;
    let total: f64 = seconds.iter().sum();
    let graph = replica.plan().graph();
    let mut by_op: BTreeMap<&str, (f64, u64, u64, usize)> = BTreeMap::new();
    let mut nodes: Vec<(f64, usize)> = Vec::new();
    for (index, (node, &time)) in graph.nodes().iter().zip(&seconds).enumerate() {
        let sum = by_op.entry(node.op.name()).or_default();
        *sum = (sum.0 + time, sum.1 + graph.flops(node), sum.2 + graph.bytes_moved(node), sum.3 + 1);
        nodes.push((time, index));
    }
    let mut ops: Vec<_> = by_op.into_iter().collect();
    ops.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    print(&format!("\n{:<24} {:>6} {:>9} {:>6} {:>9} {:>7}\n", "operation", "nodes", "ms", "%", "GFLOP/s", "GB/s"));
    for (name, (time, flops, bytes, count)) in ops {
        let (ms, share) = (time * 1e3, 100.0 * time / total);
        print(&format!(
            "{name:<24} {count:>6} {ms:>9.2} {share:>6.1} {:>9.1} {:>7.1}\n",
            flops as f64 / time / 1e9,
            bytes as f64 / time / 1e9
        ));
    }
    nodes.sort_by(|a, b| b.0.total_cmp(&a.0));
    print(&format!("\n{:<24} {:<30} {:>16} {:>9} {:>9}\n", "slowest nodes", "layer", "output", "ms", "GFLOP/s"));
    for (time, index) in nodes.into_iter().take(20) {
        let node = &graph.nodes()[index];
        let (rate, shape) = (graph.flops(node) as f64 / time / 1e9, graph.shape(node.outputs[0]).to_string());
        print(&format!("{:<24} {:<30} {shape:>16} {:>9.2} {rate:>9.1}\n", node.op.name(), node.layer, time * 1e3));
    }
}
