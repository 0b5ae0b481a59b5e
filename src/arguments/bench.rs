//! What can be typed behind `paceline bench`.

use std::path::PathBuf;

use crate::comm::Algorithm;
use crate::tensor::device::cpu::choice::Winograd;
use crate::tensor::{MemoryUse, Precision};
use crate::train::compute::Compute;
use crate::train::together::{self, Agree};
use clap::{Args, Subcommand, ValueEnum};

use super::parse;
use crate::command::calibrate::Calibrate;

/// `paceline bench`
#[derive(Debug, Args)]
pub struct Bench {
    /// What to measure.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// The commands of `paceline bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Time training steps on random data: images per second, GFLOP/s, memory
    Step(BenchStep),
    /// Time every convolution and matrix product of a training step by itself, with every algorithm that can compute it
    Kernels(BenchKernels),
    /// Time all-reduces between processes of this machine: algorithm by size by ranks by carry, against copies or plain streams
    Collectives(BenchCollectives),
    /// Time reading, writing and adding in a memory box, by mapped memory and by TCP, beside copies, plain sockets and a parameter server's messages
    Memory(super::BenchMemory),
    /// Train with more and more processes of this machine: images per second, efficiency, and what as many processes reach that know nothing of each other
    Scaling(BenchScaling),
    /// One rank of `bench collectives`, started by it
    #[command(hide = true)]
    CollectivesRank(BenchCollectivesRank),
}

/// `paceline bench scaling`
#[derive(Debug, Clone, Args)]
pub struct BenchScaling {
    /// How many workers; a list measures each, in turns: one replica with their threads, replicas in one process, processes, and as many that know nothing of each other
    #[arg(long, default_value = "2,4", value_delimiter = ',', value_parser = parse::workers, allow_negative_numbers = true)]
    pub workers: Vec<usize>,
    /// A model that `paceline models` lists
    #[arg(long, short, default_value = "resnet50")]
    pub model: String,
    /// Side of the images
    #[arg(long, default_value_t = 32, value_parser = parse::count, allow_negative_numbers = true)]
    pub size: usize,
    /// Samples per step of each process
    #[arg(long, short, default_value_t = 32, value_parser = parse::count, allow_negative_numbers = true)]
    pub batch: usize,
    /// Steps to time, after a few that are not
    #[arg(long, default_value_t = 15, value_parser = parse::count, allow_negative_numbers = true)]
    pub steps: usize,
    /// How often every set-up has its turn; the median counts
    #[arg(long, default_value_t = 5, value_parser = parse::count, allow_negative_numbers = true)]
    pub repeats: usize,
    /// Compute threads of each process [default: the cores, shared by the most processes]
    #[arg(long, value_parser = parse::threads, allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// How they agree on the weights: all-reduce | parameter-server
    #[arg(long)]
    pub agree: Option<Agree>,
    /// How bytes travel: auto | shm | tcp
    #[arg(long)]
    pub carry: Option<together::Carry>,
    /// Start more than 16 processes for each core of this machine
    #[arg(long)]
    pub oversubscribe: bool,
    /// Print one JSON object for each set-up
    #[arg(long)]
    pub json: bool,
}

/// `paceline bench collectives`
#[derive(Debug, Clone, Args)]
pub struct BenchCollectives {
    /// How many processes; a list such as 2,4 measures each
    #[arg(long, default_value = "2", value_delimiter = ',', value_parser = parse::workers, allow_negative_numbers = true)]
    pub workers: Vec<usize>,
    /// How bytes travel: thread | shm | tcp; a list measures each
    #[arg(long, default_value = "shm,tcp", value_delimiter = ',')]
    pub carry: Vec<Carry>,
    /// Bytes of the buffer; a list measures each
    #[arg(long, default_value = "4096,1000000,100000000", value_delimiter = ',', value_parser = parse::bytes, allow_negative_numbers = true)]
    pub bytes: Vec<usize>,
    /// ring | halving-doubling | recursive-doubling | double-tree | hierarchical | direct [default: each]
    #[arg(long, value_delimiter = ',', value_parser = parse::algorithm)]
    pub algorithm: Vec<Algorithm>,
    /// TCP connections between every two ranks
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub sockets: u16,
    /// Bytes the kernel may hold for each connection and direction [default: the kernel's choice]
    #[arg(long)]
    pub buffer_bytes: Option<usize>,
    /// Start more than 16 processes for each core of this machine
    #[arg(long)]
    pub oversubscribe: bool,
    /// Encrypt the connections of tcp
    #[arg(long)]
    pub tls: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `paceline bench collectives-rank`
#[derive(Debug, Args)]
pub struct BenchCollectivesRank {
    /// This rank.
    #[arg(long)]
    pub rank: u32,
    /// What is measured; one number of workers and one carry.
    #[command(flatten)]
    pub bench: BenchCollectives,
}

/// How the bytes of a measurement travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Carry {
    /// Threads of one process
    Thread,
    /// Processes that share memory
    Shm,
    /// Processes joined by sockets
    Tcp,
}

