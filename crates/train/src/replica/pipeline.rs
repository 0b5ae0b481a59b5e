//! In which order a replica computes its micro-batches: by the schedule of its pipeline, of which a model that is not cut is the only stage.

use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_parallel::siblings::{ReplicaLinks, Siblings};
use paceline_parallel::split::{Kind, Pass, Schedule, StageTimes, Task, draw};
use paceline_parallel::stage::{LinkShape, Side};
use paceline_system::event::{Event, PartUse, StageUse};
use paceline_system::phase::Phase;
use paceline_tensor::part;

use super::Replica;
use crate::engine::{Gradients, Halt, Slot};
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::micro_batch::{micro_batches, share};
use crate::together::Split;

/// Columns of a drawn schedule.
const DRAWING_COLUMNS: usize = 120;

/// A stage's place, and the schedules that it has run.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub stage: usize,
    pub stages: usize,
    kind: Kind,
    times: Vec<StageTimes>,
    /// One for every number of micro-batches that a batch was cut into.
    schedules: Vec<Arc<Schedule>>,
}

impl Pipeline {
    pub fn new(stage: usize, stages: usize) -> Self {
        let equal = StageTimes { forward_s: 1.0, inputs_s: 1.0, weights_s: 1.0 };
        Self { stage, stages, kind: Kind::default(), times: vec![equal; stages], schedules: Vec::new() }
    }
}

impl Replica {
    /// This replica's stage.
    pub fn stage_number(&self) -> usize {
        self.pipeline.stage
    }

    /// How many stages the model is cut into.
    pub fn stages(&self) -> usize {
        self.pipeline.stages
    }

    /// Computes in this order from now on: all stages with the same times.
    ///
    /// # Panics
    /// When there are not as many times as stages.
    pub fn schedule_by(&mut self, kind: Kind, times: &[StageTimes]) {
        assert_eq!(times.len(), self.pipeline.stages, "every stage has its times");
        (self.pipeline.kind, self.pipeline.times) = (kind, times.to_vec());
        self.pipeline.schedules.clear();
    }

    /// Computes together with other stages or parts from now on, which all call this at the same point.
    ///
    /// # Errors
    /// When another of them, or the way to it, has failed.
    pub fn join_siblings(&mut self, links: ReplicaLinks) -> Result<(), TrainError> {
        self.exchange.join_siblings(links);
        self.follow_first_part()
    }

    /// Does something with the other stages or parts, if there are any, and all else that is here.
    pub fn with_siblings<T>(&mut self, body: impl FnOnce(&mut Self, &mut Siblings) -> T) -> Option<T> {
        let mut links = self.exchange.take_siblings()?;
        let done = body(self, links.siblings());
        self.exchange.join_siblings(links);
        Some(done)
    }

    /// Measures what a micro-batch takes in every stage, computes in the order that follows from it from now on, and tells of it, with what a step is expected to take. All stages
    /// call this at the same point.
    ///
    /// # Errors
    /// When another stage, or the way to it, or a device has failed.
    pub fn order_stages(&mut self, kind: Kind) -> Result<(Event, f64), TrainError> {
        let own = self.engine.stage_times()?;
        let (parameters, lengths) = (self.parameter_count() as u64, self.engine.lengths(self.options.micro_batch));
        let sent = lengths.sent.iter().sum::<usize>() * size_of::<f32>() / self.options.micro_batch.max(1);
        let mine = [own.forward_s, own.inputs_s, own.weights_s, parameters as f64, sent as f64];
        let all = self.with_siblings(|_, stages| stages.gather(&mine)).transpose()?.unwrap_or_else(|| mine.to_vec());
        let of = |numbers: &[f64]| StageUse {
            forward_s: numbers[0],
            inputs_s: numbers[1],
            weights_s: numbers[2],
            parameters: numbers[3] as u64,
            sent_bytes: numbers[4] as u64,
        };
        let stages: Vec<StageUse> = all.chunks_exact(mine.len()).map(of).collect();
        let times: Vec<StageTimes> = stages
            .iter()
            .map(|&StageUse { forward_s, inputs_s, weights_s, .. }| StageTimes { forward_s, inputs_s, weights_s })
            .collect();
        self.schedule_by(kind, &times);
        let schedule = Schedule::new(kind, self.options.accumulate, &times);
        let transfer_s = vec![0.0; times.len() - 1];
        let forecast = schedule.forecast(&times, &transfer_s);
        let event = Event::Pipeline {
            schedule: kind.name().to_owned(),
            micro_batches: schedule.micro_batches() as u64,
            stages,
            forecast_s: forecast.seconds,
            speedup: forecast.speedup(),
            bound: forecast.bound(),
            drawing: draw(&schedule, &times, &transfer_s, DRAWING_COLUMNS),
        };
        Ok((event, forecast.seconds))
    }

    /// What the parts of this replica have, and what they exchange in the step of a whole batch; nothing where layers are whole. All parts
    /// call this at the same point.
    ///
    /// # Errors
    /// When another part, or the way to it, has failed.
    pub fn tell_parts(&mut self, split: &Split) -> Result<Option<Event>, TrainError> {
        let (traffic, times) = (part::traffic(self.plan().graph()), self.options.accumulate);
        let parameters = self.parameter_count();
        let told = self.with_siblings(|_, parts| {
            let sent = traffic.bytes_sent(parts.count());
            parts.gather(&[parameters, times * traffic.messages(), times * sent].map(|number| number as f64))
        });
        let Some(all) = told.transpose()? else { return Ok(None) };
        let of = |numbers: &[f64]| PartUse {
            parameters: numbers[0] as u64,
            exchanges: numbers[1] as u64,
            sent_bytes: numbers[2] as u64,
        };
        Ok(Some(Event::Parts { split: split.to_string(), parts: all.chunks_exact(3).map(of).collect() }))
    }

