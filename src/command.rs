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
pub mod restart;
pub mod team;
pub mod train;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::system::disk::Disk;
use crate::system::printable::{Shown, printable_json, printable_lines};
use crate::train::trainer::Surroundings;
use serde::Serialize;

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

/// Prints to standard output; a closed pipe (`paceline models | head`) ends quietly. Whatever text came from elsewhere,
/// nothing in it is obeyed by a terminal; a name that must not break its line is escaped where it is put into one.
pub fn print(text: &str) {
    write(&mut std::io::stdout(), &printable_lines(text));
}

/// Prints one JSON value to standard output, on a line of its own.
pub fn print_json(value: &impl Serialize) {
    let json = serde_json::to_string(value).expect("what is printed has a JSON form");
    write(&mut std::io::stdout(), &format!("{}\n", printable_json(&json)));
}

/// Says something beside the command's output, on standard error.
pub fn note(text: &str) {
    write(&mut std::io::stderr(), &format!("{}\n", printable_lines(text)));
}

fn write(target: &mut impl Write, text: &str) {
    let _ = target.write_all(text.as_bytes()).and_then(|()| target.flush());
}

/// Refuses to replace a file unasked.
pub fn check_target(disk: &Disk, path: &Path, force: bool) -> Result<(), Failure> {
    if force || !disk.is_taken(path) {
        return Ok(());
    }
    let target = Shown(path);
    Err(Failure::refused(format!("{target} is there already; type another name, or --force to replace it")))
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
