//! The parts of a replica, what they exchange in a step and what a step takes, as text and for programs, beside as many workers with whole
//! models. The figures are made in `train/src/stage/parts.rs`.

use std::fmt::Write;
use std::process::ExitCode;
use std::sync::Arc;

use crate::comm::{Choice, Link, Links};
use crate::system::limits::in_words;
use crate::system::threads;
use crate::tensor::device::cpu::Cpu;
use crate::tensor::{Device, Plan as Planned};
use crate::train::stage::parts::{LayerTraffic, PartPlan, PartsPlan, RankPlan, Traffic};
use crate::train::stage::plan::Basis;
use serde_json::{Value, json};

use super::messages::Messages;
use super::stages::{columns, short};
use super::{Prepared, describe, link};
use crate::arguments::Balance;
use crate::command::calibrate::{calibrate, tell};
use crate::command::{Outcome, grouped, print, print_json};
use crate::failure::Failure;

/// Plans parts and prints them.
pub fn run(prepared: &Prepared<'_>) -> Outcome {
    let (arguments, config) = (prepared.arguments, &prepared.config);
    let sharing = || threads::beside_loaders_sharing(config.loader_threads, config.ranks());
    let threads = config.threads.unwrap_or_else(sharing);
    let cpu = Arc::new(Cpu::new(threads));
    cpu.allow_winograd(arguments.winograd);
    let device = Device::Cpu(Arc::clone(&cpu));
    let choose = |plan: &Planned| tell(&calibrate(&cpu, [plan].into_iter(), arguments.calibrate));
    let basis = match arguments.balance.unwrap_or(Balance::Time) {
        Balance::Time => Basis::Time { device: &device, choose: &choose },
        Balance::Arithmetic => Basis::Arithmetic,
    };
    let linked = arguments.link_latency.is_some() || arguments.link_bandwidth.is_some();
    let (latency_s, bytes_per_s) = link(arguments);
    let choice = Choice::by_cost(Links::uniform(config.parts(), Link::new(latency_s, bytes_per_s)));
    let plan = PartsPlan::new(&prepared.candidate(), basis, &choice)?;
    let messages = |part: &PartPlan| (config.workers > 1).then(|| prepared.messages(&part.plan));
    let all_reduces = plan.parts.iter().filter_map(messages).collect();
    let parts = Parts { prepared, plan, all_reduces, threads, linked };
    if arguments.json {
        print_json(&parts.to_json()?);
    } else {
        print(&parts.text()?);
    }
    Ok(ExitCode::SUCCESS)
}

/// Parts that were planned.
struct Parts<'a> {
    prepared: &'a Prepared<'a>,
    plan: PartsPlan,
    /// Of each part, where there are several workers.
    all_reduces: Vec<Messages>,
    threads: usize,
    /// Whether processes are joined by links that were described, and not by the memory of one machine.
    linked: bool,
}

