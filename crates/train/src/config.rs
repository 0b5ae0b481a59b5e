//! What a run is told: one flat, resolved, replayable value. `config.toml` of a run is this, written out.

mod agreement;
mod center;
mod numbers;
mod portions;
mod split;

use paceline_data::augment::AugmentChoice;
use paceline_data::order::{LastBatch, Shard};
use paceline_nn::PartForm;
use paceline_nn::optim::{HyperParameters, Optimizer};
use paceline_nn::schedule::{LearningRate, Schedule};
use paceline_parallel::split::Kind;
use paceline_system::{cores, threads};
use paceline_tensor::device::cpu::choice::Winograd;
use paceline_tensor::{MemoryUse, Precision};
use serde::{Deserialize, Serialize};

use crate::compute::Compute;
pub use center::Center;

use crate::deadlines::Deadlines;
use crate::error::TrainError;
use crate::replica::OptimizerShard;
use crate::together::{Agree, Balance, Carry, Overlap, PartSplit, Sharding, Slow, Split, Squeeze, Staleness};

/// The largest image side: as much as a photograph has, and its arithmetic is far from overflowing.
pub const SIDE_MAX: usize = 8192;
/// The longest configuration file that is read; the longest recipe has 1 kB.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// More threads than any one machine has cores.
pub const THREADS_MAX: usize = 1024;
/// More connections between two processes than any link gains by.
pub const SOCKETS_MAX: usize = 64;

/// Minutes between two checkpoints of a run of several workers, if nobody says otherwise: what a rank that is lost may cost.
const CHECKPOINT_MINUTES: f64 = 5.0;

