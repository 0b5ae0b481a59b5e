//! What a link does: the latency and bandwidth between two ranks, by messages that go there and are answered.
//!
//! All ranks call these at the same point; two of them talk, and the first of the two tells all what it found, so that
//! every rank decides by the same numbers.

use paceline_system::clock::Clock;

use crate::collective::Nodes;
use crate::communicator::Communicator;
use crate::cost::{Link, Links};
use crate::error::CommError;
use crate::rank::Rank;

const PHASE: &str = "probe";

/// Bytes of a short message.
const SHORT_BYTES: usize = 64;

/// Bytes of each of the long messages that are sent in a row.
const LONG_BYTES: usize = 1 << 20;

/// The tag of rows. Before each comes its length; none ends the measurement.
const ROW: u64 = u64::MAX;

/// The longest row, in long messages: a fifth of a second at 600 Gbit/s.
const ROW_MAX: u64 = 1 << 14;

/// How carefully to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Short messages that are sent and answered; the fastest counts.
    pub trips: usize,
    /// The least time that a row of long messages has to take to count.
    pub row_s: f64,
    /// Rows that count, of which the fastest is taken.
    pub rows: usize,
}

impl Effort {
    /// Milliseconds: at the start of every run.
    pub const QUICK: Self = Self { trips: 4, row_s: 0.0, rows: 4 };

    /// About a second: rows so long that a burst which a network lets through at once does not matter.
    pub const THOROUGH: Self = Self { trips: 500, row_s: 0.2, rows: 3 };
}

/// The link from one rank to another, told to all.
///
/// # Errors
/// When a peer is gone, late or does something else. So for the call below.
///
/// # Panics
/// When the ranks are the same or outside the world: a bug.
pub fn link(comm: &mut Communicator, from: Rank, to: Rank, effort: Effort) -> Result<Link, CommError> {
    let mut found = [0.0f32; 2];
    if comm.rank() == from {
        let link = lead(comm, to, effort)?;
        found = [link.latency_s as f32, (1.0 / link.seconds_per_byte) as f32];
    } else if comm.rank() == to {
        follow(comm, from, effort)?;
    }
    comm.broadcast(from, &mut found)?;
    Ok(Link::new(f64::from(found[0]), f64::from(found[1])))
}

/// The links inside and between these nodes, each measured quickly between the first two ranks that have such a link.
///
/// # Errors
/// As [`link`].
pub fn links(comm: &mut Communicator, nodes: Nodes) -> Result<Links, CommError> {
    let groups = nodes.groups();
    let inside = groups.iter().find(|ranks| ranks.len() > 1).map(|ranks| (ranks[0], ranks[1]));
    let across = (groups.len() > 1).then(|| (groups[0][0], groups[1][0]));
    let mut measure = |pair: Option<(usize, usize)>| match pair {
        Some((from, to)) => link(comm, Rank::at(from), Rank::at(to), Effort::QUICK).map(Some),
        None => Ok(None),
    };
    let (within, between) = (measure(inside)?, measure(across)?);
    // One rank alone sends nothing; any number will do.
    let any = within.or(between).unwrap_or(Link::new(1e-6, 1e9));
    Ok(Links { nodes, within: within.unwrap_or(any), between: between.unwrap_or(any) })
}

fn lead(comm: &mut Communicator, peer: Rank, effort: Effort) -> Result<Link, CommError> {
    let clock = Clock::real();
    let mut short = [0; SHORT_BYTES];
    let mut trip = f64::INFINITY;
    for tag in 0..effort.trips as u64 {
        let start = clock.seconds();
        comm.send(peer, tag, &short)?;
        comm.recv(peer, tag, &mut short)?;
        trip = trip.min(clock.seconds() - start);
    }
    let long = vec![0; LONG_BYTES];
    let (mut row, mut bytes_per_s, mut counted) = (1u64, 0f64, 0);
    while counted < effort.rows {
        let start = clock.seconds();
        comm.send(peer, ROW, &row.to_le_bytes())?;
        for _ in 0..row {
            comm.send(peer, ROW, &long)?;
        }
        comm.recv(peer, ROW, &mut short)?;
        let seconds = clock.seconds() - start;
        if seconds >= effort.row_s || row == ROW_MAX {
            bytes_per_s = bytes_per_s.max((row as usize * LONG_BYTES) as f64 / (seconds - trip).max(1e-9));
            counted += 1;
        } else {
            row *= 2;
        }
    }
    comm.send(peer, ROW, &0u64.to_le_bytes())?;
    Ok(Link::new((trip / 2.0).max(1e-7), bytes_per_s))
}

fn follow(comm: &mut Communicator, peer: Rank, effort: Effort) -> Result<(), CommError> {
    let mut short = [0; SHORT_BYTES];
    for tag in 0..effort.trips as u64 {
        comm.recv(peer, tag, &mut short)?;
        comm.send(peer, tag, &short)?;
    }
    let mut long = vec![0; LONG_BYTES];
    loop {
        let mut row = [0; 8];
        comm.recv(peer, ROW, &mut row)?;
        match u64::from_le_bytes(row) {
            0 => return Ok(()),
            row @ 1..=ROW_MAX => {
                for _ in 0..row {
                    comm.recv(peer, ROW, &mut long)?;
                }
                comm.send(peer, ROW, &short)?;
            }
            row => {
                let what = format!("a row of {row} messages, where at most {ROW_MAX} may come");
                let (rank, peer) = (comm.world_rank(comm.rank()), comm.world_rank(peer).into());
                return Err(CommError::Protocol { rank, peer, phase: PHASE, what });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::transport::{Transport, thread};
    use crate::{Choice, Options, Stop};

    /// The same body on ranks that are threads.
    fn on_threads<T: Send>(world: usize, body: impl Fn(&mut Communicator) -> T + Sync) -> Vec<T> {
        let choice = Choice::by_cost(Links::uniform(world, Link::new(1e-5, 1e9)));
        std::thread::scope(|scope| {
            let start = |port| {
                let options = Options { timeout: Duration::from_secs(20), stop: Stop::new(), choice: choice.clone() };
                let body = &body;
                scope.spawn(move || body(&mut Communicator::new(Transport::Thread(port), options)))
            };
            let ranks: Vec<_> = thread::mesh(world).into_iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_hear_of_both_kinds_of_links() {
        let found = on_threads(5, |comm| links(comm, Nodes::new(vec![0, 1, 0, 2, 1])).unwrap());
        assert!(found.iter().all(|links| links == &found[0]));
        for link in [found[0].within, found[0].between] {
            let bytes_per_s = 1.0 / link.seconds_per_byte;
            assert!(link.latency_s < 0.1 && (1e6..1e13).contains(&bytes_per_s), "{link:?}");
        }
        assert_eq!(on_threads(1, |comm| links(comm, Nodes::one(1)).unwrap()).len(), 1);
    }

    #[test]
    fn a_row_without_bound_is_refused() {
        let effort = Effort { trips: 0, ..Effort::QUICK };
        let outcomes = on_threads(2, |comm| match comm.rank().0 {
            0 => comm.send(Rank(1), ROW, &u64::MAX.to_le_bytes()),
            _ => follow(comm, Rank(0), effort),
        });
        assert!(outcomes[1].as_ref().unwrap_err().to_string().contains("at most 16384 may come"));
    }
}
