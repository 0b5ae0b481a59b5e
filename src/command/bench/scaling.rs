//! `paceline bench scaling`: the same training by more and more processes of this machine, each run by `paceline train` itself.

use std::process::{Command, ExitCode, Stdio};

use crate::system::disk::Disk;
use crate::system::event::{Event, Line};
use crate::system::phase::Phase;
use serde_json::json;

use crate::arguments::BenchScaling;
use crate::command::team::room;
use crate::command::{Outcome, print, print_json};
use crate::failure::Failure;

/// Steps that are not counted: caches, links and algorithms are warmed up and messages put in order.
const WARM_UP: usize = 5;

/// What one run came to.
struct Measured {
    workers: usize,
    images_per_s: f64,
    step_s: f64,
    wait_s: f64,
}

/// Runs the command.
pub fn run(arguments: &BenchScaling) -> Outcome {
    room::cores_suffice(arguments.workers.iter().copied().max().unwrap_or(0), arguments.oversubscribe)?;
    let mut all: Vec<Measured> = Vec::new();
    if !arguments.json {
        print("workers  images/s  step ms  waiting ms  speed-up  efficiency\n");
    }
    for &workers in &arguments.workers {
        let measured = measure(arguments, workers)?;
        let first = all.first().unwrap_or(&measured);
        let speed_up = measured.images_per_s / first.images_per_s;
        let efficiency = speed_up * first.workers as f64 / workers as f64;
        if arguments.json {
            let (images_per_s, step_s, wait_s) = (measured.images_per_s, measured.step_s, measured.wait_s);
            let value = json!({ "workers": workers, "images_per_s": images_per_s, "step_s": step_s, "wait_s": wait_s,
                "speed_up": speed_up, "efficiency": efficiency });
            print_json(&value);
        } else {
            print(&format!(
                "{workers:>7}  {:>8.1}  {:>7.1}  {:>10.1}  {speed_up:>8.2}  {:>9.0}%\n",
                measured.images_per_s,
                measured.step_s * 1e3,
                measured.wait_s * 1e3,
                100.0 * efficiency
            ));
        }
        all.push(measured);
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(arguments: &BenchScaling, workers: usize) -> Result<Measured, Failure> {
    let folder = std::env::temp_dir().join(format!("paceline-scaling-{}-{workers}", std::process::id()));
    let BenchScaling { model, size, batch, steps, agree, carry, .. } = arguments;
    let mut command = Command::new(std::env::current_exe().map_err(Failure::failed)?);
    let batch_of_all = batch * workers;
    let line = format!(
        "train --model {model} --data synthetic:{size}x{size}x3/10 --augment none --batch {batch_of_all} --optimizer momentum --lr 0.001 \
         --max-steps {} --workers {workers} --quiet",
        steps + WARM_UP
    );
    command.args(line.split_whitespace()).arg("--run").arg(&folder).stdin(Stdio::null());
    if let Some(agree) = agree {
        command.args(["--agree", agree.name()]);
    }
    if let Some(carry) = carry {
        command.args(["--carry", carry.name()]);
    }
    if arguments.oversubscribe {
        command.arg("--oversubscribe");
    }
    if workers == 1 && arguments.one_core {
        command.args(["--threads", "1"]);
    }
    let status = command.status().map_err(Failure::failed)?;
    let disk = Disk::real();
    let events = disk.read_text(&folder.join("events/rank-0.jsonl"));
    let _ = std::fs::remove_dir_all(&folder);
    if !status.success() {
        return Err(Failure::failed(format!("training with {workers} workers failed; its sentence is above")));
    }
    let mut found: Vec<(f64, f64)> = events?
        .lines()
        .filter_map(|line| serde_json::from_str::<Line>(line).ok())
        .filter_map(|line| match line.event {
            Event::Step { seconds, phases, .. } => Some((seconds, phases.get(Phase::Exchange).unwrap_or(0.0))),
            _ => None,
        })
        .skip(WARM_UP)
        .collect();
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    let &(step_s, wait_s) = found.get(found.len() / 2).ok_or_else(|| Failure::failed("the run logged no steps"))?;
    Ok(Measured { workers, images_per_s: batch_of_all as f64 / step_s, step_s, wait_s })
}
