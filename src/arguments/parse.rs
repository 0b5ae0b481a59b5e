//! From a typed word to a checked value. Each refusal says what to type.

use std::time::Duration;

use crate::comm::Algorithm;
use crate::data::AugmentChoice;
use crate::nn::schedule::Schedule;
use crate::parallel::split::Kind;
use crate::train::config::THREADS_MAX;

/// The largest batch, class count or length of a sequence: products of a few of them are far from overflowing.
const COUNT_MAX: usize = 1 << 24;

/// A whole number from 1.
pub fn count(text: &str) -> Result<usize, String> {
    at_most(text, COUNT_MAX)
}

/// A number of threads.
pub fn threads(text: &str) -> Result<usize, String> {
    at_most(text, THREADS_MAX)
}

/// A number of processes of one machine that are measured together.
pub fn workers(text: &str) -> Result<usize, String> {
    at_most(text, 64)
}

/// A number of bytes: whole numbers of four bytes, up to sixteen gigabytes.
pub fn bytes(text: &str) -> Result<usize, String> {
    let bytes = at_most(text, 1 << 34)?;
    if bytes.is_multiple_of(4) { Ok(bytes) } else { Err("type a multiple of 4: numbers have four bytes".into()) }
}

/// An algorithm of collectives.
pub fn algorithm(text: &str) -> Result<Algorithm, String> {
    let names: Vec<&str> = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).collect();
    Algorithm::from_name(text).ok_or_else(|| format!("type one of: {}", names.join(", ")))
}

fn at_most(text: &str, most: usize) -> Result<usize, String> {
    let refusal = || format!("type a whole number from 1 to {most}");
    text.parse().ok().filter(|number| (1..=most).contains(number)).ok_or_else(refusal)
}

/// A whole number from 1: epochs and steps, of which there can be any number.
pub fn count64(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or_else(|| "type a whole number from 1".into())
}

/// An address of this machine, or the name of an interface.
pub fn bind(text: &str) -> Result<std::net::IpAddr, String> {
    crate::cluster::interface::address(text).map_err(|error| error.to_string())
}

/// On or off.
pub fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("type on or off".into()),
    }
}

/// A whole number from 0.
pub fn whole(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "type 0 or a whole number above".into())
}

/// A whole number from 0.
pub fn whole64(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "type 0 or a whole number above".into())
}

/// How often a launcher has started its processes again, a colon, and the seconds that those before took.
pub fn restarted(text: &str) -> Result<(u64, f64), String> {
    let parts = text.split_once(':').and_then(|(number, seconds)| number.parse().ok().zip(self::number(seconds)));
    parts.ok_or_else(|| "this is said by a launcher; type --restart N".into())
}

/// A number above 0.
pub fn positive(text: &str) -> Result<f64, String> {
    number(text).filter(|&number| number > 0.0).ok_or_else(|| "type a number above 0".into())
}

/// A number from 0.
pub fn not_negative(text: &str) -> Result<f64, String> {
    number(text).filter(|&number| number >= 0.0).ok_or_else(|| "type 0 or a number above".into())
}

fn number(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite())
}

/// Seconds, or a number with ms, s, m or h behind it.
pub fn duration(text: &str) -> Result<f64, String> {
    span(text).map(|span| span.as_secs_f64())
}

/// The same as a span.
pub fn span(text: &str) -> Result<Duration, String> {
    crate::system::span::parse(text)
}

/// How training images are changed.
pub fn augment(text: &str) -> Result<AugmentChoice, String> {
    match text {
        "none" => Ok(AugmentChoice::None),
        "flip" => Ok(AugmentChoice::Flip),
        "standard" => Ok(AugmentChoice::Standard),
        "strong" => Ok(AugmentChoice::Strong),
        _ => Err("type none, flip, standard or strong".into()),
    }
}

/// A schedule: a name, and what it needs behind a colon.
pub fn schedule(text: &str) -> Result<Schedule, String> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let numbers: Option<Vec<f64>> = rest.split(',').filter(|part| !part.is_empty()).map(number).collect();
    let refusal = || "type constant, cosine, step:EPOCHS, milestones:30,60,80 or poly:POWER".to_owned();
    match (name, numbers.ok_or_else(refusal)?.as_slice()) {
        ("constant", []) => Ok(Schedule::Constant),
        ("cosine", []) => Ok(Schedule::Cosine { end: 0.0 }),
        ("step", &[every]) => Ok(Schedule::Step { every, factor: 0.1 }),
        ("milestones", at @ [_, ..]) => Ok(Schedule::Milestones { at: at.to_vec(), factor: 0.1 }),
        ("poly", &[power]) => Ok(Schedule::Polynomial { power, end: 0.0 }),
        _ => Err(refusal()),
    }
}

/// Of the learning rate, or of a pipeline.
#[derive(Clone, Debug)]
pub enum Schedules {
    /// How the learning rate changes.
    LearningRate(Schedule),
    /// In which order stages compute.
    Pipeline(Kind),
}

/// Either of them: no word means both.
pub fn schedules(text: &str) -> Result<Schedules, String> {
    match text.parse() {
        Ok(kind) => Ok(Schedules::Pipeline(kind)),
        Err(_) => {
            let refused = |sentence| format!("{sentence}; for a pipeline, gpipe, 1f1b or zero-bubble");
            schedule(text).map(Schedules::LearningRate).map_err(refused)
        }
    }
}

/// A size of memory: a number with MB, GB, MiB or GiB behind it.
pub fn memory(text: &str) -> Result<u64, String> {
    let units = [("MiB", 1u64 << 20), ("GiB", 1 << 30), ("MB", 1_000_000), ("GB", 1_000_000_000)];
    let found = units.iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, bytes)));
    let bytes = found.and_then(|(number, bytes)| Some(number.trim().parse::<f64>().ok()? * *bytes as f64));
    let bytes = bytes.filter(|bytes| bytes.is_finite() && *bytes >= 1e6).map(|bytes| bytes as u64);
    bytes.ok_or_else(|| "type a number with MB or GB, such as 600MB or 2.5GB".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_cannot_work_are_refused() {
        assert!(["0", "-1", "1.5", "many", "", "99999999999999999999"].iter().all(|text| count(text).is_err()));
        assert!(["0", "-0.1", "nan", "inf"].iter().all(|text| positive(text).is_err()));
        assert_eq!(count("12"), Ok(12));
    }

    #[test]
    fn times_have_units() {
        assert_eq!(duration("90"), Ok(90.0));
        assert_eq!(duration("1.5m"), Ok(90.0));
        assert_eq!(duration("2h"), Ok(7200.0));
        assert!(["", "m", "-3s", "0s", "3 weeks"].iter().all(|text| duration(text).is_err()));
    }

    #[test]
    fn schedules_have_names_and_numbers() {
        assert_eq!(schedule("cosine"), Ok(Schedule::Cosine { end: 0.0 }));
        assert_eq!(schedule("milestones:30,60"), Ok(Schedule::Milestones { at: vec![30.0, 60.0], factor: 0.1 }));
        assert!(["cosine:1", "step", "step:x", "linear"].iter().all(|text| schedule(text).is_err()));
    }
}
