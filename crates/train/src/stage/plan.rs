//! What a pipeline will do, before it does: its stages with their arithmetic, times, memory and messages, and how long a step takes by its
//! schedule. Plain values, apart from the clock by which stages are measured. `paceline plan --split` prints them.

use paceline_comm::Link;
use paceline_parallel::split::{Forecast, Schedule, StageTimes, draw};
use paceline_system::limits::Limits;
use paceline_tensor::cut;
use paceline_tensor::{Device, Graph, Plan, Value};

use super::{ModelStage, times};
use crate::balance::profiled;
use crate::config::Config;
use crate::error::TrainError;
use crate::micro_batch::micro_batches;
use crate::replica;
use crate::room::Candidate;

/// Steps of each stage of which the fastest counts: whatever else a machine does makes some of them slower.
const STEPS: usize = 3;

/// What stages are balanced and forecast by.
#[derive(Clone, Copy)]
pub enum Basis<'a> {
    /// Floating-point operations: the same on every machine, and nothing is run.
    Arithmetic,
    /// Seconds on a device of this machine, stage by stage.
    Time {
        /// Where.
        device: &'a Device,
        /// Has a look at each plan first, to choose algorithms.
        choose: &'a dyn Fn(&Plan),
    },
}

/// One stage.
#[derive(Debug)]
pub struct StagePlan {
    /// Its layers with parameters, in order; all of its layers, where none has any.
    pub layers: Vec<String>,
    /// Trained elements.
    pub parameters: u64,
    /// Floating-point operations for one sample: a backward pass counts twice the forward pass.
    pub flops: u64,
    /// Its part of all of them.
    pub arithmetic_share: f64,
    /// Seconds for a micro-batch, where they were measured.
    pub times: Option<StageTimes>,
    /// Its part of the time of all stages.
    pub time_share: Option<f64>,
    /// Activations of one micro-batch.
    pub arena_bytes: u64,
    /// Micro-batches whose activations are alive at once, by the schedule.
    pub slots: usize,
    /// Micro-batches for whose activations memory is taken: those of any schedule of this kind, which may be more.
    pub arenas: usize,
    /// The most that its process takes in all.
    pub process_bytes: u64,
    /// Activations that go to the stage behind, for one sample.
    pub sent_bytes: u64,
    /// Gradients that come back from there.
    pub returned_bytes: u64,
    /// Its step for one micro-batch.
    pub plan: Plan,
}

/// All stages, and how they take turns.
#[derive(Debug)]
pub struct PipelinePlan {
    /// The layers behind which the model is cut.
    pub cuts: Vec<String>,
    /// Each stage.
    pub stages: Vec<StagePlan>,
    /// Samples of a micro-batch, at most.
    pub micro_batch: usize,
    /// What each stage does in which order.
    pub schedule: Schedule,
    /// When, without updates and what workers send each other. By arithmetic, one device would take one second for all of it.
    pub forecast: Forecast,
    /// What the forecast was made from.
    times: Vec<StageTimes>,
    transfer_s: Vec<f64>,
}

impl PipelinePlan {
    /// The pipeline of a run, whose cuts are those of its configuration or else balanced. Messages between stages take the time of a link,
    /// or none within the memory of one machine.
    ///
    /// # Errors
    /// When the model cannot be cut so, or a stage needs more than the configuration's limit of memory: a sentence that says what to type.
    pub fn new(candidate: &Candidate<'_>, basis: Basis<'_>, link: Option<Link>) -> Result<Self, TrainError> {
        let cuts = match basis {
            _ if !candidate.config.cuts.is_empty() => candidate.config.cuts.clone(),
            Basis::Arithmetic => candidate.cuts(candidate.config)?.cuts,
            Basis::Time { device, choose } => candidate.measured_cuts(candidate.config, device, choose)?.cuts,
        };
        let config = &Config { cuts, ..candidate.config.clone() };
        let candidate = &Candidate { config, ..*candidate };
        let mut stages = stages(candidate)?;
        if config.memory_limit.is_some() {
            candidate.check(&Limits::default())?;
        }
        let micro_batch = candidate.stage_options(config, 0)?.micro_batch;
        if let Basis::Time { device, choose } = basis {
            measure(&mut stages, micro_batch, device, choose)?;
        }
        let parts = micro_batches(config.batch, candidate.workers, config.accumulate);
        let times = forecast_times(&stages, parts);
        let schedule = Schedule::new(config.schedule, parts, &times);
        stages.iter_mut().enumerate().for_each(|(number, stage)| stage.slots = schedule.slots(number));
        let message_s = |stage: &StagePlan| {
            let bytes = stage.sent_bytes.max(stage.returned_bytes) * micro_batch as u64;
            link.map_or(0.0, |link| link.message_s(bytes as f64))
        };
        let transfer_s: Vec<f64> = stages[..stages.len() - 1].iter().map(message_s).collect();
        let forecast = schedule.forecast(&times, &transfer_s);
        Ok(Self { cuts: config.cuts.clone(), stages, micro_batch, schedule, forecast, times, transfer_s })
    }

