//! What can be typed behind `paceline launch`.

use clap::Args;

use super::parse;

const EXAMPLES: &str = "Examples:
  paceline launch --workers 4 -- train --model resnet20 --data cifar10:DIR     four processes here
  paceline launch --hosts a,b:2 -- train …                                     one on a, two on b, over ssh
  paceline launch --mpirun --workers 8 -- train …                              OpenMPI's or MPICH's mpirun
  paceline launch --slurm --nodes 2 --workers 8 -- train … > job.sh            then: sbatch job.sh
  paceline launch --kubernetes --image IMAGE --workers 4 -- train … > job.yaml then: kubectl apply -f job.yaml

Every process finds out from its environment which rank it is, so any other launcher that sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT works as well. docs/cluster.md has ports, tokens and firewalls.";

/// `paceline launch`
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Launch {
    /// Processes in all
    #[arg(long, value_name = "N", value_parser = parse::count, allow_negative_numbers = true)]
    pub workers: Option<usize>,
    /// Hosts that ssh reaches without a password; a:2 means two processes on a. The first has rank 0
    #[arg(long, value_name = "A,B:2,C", conflicts_with_all = ["slurm", "kubernetes"])]
    pub hosts: Option<String>,
    /// Print a script for sbatch
    #[arg(long, conflicts_with_all = ["mpirun", "kubernetes"])]
    pub slurm: bool,
    /// Start with mpirun, which must be installed
    #[arg(long, conflicts_with = "kubernetes")]
    pub mpirun: bool,
    /// Print a Kubernetes manifest: a Job, a Service and a Secret
    #[arg(long)]
    pub kubernetes: bool,

    /// The port on which rank 0 listens for the others, where other machines take part
    #[arg(long, default_value_t = 29_400, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// Start more than 16 processes for each core of this machine
    #[arg(long)]
    pub oversubscribe: bool,
    /// Let the scheduler move local processes between cores
    #[arg(long)]
    pub no_pin: bool,
    /// The ssh client with options, such as "ssh -p 2222"
    #[arg(long, default_value = "ssh", requires = "hosts")]
    pub ssh: String,
    /// The program on the hosts [default: the path of this one]
    #[arg(long, value_name = "PATH", requires = "hosts")]
    pub program: Option<String>,

    /// Machines to share the processes evenly
    #[arg(long, default_value_t = 1, value_parser = parse::count, allow_negative_numbers = true, requires = "slurm")]
    pub nodes: usize,
    /// Cores of each process, for Slurm and Kubernetes
    #[arg(long, value_parser = parse::count, allow_negative_numbers = true)]
    pub cores: Option<usize>,
    /// The job's time limit, such as 2:00:00
    #[arg(long, requires = "slurm")]
    pub time: Option<String>,
    /// Slurm's partition
    #[arg(long, requires = "slurm")]
    pub partition: Option<String>,
    /// The container image, with paceline inside
    #[arg(long, requires = "kubernetes", required_if_eq("kubernetes", "true"))]
    pub image: Option<String>,
    /// The name of the Kubernetes Job
    #[arg(long, default_value = "paceline", requires = "kubernetes")]
    pub name: String,

    /// What every process runs: a command of paceline with its flags
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}
