//! Who waited for whom: ranks that were late, and what servers did, in memory that does not grow with the run's length.

use std::collections::BTreeMap;

use paceline_system::event::{Event, Line};
use paceline_system::phase::Phase;

/// Times that ranks were late which are kept; a run that has more has told its story by then.
const LATE_MAX: usize = 200;

/// One time that a rank was late.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lateness {
    pub rank: u32,
    pub host: String,
    /// When it was named.
    pub time_s: f64,
    pub phase: Phase,
    pub step: u64,
    pub message: Option<String>,
    /// How long others waited for it: until it was named, or in all once it has caught up.
    pub waited_s: f64,
    /// When it had caught up.
    pub until_s: Option<f64>,
}

impl Lateness {
    /// Adds what a line tells.
    pub fn add(all: &mut Vec<Self>, line: &Line) {
        match &line.event {
            Event::Late { late_rank, host, phase, step, message, waited_s, .. } if all.len() < LATE_MAX => {
                all.push(Self {
                    rank: *late_rank,
                    host: host.clone(),
                    time_s: line.time_s,
                    phase: *phase,
                    step: *step,
                    message: message.clone(),
                    waited_s: *waited_s,
                    until_s: None,
                });
            }
            Event::CaughtUp { late_rank, waited_s, .. } => {
                let open = |late: &&mut Self| late.rank == *late_rank && late.until_s.is_none();
                if let Some(late) = all.iter_mut().rev().find(open) {
                    (late.until_s, late.waited_s) = (Some(line.time_s), *waited_s);
                }
            }
            _ => {}
        }
    }
}

/// What a server did in a whole run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Served {
    pub step: u64,
    pub seconds: f64,
    pub exchange_s: f64,
    pub update_s: f64,
    /// By rank.
    pub waited_s: BTreeMap<u32, f64>,
    /// By worker, where every push is a step.
    pub staleness: BTreeMap<u32, Staleness>,
}

/// How many updates the steps of a worker had missed when they were applied.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Staleness {
    /// Steps that had missed none, one, two, …
    counts: Vec<u64>,
}

/// More numbers of missed updates than a server tells apart.
const COUNTS_MAX: usize = 1024;

impl Staleness {
    fn add(&mut self, counts: &[u64]) {
        let length = counts.len().min(COUNTS_MAX);
        if self.counts.len() < length {
            self.counts.resize(length, 0);
        }
        self.counts.iter_mut().zip(counts).for_each(|(all, new)| *all = all.saturating_add(*new));
    }

    /// All steps.
    pub fn steps(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Updates that a step has missed on average.
    pub fn mean(&self) -> f64 {
        let missed = self.counts.iter().enumerate().map(|(missed, &count)| missed as f64 * count as f64).sum::<f64>();
        missed / (self.steps() as f64).max(1.0)
    }

    /// The most that a step has missed.
    pub fn most(&self) -> usize {
        self.counts.iter().rposition(|&count| count > 0).unwrap_or(0)
    }

    /// The share of steps that have missed each number of updates, the numbers that occur.
    pub fn shares(&self) -> impl Iterator<Item = (usize, f64)> {
        let steps = self.steps() as f64;
        self.counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(move |(missed, &count)| (missed, count as f64 / steps))
    }
}

impl Served {
    /// Adds what an event tells.
    pub fn add(&mut self, event: &Event) {
        let Event::Served { step, seconds, phases, waited, missed } = event else { return };
        self.step = *step;
        self.seconds += seconds;
        self.exchange_s += phases.get(Phase::Exchange).unwrap_or(0.0);
        self.update_s += phases.get(Phase::Update).unwrap_or(0.0);
        // What is no number is no rank.
        let waited = waited.iter().filter_map(|(rank, waited_s)| Some((rank.parse().ok()?, waited_s)));
        waited.for_each(|(rank, waited_s)| *self.waited_s.entry(rank).or_default() += waited_s);
        let missed = missed.iter().filter_map(|(worker, counts)| Some((worker.parse().ok()?, counts)));
        missed.for_each(|(worker, counts)| self.staleness.entry(worker).or_default().add(counts));
    }

    /// The rank that it waited for longest.
    pub fn longest(&self) -> Option<(u32, f64)> {
        self.waited_s.iter().map(|(rank, waited_s)| (*rank, *waited_s)).max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steps_have_missed_adds_up_over_the_lines_of_a_run() {
        let mut served = Served::default();
        for counts in [vec![2, 3], vec![0, 1, 0, 2]] {
            let missed = BTreeMap::from([("1".to_owned(), counts), ("nobody".to_owned(), vec![9])]);
            let (phases, waited) = (paceline_system::phase::PhaseTimes::default(), BTreeMap::new());
            served.add(&Event::Served { step: 8, seconds: 1.0, phases, waited, missed });
        }
        let staleness = &served.staleness[&1];
        assert_eq!((served.staleness.len(), staleness.steps(), staleness.most()), (1, 8, 3));
        assert_eq!(staleness.mean(), 10.0 / 8.0);
        assert_eq!(staleness.shares().collect::<Vec<_>>(), [(0, 0.25), (1, 0.5), (3, 0.25)]);
    }

    #[test]
    fn a_rank_that_caught_up_was_late_until_then() {
        let mut all = Vec::new();
        let mut tell = |time_s, event| Lateness::add(&mut all, &Line { time_s, rank: 0, event });
        let late = |late_rank| Event::Late {
            late_rank,
            host: "h".into(),
            phase: Phase::Forward,
            step: 3,
            message: None,
            waited_s: 1.0,
            unheard_s: 0.0,
        };
        tell(2.0, late(1));
        tell(3.0, late(2));
        tell(9.0, Event::CaughtUp { late_rank: 1, host: "h".into(), step: 9, waited_s: 6.5 });
        assert_eq!((all[0].until_s, all[0].waited_s), (Some(9.0), 6.5));
        assert_eq!((all[1].until_s, all[1].waited_s), (None, 1.0));
    }
}
