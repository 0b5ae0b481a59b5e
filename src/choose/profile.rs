//! A few passes over the model in this process, from which set-ups are forecast: as many threads, or as many workers at the same time, as a
//! set-up has, and each stage of a pipeline. Algorithms of convolutions that are chosen here, one plan at a time, are known to the runs
//! that are measured afterwards.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use crate::comm::{Choice, Link, Links};
use crate::nn::Mode;
use crate::tensor::device::cpu::Cpu;
use crate::tensor::{Device, Plan};
use crate::train::balance::pass_s;
use crate::train::stage::parts::{PartPlan, PartsPlan};
use crate::train::stage::plan::{Basis, PipelinePlan, StagePlan};
use crate::train::together::Split;
use crate::train::{Config, TrainError};

use super::apply::Subject;
use super::forecast::{PartPasses, Passes, StagePasses};
use super::setup::Setup;
use crate::failure::Failure;
use crate::parallel::split::{Kind, StageTimes};
use crate::run::calibrate::{Calibrate, calibrate};
use crate::system::clock::Clock;

/// Seconds within which passes of a plan begin, beyond the first ones.
const REPEATED_S: f64 = 0.15;

/// Numbers that are streamed, in each of two buffers: more than the caches of a processor hold.
const STREAMED: usize = 16 << 20;

/// The batch of the first look, as a part of the whole: how long anything takes is not known before.
const LOOK: usize = 8;

/// The smallest batch by which a large model is profiled, as a part of the whole.
const LEAST: usize = 8;

/// Micro-batches of stages that are profiled, where the batch has as many.
const PARTS: [usize; 2] = [16, 4];

/// What messages between parts are expected to take, which share memory: none of it is measured here.
const LATENCY_S: f64 = 20e-6;
const BYTES_PER_S: f64 = 4e9;

/// Takes the passes.
pub struct Profiler<'a> {
    /// What is trained.
    pub subject: Subject<'a>,
    /// How.
    pub config: &'a Config,
    /// How algorithms are chosen.
    pub calibrate: Calibrate,
    /// How many times smaller the profiled batches are.
    pub smaller: usize,
}