    /// Whether stages were measured, so that the forecast is in seconds.
    pub fn is_measured(&self) -> bool {
        self.stages.iter().all(|stage| stage.times.is_some())
    }

    /// The most that the speed-up could be by arithmetic: one over the largest share.
    pub fn arithmetic_bound(&self) -> f64 {
        1.0 / self.stages.iter().map(|stage| stage.arithmetic_share).fold(f64::MIN_POSITIVE, f64::max)
    }

    /// Seconds of a step in which the workers of each stage add up their gradients for so long, when its last pass is done.
    pub fn step_s(&self, exchange_s: &[f64]) -> f64 {
        let ends = self.forecast.spans.iter().map(|spans| spans.last().map_or(0.0, |span| span.end_s));
        ends.zip(exchange_s).map(|(end_s, exchange_s)| end_s + exchange_s).fold(0.0, f64::max)
    }

    /// What each stage does when, in so many columns.
    pub fn drawing(&self, columns: usize) -> String {
        draw(&self.schedule, &self.times, &self.transfer_s, columns)
    }
}

/// What can be said of the stages without running them.
fn stages(candidate: &Candidate<'_>) -> Result<Vec<StagePlan>, TrainError> {
    let config = candidate.config;
    let whole = candidate.uncut(config, &candidate.stage_options(config, 0)?).forward()?;
    let before = config.cuts.iter().map(|name| cut::behind_layer(&whole, name)).collect::<Result<Vec<_>, _>>()?;
    let cut = cut::cut(&whole, &before)?;
    let process_bytes = candidate.stage_bytes(config)?;
    let arithmetic = |graph: &Graph| 3 * graph.nodes().iter().map(|node| graph.flops(node)).sum::<u64>();
    let all = arithmetic(&whole).max(1) as f64;
    let mut stages = Vec::new();
    for (number, stage) in cut.iter().enumerate() {
        let options = candidate.stage_options(config, number)?;
        let samples = options.micro_batch as u64;
        let (graph, own) =
            (&stage.graph, ModelStage { cuts: &config.cuts, number, ..ModelStage::whole(candidate.model) });
        let plan = replica::plan(own, &options)?.0;
        let bytes =
            |values: &mut dyn Iterator<Item = Value>| values.map(|value| graph.info(value).bytes() as u64).sum();
        let sent: u64 = bytes(&mut stage.sent.iter().map(|crossing| crossing.value));
        let learned = stage.sent.iter().filter(|crossing| crossing.has_gradient);
        let returned: u64 = bytes(&mut learned.map(|crossing| crossing.value));
        let flops = arithmetic(graph);
        stages.push(StagePlan {
            layers: layers(graph),
            parameters: graph.parameters().iter().map(|&value| graph.shape(value).elements() as u64).sum(),
            flops: flops / samples,
            arithmetic_share: flops as f64 / all,
            times: None,
            time_share: None,
            arena_bytes: plan.arena_bytes() as u64,
            slots: options.slots,
            arenas: options.slots,
            process_bytes: process_bytes[number],
            sent_bytes: sent / samples,
            returned_bytes: returned / samples,
            plan,
        });
    }
    Ok(stages)
}

fn layers(graph: &Graph) -> Vec<String> {
    let with_parameters = cut::names(graph);
    let mut names: Vec<String> = match with_parameters.is_empty() {
        true => graph.nodes().iter().map(|node| node.layer.clone()).collect(),
        false => with_parameters.into_iter().map(str::to_owned).collect(),
    };
    names.dedup();
    names
}

/// Every stage by itself, as a run measures them before its first step.
fn measure(
    stages: &mut [StagePlan],
    samples: usize,
    device: &Device,
    choose: &dyn Fn(&Plan),
) -> Result<(), TrainError> {
    for stage in stages.iter_mut() {
        choose(&stage.plan);
        stage.times = Some(profiled(stage.plan.clone(), (samples, STEPS), device, times)?);
    }
    let seconds = |stage: &StagePlan| stage.times.map_or(0.0, |times| times.total_s());
    let all = stages.iter().map(seconds).sum::<f64>().max(f64::MIN_POSITIVE);
    stages.iter_mut().for_each(|stage| stage.time_share = Some(seconds(stage) / all));
    Ok(())
}

/// The times that were measured; else those of shares of one second, in which the three passes take the same.
fn forecast_times(stages: &[StagePlan], micro_batches: usize) -> Vec<StageTimes> {
    let of = |stage: &StagePlan| {
        let pass_s = stage.arithmetic_share / (3 * micro_batches) as f64;
        stage.times.unwrap_or(StageTimes { forward_s: pass_s, inputs_s: pass_s, weights_s: pass_s })
    };
    stages.iter().map(of).collect()
}

#[cfg(test)]
mod tests;
