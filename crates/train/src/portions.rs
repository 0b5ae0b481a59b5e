//! Who computes which part of the data, where workers do not wait for each other: portions of batches, handed out one by one to whoever
//! is free. A slow worker then computes fewer, and the data of a lost one are counted and not waited for.
//!
//! Data come in stretches, between two points at which all meet. Every worker goes through the same ones and numbers them alike.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use paceline_comm::CommError;
use paceline_data::DataError;
use paceline_data::loader::Portions;
use paceline_data::order::Shard;
use paceline_parallel::agree::Returned;

use crate::checkpoint::Position;

/// What a worker asks whoever hands out portions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The number of the stretch.
    pub stretch: u64,
    /// How many portions it has.
    pub portions: u64,
    /// How many of those that this worker has taken it has finished.
    pub finished: u64,
    /// Whether the first answer to each portion counts, which is claimed.
    pub claimed: bool,
}

/// What it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The number of a portion; none when all are taken.
    pub portion: Option<u64>,
    /// How many the stretch has come to, once all are taken.
    pub end: u64,
}

/// Where a worker that has come back takes part again.
#[derive(Clone, Debug, PartialEq)]
pub struct Admission {
    /// The number of the stretch that is under way.
    pub stretch: u64,
    /// The step that the run is at.
    pub step: u64,
    /// Steps of the run that the first worker has made by its own count.
    pub steps: u64,
    /// Where the run was when the stretch began.
    pub position: Position,
}

impl Admission {
    /// The position as text.
    pub fn place(&self) -> String {
        serde_json::to_string(&self.position).expect("a position holds nothing that JSON cannot")
    }

    /// Of what another process has told; none if it makes no sense.
    pub fn from_parts(stretch: u64, (step, steps): (u64, u64), place: &str) -> Option<Self> {
        let position: Position = serde_json::from_str(place).ok()?;
        (stretch > 0 && steps.min(step) >= position.step).then_some(Self { stretch, step, steps, position })
    }
}

/// Whoever hands out portions.
pub trait Counter: Send + Sync {
    /// The first worker: one that was lost, has come back and could take part.
    fn returning(&self) -> Option<Returned> {
        None
    }

    /// The first worker: tells it that it takes part from here on.
    fn admit(&self, _returned: Returned, _admission: Admission) {}

    /// The next portion, for this worker alone. May wait.
    ///
    /// # Errors
    /// When the run ends.
    fn take(&self, question: Question) -> Result<Answer, CommError>;

    /// A portion of a stretch is computed: whether its answer is the first, and counts.
    ///
    /// # Errors
    /// When the run ends.
    fn claim(&self, stretch: u64, portion: u64) -> Result<bool, CommError>;

    /// No more steps are to begin in a stretch.
    fn close(&self, stretch: u64);
}

/// How portions come to this worker: none are handed out where nobody does so.
#[derive(Clone, Default)]
pub struct PortionCounter(pub Option<Arc<dyn Counter>>);

impl fmt::Debug for PortionCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PortionCounter")
    }
}

/// A stretch of the data, as one worker sees it. Where workers are in groups a group is given one portion for each of
/// its workers at a time.
pub struct Stretch {
    counter: Arc<dyn Counter>,
    number: u64,
    portions: u64,
    /// This worker's place in its group, of so many.
    place: Shard,
    claimed: bool,
    end: AtomicU64,
}

impl fmt::Debug for Stretch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stretch {} of {} portions", self.number, self.portions)
    }
}

impl Stretch {
    /// Number `number`, of so many portions.
    pub fn new(counter: Arc<dyn Counter>, number: u64, portions: u64, place: Shard) -> Self {
        Self { counter, number, portions, place, claimed: false, end: AtomicU64::new(portions) }
    }

    /// The same, where the first answer to each portion counts, whoever is lost.
    pub fn of_claims(counter: Arc<dyn Counter>, number: u64, portions: u64, place: Shard) -> Self {
        Self { claimed: true, ..Self::new(counter, number, portions, place) }
    }

    /// How many portions it has.
    pub fn portions(&self) -> u64 {
        self.portions
    }

    /// A portion is computed: whether its answer is the first, and counts.
    ///
    /// # Errors
    /// When the run ends.
    pub fn claim(&self, portion: u64) -> Result<bool, CommError> {
        self.counter.claim(self.number, portion)
    }

    /// How many portions it has come to, once this worker has heard that all are taken.
    pub fn end(&self) -> u64 {
        self.end.load(Ordering::Acquire)
    }

    /// No more steps are to begin in it.
    pub fn close(&self) {
        self.counter.close(self.number);
    }

    /// The first worker: one that was lost, has come back and could take part.
    pub fn returning(&self) -> Option<Returned> {
        self.counter.returning()
    }

    /// The first worker, which is at this step and has made so many: one that has come back takes part in this stretch, before
    /// which the run was there.
    pub fn admit(&self, returned: Returned, (step, steps): (u64, u64), position: &Position) {
        let admission = Admission { stretch: self.number, step, steps, position: position.at_joining() };
        self.counter.admit(returned, admission);
    }
}

impl Portions for Stretch {
    fn next(&self, finished: usize) -> Result<Option<usize>, DataError> {
        let Shard { rank, world } = self.place;
        let (place, group) = (rank as u64, world as u64);
        let (finished, claimed) = (finished as u64, self.claimed);
        let question = Question { stretch: self.number, portions: self.portions / group, finished, claimed };
        let Answer { portion, end } =
            self.counter.take(question).map_err(|why| DataError::NotTold { why: why.to_string() })?;
        self.end.store(end.saturating_mul(group).min(self.portions), Ordering::Release);
        // A portion that does not exist would be data of nobody.
        let of_group = portion.and_then(|portion| portion.checked_mul(group)?.checked_add(place));
        Ok(of_group.filter(|&portion| portion < self.portions).map(|portion| portion as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_survives_being_told_and_one_that_cannot_be_is_none() {
        let position = Position { step: 40, best_top1: Some(0.5), samples: 960, ..Position::default() };
        let admission = Admission { stretch: 3, step: 44, steps: 41, position };
        assert_eq!(Admission::from_parts(3, (44, 41), &admission.place()), Some(admission.clone()));
        for (stretch, steps, place) in [
            (0, (44, 41), admission.place()),
            (3, (39, 41), admission.place()),
            (3, (44, 39), admission.place()),
            (3, (44, 41), String::new()),
            (3, (44, 41), "{\"step\":-1}".into()),
        ] {
            assert_eq!(Admission::from_parts(stretch, steps, &place), None, "{stretch} {steps:?} {place}");
        }
    }
}
