//! The report's tables and lists: phases, epochs, ranks, warnings, checkpoints, processes, environment.

use std::fmt::Write;

use super::charts::phase_colour;
use super::markup::{escape, section};
use crate::history::{Epoch, Evaluation, History, Process};
use crate::quantity::{bytes, count, percent, percent_short, seconds, significant};
use crate::summary::{Outcome, Summary};
use paceline_system::clock::format_utc;
use paceline_system::phase::Phase;

/// A share of step time spent waiting for data above which the loader is what limits the run.
const DATA_SHARE_HIGH: f64 = 0.10;

/// Totals by phase, and what they say.
pub(crate) fn phases(history: &History, summary: &Summary) -> String {
    if summary.step_seconds <= 0.0 {
        return String::new();
    }
    let steps = history.steps.len().max(1) as f64;
    let mut out = String::from(
        "<div class=\"card\">\n<h3>Where the time went</h3>\n<table class=\"phases\">\n<thead><tr><th>Phase</th>\
         <th class=\"n\">Total</th><th class=\"n\">Per step</th><th class=\"n\">Share</th><th></th></tr></thead>\n<tbody>\n",
    );
    for (name, phase_s) in &summary.phases {
        let share = phase_s / summary.step_seconds;
        let colour = phase_colour(name);
        let _ = writeln!(
            out,
            "<tr><td><i class=\"key band c{colour}\"></i>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"bar\"><i class=\"c{colour}\" style=\"width:{:.1}%\"></i></td></tr>",
            escape(name),
            seconds(*phase_s),
            seconds(phase_s / steps),
            percent_short(share),
            (share * 100.0).clamp(0.0, 100.0)
        );
    }
    let _ = writeln!(
        out,
        "</tbody>\n<tfoot><tr><td>All steps</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">100.0%</td>\
         <td></td></tr></tfoot>\n</table>",
        seconds(summary.step_seconds),
        seconds(summary.step_seconds / steps)
    );
    for sentence in findings(history, summary) {
        let _ = writeln!(out, "<p class=\"finding\">{sentence}</p>");
    }
    out.push_str("</div>\n");
    out
}

/// What the phase totals mean, in sentences.
fn findings(history: &History, summary: &Summary) -> Vec<String> {
    let mut findings = Vec::new();
    let data = summary
        .phases
        .iter()
        .find(|(name, _)| *name == Phase::Data.name())
        .map(|(_, data_s)| data_s / summary.step_seconds);
    match (data, summary.phases.first()) {
        (Some(share), _) if share > DATA_SHARE_HIGH => findings.push(format!(
            "Training waited for data {} of the time: the loader limits this run, not the arithmetic.",
            percent_short(share)
        )),
        (_, Some((name, phase_s))) => {
            let share = percent_short(phase_s / summary.step_seconds);
            findings.push(format!("Most of a step is {}: {share}.", escape(name)));
        }
        _ => {}
    }
    let mut times: Vec<(f64, u64)> = history.steps.iter().map(|step| (step.seconds, step.step)).collect();
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    if let Some(&(slowest, step)) = times.last() {
        let at = |share: f64| seconds(times[((times.len() - 1) as f64 * share) as usize].0);
        findings.push(format!(
            "Median step {}, 95th percentile {}, slowest {} (step {}).",
            at(0.5),
            at(0.95),
            seconds(slowest),
            count(step)
        ));
    }
    let outside = summary.seconds - summary.step_seconds;
    if history.processes.len() == 1 && outside > 0.0 {
        findings.push(format!(
            "{} ({} of the run) lay outside steps: start-up, evaluation, checkpoints.",
            seconds(outside),
            percent_short(outside / summary.seconds)
        ));
    }
    findings
}