/// `paceline bench step`
#[derive(Debug, Clone, Args)]
pub struct BenchStep {
    /// A model that `paceline models` lists
    #[arg(long, short, default_value = "resnet50")]
    pub model: String,
    /// Side of the images, or length of the token sequence [default: the model's own]
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true)]
    pub size: Option<usize>,
    /// Samples per step; a list such as 1,8,32 measures each
    #[arg(long, short, default_value = "32", value_delimiter = ',', value_parser = parse::count, allow_negative_numbers = true)]
    pub batch: Vec<usize>,
    /// Number of classes
    #[arg(long, default_value_t = 10, value_parser = parse::count, allow_negative_numbers = true)]
    pub classes: usize,
    /// What activations are stored as: f32 | bf16
    #[arg(long, default_value_t = Precision::F32)]
    pub dtype: Precision,
    /// normal | low: compute again what is cheap, instead of keeping it for the backward pass
    #[arg(long, default_value_t = MemoryUse::Normal)]
    pub memory: MemoryUse,
    /// Which 3×3 convolutions may go by tiles: auto | f32 (in bf16 tiles round more than direct sums do) | off
    #[arg(long, value_name = "WHERE", default_value_t = Winograd::Auto)]
    pub winograd: Winograd,
    /// Steps to time, after two that are not
    #[arg(long, default_value_t = 5, value_parser = parse::count, allow_negative_numbers = true)]
    pub steps: usize,
    /// Where to compute: cpu | cuda | cuda:1
    #[arg(long, default_value_t = Compute::Cpu)]
    pub device: Compute,
    /// Let products of f32 on a GPU round their operands to 10 bits
    #[arg(long)]
    pub tf32: bool,
    /// Use only algorithms of a GPU that give the same bits every time
    #[arg(long)]
    pub deterministic: bool,
    /// Compute threads [default: all cores]
    #[arg(long, value_parser = parse::threads, allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// Whether compute threads stay each on a core of its own, if they take most of the cores: on | off
    #[arg(long, value_name = "SWITCH", default_value = "on", value_parser = parse::switch)]
    #[arg(action = clap::ArgAction::Set)]
    pub pin: bool,
    /// How the algorithms of convolutions are chosen
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Calibrate::On)]
    pub calibrate: Calibrate,
    /// Show where the time goes, by operation and by layer, and the least it could take on this machine
    #[arg(long)]
    pub profile: bool,
    /// Time nothing; write weights and batch to FILE and print the losses of two steps without dropout, for comparison
    /// with another framework; on a GPU, compare them with the CPU's
    #[arg(long, value_name = "FILE", conflicts_with = "profile")]
    pub check: Option<PathBuf>,
    /// Print one JSON object per batch size
    #[arg(long)]
    pub json: bool,
}

/// `paceline bench kernels`
#[derive(Debug, Args)]
pub struct BenchKernels {
    /// A model that `paceline models` lists
    #[arg(long, short, default_value = "resnet50")]
    pub model: String,
    /// Side of the images, or length of the token sequence [default: the model's own]
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true)]
    pub size: Option<usize>,
    /// Samples per step
    #[arg(long, short, default_value_t = 32, value_parser = parse::count, allow_negative_numbers = true)]
    pub batch: usize,
    /// Number of classes
    #[arg(long, default_value_t = 10, value_parser = parse::count, allow_negative_numbers = true)]
    pub classes: usize,
    /// What activations are stored as: f32 | bf16
    #[arg(long, default_value_t = Precision::F32)]
    pub dtype: Precision,
    /// How long to run the algorithms of each kernel in turns; the least time counts
    #[arg(long, default_value_t = 0.1, value_parser = parse::positive, allow_negative_numbers = true)]
    pub seconds: f64,
    /// Compute threads [default: all cores]
    #[arg(long, value_parser = parse::threads, allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// How the algorithms of convolutions are chosen
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Calibrate::On)]
    pub calibrate: Calibrate,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