/// Everything that decides a run's result, and how it reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Config {
    /// A name that `paceline models` lists.
    pub model: String,
    /// A data spec: `shapes`, `cifar10:DIR`, `folder:DIR`, …
    pub data: String,
    /// Side of the images the model sees; the data's own size if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<usize>,
    /// Length of token sequences.
    pub sequence: usize,
    /// The number of classes the data must have; taken from the data if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classes: Option<usize>,
    /// Samples per optimizer update.
    pub batch: usize,
    /// Parts of a batch that are computed one after the other, to save memory.
    pub accumulate: usize,
    /// What happens to samples that do not fill a batch at the end of an epoch.
    pub last_batch: LastBatch,
    /// Passes over the data.
    pub epochs: u64,
    /// Stop after so many updates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<u64>,
    /// Stop after so many seconds of this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_limit_s: Option<f64>,
    /// Stop when the validation accuracy has not risen for so many epochs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub early_stop: Option<u64>,
    /// The update rule.
    pub optimizer: Optimizer,
    /// Share of the target spread over all classes.
    pub label_smoothing: f32,
    /// Gradients are scaled down to this norm over all parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Training augmentation.
    pub augment: AugmentChoice,
    /// What is subtracted from each channel of the images (pixels count from 0 to 1); the data's own if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<Vec<f32>>,
    /// What each channel is divided by; the data's own if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<Vec<f32>>,
    /// Damaged images to skip before giving up.
    pub damaged_max: usize,
    /// Decides initial weights, order, augmentation and dropout.
    pub seed: u64,
    /// Replicas of the model, which share the batch: each a process, or as many as the model has stages or parts.
    pub workers: usize,
    /// How the model is split over processes.
    pub split: Split,
    /// The layers behind which a pipeline's stages end, all but the last; balanced by measured time if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cuts: Vec<String>,
    /// The order in which a pipeline's stages compute micro-batches, of which `accumulate` says how many there are.
    #[serde(with = "crate::together::pipeline_schedule")]
    pub schedule: Kind,
    /// Where each stage of a pipeline computes; all where `device` says if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stage_devices: Vec<Compute>,
    /// Bytes that a process may take: a model that needs more is split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
    /// How they agree on the weights.
    pub agree: Agree,
    /// How their messages are squeezed.
    pub squeeze: Squeeze,
    /// Whether gradients travel while the backward pass goes on.
    pub overlap: Overlap,
    /// What is divided among them instead of being there on each.
    pub shard: Sharding,
    /// How their bytes travel.
    pub carry: Carry,
    /// TCP connections between every two processes.
    pub sockets: usize,
    /// The algorithm of all-reduces; by size and measured links if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<String>,
    /// Processes that hold parameters, for a parameter server.
    pub servers: usize,
    /// Steps that a worker may be ahead of the slowest, where servers hold the weights; 0 is synchronous. The agreement's own choice if
    /// not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub staleness: Option<Staleness>,
    /// How many samples of a batch each worker has.
    pub balance: Balance,
    /// Steps after which that is measured again.
    pub balance_every: u64,
    /// Workers that are slowed down, for experiments.
    #[serde(skip_serializing_if = "Slow::is_none")]
    pub slow: Slow,
    /// Steps between two exchanges of weights, where workers step by themselves; the agreement's own choice if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub period: Option<u64>,
    /// Steps between two exchanges of the workers of each machine among themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_period: Option<u64>,
    /// Parts of the weights that are exchanged one after the other in the steps of a period.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fragments: Option<u64>,
    /// Steps at the beginning that are each followed by an exchange of all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub post_local: Option<u64>,
    /// The rate of the step that is made with what workers have changed between two exchanges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outer_rate: Option<f64>,
    /// The momentum of those steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outer_momentum: Option<f64>,
    /// Copies of the weights that workers share, each some of them, where they are threads of one process; one for each NUMA node if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub herds: Option<usize>,
    /// Whether batch normalisations take their statistics over the batches of all workers instead of each its own.
    pub sync_batch_norm: bool,
    /// What activations are stored as. Weights, gradients of weights and checkpoints are f32 in any case.
    pub dtype: Precision,
    /// Whether what is cheap to compute again is kept. Changes no bit.
    pub memory: MemoryUse,
    /// Where to compute.
    pub device: Compute,
    /// Whether products of f32 on a GPU may round their operands to 10 bits.
    pub tf32: bool,
    /// Whether a GPU uses only algorithms that give the same bits every time. The CPU always does.
    pub deterministic: bool,
    /// Which convolutions may go by tiles.
    pub winograd: Winograd,
    /// Compute threads. If not given, all cores; where there are more than four, less one for each loader, up to a quarter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Whether compute threads stay each on a core of its own, if they take most of the cores. Changes no bit.
    pub pin: bool,
    /// Threads that read, decode and augment.
    pub loader_threads: usize,
    /// A weights file to start from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
    /// Parameters whose names start like this keep their random start although a weights file is given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub weights_except: Vec<String>,
    /// Evaluate and save after every so many epochs, and at the end.
    pub evaluate_every: u64,
    /// Whether evaluations answer an image with the mean of the logits for it and for its mirror image.
    pub evaluate_mirrored: bool,
    /// Save every so many updates, besides every epoch's end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_every: Option<u64>,
    /// Save whenever so many minutes have passed without, beside training; 0 for never. If not given, 5 where several workers step
    /// together, and never where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_minutes: Option<f64>,
    /// How many of the last checkpoints are kept, besides the best.
    pub keep: usize,
    /// The learning rate over time.
    pub learning_rate: LearningRate,
    /// The optimizer's constants.
    pub hyper_parameters: HyperParameters,
    /// How long what may take.
    pub deadlines: Deadlines,
    /// How workers exchange with a centre that servers hold.
    #[serde(skip_serializing_if = "Center::is_silent")]
    pub center: Center,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            model: "cnn5".into(),
            data: "shapes".into(),
            size: None,
            sequence: 128,
            classes: None,
            batch: 64,
            accumulate: 1,
            last_batch: LastBatch::Keep,
            epochs: 4,
            max_steps: None,
            time_limit_s: None,
            early_stop: None,
            optimizer: Optimizer::Adam,
            label_smoothing: 0.0,
            clip_norm: None,
            augment: AugmentChoice::Standard,
            mean: None,
            std: None,
            damaged_max: 0,
            seed: 1,
            workers: 1,
            split: Split::default(),
            cuts: Vec::new(),
            schedule: Kind::default(),
            stage_devices: Vec::new(),
            memory_limit: None,
            agree: Agree::default(),
            squeeze: Squeeze::default(),
            overlap: Overlap::On,
            shard: Sharding::None,
            carry: Carry::AUTO,
            sockets: 1,
            algorithm: None,
            servers: 1,
            staleness: None,
            balance: Balance::Even,
            balance_every: 50,
            slow: Slow::default(),
            period: None,
            node_period: None,
            fragments: None,
            post_local: None,
            outer_rate: None,
            outer_momentum: None,
            herds: None,
            sync_batch_norm: false,
            dtype: Precision::F32,
            device: Compute::Cpu,
            tf32: false,
            deterministic: false,
            memory: MemoryUse::Normal,
            winograd: Winograd::Auto,
            threads: None,
            pin: true,
            loader_threads: 1,
            weights: None,
            weights_except: Vec::new(),
            evaluate_every: 1,
            evaluate_mirrored: false,
            checkpoint_every: None,
            checkpoint_minutes: None,
            keep: 2,
            learning_rate: LearningRate { schedule: Schedule::Cosine { end: 0.0 }, ..LearningRate::constant(0.002) },
            hyper_parameters: HyperParameters::default(),
            deadlines: Deadlines::default(),
            center: Center::default(),
        }
    }
}