/// One row for each epoch, and for an evaluation between them; the best is marked.
pub(crate) fn epochs(history: &History, summary: &Summary) -> String {
    let of_epochs = history.epochs.iter().map(|epoch| (epoch.step, epoch_cells(epoch)));
    let between = history.evaluations.iter().map(|found| (found.step, evaluation_cells(found)));
    let mut rows: Vec<(u64, [String; 10])> = of_epochs.chain(between).collect();
    rows.sort_by_key(|(step, _)| *step);
    if rows.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th class=\"n\">Epoch</th><th class=\"n\">Step</th>\
         <th class=\"n\">Train loss</th><th class=\"n\">Train acc.</th><th class=\"n\">Val. loss</th>\
         <th class=\"n\">Top-1</th><th class=\"n\">Top-5</th><th class=\"n\">Samples/s</th><th class=\"n\">Time</th>\
         <th class=\"n\">Data wait</th></tr></thead>\n<tbody>\n",
    );
    for (step, cells) in rows {
        let is_best = summary.best.is_some_and(|best| best.step == step);
        out.push_str(if is_best { "<tr class=\"best\">" } else { "<tr>" });
        for cell in cells {
            let _ = write!(out, "<td class=\"n\">{cell}</td>");
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n");
    section("epochs", "Epochs", &out)
}

fn or_dash(value: Option<f64>, show: fn(f64) -> String) -> String {
    value.map_or_else(|| "–".to_owned(), show)
}

/// An evaluation where a limit ended the run, inside an epoch that has no figures yet.
fn evaluation_cells(found: &Evaluation) -> [String; 10] {
    let loss = or_dash(found.loss, |loss| significant(loss, 4));
    let (top1, top5) = (or_dash(found.top1, percent), or_dash(found.top5, percent));
    let none = || or_dash(None, percent);
    [count(found.epoch + 1), count(found.step), none(), none(), loss, top1, top5, none(), none(), none()]
}

fn epoch_cells(epoch: &Epoch) -> [String; 10] {
    [
        count(epoch.epoch + 1),
        count(epoch.step),
        significant(epoch.train_loss, 4),
        percent(epoch.train_accuracy),
        or_dash(epoch.val_loss, |loss| significant(loss, 4)),
        or_dash(epoch.val_top1, percent),
        or_dash(epoch.val_top5, percent),
        significant(epoch.samples_per_s, 4),
        seconds(epoch.seconds),
        seconds(epoch.data_wait_s),
    ]
}

/// How fast each was: one row for each worker, where there are several.
pub(crate) fn ranks(histories: &[History]) -> String {
    let workers = || histories.iter().filter(|history| !history.is_server());
    if workers().count() < 2 {
        return String::new();
    }
    let mut out = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th class=\"n\">Rank</th><th>Machine</th><th class=\"n\">Steps</th>\
         <th class=\"n\">Per step</th><th class=\"n\">Samples/s</th><th class=\"n\">Data share</th><th>Outcome</th></tr>\
         </thead>\n<tbody>\n",
    );
    for history in workers() {
        let summary = Summary::of_history(history);
        let data =
            summary.phases.iter().find(|(name, _)| *name == Phase::Data.name()).map_or(0.0, |(_, data_s)| *data_s);
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td>{}</td></tr>",
            history.rank,
            escape(history.start().map_or("", |start| &start.host.name)),
            count(summary.steps),
            seconds(summary.step_seconds / history.steps.len() as f64),
            summary.samples_per_s.map_or_else(|| "–".to_owned(), |rate| significant(rate, 4)),
            percent_short(data / summary.step_seconds),
            escape(&summary.outcome.to_string())
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    section("ranks", "Ranks", &out)
}

/// What the GPUs of all ranks were doing, where that is known.
pub(crate) fn gpus(histories: &[History]) -> String {
    if histories.iter().all(|history| history.gpu.is_none()) {
        return String::new();
    }
    let mut out = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th class=\"n\">Rank</th><th>GPU</th><th class=\"n\">Busy</th>\
         <th class=\"n\">Memory, most</th><th class=\"n\">Power</th><th class=\"n\">Power, most</th>\
         <th class=\"n\">Temperature, most</th></tr></thead>\n<tbody>\n",
    );
    for (history, gpu) in histories.iter().filter_map(|history| Some((history, history.gpu?))) {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
        let name = history.start().and_then(|start| start.host.gpu.as_deref()).unwrap_or_default();
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            history.rank,
            escape(name),
            or_dash(gpu.busy().map(percent_short)),
            or_dash(gpu.memory().map(|(used, all)| format!("{} of {}", bytes(used), bytes(all)))),
            or_dash(gpu.power().map(|(mean, _)| format!("{mean:.0} W"))),
            or_dash(gpu.power().map(|(_, most)| format!("{most:.0} W"))),
            or_dash(gpu.temperature().map(|celsius| format!("{celsius:.0} °C"))),
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    section("gpus", "GPUs", &out)
}

/// Warnings of all ranks.
pub(crate) fn warnings(histories: &[History]) -> String {
    let all = || histories.iter().flat_map(|history| history.warnings.iter().map(move |warning| (history, warning)));
    if all().next().is_none() {
        return String::new();
    }
    let mut out = String::from("<ul class=\"warnings\">\n");
    for (history, warning) in all() {
        let who = if histories.len() > 1 { format!("rank {}, ", history.rank) } else { String::new() };
        let times =
            if warning.count > 1 { format!(" <b>×{}</b>", count(warning.count as u64)) } else { String::new() };
        let when = seconds(warning.time_s);
        let _ = writeln!(out, "<li><small>{who}{when}</small> {}{times}</li>", escape(&warning.message));
    }
    out.push_str("</ul>\n");
    if let more @ 1.. = histories.iter().map(|history| history.warnings_more).sum() {
        let _ = writeln!(out, "<p>and {} more</p>", count(more));
    }
    section("warnings", "Warnings", &out)
}

/// Checkpoints that were written.
pub(crate) fn checkpoints(history: &History) -> String {
    if history.checkpoints.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th class=\"n\">Step</th><th>Folder</th><th class=\"n\">Writing took</th>\
         <th></th></tr></thead>\n<tbody>\n",
    );
    for checkpoint in &history.checkpoints {
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td><code>{}</code></td><td class=\"n\">{}</td><td>{}</td></tr>",
            count(checkpoint.step),
            escape(&checkpoint.path),
            seconds(checkpoint.seconds),
            if checkpoint.best { "best so far" } else { "" }
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    section("checkpoints", "Checkpoints", &out)
}

/// The processes of a run that was resumed.
pub(crate) fn processes(history: &History) -> String {
    if history.processes.len() < 2 {
        return String::new();
    }
    let mut out = String::from(
        "<p>This run was resumed. Steps that a later process did again are counted once, as the later one did them.</p>\n",
    );
    if history.restarts > 0 {
        let times =
            if history.restarts == 1 { "once".to_owned() } else { format!("{} times", count(history.restarts)) };
        let _ = writeln!(out, "<p>Its launcher started it again {times} after a failure.</p>");
    }
    out.push_str(
        "<div class=\"scroll\"><table>\n<thead><tr><th>Started (UTC)</th><th class=\"n\">From step</th>\
         <th class=\"n\">To step</th><th class=\"n\">Time</th><th>Machine</th><th>Ended</th></tr></thead>\n<tbody>\n",
    );
    for process in &history.processes {
        let start = process.start.as_ref();
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td>{}</td></tr>",
            start.map_or_else(|| "–".to_owned(), |start| format_utc(start.unix_s)),
            count(start.map_or(0, |start| start.resumed_step)),
            count(process.last_step.max(process.finish.as_ref().map_or(0, |finish| finish.step))),
            seconds(process.seconds()),
            escape(start.map_or("", |start| &start.host.name)),
            escape(&ending(process))
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    section("processes", "Processes", &out)
}

fn ending(process: &Process) -> String {
    match Outcome::of(Some(process)) {
        Outcome::Unfinished => "no end in the log".to_owned(),
        outcome => outcome.to_string(),
    }
}

/// The machine and the program.
pub(crate) fn environment(history: &History, summary: &Summary) -> String {
    let Some(start) = history.start() else { return String::new() };
    let mut rows = vec![
        ("Machine", escape(&start.host.name)),
        ("Processor", escape(&start.host.cpu)),
        ("Cores", count(start.host.cores as u64)),
        ("GPU", escape(start.host.gpu.as_deref().unwrap_or_default())),
        ("Memory", bytes(start.host.memory_bytes)),
        ("System", escape(&start.host.system)),
        ("Paceline", escape(&start.version)),
        ("Started", format!("{} UTC", format_utc(start.unix_s))),
    ];
    if summary.peak_memory_bytes > 0 {
        rows.push(("Peak memory", bytes(summary.peak_memory_bytes)));
    }
    let mut out = String::from("<dl>\n");
    for (name, value) in rows.iter().filter(|(_, value)| !value.is_empty()) {
        let _ = writeln!(out, "<div><dt>{name}</dt><dd>{value}</dd></div>");
    }
    out.push_str("</dl>\n");
    section("environment", "Environment", &out)
}
