//! `paceline plan`: what a step will do, before it does.

mod agreements;
mod messages;
mod parts;
mod stages;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;

use crate::nn::models::Named;
use crate::nn::{Input, Mode};
use crate::parallel::agree::Shape;
use crate::system::limits::Limits;
use crate::system::threads;
use crate::tensor::device::cpu::Cpu;
use crate::tensor::device::cpu::conv::{Algorithm, ConvPass};
use crate::tensor::device::cpu::trial::Kernel;
use crate::tensor::{Device, Graph, MemoryUse, Node, Plan as Planned};
use crate::train::balance::node_seconds;
use crate::train::config::SIDE_MAX;
use crate::train::replica::bucket_shapes;
use crate::train::room::{Candidate, Processes};
use crate::train::together::{Carry, Sharding, Split};
use crate::train::{Config, Registry};
use serde_json::{Value, json};

use agreements::Agreements;
use messages::Messages;

use super::calibrate::{calibrate, tell};
use super::{Outcome, print, print_json};
use crate::arguments::{Balance, Plan};
use crate::failure::Failure;
use crate::run::split::{cut_batch, fewest_stages};

/// Runs the command.
pub fn run(arguments: &Plan, registry: &Registry) -> Outcome {
    let workers = arguments.replicas.unwrap_or(arguments.workers);
    let arguments = &Plan { workers, ..arguments.clone() };
    if arguments.balance.is_some() && workers == 1 && arguments.split.is_none() {
        return Err(Failure::refused(
            "--balance says what --split and --workers are forecast by; type one of them too",
        ));
    }
    let entry = &registry.find_model(&arguments.model)?;
    let (input, config) = (input(entry, arguments.size)?, config(arguments));
    config.check()?;
    config.check_world(arguments.workers)?;
    let prepared = Prepared { entry, arguments, input, config }.fitted()?;
    if prepared.config.stages() > 1 {
        return stages::run(&prepared);
    }
    if prepared.config.parts() > 1 {
        return parts::run(&prepared);
    }
    let mode = if arguments.eval { Mode::Eval } else { Mode::Train };
    let plan = prepared.candidate().plan(mode)?;
    let messages = (arguments.workers > 1 && !arguments.eval).then(|| prepared.messages(&plan));
    let choices = prepared.memory_choices(mode)?;
    let cpu = Arc::new(Cpu::new(threads::available()));
    cpu.allow_winograd(arguments.winograd);
    tell(&calibrate(&cpu, [&plan].into_iter(), arguments.calibrate));
    let algorithms = algorithms(&cpu, plan.graph());
    let agreements = match &messages {
        Some(_) if arguments.replicas.is_none() => Some(prepared.agreements(&plan, &cpu)?),
        _ => None,
    };
    let found = Found { plan: &plan, choices: &choices, algorithms: &algorithms, messages, agreements };
    if arguments.json {
        print_json(&prepared.to_json(&found)?);
    } else {
        prepared.show(&found)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The run that such a step would be of.
fn config(arguments: &Plan) -> Config {
    let usual = Config::default();
    let mut config = Config {
        model: arguments.model.clone(),
        data: "synthetic:8x8x3/10".into(),
        batch: arguments.batch,
        accumulate: arguments.micro_batches.unwrap_or(arguments.accumulate),
        split: arguments.split.clone().unwrap_or_default(),
        cuts: arguments.cuts.clone(),
        schedule: arguments.schedule.unwrap_or_default(),
        memory_limit: arguments.memory_limit,
        threads: arguments.threads,
        clip_norm: arguments.clip_norm,
        optimizer: arguments.optimizer.unwrap_or(usual.optimizer),
        workers: arguments.workers,
        dtype: arguments.dtype,
        memory: arguments.memory,
        sync_batch_norm: arguments.sync_batch_norm,
        shard: arguments.shard,
        // Workers that map the same memory have one copy and nothing to divide: what is planned is a link.
        carry: match (arguments.replicas, arguments.shard) {
            (Some(_), _) => Carry::THREAD,
            (None, Sharding::None) => usual.carry,
            (None, Sharding::Optimizer) => Carry::TCP,
        },
        ..usual
    };
    if arguments.micro_batches.is_none() {
        cut_batch(&mut config);
    }
    config
}

/// Links between processes that nobody has described otherwise.
const LATENCY_US: f64 = 50.0;
const BANDWIDTH_GBIT: f64 = 1.0;

/// The links between processes: seconds of latency, and bytes per second.
fn link(arguments: &Plan) -> (f64, f64) {
    let latency_us = arguments.link_latency.unwrap_or(LATENCY_US);
    let bandwidth_gbit = arguments.link_bandwidth.unwrap_or(BANDWIDTH_GBIT);
    (latency_us * 1e-6, bandwidth_gbit * 1e9 / 8.0)
}

/// A run that is looked at.
struct Prepared<'a> {
    entry: &'a Named<'a>,
    arguments: &'a Plan,
    input: Input,
    config: Config,
}

/// What was found out about it.
struct Found<'a> {
    plan: &'a Planned,
    choices: &'a [MemoryChoice],
    algorithms: &'a [Computed],
    messages: Option<Messages>,
    agreements: Option<Agreements>,
}