impl Config {
    /// Reads a configuration file's text.
    ///
    /// # Errors
    /// When it is not TOML, or names a key that does not exist; the message shows the line.
    pub fn from_toml(text: &str) -> Result<Self, TrainError> {
        toml::from_str(text).map_err(|error| TrainError::Refused(format!("the configuration does not fit: {error}")))
    }

    /// The configuration as a file's text.
    pub fn to_toml(&self) -> String {
        toml::to_string_pretty(self).expect("a configuration has nothing that TOML cannot hold")
    }

    /// Whether every number can be used.
    ///
    /// # Errors
    /// The first that cannot; the sentence says what to type.
    pub fn check(&self) -> Result<(), TrainError> {
        self.check_numbers()?;
        self.check_split()?;
        self.check_agreement()?;
        if self.batch < self.accumulate {
            let (batch, accumulate) = (self.batch, self.accumulate);
            return refuse(format!(
                "--batch {batch} cannot be cut into {accumulate} parts; type --accumulate {batch} or less"
            ));
        }
        if self.time_limit_s.is_some_and(|seconds| seconds.is_nan() || seconds <= 0.0) {
            return refuse("--time-limit must be above zero; type for example --time-limit 90s or 10m".into());
        }
        if self.checkpoint_minutes.is_some_and(|minutes| !minutes.is_finite() || minutes < 0.0) {
            return refuse(
                "--checkpoint-minutes must not be below zero; type for example --checkpoint-minutes 5, or 0 for never"
                    .into(),
            );
        }
        if self.clip_norm.is_some_and(|norm| norm.is_nan() || norm <= 0.0) {
            return refuse("--clip-norm must be above zero; type for example --clip-norm 1.0".into());
        }
        if !(0.0..1.0).contains(&self.label_smoothing) {
            return refuse(
                "--label-smoothing must be from 0 to below 1; type for example --label-smoothing 0.1".into(),
            );
        }
        self.check_shares()?;
        if let Some(sentence) = self.deadlines.refusal() {
            return refuse(sentence);
        }
        self.learning_rate.check().map_err(|error| TrainError::Refused(error.to_string()))?;
        self.hyper_parameters.check().map_err(|error| TrainError::Refused(error.to_string()))
    }

    /// Whether all workers are at the same step all the time.
    pub fn steps_together(&self) -> bool {
        self.agree.recipe().is_synchronous(&self.agreement(false))
    }

    /// The part of the optimizer's state that a worker keeps, if it does not keep all of it; `shares_memory` says
    /// whether all workers map the same memory.
    pub fn optimizer_shard(&self, worker: Shard, shares_memory: bool) -> Option<OptimizerShard> {
        let Shard { rank, world } = worker;
        let maps_one_copy = shares_memory && self.keeps_messages_whole();
        (self.shard == Sharding::Optimizer && world > 1).then_some(OptimizerShard { rank, world, maps_one_copy })
    }

    /// Whether gradients travel as they are and as they come, so that ranks that share memory need no messages.
    pub fn keeps_messages_whole(&self) -> bool {
        self.squeeze == Squeeze::default() && self.overlap == Overlap::On
    }

    /// Stages of each replica.
    pub const fn stages(&self) -> usize {
        match self.split {
            Split::Pipeline(stages) => stages,
            _ => 1,
        }
    }

