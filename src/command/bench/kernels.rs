//! `paceline bench kernels`: every distinct convolution and matrix product of a model's training step by itself, with every
//! algorithm that can compute it, against what the machine could do at best.

use std::process::ExitCode;

use crate::nn::{Mode, Network};
use crate::system::host::Host;
use crate::system::threads;
use crate::tensor::device::cpu::Cpu;
use crate::tensor::device::cpu::conv::Algorithm;
use crate::tensor::device::cpu::peak::Peak;
use crate::tensor::device::cpu::trial::Kernel;
use crate::tensor::{Graph, Plan, Wanted};
use crate::train::Registry;
use crate::train::replica::BUCKET_BYTES_MAX;
use serde_json::{Value, json};

use super::super::calibrate::{calibrate, tell};
use super::super::{Outcome, plan, print, print_json};
use super::bound::{Bound, flops_per_s};
use crate::arguments::BenchKernels;

/// What was measured of a kernel.
struct Row {
    kernel: Kernel,
    pass: &'static str,
    layer: String,
    layers: usize,
    /// Each candidate with its seconds; a product has one without a name.
    candidates: Vec<(Option<Algorithm>, f64)>,
    /// Which of them a step runs.
    chosen: usize,
    measured: bool,
}

/// Runs the command.
pub fn run(arguments: &BenchKernels, registry: &Registry) -> Outcome {
    let entry = &registry.find_model(&arguments.model)?;
    let input = plan::input(entry, arguments.size)?;
    let network = Network::new(entry, Mode::Train, arguments.batch, input, arguments.classes, 0.0)?;
    let wanted = Wanted { precision: arguments.dtype, ..network.wanted(BUCKET_BYTES_MAX) };
    let plan = Plan::new(network.graph, &wanted);
    let cpu = Cpu::new(arguments.threads.unwrap_or_else(threads::available));
    tell(&calibrate(&cpu, [&plan].into_iter(), arguments.calibrate));
    let peak = cpu.peak();
    if !arguments.json {
        head(arguments, &plan::describe(input), &cpu, &peak);
    }
    let mut rows = Vec::new();
    for (kernel, nodes) in Kernel::all(plan.graph()) {
        let row = measure(&cpu, plan.graph(), kernel, &nodes, arguments.seconds);
        if !arguments.json {
            print(&line(&row, &peak));
        }
        rows.push(row);
    }
    if arguments.json {
        print_json(&document(arguments, &cpu, &peak, &rows));
    } else {
        let total =
            |seconds: &dyn Fn(&Row) -> f64| 1e3 * rows.iter().map(|row| row.layers as f64 * seconds(row)).sum::<f64>();
        let (taken, bound) = (total(&Row::seconds), total(&|row| row.bound(&peak).seconds));
        print(&format!("in a step: {taken:.1} ms, at the bounds {bound:.1} ms\n"));
    }
    Ok(ExitCode::SUCCESS)
}

impl Row {
    /// The seconds of the algorithm that a step runs.
    fn seconds(&self) -> f64 {
        self.candidates[self.chosen].1
    }

    fn bound(&self, peak: &Peak) -> Bound {
        Bound::of_kernel(&self.kernel, self.candidates[self.chosen].0, peak)
    }
}

fn measure(cpu: &Cpu, graph: &Graph, kernel: Kernel, nodes: &[usize], seconds: f64) -> Row {
    let times = cpu.time(kernel, seconds);
    let (pass, candidates, chosen, measured) = match kernel {
        Kernel::Convolution { shape, pass, dtype } => {
            let (algorithm, measured) = cpu.algorithm(&shape, pass, dtype);
            let candidates = kernel.candidates();
            let chosen = candidates.iter().position(|&candidate| candidate == algorithm);
            (pass.name(), candidates.into_iter().map(Some).collect(), chosen.unwrap_or(0), measured)
        }
        Kernel::Product { .. } => ("product", vec![None], 0, false),
    };
    let layer = graph.nodes()[nodes[0]].layer.clone();
    let candidates = candidates.into_iter().zip(times).collect();
    Row { kernel, pass, layer, layers: nodes.len(), candidates, chosen, measured }
}

