//! What was measured: medians, ratios, their spread over the rounds, and whether the target is reached. As text and JSON.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::options::{Dtype, MEMORY_TARGET, Row};
use super::{HOPELESS, LAYOUTS};

/// One process' result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    images_per_s: f64,
    peak_bytes: f64,
}

impl Sample {
    /// From what both programs print.
    ///
    /// # Errors
    /// When a number is missing.
    pub fn from_json(value: &Value) -> Result<Self> {
        let number = |key: &str| value[key].as_f64().with_context(|| format!("no {key} in {value}"));
        Ok(Self { images_per_s: number("images_per_s")?, peak_bytes: number("peak_bytes")? })
    }
}

/// The rounds of one row.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The model and its size.
    pub row: Row,
    /// The element type.
    pub dtype: Dtype,
    /// Paceline, by round.
    pub ours: Vec<Sample>,
    /// PyTorch by layout; a hopeless layout has one round.
    pub theirs: [Vec<Sample>; 2],
    /// Where Paceline's time goes, as `paceline bench step --profile --json` prints it.
    pub profile: Value,
}

impl Measured {
    /// Nothing yet.
    pub fn new(row: &Row, dtype: Dtype) -> Self {
        Self { row: row.clone(), dtype, ours: Vec::new(), theirs: [Vec::new(), Vec::new()], profile: Value::Null }
    }

    /// The layout that is too slow to be run again.
    pub fn hopeless(&self) -> Option<usize> {
        let [last, contiguous] = self.theirs.each_ref().map(|samples| samples.first());
        let (last, contiguous) = (last?.images_per_s, contiguous?.images_per_s);
        if last > HOPELESS * contiguous {
            Some(1)
        } else if contiguous > HOPELESS * last {
            Some(0)
        } else {
            None
        }
    }

    /// The last round in words.
    pub fn round(&self) -> String {
        let round = self.ours.len();
        let rates = self.theirs.iter().zip(LAYOUTS).filter(|(samples, _)| samples.len() == round);
        let theirs: Vec<String> =
            rates.map(|(samples, layout)| format!("{layout} {:.2}", samples[round - 1].images_per_s)).collect();
        format!("Paceline {:.2}, PyTorch {} images/s", self.ours[round - 1].images_per_s, theirs.join(", "))
    }

    /// PyTorch's better layout, by the medians.
    fn best(&self) -> usize {
        usize::from(rate(&self.theirs[1]) > rate(&self.theirs[0]))
    }

    /// The ratio of the medians.
    fn ratio(&self) -> f64 {
        rate(&self.ours) / rate(&self.theirs[self.best()])
    }

    /// The smallest and the largest ratio of a round.
    fn spread(&self) -> (f64, f64) {
        let rounds = self.ours.iter().zip(&self.theirs[self.best()]);
        let ratios: Vec<f64> = rounds.map(|(ours, theirs)| ours.images_per_s / theirs.images_per_s).collect();
        (ratios.iter().copied().fold(f64::INFINITY, f64::min), ratios.iter().copied().fold(0.0, f64::max))
    }

    fn memory_ratio(&self) -> f64 {
        memory(&self.ours) / memory(&self.theirs[self.best()])
    }

    fn is_short(&self) -> bool {
        self.row.target(self.dtype).is_some_and(|target| self.ratio() < target)
    }

    fn is_large(&self) -> bool {
        self.row.target(self.dtype).is_some() && self.memory_ratio() > MEMORY_TARGET
    }
}

fn rate(samples: &[Sample]) -> f64 {
    median(samples.iter().map(|sample| sample.images_per_s))
}