    /// Parts that compute each replica's layers together.
    pub const fn parts(&self) -> usize {
        match &self.split {
            Split::Parts(split) => split.parts,
            _ => 1,
        }
    }

    /// Ranks that compute each replica.
    pub const fn ranks_per_worker(&self) -> usize {
        self.stages() * self.parts()
    }

    /// What one of the parts computes; none of a model whose layers are whole.
    pub fn part_form(&self, own: usize) -> Option<PartForm> {
        let Split::Parts(PartSplit { forms, parts }) = &self.split else { return None };
        Some(PartForm { forms: forms.clone(), parts: *parts, own })
    }

    /// Where a rank's stage computes.
    pub fn device_of(&self, rank: usize) -> Compute {
        self.stage_devices.get(rank % self.stages()).copied().unwrap_or(self.device)
    }

    /// Ranks that compute.
    pub const fn computing(&self) -> usize {
        self.workers * self.ranks_per_worker()
    }

    /// Servers that a run with more than one worker has.
    pub fn server_count(&self) -> usize {
        if self.agree.recipe().has_servers() { self.servers } else { 0 }
    }

    /// How many ranks a run has; servers are there where several replicas are.
    pub fn ranks(&self) -> usize {
        self.computing() + if self.workers > 1 { self.server_count() } else { 0 }
    }

    /// Whether the ranks of a run are threads of one process, as many as there are.
    pub fn keeps_one_process(&self) -> bool {
        self.carry == Carry::THREAD || self.carry == Carry::AUTO && self.agree.recipe().shares_process()
    }

    /// Whether the ranks of a run are threads of one process, of which there are several.
    pub fn has_rank_threads(&self) -> bool {
        self.keeps_one_process() && self.ranks() > 1
    }

    /// Whether GPUs add up gradients among themselves, inside of a step's graph.
    pub fn sums_on_devices(&self) -> bool {
        let may = self.device != Compute::Cpu && self.ranks_per_worker() == 1;
        may && matches!(self.carry, Carry::AUTO | Carry::NCCL) && self.keeps_off_host().is_ok()
    }

    /// Whether gradients may stay off the host, or what they are needed there for.
    fn keeps_off_host(&self) -> Result<(), String> {
        if !self.agree.recipe().sums_on_devices() {
            Err(format!("--agree {}", self.agree.name()))
        } else if self.squeeze != Squeeze::default() {
            Err(format!("--squeeze {}", self.squeeze.name()))
        } else if self.sync_batch_norm {
            Err("--sync-batch-norm".into())
        } else if self.overlap == Overlap::Off {
            Err("--overlap off".into())
        } else {
            Ok(())
        }
    }

    /// Seconds after which a run of so many workers is saved, if it was not meanwhile; none for never.
    pub fn checkpoint_seconds(&self, workers: usize) -> Option<f64> {
        let usual = if workers > 1 && self.steps_together() { CHECKPOINT_MINUTES } else { 0.0 };
        let minutes = self.checkpoint_minutes.unwrap_or(usual);
        (minutes > 0.0).then_some(60.0 * minutes)
    }

    /// How many compute threads there will be on this machine.
    pub fn compute_threads(&self) -> usize {
        self.compute_threads_among(1)
    }

    /// How many compute threads each of so many ranks on this machine will have.
    pub fn compute_threads_among(&self, ranks: usize) -> usize {
        self.threads.unwrap_or_else(|| {
            let allowed = threads::beside_loaders_among(self.loader_threads, ranks);
            // A rank that has no cores of its own sees those of all.
            let shares_cores = self.has_rank_threads() && (!self.pin || cores::online() < ranks);
            if shares_cores { (allowed / ranks).max(1) } else { allowed }
        })
    }

    /// Samples that are computed at once by all workers, at most.
    pub fn micro_batch(&self) -> usize {
        self.batch.div_ceil(self.accumulate)
    }
}

