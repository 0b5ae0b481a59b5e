//! The stages of a model that was split: what each is and takes, and whether a step took what was expected.

use std::fmt::Write;

use paceline_system::event::{Event, StageUse};

use super::markup::{escape, section};
use crate::history::History;
use crate::quantity::{bytes, count, percent_short, seconds};

/// The section; nothing where the model is whole.
pub(crate) fn stages(history: &History) -> String {
    let Some(Event::Pipeline { schedule, micro_batches, stages, forecast_s, speedup, bound, drawing }) = &history.split
    else {
        return String::new();
    };
    let mut out = table(stages);
    let _ = writeln!(
        out,
        "<p>{} with {} micro-batches; times are those of one, measured before the first step. Expected {speedup:.2}× one \
         device, of at most {bound:.2}×: one over the slowest stage's share.</p>",
        escape(schedule),
        count(*micro_batches)
    );
    let _ = writeln!(out, "<p>{}</p>", comparison(*forecast_s, median_step(history)));
    let _ = writeln!(out, "<pre>{}</pre>", escape(drawing.trim_end()));
    section("stages", "Stages", &out)
}

fn table(stages: &[StageUse]) -> String {
    let total = |stage: &StageUse| stage.forward_s + stage.inputs_s + stage.weights_s;
    let all: f64 = stages.iter().map(total).sum();
    let mut out = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th class=\"n\">Stage</th><th class=\"n\">Parameters</th>\
         <th class=\"n\">Forward</th><th class=\"n\">Input gradients</th><th class=\"n\">Weight gradients</th>\
         <th class=\"n\">Share</th><th class=\"n\">Sent per sample</th></tr></thead>\n<tbody>\n",
    );
    // Where a plan does not separate gradients, all of them are in one time.
    let separated = stages.iter().any(|stage| stage.inputs_s > 0.0);
    for (number, stage) in stages.iter().enumerate() {
        let inputs = if separated { seconds(stage.inputs_s) } else { "with weights".to_owned() };
        let sent = if stage.sent_bytes > 0 { bytes(stage.sent_bytes) } else { "–".to_owned() };
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{number}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{inputs}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{sent}</td></tr>",
            count(stage.parameters),
            seconds(stage.forward_s),
            seconds(stage.weights_s),
            percent_short(total(stage) / all),
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    out
}

/// Of the steps since the latest process began.
fn median_step(history: &History) -> Option<f64> {
    let resumed = history.start().map_or(0, |start| start.resumed_step);
    let mut times: Vec<f64> =
        history.steps.iter().filter(|step| step.step > resumed).map(|step| step.seconds).collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len().saturating_sub(1) / 2).copied()
}

fn comparison(forecast_s: f64, median_s: Option<f64>) -> String {
    let expected = format!("A step was expected to take {} without messages and its update", seconds(forecast_s));
    match median_s.filter(|&median_s| median_s > 0.0) {
        None => format!("{expected}; no step was done yet."),
        Some(median_s) => {
            let error = (forecast_s / median_s - 1.0) * 100.0;
            format!("{expected}; the median step took {}: the forecast is off by {error:+.1}%.", seconds(median_s))
        }
    }
}