fn memory(samples: &[Sample]) -> f64 {
    median(samples.iter().map(|sample| sample.peak_bytes))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The tables for people, in Markdown: ratios, then bounds and profiles.
pub fn text(measured: &[Measured]) -> String {
    let mut text = format!(
        "| {:<26} | {:>8} | {:>8} {:<15} | {:>5} | {:<9} | {:<11} | {:>13} | {:<10} |\n|{}\n",
        "work",
        "Paceline",
        "PyTorch",
        "",
        "ratio",
        "min–max",
        "target",
        "peak GB",
        "ratio",
        "---|".repeat(8)
    );
    for found in measured {
        let Measured { row, dtype, ours, theirs, .. } = found;
        let (best, (low, high)) = (found.best(), found.spread());
        let mark = |text: String, short: bool| if short { format!("{text} short") } else { text };
        let target = row.target(*dtype).map_or("–".to_owned(), |target| format!("≥ {target:.1}"));
        let gigabytes = [memory(ours), memory(&theirs[best])].map(|bytes| bytes / 1e9);
        text += &format!(
            "| {:<26} | {:>8.2} | {:>8.2} {:<15} | {:>5.2} | {:<9} | {:<11} | {:>5.2} / {:>5.2} | {:<10} |\n",
            format!("{row} {dtype}"),
            rate(ours),
            rate(&theirs[best]),
            format!("({})", LAYOUTS[best]),
            found.ratio(),
            format!("{low:.2}–{high:.2}"),
            mark(target, found.is_short()),
            gigabytes[0],
            gigabytes[1],
            mark(format!("{:.2}", found.memory_ratio()), found.is_large()),
        );
    }
    let count = |short: fn(&Measured) -> bool| measured.iter().filter(|found| short(found)).count();
    let (slow, large, rows) = (count(Measured::is_short), count(Measured::is_large), measured.len());
    text += &format!(
        "\nimages/s; {slow} of {rows} rows are short of their target, {large} need more than {MEMORY_TARGET} of PyTorch's memory\n\n"
    );
    text + &profiles(measured)
}

/// Operations that a row of the profile names.
const SHOWN: usize = 5;

/// The second table: how far from its bound each step is, and where its time goes.
fn profiles(measured: &[Measured]) -> String {
    let mut text = format!(
        "| {:<26} | {:>8} | {:>8} | {:>5} | where the time goes |\n|---|---|---|---|---|\n",
        "work", "step ms", "bound ms", "share"
    );
    for Measured { row, dtype, profile, .. } in measured {
        let seconds = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let (total, bound) = (seconds(&profile["seconds"]), seconds(&profile["bound_s"]));
        let operations = profile["operations"].as_array().map_or(&[][..], Vec::as_slice);
        let shown: Vec<String> = operations
            .iter()
            .take(SHOWN)
            .map(|operation| {
                let share = 100.0 * seconds(&operation["seconds"]) / total;
                format!("{} {share:.0}%", operation["operation"].as_str().unwrap_or("?"))
            })
            .collect();
        text += &format!(
            "| {:<26} | {:>8.1} | {:>8.1} | {:>4.0}% | {} |\n",
            format!("{row} {dtype}"),
            total * 1e3,
            bound * 1e3,
            100.0 * bound / total,
            shown.join(", ")
        );
    }
    text
}

/// The table for programs, with every round.
pub fn json(measured: &[Measured], threads: usize) -> Value {
    let samples = |samples: &[Sample]| {
        json!({
            "images_per_s": samples.iter().map(|sample| sample.images_per_s).collect::<Vec<_>>(),
            "peak_bytes": samples.iter().map(|sample| sample.peak_bytes).collect::<Vec<_>>(),
        })
    };
    let row = |found: &Measured| {
        let Measured { row, dtype, ours, theirs, profile } = found;
        let (low, high) = found.spread();
        json!({
            "model": row.model, "size": row.size, "batch": row.batch, "dtype": dtype.name(),
            "paceline": samples(ours), "pytorch": {LAYOUTS[0]: samples(&theirs[0]), LAYOUTS[1]: samples(&theirs[1])},
            "layout": LAYOUTS[found.best()], "ratio": found.ratio(), "ratio_min": low, "ratio_max": high,
            "target": row.target(*dtype), "memory_ratio": found.memory_ratio(), "memory_target": MEMORY_TARGET,
            "profile": profile,
        })
    };
    json!({"threads": threads, "rows": measured.iter().map(row).collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::super::Options;
    use super::*;

    fn samples(rates: &[f64], peak: f64) -> Vec<Sample> {
        rates.iter().map(|&images_per_s| Sample { images_per_s, peak_bytes: peak }).collect()
    }

    fn measured(ours: &[f64], last: &[f64], contiguous: &[f64]) -> Measured {
        let (row, dtype) = Options::parse(&["resnet50:128"]).unwrap().work().next().unwrap();
        let theirs = [samples(last, 2e9), samples(contiguous, 3e9)];
        let operation = json!({"operation": "conv2d", "seconds": 0.5});
        let profile = json!({"seconds": 1.0, "bound_s": 0.25, "operations": [operation]});
        Measured { row, dtype, ours: samples(ours, 1.5e9), theirs, profile }
    }

    #[test]
    fn the_better_layout_counts_by_its_median() {
        let found = measured(&[30.0, 33.0, 27.0], &[20.0, 19.0, 30.0], &[21.0, 22.0, 15.0]);
        assert_eq!((found.best(), found.hopeless()), (1, None));
        assert_eq!(found.ratio(), 30.0 / 21.0);
        assert_eq!(found.spread(), (30.0 / 21.0, 27.0 / 15.0));
        assert_eq!(found.memory_ratio(), 0.5);
        assert!(found.is_short() && !found.is_large(), "1.43 is less than 1.5");
    }

    #[test]
    fn a_hopeless_layout_is_measured_once() {
        assert_eq!(measured(&[30.0], &[20.0], &[10.0]).hopeless(), Some(1));
        assert_eq!(measured(&[30.0], &[10.0], &[20.0]).hopeless(), Some(0));
        let found = measured(&[30.0, 30.0, 30.0], &[20.0, 19.0, 20.0], &[10.0]);
        assert_eq!((found.best(), found.ratio()), (0, 1.5));
        assert!(!found.is_short() && found.is_large(), "0.75 is more than 0.7");
        let text = text(&[found]);
        assert!(text.contains("|    250.0 |   25% | conv2d 50% |"), "{text}");
        assert!(text.contains("≥ 1.5") && text.contains("0 of 1 rows are short of their target, 1 need"), "{text}");
    }
}
