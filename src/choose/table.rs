//! What `choose` found as a table for people and as values for programs.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::system::limits::in_words;

/// A set-up, with what was found out about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Its name.
    pub setup: String,
    /// What to type for it.
    pub flags: Vec<String>,
    /// Whether it can be used here at all.
    pub applies: bool,
    /// Seconds of a step: the median of its turns, if it was measured.
    pub step_s: Option<f64>,
    /// Of each turn.
    pub turns: Vec<f64>,
    /// Samples in a second.
    pub samples_per_s: Option<f64>,
    /// How many times faster than the baseline.
    pub speedup: Option<f64>,
    /// The most that its processes held together; by plan where nothing was measured.
    pub memory_bytes: Option<u64>,
    /// Seconds that were expected before it was measured.
    pub forecast_s: Option<f64>,
    /// Why it was left out, or not measured.
    pub why_not: Option<String>,
}

impl Row {
    /// How far the forecast was from what was measured, as a part of that.
    pub fn forecast_error(&self) -> Option<f64> {
        Some(self.forecast_s? / self.step_s? - 1.0)
    }

    fn cells(&self, is_chosen: bool) -> [String; 7] {
        let number =
            |value: Option<f64>, digits: usize| value.map_or("–".to_owned(), |value| format!("{value:.digits$}"));
        let seconds = |value: Option<f64>| number(value.map(|seconds| seconds * 1e3), 2);
        let error = self.forecast_error().map_or("–".to_owned(), |error| format!("{:+.0}%", 100.0 * error));
        [
            format!("{}{}", if is_chosen { "▸ " } else { "  " }, self.setup),
            seconds(self.step_s),
            number(self.samples_per_s, 1),
            self.speedup.map_or("–".to_owned(), |times| format!("{times:.2}×")),
            self.memory_bytes.map_or("–".to_owned(), in_words),
            seconds(self.forecast_s),
            error,
        ]
    }
}

/// The rows that were measured, then those that were not, with why.
pub fn text(rows: &[Row], chosen: &str, unit: &str) -> String {
    let head = ["  set-up", "ms a step", unit, "speed-up", "memory", "forecast", "error"].map(str::to_owned);
    let measured = || rows.iter().filter(|row| row.step_s.is_some());
    let mut lines = vec![head];
    lines.extend(measured().map(|row| row.cells(row.setup == chosen)));
    let mut text = columns(&lines);
    let expected = |row: &Row| row.forecast_s.map_or(String::new(), |seconds| format!(" ({:.2} ms)", seconds * 1e3));
    let others: Vec<&Row> = rows.iter().filter(|row| row.step_s.is_none()).collect();
    if !others.is_empty() {
        text.push_str("\nnot measured\n");
    }
    // One line for each reason: set-ups of stages are many.
    let mut reasons: Vec<&str> = Vec::new();
    others.iter().filter_map(|row| row.why_not.as_deref()).for_each(|reason| {
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    });
    for reason in reasons {
        let same = others.iter().filter(|row| row.why_not.as_deref() == Some(reason));
        let names: Vec<String> = same.map(|row| format!("{}{}", row.setup, expected(row))).collect();
        let _ = writeln!(text, "  {}: {reason}", names.join("; "));
    }
    text
}

/// Names to the left, numbers to the right.
fn columns(lines: &[[String; 7]]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for line in lines {
        let cell = |(column, cell): (usize, &String)| match column {
            0 => format!("{cell:<width$}", width = width(column)),
            _ => format!("{cell:>width$}", width = width(column)),
        };
        let _ = writeln!(text, "{}", line.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

/// A row for programs.
pub fn to_json(row: &Row) -> Value {
    let mut value = json!(row);
    value["forecast_error"] = json!(row.forecast_error());
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_tells_what_was_measured_and_why_the_rest_was_not() {
        let measured = Row {
            setup: "1 replica × 2 threads".into(),
            step_s: Some(0.0125),
            samples_per_s: Some(2560.0),
            speedup: Some(1.7),
            memory_bytes: Some(81_000_000),
            forecast_s: Some(0.013),
            ..Row::default()
        };
        let left_out = |name: &str| Row { setup: name.into(), why_not: Some("no GPU".into()), ..Row::default() };
        let text = text(&[measured, left_out("a"), left_out("b")], "1 replica × 2 threads", "images/s");
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("▸ 1 replica × 2 threads") && lines[1].ends_with("13.00    +4%"), "{text}");
        assert!(lines[1].contains("12.50") && lines[1].contains("1.70×") && lines[1].contains("81 MB"), "{text}");
        assert_eq!(lines[4], "  a; b: no GPU", "{text}");
    }
}
