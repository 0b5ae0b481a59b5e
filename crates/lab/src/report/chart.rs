//! A chart: an SVG drawing that stretches with the page, and HTML labels around it that do not.
//!
//! The drawing is a square of a thousand units without a fixed aspect, its strokes keep their width on the screen, and
//! text is placed beside it in per cent. So the same markup reads well on a phone, a wide screen and paper. A dot is a
//! line of no length with round ends, which stays round however the square is stretched.

use std::fmt::Write;

use serde::Serialize;

use super::curve::{POINTS_MAX, Point, downsample};
use super::markup::{escape, script_json};
use super::scale::Scale;

/// The drawing's width and height in its own units.
const SIDE: f64 = 1000.0;

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// A line.
    Line,
    /// The noise behind a line: pale, left out of the readout and of the range of the axis.
    Pale,
    /// A line with a dot at each point.
    Dotted,
    /// A band on top of the ones before it, one level part for each point.
    Band,
}

/// One curve of a chart.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub name: String,
    /// Colour number in style.css.
    pub colour: usize,
    pub look: Look,
    pub points: Vec<Point>,
}

/// A chart over steps.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    pub id: &'static str,
    pub title: &'static str,
    pub unit: &'static str,
    /// Whether the value axis begins at zero.
    pub from_zero: bool,
    /// Whether the value axis may become logarithmic when values span decades.
    pub may_be_log: bool,
    /// The value the axis never passes, such as 100 per cent.
    pub ceiling: Option<f64>,
    pub series: Vec<Series>,
    /// Steps that get a vertical mark: where a process took over.
    pub marks: Vec<u64>,
}

/// What the page's script needs for its readout.
#[derive(Serialize)]
struct Readout<'a> {
    x: [f64; 2],
    y: [f64; 2],
    log: bool,
    stacked: bool,
    unit: &'a str,
    series: Vec<ReadoutSeries<'a>>,
}

#[derive(Serialize)]
struct ReadoutSeries<'a> {
    name: &'a str,
    colour: usize,
    x: Vec<f64>,
    y: Vec<Option<f64>>,
}

/// Points that are still told apart as dots.
const DOTS_MAX: usize = 60;

/// A factor between the largest and the smallest value above which a logarithmic axis shows more.
const LOG_FROM_FACTOR: f64 = 60.0;

impl Chart {
    /// The chart as a figure.
    pub fn render(mut self) -> String {
        for series in &mut self.series {
            series.points = downsample(&series.points, POINTS_MAX);
        }
        self.series.retain(|series| series.points.iter().any(|point| point.1.is_finite()));
        if self.series.is_empty() {
            return format!(
                "<figure class=\"chart\" id=\"{}\">\n{}<p class=\"empty\">Nothing was logged.</p>\n</figure>\n",
                self.id,
                self.caption(false)
            );
        }
        let x = self.step_axis();
        let y = self.value_axis();
        let mut out = format!("<figure class=\"chart\" id=\"{}\">\n{}", self.id, self.caption(y.log));
        let _ = writeln!(out, "<div class=\"plot\" role=\"img\" aria-label=\"{}\">", escape(&self.description()));
        self.labels(&mut out, &x, &y);
        let _ = write!(out, "<div class=\"area\">\n<svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\">\n");
        self.drawing(&mut out, &x, &y);
        out.push_str("</svg>\n</div>\n</div>\n");
        let _ = writeln!(out, "<script type=\"application/json\">{}</script>", self.readout(&x, &y));
        out.push_str("</figure>\n");
        out
    }

    fn is_stacked(&self) -> bool {
        self.series.iter().any(|series| series.look == Look::Band)
    }

    fn caption(&self, log: bool) -> String {
        let unit = match (self.unit, log) {
            ("", false) => String::new(),
            ("", true) => "logarithmic".into(),
            (unit, false) => unit.to_owned(),
            (unit, true) => format!("{unit}, logarithmic"),
        };
        let mut out = format!("<figcaption><h3>{} <small>{unit}</small></h3>\n<ul class=\"legend\">", self.title);
        for series in self.series.iter().filter(|series| series.look != Look::Pale) {
            let dotted = if series.look == Look::Dotted && series.points.len() <= DOTS_MAX { " dot" } else { "" };
            let band = if series.look == Look::Band { " band" } else { "" };
            let (colour, name) = (series.colour, escape(&series.name));
            let _ = write!(out, "<li><i class=\"key{dotted}{band} c{colour}\"></i>{name}</li>");
        }
        out.push_str("</ul></figcaption>\n");
        out
    }

