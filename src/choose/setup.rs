//! A set-up: one way to use a node for a training, as a change of its configuration. A plain value: what it is called, what it changes,
//! and what to type for it.

use crate::parallel::split::Kind;
use crate::train::Config;
use crate::train::compute::Compute;
use crate::train::together::{Carry, PartSplit, Sharding, Split};

/// One way to use a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Replicas of the model, which share the batch.
    pub workers: usize,
    /// Whether all ranks are threads of one process.
    pub in_one_process: bool,
    /// Compute threads of each rank; none where it computes on a GPU.
    pub threads: Option<usize>,
    /// How the model is split.
    pub split: Split,
    /// How its stages take turns, where it has some.
    pub turns: Option<Turns>,
    /// What is divided among workers.
    pub shard: Sharding,
    /// Where ranks compute.
    pub device: Compute,
}

/// How the stages of a pipeline take turns.
#[derive(Clone, Debug, PartialEq)]
pub struct Turns {
    /// Parts of the batch.
    pub micro_batches: usize,
    /// In which order.
    pub schedule: Kind,
    /// The layers behind which stages end.
    pub cuts: Vec<String>,
}

/// What set-ups have in common of which what was measured of one says something about others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// One replica.
    Replica,
    /// Replicas as threads, or processes, that share the batch.
    Workers,
    /// Stages.
    Stages,
    /// Several ranks compute layers together.
    Parts,
    /// On GPUs.
    Gpus,
}

impl Setup {
    /// One replica with so many threads: a change of nothing else.
    pub fn threads(threads: usize) -> Self {
        Self {
            workers: 1,
            in_one_process: false,
            threads: Some(threads),
            split: Split::Replicate,
            turns: None,
            shard: Sharding::None,
            device: Compute::Cpu,
        }
    }

    /// Ranks that compute.
    pub fn ranks(&self, config: &Config) -> usize {
        self.change(config).computing()
    }

    /// The configuration with this change.
    pub fn change(&self, config: &Config) -> Config {
        let mut changed = Config {
            workers: self.workers,
            threads: self.threads,
            split: self.split.clone(),
            shard: self.shard,
            device: self.device,
            ..config.clone()
        };
        changed.carry = if self.in_one_process { Carry::THREAD } else { config.carry };
        if let Some(Turns { micro_batches, schedule, cuts }) = &self.turns {
            (changed.accumulate, changed.schedule, changed.cuts) = (*micro_batches, *schedule, cuts.clone());
        }
        changed
    }

    /// What to type for it.
    pub fn flags(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut flag = |name: &str, value: String| words.extend([name.to_owned(), value]);
        flag("--split", self.split.to_string());
        match (self.in_one_process, self.workers) {
            (true, replicas) => flag("--replicas", replicas.to_string()),
            (false, workers) => flag("--workers", workers.to_string()),
        }
        self.threads.iter().for_each(|threads| flag("--threads", threads.to_string()));
        if self.device != Compute::Cpu {
            flag("--device", self.device.to_string());
        }
        if self.shard == Sharding::Optimizer {
            flag("--shard", "optimizer".into());
        }
        if let Some(Turns { micro_batches, schedule, cuts }) = &self.turns {
            flag("--micro-batches", micro_batches.to_string());
            flag("--schedule", schedule.to_string());
            if !cuts.is_empty() {
                flag("--cuts", cuts.join(","));
            }
        }
        words
    }

    /// Which others it is like.
    pub fn family(&self) -> Family {
        match &self.split {
            _ if self.device != Compute::Cpu => Family::Gpus,
            Split::Pipeline(_) => Family::Stages,
            Split::Parts(_) => Family::Parts,
            Split::Replicate | Split::Auto if self.workers > 1 => Family::Workers,
            Split::Replicate | Split::Auto => Family::Replica,
        }
    }

    /// For people.
    pub fn name(&self) -> String {
        let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let mut name = match (self.device, self.in_one_process, self.workers) {
            (Compute::Cpu, false, 1) => "1 replica".to_owned(),
            (Compute::Cpu, true, replicas) => many(replicas, "replica"),
            (Compute::Cpu, false, processes) => many(processes, "process").replace("processs", "processes"),
            (Compute::Cuda(_), _, 1) => "1 GPU".to_owned(),
            (Compute::Cuda(_), _, processes) => format!("{processes} processes on GPUs"),
        };
        match (&self.split, &self.turns) {
            (Split::Pipeline(stages), Some(Turns { micro_batches, schedule, .. })) => {
                let workers = if self.workers > 1 { format!("{name} of ") } else { String::new() };
                let order = if *micro_batches > 1 { format!(" by {schedule}") } else { String::new() };
                name = format!("{workers}{stages} stages, {}{order}", many(*micro_batches, "micro-batch"));
                name = name.replace("micro-batchs", "micro-batches");
            }
            (Split::Replicate | Split::Auto, _) => {}
            (Split::Parts(PartSplit { forms, parts }), _) => {
                let word = match &forms[..] {
                    [(layer, form)] if layer.is_empty() => format!("by {form}"),
                    [one, other] => format!("{}={}, {}={}", one.0, one.1, other.0, other.1),
                    _ => format!("{} layers or groups of layers by channels or samples", forms.len()),
                };
                name = format!("{parts} parts, {word}");
            }
            (Split::Pipeline(stages), None) => name = format!("{stages} stages"),
        }
        if let Some(threads) = self.threads {
            name += &format!(" × {}", many(threads, "thread"));
        }
        if self.shard == Sharding::Optimizer {
            name += ", sharded optimizer";
        }
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(micro_batches: usize) -> Setup {
        let turns = Turns { micro_batches, schedule: Kind::ZeroBubble, cuts: vec!["conv2".into()] };
        Setup { split: Split::Pipeline(2), turns: Some(turns), ..Setup::threads(1) }
    }

    #[test]
    fn a_setup_has_a_name_and_the_words_to_type() {
        let replicas = Setup { workers: 2, in_one_process: true, ..Setup::threads(1) };
        assert_eq!(Setup::threads(2).name(), "1 replica × 2 threads");
        assert_eq!(replicas.name(), "2 replicas × 1 thread");
        assert_eq!(Setup { in_one_process: false, ..replicas.clone() }.name(), "2 processes × 1 thread");
        assert_eq!(stages(8).name(), "2 stages, 8 micro-batches by zero-bubble × 1 thread");
        assert_eq!(stages(1).name(), "2 stages, 1 micro-batch × 1 thread");
        assert_eq!(replicas.flags().join(" "), "--split replicate --replicas 2 --threads 1");
        let words = "--split pipeline:2 --workers 1 --threads 1 --micro-batches 8 --schedule zero-bubble --cuts conv2";
        assert_eq!(stages(8).flags().join(" "), words);
    }

    #[test]
    fn a_setup_changes_what_it_says_and_nothing_else() {
        let config = Config { batch: 32, seed: 9, ..Config::default() };
        let changed = stages(4).change(&config);
        assert_eq!((changed.stages(), changed.accumulate, changed.threads), (2, 4, Some(1)));
        assert_eq!((changed.batch, changed.seed, changed.workers), (32, 9, 1));
        assert_eq!(Setup::threads(2).change(&config), Config { threads: Some(2), ..config });
    }
}
