//! What can be typed: commands, flags and their help. Lifted into checked values by `command/`.

mod bench;
mod center;
mod choose;
pub mod doctor;
pub mod launch;
mod lend;
mod parse;
mod rounds;
mod unequal;

use std::path::PathBuf;
use std::time::Duration;

use crate::cluster::Job;
use crate::data::{AugmentChoice, LastBatch};
use crate::nn::optim::Optimizer;
use crate::parallel::split::Kind;
use crate::tensor::device::cpu::choice::Winograd;
use crate::tensor::{MemoryUse, Precision};
use crate::train::compute::Compute;
use crate::train::together::{self, Agree, Overlap, Sharding, Split, Squeeze, Staleness};
pub use bench::*;
pub use choose::{Choose, chosen_instead, without};
use clap::{Args, Parser, Subcommand, ValueEnum};
pub use lend::{BenchMemory, Lend, LendCommand, LendMemory};
pub use parse::Schedules;

use crate::command::calibrate::Calibrate;

/// Distributed deep-learning training in one binary.
#[derive(Debug, Parser)]
#[command(name = "paceline", version, propagate_version = true, arg_required_else_help = true, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "Examples:
  paceline train                                             a small network on built-in data, no downloads
  paceline train --model resnet20 --data cifar10:DIR --epochs 10
  paceline train --model resnet20 --data cifar10:DIR --workers 4          the same training, four processes
  paceline train --model resnet20 --data cifar10:DIR --replicas 4         the same training, four replicas in one process
  paceline choose --model resnet20 --data cifar10:DIR                     which way to use this machine is fastest
  paceline train recipes/cifar10-resnet20.toml --data cifar10:DIR
  paceline train --resume runs/NAME                          after Ctrl-C or a crash
  paceline plan --model resnet50 --batch 32                  memory, arithmetic and messages before anything runs
  paceline predict runs/NAME photo.jpg";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model; without arguments, a small network on the built-in `shapes` set
    Train(Box<Train>),
    /// Measure every way to use this machine's cores or GPUs for a training, and say which is fastest
    Choose(Box<Choose>),
    /// Start the processes of a run: on this machine, over ssh, with mpirun, Slurm or Kubernetes
    Launch(Box<launch::Launch>),
    /// Measure a trained model on the validation set of its data
    Evaluate(Evaluate),
    /// Name what is in image files, best guesses first
    Predict(Predict),
    /// Write a trained model as an ONNX file
    Export(Export),
    /// Show what a training step will do: parameters, FLOPs, memory, gradient messages
    Plan(Plan),
    /// List the models: parameters, multiply-adds, sizes
    Models(Models),
    /// Look at data
    Data(Data),
    /// Lend something of this machine to runs: its memory
    Serve(Lend),
    /// Measure
    Bench(Bench),
    /// Look at this machine and the links between machines, and say which settings fit them
    Doctor(doctor::Doctor),
    /// Write the HTML report of a run again
    Report(Report),
}

