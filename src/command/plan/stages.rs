//! The stages of a pipeline, its schedule and what a step takes, as text and for programs. The figures are made in `train/src/stage/plan.rs`.

use std::fmt::Write;
use std::process::ExitCode;
use std::sync::Arc;

use crate::comm::Link;
use crate::nn::Input;
use crate::system::limits::in_words;
use crate::system::threads;
use crate::tensor::device::cpu::Cpu;
use crate::tensor::{Device, Plan as Planned};
use crate::train::Config;
use crate::train::room::Candidate;
use crate::train::stage::plan::{Basis, PipelinePlan, StagePlan};
use serde_json::{Value, json};

use super::messages::Messages;
use super::{Prepared, describe, link};
use crate::arguments::Balance;
use crate::command::calibrate::{calibrate, tell};
use crate::command::{Outcome, grouped, print, print_json};
use crate::failure::Failure;

/// Columns of a drawn schedule.
const COLUMNS: usize = 120;

/// Plans a pipeline and prints it.
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
    let between = linked.then(|| Link::new(latency_s, bytes_per_s));
    let plan = PipelinePlan::new(&prepared.candidate(), basis, between)?;
    let messages = |stage: &StagePlan| (config.workers > 1).then(|| prepared.messages(&stage.plan));
    let all_reduces = plan.stages.iter().filter_map(messages).collect();
    let pipeline = Pipeline { prepared, plan, all_reduces, threads, linked };
    if arguments.json {
        print_json(&pipeline.to_json()?);
    } else {
        print(&pipeline.text()?);
    }
    Ok(ExitCode::SUCCESS)
}

/// A pipeline that was planned.
struct Pipeline<'a> {
    prepared: &'a Prepared<'a>,
    plan: PipelinePlan,
    /// Of each stage, where there are several workers.
    all_reduces: Vec<Messages>,
    threads: usize,
    /// Whether processes are joined by links that were described, and not by the memory of one machine.
    linked: bool,
}

