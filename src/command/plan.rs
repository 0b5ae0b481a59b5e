//! `paceline plan`: what a step will do, before it does.

mod messages;

use std::collections::BTreeMap;
use std::process::ExitCode;

use crate::nn::models::Named;
use crate::nn::{Input, Mode, Network};
use crate::system::threads;
use crate::tensor::device::cpu::Cpu;
use crate::tensor::device::cpu::conv::{Algorithm, ConvPass};
use crate::tensor::device::cpu::trial::Kernel;
use crate::tensor::{Graph, MemoryUse, Node, Plan as Planned, Wanted};
use crate::train::Registry;
use crate::train::config::SIDE_MAX;
use crate::train::replica;
use serde_json::{Value, json};

use messages::Messages;

use super::calibrate::{calibrate, tell};
use super::{Outcome, print, print_json};
use crate::arguments::Plan;
use crate::failure::Failure;

/// Runs the command.
pub fn run(arguments: &Plan, registry: &Registry) -> Outcome {
    let entry = &registry.find_model(&arguments.model)?;
    let workers = arguments.workers;
    if !arguments.batch.is_multiple_of(workers) {
        let more = arguments.batch.next_multiple_of(workers);
        let sentence =
            format!("--batch {} cannot be shared equally by {workers} workers; type --batch {more}", arguments.batch);
        return Err(Failure::refused(sentence));
    }
    let (input, batch) = (input(entry, arguments.size)?, arguments.batch / workers);
    let mode = if arguments.eval { Mode::Eval } else { Mode::Train };
    let network = Network::new(entry, mode, batch, input, arguments.classes.unwrap_or(entry.classes), 0.0)?;
    let (precision, shares_statistics) = (arguments.dtype, arguments.sync_batch_norm);
    let wanted = Wanted { precision, shares_statistics, ..replica::wanted(&network, replica::early(false)) };
    let planned = |memory| Planned::new(network.graph.clone(), &Wanted { memory, ..wanted.clone() });
    let plan = planned(arguments.memory);
    let report = plan.report();
    let link = (arguments.link_latency * 1e-6, arguments.link_bandwidth * 1e9 / 8.0);
    let messages = (workers > 1 && !arguments.eval).then(|| Messages::new(&plan, workers, link));
    let choices = MemoryUse::ALL.map(|memory| MemoryChoice::new(memory, &planned(memory)));
    let cpu = Cpu::new(threads::available());
    cpu.allow_winograd(arguments.winograd);
    tell(&calibrate(&cpu, [&plan].into_iter(), arguments.calibrate));
    let algorithms = algorithms(&cpu, plan.graph());
    if arguments.json {
        let mut value = serde_json::to_value(&report).expect("a report is JSON");
        value["model"] = json!(entry.name);
        value["batch"] = json!(batch);
        value["dtype"] = json!(arguments.dtype);
        value["memory"] = json!(arguments.memory);
        value["memory_choices"] = choices.iter().map(MemoryChoice::to_json).collect();
        value["convolutions"] = algorithms.iter().map(Computed::to_json).collect();
        if let Some(messages) = &messages {
            value["messages"] = messages.to_json();
        }
        print_json(&value);
        return Ok(ExitCode::SUCCESS);
    }
    let text = report.to_string();
    let (summary, nodes) = text.split_once("\nnodes, in order").unwrap_or((&text, ""));
    let (name, input, dtype) = (entry.name, describe(input), arguments.dtype);
    print(&format!("model            {name} at {input}, batch {batch}, {dtype}\n{summary}"));
    if !arguments.eval {
        print("\nmemory of a step\n");
        choices.iter().for_each(|choice| print(&choice.line(&choices[0])));
    }
    print(&summary_of(&algorithms));
    if let Some(messages) = &messages {
        print(&messages.text(arguments.nodes));
    }
    if arguments.nodes {
        print("\nconvolutions, in order\n");
        algorithms.iter().for_each(|computed| print(&computed.line()));
        print(&format!("\nnodes, in order{nodes}"));
    } else {
        print(&format!("\n{} nodes (--nodes lists them)\n", report.nodes.len()));
    }
    Ok(ExitCode::SUCCESS)
}