/// `paceline train`
#[derive(Debug, Args)]
#[command(
    after_help = "A run is a folder: config.toml, events/, checkpoints/, report.html. Ctrl-C finishes the step, saves, and says how to go on."
)]
pub struct Train {
    /// A configuration file, such as one of recipes/ or the config.toml of an earlier run; flags override it
    pub config: Option<PathBuf>,
    /// Continue the run in this folder from its last checkpoint, or from one of its checkpoints: RUN/checkpoints/step-N
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "run", "model", "data"])]
    pub resume: Option<PathBuf>,
    /// The folder for a new run, which must be empty if it is there [default: runs/TIME-MODEL]
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,

    /// A model that `paceline models` lists
    #[arg(long, short, help_heading = "Model and data")]
    pub model: Option<String>,
    /// shapes | cifar10:DIR | mnist:DIR | folder:DIR | remote:HOST:PORT | text:FILE | synthetic:WxHxC/CLASSES
    #[arg(long, short, help_heading = "Model and data")]
    pub data: Option<String>,
    /// Side of the images that the model sees [default: the data's own]
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true, help_heading = "Model and data")]
    pub size: Option<usize>,
    /// Length of token sequences
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true, help_heading = "Model and data")]
    pub sequence: Option<usize>,
    /// Insist on this number of classes
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true, help_heading = "Model and data")]
    pub classes: Option<usize>,
    /// Training augmentation: none | flip (scaled and mirrored, nothing cropped) | standard | strong (standard, and a hole)
    #[arg(long, value_parser = parse::augment, help_heading = "Model and data")]
    pub augment: Option<AugmentChoice>,
    /// Subtracted from each channel (pixels count from 0 to 1), such as 0.485,0.456,0.406 [default: the data's own]
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true, help_heading = "Model and data")]
    pub mean: Option<Vec<f32>>,
    /// What each channel is divided by, such as 0.229,0.224,0.225 [default: the data's own]
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true, help_heading = "Model and data")]
    pub std: Option<Vec<f32>>,
    /// Damaged images to skip, by name, before giving up [default: 0]
    #[arg(long, value_parser = parse::whole, allow_negative_numbers = true, help_heading = "Model and data")]
    pub damaged_max: Option<usize>,
    /// Start from these weights: a .safetensors file with torchvision's names, or one of an earlier run
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub weights: Option<String>,
    /// Layers that keep their random start although --weights is given, such as `fc` for another number of classes
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', help_heading = "Model and data")]
    pub except: Vec<String>,

    /// Samples per update
    #[arg(long, short, value_parser = parse::count, allow_negative_numbers = true, help_heading = "Length")]
    pub batch: Option<usize>,
    /// Compute a batch in so many parts, to save memory
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true, help_heading = "Length")]
    pub accumulate: Option<usize>,
    /// Samples that do not fill a batch at the end of an epoch: keep (a smaller batch) | drop
    #[arg(long, help_heading = "Length")]
    pub last_batch: Option<LastBatch>,
    /// Passes over the data
    #[arg(long, short, value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Length")]
    pub epochs: Option<u64>,
    /// Stop after so many updates
    #[arg(long, value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Length")]
    pub max_steps: Option<u64>,
    /// Stop after this time: 90s, 10m, 2h
    #[arg(long, value_parser = parse::duration, allow_negative_numbers = true, help_heading = "Length")]
    pub time_limit: Option<f64>,
    /// Stop when the validation accuracy has not risen for so many epochs
    #[arg(long, value_name = "EPOCHS", value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Length")]
    pub early_stop: Option<u64>,

    /// sgd | momentum | nesterov | adagrad | adam | adamw | lars
    #[arg(long, help_heading = "Learning")]
    pub optimizer: Option<Optimizer>,
    /// Learning rate
    #[arg(long, value_parser = parse::positive, allow_negative_numbers = true, help_heading = "Learning")]
    pub lr: Option<f64>,
    /// Multiply the learning rate by batch/256
    #[arg(long, help_heading = "Learning")]
    pub scale_lr: bool,
    /// Of the learning rate: constant | cosine | step:EPOCHS | milestones:30,60,80 | poly:POWER; of a pipeline: gpipe | 1f1b | zero-bubble
    #[arg(long, value_parser = parse::schedules, help_heading = "Learning")]
    pub schedule: Vec<Schedules>,
    /// Climb to the full learning rate over so many epochs
    #[arg(long, value_name = "EPOCHS", value_parser = parse::not_negative, allow_negative_numbers = true, help_heading = "Learning")]
    pub warmup_epochs: Option<f64>,
    /// Momentum
    #[arg(long, value_parser = parse::not_negative, allow_negative_numbers = true, help_heading = "Learning")]
    pub momentum: Option<f64>,
    /// Steps at the beginning that are made without momentum, as Dogwild! asks for [default: 0]
    #[arg(long, value_name = "STEPS", value_parser = parse::whole64, allow_negative_numbers = true, help_heading = "Learning")]
    pub momentum_from: Option<u64>,
    /// Weight decay; biases and normalisation are left out
    #[arg(long, value_parser = parse::not_negative, allow_negative_numbers = true, help_heading = "Learning")]
    pub weight_decay: Option<f64>,
    /// Share of the target spread over all classes
    #[arg(long, value_parser = parse::not_negative, allow_negative_numbers = true, help_heading = "Learning")]
    pub label_smoothing: Option<f64>,
    /// Scale gradients down to this norm
    #[arg(long, value_parser = parse::positive, allow_negative_numbers = true, help_heading = "Learning")]
    pub clip_norm: Option<f64>,
    /// Decides initial weights, order, augmentation and dropout
    #[arg(long, value_parser = parse::whole64, allow_negative_numbers = true, help_heading = "Learning")]
    pub seed: Option<u64>,

    /// Replicas on this machine that share every batch, each a process on cores of its own [default: 1; without any argument, 2]
    #[arg(long, short, value_name = "N", value_parser = parse::count, allow_negative_numbers = true, help_heading = "Many processes")]
    pub workers: Option<usize>,
    #[arg(long, overrides_with = "split", help = splits(), help_heading = "Many processes")]
    pub split: Option<Split>,
    /// The layers behind which a pipeline's stages end, such as features.8 [default: balanced by measured time]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', help_heading = "Many processes")]
    pub cuts: Vec<String>,
    /// Micro-batches of a pipeline, the same as --accumulate [default: 8 with --split pipeline]
    #[arg(long, value_name = "M", conflicts_with = "accumulate", value_parser = parse::count, allow_negative_numbers = true)]
    #[arg(help_heading = "Many processes")]
    pub micro_batches: Option<usize>,
    /// Where each stage of a pipeline computes, such as cuda,cpu [default: all as --device says]
    #[arg(long, value_name = "DEVICES", value_delimiter = ',', help_heading = "Many processes")]
    pub stage_devices: Vec<Compute>,
    /// Memory that each process may take, such as 600MB: a model that needs more is split into stages
    #[arg(long, value_name = "SIZE", value_parser = parse::memory, allow_negative_numbers = true, help_heading = "Many processes")]
    pub memory_limit: Option<u64>,
    /// With --split auto, the time in which ways to use this machine are measured [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = parse::duration, allow_negative_numbers = true, help_heading = "Many processes")]
    pub choose_budget: Option<f64>,
    /// Replicas that share every batch as threads of this one process, each on cores of its own: --workers N --carry thread
    #[arg(long, value_name = "N", value_parser = parse::count, allow_negative_numbers = true, help_heading = "Many processes")]
    pub replicas: Option<usize>,
    #[arg(long, help = agrees(), help_heading = "Many processes")]
    pub agree: Option<Agree>,
    #[arg(long, help = squeezes(), help_heading = "Many processes")]
    pub squeeze: Option<Squeeze>,
    /// Whether gradients travel while the backward pass goes on: on | off, all after it, to compare with
    #[arg(long, help_heading = "Many processes")]
    pub overlap: Option<Overlap>,
    /// What is divided among workers: none | optimizer (each keeps and steps its part of the optimizer's state, for 1/N of its memory and the same messages; for --agree all-reduce)
    #[arg(long, value_name = "WHAT", help_heading = "Many processes")]
    pub shard: Option<Sharding>,
    #[arg(long, help = carries(), help_heading = "Many processes")]
    pub carry: Option<together::Carry>,
    /// TCP connections between every two processes [default: 1; `paceline doctor` measures what helps]
    #[arg(long, value_name = "N", value_parser = parse::count, allow_negative_numbers = true, help_heading = "Many processes")]
    pub sockets: Option<usize>,
    /// Insist on an algorithm of all-reduces, such as ring [default: by size, from the links' measured speed]
    #[arg(long, value_name = "NAME", help_heading = "Many processes")]
    pub algorithm: Option<String>,
    /// Processes that hold parameters, for agreements with servers [default: 1]
    #[arg(long, value_name = "N", value_parser = parse::count, allow_negative_numbers = true, help_heading = "Many processes")]
    pub servers: Option<usize>,
    /// Steps that a worker may be ahead of the slowest, with servers: 0 for synchronous, none for no bound [default: 0 for parameter-server, otherwise none]
    #[arg(long, visible_alias = "staleness-limit", value_name = "STEPS", help_heading = "Many processes")]
    pub staleness: Option<Staleness>,
    #[command(flatten)]
    pub unequal: unequal::Unequal,
    #[command(flatten)]
    pub rounds: rounds::Rounds,
    #[command(flatten)]
    pub center: center::Center,
    /// Take the statistics of batch-norm layers over the batches of all workers, instead of each its own; for --agree all-reduce
    #[arg(long, help_heading = "Many processes")]
    pub sync_batch_norm: bool,
    /// Start more than 16 processes for each core of this machine
    #[arg(long, help_heading = "Many processes")]
    pub oversubscribe: bool,
    /// After a failure, start again from the last checkpoint, by itself, at most so many times; under Slurm, have the job queued again [default: 0]
    #[arg(long, value_name = "N", value_parser = parse::whole64, allow_negative_numbers = true, help_heading = "Many processes")]
    pub restart: Option<u64>,
    /// Said to the processes of a launcher that starts them again: how often it did, and seconds before
    #[arg(long, hide = true, value_parser = parse::restarted)]
    pub restarted: Option<(u64, f64)>,
    /// Said by `choose`: the run is made to be timed; so many steps at least, a colon, and seconds behind the first
    #[arg(long, hide = true, value_parser = parse::restarted)]
    pub rehearse: Option<(u64, f64)>,
    /// Start over ssh on these hosts, such as a,b:2 for one process on a and two on b
    #[arg(long, value_name = "HOSTS", conflicts_with_all = ["workers", "cluster"], help_heading = "Many processes")]
    pub hosts: Option<String>,
    /// With --split auto on several hosts: train on all of them, although one alone is expected to be faster
    #[arg(long, help_heading = "Many processes")]
    pub distribute: bool,
    /// A JSON file {"worker": ["host:port", …], "ps": […]}; each process is started by hand with its --job and --task
    #[arg(long, value_name = "FILE", help_heading = "Many processes")]
    pub cluster: Option<PathBuf>,
    /// What this process is in the cluster file: worker | ps
    #[arg(long, requires = "cluster", help_heading = "Many processes")]
    pub job: Option<Job>,
    /// Its number among those of its job, from 0
    #[arg(long, requires = "cluster", help_heading = "Many processes")]
    pub task: Option<usize>,
    /// The port that rank 0 listens on, with --hosts
    #[arg(long, help_heading = "Many processes")]
    pub port: Option<u16>,
    /// The address or interface that rank 0 listens on, such as eth1 [default: loopback, or what the other machines have to reach]
    #[arg(long, value_name = "ADDRESS", value_parser = parse::bind, help_heading = "Many processes")]
    pub bind: Option<std::net::IpAddr>,

    /// Name a rank that others have waited for so long, such as 500ms; the run goes on [default: 1s]
    #[arg(long, value_name = "TIME", value_parser = parse::span, allow_negative_numbers = true, help_heading = "Many processes")]
    pub late: Option<Duration>,
    /// End the run when nothing was heard of a rank for so long [default: 15s]
    #[arg(long, value_name = "TIME", value_parser = parse::span, allow_negative_numbers = true, help_heading = "Many processes")]
    pub silent: Option<Duration>,
    /// Give up when not all ranks have come for so long [default: 2m]
    #[arg(long, value_name = "TIME", value_parser = parse::span, allow_negative_numbers = true, help_heading = "Many processes")]
    pub gather: Option<Duration>,

    /// Encrypt what processes send each other over sockets, by keys that follow from the run's token, or by certificates
    #[arg(long, value_name = "CERT,KEY,CA", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    #[arg(help_heading = "Many processes")]
    pub tls: Option<String>,

    /// What activations are stored as: f32 | bf16 (half the memory; weights and sums stay f32)
    #[arg(long, help_heading = "Machine and output")]
    pub dtype: Option<Precision>,
    /// Where to compute: cpu | cuda | cuda:1 [default: cpu]
    #[arg(long, help_heading = "Machine and output")]
    pub device: Option<Compute>,
    /// Let products of f32 on a GPU round their operands to 10 bits: on | off [default: off]
    #[arg(long, value_name = "SWITCH", value_parser = parse::switch, help_heading = "Machine and output")]
    pub tf32: Option<bool>,
    /// Use only algorithms of a GPU that give the same bits every time: on | off [default: off]
    #[arg(long, value_name = "SWITCH", value_parser = parse::switch, help_heading = "Machine and output")]
    pub deterministic: Option<bool>,
    /// normal | low: compute again what is cheap, instead of keeping it for the backward pass
    #[arg(long, help_heading = "Machine and output")]
    pub memory: Option<MemoryUse>,
    /// Which 3×3 convolutions may go by tiles: auto | f32 (in bf16 tiles round more than direct sums do) | off
    #[arg(long, value_name = "WHERE", help_heading = "Machine and output")]
    pub winograd: Option<Winograd>,
    /// Compute threads [default: all cores; of more than four, less one for each loader, up to a quarter]
    #[arg(long, value_parser = parse::threads, allow_negative_numbers = true, help_heading = "Machine and output")]
    pub threads: Option<usize>,
    /// Whether compute threads stay each on a core of its own, if they take most of the cores: on | off [default: on]
    #[arg(long, value_name = "SWITCH", value_parser = parse::switch, help_heading = "Machine and output")]
    pub pin: Option<bool>,
    /// How the algorithms of convolutions are chosen
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Calibrate::On, help_heading = "Machine and output")]
    pub calibrate: Calibrate,
    /// Threads that read, decode and augment
    #[arg(long, value_parser = parse::threads, allow_negative_numbers = true, help_heading = "Machine and output")]
    pub loader_threads: Option<usize>,
    /// Evaluate and save after every so many epochs, and at the end [default: 1]
    #[arg(long, value_name = "EPOCHS", value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Machine and output")]
    pub evaluate_every: Option<u64>,
    /// Evaluate each image together with its mirror image, by the mean of their logits
    #[arg(long, help_heading = "Machine and output")]
    pub evaluate_mirrored: bool,
    /// Save every so many updates, besides every epoch's end
    #[arg(long, value_name = "STEPS", value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Machine and output")]
    pub checkpoint_every: Option<u64>,
    /// Save whenever so many minutes have passed without, while training goes on; 0 for never [default: 5 with several workers, otherwise 0]
    #[arg(long, value_name = "MINUTES", value_parser = parse::not_negative, allow_negative_numbers = true, help_heading = "Machine and output")]
    pub checkpoint_minutes: Option<f64>,
    /// Checkpoints to keep, besides the best
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true, help_heading = "Machine and output")]
    pub keep: Option<usize>,
    /// Say nothing but errors
    #[arg(long, short, conflicts_with = "json", help_heading = "Machine and output")]
    pub quiet: bool,
    /// Print the run's events as JSON lines (docs/events.md)
    #[arg(long, help_heading = "Machine and output")]
    pub json: bool,

    /// What `--split auto` came to, in the words that the other processes of the run are started with.
    #[arg(skip)]
    pub chosen: Vec<String>,
}

