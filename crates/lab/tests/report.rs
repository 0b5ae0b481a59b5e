//! The report as a whole: what it says, that it is well-formed, and that it needs nothing but itself.

use std::path::Path;

use paceline_lab::{LabError, report};
use paceline_system::disk::Disk;
use paceline_system::event::{Event, GpuUse, Line, StageUse};

#[path = "../examples/specimen/log.rs"]
mod specimen;

/// The report of a run whose only event file holds `text`.
fn report_of_text(text: &[u8]) -> Result<String, LabError> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("events")).unwrap();
    std::fs::write(folder.path().join("events/rank-0.jsonl"), text).unwrap();
    let path = report::write(&Disk::real(), folder.path())?;
    let html = std::fs::read_to_string(path).unwrap();
    check_well_formed(&html);
    check_self_contained(&html);
    Ok(html)
}

fn text_of(lines: &[Line]) -> String {
    lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n").collect()
}

fn report_of(lines: &[Line]) -> String {
    report_of_text(text_of(lines).as_bytes()).unwrap()
}

/// Every tag is closed, in order; attributes are quoted; a bare `<` never stands in text.
fn check_well_formed(html: &str) {
    const VOID: [&str; 3] = ["meta", "br", "link"];
    let mut rest = html.strip_prefix("<!DOCTYPE html>").expect("a doctype");
    let mut open: Vec<&str> = Vec::new();
    while let Some(start) = rest.find('<') {
        let end = start + rest[start..].find('>').expect("a tag that ends");
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        assert_eq!(tag.matches('"').count() % 2, 0, "quotes in <{tag}>");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "</{name}>");
            continue;
        }
        let name = tag.split([' ', '/', '\n']).next().unwrap();
        assert!(!name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit()), "<{tag}>");
        if tag.ends_with('/') || VOID.contains(&name) {
            continue;
        }
        open.push(name);
        if name == "script" || name == "style" {
            rest = &rest[rest.find(&format!("</{name}>")).expect("raw text that ends")..];
        }
    }
    assert!(open.is_empty(), "left open: {open:?}");
}

fn check_self_contained(html: &str) {
    for reference in ["http://", "https://", "url(", "@import", " src=", "href="] {
        assert!(!html.contains(reference), "the page refers to something: {reference}");
    }
}

#[test]
fn a_finished_run_shows_its_numbers_and_its_curves() {
    let html = report_of(&specimen::lines(10, None, Some(specimen::done(3900))));
    for part in
        ["resnet20 on cifar10", ">done<", "3,900", "272,474", "Where the time went", "tourmalet", "weight_decay"]
    {
        assert!(html.contains(part), "{part}");
    }
    for chart in ["loss", "accuracy", "throughput", "step-time", "learning-rate"] {
        assert!(html.contains(&format!("<figure class=\"chart\" id=\"{chart}\">")), "{chart}");
    }
    assert!(!html.contains("Nothing was logged") && !html.contains("id=\"processes\""));
}

#[test]
fn a_run_on_a_gpu_shows_what_the_gpu_was_doing() {
    let mut lines = specimen::lines(1, None, Some(specimen::done(390)));
    assert!(!report_of(&lines).contains("id=\"gpus\""), "nothing is said of a GPU that is not there");
    if let Event::RunStarted { host, .. } = &mut lines[0].event {
        host.gpu = Some("NVIDIA <H200>".into());
    }
    for (busy, power_w) in [(0.9, 500.0), (1.0, 700.0)] {
        let seen = GpuUse {
            busy: Some(busy),
            memory_used_bytes: Some(12 << 30),
            memory_bytes: Some(140 << 30),
            power_w: Some(power_w),
            temperature_c: None,
        };
        lines.insert(9, Line { time_s: 1.0, rank: 0, event: Event::Gpu(seen) });
    }
    let html = report_of(&lines);
    for part in ["NVIDIA &lt;H200&gt;", "95.0%", "12.0 GiB of 140.0 GiB", "600 W", "700 W", "<td class=\"n\">–</td>"]
    {
        assert!(html.contains(part), "{part}");
    }
}

#[test]
fn a_run_in_stages_shows_them_and_how_good_the_forecast_was() {
    let stage = |parameters, sent_bytes, inputs_s| StageUse {
        parameters,
        sent_bytes,
        forward_s: 0.010,
        inputs_s,
        weights_s: 0.020,
    };
    let event = Event::Pipeline {
        schedule: "zero-bubble".into(),
        micro_batches: 8,
        stages: vec![stage(2_734, 173_056, 0.0), stage(58_972, 0, 0.010)],
        forecast_s: 0.120,
        speedup: 1.66,
        bound: 1.75,
        drawing: "stage 0 |F0 <F1>|\nstage 1 |.. F0|\n".into(),
    };
    let mut lines = specimen::lines(1, None, Some(specimen::done(390)));
    assert!(!report_of(&lines).contains("id=\"stages\""), "nothing is said of stages of a whole model");
    for line in &mut lines {
        if let Event::Step { seconds, .. } = &mut line.event {
            *seconds = 0.150;
        }
    }
    lines.insert(1, Line { time_s: 0.0, rank: 0, event });
    let html = report_of(&lines);
    for part in [
        "id=\"stages\"",
        "<td class=\"n\">58,972</td>",
        "<td class=\"n\">10.0 ms</td><td class=\"n\">0 s</td><td class=\"n\">20.0 ms</td><td class=\"n\">42.9%</td><td class=\"n\">169.0 KiB</td>",
        "zero-bubble with 8 micro-batches",
        "Expected 1.66× one device, of at most 1.75×",
        "expected to take 120 ms without messages and its update; the median step took 150 ms: the forecast is off by -20.0%.",
        "<pre>stage 0 |F0 &lt;F1&gt;|\nstage 1 |.. F0|</pre>",
    ] {
        assert!(html.contains(part), "{part}");
    }
    // A process that went on with the whole model has no stages.
    let resumed = Line { rank: 0, ..lines[0].clone() };
    lines.push(resumed);
    assert!(!report_of(&lines).contains("id=\"stages\""));
}