impl Prepared<'_> {
    /// With as few stages as fit this machine, where that is what was asked for.
    fn fitted(mut self) -> Result<Self, Failure> {
        if self.config.split != Split::Auto {
            return Ok(self);
        }
        let limits = Limits::look();
        let config = Config { split: Split::Replicate, ..self.config.clone() };
        let fits = |config: &Config| {
            let here = Processes::here(config, config.workers, config.ranks());
            Candidate { config, here, ..self.candidate() }.check(&limits)
        };
        self.config = match fits(&config) {
            Ok(()) => config,
            Err(refusal) => fewest_stages(&config, fits).ok_or(refusal)?.0,
        };
        Ok(self)
    }

    /// As the trainer and its check of memory see it; all processes are on this machine.
    fn candidate(&self) -> Candidate<'_> {
        let (workers, config) = (self.arguments.workers, &self.config);
        Candidate {
            model: self.entry,
            config,
            input: self.input,
            classes: self.arguments.classes.unwrap_or(self.entry.classes),
            held_bytes: 0,
            workers,
            here: Processes::here(config, workers, config.ranks()),
            resumes: false,
            hosted: false,
        }
    }

    /// What the workers of a plan's stage, or of all of the model, send each other.
    fn messages(&self, plan: &Planned) -> Messages {
        let (buckets, options) = (bucket_shapes(plan), self.config.agreement(false));
        let protocol = self.config.agree.recipe().protocol(&Shape { buckets, ..Shape::default() }, &options);
        Messages::new(plan, &protocol, self.arguments.workers, link(self.arguments))
    }

    /// The ways in which the workers could agree, the fastest first.
    fn agreements(&self, plan: &Planned, cpu: &Arc<Cpu>) -> Result<Agreements, Failure> {
        let samples = self.share().div_ceil(self.config.accumulate);
        let measured = match self.arguments.balance {
            Some(Balance::Time) => Some(node_seconds(plan, samples, &Device::Cpu(Arc::clone(cpu)))?),
            Some(Balance::Arithmetic) | None => None,
        };
        Ok(Agreements::new(plan, &self.config, measured.as_deref(), link(self.arguments)))
    }

    /// The largest share that a worker has of the batch.
    fn share(&self) -> usize {
        self.arguments.batch.div_ceil(self.arguments.workers)
    }

    fn memory_choices(&self, mode: Mode) -> Result<Vec<MemoryChoice>, Failure> {
        let of = |memory| {
            let config = Config { memory, ..self.config.clone() };
            let plan = Candidate { config: &config, ..self.candidate() }.plan(mode)?;
            Ok(MemoryChoice::new(memory, &plan))
        };
        MemoryUse::ALL.into_iter().map(of).collect()
    }

    fn to_json(&self, found: &Found<'_>) -> Result<Value, Failure> {
        let arguments = self.arguments;
        let mut value = serde_json::to_value(found.plan.report()).expect("a report is JSON");
        value["model"] = json!(self.entry.name);
        value["batch"] = json!(self.share());
        value["accumulate"] = json!(arguments.accumulate);
        value["dtype"] = json!(arguments.dtype);
        value["memory"] = json!(arguments.memory);
        value["memory_choices"] = found.choices.iter().map(MemoryChoice::to_json).collect();
        value["convolutions"] = found.algorithms.iter().map(Computed::to_json).collect();
        if let Some(messages) = &found.messages {
            value["messages"] = messages.to_json();
        }
        if let Some(agreements) = &found.agreements {
            value["agreements"] = agreements.to_json();
        }
        if !arguments.eval {
            value["kept_gradient_bytes"] = json!(self.candidate().kept_gradient_bytes()?);
            value["optimizer_bytes"] = json!(self.candidate().optimizer_bytes()?[0]);
            value["needs_bytes"] = json!(self.candidate().bytes()?);
        }
        Ok(value)
    }

    fn show(&self, found: &Found<'_>) -> Result<(), Failure> {
        let (arguments, report) = (self.arguments, found.plan.report());
        let text = report.to_string();
        let (summary, nodes) = text.split_once("\nnodes, in order").unwrap_or((&text, ""));
        let (name, input, dtype) = (self.entry.name, describe(self.input), arguments.dtype);
        let batch = self.share();
        let parts = match arguments.accumulate {
            1 => ",".to_owned(),
            parts => format!(" in {parts} parts, of which this is one,"),
        };
        print(&format!("model            {name} at {input}, batch {batch}{parts} {dtype}\n{summary}"));
        if !arguments.eval {
            print("\nmemory of a step\n");
            found.choices.iter().for_each(|choice| print(&choice.line(&found.choices[0])));
            if self.config.shard == Sharding::Optimizer {
                let [own, all] = self.candidate().optimizer_bytes()?.map(mib);
                print(&format!("  optimizer's state: {own:.1} MiB of {all:.1} MiB with each worker\n"));
            }
            print(&match self.candidate().kept_gradient_bytes()? {
                0 => "  gradients are applied as they come, in the arena\n".to_owned(),
                bytes => format!("  gradients are kept until all are there: {:.1} MiB beside the arena\n", mib(bytes)),
            });
        }
        print(&summary_of(found.algorithms));
        if let Some(messages) = &found.messages {
            print(&messages.text(arguments.nodes));
        }
        if let Some(agreements) = &found.agreements {
            print(&agreements.text());
        }
        if arguments.nodes {
            print("\nconvolutions, in order\n");
            found.algorithms.iter().for_each(|computed| print(&computed.line()));
            print(&format!("\nnodes, in order{nodes}"));
        } else {
            print(&format!("\n{} nodes (--nodes lists them)\n", report.nodes.len()));
        }
        if !arguments.eval {
            let (gib, optimizer) = (mib(self.candidate().bytes()?) / 1024.0, self.config.optimizer);
            let processes = match arguments.workers {
                1 => "one process".to_owned(),
                replicas if self.config.has_rank_threads() => format!("{replicas} replicas in one process"),
                workers => format!("{workers} workers on this machine"),
            };
            print(&format!(
                "\nneeds {gib:.2} GiB in all: {processes} with {optimizer}, besides samples held in memory\n"
            ));
        }
        Ok(())
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0 / 1024.0
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
