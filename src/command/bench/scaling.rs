//! `paceline bench scaling`: the same training by one replica with more and more threads, by as many replicas in one process, and by as
//! many processes, each started by `paceline train` itself.
//!
//! A machine that others use too is not the same from one minute to the next, so all set-ups take turns, and what is compared was
//! measured in the same turn: efficiency against one process with the same threads, and the run of n against n processes that know
//! nothing of each other, at the same time, which is what the machine can give to n trainings.

mod setup;
mod spread;

use std::process::ExitCode;

use crate::system::signal::Stop;
use crate::system::threads;
use crate::train::together::Carry;
use serde_json::{Value, json};

use self::setup::{Measured, Setup};
use self::spread::Spread;
use crate::arguments::BenchScaling;
use crate::command::team::room;
use crate::command::{Outcome, note, print, print_json};
use crate::failure::Failure;

/// What is measured, and how.
pub(crate) struct Plan<'a> {
    arguments: &'a BenchScaling,
    /// Compute threads of each process.
    threads: usize,
    /// The largest number of workers.
    most: usize,
    stop: Stop,
}

/// A set-up with what each turn found.
struct Series {
    setup: Setup,
    turns: Vec<Measured>,
}

/// Runs the command.
pub fn run(arguments: &BenchScaling) -> Outcome {
    let mut workers = arguments.workers.clone();
    workers.sort_unstable();
    workers.dedup();
    let most = workers.last().copied().unwrap_or(1);
    room::cores_suffice(most, arguments.oversubscribe)?;
    if arguments.carry == Some(Carry::THREAD) {
        return Err(Failure::refused("replicas in one process are measured in any case; leave --carry thread out"));
    }
    let threads = arguments.threads.unwrap_or_else(|| (threads::available() / most).max(1));
    let plan = Plan { arguments, threads, most, stop: Stop::on_signals().map_err(Failure::failed)? };
    let several: Vec<usize> = workers.into_iter().filter(|&workers| workers > 1).collect();
    let ways =
        |&count: &usize| [Setup::OneReplica, Setup::Replicas, Setup::Together, Setup::Apart].map(|way| way(count));
    let setups = std::iter::once(Setup::One).chain(several.iter().flat_map(ways));
    let mut all: Vec<Series> = setups.map(|setup| Series { setup, turns: Vec::new() }).collect();
    // Algorithms are measured once, by one process at a time; from then on all take what was found.
    setup::warm_up(&plan, &several)?;
    for turn in 0..arguments.repeats {
        if !arguments.json {
            note(&format!("turn {} of {}", turn + 1, arguments.repeats));
        }
        // There and back, so that a machine that grows slower does not favour the first.
        let order: Vec<usize> = (0..all.len()).collect();
        let order: Vec<usize> = if turn % 2 == 0 { order } else { order.into_iter().rev().collect() };
        for index in order {
            let measured = setup::measure(&plan, all[index].setup)?;
            all[index].turns.push(measured);
        }
    }
    show(&plan, &all);
    Ok(ExitCode::SUCCESS)
}

impl Series {
    fn spread(&self, of: impl Fn(&Measured) -> f64) -> Spread {
        Spread::of(self.turns.iter().map(of).collect())
    }

    /// Turn by turn, compared with another.
    fn against(&self, other: &Self, of: impl Fn(&Measured, &Measured) -> f64) -> Spread {
        Spread::of(self.turns.iter().zip(&other.turns).map(|(own, other)| of(own, other)).collect())
    }
}

/// What a series is compared with.
struct Compared {
    efficiency: Option<Spread>,
    overhead_s: Option<Spread>,
    of_apart: Option<Spread>,
}

impl Compared {
    fn new(series: &Series, all: &[Series]) -> Self {
        let found = |setup: Setup| all.iter().find(|other| other.setup == setup);
        let one = found(Setup::One).filter(|_| series.setup != Setup::One);
        let apart = match series.setup {
            Setup::OneReplica(count) | Setup::Replicas(count) | Setup::Together(count) => found(Setup::Apart(count)),
            Setup::One | Setup::Apart(_) => None,
        };
        Self {
            efficiency: one.map(|one| series.against(one, |own, one| one.step_s / own.step_s)),
            overhead_s: one.map(|one| series.against(one, |own, one| own.step_s - one.step_s)),
            of_apart: apart.map(|apart| series.against(apart, |own, apart| own.images_per_s / apart.images_per_s)),
        }
    }
}

fn show(plan: &Plan<'_>, all: &[Series]) {
    let BenchScaling { model, size, batch, steps, repeats, .. } = plan.arguments;
    if !plan.arguments.json {
        print(&format!(
            "{model} {size}×{size}, batch {batch} of each worker, {steps} steps, median of {repeats} (least–most)\n\
             {:<28}{:>22}{:>20}{:>9}{:>18}{:>20}{:>18}\n",
            "", "images/s", "step ms", "wait ms", "efficiency", "overhead ms", "of apart"
        ));
    }
    for series in all {
        let compared = Compared::new(series, all);
        if plan.arguments.json {
            print_json(&to_json(plan, series, &compared));
        } else {
            print(&line(plan, series, &compared));
        }
    }
    if !plan.arguments.json {
        print(
            "efficiency and overhead: against the first line; replicas: in one process; workers: processes; apart: as many processes that \
             know nothing of each other, at the same time\n",
        );
    }
}

fn line(plan: &Plan<'_>, series: &Series, compared: &Compared) -> String {
    let share = |spread: &Option<Spread>| spread.as_ref().map_or(String::new(), |spread| spread.text(100.0, 0, "%"));
    let wait = series.spread(|turn| turn.wait_s).median * 1e3;
    format!(
        "{:<28}{:>22}{:>20}{wait:>9.1}{:>18}{:>20}{:>18}\n",
        series.setup.name(plan),
        series.spread(|turn| turn.images_per_s).text(1.0, 1, ""),
        series.spread(|turn| turn.step_s).text(1e3, 1, ""),
        share(&compared.efficiency),
        compared.overhead_s.as_ref().map_or(String::new(), |spread| spread.text(1e3, 1, "")),
        share(&compared.of_apart)
    )
}

fn to_json(plan: &Plan<'_>, series: &Series, compared: &Compared) -> Value {
    let (workers, threads, batch) = series.setup.shape(plan);
    json!({
        "setup": series.setup.kind(),
        "workers": workers,
        "threads": threads,
        "batch": batch,
        "images_per_s": series.spread(|turn| turn.images_per_s).to_json(),
        "step_s": series.spread(|turn| turn.step_s).to_json(),
        "wait_s": series.spread(|turn| turn.wait_s).to_json(),
        "efficiency": compared.efficiency.as_ref().map(Spread::to_json),
        "overhead_s": compared.overhead_s.as_ref().map(Spread::to_json),
        "of_apart": compared.of_apart.as_ref().map(Spread::to_json),
    })
}
