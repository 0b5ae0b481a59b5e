//! In which order a replica computes its micro-batches: by the schedule of its pipeline, of which a model that is not cut is the only stage.

use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_parallel::split::{Kind, Schedule, StageTimes, draw};
use paceline_parallel::stage::{LinkShape, Side, StageLinks};
use paceline_system::event::{Event, StageUse};

use super::Replica;
use crate::error::TrainError;

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

    /// Computes together with other stages from now on.
    pub fn join_stages(&mut self, links: StageLinks) {
        self.exchange.join_stages(links);
    }

    /// Does something with the links to other stages, if there are any, and all else that is here.
    pub fn with_stages<T>(&mut self, body: impl FnOnce(&mut Self, &mut StageLinks) -> T) -> Option<T> {
        let mut links = self.exchange.take_stages()?;
        let done = body(self, &mut links);
        self.exchange.join_stages(links);
        Some(done)
    }

    /// Measures what a micro-batch takes in every stage, computes in the order that follows from it from now on, and tells of it. All stages
    /// call this at the same point.
    ///
    /// # Errors
    /// When another stage, or the way to it, or a device has failed.
    pub fn order_stages(&mut self, kind: Kind) -> Result<Event, TrainError> {
        let own = self.engine.stage_times()?;
        let (parameters, lengths) = (self.parameter_count() as u64, self.engine.lengths(self.options.micro_batch));
        let sent = lengths.sent.iter().sum::<usize>() * size_of::<f32>() / self.options.micro_batch.max(1);
        let mine = [own.forward_s, own.inputs_s, own.weights_s, parameters as f64, sent as f64];
        let all = self.with_stages(|_, links| links.gather(&mine)).transpose()?.unwrap_or_else(|| mine.to_vec());
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
        Ok(Event::Pipeline {
            schedule: kind.name().to_owned(),
            micro_batches: schedule.micro_batches() as u64,
            stages,
            forecast_s: forecast.seconds,
            speedup: forecast.speedup(),
            bound: forecast.bound(),
            drawing: draw(&schedule, &times, &transfer_s, DRAWING_COLUMNS),
        })
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
}
