//! Which set-ups there are on a node, and which of them apply: each that does not has a sentence that says why.

use crate::nn::Input;
use crate::nn::models::Named;
use crate::parallel::split::Kind;
use crate::system::limits::Limits;
use crate::system::threads;
use crate::tensor::device::cuda;
use crate::train::Config;
use crate::train::compute::Compute;
use crate::train::room::{Candidate, Processes};
use crate::train::together::{Carry, Sharding, Split};

use super::parts;
use super::setup::{Setup, Turns};

/// Parts of a batch that stages are tried with.
pub const MICRO_BATCHES: [usize; 5] = [1, 2, 4, 8, 16];

/// More stages than this on one machine are not looked at: each has a share of the cores, and each waits for the one before.
const STAGES_MAX: usize = 4;

/// What a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Threads that can run at once.
    pub cores: usize,
    /// GPUs, where the run is to compute on them.
    pub gpus: usize,
}

impl Node {
    /// Looks at this one.
    pub fn look(config: &Config) -> Self {
        let gpus = if config.device == Compute::Cpu { 0 } else { cuda::count().unwrap_or(0) };
        Self { cores: threads::available(), gpus }
    }
}

/// What the user has said already: a set-up that says something else is left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// `--workers`, or `--replicas`.
    pub workers: Option<usize>,
    /// `--threads`.
    pub threads: Option<usize>,
    /// `--carry`, or `--replicas`, which is one.
    pub carry: Option<Carry>,
    /// `--accumulate` or `--micro-batches`.
    pub parts: Option<usize>,
    /// `--schedule` of a pipeline.
    pub schedule: Option<Kind>,
    /// `--shard`.
    pub shard: Option<Sharding>,
    /// Nothing that a user types: the node is one of several, between which there is data parallelism with one task on each.
    pub one_task: bool,
}

impl Said {
    /// What of it contradicts a set-up.
    fn contradicts(&self, setup: &Setup) -> Option<String> {
        let differs = |asked: &Option<usize>, own: usize| asked.filter(|asked| *asked != own);
        if self.one_task && setup.ranks(&Config::default()) > 1 {
            return Some("between nodes there is one task on each".into());
        }
        if let Some(workers) = differs(&self.workers, setup.workers) {
            return Some(format!("{workers} workers were asked for"));
        }
        if let (Some(asked), Some(own)) = (self.threads, setup.threads)
            && asked != own
        {
            return Some(format!("--threads {asked} was asked for"));
        }
        let carry = if setup.in_one_process { Carry::THREAD } else { Carry::AUTO };
        if let Some(asked) = self.carry.filter(|asked| (*asked == Carry::THREAD) != (carry == Carry::THREAD)) {
            let alone = setup.ranks(&Config::default()) == 1;
            return (!alone || asked == Carry::THREAD).then(|| format!("--carry {} was asked for", asked.name()));
        }
        if let (Some(parts), Some(turns)) = (self.parts, &setup.turns)
            && parts != turns.micro_batches
        {
            return Some(format!("{parts} micro-batches were asked for"));
        }
        if let (Some(kind), Some(turns)) = (self.schedule, &setup.turns)
            && kind != turns.schedule
        {
            return Some(format!("--schedule {kind} was asked for"));
        }
        let shard = self.shard.filter(|asked| *asked != setup.shard);
        shard.map(|_| "--shard says otherwise".to_owned())
    }
}

/// A set-up, and why it does not apply if it does not.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    /// The set-up.
    pub setup: Setup,
    /// Why it is left out.
    pub left_out: Option<String>,
    /// Bytes that all its processes take, where that can be planned.
    pub bytes: Option<u64>,
}

/// What is trained.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The model.
    pub model: &'a Named<'a>,
    /// What one sample looks like.
    pub input: Input,
    /// Number of classes.
    pub classes: usize,
    /// Samples that every process keeps in memory.
    pub held_bytes: usize,
}

impl Subject<'_> {
    /// As the trainer's check of memory sees a configuration of it.
    pub fn candidate<'b>(&'b self, config: &'b Config) -> Candidate<'b> {
        let Subject { model, input, classes, held_bytes } = *self;
        let workers = config.workers;
        let here = Processes::here(config, workers, config.ranks());
        Candidate { model, config, input, classes, held_bytes, workers, here, resumes: false, hosted: false }
    }
}

/// What a planner proposes for one model.
#[derive(Clone, Copy)]
pub struct Proposed<'a> {
    /// Where to cut into so many stages of so many threads.
    pub cuts: &'a dyn Fn(usize, usize) -> Vec<String>,
    /// How to compute layers in so many parts.
    pub parts: &'a dyn Fn(usize) -> Vec<Split>,
}