/// `paceline evaluate`
#[derive(Debug, Args)]
pub struct Evaluate {
    /// A run's folder, a checkpoint's folder, or a weights file inside one
    pub run: PathBuf,
    /// Another data set with the same classes
    #[arg(long, short)]
    pub data: Option<String>,
    /// What activations are stored as: f32 | bf16 [default: as in training]
    #[arg(long)]
    pub dtype: Option<Precision>,
    /// Where to compute: cpu | cuda | cuda:1 [default: as in training]
    #[arg(long)]
    pub device: Option<Compute>,
    /// Answer each image together with its mirror image, by the mean of their logits [default: as in training]
    #[arg(long)]
    pub mirrored: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `paceline predict`
#[derive(Debug, Args)]
pub struct Predict {
    /// A run's folder, a checkpoint's folder, or a weights file
    pub run: PathBuf,
    /// JPEG or PNG files
    #[arg(required = true)]
    pub images: Vec<PathBuf>,
    /// Guesses per image
    #[arg(long, default_value_t = 5, value_parser = parse::count, allow_negative_numbers = true)]
    pub top: usize,
    /// What activations are stored as: f32 | bf16
    #[arg(long, default_value_t = Precision::F32)]
    pub dtype: Precision,
    /// Where to compute: cpu | cuda | cuda:1
    #[arg(long, default_value_t = Compute::Cpu)]
    pub device: Compute,
    /// Print one JSON object per image
    #[arg(long)]
    pub json: bool,
}

/// `paceline export`
#[derive(Debug, Args)]
pub struct Export {
    /// A run's folder, a checkpoint's folder, or a weights file
    pub run: PathBuf,
    /// The ONNX file to write
    #[arg(long, value_name = "FILE")]
    pub onnx: PathBuf,
    /// Replace the file if it is there
    #[arg(long)]
    pub force: bool,
}

/// `paceline plan`
#[derive(Debug, Clone, Args)]
pub struct Plan {
    /// A model that `paceline models` lists
    #[arg(long, short, default_value = "resnet50")]
    pub model: String,
    /// Samples per step
    #[arg(long, short, default_value_t = 32, value_parser = parse::count, allow_negative_numbers = true)]
    pub batch: usize,
    /// Side of the images, or length of the token sequence [default: the model's own]
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true)]
    pub size: Option<usize>,
    /// Number of classes [default: the model's published one]
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true)]
    pub classes: Option<usize>,
    /// What activations are stored as: f32 | bf16
    #[arg(long, default_value_t = Precision::F32)]
    pub dtype: Precision,
    /// normal | low: compute again what is cheap, instead of keeping it for the backward pass
    #[arg(long, default_value_t = MemoryUse::Normal)]
    pub memory: MemoryUse,
    /// Which 3×3 convolutions may go by tiles: auto | f32 (in bf16 tiles round more than direct sums do) | off
    #[arg(long, value_name = "WHERE", default_value_t = Winograd::Auto)]
    pub winograd: Winograd,
    /// How the algorithms of convolutions are chosen
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Calibrate::Known)]
    pub calibrate: Calibrate,
    /// Share the batch between so many processes, and show what they send each other
    #[arg(long, short, default_value_t = 1, value_parser = parse::count, allow_negative_numbers = true)]
    pub workers: usize,
    /// What is divided among them: none | optimizer
    #[arg(long, value_name = "WHAT", default_value = "none")]
    pub shard: Sharding,
    /// Share the batch between so many replicas in one process
    #[arg(long, value_name = "N", value_parser = parse::count, allow_negative_numbers = true, conflicts_with = "workers")]
    pub replicas: Option<usize>,
    /// Latency of the links between them, in microseconds [default: 50; between stages, that of one machine's memory]
    #[arg(long, value_name = "MICROSECONDS", value_parser = parse::positive)]
    pub link_latency: Option<f64>,
    /// Bandwidth of the links, in Gbit/s [default: 1; between stages, that of one machine's memory]
    #[arg(long, value_name = "GBIT", value_parser = parse::positive)]
    pub link_bandwidth: Option<f64>,
    /// Take the statistics of batch-norm layers over the batches of all processes
    #[arg(long)]
    pub sync_batch_norm: bool,
    /// Compute the batch in so many parts, whose gradients are added up
    #[arg(long, value_name = "PARTS", default_value_t = 1, value_parser = parse::count, allow_negative_numbers = true)]
    pub accumulate: usize,
    /// Scale gradients down to this norm, for which all have to be there
    #[arg(long, value_parser = parse::positive, allow_negative_numbers = true)]
    pub clip_norm: Option<f64>,
    /// sgd | momentum | nesterov | adagrad | adam | adamw | lars [default: as `paceline train`]
    #[arg(long)]
    pub optimizer: Option<Optimizer>,
    #[arg(long, conflicts_with_all = ["eval", "nodes"], help = splits())]
    pub split: Option<Split>,
    /// The layers behind which a pipeline's stages end, such as features.8 [default: balanced]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', requires = "split")]
    pub cuts: Vec<String>,
    /// What a pipeline is balanced by, and steps are forecast by [default: time with --split, otherwise arithmetic]
    #[arg(long, value_enum, value_name = "WHAT")]
    pub balance: Option<Balance>,
    /// Micro-batches of a pipeline, the same as --accumulate [default: 8 with --split pipeline]
    #[arg(long, value_name = "M", conflicts_with = "accumulate", requires = "split", value_parser = parse::count)]
    #[arg(allow_negative_numbers = true)]
    pub micro_batches: Option<usize>,
    /// In which order a pipeline computes: gpipe | 1f1b | zero-bubble [default: 1f1b]
    #[arg(long, value_name = "ORDER", requires = "split")]
    pub schedule: Option<Kind>,
    /// Memory that the process of each stage may take, such as 600MB
    #[arg(long, value_name = "SIZE", requires = "split", value_parser = parse::memory, allow_negative_numbers = true)]
    pub memory_limit: Option<u64>,
    /// Compute threads with which each stage is measured [default: as `paceline train` would give it]
    #[arg(long, value_name = "N", requires = "split", value_parser = parse::threads, allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// Plan the evaluation, which keeps nothing for a backward pass, instead of a training step
    #[arg(long, conflicts_with = "memory")]
    pub eval: bool,
    /// List every node, and every transfer between workers
    #[arg(long)]
    pub nodes: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What stages are balanced by, and steps are forecast by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Balance {
    /// Seconds, measured on this machine
    Time,
    /// Floating-point operations; measures nothing
    Arithmetic,
}