    /// What may be under way to the stages before and behind.
    pub fn link_shapes(&self) -> [LinkShape; 2] {
        let lengths = self.engine.lengths(self.options.micro_batch);
        // What is under way between two stages belongs to micro-batches that are alive in the first of them, of which there are at most
        // as many as here and one more, or as many as stages.
        let alive = (self.options.slots + 1).max(self.pipeline.stages);
        let shape = |forward: &[usize], backward: &[usize]| LinkShape {
            messages: alive * forward.len().max(backward.len()),
            elements: forward.iter().chain(backward).copied().max().unwrap_or(0),
        };
        [shape(&lengths.received, &lengths.leaving), shape(&lengths.sent, &lengths.arriving)]
    }

    /// Micro-batches of a batch: as many on all replicas.
    pub fn micro_batches(&self, batch: &Batch) -> usize {
        let all = share(batch, self.exchange.rank(), self.world()).all;
        micro_batches(all, self.world(), self.options.accumulate)
    }

    /// Samples of all replicas in the step of a batch.
    pub fn samples(&self, batch: &Batch) -> u64 {
        share(batch, self.exchange.rank(), self.world()).all as u64
    }

    /// The order of a batch's passes; the neighbours' messages are expected from now on.
    ///
    /// # Errors
    /// When a neighbour, or the way to it, has failed.
    pub fn schedule(&mut self, batch: &Batch) -> Result<Arc<Schedule>, TrainError> {
        let count = self.micro_batches(batch);
        let Pipeline { stage, stages, kind, times, schedules } = &mut self.pipeline;
        let found = schedules.iter().find(|schedule| schedule.micro_batches() == count).cloned();
        let schedule = found.unwrap_or_else(|| {
            let made = Arc::new(Schedule::new(*kind, count, times));
            schedules.push(Arc::clone(&made));
            made
        });
        let (stage, stages) = (*stage, *stages);
        for part in 0..count {
            let samples = self.inputs(batch, part, self.exchange.moment()).pass.samples;
            let lengths = self.engine.lengths(samples);
            if stage > 0 {
                self.exchange.expect(Side::Before, &lengths.received)?;
            }
            if stage + 1 < stages {
                self.exchange.expect(Side::Behind, &lengths.arriving)?;
            }
        }
        Ok(schedule)
    }

    /// Computes one pass over a micro-batch: the next of [`Replica::schedule`]. In the forward pass late sums of the step before are applied
    /// before they are read; in the backward pass final buckets leave, and what came back is applied.
    ///
    /// # Errors
    /// When another replica, or the way to it, or a device has failed, or the step would spoil the weights.
    ///
    /// # Panics
    /// When the replica was built for evaluation.
    pub fn pass(&mut self, batch: &Batch, schedule: &Schedule, task: Task) -> Result<(), Halt> {
        let slot = Slot(schedule.slot(self.pipeline.stage, task.micro_batch));
        let separate = schedule.separates_gradients();
        match task.pass {
            Pass::Forward => {
                let inputs = self.inputs(batch, task.micro_batch, self.exchange.moment());
                let of = self.samples(batch) as usize;
                self.exchange.count(batch.size, task.micro_batch, of);
                self.engine.forward(slot, &inputs, &mut self.exchange)
            }
            Pass::Backward => {
                let which = if separate { Gradients::Inputs } else { Gradients::All };
                self.engine.backward(slot, which, &mut self.exchange)
            }
            Pass::Weights => self.engine.backward(slot, Gradients::Weights, &mut self.exchange),
        }
    }

    /// The logits of a batch in evaluation mode, for its `size` samples; it may be smaller than planned.
    ///
    /// # Errors
    /// When a device fails.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<(Vec<f32>, Tally), TrainError> {
        let Self { engine, exchange, pipeline, .. } = self;
        if pipeline.stage > 0 {
            exchange.expect(Side::Before, &engine.evaluation_lengths().received)?;
        }
        engine.evaluate(batch, exchange).map_err(|halt| match halt {
            Halt::Failed(error) => error,
            _ => TrainError::Refused("an evaluation changes nothing, so nothing can refuse it".into()),
        })
    }

    /// Whether to evaluate one batch more: the first stage decides, and the others hear of it; parts have to agree.
    ///
    /// # Errors
    /// When another stage or part, or the way to it, has failed.
    pub fn evaluates_on(&mut self, wishes: bool) -> Result<bool, TrainError> {
        let Pipeline { stage, stages, .. } = self.pipeline;
        if stages == 1 {
            return self.exchange.all_parts_wish(wishes);
        }
        self.exchange.pass_on(wishes, (stage, stages))
    }

    /// Elements of the whole model's parameters.
    pub fn whole_parameter_count(&self) -> usize {
        let parameters = self.whole.as_ref().map_or(&self.parameters, |whole| &whole.parameters);
        parameters.iter().map(|parameter| parameter.shape.elements()).sum()
    }
}

/// What a pass is told as.
pub(crate) const fn phase_of(task: Task) -> Phase {
    match task.pass {
        Pass::Forward => Phase::Forward,
        Pass::Backward | Pass::Weights => Phase::Backward,
    }
}
