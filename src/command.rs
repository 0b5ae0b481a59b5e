//! One file per command: lifts what was typed into checked values, calls the library, prints.

pub mod bench;
pub mod calibrate;
pub mod data;
pub mod doctor;
pub mod evaluate;
pub mod export;
pub mod launch;
pub mod models;
#[cfg(feature = "mpi")]
mod mpi;
pub mod plan;
pub mod predict;
pub mod report;
pub mod team;
pub mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use paceline::train::trainer::Surroundings;

use crate::failure::Failure;

/// What a command returns.
pub type Outcome = Result<ExitCode, Failure>;

/// The real world, without Ctrl-C.
pub fn surroundings() -> Surroundings {
    let data_home = std::env::var_os("PACELINE_DATA").map(PathBuf::from);
    Surroundings { data_home, cache: calibrate::folder(), ..Surroundings::default() }
}

/// A number with commas between thousands.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Prints to standard output; a closed pipe (`paceline models | head`) ends quietly.
pub fn print(text: &str) {
    use std::io::Write;
    let _ = std::io::stdout().write_all(text.as_bytes()).and_then(|()| std::io::stdout().flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(138_357_544), "138,357,544");
    }
}
