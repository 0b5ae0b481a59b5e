//! Bars in groups, as SVG.

use std::fmt::Write;

/// A chart.
pub struct Bars<'a> {
    /// What is shown.
    pub title: &'a str,
    /// The name of each bar of a group.
    pub series: Vec<String>,
    /// Groups: their name, and a value for each of the series, where there is one.
    pub groups: Vec<(String, Vec<Option<f64>>)>,
    /// A line across, to compare with.
    pub line: Option<f64>,
}

const COLOURS: [&str; 5] = ["#2b6cb0", "#dd6b20", "#38a169", "#805ad5", "#718096"];

/// Pixels: a bar, the space between groups, and around all of them.
const BAR: f64 = 16.0;
const GAP: f64 = 24.0;
const TOP: f64 = 64.0;
const HEIGHT: f64 = 220.0;
const BOTTOM: f64 = 170.0;
const LEFT: f64 = 110.0;

impl Bars<'_> {
    /// The picture.
    pub fn svg(&self) -> String {
        let group = BAR * self.series.len() as f64 + GAP;
        let width = LEFT + group * self.groups.len() as f64 + 40.0;
        let values = || self.groups.iter().flat_map(|(_, values)| values.iter().flatten().copied());
        let most = values().chain(self.line).fold(0.0, f64::max).max(1e-9) * 1.1;
        let height = |value: f64| HEIGHT * value / most;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"12\" y=\"22\" font-size=\"15\">{}</text>\n",
            TOP + HEIGHT + BOTTOM,
            escape(self.title)
        );
        for (at, name) in self.series.iter().enumerate() {
            let x = 12.0 + 130.0 * at as f64;
            let _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"34\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{}\" y=\"45\">{}</text>",
                COLOURS[at % 5],
                x + 17.0,
                escape(name)
            );
        }
        for (at, (name, values)) in self.groups.iter().enumerate() {
            let left = LEFT + group * at as f64;
            for (bar, value) in values.iter().enumerate() {
                let Some(value) = value else { continue };
                let (x, y) = (left + BAR * bar as f64, TOP + HEIGHT - height(*value));
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/><text x=\"{:.1}\" y=\"{:.1}\" font-size=\"8\" text-anchor=\"middle\">{value:.2}</text>",
                    BAR - 1.0,
                    height(*value),
                    COLOURS[bar % 5],
                    x + BAR / 2.0,
                    y - 2.0
                );
            }
            let (x, y) = (left + BAR * values.len() as f64 / 2.0, TOP + HEIGHT + 14.0);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\" transform=\"rotate(-40 {x:.1} {y:.1})\">{}</text>",
                escape(name)
            );
        }
        if let Some(line) = self.line {
            let y = TOP + HEIGHT - height(line);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{width}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"black\" stroke-dasharray=\"4 3\"/>"
            );
        }
        svg + "</svg>\n"
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_a_bar_of_its_height() {
        let groups = vec![("a < b".into(), vec![Some(1.0), None]), ("c".into(), vec![Some(2.0), Some(0.5)])];
        let svg = Bars { title: "t", series: vec!["x".into(), "y".into()], groups, line: Some(1.0) }.svg();
        assert_eq!(svg.matches("font-size=\"8\"").count(), 3);
        assert!(
            svg.contains("height=\"200.0\"") && svg.contains("height=\"100.0\"") && svg.contains("a &lt; b"),
            "{svg}"
        );
    }
}
