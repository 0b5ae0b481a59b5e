//! What all ranks of a space do together: barriers by active messages, and on them sums and broadcasts by reading from each
//! other. Every rank says to every other that it has arrived: p−1 messages each, and the end of a rank is noticed by all.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use paceline_system::random;

use super::Space;
use super::active::Active;
use super::blocks::Element;
use super::handlers::Handlers;
use super::link::Request;
use super::message::{ARGUMENTS, Answer};
use super::pending::Pending;
use crate::error::{CommError, Party};
use crate::rank::Rank;
use crate::transfer::chunk;

/// The handler of arrivals.
const ARRIVE: u16 = 4;

const PHASE: &str = "barrier";

/// What a barrier of the caller's own is about.
const PLAIN: u64 = 0;

/// Who has come to the next barrier, and what each says that it is about.
#[derive(Debug, Default)]
pub(super) struct Arrivals(BTreeMap<Rank, VecDeque<u64>>);

impl Arrivals {
    /// Adds the handler.
    pub fn serve(arrivals: &Rc<RefCell<Self>>, handlers: &mut Handlers) {
        let arrivals = Rc::clone(arrivals);
        let added = handlers.add(PHASE, move |from, message| {
            let mut arrivals = arrivals.borrow_mut();
            let of_peer = arrivals.0.entry(from).or_default();
            // It is at the barrier after this one, at the most: for that one it needs this rank.
            if of_peer.len() >= 2 {
                return Err("it has come to a barrier without this rank".into());
            }
            of_peer.push_back(message.arguments[0]);
            Ok(Answer::default())
        });
        assert_eq!(added, ARRIVE, "a barrier has its number");
    }

    fn has(&self, peer: Rank) -> bool {
        self.0.get(&peer).is_some_and(|arrived| !arrived.is_empty())
    }

    fn take(&mut self, peer: Rank) -> Option<u64> {
        self.0.get_mut(&peer)?.pop_front()
    }
}

/// Returns once all ranks have come here, about the same, and all that they had asked for before is done.
pub(super) fn meet(active: &Active, arrivals: &RefCell<Arrivals>, about: u64) -> Result<(), CommError> {
    let party = |rank: Option<Rank>| rank.map_or(Party::Anyone, Party::Rank);
    active.until(PHASE, || party(active.owing()), || active.owing().is_none())?;
    let rank = active.rank();
    let peers = || (0..active.world()).map(Rank::at).filter(move |&peer| peer != rank);
    for peer in peers() {
        // Who is gone is noticed below.
        active.ask(peer, Request::new(PHASE, (ARRIVE, [about, 0, 0, 0], Vec::new()), |_| Ok(())));
    }
    let missing = || peers().find(|&peer| !arrivals.borrow().has(peer));
    let lost = || peers().find(|&peer| !arrivals.borrow().has(peer) && active.gone(peer).is_some());
    active.until(PHASE, || party(missing()), || missing().is_none() || lost().is_some())?;
    if let Some(peer) = lost() {
        active.unbroken()?;
        let reason = active.gone(peer).unwrap_or_default();
        return Err(CommError::PeerGone { rank, peer: peer.into(), phase: PHASE, reason });
    }
    // Who leaves now leaves nothing behind that another needs, and nothing unread.
    let left = || active.owing().or_else(|| active.sending());
    active.until(PHASE, || party(left()), || left().is_none())?;
    for peer in peers() {
        let theirs = arrivals.borrow_mut().take(peer);
        if theirs != Some(about) {
            let what =
                "it is at another point: ranks call the same in the same order, with the same functions and shapes";
            return Err(active.violation(peer, PHASE, what.into()));
        }
    }
    Ok(())
}

impl Space {
    /// Returns once all ranks have come here, and all that any of them had asked for before is done: what was put and
    /// accumulated is seen by whoever reads now. A rank may end its space after it.
    ///
    /// # Errors
    /// When a rank is gone, late or does something else; see [`CommError`].
    ///
    /// # Panics
    /// As [`Pending::wait`].
    pub fn barrier(&self) -> Result<(), CommError> {
        self.meet_about(PLAIN)
    }

    /// Leaves the sum of all ranks' values in each, with the same bits in all: they are added in the order of ranks. All call
    /// this at the same point with the same length.
    ///
    /// # Errors
    /// As [`Space::barrier`].
    ///
    /// # Panics
    /// As [`Pending::wait`].
    pub fn all_reduce<T: Element>(&self, values: &mut [T]) -> Result<(), CommError> {
        self.all_reduce_by(values, T::plus)
    }

    /// The same by another function of two values, such as the larger one.
    ///
    /// # Errors
    /// As [`Space::barrier`].
    ///
    /// # Panics
    /// As [`Pending::wait`].
    pub fn all_reduce_by<T: Element>(&self, values: &mut [T], combine: impl Fn(T, T) -> T) -> Result<(), CommError> {
        let (world, rank, length) = (self.world(), self.rank().index(), values.len());
        // A row for each rank, from which the others read: first all rows of this rank's chunk, then the sums of the others'.
        let board = self.create(&[world, length], values.to_vec())?;
        let part = |row: usize, of: usize| {
            let chunk = chunk(length, world, of);
            row * length + chunk.start..row * length + chunk.end
        };
        let rows: Vec<Pending<Vec<T>>> = (0..world).map(|row| board.get(part(row, rank))).collect();
        let mut rows = rows.into_iter().map(Pending::wait);
        let mut sums = rows.next().expect("a world has a rank")?;
        for row in rows {
            sums.iter_mut().zip(row?).for_each(|(sum, value)| *sum = combine(*sum, value));
        }
        board.put(part(rank, rank), &sums).wait()?;
        self.barrier()?;
        let chunks: Vec<Pending<Vec<T>>> = (0..world).map(|row| board.get(part(row, row))).collect();
        for (of, sums) in chunks.into_iter().enumerate() {
            values[chunk(length, world, of)].copy_from_slice(&sums.wait()?);
        }
        board.release()
    }

    /// Leaves the root's values in all ranks. All call this at the same point with the same length.
    ///
    /// # Errors
    /// As [`Space::barrier`].
    ///
    /// # Panics
    /// When there is no such rank; and as [`Pending::wait`].
    pub fn broadcast<T: Element>(&self, root: Rank, values: &mut [T]) -> Result<(), CommError> {
        assert!(root.index() < self.world(), "there is no {root}");
        let length = values.len();
        let board = self.create(&[self.world(), length], values.to_vec())?;
        let row = root.index() * length;
        values.copy_from_slice(&board.get(row..row + length).wait()?);
        board.release()
    }
}

/// A number that the makings of two arrays share only if they are alike.
pub(super) fn about_array(shape: &[usize], code: u64) -> u64 {
    let words: Vec<u64> = [ARGUMENTS as u64, code].into_iter().chain(shape.iter().map(|&axis| axis as u64)).collect();
    random::key(&words)
}