/// What a use of memory comes to.
struct MemoryChoice {
    memory: MemoryUse,
    arena_bytes: u64,
    activation_bytes: u64,
    flops: u64,
}

impl MemoryChoice {
    fn new(memory: MemoryUse, plan: &Planned) -> Self {
        let graph = plan.graph();
        let flops = graph.nodes().iter().map(|node| graph.flops(node)).sum();
        Self { memory, arena_bytes: plan.arena_bytes() as u64, activation_bytes: plan.activation_bytes() as u64, flops }
    }

    fn to_json(&self) -> Value {
        let Self { memory, arena_bytes, activation_bytes, flops } = self;
        json!({"memory": memory, "arena_bytes": arena_bytes, "activation_bytes": activation_bytes, "flops": flops})
    }

    /// Its figures, and what they are of those of `normal`.
    fn line(&self, normal: &Self) -> String {
        let mib = |bytes: u64| bytes as f64 / 1024.0 / 1024.0;
        let share = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
        format!(
            "  {:<8} arena {:.1} MiB ({:.0}%), activations {:.1} MiB ({:.0}%), {:.3} GFLOP ({:.1}%)\n",
            self.memory,
            mib(self.arena_bytes),
            share(self.arena_bytes, normal.arena_bytes),
            mib(self.activation_bytes),
            share(self.activation_bytes, normal.activation_bytes),
            self.flops as f64 / 1e9,
            share(self.flops, normal.flops)
        )
    }
}

/// How one pass of a layer's convolution will be computed.
struct Computed {
    layer: String,
    pass: ConvPass,
    algorithm: Algorithm,
    measured: bool,
}

impl Computed {
    fn to_json(&self) -> Value {
        let (pass, algorithm) = (self.pass.name(), self.algorithm.name());
        json!({"layer": self.layer, "pass": pass, "algorithm": algorithm, "measured": self.measured})
    }

    fn how(&self) -> &'static str {
        if self.measured { "measured" } else { "by rule" }
    }

    fn line(&self) -> String {
        format!("{:<36} {:<12} {:<10} {}\n", self.layer, self.pass.name(), self.algorithm.name(), self.how())
    }
}

fn algorithms(cpu: &Cpu, graph: &Graph) -> Vec<Computed> {
    let of = |node: &Node| match Kernel::of(graph, node) {
        Some(Kernel::Convolution { shape, pass, dtype }) => {
            let (algorithm, measured) = cpu.algorithm(&shape, pass, dtype);
            Some(Computed { layer: node.layer.clone(), pass, algorithm, measured })
        }
        _ => None,
    };
    graph.nodes().iter().filter_map(of).collect()
}

/// How many passes each algorithm computes.
fn summary_of(algorithms: &[Computed]) -> String {
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for computed in algorithms {
        *counts.entry((computed.algorithm.name(), computed.how())).or_default() += 1;
    }
    if counts.is_empty() {
        return String::new();
    }
    let parts: Vec<String> = counts.iter().map(|((name, how), count)| format!("{count} {name} ({how})")).collect();
    format!("\nconvolution passes: {}\n", parts.join(", "))
}

/// A model's input at a size asked for.
pub fn input(entry: &Named<'_>, size: Option<usize>) -> Result<Input, Failure> {
    let Some(size) = size else { return Ok(entry.native) };
    if size > SIDE_MAX {
        return Err(Failure::refused(format!("--size {size} is too large; type --size with at most {SIDE_MAX}")));
    }
    match entry.native {
        Input::Tokens { .. } => Ok(Input::Tokens { sequence: size }),
        Input::Image { channels, .. } if size >= entry.smallest => Ok(Input::Image { size: [size, size], channels }),
        Input::Image { .. } => {
            let (name, smallest) = (entry.name, entry.smallest);
            Err(Failure::refused(format!(
                "{name} needs images of at least {smallest}×{smallest}; type --size {smallest} or more"
            )))
        }
    }
}

/// An input in words.
pub fn describe(input: Input) -> String {
    match input {
        Input::Image { size: [height, width], channels } => format!("{width}×{height}×{channels}"),
        Input::Tokens { sequence } => format!("{sequence} tokens"),
    }
}