impl Parts<'_> {
    fn text(&self) -> Result<String, Failure> {
        Ok([self.head(), self.table(), self.layers(), self.forecast(), self.sums(), self.end()?].concat())
    }

    fn head(&self) -> String {
        let Prepared { entry, arguments, config, input } = self.prepared;
        let threads = if self.threads == 1 { "one thread".to_owned() } else { format!("{} threads", self.threads) };
        let workers = if config.workers == 1 { String::new() } else { format!("{} workers × ", config.workers) };
        let ranks = match config.has_rank_threads() {
            true => format!("{} ranks in one process", config.ranks()),
            false => format!("{} processes", config.ranks()),
        };
        let micro_batches = match self.plan.micro_batches {
            1 => String::new(),
            count => format!(" in {count} micro-batches of {}", self.plan.micro_batch),
        };
        format!(
            "model            {} at {}, batch {}{micro_batches}, {}\n\
             split            {}: {workers}{} parts = {ranks} of {threads} each\n",
            entry.name,
            describe(*input),
            self.prepared.share(),
            arguments.dtype,
            config.split,
            config.parts(),
        )
    }

    fn table(&self) -> String {
        let mut rows = vec![
            ["part", "parameters", "GFLOP/step", "ms/step", "arena", "process", "forward", "backward"]
                .map(str::to_owned)
                .to_vec(),
        ];
        let rank = |name: String, rank: &RankPlan| {
            vec![
                name,
                grouped(rank.parameters),
                format!("{:.2}", rank.flops as f64 / 1e9),
                rank.seconds.map_or_else(|| "–".to_owned(), |seconds| format!("{:.1}", seconds * 1e3)),
                short(rank.arena_bytes),
                in_words(rank.process_bytes),
            ]
        };
        let sent = |traffic: &Traffic| format!("{} in {}", short(traffic.sent_bytes), traffic.exchanges);
        for (number, part) in self.plan.parts.iter().enumerate() {
            let mut row = rank(number.to_string(), &part.rank);
            row.extend([sent(&part.forward), sent(&part.backward)]);
            rows.push(row);
        }
        let mut row = rank("replicated".to_owned(), &self.plan.replicated);
        row.extend(["–".to_owned(), sent(&self.plan.all_reduce)]);
        rows.push(row);
        format!(
            "\n{}forward and backward: what a part sends in a step, in so many exchanges; replicated: each of {} workers with whole models\n",
            columns(&rows, 1),
            self.prepared.config.parts()
        )
    }

    fn layers(&self) -> String {
        let mut rows = vec![["layers", "parameters", "forward", "backward", "replicated"].map(str::to_owned).to_vec()];
        for LayerTraffic { name, parameters, forward, backward, replicating } in &self.plan.layers {
            let sent =
                |traffic: &Traffic| if traffic.sent_bytes > 0 { short(traffic.sent_bytes) } else { "–".into() };
            rows.push(vec![name.clone(), grouped(*parameters), sent(forward), sent(backward), sent(replicating)]);
        }
        format!("\nsent by the first part, by layers\n{}", columns(&rows, 1))
    }

    fn forecast(&self) -> String {
        let (Some(step_s), Some([least_s, most_s])) =
            (self.plan.step_s(self.linked), self.plan.replicated_s(self.linked))
        else {
            return "\nforecast         --balance time measures seconds\n".to_owned();
        };
        let messages = match self.linked {
            true => "messages go over links",
            false => "all are on one machine, and what is exchanged takes no time",
        };
        let replicated = match self.linked {
            true => format!("{least_s:.3} to {most_s:.3} s, as much of its messages hides"),
            false => format!("{least_s:.3} s"),
        };
        format!("\nforecast         {step_s:.3} s a step, without updates; {messages}\nreplicated       {replicated}\n")
    }

    /// What the workers of each part send each other.
    fn sums(&self) -> String {
        let mut text = String::new();
        for (number, messages) in self.all_reduces.iter().enumerate() {
            let (sent, ms) = (grouped(messages.bytes(0)[0]), messages.seconds() * 1e3);
            let workers = self.prepared.config.workers;
            let _ = writeln!(text, "part {number}           its {workers} workers send {sent} bytes each; {ms:.1} ms");
        }
        if text.is_empty() { text } else { format!("\n{text}") }
    }

    fn end(&self) -> Result<String, Failure> {
        let (needs, config) = (in_words(self.prepared.candidate().bytes()?), &self.prepared.config);
        let (ranks, optimizer) = (config.ranks(), config.optimizer);
        Ok(format!(
            "\nneeds {needs} in all: {ranks} ranks on this machine with {optimizer}, besides samples held in memory\n"
        ))
    }

    fn to_json(&self) -> Result<Value, Failure> {
        let (Prepared { entry, arguments, config, .. }, plan) = (self.prepared, &self.plan);
        let parts = plan.parts.iter().enumerate().map(|(number, part)| {
            let mut value = rank_json(&part.rank);
            value["forward"] = traffic_json(&part.forward);
            value["backward"] = traffic_json(&part.backward);
            if let Some(messages) = self.all_reduces.get(number) {
                value["all_reduce"] = json!({ "sent_bytes": messages.bytes(0)[0], "forecast_s": messages.seconds() });
            }
            value
        });
        let layer = |layer: &LayerTraffic| {
            json!({
                "name": layer.name,
                "parameters": layer.parameters,
                "forward": traffic_json(&layer.forward),
                "backward": traffic_json(&layer.backward),
                "replicated": traffic_json(&layer.replicating),
            })
        };
        let mut replicated = rank_json(&plan.replicated);
        replicated["all_reduce"] = traffic_json(&plan.all_reduce);
        replicated["forecast_s"] = json!(plan.replicated_s(self.linked));
        Ok(json!({
            "model": entry.name,
            "batch": self.prepared.share(),
            "dtype": arguments.dtype,
            "memory": arguments.memory,
            "split": config.split,
            "workers": config.workers,
            "processes": if config.has_rank_threads() { 1 } else { config.ranks() },
            "ranks": config.ranks(),
            "threads": self.threads,
            "micro_batches": plan.micro_batches,
            "micro_batch": plan.micro_batch,
            "parts": parts.collect::<Vec<_>>(),
            "layers": plan.layers.iter().map(layer).collect::<Vec<_>>(),
            "replicated": replicated,
            "forecast_s": plan.step_s(self.linked),
            "needs_bytes": self.prepared.candidate().bytes()?,
        }))
    }
}

fn rank_json(rank: &RankPlan) -> Value {
    let RankPlan { parameters, flops, seconds, arena_bytes, process_bytes } = rank;
    json!({
        "parameters": parameters,
        "flops": flops,
        "seconds": seconds,
        "arena_bytes": arena_bytes,
        "process_bytes": process_bytes,
    })
}

fn traffic_json(traffic: &Traffic) -> Value {
    let Traffic { exchanges, sent_bytes, received_bytes, seconds } = traffic;
    json!({ "exchanges": exchanges, "sent_bytes": sent_bytes, "received_bytes": received_bytes, "forecast_s": seconds })
}