fn refuse<T>(sentence: String) -> Result<T, TrainError> {
    Err(TrainError::Refused(sentence))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_survives_being_written() {
        let mut config = Config { max_steps: Some(7), clip_norm: Some(1.5), ..Config::default() };
        config.weights_except = vec!["fc.".into()];
        assert_eq!(Config::from_toml(&config.to_toml()).unwrap(), config);
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = Config::from_toml("modle = \"resnet50\"").unwrap_err();
        assert!(error.to_string().contains("modle"), "{error}");
    }

    #[test]
    fn zero_is_refused_with_what_to_type() {
        let error = Config { batch: 0, ..Config::default() }.check().unwrap_err();
        assert_eq!(error.to_string(), "--batch 0 does not work; type --batch with a whole number from 1");
        assert!(Config { batch: 3, accumulate: 4, ..Config::default() }.check().is_err());
        assert!(Config { batch: 10, accumulate: 4, ..Config::default() }.check().is_ok());
        assert!(Config { time_limit_s: Some(f64::NAN), ..Config::default() }.check().is_err());
        assert!(Config::default().check().is_ok());
    }

    #[test]
    fn several_workers_are_saved_every_five_minutes_unless_told_otherwise() {
        let config = Config::default();
        assert_eq!((config.checkpoint_seconds(1), config.checkpoint_seconds(2)), (None, Some(300.0)));
        let told = |minutes| Config { checkpoint_minutes: Some(minutes), ..Config::default() };
        assert_eq!((told(0.0).checkpoint_seconds(2), told(2.0).checkpoint_seconds(1)), (None, Some(120.0)));
        assert!(told(-1.0).check().is_err() && told(f64::NAN).check().is_err() && told(0.5).check().is_ok());
        let apart = Config {
            agree: "parameter-server".parse().unwrap(),
            staleness: Some(Staleness(Some(3))),
            ..Config::default()
        };
        assert_eq!(apart.checkpoint_seconds(2), None);
        let error = Config { checkpoint_minutes: Some(1.0), ..apart }.check().unwrap_err().to_string();
        assert!(error.ends_with("type --checkpoint-every with a number of steps"), "{error}");
    }

    #[test]
    fn workers_on_gpus_agree_in_every_way_and_nccl_only_where_it_can() {
        let gpus = Config { device: Compute::Cuda(None), workers: 2, ..Config::default() };
        assert!(gpus.check().is_ok() && gpus.sums_on_devices());
        let server = Config { agree: "parameter-server".parse().unwrap(), ..gpus.clone() };
        let bf16 = Config { squeeze: "bf16".parse().unwrap(), ..gpus.clone() };
        let hosted = [
            (Config { carry: Carry::TCP, ..gpus.clone() }, ""),
            (server, "--agree parameter-server"),
            (Config { sync_batch_norm: true, ..gpus.clone() }, "--sync-batch-norm"),
            (bf16, "--squeeze bf16"),
            (Config { overlap: Overlap::Off, ..gpus.clone() }, "--overlap off"),
        ];
        for (config, flag) in hosted {
            assert!(config.check().is_ok() && !config.sums_on_devices(), "{config:?}");
            if !flag.is_empty() {
                let error = Config { carry: Carry::NCCL, ..config }.check().unwrap_err().to_string();
                assert!(error.starts_with(&format!("{flag} needs gradients on the hosts")), "{error}");
            }
        }
        assert!(Config { carry: Carry::NCCL, ..gpus.clone() }.check().is_ok());
        let error = Config { carry: Carry::NCCL, ..Config::default() }.check().unwrap_err().to_string();
        assert_eq!(error, "--carry nccl is for GPUs; type --device cuda, or another --carry");
    }

    #[test]
    fn gpus_that_train_together_may_take_their_batches_in_parts() {
        let mut config = Config { device: Compute::Cuda(None), batch: 64, accumulate: 4, ..Config::default() };
        config.carry = Carry::NCCL;
        assert!(config.check_world(1).is_ok() && config.check_world(3).is_ok() && config.check_world(16).is_ok());
        let error = config.check_world(17).unwrap_err().to_string();
        assert_eq!(error, "--batch 64 is too small for 17 workers in 4 parts each; type --batch 68 or more");
    }

    #[test]
    fn statistics_of_all_workers_need_workers_that_meet() {
        let mut config = Config { sync_batch_norm: true, workers: 2, ..Config::default() };
        assert!(config.check().is_ok());
        config.agree = "parameter-server".parse().unwrap();
        for staleness in [Some(0), Some(3), None] {
            config.staleness = Some(Staleness(staleness));
            let error = config.check().unwrap_err().to_string();
            assert!(error.ends_with("type --agree all-reduce, or leave it out"), "{error}");
        }
    }
}