fn head(arguments: &BenchKernels, input: &str, cpu: &Cpu, peak: &Peak) {
    let BenchKernels { model, batch, dtype, .. } = arguments;
    let (threads, isa) = (cpu.pool().threads(), cpu.isa().name());
    let bf16 = peak.bf16_flops.map_or(String::new(), |flops| format!(", {:.0} in bf16", flops / 1e9));
    print(&format!(
        "{model} {input} batch {batch} {dtype} on {}, {isa}, {threads} threads: at most {:.0} GFLOP/s{bf16}, {:.1} GB/s read\n\n",
        Host::look().cpu,
        peak.f32_flops / 1e9,
        peak.bytes / 1e9
    ));
    print(&format!(
        "{:>6} {:<30} {:<11} {:<28} {:<10} {:>8} {:>8} {:>5} {:>8}  {}\n",
        "layers", "first layer", "pass", "", "algorithm", "ms", "GFLOP/s", "peak", "bound ms", "the others, ms"
    ));
}

fn line(row: &Row, peak: &Peak) -> String {
    let (kernel, seconds) = (&row.kernel, row.seconds());
    let name = |algorithm: Option<Algorithm>| algorithm.map_or("product", Algorithm::name);
    let rate = kernel.flops() as f64 / seconds;
    let Bound { seconds: bound, by_memory } = row.bound(peak);
    let others: Vec<String> = row
        .candidates
        .iter()
        .enumerate()
        .filter(|(index, _)| *index != row.chosen)
        .map(|(_, &(algorithm, seconds))| format!("{} {:.3}", name(algorithm), seconds * 1e3))
        .collect();
    let text = format!(
        "{:>6} {:<30} {:<11} {kernel:<28} {:<10} {:>8.3} {:>8.1} {:>4.0}% {:>8.3}{} {}{}",
        row.layers,
        row.layer,
        row.pass,
        name(row.candidates[row.chosen].0),
        seconds * 1e3,
        rate / 1e9,
        100.0 * rate / flops_per_s(kernel, peak),
        bound * 1e3,
        if by_memory { "m" } else { " " },
        others.join(", "),
        if row.measured { " (measured)" } else { "" },
    );
    format!("{}\n", text.trim_end())
}

fn document(arguments: &BenchKernels, cpu: &Cpu, peak: &Peak, rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let (kernel, Bound { seconds: bound, by_memory }) = (&row.kernel, row.bound(peak));
        let name = |algorithm: Option<Algorithm>| algorithm.map(Algorithm::name);
        let candidates: Vec<Value> = row
            .candidates
            .iter()
            .map(|&(algorithm, seconds)| json!({"algorithm": name(algorithm), "seconds": seconds}))
            .collect();
        json!({
            "kernel": kernel.to_string(), "pass": row.pass, "layer": row.layer, "layers": row.layers,
            "flops": kernel.flops(), "bytes": kernel.bytes(), "algorithm": name(row.candidates[row.chosen].0),
            "measured": row.measured, "seconds": row.seconds(), "bound_s": bound,
            "bound_by": if by_memory { "memory" } else { "arithmetic" }, "candidates": candidates,
            "peak_share": kernel.flops() as f64 / row.seconds() / flops_per_s(kernel, peak),
        })
    };
    json!({
        "model": arguments.model, "batch": arguments.batch, "dtype": arguments.dtype, "cpu": Host::look().cpu,
        "isa": cpu.isa(), "threads": cpu.pool().threads(), "peak_f32_flops": peak.f32_flops,
        "peak_bf16_flops": peak.bf16_flops, "read_bytes_per_s": peak.bytes,
        "kernels": rows.iter().map(row).collect::<Vec<_>>(),
    })
}