#[test]
fn a_resumed_run_counts_each_step_once_and_names_its_processes() {
    let html = report_of(&specimen::lines(10, Some(1770), Some(specimen::done(3900))));
    assert!(html.contains("This run was resumed") && html.contains("no end in the log"));
    assert!(html.contains("class=\"mark\""), "the charts mark where the later process took over");
    assert!(html.contains("<strong>3,900</strong>"));
}

#[test]
fn a_failed_run_says_why() {
    let mut lines = specimen::lines(1, None, None);
    lines.truncate(50);
    if let Event::Step { loss, .. } = &mut lines[49].event {
        *loss = f64::NAN;
    }
    let error = Some("loss is not a number at step 49, layer <conv2> & \"friends\"".into());
    let event = Event::RunFinished { step: 49, reason: "failed".into(), error, seconds: 7.0, peak_memory_bytes: 0 };
    lines.push(Line { time_s: 7.0, rank: 0, event });
    let html = report_of(&lines);
    assert!(html.contains(">failed<"));
    assert!(html.contains("layer &lt;conv2&gt; &amp; &quot;friends&quot;"), "the error, escaped");
}

#[test]
fn text_from_the_log_cannot_become_markup() {
    let attack = "</script></pre><script>alert(1)</script><img onerror=x>\"'";
    let mut lines = specimen::lines(1, None, None);
    for line in &mut lines {
        match &mut line.event {
            Event::RunStarted { model, data, config, host, version, .. } => {
                for field in [model, data, config, version, &mut host.name, &mut host.cpu, &mut host.system] {
                    *field = attack.to_owned();
                }
            }
            Event::Checkpoint { path, .. } => *path = attack.to_owned(),
            _ => {}
        }
    }
    lines.push(Line { time_s: 1.0, rank: 0, event: Event::Warning { message: attack.to_owned() } });
    let event = Event::RunFinished {
        step: 1,
        reason: attack.to_owned(),
        error: Some(attack.to_owned()),
        seconds: 1.0,
        peak_memory_bytes: 1,
    };
    lines.push(Line { time_s: 1.0, rank: 0, event });
    let html = report_of(&lines);
    assert!(!html.contains("<script>alert") && !html.contains("<img"));
    assert!(html.matches("alert(1)").count() >= 10, "every place shows the text");
}

#[test]
fn an_empty_log_gives_a_page_that_says_so() {
    let html = report_of_text(b"").unwrap();
    assert!(html.contains("A run that has not begun") && html.contains("still running or crashed"));
    assert_eq!(html.matches("Nothing was logged.").count(), 5);
}

#[test]
fn one_step_and_even_a_start_alone_make_a_page() {
    let lines = specimen::lines(1, None, None);
    for length in [1, 2, 3] {
        let html = report_of(&lines[..length]);
        assert!(html.contains("still running or crashed"));
        assert!(!html.contains("NaN") && !html.contains("inf"), "{length} lines");
    }
}

#[test]
fn a_truncated_log_shows_what_is_there_and_a_damaged_one_is_named() {
    let text = text_of(&specimen::lines(1, None, None));
    let html = report_of_text(&text.as_bytes()[..text.len() * 2 / 3]).unwrap();
    assert!(html.contains("still running or crashed"));
    let damaged = text.replacen("\"step\":7,", "\"step\":seven,", 1);
    let error = report_of_text(damaged.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("rank-0.jsonl, line 8: not an event"), "{error}");
}

#[test]
fn a_folder_that_is_no_run_is_refused_with_what_to_type() {
    let error = report::write(&Disk::real(), Path::new("no/such/run")).unwrap_err().to_string();
    assert!(error.contains("no/such/run") && error.contains("paceline train"), "{error}");
}

#[test]
fn several_ranks_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("events")).unwrap();
    for rank in [0, 1, 10] {
        let mut lines = specimen::lines(1, None, None);
        lines.iter_mut().for_each(|line| line.rank = rank);
        std::fs::write(folder.path().join(format!("events/rank-{rank}.jsonl")), text_of(&lines)).unwrap();
    }
    let html = std::fs::read_to_string(report::write(&Disk::real(), folder.path()).unwrap()).unwrap();
    check_well_formed(&html);
    let rows = html.split("id=\"ranks\"").nth(1).unwrap();
    let place = |rank: &str| rows.find(&format!("<tr><td class=\"n\">{rank}</td>")).unwrap();
    assert!(place("0") < place("1") && place("1") < place("10"), "ordered by number, not by name");
}

#[test]
fn a_long_run_stays_a_small_file() {
    let html = report_of(&specimen::lines(120, None, Some(specimen::done(46_800))));
    assert!(html.len() < 700_000, "{} bytes", html.len());
}
