//! The measured choice: of all ways to use this node for this model, data and batch, which is fastest. `paceline choose` shows what was
//! found, and `paceline train --split auto` trains with it.
//!
//! Which set-ups there are, and why some do not apply, is `apply`; each is measured by a few real steps of `paceline train` (`measure`), in
//! the order of what they are expected to take (`forecast`, from what `profile` has timed), for as long as there is time (`search`). What
//! came out is a table (`table`), and is kept (`kept`) until something changes that it depends on.

pub mod apply;
pub mod between;
pub mod forecast;
pub mod kept;
mod measure;
mod parts;
mod profile;
mod progress;
mod search;
pub mod setup;
pub mod table;

use std::cell::RefCell;
use std::collections::BTreeMap;

use between::Gradients;

use apply::{Node, Proposed, Said, Subject};
use kept::Kept;
use profile::Profiler;
use progress::Progress;
use search::{Ended, Search};
use table::Row;

use crate::failure::Failure;
use crate::nn::Mode;
use crate::output::note;
use crate::run::calibrate::{self, Calibrate};
use crate::run::split::outline;
use crate::system::clock::{Clock, unix_seconds};
use crate::system::disk::Disk;
use crate::system::host::Host;
use crate::system::signal::Stop;
use crate::terminal::Style;
use crate::train::compute::Compute;
use crate::train::together::Split;
use crate::train::{Config, Registry};

/// What is asked.
pub struct Request<'a> {
    /// The training.
    pub config: &'a Config,
    /// What of the answer was said already.
    pub said: Said,
    /// The models and data that can be named.
    pub registry: &'a Registry,
    /// How algorithms are chosen.
    pub calibrate: Calibrate,
    /// Whether, and by which files, what processes send each other is encrypted.
    pub tls: Option<&'a str>,
    /// Seconds that it may take.
    pub budget_s: f64,
    /// Whether it is measured although something is kept.
    pub again: bool,
    /// Ctrl-C.
    pub stop: &'a Stop,
    /// What is shown meanwhile.
    pub style: Style,
}

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Every set-up, the baseline first.
    pub rows: Vec<Row>,
    /// Which of them is to be used.
    pub chosen: usize,
    /// Seconds that it took to find it.
    pub seconds: f64,
    /// Whether it was found by an earlier command, and when.
    pub kept_unix_s: Option<u64>,
}

impl Found {
    /// The set-up that is to be used.
    pub fn choice(&self) -> &Row {
        &self.rows[self.chosen]
    }

    /// Why it is that one, in a sentence.
    pub fn reason(&self) -> String {
        let (choice, baseline) = (self.choice(), &self.rows[0]);
        let measured = self.rows.iter().filter(|row| row.step_s.is_some()).count();
        let of_baseline = |times: f64| format!(", {times:.2}× the baseline ({})", baseline.setup);
        let times = choice.speedup.filter(|_| self.chosen > 0).map_or(String::new(), of_baseline);
        let others = |row: &&Row| row.setup != choice.setup && row.step_s.is_some();
        let next = self.rows.iter().filter(others).min_by(|one, other| {
            let seconds = |row: &Row| row.step_s.unwrap_or(f64::INFINITY);
            seconds(one).total_cmp(&seconds(other))
        });
        let Some((own_s, next, next_s)) = choice.step_s.zip(next).and_then(|(s, next)| Some((s, next, next.step_s?)))
        else {
            return format!("{} is the only set-up that could be measured", choice.setup);
        };
        let behind = match next_s / own_s - 1.0 {
            ahead if ahead < 0.0 => {
                format!("{} was {:.1}% faster, which is no difference, and takes more", next.setup, -100.0 * ahead)
            }
            behind => format!("the next, {}, takes {:.0}% longer", next.setup, 100.0 * behind),
        };
        format!("{} is the fastest of {measured} that were measured{times}; {behind}", choice.setup)
    }
}

/// How a search ended.
pub enum Answer {
    /// There is a choice.
    Found(Found),
    /// No set-up applies, with the reason of the first, or of the one that would be used without a choice.
    NothingApplies(Vec<Row>),
    /// The user has asked for the end.
    Interrupted,
}

/// The gradients that nodes would send each other; none where the data are not known.
pub fn gradients(config: &Config, registry: &Registry) -> Option<Gradients> {
    let model = &registry.find_model(&config.model).ok()?;
    let (input, classes, held_bytes, _) = outline(config, registry)?;
    let subject = Subject { model, input, classes, held_bytes };
    // As several workers would send them, for each of which there is a sample.
    let config = Config {
        split: Split::Replicate,
        workers: 2,
        batch: config.batch.max(2 * config.accumulate),
        ..config.clone()
    };
    let plan = subject.candidate(&config).plan(Mode::Train).ok()?;
    let last = plan.buckets().iter().max_by_key(|bucket| bucket.ready_after).map_or(0, |bucket| bucket.elements.len());
    Some(Gradients { elements: plan.buckets().iter().map(|bucket| bucket.elements.len()).sum(), last })
}

