//! How replicas agree, and whether that fits the rest of a configuration.

use paceline_comm::Algorithm;
use paceline_nn::optim::Optimizer;
use paceline_parallel::agree;

use super::{Config, refuse};
use crate::compute::Compute;
use crate::error::TrainError;
use crate::together::{Carry, Sharding, Staleness};

impl Config {
    /// How replicas agree; `one_copy` says whether those that share memory may keep one copy of the weights.
    pub fn agreement(&self, one_copy: bool) -> agree::Options {
        let shard = self.shard == Sharding::Optimizer;
        let rounds = agree::RoundOptions {
            period: self.period,
            node_period: self.node_period,
            fragments: self.fragments,
            warm_up: self.post_local,
            outer_rate: self.outer_rate,
            outer_momentum: self.outer_momentum,
            herds: self.herds,
            elastic_rate: self.center.elastic_rate,
            fetch_every: self.center.fetch_every,
            push_every: self.center.push_every,
            push_rate: self.center.push_rate,
            staleness_aware: self.center.staleness_aware,
            server_adagrad: self.center.server_adagrad,
            warm_start: self.center.warm_start,
            history: self.center.history,
        };
        let staleness = self.staleness.map_or_else(|| self.agree.recipe().usual_staleness(), |said| said.0);
        agree::Options { staleness, squeeze: self.squeeze.recipe(), one_copy, shard, group: self.group(), rounds }
    }

    /// Whether workers send each other gradients: those of a bucket always, or never.
    pub fn gradients_leave(&self) -> bool {
        let bucket = agree::BucketShape { start: 0, elements: 1, ready_after: 0, needed_before: 0 };
        let shape = agree::Shape { buckets: vec![bucket], parameters: 1, ..agree::Shape::default() };
        self.agree.recipe().protocol(&shape, &self.agreement(false)).gradients_leave()
    }

    /// Whether an agreement that needs all ranks in one process can have them there.
    fn check_process(&self) -> Result<(), TrainError> {
        if !self.agree.recipe().shares_process() {
            return Ok(());
        }
        let (name, carry) = (self.agree.name(), self.carry.name());
        if !self.keeps_one_process() {
            return refuse(format!(
                "--agree {name} has all workers in one process, and --carry {carry} is for several; leave --carry out, or type \
                 --agree all-reduce"
            ));
        }
        if let Some(herds) = self.herds.filter(|&herds| herds > self.workers) {
            let workers = self.workers;
            return refuse(format!("--herds {herds} are more than there are workers; type --herds {workers} or less"));
        }
        if self.device != Compute::Cpu {
            let device = self.device;
            return refuse(format!(
                "--agree {name} shares weights in the memory of this machine, and --device {device} keeps them on a GPU; type \
                 --device cpu, or --agree local"
            ));
        }
        Ok(())
    }

    /// Workers that are one to the others; one where there are no groups. Where groups are what an agreement is about, there are
    /// two if nobody says otherwise.
    pub fn group(&self) -> usize {
        let two = self.agree.recipe().steps_in_groups() && self.workers.is_multiple_of(2);
        self.center.group.unwrap_or(if two { self.workers / 2 } else { 1 })
    }

    /// Whether workers can be in groups.
    fn check_groups(&self) -> Result<(), TrainError> {
        let (group, workers) = (self.group(), self.workers);
        let one = group == workers && !self.agree.recipe().borrows_memory();
        if group > 1 && (!workers.is_multiple_of(group) || one) {
            let (more, name) = (2 * group, self.agree.name());
            return refuse(format!(
                "--group {group} makes groups of {group} workers, at least two, and --workers {workers} cannot be divided so; type \
                 for example --workers {more} --group {group} --agree {name}"
            ));
        }
        if group > 1 && self.ranks_per_worker() > 1 {
            return refuse("--group is for workers of one process each; leave --split or --group out".into());
        }
        Ok(())
    }

    /// Whether memory boxes are of use, and their addresses are some.
    fn check_boxes(&self) -> Result<(), TrainError> {
        let (boxes, name) = (&self.center.boxes, self.agree.name());
        if !boxes.is_empty() && !self.agree.recipe().borrows_memory() {
            return refuse(format!(
                "--box is for --agree shm-async and shm-hybrid, and not for --agree {name}; type one of them, or leave it out"
            ));
        }
        match boxes.iter().find(|place| !place.contains(':')) {
            Some(place) => refuse(format!("--box {place} has no port; type for example --box {place}:29411")),
            None => Ok(()),
        }
    }

    /// Whether the ways to agree fit the rest.
    pub(super) fn check_agreement(&self) -> Result<(), TrainError> {
        if let Some(name) = self.algorithm.as_deref().filter(|name| Algorithm::from_name(name).is_none()) {
            let names = Algorithm::ALL.map(Algorithm::name).join(", ");
            return refuse(format!("--algorithm {name} is none; type one of {names}, or leave it out"));
        }
        self.check_process()?;
        self.check_groups()?;
        self.check_boxes()?;
        if self.carry == Carry::THREAD && self.device != Compute::Cpu {
            let workers = self.workers;
            return refuse(format!(
                "--carry thread is for replicas on the CPU; for GPUs type --workers {workers} and another --carry, or none"
            ));
        }
        if self.carry == Carry::NCCL && self.device == Compute::Cpu {
            return refuse("--carry nccl is for GPUs; type --device cuda, or another --carry".into());
        }
        if self.shard == Sharding::Optimizer && self.device != Compute::Cpu {
            return refuse(
                "--shard optimizer divides what hosts keep, and a GPU keeps its optimizer's state itself; \
                 type --device cpu, or --shard none"
                    .into(),
            );
        }
        if self.carry == Carry::NCCL && !self.gradients_leave() {
            let name = self.agree.name();
            return refuse(format!("--agree {name} sends no gradients that NCCL could add up; leave --carry out"));
        }
        if let (Carry::NCCL, Err(flag)) = (self.carry, self.keeps_off_host()) {
            return refuse(format!(
                "{flag} needs gradients on the hosts, and --carry nccl keeps them off; leave --carry out"
            ));
        }
        let demands = agree::Demands {
            smooths_labels: self.label_smoothing > 0.0,
            decays: self.hyper_parameters.weight_decay.is_some_and(|rate| rate > 0.0),
            on_gpu: self.device != Compute::Cpu,
            clips_norm: self.clip_norm.is_some(),
            sync_batch_norm: self.sync_batch_norm,
            whole_tensors: self.optimizer == Optimizer::Lars,
            staleness: self.staleness.is_some_and(|said| said != Staleness::default()),
            saves_by_clock: self.checkpoint_minutes.is_some_and(|minutes| minutes > 0.0),
            servers: self.servers,
            options: self.agreement(false),
        };
        self.agree.recipe().refuses(&demands).map_or(Ok(()), refuse)
    }
}
