//! What `cargo x versus` is asked to measure: the table of rows with their targets, and the choice among them.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

/// How to use the command.
pub const USAGE: &str =
    "usage: cargo x versus [ROW…] [--dtype f32|bf16] [--rounds 3] [--steps 5] [--json FILE] [--check-only]

  ROW    MODEL, MODEL:SIZE or MODEL:SIZE:BATCH; without one, every row of the table
         MODEL:SIZE:BATCH may be any model of both sides, such as resnet18:64:32";

/// The ratio of memory to reach in every row.
pub const MEMORY_TARGET: f64 = 0.7;

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// All in f32.
    F32,
    /// Products in bf16; PyTorch by autocast.
    Bf16,
}

impl Dtype {
    const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// The name both sides know.
    pub fn name(self) -> &'static str {
        ["f32", "bf16"][self as usize]
    }

    /// How far losses and the norm of the gradient may be apart by rounding, relatively.
    pub fn tolerances(self) -> (f64, f64) {
        [(1e-4, 1e-3), (5e-3, 2e-2)][self as usize]
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A model at a size.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The model.
    pub model: String,
    /// The side of its images.
    pub size: usize,
    /// Images per step.
    pub batch: usize,
    /// The ratio of throughput to reach, for f32 and bf16.
    targets: Option<[f64; 2]>,
}

impl Row {
    /// The ratio to reach.
    pub fn target(&self, dtype: Dtype) -> Option<f64> {
        self.targets.map(|targets| targets[dtype as usize])
    }

    fn named(&self, text: &str) -> bool {
        let Row { model, size, batch, .. } = self;
        [model.clone(), format!("{model}:{size}"), format!("{model}:{size}:{batch}")].contains(&text.to_owned())
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}² b{}", self.model, self.size, self.batch)
    }
}

/// The rows that claims are made of.
fn table() -> Vec<Row> {
    [
        ("resnet50", 128, 32, [1.5, 1.4]),
        ("resnet50", 32, 64, [1.4, 1.4]),
        ("vgg16", 224, 8, [1.8, 1.3]),
        ("alexnet", 224, 32, [1.3, 1.4]),
        ("resnet152", 128, 16, [1.5, 1.4]),
        ("mobilenet", 128, 32, [1.5, 1.4]),
    ]
    .map(|(model, size, batch, targets)| Row { model: model.into(), size, batch, targets: Some(targets) })
    .into()
}

/// What was typed.
#[derive(Debug)]
pub struct Options {
    rows: Vec<Row>,
    dtypes: Vec<Dtype>,
    /// How often each side is measured.
    pub rounds: usize,
    /// Timed steps of one measurement.
    pub steps: usize,
    /// Where the results go as JSON.
    pub json: Option<PathBuf>,
    /// Compare the losses and time nothing.
    pub check_only: bool,
}

impl Options {
    /// Reads the arguments.
    ///
    /// # Errors
    /// With the usage, when they say nothing.
    pub fn parse(arguments: &[&str]) -> Result<Self> {
        let mut options =
            Self { rows: Vec::new(), dtypes: Dtype::ALL.into(), rounds: 3, steps: 5, json: None, check_only: false };
        let mut rest = arguments.iter();
        while let Some(&argument) = rest.next() {
            let mut value = || rest.next().copied().with_context(|| format!("{argument} needs a value\n{USAGE}"));
            match argument {
                "--dtype" => options.dtypes = vec![dtype(value()?)?],
                "--rounds" => options.rounds = count(value()?)?,
                "--steps" => options.steps = count(value()?)?,
                "--json" => options.json = Some(value()?.into()),
                "--check-only" => options.check_only = true,
                option if option.starts_with('-') => bail!("unknown option {option}\n{USAGE}"),
                row => options.rows.extend(rows(row)?),
            }
        }
        if options.rows.is_empty() {
            options.rows = table();
        }
        Ok(options)
    }

    /// Every row in every element type.
    pub fn work(&self) -> impl Iterator<Item = (Row, Dtype)> {
        self.dtypes.iter().flat_map(|&dtype| self.rows.iter().map(move |row| (row.clone(), dtype)))
    }
}

fn dtype(text: &str) -> Result<Dtype> {
    let found = Dtype::ALL.into_iter().find(|dtype| dtype.name() == text);
    found.with_context(|| format!("unknown element type `{text}`; type f32 or bf16"))
}

fn count(text: &str) -> Result<usize> {
    let number = text.parse().ok().filter(|&number| number > 0);
    number.with_context(|| format!("`{text}` is no count; type a whole number from 1"))
}

/// The rows of the table that `text` names, or a row of its own.
fn rows(text: &str) -> Result<Vec<Row>> {
    let known: Vec<Row> = table().into_iter().filter(|row| row.named(text)).collect();
    if !known.is_empty() {
        return Ok(known);
    }
    let [model, size, batch] = text.split(':').collect::<Vec<_>>()[..] else {
        bail!("no row `{text}` in the table; name a size and a batch too, such as {text}:64:32\n{USAGE}");
    };
    Ok(vec![Row { model: model.into(), size: count(size)?, batch: count(batch)?, targets: None }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_arguments_every_row_is_measured_in_both_types() {
        let options = Options::parse(&[]).unwrap();
        assert_eq!(options.work().count(), 12);
        assert_eq!((options.rounds, options.steps), (3, 5));
    }

    #[test]
    fn rows_and_types_can_be_chosen() {
        let options = Options::parse(&["resnet50", "--dtype", "bf16", "--rounds", "5"]).unwrap();
        let work: Vec<String> = options.work().map(|(row, dtype)| format!("{row} {dtype}")).collect();
        assert_eq!(work, ["resnet50 128² b32 bf16", "resnet50 32² b64 bf16"]);
        assert_eq!(rows("resnet50:32").unwrap()[0].target(Dtype::F32), Some(1.4));
        assert_eq!(rows("resnet18:64:16").unwrap()[0].target(Dtype::F32), None);
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for wrong in [&["resnet18"][..], &["--dtype"], &["--dtype", "f16"], &["--rounds", "0"], &["--fast"], &["a:b:c"]]
        {
            assert!(Options::parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