/// Every set-up of a node that there is a reason to think of; the first is the baseline.
pub fn setups(node: Node, (said, config): (&Said, &Config), proposed: &Proposed<'_>) -> Vec<Setup> {
    let Node { cores, gpus } = node;
    if config.device != Compute::Cpu {
        return on_gpus(gpus.max(1), config.device);
    }
    let all = Config { threads: None, ..config.clone() }.compute_threads();
    // Each rank has its share of the cores, unless somebody says otherwise.
    let each = |ranks: usize| Setup::threads(said.threads.unwrap_or((cores / ranks).max(1)));
    let mut found = vec![Setup::threads(1)];
    found.extend(shares(cores).into_iter().chain([all]).chain(said.threads).map(Setup::threads));
    for workers in shares(cores).into_iter().chain([cores]).chain(said.workers) {
        found.push(Setup { workers, in_one_process: true, ..each(workers) });
        found.push(Setup { workers, ..each(workers) });
    }
    let stages = || shares(cores).into_iter().chain([cores]).filter(|stages| (2..=STAGES_MAX).contains(stages));
    for stages in stages() {
        let each = each(stages);
        let cuts = (proposed.cuts)(stages, each.threads.unwrap_or(1));
        found.extend(staged(stages, &each, &cuts, said.parts));
    }
    for parts in shares(cores).into_iter().chain([cores]).filter(|&parts| parts > 1) {
        let splits = (proposed.parts)(parts).into_iter();
        found.extend(splits.map(|split| Setup { split, ..each(parts) }));
    }
    if cores > 1 {
        let shard = Sharding::Optimizer;
        found.push(Setup { workers: said.workers.unwrap_or(cores), shard, ..each(cores) });
    }
    // One that has more threads than cores, so that the table says why not.
    found.push(Setup::threads(2 * cores));
    let mut once: Vec<Setup> = Vec::new();
    for setup in found {
        // One replica in one process is one replica.
        let setup = Setup { in_one_process: setup.in_one_process && setup.workers > 1, ..setup };
        if !once.contains(&setup) {
            once.push(setup);
        }
    }
    once
}

/// Powers of two between one and the cores.
fn shares(cores: usize) -> Vec<usize> {
    std::iter::successors(Some(2), |count| Some(2 * count)).take_while(|&count| count < cores).collect()
}

/// Every way in which so many stages take turns.
fn staged(stages: usize, each: &Setup, cuts: &[String], said: Option<usize>) -> Vec<Setup> {
    let of = |micro_batches, schedule| {
        let turns = Turns { micro_batches, schedule, cuts: cuts.to_vec() };
        Setup { split: Split::Pipeline(stages), turns: Some(turns), ..each.clone() }
    };
    let said = said.filter(|parts| !MICRO_BATCHES.contains(parts));
    let mut found = Vec::new();
    for parts in MICRO_BATCHES.into_iter().chain(said) {
        // With one micro-batch all orders are the same.
        let kinds = if parts == 1 { vec![Kind::default()] } else { Kind::ALL.to_vec() };
        found.extend(kinds.into_iter().map(|kind| of(parts, kind)));
    }
    found
}

/// One GPU, the baseline there; one process a GPU; stages of one GPU each; and several processes on one.
fn on_gpus(gpus: usize, device: Compute) -> Vec<Setup> {
    let one = Setup { threads: None, device, ..Setup::threads(1) };
    let mut found = vec![one.clone()];
    found.extend((2..=gpus).map(|workers| Setup { workers, ..one.clone() }));
    if gpus > 1 {
        found.extend(staged(gpus.min(STAGES_MAX), &one, &[], None));
    }
    found.push(Setup { workers: gpus + 1, ..one });
    found
}

/// Why a set-up is left out on a node, if it is.
pub fn left_out(setup: &Setup, node: Node, said: &Said, subject: &Subject<'_>, config: &Config) -> Option<String> {
    let changed = setup.change(config);
    let ranks = changed.computing();
    let busy = setup.threads.unwrap_or(0) * ranks;
    if setup.device == Compute::Cpu && busy > node.cores {
        return Some(format!("more threads than this node has cores: {}", node.cores));
    }
    if setup.device != Compute::Cpu && ranks > node.gpus {
        return Some(format!(
            "several processes would share a GPU, which computes one thing at a time; there are {}",
            node.gpus
        ));
    }
    if let Some(sentence) = said.contradicts(setup) {
        return Some(sentence);
    }
    if setup.shard == Sharding::Optimizer && said.shard.is_none() && setup.device == Compute::Cpu {
        return Some(
            "the processes of a node map one copy of the weights and of the optimizer's state and step it together: \
             there is nothing to divide"
                .into(),
        );
    }
    if let Some(sentence) = parts::senseless(&setup.split, subject, config) {
        return Some(sentence);
    }
    if !setup.in_one_process && setup.workers > 1 && changed.has_rank_threads() {
        return Some(format!("--agree {} has replicas in one process", changed.agree.name()));
    }
    let refusal = changed.check().and_then(|()| changed.check_world(changed.workers));
    let refusal = refusal.and_then(|()| subject.candidate(&changed).check(&Limits::look()));
    refusal.err().map(|error| first_clause(&error.to_string()))
}

/// What is wrong, without what to type instead: nothing was typed.
fn first_clause(sentence: &str) -> String {
    sentence.split("; ").next().unwrap_or(sentence).to_owned()
}

/// All set-ups of a node, each with why it does not apply if it does not.
pub fn list(
    node: Node,
    (said, config): (&Said, &Config),
    subject: &Subject<'_>,
    proposed: &Proposed<'_>,
) -> Vec<Listed> {
    let listed = |setup: Setup| {
        let left_out = left_out(&setup, node, said, subject, config);
        let bytes = subject.candidate(&setup.change(config)).bytes().ok().filter(|_| setup.device == Compute::Cpu);
        Listed { setup, left_out, bytes }
    };
    setups(node, (said, config), proposed).into_iter().map(listed).collect()
}

#[cfg(test)]
mod tests;
