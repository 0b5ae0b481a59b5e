//! `--carry thread`: all ranks of a run as threads of this process.
//!
//! A rank does here what a process does elsewhere ([`Execution::take_part`]): they meet over loopback, where heartbeats, votes
//! and verdicts travel, and share memory for everything else, with one copy of the weights where the step allows it. Rank 0 is
//! the calling thread and has terminal, report and TensorBoard; the others are quiet. Ctrl-C is one flag for all.
//!
//! A rank that fails, or panics, is heard of by the others as that of any run is. What differs is the end: this process waits
//! for all, and says once what happened.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};

use crate::cluster::launch::group::GRACE;
use crate::cluster::launch::threads::{Seat, seats};
use crate::comm::Token;
use crate::parallel::lock_free::ThreadMemory;
use crate::system::clock::Clock;
use crate::system::cores;
use crate::system::signal::Stop;
use crate::system::threads;
use crate::terminal::Style;
use crate::train::Config;
use crate::train::trainer::Surroundings;

use super::calibrate::Calibrate;
use super::execute::{Begin, Execution, Part};
use super::others::Pinned;
use super::team::Meeting;
use crate::failure::Failure;

/// Does the parts of all ranks; `first` is how rank 0 does its own. Whether the machine has room for them was looked at before.
pub fn take_part(first: Execution<'_>, config: Config) -> Result<Part, Failure> {
    let mut seats = seats(config.ranks(), config.server_count(), config.pin)?;
    let memory = Some(shared_memory(&seats, &config));
    let own = seats.remove(0);
    let course = Course { culprit: Arc::default(), absent: first.around.stop.child() };
    let interrupt = Some(course.absent.clone());
    let token = Some(Token::random());
    let meeting = Meeting { token, memory, starts_others: true, interrupt, ..first.meeting.clone() };
    let other = Other::beside(&first, &meeting, &config);
    let (sender, ends) = sync_channel(seats.len());
    let others = seats.len();
    for seat in seats {
        let (other, watched, sender) = (other.clone(), course.clone(), sender.clone());
        let name = seat.member.rank.to_string();
        if let Err(error) = threads::spawn(&name, move || other.run(seat, &watched, &sender)) {
            course.absent.request();
            return Err(Failure::failed(format!("no thread is left for another replica: {error}")));
        }
    }
    let (met, has_met) = (first.met, Cell::new(false));
    let met = || {
        has_met.set(true);
        met();
    };
    let pinned = Pinned::to(&own.cores);
    let first = Execution { meeting, met: &met, ..first };
    let ended = course.watch(0, || first.take_part(Some(own.member), config));
    drop(pinned);
    let all = collect(ended, &ends, others);
    outcome(all?, *course.culprit.get().unwrap_or(&0), has_met.get()).map_err(|failure| failure.for_all(true))
}

/// Where ranks keep what they share: as many copies as were asked for, or one on each NUMA node that ranks stay on.
fn shared_memory(seats: &[Seat], config: &Config) -> ThreadMemory {
    if let Some(herds) = config.herds {
        return ThreadMemory::of_neighbours(seats.len(), herds);
    }
    let cores = cores::allowed();
    let node = |seat: &Seat| cores.iter().find(|core| seat.cores.contains(&core.number)).map_or(0, |core| core.node);
    ThreadMemory::of_nodes(&seats.iter().map(node).collect::<Vec<_>>())
}

/// How a rank ended.
struct Ended {
    rank: usize,
    part: Result<Part, Failure>,
    /// It has no words of its own then: the others know in which phase it was.
    panicked: bool,
}

/// What all ranks see of each other, beside what they tell.
#[derive(Clone)]
struct Course {
    /// The first rank that failed.
    culprit: Arc<OnceLock<usize>>,
    /// Set with it: ranks that have not met yet wait for it no more.
    absent: Stop,
}

impl Course {
    /// Does a rank's part, whatever comes of it.
    fn watch(&self, rank: usize, part: impl FnOnce() -> Result<Part, Failure>) -> Ended {
        let part = threads::caught(part);
        let panicked = part.is_err();
        let part = part.unwrap_or_else(|words| Err(Failure::failed(format!("rank {rank} panicked: {words}"))));
        if part.is_err() {
            let _ = self.culprit.set(rank);
            self.absent.request();
        }
        Ended { rank, part, panicked }
    }
}

