//! A schedule as text: a row for each stage, time to the right.

use std::iter;

use super::{Forecast, Schedule, Span, StageTimes};

/// What stages take where nobody has measured them.
const EQUAL: StageTimes = StageTimes { forward_s: 1.0, inputs_s: 1.0, weights_s: 1.0 };

/// Draws what each stage does when, in at most `width` columns: `F3--` is the forward pass of micro-batch 3,
/// `B3` its backward pass, `W3` the gradients of its weights, dots are time in which the stage waits.
///
/// To scale by the times of stages and boundaries, but no task narrower than its name; without times, all
/// three passes take the same. Where the names of all tasks do not fit, only letters are left, to scale.
///
/// # Panics
/// As [`Schedule::forecast`].
pub fn draw(schedule: &Schedule, times: &[StageTimes], transfer_s: &[f64], width: usize) -> String {
    let equal = vec![EQUAL; schedule.stages()];
    let free = vec![0.0; schedule.stages() - 1];
    let times = if times.is_empty() { &equal } else { times };
    let transfer_s = if transfer_s.is_empty() { &free } else { transfer_s };
    let digits = digits(schedule.stages() - 1);
    let frame = format!("stage {:digits$} ||", 0).len();
    let columns = width.saturating_sub(frame);
    let rows = Scale::new(schedule, times, transfer_s).names(columns).unwrap_or_else(|| {
        let forecast = schedule.forecast(times, transfer_s);
        forecast.spans.iter().map(|spans| letters(spans, forecast.seconds, columns)).collect()
    });
    let lines = rows.iter().enumerate().map(|(stage, row)| format!("stage {stage:digits$} |{row}|"));
    lines.flat_map(|line| line.chars().take(width).chain(iter::once('\n')).collect::<Vec<_>>()).collect()
}

fn digits(number: usize) -> usize {
    number.to_string().len()
}

/// Times in columns.
struct Scale<'a> {
    schedule: &'a Schedule,
    times: &'a [StageTimes],
    transfer_s: &'a [f64],
    /// The longest time of a pass or a message.
    longest_s: f64,
    /// The shortest pass that takes any time, as a share of the longest; 1 if none does.
    shortest: f64,
    /// Columns of the longest name, with a space after it.
    narrowest: f64,
}

impl<'a> Scale<'a> {
    fn new(schedule: &'a Schedule, times: &'a [StageTimes], transfer_s: &'a [f64]) -> Self {
        let separates_gradients = schedule.separates_gradients();
        let passes: Vec<f64> = iter::zip(times, 0..)
            .flat_map(|(times, stage)| {
                schedule.tasks(stage).iter().map(|task| times.pass_s(task.pass, separates_gradients))
            })
            .collect();
        let longest_s = passes.iter().chain(transfer_s).copied().fold(f64::MIN_POSITIVE, f64::max);
        let shares = passes.iter().map(|pass_s| pass_s / longest_s);
        let shortest = shares.filter(|&share| share > 0.0).fold(1.0, f64::min);
        let narrowest = (digits(schedule.micro_batches() - 1) + 2) as f64;
        Self { schedule, times, transfer_s, longest_s, shortest, narrowest }
    }

    /// Rows with the names of all tasks: as narrow as the shortest task allows, or as exact as the columns
    /// allow; none if they do not fit at all.
    fn names(&self, columns: usize) -> Option<Vec<String>> {
        // The last column is the space after the last name.
        let fits = |forecast: &Forecast| forecast.seconds <= columns as f64 + 1.0;
        let (mut small, mut large) = (0.0, (self.narrowest / self.shortest).min(columns as f64 + 1.0));
        let mut best = Some(self.forecast(small)).filter(fits)?;
        let exact = self.forecast(large);
        if fits(&exact) {
            best = exact;
        } else {
            // Twenty halvings find a scale to a millionth of the width.
            for _ in 0..20 {
                let middle = f64::midpoint(small, large);
                let forecast = self.forecast(middle);
                if fits(&forecast) {
                    (small, best) = (middle, forecast);
                } else {
                    large = middle;
                }
            }
        }
        let total = best.seconds as usize;
        Some(best.spans.iter().map(|spans| names(spans, total)).collect())
    }

    /// The schedule in columns, where the longest time takes so many.
    fn forecast(&self, scale: f64) -> Forecast {
        let columns = |seconds: f64| (seconds / self.longest_s * scale).round();
        let cell = |seconds: f64| columns(seconds).max(self.narrowest);
        let times = self.times.iter().map(|times| {
            let forward_s = cell(times.forward_s);
            if self.schedule.separates_gradients() {
                StageTimes { forward_s, inputs_s: cell(times.inputs_s), weights_s: cell(times.weights_s) }
            } else {
                StageTimes { forward_s, inputs_s: cell(times.inputs_s + times.weights_s), weights_s: 0.0 }
            }
        });
        let transfers: Vec<f64> = self.transfer_s.iter().map(|&transfer_s| columns(transfer_s)).collect();
        self.schedule.forecast(&times.collect::<Vec<_>>(), &transfers)
    }
}

/// A row of tasks that begin and end at whole columns.
fn names(spans: &[Span], total: usize) -> String {
    let mut row = String::with_capacity(total);
    let mut cell = |name: &str, fill: &str, columns: usize| {
        if columns > 0 {
            row.push_str(name);
            row.push_str(&fill.repeat(columns.saturating_sub(name.len() + 1)));
        }
        if columns > name.len() {
            row.push(' ');
        }
    };
    let mut column = 0;
    for span in spans {
        let (begin, end) = (span.begin_s as usize, span.end_s as usize);
        cell(".", ".", begin - column);
        cell(&span.task.to_string(), "-", end - begin);
        column = end;
    }
    cell(".", ".", total - column);
    row.pop();
    row
}

/// A row of letters: what runs in the middle of each column.
fn letters(spans: &[Span], seconds: f64, columns: usize) -> String {
    let letter = |column: usize| {
        let middle_s = (column as f64 + 0.5) / columns as f64 * seconds;
        let running = spans.iter().find(|span| span.begin_s <= middle_s && middle_s < span.end_s);
        running.map_or('.', |span| span.task.pass.letter())
    };
    (0..columns).map(letter).collect()
}
