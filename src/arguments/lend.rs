//! What `paceline serve` and `paceline bench memory` take.

use clap::{Args, Subcommand};

use super::parse;

/// `paceline serve`
#[derive(Debug, Args)]
pub struct Lend {
    /// What to lend.
    #[command(subcommand)]
    pub command: LendCommand,
}

/// The commands of `paceline serve`.
#[derive(Debug, Subcommand)]
pub enum LendCommand {
    /// Lend this machine's memory to runs: a memory box, for --agree shm-async and shm-hybrid --box ADDRESS
    Memory(LendMemory),
}

/// `paceline serve memory`
#[derive(Debug, Args)]
#[command(
    after_help = "Who borrows has to hold the token that this process finds in PACELINE_TOKEN_FILE or in the user's own ~/.config/paceline/token. Processes of this machine map the memory, others read and write it over TCP. Ctrl-C ends it."
)]
pub struct LendMemory {
    /// The address and port to listen at; port 0 takes any that is free
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:29411")]
    pub listen: String,
    /// Memory that is taken from the system at once, such as 4GB
    #[arg(long, value_name = "SIZE", value_parser = parse::memory, allow_negative_numbers = true, default_value = "256MB")]
    pub pool: u64,
    /// The most memory that is lent; more than the pool is taken as it is asked for [default: half of what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse::memory, allow_negative_numbers = true)]
    pub limit: Option<u64>,
    /// The most that one client may have [default: all that is lent]
    #[arg(long, value_name = "SIZE", value_parser = parse::memory, allow_negative_numbers = true)]
    pub quota: Option<u64>,
    /// Encrypt connections of other machines, as those that borrow do: by keys that follow from the token, or by files CERT,KEY,CA
    #[arg(long, value_name = "FILES", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub tls: Option<String>,
    /// Print where it listens as a JSON object
    #[arg(long)]
    pub json: bool,
}

/// `paceline bench memory`
#[derive(Debug, Clone, Args)]
pub struct BenchMemory {
    /// Bytes of each message; a list measures each
    #[arg(long, default_value = "8,64,512,4096,32768,262144,2097152,16777216,67108864", value_delimiter = ',', value_parser = parse::bytes, allow_negative_numbers = true)]
    pub bytes: Vec<usize>,
    /// TCP connections to the box
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub sockets: u16,
    /// Seconds for each measurement
    #[arg(long, default_value_t = 0.2)]
    pub seconds: f64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