/// How every rank but the first does its part.
#[derive(Clone)]
struct Other {
    /// The folder of a new run, if one was named, or the run that goes on.
    begin: Result<Option<PathBuf>, PathBuf>,
    config: Config,
    calibrate: Calibrate,
    meeting: Meeting,
    around: Surroundings,
}

impl Other {
    fn beside(first: &Execution<'_>, meeting: &Meeting, config: &Config) -> Self {
        let begin = match &first.begin {
            Begin::New(folder) => Ok(folder.clone()),
            Begin::Resume(run, _) => Err(run.clone()),
        };
        let (config, calibrate, meeting) = (config.clone(), first.calibrate, meeting.clone());
        Self { begin, config, calibrate, meeting, around: first.around.clone() }
    }

    /// The thread of a rank.
    fn run(self, seat: Seat, course: &Course, ends: &SyncSender<Ended>) {
        let ended = course.watch(seat.member.rank.index(), || self.take_part(seat));
        // Nobody listens any more if this rank took longer than anybody waits.
        let _ = ends.send(ended);
    }

    fn take_part(self, seat: Seat) -> Result<Part, Failure> {
        let Self { begin, config, calibrate, meeting, around } = self;
        // Before anything counts the cores that there are.
        let _pinned = Pinned::to(&seat.cores);
        let change = |changed: &mut Config| changed.clone_from(&config);
        let begin = match begin {
            Ok(folder) => Begin::New(folder),
            Err(run) => Begin::Resume(run, &change),
        };
        let (style, observers) = (Style::Quiet, Vec::new());
        let execution = Execution { begin, calibrate, style, observers, meeting, around, met: &|| {} };
        execution.take_part(Some(seat.member), config.clone())
    }
}

/// Waits for the other ranks: those of a run that failed end by themselves, and one of them may save. Code of a program's own
/// that never returns is not waited for; it ends with the process.
fn collect(own: Ended, ends: &Receiver<Ended>, others: usize) -> Result<Vec<Ended>, Failure> {
    let clock = Clock::real();
    let failed = own.part.is_err();
    let mut all = vec![own];
    while all.len() <= others {
        match ends.recv_timeout(GRACE.saturating_sub(clock.now())) {
            Ok(ended) => all.push(ended),
            Err(_) if failed => break,
            Err(_) => return Err(Failure::failed(format!("not all replicas have ended within {GRACE:?}"))),
        }
    }
    Ok(all)
}

/// What all came to: rank 0's part, or the words of one rank.
fn outcome(mut all: Vec<Ended>, culprit: usize, met: bool) -> Result<Part, Failure> {
    all.sort_by_key(|ended| ended.rank);
    let failed = |ended: &Ended| ended.part.is_err();
    // Before they have met, only the rank itself knows what is wrong with it. Afterwards all have been told, and the lowest that
    // can still speak knows what was saved.
    let first = all.iter().position(|ended| failed(ended) && ended.rank == culprit);
    let speaks = all.iter().position(|ended| failed(ended) && !ended.panicked);
    let speaker = if met { speaks.or(first) } else { first.or(speaks) };
    all.swap_remove(speaker.unwrap_or(0)).part.map_err(Failure::aloud)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(rank: usize, words: &str, panicked: bool) -> Ended {
        Ended { rank, part: Err(Failure::failed(words).silently()), panicked }
    }

    fn said(all: Vec<Ended>, culprit: usize, met: bool) -> String {
        outcome(all, culprit, met).unwrap_err().into_error().to_string()
    }

    #[test]
    fn one_rank_speaks_for_all() {
        let all = || vec![failed(0, "as rank 0 heard it", false), failed(1, "as it was", false)];
        assert_eq!(said(all(), 1, false), "as it was", "nobody else can know");
        assert_eq!(said(all(), 1, true), "as rank 0 heard it");
        let panicked = || vec![failed(1, "as rank 1 heard it", false), failed(0, "rank 0 panicked", true)];
        assert_eq!(said(panicked(), 0, true), "as rank 1 heard it");
        assert_eq!(said(panicked(), 0, false), "rank 0 panicked");
        assert_eq!(said(vec![failed(0, "alone", true)], 0, true), "alone", "the other never ended");
    }

    #[test]
    fn a_run_ends_well_with_the_part_of_rank_0() {
        let served = |rank| Ended { rank, part: Ok(Part::Served), panicked: false };
        assert!(outcome(vec![served(1), served(0)], 0, true).is_ok());
        assert_eq!(said(vec![served(0), failed(1, "late", false)], 1, true), "late");
    }
}