    fn description(&self) -> String {
        let ends = self.series.iter().filter(|series| series.look != Look::Pale).filter_map(|series| {
            let numbers = || series.points.iter().filter(|point| point.1.is_finite());
            let (first, last) = (numbers().next()?, numbers().next_back()?);
            Some(format!("{} from {:.4} to {:.4} {}", series.name, first.1, last.1, self.unit).trim_end().to_owned())
        });
        format!("{} over steps: {}", self.title, ends.collect::<Vec<_>>().join("; "))
    }

    fn step_axis(&self) -> Scale {
        let steps = || self.series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
        let (low, high) = steps().fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
        // Short runs start at step 1: the axis then starts at 0, as does one that would anyway.
        let low = if low < high * 0.1 { 0.0 } else { low };
        Scale::whole(low, high, 5)
    }

    fn value_axis(&self) -> Scale {
        let range = if self.is_stacked() {
            (0.0, self.tops().iter().copied().fold(0.0, f64::max))
        } else {
            let lines = range(self.series.iter().filter(|series| series.look != Look::Pale));
            let noise = range(self.series.iter());
            // The noise behind a line may widen the axis by half; a wilder spike is clipped, not the line flattened.
            let margin = (lines.1 - lines.0) * 0.5;
            (noise.0.max(lines.0 - margin), noise.1.min(lines.1 + margin))
        };
        let (low, high) = range;
        if self.may_be_log && low > 0.0 && high / low > LOG_FROM_FACTOR {
            return Scale::log(low, high);
        }
        let mut scale = Scale::linear(if self.from_zero { low.min(0.0) } else { low }, high, 5);
        if let Some(ceiling) = self.ceiling
            && scale.high > ceiling
            && high <= ceiling
        {
            scale.high = ceiling;
            scale.ticks.retain(|&tick| tick <= ceiling);
        }
        scale
    }

    /// The height of the stack at each point.
    fn tops(&self) -> Vec<f64> {
        let mut tops = vec![0.0; self.series.iter().map(|series| series.points.len()).max().unwrap_or(0)];
        for series in &self.series {
            for (top, point) in tops.iter_mut().zip(&series.points) {
                *top += point.1;
            }
        }
        tops
    }

    fn labels(&self, out: &mut String, x: &Scale, y: &Scale) {
        out.push_str("<div class=\"values\" aria-hidden=\"true\">");
        for &tick in &y.ticks {
            let _ = write!(out, "<span style=\"bottom:{:.2}%\">{}</span>", y.place(tick) * 100.0, y.label(tick));
        }
        out.push_str("</div>\n<div class=\"steps\" aria-hidden=\"true\">");
        for &tick in &x.ticks {
            let place = x.place(tick) * 100.0;
            // The axis's name stands at its end.
            if place < 88.0 {
                let _ = write!(out, "<span style=\"left:{place:.2}%\">{}</span>", x.label(tick));
            }
        }
        out.push_str("<b>step</b></div>\n");
    }

    fn drawing(&self, out: &mut String, x: &Scale, y: &Scale) {
        let mut grid = String::new();
        for &tick in &y.ticks {
            let _ = write!(grid, "M0 {:.1}H{SIDE}", (1.0 - y.place(tick)) * SIDE);
        }
        let _ = writeln!(out, "<path class=\"grid\" d=\"{grid}\"/>");
        for &mark in &self.marks {
            let place = x.place(mark as f64) * SIDE;
            if (0.0..=SIDE).contains(&place) {
                let _ = writeln!(out, "<path class=\"mark\" d=\"M{place:.1} 0V{SIDE}\"/>");
            }
        }
        if self.is_stacked() {
            self.bands(out, x, y);
            return;
        }
        for series in &self.series {
            let (line, colour) = (line(&series.points, x, y), series.colour);
            let _ = match series.look {
                // Within a drawing of its own, which clips it at the axes; dots at the edge stay whole.
                Look::Pale => writeln!(
                    out,
                    "<svg width=\"1000\" height=\"1000\"><path class=\"line pale c{colour}\" d=\"{line}\"/></svg>"
                ),
                _ => writeln!(out, "<path class=\"line c{colour}\" d=\"{line}\"/>"),
            };
            if series.look == Look::Dotted && series.points.len() <= DOTS_MAX {
                let _ = writeln!(out, "<path class=\"dots c{}\" d=\"{}\"/>", series.colour, dots(&series.points, x, y));
            }
        }
    }

