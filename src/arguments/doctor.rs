//! What can be typed behind `paceline doctor`.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::cluster::Job;
use crate::cluster::spec::PORT;
use clap::Args;

use super::parse;

const EXAMPLES: &str = "Examples:
  paceline doctor                                       this machine: cores, memory, GPUs, loopback, shared memory
  paceline doctor --hosts a,b,c                         the links between hosts that ssh reaches
  paceline doctor --cluster FILE --job worker --task 0  the same, each process started by hand
  mpirun -n 4 paceline doctor                           or by any launcher that `paceline train` knows

docs/doctor.md says how everything is measured.";

/// `paceline doctor`
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Doctor {
    /// Measure the links between these hosts, which ssh reaches without a password
    #[arg(long, value_name = "A,B,C", conflicts_with = "cluster")]
    pub hosts: Option<String>,
    /// A JSON file {"worker": ["host:port", …]}; each process is started by hand with its --job and --task
    #[arg(long, value_name = "FILE")]
    pub cluster: Option<PathBuf>,
    /// What this process is in the cluster file: worker | ps
    #[arg(long, requires = "cluster")]
    pub job: Option<Job>,
    /// Its number among those of its job, from 0
    #[arg(long, requires = "cluster")]
    pub task: Option<usize>,
    /// The port that rank 0 listens on, with --hosts
    #[arg(long, default_value_t = PORT)]
    pub port: u16,
    /// The address or interface that rank 0 listens on, such as eth1 [default: loopback, or what the other machines have to reach]
    #[arg(long, value_name = "ADDRESS", value_parser = parse::bind)]
    pub bind: Option<IpAddr>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
