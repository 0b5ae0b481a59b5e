//! Whether a run fits the memory of a machine, before anything is started: what its processes there will take, by plan,
//! against what they may use, and what to type where that is too little.
//!
//! The kernel kills whoever takes more than a control group allows, with no word to anybody, so the sum has to be known before. It is
//! an upper bound: buffers are counted to the byte, and what is beside them by what was measured (see `engine/sizes.rs`).

use paceline_data::order::Shard;
use paceline_nn::{Input, Mode, Model, Network};
use paceline_system::cores;
use paceline_system::limits::{Limits, Memory, Source, in_words};
use paceline_tensor::plan::Updates;
use paceline_tensor::{Device, MemoryUse, Plan, Precision};

use crate::balance::{Balanced, Uncut};
use crate::compute::Compute;
use crate::config::Config;
use crate::engine::Planned;
use crate::engine::sizes::{BASE, RANK, Sizes};
use crate::error::TrainError;
use crate::micro_batch::MicroBatchSizes;
use crate::replica::{self, BUCKET_BYTES_MAX, ReplicaOptions};
use crate::stage::ModelStage;
use crate::together::{Carry, Split};
use crate::trainer::{options, slots};

/// What a process maps beside what it holds: code, libraries, and ranges that the allocator sets aside. By itself none was short
/// of addresses with nothing for this; the threads and channels of one among others took 150 MB.
const ADDRESSES: [u64; 2] = [64 << 20, 192 << 20];

/// Pixels that a loader's thread holds while it decodes a photograph.
const PHOTOGRAPH: u64 = 48 << 20;

/// A batch that is advised leaves a sixteenth of the limit free: the system and other programs take some of it.
const ADVISED: (u64, u64) = (15, 16);

/// The processes of a run that share a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processes {
    /// Those that compute gradients.
    pub workers: usize,
    /// Those that hold parameters.
    pub servers: usize,
    /// How many of those that compute make up a worker: its stages, or its parts.
    pub each: usize,
    /// Whether these are all processes of the run.
    pub all: bool,
}

impl Processes {
    /// So many processes of a run with so many workers in all. Servers are the last ranks: they are here if everybody is.
    /// Elsewhere every process counts as a worker, which takes more.
    pub fn here(config: &Config, workers: usize, processes: usize) -> Self {
        let (servers, each) = (if workers > 1 { config.server_count() } else { 0 }, config.ranks_per_worker());
        let all = processes == workers * each + servers;
        let servers = if all { servers } else { 0 };
        Self { workers: processes - servers, servers, each, all }
    }

    fn count(self) -> usize {
        self.workers + self.servers
    }
}

/// A run that is to fit.
#[derive(Clone, Copy)]
pub struct Candidate<'a> {
    /// What is trained.
    pub model: &'a dyn Model,
    /// The configuration it is trained with.
    pub config: &'a Config,
    /// What one sample looks like.
    pub input: Input,
    /// Number of classes.
    pub classes: usize,
    /// Samples that every process keeps in memory.
    pub held_bytes: usize,
    /// Workers on all machines.
    pub workers: usize,
    /// The processes on this one.
    pub here: Processes,
    /// Whether the run goes on from a checkpoint, so that its batch is settled.
    pub resumes: bool,
    /// Whether some workers compute on GPUs whose gradients pass through hosts.
    pub hosted: bool,
}

/// Bytes that processes take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Need {
    /// The process of a worker that takes most.
    worker: u64,
    /// All processes of a worker together: one for each stage or part.
    replica: u64,
    server: u64,
    /// Taken once, by all together or by the first.
    once: u64,
    /// What a process maps beside this without holding it.
    mapped: u64,
    /// Whether all are threads of one process.
    threads: bool,
}

impl Need {
    fn total(&self, here: Processes) -> u64 {
        let workers = (here.workers as u64 * self.replica).div_ceil(here.each as u64);
        workers + here.servers as u64 * self.server + self.once
    }

    /// The addresses of one process. Ranks that are threads of one map what they share each for itself.
    fn addresses(&self, here: Processes) -> u64 {
        if !self.threads {
            return self.server.max(self.worker + self.once) + self.mapped;
        }
        let (workers, servers) = (here.workers as u64, here.servers as u64);
        workers * (self.worker + self.once + self.mapped) + servers * (self.server + self.mapped)
    }
}