    /// Each band as one outline: along its top from left to right, back along its bottom.
    fn bands(&self, out: &mut String, x: &Scale, y: &Scale) {
        let Some(first) = self.series.first() else { return };
        let edges = edges(&first.points, x);
        let mut bottoms = vec![0.0; first.points.len()];
        for series in &self.series {
            let tops: Vec<f64> = bottoms.iter().zip(&series.points).map(|(bottom, point)| bottom + point.1).collect();
            let height = |value: f64| (1.0 - y.place(value)) * SIDE;
            let mut outline = String::new();
            for (index, &top) in tops.iter().enumerate() {
                let verb = if index == 0 { 'M' } else { 'L' };
                let _ = write!(outline, "{verb}{:.1} {:.1}H{:.1}", edges[index], height(top), edges[index + 1]);
            }
            for (index, &bottom) in bottoms.iter().enumerate().rev() {
                let _ = write!(outline, "L{:.1} {:.1}H{:.1}", edges[index + 1], height(bottom), edges[index]);
            }
            let _ = writeln!(out, "<path class=\"band c{}\" d=\"{outline}Z\"/>", series.colour);
            bottoms = tops;
        }
    }

    fn readout(&self, x: &Scale, y: &Scale) -> String {
        let series = self.series.iter().filter(|series| series.look != Look::Pale).map(|series| ReadoutSeries {
            name: &series.name,
            colour: series.colour,
            x: series.points.iter().map(|point| point.0).collect(),
            y: series.points.iter().map(|point| point.1.is_finite().then(|| rounded(point.1))).collect(),
        });
        script_json(&Readout {
            x: [x.low, x.high],
            y: [y.low, y.high],
            log: y.log,
            stacked: self.is_stacked(),
            unit: self.unit,
            series: series.collect(),
        })
    }
}

/// The lowest and the highest number in `series`.
fn range<'a>(series: impl Iterator<Item = &'a Series>) -> (f64, f64) {
    let values = series.flat_map(|series| series.points.iter().map(|point| point.1)).filter(|value| value.is_finite());
    values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)))
}

/// Five significant digits: what a readout shows, in half the bytes.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

fn place(point: Point, x: &Scale, y: &Scale) -> (f64, f64) {
    // Far outside, coordinates only cost bytes; the drawing clips them.
    (x.place(point.0) * SIDE, ((1.0 - y.place(point.1)) * SIDE).clamp(-SIDE, 2.0 * SIDE))
}

/// A line through the points, lifted where a value is not a number.
fn line(points: &[Point], x: &Scale, y: &Scale) -> String {
    let mut path = String::with_capacity(points.len() * 12);
    let mut is_down = false;
    for &point in points {
        if point.1.is_finite() {
            let (left, top) = place(point, x, y);
            let _ = write!(path, "{}{left:.1} {top:.1}", if is_down { 'L' } else { 'M' });
        }
        is_down = point.1.is_finite();
    }
    path
}

fn dots(points: &[Point], x: &Scale, y: &Scale) -> String {
    let mut path = String::new();
    for &point in points.iter().filter(|point| point.1.is_finite()) {
        let (left, top) = place(point, x, y);
        let _ = write!(path, "M{left:.1} {top:.1}h0");
    }
    path
}

/// Where the level parts of a band meet: half way between its points.
fn edges(points: &[Point], x: &Scale) -> Vec<f64> {
    let middle = |pair: &[Point]| x.place((pair[0].0 + pair[1].0) / 2.0) * SIDE;
    std::iter::once(0.0).chain(points.windows(2).map(middle)).chain([SIDE]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<Point>) -> Chart {
        let series = Series { name: "a<b".into(), colour: 1, look: Look::Dotted, points };
        Chart {
            id: "loss",
            title: "Loss",
            unit: "",
            from_zero: false,
            may_be_log: true,
            ceiling: None,
            series: vec![series],
            marks: vec![],
        }
    }

    #[test]
    fn a_gap_lifts_the_pen() {
        let html = chart(vec![(0.0, 1.0), (1.0, f64::NAN), (2.0, 2.0), (3.0, 1.5)]).render();
        let line = html.lines().find(|line| line.contains("class=\"line")).unwrap();
        assert_eq!(line.matches('M').count(), 2, "{line}");
        assert_eq!(line.matches('L').count(), 1, "{line}");
        assert!(html.contains("null"), "the readout has the gap too");
        assert!(html.contains("a&lt;b") && !html.contains("a<b"));
    }

    #[test]
    fn nothing_but_gaps_is_said_in_words() {
        assert!(chart(vec![(0.0, f64::NAN)]).render().contains("Nothing was logged."));
    }

    #[test]
    fn values_over_decades_get_a_logarithmic_axis() {
        assert!(chart(vec![(0.0, 2.0), (1.0, 0.001)]).render().contains("logarithmic"));
        assert!(!chart(vec![(0.0, 2.0), (1.0, 0.5)]).render().contains("logarithmic"));
        assert!(!chart(vec![(0.0, 2.0), (1.0, 0.0)]).render().contains("logarithmic"), "zero has no logarithm");
    }
}