impl Profiler<'_> {
    /// Roughly how long both passes over the batch take on one core.
    pub fn look(&self) -> Result<f64, Failure> {
        let look = Profiler { smaller: LOOK, calibrate: Calibrate::Off, ..*self };
        Ok(look.passes(&Setup::threads(1))?.seconds)
    }

    /// With batches so small that passes which take so long in all fit into a time.
    pub fn within(self, expected_s: f64, allowed_s: f64) -> Self {
        let fits = |smaller: &usize| expected_s / *smaller as f64 <= allowed_s;
        let smaller = [1, 2, 4].into_iter().find(fits).unwrap_or(LEAST);
        // No run would use what was chosen for a smaller batch.
        let calibrate = if smaller == 1 { self.calibrate } else { Calibrate::Off };
        Self { smaller, calibrate, ..self }
    }

    /// Both passes of each worker over its share, all at the same time.
    pub fn passes(&self, setup: &Setup) -> Result<Passes, Failure> {
        let (workers, threads) = (setup.workers, setup.threads.unwrap_or(1));
        let whole = setup.change(self.config);
        let parts = whole.accumulate * workers;
        let batch = (whole.batch / self.smaller).max(parts);
        let config = Config { batch, ..whole };
        let plan = self.subject.candidate(&config).plan(Mode::Train)?;
        let samples = batch.div_ceil(parts);
        let cpus: Vec<Arc<Cpu>> = (0..workers).map(|_| self.cpu(threads, &plan)).collect();
        let seconds = together(cpus, &plan, samples)?;
        let passes = config.accumulate as f64 * self.config.batch as f64 / batch as f64;
        Ok(Passes { workers, threads, seconds: seconds * passes })
    }

    /// By how much a pass takes longer while so many cores have one each.
    pub fn crowd(&self, cores: usize) -> Result<f64, Failure> {
        let whole = Setup { workers: cores, ..Setup::threads(1) }.change(self.config);
        let batch = (whole.batch / self.smaller / whole.accumulate).max(cores);
        let config = Config { batch, accumulate: 1, ..whole };
        let plan = self.subject.candidate(&config).plan(Mode::Train)?;
        let cpus = |count: usize| (0..count).map(|_| self.cpu(1, &plan)).collect();
        let samples = batch.div_ceil(cores);
        let (alone_s, all_s) = (together(cpus(1), &plan, samples)?, together(cpus(cores), &plan, samples)?);
        Ok((all_s / alone_s.max(1e-9)).max(1.0))
    }

    /// Where to cut into so many stages.
    pub fn cuts(&self, stages: usize, threads: usize) -> Result<Vec<String>, TrainError> {
        let config = self.staged(stages, self.parts()[0]);
        let cpu = Arc::new(Cpu::new(threads));
        cpu.allow_winograd(config.winograd);
        let choose = |plan: &Plan| self.choose(&cpu, plan);
        Ok(self.subject.candidate(&config).measured_cuts(&config, &Device::Cpu(Arc::clone(&cpu)), &choose)?.cuts)
    }

    /// The stages of some cuts, by two sizes of micro-batch, the smaller one first.
    pub fn stages(&self, cuts: &[String], threads: usize) -> Result<Vec<StagePasses>, TrainError> {
        self.parts().into_iter().map(|parts| self.stage_passes(cuts, parts, threads)).collect()
    }

    /// The parts of a split, each by itself.
    pub fn part_passes(&self, setup: &Setup) -> Result<PartPasses, TrainError> {
        let whole = setup.change(self.config);
        let parts = whole.parts();
        let batch = (whole.batch / self.smaller).max(parts * whole.accumulate);
        let config = Config { batch, memory_limit: None, ..whole };
        let cpu = Arc::new(Cpu::new(setup.threads.unwrap_or(1)));
        cpu.allow_winograd(config.winograd);
        let (device, choose) = (Device::Cpu(Arc::clone(&cpu)), |plan: &Plan| self.choose(&cpu, plan));
        let choice = Choice::by_cost(Links::uniform(parts, Link::new(LATENCY_S, BYTES_PER_S)));
        let basis = Basis::Time { device: &device, choose: &choose };
        let plan = PartsPlan::new(&self.subject.candidate(&config), basis, &choice)?;
        let larger = self.config.batch as f64 / batch as f64;
        let most = |of: &dyn Fn(&PartPlan) -> f64| plan.parts.iter().map(of).fold(0.0, f64::max);
        let all: u64 = plan.replicated.parameters;
        Ok(PartPasses {
            split: setup.split.clone(),
            seconds: larger * most(&|part| part.rank.seconds.unwrap_or(0.0)),
            exchange_s: most(&|part| part.forward.seconds + part.backward.seconds),
            parameters: most(&|part| part.rank.parameters as f64 / all.max(1) as f64),
        })
    }

    fn parts(&self) -> [usize; 2] {
        PARTS.map(|parts| parts.min(self.config.batch))
    }

    fn staged(&self, stages: usize, parts: usize) -> Config {
        let split = Split::Pipeline(stages);
        Config { split, accumulate: parts, schedule: Kind::ZeroBubble, ..Setup::threads(1).change(self.config) }
    }

    fn stage_passes(&self, cuts: &[String], parts: usize, threads: usize) -> Result<StagePasses, TrainError> {
        // A smaller batch in fewer parts: micro-batches stay as they are.
        let fewer = (parts / self.smaller).max(1);
        let staged = Config { split: Split::Pipeline(cuts.len() + 1), ..self.staged(cuts.len() + 1, parts) };
        let batch = (staged.batch / parts * fewer).max(fewer);
        // This process is not one of those that are limited.
        let config = Config { batch, accumulate: fewer, cuts: cuts.to_vec(), memory_limit: None, ..staged };
        let cpu = Arc::new(Cpu::new(threads));
        cpu.allow_winograd(config.winograd);
        let (device, choose) = (Device::Cpu(Arc::clone(&cpu)), |plan: &Plan| self.choose(&cpu, plan));
        let basis = Basis::Time { device: &device, choose: &choose };
        let plan = PipelinePlan::new(&self.subject.candidate(&config), basis, None)?;
        let all: u64 = plan.stages.iter().map(|stage| stage.parameters).sum();
        let part = |stage: &StagePlan| stage.parameters as f64 / all.max(1) as f64;
        let times: Vec<StageTimes> = plan.stages.iter().filter_map(|stage| stage.times).collect();
        Ok(StagePasses { samples: plan.micro_batch, times, parameters: plan.stages.iter().map(part).collect() })
    }

    fn cpu(&self, threads: usize, plan: &Plan) -> Arc<Cpu> {
        let cpu = Arc::new(Cpu::new(threads));
        cpu.allow_winograd(self.config.winograd);
        self.choose(&cpu, plan);
        cpu
    }

    fn choose(&self, cpu: &Cpu, plan: &Plan) {
        calibrate(cpu, [plan].into_iter(), self.calibrate);
    }
}

