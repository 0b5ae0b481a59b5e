//! Flags for workers that are not equally fast.

use clap::Args;

use super::parse;
use crate::train::together::{Balance, Slow};

/// What of `paceline train` is for them.
#[derive(Debug, Args)]
pub struct Unequal {
    /// Samples of a batch that each worker has: even, or by its speed, measured anew as the run goes on
    #[arg(long, value_name = "even|speed", help_heading = "Many processes")]
    pub balance: Option<Balance>,
    /// Steps after which --balance speed measures again [default: 50]
    #[arg(long, value_name = "STEPS", value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Many processes")]
    pub balance_every: Option<u64>,
    /// For experiments: rank 1 takes 4 times as long for its arithmetic with 1=4; several with commas
    #[arg(long, value_name = "RANK=FACTOR", help_heading = "Many processes")]
    pub slow: Option<Slow>,
}
