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

/// Whoever hands out portions.
pub trait Counter: Send + Sync {
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

/// A stretch of the data, as one worker sees it.
pub struct Stretch {
    counter: Arc<dyn Counter>,
    number: u64,
    portions: u64,
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
    pub fn new(counter: Arc<dyn Counter>, number: u64, portions: u64) -> Self {
        Self { counter, number, portions, claimed: false, end: AtomicU64::new(portions) }
    }

    /// The same, where the first answer to each portion counts, whoever is lost.
    pub fn of_claims(counter: Arc<dyn Counter>, number: u64, portions: u64) -> Self {
        Self { claimed: true, ..Self::new(counter, number, portions) }
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
}

impl Portions for Stretch {
    fn next(&self, finished: usize) -> Result<Option<usize>, DataError> {
        let (finished, claimed) = (finished as u64, self.claimed);
        let question = Question { stretch: self.number, portions: self.portions, finished, claimed };
        let Answer { portion, end } =
            self.counter.take(question).map_err(|why| DataError::NotTold { why: why.to_string() })?;
        self.end.store(end.min(self.portions), Ordering::Release);
        // A portion that does not exist would be data of nobody.
        Ok(portion.filter(|&portion| portion < self.portions).map(|portion| portion as usize))
    }
}
