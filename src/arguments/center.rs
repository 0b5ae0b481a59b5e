//! Flags of agreements in which workers exchange with a centre that servers hold.

use clap::Args;

use super::parse;

/// What of `paceline train` is for them.
#[derive(Debug, Args)]
pub struct Center {
    /// Memory boxes that hold the weights, as `paceline serve memory` says; several with commas: --agree shm-async, shm-hybrid
    /// [default: the run starts one]
    #[arg(long = "box", value_name = "ADDRESS:PORT", value_delimiter = ',', help_heading = "Many processes")]
    pub boxes: Vec<String>,
    /// How much of what is between a worker and the centre both move in an exchange: --agree elastic, shm-async, shm-hybrid [default: 0.9 / workers]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, help_heading = "Many processes")]
    pub elastic_rate: Option<f64>,
    /// Steps between two fetches of the servers' weights: --agree downpour [default: 1]
    #[arg(long, value_name = "STEPS", value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Many processes")]
    pub fetch_every: Option<u64>,
    /// Steps between two pushes of what a worker has changed: --agree downpour [default: 1]
    #[arg(long, value_name = "STEPS", value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Many processes")]
    pub push_every: Option<u64>,
    /// How much of what is pushed the servers add, up to 1 for all of it: --agree downpour, dogwild [default: 1 / workers]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, help_heading = "Many processes")]
    pub push_rate: Option<f64>,
    /// Have an update count less the more others it has missed, at the rate η / (1 + staleness): --agree parameter-server with
    /// --staleness, downpour, dogwild
    #[arg(long, help_heading = "Many processes")]
    pub staleness_aware: bool,
    /// Make a step of Adagrad of this rate with what is pushed, such as 0.01, instead of adding it: --agree downpour
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, help_heading = "Many processes")]
    pub server_adagrad: Option<f64>,
    /// Steps that one worker makes alone before the others begin: --agree downpour [default: 0]
    #[arg(long, value_name = "STEPS", value_parser = parse::whole64, allow_negative_numbers = true, help_heading = "Many processes")]
    pub warm_start: Option<u64>,
    /// Changes of weights and gradients that servers keep for L-BFGS: --agree sandblaster [default: 10]
    #[arg(long, value_name = "PAIRS", value_parser = parse::count, allow_negative_numbers = true, help_heading = "Many processes")]
    pub history: Option<usize>,
}
