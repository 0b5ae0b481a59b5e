//! What several turns found: the median, and how far they are apart.

use serde_json::{Value, json};

/// A median with the least and the most.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    least: f64,
    most: f64,
    /// In the order of the turns.
    turns: Vec<f64>,
}

impl Spread {
    /// Of at least one number; of an even number of them the mean of the two in the middle.
    pub fn of(turns: Vec<f64>) -> Self {
        let mut sorted = turns.clone();
        sorted.sort_by(f64::total_cmp);
        let (last, half) = (sorted.len() - 1, sorted.len() / 2);
        let median = f64::midpoint(sorted[last / 2], sorted[half]);
        Self { median, least: sorted[0], most: sorted[last], turns }
    }

    /// In a unit, with so many digits behind the point: `97% (95–99)`.
    pub fn text(&self, unit: f64, digits: usize, sign: &str) -> String {
        let Self { median, least, most, .. } = self;
        let [median, least, most] = [median, least, most].map(|number| format!("{:.digits$}", number * unit));
        format!("{median}{sign} ({least}–{most})")
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let Self { median, least, most, turns } = self;
        json!({ "median": median, "least": least, "most": most, "turns": turns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let spread = Spread::of(vec![3.0, 1.0, 2.0]);
        assert_eq!((spread.median, spread.least, spread.most), (2.0, 1.0, 3.0));
        assert_eq!(Spread::of(vec![1.0, 4.0, 2.0, 8.0]).median, 3.0);
        assert_eq!(Spread::of(vec![0.95, 0.97, 0.99]).text(100.0, 0, "%"), "97% (95–99)");
    }
}