/// What it takes until a thread that sleeps goes on with what another has for it: each message of a pipeline costs about that.
pub fn hand_off_s() -> f64 {
    const TRIPS: usize = 400;
    let ((there, here), (back, home)) = (sync_channel::<()>(0), sync_channel::<()>(0));
    let mut took = Vec::with_capacity(TRIPS);
    std::thread::scope(|scope| {
        scope.spawn(move || while here.recv().is_ok() && back.send(()).is_ok() {});
        for _ in 0..TRIPS {
            let clock = Clock::real();
            if there.send(()).is_err() || home.recv().is_err() {
                break;
            }
            took.push(clock.seconds() / 2.0);
        }
        drop(there);
    });
    super::median(&mut took)
}

/// What several threads together take to stream through memory as an update of weights does, each its share, as a part of what one takes.
pub fn streaming(threads: usize) -> f64 {
    const TURNS: usize = 3;
    let (mut weights, gradients) = (vec![1.0f32; STREAMED], vec![1.0f32; STREAMED]);
    let mut least = |threads: usize| {
        let mut turn = || {
            let share = STREAMED.div_ceil(threads);
            let clock = Clock::real();
            std::thread::scope(|scope| {
                for (weights, gradients) in weights.chunks_mut(share).zip(gradients.chunks(share)) {
                    scope.spawn(move || {
                        weights.iter_mut().zip(gradients).for_each(|(weight, gradient)| *weight -= 1e-3 * gradient);
                    });
                }
            });
            clock.seconds()
        };
        (0..TURNS).map(|_| turn()).fold(f64::INFINITY, f64::min)
    };
    let alone_s = least(1);
    (least(threads) / alone_s.max(1e-9)).clamp(1.0 / threads as f64, 1.0)
}

/// Seconds of the slowest, where each device makes the same passes at the same time.
fn together(cpus: Vec<Arc<Cpu>>, plan: &Plan, samples: usize) -> Result<f64, Failure> {
    let each = |cpu: Arc<Cpu>| {
        let plan = plan.clone();
        move || pass_s(plan, samples, REPEATED_S, &Device::Cpu(cpu))
    };
    let found: Vec<Result<f64, TrainError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = cpus.into_iter().map(|cpu| scope.spawn(each(cpu))).collect();
        let lost = || TrainError::Failed("a thread that profiled the model has failed".into());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(lost()))).collect()
    });
    found.into_iter().try_fold(0.0, |slowest: f64, seconds| Ok(slowest.max(seconds?)))
}
