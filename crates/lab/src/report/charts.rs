//! The report's five charts, built from a history: what to draw. How it is drawn is `chart.rs`.

use super::chart::{Chart, Look, Series};
use super::curve::{Point, smooth, window};
use crate::history::{Evaluation, History, Step};
use crate::summary::OTHER_PHASE;
use paceline_system::phase::Phase;

/// Columns of the step-time chart: enough to see a change, wide enough to be a mean.
const COLUMNS_MAX: usize = 160;

const TRAIN: usize = 1;
const TOP1: usize = 2;
const TOP5: usize = 3;

/// Loss of each step and of each evaluation.
pub(crate) fn loss(history: &History) -> Chart {
    let mut series = noisy("train", TRAIN, steps(history, |step| step.loss));
    series.push(Series {
        name: "validation".into(),
        colour: TOP1,
        look: Look::Dotted,
        points: evaluations(history, |found| found.loss),
    });
    chart(history, "loss", "Loss", "", series)
}

/// Accuracy of each step and of each evaluation.
pub(crate) fn accuracy(history: &History) -> Chart {
    let percent = |share: Option<f64>| share.map(|share| share * 100.0);
    let mut series = noisy("train", TRAIN, steps(history, |step| step.accuracy * 100.0));
    let top1 = evaluations(history, |found| percent(found.top1));
    let top5 = evaluations(history, |found| percent(found.top5));
    series.push(Series { name: "validation top-1".into(), colour: TOP1, look: Look::Dotted, points: top1 });
    series.push(Series { name: "validation top-5".into(), colour: TOP5, look: Look::Dotted, points: top5 });
    Chart { ceiling: Some(100.0), may_be_log: false, ..chart(history, "accuracy", "Accuracy", "%", series) }
}

/// Samples per second of each step.
pub(crate) fn throughput(history: &History) -> Chart {
    let rate = |step: &Step| if step.seconds > 0.0 { step.samples as f64 / step.seconds } else { f64::NAN };
    let series = noisy("training", TRAIN, steps(history, rate));
    Chart { from_zero: true, may_be_log: false, ..chart(history, "throughput", "Throughput", "samples/s", series) }
}

/// The learning rate of each step.
pub(crate) fn learning_rate(history: &History) -> Chart {
    let points = steps(history, |step| step.learning_rate);
    let series = vec![Series { name: "learning rate".into(), colour: TRAIN, look: Look::Line, points }];
    Chart { from_zero: true, may_be_log: false, ..chart(history, "learning-rate", "Learning rate", "", series) }
}

/// Where the time of a step went: the mean of neighbouring steps, stacked by phase.
pub(crate) fn step_time(history: &History) -> Chart {
    let columns: Vec<&[Step]> = match history.steps.len() {
        0 => vec![],
        length => history.steps.chunks(length.div_ceil(COLUMNS_MAX)).collect(),
    };
    let is_short = history.steps.iter().map(|step| step.seconds).fold(0.0, f64::max) < 2.0;
    let (unit, scale) = if is_short { ("ms per step", 1e3) } else { ("s per step", 1.0) };
    let middle = |column: &[Step]| (column[0].step + column[column.len() - 1].step) as f64 / 2.0;
    let mean =
        |column: &[Step], of: &dyn Fn(&Step) -> f64| column.iter().map(of).sum::<f64>() * scale / column.len() as f64;
    let band = |name: &str, of: &dyn Fn(&Step) -> f64| Series {
        name: name.to_owned(),
        colour: phase_colour(name),
        look: Look::Band,
        points: columns.iter().map(|column| (middle(column), mean(column, of).max(0.0))).collect(),
    };
    let mut series: Vec<Series> = Phase::ALL
        .into_iter()
        .map(|phase| band(phase.name(), &|step| f64::from(step.phases[phase as usize])))
        .collect();
    series.push(band(OTHER_PHASE, &|step| {
        (step.seconds - step.phases.iter().map(|&phase_s| f64::from(phase_s)).sum::<f64>()).max(0.0)
    }));
    let largest = series.iter().flat_map(|series| series.points.iter().map(|point| point.1)).fold(0.0, f64::max);
    series.retain(|series| series.points.iter().any(|point| point.1 > largest * 1e-3));
    Chart { from_zero: true, may_be_log: false, ..chart(history, "step-time", "Step time", unit, series) }
}

/// The colour of time in no phase: grey.
const OTHER_COLOUR: usize = 8;

/// The colour of a phase, the same in every report.
pub(crate) fn phase_colour(name: &str) -> usize {
    match Phase::from_name(name) {
        Some(Phase::Data) => 4,
        Some(Phase::Forward) => 6,
        Some(Phase::Backward | Phase::Compute) => 1,
        Some(Phase::Exchange) => 5,
        Some(Phase::Update) => 3,
        Some(Phase::Setup | Phase::Evaluate | Phase::Checkpoint | Phase::Done) => 7,
        None => OTHER_COLOUR,
    }
}

fn chart(history: &History, id: &'static str, title: &'static str, unit: &'static str, series: Vec<Series>) -> Chart {
    Chart { id, title, unit, from_zero: false, may_be_log: true, ceiling: None, series, marks: history.resumes() }
}

fn steps(history: &History, value: impl Fn(&Step) -> f64) -> Vec<Point> {
    history.steps.iter().map(|step| (step.step as f64, value(step))).collect()
}

fn evaluations(history: &History, value: impl Fn(&Evaluation) -> Option<f64>) -> Vec<Point> {
    history.all_evaluations().iter().filter_map(|found| Some((found.step as f64, value(found)?))).collect()
}

/// A noisy curve: pale as it is, and a line through it.
fn noisy(name: &str, colour: usize, points: Vec<Point>) -> Vec<Series> {
    let smoothed = smooth(&points, window(points.len()));
    let series = |look, points| Series { name: name.to_owned(), colour, look, points };
    vec![series(Look::Pale, points), series(Look::Line, smoothed)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_of_a_step_have_colours_of_their_own() {
        let phases = [Phase::Data, Phase::Forward, Phase::Backward, Phase::Exchange, Phase::Update];
        let mut colours: Vec<usize> = phases.iter().map(|phase| phase_colour(phase.name())).collect();
        colours.push(phase_colour(OTHER_PHASE));
        colours.sort_unstable();
        assert!(colours.windows(2).all(|pair| pair[0] < pair[1]), "{colours:?}");
    }
}
