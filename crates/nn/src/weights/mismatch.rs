//! The differences between a weights file and a model, as a message that fits a terminal.

use std::fmt;

use paceline_system::printable::printable;
use paceline_tensor::Shape;

/// How many names of each kind a message lists before it only counts.
const LISTED: usize = 10;

/// The differences between a weights file and a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// Tensors of the model that the file lacks.
    pub missing: Vec<String>,
    /// Tensors of the file that the model lacks.
    pub unexpected: Vec<String>,
    /// Tensors of both, with different shapes.
    pub shapes: Vec<OtherShape>,
}

/// A tensor that has another shape in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherShape {
    /// Its name.
    pub name: String,
    /// Its shape in the file.
    pub file: Shape,
    /// Its shape in the model, in the file's order of dims.
    pub model: Shape,
}

impl Mismatch {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.shapes.is_empty()
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shapes: Vec<String> = self
            .shapes
            .iter()
            .map(|OtherShape { name, file, model }| format!("{name} ({file} in the file, {model} in the model)"))
            .collect();
        list(formatter, "missing from the file", &self.missing)?;
        list(formatter, "not in the model", &self.unexpected)?;
        list(formatter, "of another shape", &shapes)?;
        write!(formatter, "\n  To keep a layer's own start, such as a classifier's, leave it out by name.")
    }
}

fn list(formatter: &mut fmt::Formatter<'_>, title: &str, names: &[String]) -> fmt::Result {
    if names.is_empty() {
        return Ok(());
    }
    let listed: Vec<String> = names.iter().take(LISTED).map(|name| printable(name)).collect();
    write!(formatter, "\n  {} {title}: {}", names.len(), listed.join(", "))?;
    if names.len() > LISTED { write!(formatter, ", and {} more", names.len() - LISTED) } else { Ok(()) }
}