impl Pipeline<'_> {
    /// Seconds of a step, where stages were measured. What an all-reduce takes within one machine's memory is not known here.
    fn step_s(&self) -> Option<f64> {
        let exchange_s: Vec<f64> = match self.linked && !self.all_reduces.is_empty() {
            true => self.all_reduces.iter().map(Messages::seconds).collect(),
            false => vec![0.0; self.plan.stages.len()],
        };
        self.plan.is_measured().then(|| self.plan.step_s(&exchange_s))
    }

    /// How many times faster than one device that computes all stages of a worker.
    fn speedup(&self) -> f64 {
        let forecast = &self.plan.forecast;
        self.step_s().map_or(forecast.speedup(), |step_s| forecast.busy_s.iter().sum::<f64>() / step_s)
    }

    fn samples_per_s(&self) -> Option<f64> {
        self.step_s().map(|step_s| self.prepared.config.batch as f64 / step_s)
    }

    /// What the model is given.
    fn sample(&self) -> &'static str {
        match self.prepared.input {
            Input::Image { .. } => "image",
            Input::Tokens { .. } => "sequence",
        }
    }

    /// All stages of all workers.
    fn ranks(&self) -> String {
        match (self.prepared.config.ranks(), self.prepared.config.has_rank_threads()) {
            (ranks, true) => format!("{ranks} ranks in one process"),
            (ranks, false) => format!("{ranks} processes"),
        }
    }

    /// What the processes of all stages and workers take, on one machine.
    fn needs_bytes(&self) -> Result<u64, Failure> {
        let config = &Config { cuts: self.plan.cuts.clone(), ..self.prepared.config.clone() };
        Ok(Candidate { config, ..self.prepared.candidate() }.bytes()?)
    }

    fn text(&self) -> Result<String, Failure> {
        Ok([self.head(), self.table(), self.turns(), self.forecast(), self.sums(), self.end()?].concat())
    }

    fn head(&self) -> String {
        let (Prepared { entry, arguments, config, input }, plan) = (self.prepared, &self.plan);
        let threads = if self.threads == 1 { "one thread".to_owned() } else { format!("{} threads", self.threads) };
        let workers = if config.workers == 1 { String::new() } else { format!("{} workers × ", config.workers) };
        format!(
            "model            {} at {}, batch {} in {} micro-batches of {}, {}\n\
             pipeline         {workers}{} stages = {} of {threads} each, cut behind {}\n",
            entry.name,
            describe(*input),
            self.prepared.share(),
            plan.schedule.micro_batches(),
            plan.micro_batch,
            arguments.dtype,
            plan.stages.len(),
            self.ranks(),
            plan.cuts.join(", ")
        )
    }

    fn table(&self) -> String {
        let sample = self.sample();
        let timed = self.plan.is_measured();
        let mut rows = vec![vec![
            "stage".to_owned(),
            "layers".into(),
            "parameters".into(),
            format!("GFLOP/{sample}"),
            if timed { "ms/micro-batch".into() } else { String::new() },
            "arena × alive".into(),
            "process".into(),
            format!("sent/{sample}"),
        ]];
        for (number, stage) in self.plan.stages.iter().enumerate() {
            let time = stage
                .times
                .zip(stage.time_share)
                .map(|(times, share)| format!("{:.1}  {:>3.0}%", times.total_s() * 1e3, share * 100.0));
            rows.push(vec![
                number.to_string(),
                layers(stage),
                grouped(stage.parameters),
                format!("{:.2}  {:>3.0}%", stage.flops as f64 / 1e9, stage.arithmetic_share * 100.0),
                time.unwrap_or_default(),
                format!("{} × {}", short(stage.arena_bytes), stage.slots),
                in_words(stage.process_bytes),
                if stage.sent_bytes > 0 { short(stage.sent_bytes) } else { "–".into() },
            ]);
        }
        if !timed {
            rows.iter_mut().for_each(|row| drop(row.remove(4)));
        }
        let back = format!("gradients of what was sent go back, {}\n", self.returned());
        format!("\n{}{back}", columns(&rows, 2))
    }

    fn returned(&self) -> String {
        let all = self.plan.stages.iter().all(|stage| stage.returned_bytes == stage.sent_bytes);
        let each: Vec<String> = self.plan.stages.iter().map(|stage| short(stage.returned_bytes)).collect();
        if all { "as many bytes".into() } else { format!("{} of each stage", each.join(", ")) }
    }

    fn turns(&self) -> String {
        let (schedule, forecast) = (&self.plan.schedule, &self.plan.forecast);
        format!(
            "\nschedule         {}, {} micro-batches; stages wait {:.0}% of their time\n{}",
            schedule.kind(),
            schedule.micro_batches(),
            forecast.bubble() * 100.0,
            self.plan.drawing(COLUMNS)
        )
    }

    fn forecast(&self) -> String {
        let mut text = "\nforecast         ".to_owned();
        if let (Some(step_s), Some(rate)) = (self.step_s(), self.samples_per_s()) {
            let _ = write!(text, "{step_s:.3} s a step, {rate:.1} {}s/s, ", self.sample());
        }
        let _ = write!(text, "{:.2}× one device, without updates", self.speedup());
        text.push_str(match (self.plan.is_measured(), self.linked, self.all_reduces.is_empty()) {
            (false, ..) => "; --balance time measures seconds\n",
            (true, false, true) => "; stages are on one machine, and messages take no time\n",
            (true, false, false) => "; all are on one machine, and messages and sums take no time\n",
            (true, true, _) => "; messages go over links\n",
        });
        let _ = write!(text, "bound            {:.2}× by arithmetic", self.plan.arithmetic_bound());
        if self.plan.is_measured() {
            let _ = write!(text, ", {:.2}× by measured time", self.plan.forecast.bound());
        }
        text.push_str(": one over the largest share\n");
        text
    }

    /// What the workers of each stage send each other.
    fn sums(&self) -> String {
        if self.all_reduces.is_empty() {
            return String::new();
        }
        let (latency_s, bytes_per_s) = link(self.prepared.arguments);
        let mut text = format!(
            "\nall-reduces between the {} workers of each stage, over links of {:.0} µs and {:.2} Gbit/s\n",
            self.prepared.config.workers,
            latency_s * 1e6,
            bytes_per_s * 8.0 / 1e9
        );
        for (number, (stage, messages)) in self.plan.stages.iter().zip(&self.all_reduces).enumerate() {
            let (all, sent) = (grouped(gradient_bytes(stage)), grouped(self.most_sent(messages)));
            let ms = messages.seconds() * 1e3;
            let _ = writeln!(
                text,
                "  stage {number}: {all} bytes of gradients, for which a process sends {sent}; {ms:.1} ms"
            );
        }
        text
    }

    /// Bytes that the worker sends that sends most.
    fn most_sent(&self, messages: &Messages) -> u64 {
        (0..self.prepared.config.workers).map(|worker| messages.bytes(worker)[0]).max().unwrap_or(0)
    }

    fn end(&self) -> Result<String, Failure> {
        let (needs, config) = (in_words(self.needs_bytes()?), &self.prepared.config);
        let (ranks, optimizer) = (self.ranks(), config.optimizer);
        Ok(format!(
            "\nneeds {needs} in all: {ranks} on this machine with {optimizer}, besides samples held in memory\n"
        ))
    }

    fn to_json(&self) -> Result<Value, Failure> {
        let (Prepared { entry, arguments, config, .. }, plan) = (self.prepared, &self.plan);
        let stages: Vec<Value> =
            plan.stages.iter().enumerate().map(|(number, stage)| self.stage_json(number, stage)).collect();
        Ok(json!({
            "model": entry.name,
            "batch": self.prepared.share(),
            "dtype": arguments.dtype,
            "memory": arguments.memory,
            "split": config.split,
            "cuts": plan.cuts,
            "workers": config.workers,
            "processes": if config.has_rank_threads() { 1 } else { config.ranks() },
            "ranks": config.ranks(),
            "threads": self.threads,
            "stages": stages,
            "schedule": plan.schedule.kind().name(),
            "micro_batches": plan.schedule.micro_batches(),
            "micro_batch": plan.micro_batch,
            "bubble": plan.forecast.bubble(),
            "drawing": plan.drawing(COLUMNS),
            "forecast_s": self.step_s(),
            "samples_per_s": self.samples_per_s(),
            "speedup": self.speedup(),
            "arithmetic_bound": plan.arithmetic_bound(),
            "time_bound": plan.is_measured().then(|| plan.forecast.bound()),
            "needs_bytes": self.needs_bytes()?,
        }))
    }

    fn stage_json(&self, number: usize, stage: &StagePlan) -> Value {
        let mut value = json!({
            "layers": stage.layers,
            "parameters": stage.parameters,
            "flops": stage.flops,
            "arithmetic_share": stage.arithmetic_share,
            "forward_s": stage.times.map(|times| times.forward_s),
            "inputs_s": stage.times.map(|times| times.inputs_s),
            "weights_s": stage.times.map(|times| times.weights_s),
            "time_share": stage.time_share,
            "arena_bytes": stage.arena_bytes,
            "slots": stage.slots,
            "arenas": stage.arenas,
            "process_bytes": stage.process_bytes,
            "sent_bytes": stage.sent_bytes,
            "returned_bytes": stage.returned_bytes,
        });
        if let Some(messages) = self.all_reduces.get(number) {
            value["all_reduce"] = json!({
                "bytes": gradient_bytes(stage),
                "sent_bytes": self.most_sent(messages),
                "forecast_s": messages.seconds(),
            });
        }
        value
    }
}

