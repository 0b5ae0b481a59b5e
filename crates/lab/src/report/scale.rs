//! Axes: which range to show, where the ticks stand, what they say.

/// How values lie along an axis.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scale {
    /// The value at the start.
    pub low: f64,
    /// The value at the end.
    pub high: f64,
    /// Whether equal distances are equal factors.
    pub log: bool,
    /// The values that carry a label, ascending.
    pub ticks: Vec<f64>,
    /// The distance of two ticks, which decides how many decimals they need.
    step: f64,
}

impl Scale {
    /// A linear axis over `low..=high`, widened to whole ticks, with about `count` of them.
    pub fn linear(low: f64, high: f64, count: usize) -> Self {
        let (low, high) = spread(low, high);
        let step = nice_step((high - low) / count.max(1) as f64);
        let (first, last) = ((low / step + 1e-9).floor(), (high / step - 1e-9).ceil());
        let ticks = (0..=(last - first) as usize).map(|index| (first + index as f64) * step).collect();
        Self { low: first * step, high: last * step, log: false, ticks, step }
    }

    /// A linear axis over exactly `low..=high`, with about `count` ticks inside it, all at whole numbers.
    pub fn whole(low: f64, high: f64, count: usize) -> Self {
        let (low, high) = spread(low, high);
        let step = match nice_step((high - low) / count.max(1) as f64) {
            step if step < 1.0 => 1.0,
            2.5 => 5.0,
            step => step,
        };
        let first = (low / step).ceil();
        let ticks = (0..).map(|index| (first + f64::from(index)) * step).take_while(|&tick| tick <= high).collect();
        Self { low, high, log: false, ticks, step }
    }

    /// A logarithmic axis over `low..=high`, both above zero: ticks at 1, 2 and 5 over few decades, else at 1.
    pub fn log(low: f64, high: f64) -> Self {
        assert!(low > 0.0 && high >= low, "a logarithmic axis from {low} to {high}");
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let factors: &[f64] = if last - first <= 3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let stride = ((last - first) as usize / 8 + 1).max(1);
        let decades = (first..=last).step_by(stride).map(|decade| 10f64.powi(decade));
        let all: Vec<f64> = decades.flat_map(|decade| factors.iter().map(move |factor| factor * decade)).collect();
        let below = all.iter().copied().rfind(|&tick| tick <= low).unwrap_or(low);
        let above = all.iter().copied().find(|&tick| tick >= high).unwrap_or(high);
        let ticks = all.into_iter().filter(|&tick| tick >= below && tick <= above).collect();
        Self { low: below, high: above, log: true, ticks, step: below }
    }

    /// Where `value` lies, from 0 at the start to 1 at the end.
    pub fn place(&self, value: f64) -> f64 {
        if self.log {
            (value.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        }
    }

    /// What the tick at `value` says.
    pub fn label(&self, value: f64) -> String {
        let largest = self.low.abs().max(self.high.abs());
        let step = if self.log { value } else { self.step };
        if largest < 1e-3 || (self.log && value < 1e-3) {
            return if value == 0.0 { "0".into() } else { exponent(value) };
        }
        let (scaled, step, suffix) = match largest {
            l if self.log || l < 1e4 => (value, step, ""),
            l if l < 1e7 => (value / 1e3, step / 1e3, "k"),
            _ => (value / 1e6, step / 1e6, "M"),
        };
        if value == 0.0 {
            return "0".into();
        }
        // As many decimals as the step has: 0.25 needs two though its magnitude is 0.1.
        let decimals = (0..9).find(|&d| ((step * 10f64.powi(d)).round() / 10f64.powi(d) - step).abs() < step * 1e-6);
        format!("{scaled:.*}{suffix}", decimals.unwrap_or(9) as usize)
    }
}

fn exponent(value: f64) -> String {
    let text = format!("{value:.2e}");
    match text.split_once('e') {
        Some((digits, power)) => format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.')),
        None => text,
    }
}

/// A range that has a width, around a single value if need be.
fn spread(low: f64, high: f64) -> (f64, f64) {
    if !(low.is_finite() && high.is_finite()) || low > high {
        return (0.0, 1.0);
    }
    if high - low > high.abs().max(low.abs()) * 1e-9 {
        return (low, high);
    }
    match low {
        0.0 => (0.0, 1.0),
        value => (value - value.abs() * 0.5, value + value.abs() * 0.5),
    }
}

/// The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is not below `rough`.
fn nice_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= rough * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &Scale) -> Vec<String> {
        scale.ticks.iter().map(|&tick| scale.label(tick)).collect()
    }

    #[test]
    fn ticks_are_round_and_cover_the_range() {
        assert_eq!(labels(&Scale::linear(0.13, 2.31, 5)), ["0", "0.5", "1.0", "1.5", "2.0", "2.5"]);
        assert_eq!(labels(&Scale::linear(0.0, 93_000.0, 5)), ["0", "20k", "40k", "60k", "80k", "100k"]);
        assert_eq!(labels(&Scale::linear(0.0, 0.0003, 3)), ["0", "1e-4", "2e-4", "3e-4"]);
        assert_eq!(labels(&Scale::linear(-1.0, 1.0, 4)), ["-1.0", "-0.5", "0", "0.5", "1.0"]);
        assert_eq!(labels(&Scale::whole(0.0, 391.0, 4)), ["0", "100", "200", "300"]);
        assert_eq!(labels(&Scale::whole(0.0, 11.0, 5)), ["0", "5", "10"], "there is no step 2.5");
        assert_eq!(labels(&Scale::whole(0.0, 2.0, 5)), ["0", "1", "2"]);
        assert_eq!(labels(&Scale::linear(0.0, 1.0, 4)), ["0", "0.25", "0.50", "0.75", "1.00"]);
    }

    #[test]
    fn one_value_still_has_an_axis_around_it() {
        for value in [0.0, 1.0, -3.0, 1e-9, 1e12] {
            let scale = Scale::linear(value, value, 4);
            let place = scale.place(value);
            assert!(scale.high > scale.low && (0.0..=1.0).contains(&place), "{value}: {scale:?}");
        }
        assert!(Scale::linear(f64::NAN, f64::INFINITY, 4).place(0.5) == 0.5);
    }

    #[test]
    fn a_logarithmic_axis_counts_decades() {
        let scale = Scale::log(0.03, 2.4);
        assert_eq!(labels(&scale), ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"]);
        assert_eq!(labels(&Scale::log(3e-5, 20.0)), ["1e-5", "1e-4", "0.001", "0.01", "0.1", "1", "10", "100"]);
        assert!((scale.place(0.02).abs() < 1e-12) && (scale.place(5.0) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn extreme_ranges_have_few_ticks() {
        for (low, high) in [(1e-300, 1e300), (1e-12, 1.0), (0.999, 1.0)] {
            assert!(Scale::log(low, high).ticks.len() <= 90, "{low}..{high}");
            assert!((2..=12).contains(&Scale::linear(low, high, 5).ticks.len()), "{low}..{high}");
        }
    }
}
