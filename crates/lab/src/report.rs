//! `report.html`: a run on one page, in one file that needs nothing else.
//!
//! [`write()`] reads the run's event files and nothing more, so a finished, a crashed and a live run look the same to it;
//! docs/report.md says how to read the page. Curves come from the lowest rank, tables name the others. The page opens
//! from the disk, in light and dark, on a phone and on paper; its script only adds readouts under the pointer. All text
//! from the log is escaped, and the page's own policy forbids loading anything.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use paceline_system::clock::format_utc;
use paceline_system::disk::Disk;

use crate::error::LabError;
use crate::history::History;
use crate::log;
use crate::quantity::{bytes, count, percent, seconds, significant};
use crate::summary::{Outcome, Summary};

mod chart;
mod charts;
mod curve;
mod markup;
mod parts;
mod scale;
mod stages;
mod tables;
mod waiting;

use markup::{escape, section};

const STYLE: &str = include_str!("report/style.css");
const SCRIPT: &str = include_str!("report/readout.js");

/// Writes `report.html` into the run's folder and gives its path.
///
/// # Errors
/// When the folder is no run, an event file is damaged before its last line, or the disk refuses.
pub fn write(disk: &Disk, run_dir: &Path) -> Result<PathBuf, LabError> {
    let mut histories = Vec::new();
    for path in log::files(disk, run_dir)? {
        let mut history = History::default();
        log::for_each(disk, &path, |line| history.push(&line))?;
        histories.push(history);
    }
    histories.sort_by_key(|history| history.rank);
    let path = run_dir.join("report.html");
    disk.write(&path, render(&histories).as_bytes())?;
    Ok(path)
}

/// The page. `histories` are sorted by rank and not empty.
fn render(histories: &[History]) -> String {
    let history = &histories[0];
    let summary = Summary::of_history(history);
    let title = escape(&title(&summary));
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n\
         <title>{title} · Paceline</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
    );
    page.push_str(&header(history, &summary, &title));
    let learning = [charts::loss(history), charts::accuracy(history)].map(chart::Chart::render).concat();
    page.push_str(&section("learning", "Learning", &format!("<div class=\"grid\">\n{learning}</div>\n")));
    let speed = [
        charts::throughput(history).render(),
        charts::step_time(history).render(),
        tables::phases(history, &summary),
        charts::learning_rate(history).render(),
    ];
    page.push_str(&section("speed", "Speed", &format!("<div class=\"grid\">\n{}</div>\n", speed.concat())));
    page.push_str(&stages::stages(history));
    page.push_str(&parts::parts(history));
    page.push_str(&tables::warnings(histories));
    page.push_str(&tables::epochs(history, &summary));
    page.push_str(&waiting::late(histories));
    page.push_str(&tables::ranks(histories));
    page.push_str(&waiting::servers(histories));
    page.push_str(&tables::gpus(histories));
    page.push_str(&tables::processes(history));
    page.push_str(&tables::checkpoints(history));
    if let Some(start) = history.start().filter(|start| !start.config.trim().is_empty()) {
        page.push_str(&section(
            "config",
            "Configuration",
            &format!("<pre>{}</pre>\n", escape(start.config.trim_end())),
        ));
    }
    page.push_str(&tables::environment(history, &summary));
    let _ = write!(page, "</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n");
    page
}

fn title(summary: &Summary) -> String {
    match (summary.model.as_str(), summary.data.as_str()) {
        ("", _) => "A run that has not begun".to_owned(),
        (model, "") => model.to_owned(),
        (model, data) => format!("{model} on {data}"),
    }
}

fn header(history: &History, summary: &Summary, title: &str) -> String {
    let (class, note) = match &summary.outcome {
        Outcome::Done | Outcome::EarlyStop | Outcome::MaxSteps | Outcome::TimeLimit => ("good", None),
        Outcome::Interrupted | Outcome::Other(_) => ("halt", None),
        Outcome::Failed(error) => {
            ("bad", Some(error.clone().unwrap_or_else(|| "The log does not say why it failed.".to_owned())))
        }
        Outcome::Unfinished => ("halt", None),
    };
    let mut out = format!(
        "<header>\n<p class=\"brand\">Paceline</p>\n<h1>{title} <span class=\"outcome {class}\">{}</span></h1>\n",
        escape(&summary.outcome.to_string())
    );
    if let Some(start) = history.processes.iter().find_map(|process| process.start.as_ref()) {
        let _ = writeln!(
            out,
            "<p class=\"sub\">{} UTC · {} · {} cores · {} parameters</p>",
            format_utc(start.unix_s),
            escape(&start.host.name),
            count(start.host.cores as u64),
            count(summary.parameters)
        );
    }
    if let Some(note) = note {
        let _ = writeln!(out, "<p class=\"failure\">{}</p>", escape(&note));
    }
    out.push_str("<div class=\"tiles\">\n");
    for (name, value, detail) in tiles(summary) {
        let _ = writeln!(
            out,
            "<div class=\"tile\"><span>{name}</span><strong>{value}</strong><small>{detail}</small></div>"
        );
    }
    out.push_str("</div>\n</header>\n");
    out
}

/// The numbers at the top: name, value, detail.
fn tiles(summary: &Summary) -> Vec<(&'static str, String, String)> {
    let mut tiles = Vec::new();
    if let Some(best) = summary.best {
        tiles.push(("Best top-1", percent(best.top1), {
            format!("epoch {} of {}", best.epoch + 1, summary.epochs.max(best.epoch + 1))
        }));
    }
    if let Some(top1) = summary.final_top1 {
        let top5 = summary.final_top5.map_or_else(String::new, |top5| format!("top-5 {}", percent(top5)));
        tiles.push(("Final top-1", percent(top1), top5));
    }
    if summary.final_top1.is_none()
        && let Some(accuracy) = summary.train_accuracy
    {
        tiles.push(("Training accuracy", percent(accuracy), "no evaluation yet".into()));
    }
    if let Some(loss) = summary.train_loss {
        let val = summary.val_loss.map_or_else(String::new, |loss| format!("validation {}", significant(loss, 4)));
        tiles.push(("Training loss", significant(loss, 4), val));
    }
    if let Some(rate) = summary.samples_per_s {
        tiles.push(("Throughput", significant(rate, 4), "samples/s".into()));
    }
    let memory = match summary.peak_memory_bytes {
        0 => String::new(),
        peak => format!("peak memory {}", bytes(peak)),
    };
    tiles.push(("Time", seconds(summary.seconds), memory));
    let planned = match summary.steps_total {
        0 => String::new(),
        total => format!("of {} planned", count(total)),
    };
    tiles.push(("Steps", count(summary.steps), planned));
    tiles
}