/// `paceline models`
#[derive(Debug, Args)]
pub struct Models {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// `paceline data`
#[derive(Debug, Args)]
pub struct Data {
    /// What to do with the data.
    #[command(subcommand)]
    pub command: DataCommand,
}

/// The commands of `paceline data`.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Counts, sizes, class balance, damaged files, and a contact sheet
    Inspect(Inspect),
    /// Lend a folder of photographs to other machines, where --data remote:HOST:PORT reads it
    Serve(Serve),
}

/// `paceline data serve`
#[derive(Debug, Args)]
#[command(
    after_help = "Who asks has to hold the token that this process finds in PACELINE_TOKEN_FILE or in the user's own ~/.config/paceline/token. Ctrl-C ends it."
)]
pub struct Serve {
    /// folder:DIR
    pub spec: String,
    /// The address and port to listen at; port 0 takes any that is free
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:29410")]
    pub listen: String,
    /// Encrypt connections, as the run that reads does: by keys that follow from the token, or by files CERT,KEY,CA
    #[arg(long, value_name = "FILES", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub tls: Option<String>,
}

/// `paceline data inspect`
#[derive(Debug, Args)]
pub struct Inspect {
    /// shapes | cifar10:DIR | mnist:DIR | folder:DIR | remote:HOST:PORT | text:FILE | synthetic:WxHxC/CLASSES
    pub spec: String,
    /// Where to write the contact sheet [default: NAME-contact-sheet.png]
    #[arg(long, value_name = "FILE.png")]
    pub sheet: Option<PathBuf>,
    /// Replace the contact sheet if it is there
    #[arg(long)]
    pub force: bool,
    /// Compare files with their published checksums (cifar10)
    #[arg(long)]
    pub verify: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `paceline report`
#[derive(Debug, Args)]
pub struct Report {
    /// A run's folder
    pub run: PathBuf,
}

/// The help of `--split`.
fn splits() -> String {
    together::help("How the model is split over processes", Split::WORDS.into_iter())
}

/// The help of `--agree`, of all that there are.
fn agrees() -> String {
    let words: Vec<String> = Agree::all().map(|(name, about)| format!("{name} ({about})")).collect();
    together::help("How they agree on the weights", words.iter().map(String::as_str))
}

/// The help of `--squeeze`.
fn squeezes() -> String {
    together::help("How messages between them are squeezed", Squeeze::all().map(|(name, _)| name))
}

/// The help of `--carry`.
fn carries() -> String {
    together::help("How bytes travel, mpi if built with it, nccl between GPUs", together::Carry::all())
}