impl Candidate<'_> {
    /// Whether the run fits.
    ///
    /// # Errors
    /// When it does not: the sentence names need, limit and a batch that would; or when a layer does not fit the input.
    pub fn check(&self, limits: &Limits) -> Result<(), TrainError> {
        // On a GPU the arena is there, and a session refuses by itself what does not fit.
        if self.config.device != Compute::Cpu {
            return Ok(());
        }
        let asked = self.config.memory_limit.map(|bytes| Memory { bytes, source: Source::Asked });
        let limits = &Limits { asked, ..limits.clone() };
        let need = self.need(self.config)?;
        let Some((needed, limit)) = self.excess(&need, limits) else { return Ok(()) };
        let complaint = format!("{} and {} {}", self.wish(needed, &need, limit), limit.source, in_words(limit.bytes));
        Err(TrainError::Refused(format!("{complaint}; {}", self.advice(limits))))
    }

    /// Bytes that all processes here take, as [`Candidate::check`] counts them.
    ///
    /// # Errors
    /// When a layer does not fit the input.
    pub fn bytes(&self) -> Result<u64, TrainError> {
        Ok(self.need(self.config)?.total(self.here))
    }

    /// Bytes of a worker's gradients that are kept beside the arena, to be looked at or added up before they are applied.
    ///
    /// # Errors
    /// As [`Candidate::bytes`].
    pub fn kept_gradient_bytes(&self) -> Result<u64, TrainError> {
        let sizes = Sizes::plan(ModelStage::whole(self.model), &self.options(self.config)?)?;
        Ok(sizes.gradients * sizes.parameters)
    }

    /// Bytes of the optimizer's state of a worker, and of one that keeps all of it.
    ///
    /// # Errors
    /// As [`Candidate::bytes`].
    pub fn optimizer_bytes(&self) -> Result<[u64; 2], TrainError> {
        let Sizes { optimizer, slots, parameters, .. } =
            Sizes::plan(ModelStage::whole(self.model), &self.options(self.config)?)?;
        Ok([optimizer, slots * parameters])
    }

    /// The plan by which a worker of this run makes a step, or evaluates.
    ///
    /// # Errors
    /// As [`Candidate::bytes`].
    pub fn plan(&self, mode: Mode) -> Result<Plan, TrainError> {
        let options = self.options(self.config)?;
        if mode == Mode::Train {
            return Ok(replica::plan(ModelStage::whole(self.model), &options)?.0);
        }
        let network = Network::new(self.model, mode, options.micro_batch, self.input, self.classes, 0.0)?;
        Ok(Planned::new(network, options.micro_batch, Updates::AtEnd, &options, false).plan)
    }

    pub(crate) fn options(&self, config: &Config) -> Result<ReplicaOptions, TrainError> {
        // The first worker has one sample more than others, where shares are not equal.
        let sizes = MicroBatchSizes::of(config, Shard { rank: 0, world: self.workers }, None);
        let options = options(config, sizes, (self.workers, self.hosted), (self.input, self.classes))?;
        let shard = config.optimizer_shard(Shard { rank: 0, world: self.workers }, self.shares_memory(config));
        Ok(ReplicaOptions { shard, ..options })
    }

    /// Whether all workers map the same memory.
    fn shares_memory(&self, config: &Config) -> bool {
        config.carry == Carry::SHM || config.carry == Carry::AUTO && self.here.all
    }

    /// How the replica of a stage is built.
    pub(crate) fn stage_options(&self, config: &Config, stage: usize) -> Result<ReplicaOptions, TrainError> {
        let slots = slots(config, Shard { rank: stage, world: config.stages() });
        let separate_gradients = slots > 0 && config.schedule.separates_gradients();
        Ok(ReplicaOptions { slots, separate_gradients, ..self.options(config)? })
    }

    /// The layers behind which the stages of a configuration end: as it says, or else by arithmetic.
    ///
    /// # Errors
    /// When the model cannot be cut so, or no stages fit.
    pub fn cuts(&self, config: &Config) -> Result<Balanced, TrainError> {
        let options = self.stage_options(config, 0)?;
        let uncut = self.uncut(config, &options);
        uncut.balance(config.stages(), &uncut.arithmetic()?)
    }

    /// The same, by the time that every layer takes on a device; `choose` has a look at the plan first, to choose algorithms.
    ///
    /// # Errors
    /// As [`Candidate::cuts`].
    pub fn measured_cuts(
        &self,
        config: &Config,
        device: &Device,
        choose: &dyn Fn(&Plan),
    ) -> Result<Balanced, TrainError> {
        let options = self.stage_options(config, 0)?;
        let uncut = self.uncut(config, &options);
        uncut.balance(config.stages(), &uncut.measure(device, choose)?)
    }

    /// The model before it is cut, with the options of the first stage.
    pub(crate) fn uncut<'b>(&'b self, config: &Config, options: &'b ReplicaOptions) -> Uncut<'b> {
        let beside = self.loader(config) + self.held_bytes as u64;
        Uncut { model: self.model, options, beside, limit: config.memory_limit }
    }

    /// Bytes that the process of each stage takes at most, as [`Candidate::check`] holds them against a limit that was asked for.
    ///
    /// # Errors
    /// As [`Candidate::cuts`].
    pub fn stage_bytes(&self, config: &Config) -> Result<Vec<u64>, TrainError> {
        Ok(self.stage_needs(config)?.iter().map(|need| need.worker).collect())
    }

    /// What the processes of a run like this would take.
    fn need(&self, config: &Config) -> Result<Need, TrainError> {
        if config.ranks_per_worker() == 1 {
            return self.need_of(config, ModelStage::whole(self.model), &self.options(config)?);
        }
        let add = |all: Need, need: Need| Need {
            worker: all.worker.max(need.worker),
            replica: all.replica + need.worker,
            server: 0,
            once: all.once.max(need.once),
            mapped: all.mapped.max(need.mapped),
            threads: need.threads,
        };
        let needs = if config.parts() > 1 { self.part_needs(config)? } else { self.stage_needs(config)? };
        Ok(needs.into_iter().fold(Need::default(), add))
    }

    /// What the process of each stage takes.
    fn stage_needs(&self, config: &Config) -> Result<Vec<Need>, TrainError> {
        let cuts = if config.cuts.is_empty() { self.cuts(config)?.cuts } else { config.cuts.clone() };
        // The first stage of the first worker holds one tensor of another at a time, while it saves.
        let saving = Sizes::plan(ModelStage::whole(self.model), &self.options(config)?)?.largest;
        let of = |number: usize| {
            let (stage, options) = (
                ModelStage { cuts: &cuts, number, ..ModelStage::whole(self.model) },
                self.stage_options(config, number)?,
            );
            let need = self.need_of(config, stage, &options)?;
            // Messages in both directions, for every micro-batch that can be alive in the stage before.
            let network = stage.network(Mode::Eval, options.micro_batch, &options)?;
            let messages = 2 * (options.slots + 1).max(config.stages()) * network.crossing_bytes();
            let worker = need.worker + messages as u64 + if number == 0 { 2 * saving } else { 0 };
            Ok(Need { worker, once: BASE / 2, ..need })
        };
        (0..config.stages()).map(of).collect()
    }

    /// Bytes that the process of each part takes at most, as [`Candidate::check`] holds them against a limit that was asked for.
    ///
    /// # Errors
    /// When a layer does not fit the input, or cannot be computed so.
    pub fn part_bytes(&self, config: &Config) -> Result<Vec<u64>, TrainError> {
        Ok(self.part_needs(config)?.iter().map(|need| need.worker).collect())
    }

    /// What the process of each part takes.
    fn part_needs(&self, config: &Config) -> Result<Vec<Need>, TrainError> {
        let options = self.options(config)?;
        // The first part of the first worker holds one whole tensor and another's piece of it, while it saves; all hold one when they
        // begin.
        let largest = Sizes::plan(ModelStage::whole(self.model), &options)?.largest;
        let of = |own: usize| {
            let form = config.part_form(own);
            let need = self.need_of(config, ModelStage::whole(self.model).in_parts(form.as_ref()), &options)?;
            let worker = need.worker + if own == 0 { 2 * largest } else { largest };
            Ok(Need { worker, once: BASE / 2, ..need })
        };
        (0..config.parts()).map(of).collect()
    }

    /// What the process of one stage or part takes, which may be all of the model.
    fn need_of(&self, config: &Config, stage: ModelStage<'_>, options: &ReplicaOptions) -> Result<Need, TrainError> {
        let sizes = Sizes::plan(stage, options)?;
        let Sizes { arena, parameters, largest, slots, optimizer: own_optimizer, gradients, states, .. } = sizes;
        let compute_threads = config.threads.unwrap_or_else(|| cores::online().div_ceil(self.here.count())).max(1);
        let beside = sizes.working(compute_threads) + self.loader(config) + self.held_bytes as u64;
        let optimizer = slots * parameters;
        let copies = config.agree.recipe().copies(&config.agreement(false)) as u64;
        // A checkpoint is read whole and converted before the arena is touched.
        let loading = match (self.resumes, &config.weights) {
            (true, _) => 2 * (parameters * (1 + u64::from(copies > 0)) + optimizer),
            (false, Some(_)) => 2 * parameters,
            (false, None) => 0,
        };
        let threads = config.has_rank_threads();
        let base = if threads { RANK } else { BASE };
        let running = base + states + arena.saturating_add(beside).max(loading);
        // One tensor at a time is brought into the order of files; a launcher waits for the others. Threads have one process.
        // One worker keeps a copy of all that is saved beside training.
        let sharded = own_optimizer < optimizer;
        // Chunks are gathered tensor by tensor instead, as they are written; so are the tensors of other stages and parts.
        let beside = config.checkpoint_seconds(self.workers).filter(|_| !sharded && config.ranks_per_worker() == 1);
        let copy = beside.map_or(if sharded { largest } else { 0 }, |_| parameters + optimizer + states);
        let beside_ranks = match () {
            () if threads => BASE,
            () if self.here.count() > 1 => BASE / 2,
            () => 0,
        };
        let once = largest + copy + beside_ranks;
        // A small model is one message.
        let message = 2 * (BUCKET_BYTES_MAX as u64).min(parameters);
        let mapped = ADDRESSES[usize::from(self.workers > 1)];
        let shared = threads || self.shares_memory(config);
        let recipe = config.agree.recipe();
        let one_copy =
            recipe.keeps_one_copy() && config.keeps_messages_whole() && shared && sizes.by_elements && !self.hosted;
        let need = match () {
            () if self.workers == 1 => {
                let worker = running + (1 + gradients + slots) * parameters;
                Need { worker, once, mapped, ..Need::default() }
            }
            // One copy of weights and optimizer, and every worker's gradients; before that, every worker's own weights.
            () if one_copy => Need {
                worker: running + parameters + if several_nodes() { optimizer } else { 0 },
                once: once + parameters + optimizer,
                mapped: mapped + self.here.workers as u64 * parameters,
                ..Need::default()
            },
            // Nothing of a step travels; a server has its part of a centre, and what the agreement keeps.
            () if !config.gradients_leave() || config.group() > 1 => {
                let worker = running + (1 + gradients + copies) * parameters + own_optimizer + message;
                let server = base + recipe.server_copies(&config.agreement(false)) as u64 * parameters;
                Need { worker, server, once, mapped, ..Need::default() }
            }
            // Servers step; the first worker has the optimizer's state while it saves it.
            () if recipe.has_servers() => Need {
                worker: running + (2 + gradients) * parameters + message,
                server: base + parameters + optimizer + message,
                once: once + 2 * optimizer,
                mapped,
                ..Need::default()
            },
            // Gradients that travel are copied into messages.
            () => {
                let worker = running + (2 + gradients) * parameters + own_optimizer + message;
                let others = if shared && !sharded { self.here.workers as u64 * parameters } else { 0 };
                Need { worker, once, mapped: mapped + others, ..Need::default() }
            }
        };
        Ok(Need { replica: need.worker, threads, ..need })
    }

    /// Batches that are made, waiting or in use, for training and for evaluation.
    fn loader(&self, config: &Config) -> u64 {
        let sample = match self.input {
            Input::Image { size: [height, width], channels } => height * width * channels * size_of::<f32>(),
            Input::Tokens { sequence } => 2 * sequence * size_of::<i32>(),
        };
        let batches = 4.max(2 * config.loader_threads) + 1;
        let samples = config.batch.saturating_add(config.micro_batch()).div_ceil(self.workers);
        let decoding = if config.data.starts_with("folder") { PHOTOGRAPH * config.loader_threads as u64 } else { 0 };
        ((batches * sample) as u64).saturating_mul(samples as u64).saturating_add(decoding)
    }

    /// The least limit that is exceeded, and what is needed of it.
    fn excess<'a>(&self, need: &Need, limits: &'a Limits) -> Option<(u64, &'a Memory)> {
        let shared = limits.shared.as_ref().map(|limit| (need.total(self.here), limit));
        let own = limits.own.as_ref().map(|limit| (need.addresses(self.here), limit));
        // What is taken once is taken by the first process, unless there are several stages or parts: then the launcher has it.
        let once = if self.config.ranks_per_worker() > 1 { 0 } else { need.once };
        let asked = limits.asked.as_ref().map(|limit| (need.worker + once, limit));
        let exceeded = shared.into_iter().chain(own).chain(asked).filter(|(needed, limit)| *needed > limit.bytes);
        exceeded.min_by_key(|(_, limit)| limit.bytes)
    }

    fn wish(&self, needed: u64, need: &Need, limit: &Memory) -> String {
        let Processes { workers, servers, .. } = self.here;
        let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let one = matches!(limit.source, Source::Ulimit | Source::Asked) || self.here.count() == 1;
        match (one, servers) {
            (true, _) => format!("a process needs {} of memory", in_words(needed)),
            (false, 0) => format!(
                "{} need {} of memory, {} each,",
                many(workers, if need.threads { "replica" } else { "worker" }),
                in_words(needed),
                in_words(need.worker)
            ),
            (false, _) => {
                format!(
                    "{} and {} need {} of memory",
                    many(workers, "worker"),
                    many(servers, "server"),
                    in_words(needed)
                )
            }
        }
    }

    /// What to type instead: changes of which each by itself makes the run fit.
    fn advice(&self, limits: &Limits) -> String {
        let limits =
            &Limits { shared: less(&limits.shared), own: less(&limits.own), asked: less(&limits.asked), quota: None };
        let with = |change: &dyn Fn(&mut Config)| {
            let mut config = self.config.clone();
            change(&mut config);
            self.fits(&config, limits)
        };
        let mut fitting = Vec::new();
        if !self.resumes {
            fitting.extend(self.batch_that_fits(limits).map(|batch| format!("--batch {batch}")));
            let parts = [2, 4, 8, 16, 32].map(|parts| parts * self.config.accumulate);
            let enough = |parts: &usize| self.config.batch >= parts * self.workers;
            let parts = parts.into_iter().filter(enough).find(|&parts| with(&|config| config.accumulate = parts));
            fitting.extend(parts.map(|parts| format!("--accumulate {parts}")));
        }
        if self.config.memory == MemoryUse::Normal && with(&|config| config.memory = MemoryUse::Low) {
            fitting.push("--memory low".into());
        }
        if self.config.dtype == Precision::F32 && with(&|config| config.dtype = Precision::Bf16) {
            fitting.push("--dtype bf16".into());
        }
        if self.config.ranks_per_worker() == 1 && !self.config.agree.recipe().has_servers() {
            let split = |config: &mut Config| {
                (config.split, config.accumulate) = (Split::Pipeline(2), config.accumulate.max(4));
            };
            if with(&split) {
                fitting.push("--split auto to cut the model into stages".into());
            }
        }
        let flag = if self.config.has_rank_threads() { "--replicas" } else { "--workers" };
        match fitting.split_first() {
            None if self.resumes => format!("type fewer {flag}, or resume on a machine with more memory"),
            None => format!("no batch fits: type a smaller --model or --size, or fewer {flag}"),
            Some((first, [])) => format!("type {first}, which fits"),
            Some((first, others)) => format!("type {first}, which fits, or {}", others.join(" or ")),
        }
    }

    /// The largest smaller batch that fits; a multiple of eight samples for every worker, where it is large.
    fn batch_that_fits(&self, limits: &Limits) -> Option<usize> {
        let unit = self.workers * self.config.accumulate;
        let fits = |count: usize| self.fits(&Config { batch: count * unit, ..self.config.clone() }, limits);
        let (mut fitting, mut too_many) = (0, self.config.batch / unit);
        while fitting + 1 < too_many {
            let middle = fitting.midpoint(too_many);
            if fits(middle) { fitting = middle } else { too_many = middle }
        }
        let even = if fitting > 16 { fitting / 8 * 8 } else { fitting };
        (even > 0).then_some(even * unit)
    }

    fn fits(&self, config: &Config, limits: &Limits) -> bool {
        self.need(config).is_ok_and(|need| self.excess(&need, limits).is_none())
    }
}

/// Whether this process may run on several NUMA nodes: buffers are then touched, and held, as soon as they are there.
fn several_nodes() -> bool {
    let allowed = cores::allowed();
    allowed.iter().any(|core| core.node != allowed[0].node)
}

fn less(limit: &Option<Memory>) -> Option<Memory> {
    let (part, whole) = ADVISED;
    limit.clone().map(|limit| Memory { bytes: limit.bytes / whole * part, ..limit })
}

#[cfg(test)]
mod tests;