/// Finds the fastest set-up: what is kept, or what is measured now.
pub fn choose(request: &Request<'_>) -> Result<Answer, Failure> {
    let config = Config { split: Split::Replicate, cuts: Vec::new(), ..request.config.clone() };
    config.check()?;
    let node = Node::look(&config);
    let (disk, folder, host) = (Disk::real(), calibrate::folder(), Host::look());
    let own = request.registry.fingerprint(&config.data);
    let key = kept::key(&config, &request.said, node, &host)
        + &own
        + &format!("{:?}, {:?}", request.calibrate, request.tls.is_some());
    if let (Some(folder), false) = (&folder, request.again) {
        match kept::load(&disk, folder, &host, (&key, request.budget_s)) {
            Ok(Some(kept)) => {
                if let Some(found) = found_again(kept) {
                    return Ok(Answer::Found(found));
                }
            }
            Ok(None) => {}
            Err(error) => note(&format!("warning: set-ups that were kept are not used: {error}")),
        }
    }
    let clock = Clock::real();
    let answer = measured(request, (&config, node), clock.clone())?;
    if let (Answer::Found(found), Some(folder)) = (&answer, &folder) {
        let Found { rows, seconds, .. } = found.clone();
        let chosen = found.choice().setup.clone();
        let kept = Kept { key, rows, chosen, seconds, budget_s: request.budget_s, unix_s: unix_seconds() };
        if let Err(error) = kept::save(&disk, folder, &host, kept) {
            note(&format!("warning: what was chosen is not kept: {error}"));
        }
    }
    Ok(answer)
}

fn found_again(kept: Kept) -> Option<Found> {
    let Kept { rows, chosen, seconds, unix_s, .. } = kept;
    let chosen = rows.iter().position(|row| row.setup == chosen && row.step_s.is_some())?;
    Some(Found { rows, chosen, seconds, kept_unix_s: Some(unix_s) })
}

fn measured(request: &Request<'_>, (config, node): (&Config, Node), clock: Clock) -> Result<Answer, Failure> {
    let model = &request.registry.find_model(&config.model)?;
    let Some((input, classes, held_bytes, _)) = outline(config, request.registry) else {
        let data = &config.data;
        return Err(Failure::refused(format!(
            "{model} does not go with {data}, or the data are not there; type paceline train --split replicate, which says more",
            model = config.model
        )));
    };
    let subject = Subject { model, input, classes, held_bytes };
    let progress = Progress::new(request.style, request.budget_s);
    let profiler = Profiler { subject, config, calibrate: request.calibrate, smaller: 1 };
    let cuts = RefCell::new(BTreeMap::new());
    let find_cuts = |stages: usize, threads: usize| {
        let find = || profiler.cuts(stages, threads).unwrap_or_default();
        cuts.borrow_mut().entry((stages, threads)).or_insert_with(find).clone()
    };
    progress.at(0.0, "looking for cuts");
    let proposed = Proposed { cuts: &find_cuts, parts: &|count| parts::proposals(&subject, config, count) };
    let listed = apply::list(node, (&request.said, config), &subject, &proposed);
    let on_cpu = config.device == Compute::Cpu;
    let applies = listed.iter().any(|listed| listed.left_out.is_none());
    let look_s = if on_cpu && applies { profiler.look()? } else { 0.0 };
    let mut search = Search::new((request, config), listed, look_s, (clock.clone(), &progress));
    match search.run(profiler, look_s) {
        Ok(()) => {}
        Err(Ended::Interrupted) => return Ok(Answer::Interrupted),
        Err(Ended::Failed(failure)) => return Err(failure),
    }
    let rows = search.rows();
    Ok(match pick(&rows) {
        Some(chosen) => Answer::Found(Found { rows, chosen, seconds: clock.seconds(), kept_unix_s: None }),
        None => Answer::NothingApplies(rows),
    })
}

/// What is so little slower than the best that turns do not tell them apart: the one that stands first, and has fewer processes, is taken.
const EQUAL: f64 = 1.01;

/// The row to use: the fastest by the medians of its turns.
pub fn pick(rows: &[Row]) -> Option<usize> {
    let best_s = rows.iter().filter_map(|row| row.step_s).min_by(f64::total_cmp)?;
    rows.iter().position(|row| row.step_s.is_some_and(|step_s| step_s <= EQUAL * best_s))
}

/// The number in the middle; of an even number of them the mean of the two there.
pub fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => f64::NAN,
        count => f64::midpoint(numbers[(count - 1) / 2], numbers[count / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(setup: &str, step_s: Option<f64>) -> Row {
        Row { setup: setup.into(), step_s, speedup: step_s.map(|step_s| 1.0 / step_s), ..Row::default() }
    }

    fn found(rows: Vec<Row>) -> Found {
        let chosen = pick(&rows).unwrap();
        Found { rows, chosen, seconds: 1.0, kept_unix_s: None }
    }

    #[test]
    fn the_fastest_is_picked_and_of_equals_the_simplest() {
        let steps = |steps: &[Option<f64>]| {
            let rows: Vec<Row> = steps.iter().map(|step_s| row("a", *step_s)).collect();
            pick(&rows)
        };
        assert_eq!(steps(&[Some(3.0), None, Some(2.0), Some(1.0)]), Some(3));
        assert_eq!(steps(&[Some(3.0), Some(1.005), Some(1.0)]), Some(1), "within what turns do not tell apart");
        assert_eq!(steps(&[Some(3.0), Some(1.02), Some(1.0)]), Some(2));
        assert_eq!(steps(&[None, None]), None);
    }

    #[test]
    fn the_reason_names_the_baseline_and_the_next() {
        let clear = found(vec![row("1 replica × 1 thread", Some(1.0)), row("a", Some(0.5)), row("b", Some(0.6))]);
        let said = "a is the fastest of 3 that were measured, 2.00× the baseline (1 replica × 1 thread); the next, b, takes 20% longer";
        assert_eq!(clear.reason(), said);
        let equal = found(vec![row("one", Some(1.0)), row("a", Some(0.502)), row("b", Some(0.5))]);
        assert!(
            equal.reason().ends_with("b was 0.4% faster, which is no difference, and takes more"),
            "{}",
            equal.reason()
        );
        assert!(found(vec![row("one", Some(1.0))]).reason().contains("only set-up"));
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!((median(&mut [3.0, 1.0, 2.0]), median(&mut [4.0, 1.0, 2.0, 8.0])), (2.0, 3.0));
    }
}