/// Bytes of a stage's gradients as they travel.
fn gradient_bytes(stage: &StagePlan) -> u64 {
    let elements: usize = stage.plan.buckets().iter().map(|bucket| bucket.elements.len()).sum();
    (elements * size_of::<f32>()) as u64
}

/// The first and the last, and how many.
fn layers(stage: &StagePlan) -> String {
    match &stage.layers[..] {
        [] => "–".to_owned(),
        [only] => format!("{only} (1)"),
        [first, .., last] => format!("{first} to {last} ({})", stage.layers.len()),
    }
}

/// Bytes as people say them, small ones too: 173 KB, 1.6 MB, 24 MB.
pub(super) fn short(bytes: u64) -> String {
    match bytes as f64 {
        small if small < 999.5 => format!("{small:.0} bytes"),
        small if small < 0.9995e6 => format!("{:.0} KB", small / 1e3),
        small if small < 9.95e6 => format!("{:.1} MB", small / 1e6),
        _ => in_words(bytes),
    }
}

/// Rows of a table: so many columns of names to the left, numbers to the right.
pub(super) fn columns(rows: &[Vec<String>], names: usize) -> String {
    let count = |text: &String| text.chars().count();
    let width = |column: usize| rows.iter().map(|row| count(&row[column])).max().unwrap_or(0);
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(column, cell)| match column {
            name if name < names => format!("{cell:<width$}", width = width(column)),
            _ => format!("{cell:>width$}", width = width(column)),
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_said_shortly() {
        for (bytes, said) in [(0, "0 bytes"), (173_056, "173 KB"), (1_605_632, "1.6 MB"), (24_123_456, "24 MB")] {
            assert_eq!(short(bytes), said);
        }
    }
}
