//! A global address space: arrays that all ranks can reach, functions that ranks call on each other, and what they do together.
//!
//! Two layers. Below, active messages ([`active`]): a rank asks another to run a handler of a table that all ranks share,
//! over any [`Transport`]. Above, [`Global`] arrays, of which each rank has a block, and calls with types
//! ([`Functions`]). What is asked for comes as a [`Pending`] value, while this rank does something else. See docs/global.md.
//!
//! Not for training, which knows beforehand what travels and when ([`crate::Communicator`]): for programs in which a rank
//! finds out by itself what it needs of the others.
//!
//! ```
//! use std::time::Duration;
//!
//! use paceline_comm::global::{Functions, Space};
//! use paceline_comm::transport::{Transport, thread};
//! use paceline_comm::{CommError, Rank, Stop};
//!
//! fn rank(transport: Transport) -> Result<(), CommError> {
//!     let mut functions = Functions::new();
//!     let square = functions.add("square", |_caller, number: f64| number * number);
//!     let space = Space::meet(transport, functions, Duration::from_secs(60), &Stop::new())?;
//!
//!     // Ten rows of three columns; each rank has rows of its own.
//!     let table = space.array::<f64>(&[10, 3])?;
//!     table.local_mut().fill(1.0);
//!     space.barrier()?;
//!     let last = table.get(table.layout().elements(9..10)).then(|row| row.iter().sum::<f64>());
//!     let nine = space.call(Rank(1), square, &3.0);
//!     assert_eq!((last.wait()?, nine.wait()?), (3.0, 9.0));
//!
//!     let hits = space.array::<u64>(&[1])?;
//!     hits.fetch_add(0, 1).wait()?;
//!     space.barrier()?;
//!     assert_eq!(hits.get(0..1).wait()?, [2]);
//!     space.barrier()
//! }
//!
//! std::thread::scope(|scope| {
//!     for port in thread::mesh(2) {
//!         scope.spawn(|| rank(Transport::Thread(port)).unwrap());
//!     }
//! });
//! ```

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use paceline_system::memory;

use crate::error::CommError;
use crate::rank::Rank;
use crate::stop::Stop;
use crate::transport::Transport;

pub mod active;
mod array;
mod blocks;
mod challenge;
mod function;
mod handlers;
pub mod layout;
mod link;
pub mod message;
mod pending;
#[cfg(test)]
mod tests;
mod together;

pub use active::Active;
pub use array::Global;
use blocks::Blocks;
pub use blocks::Element;
pub use challenge::challenge;
pub use function::{Carried, Function, Functions};
pub use handlers::Handlers;
pub use layout::Layout;
pub use pending::Pending;
use together::{Arrivals, about_array};

/// One rank of a global address space. It stays in its thread; dropping it ends it for the others too, so that ranks meet
/// ([`Space::barrier`]) before the first one does.
#[derive(Debug)]
pub struct Space {
    active: Active,
    blocks: Rc<Blocks>,
    arrivals: Rc<RefCell<Arrivals>>,
}

impl Space {
    /// Begins a space over links that are there, and waits for all ranks to do so with the same functions. From then on no
    /// call takes longer than `timeout`, or goes on when `stop` is set.
    ///
    /// # Errors
    /// When a rank is gone or late, or has other functions; see [`CommError`].
    pub fn meet(transport: Transport, functions: Functions, timeout: Duration, stop: &Stop) -> Result<Self, CommError> {
        let key = functions.handlers.key();
        let space = Self::open(transport, functions, timeout, stop);
        space.meet_about(key)?;
        Ok(space)
    }

    /// The same without waiting.
    fn open(transport: Transport, functions: Functions, timeout: Duration, stop: &Stop) -> Self {
        let Functions { handlers, blocks, arrivals } = functions;
        let watched = Rc::clone(&blocks);
        let at_rest = Box::new(move || watched.are_at_rest());
        Self { active: Active::new(transport, handlers, (timeout, stop), at_rest), blocks, arrivals }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.active.rank()
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.active.world()
    }

    /// The layer below: for calls from functions that wait for values, and messages of one's own.
    pub const fn active(&self) -> &Active {
        &self.active
    }

    /// An array of zeros. All ranks call this at the same point with the same shape.
    ///
    /// # Errors
    /// When there is no memory for this rank's block; and as [`Space::barrier`].
    ///
    /// # Panics
    /// When the shape has no axis, or more elements than can be counted; and as [`Pending::wait`].
    pub fn array<T: Element>(&self, shape: &[usize]) -> Result<Global<T>, CommError> {
        let own = Layout::new(shape, self.world()).block(self.rank());
        let zeros = memory::zeros(own.len(), "a global array").map_err(|refused| CommError::System {
            rank: self.rank(),
            what: "take memory for a global array",
            source: std::io::Error::new(std::io::ErrorKind::OutOfMemory, refused),
        })?;
        self.create(shape, zeros)
    }

    /// An array that begins with what each rank brings for its block.
    fn create<T: Element>(&self, shape: &[usize], values: Vec<T>) -> Result<Global<T>, CommError> {
        let layout = Layout::new(shape, self.world());
        let array = Global::new(&self.active, (&self.blocks, &self.arrivals), layout, values);
        self.meet_about(about_array(shape, T::CODE))?;
        Ok(array)
    }

    fn meet_about(&self, about: u64) -> Result<(), CommError> {
        together::meet(&self.active, &self.arrivals, about)
    }

    /// Has a rank, or this one, run a function; its result.
    ///
    /// # Panics
    /// As [`Active::call`].
    pub fn call<A: Carried, R: Carried>(&self, to: Rank, function: Function<A, R>, arguments: &A) -> Pending<R> {
        self.active.call(to, function, arguments)
    }

    /// Answers others, takes in what has come, and runs what waited for it, without waiting. A rank that computes for long says
    /// this now and then. Whether anything had come.
    ///
    /// # Errors
    /// When a rank has broken the protocol. The space cannot be used any more.
    ///
    /// # Panics
    /// As [`Pending::wait`].
    pub fn progress(&self) -> Result<bool, CommError> {
        self.active.progress()
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.active.end();
    }
}
