//! Flags of agreements in which workers step by themselves and exchange weights now and then.

use clap::Args;

use super::parse;

/// What of `paceline train` is for them.
#[derive(Debug, Args)]
pub struct Rounds {
    /// Workers that add up their gradients and step together, as one to the others: --agree elastic, downpour, dogwild [default: 1], shm-hybrid [default: half of all]
    #[arg(long, value_name = "N", value_parser = parse::count, allow_negative_numbers = true, help_heading = "Many processes")]
    pub group: Option<usize>,
    /// Steps between two exchanges of weights, where workers step by themselves: --agree local, elastic, shm-async, shm-hybrid; in which all of them have been
    /// exchanged once, a piece beside each: --agree dogwild [default: 8]; or of herds: --agree hogwild [default: 64]
    #[arg(long, value_name = "STEPS", value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Many processes")]
    pub period: Option<u64>,
    /// Exchange weights among the workers of each machine after every so many steps, inside of a --period of all
    #[arg(long, value_name = "STEPS", value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Many processes")]
    pub node_period: Option<u64>,
    /// Exchange so many parts of the weights one after the other, each at a step of its own of a --period: --agree local [default: all at once]
    #[arg(long, value_name = "N", value_parser = parse::count64, allow_negative_numbers = true, help_heading = "Many processes")]
    pub fragments: Option<u64>,
    /// Exchange weights after each of the first so many steps, and then after every --period [default: 0]
    #[arg(long, value_name = "STEPS", value_parser = parse::whole64, allow_negative_numbers = true, help_heading = "Many processes")]
    pub post_local: Option<u64>,
    /// Make a step of this rate with what all have changed in a --period, such as 0.7, instead of taking their mean [default: 1]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, help_heading = "Many processes")]
    pub outer_rate: Option<f64>,
    /// The (Nesterov) momentum of those steps, such as 0.9 [default: 0]
    #[arg(long, value_name = "MOMENTUM", allow_negative_numbers = true, help_heading = "Many processes")]
    pub outer_momentum: Option<f64>,
    /// With --agree hogwild, copies of the weights, each for some of the workers, between which changes go round a ring [default: one for each NUMA node]
    #[arg(long, value_name = "N", value_parser = parse::count, allow_negative_numbers = true, help_heading = "Many processes")]
    pub herds: Option<usize>,
}
