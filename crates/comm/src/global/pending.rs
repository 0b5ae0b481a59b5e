//! What is still under way: a value that will be there, and what to do with it then. Made by whatever asks other ranks;
//! completed by messages, while anybody of this rank waits.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use super::active::Active;
use crate::error::{CommError, Party};
use crate::rank::Rank;

/// What is to be run outside of any handler: the callers' own functions, which may ask for more.
pub(super) type Ready = Rc<RefCell<VecDeque<Box<dyn FnOnce()>>>>;

type Outcome<T> = Result<T, CommError>;

struct Slot<T> {
    outcome: Option<Outcome<T>>,
    next: Option<Box<dyn FnOnce(Outcome<T>)>>,
    /// Who has not answered, for the words of an error.
    owing: Owing,
}

/// The ranks whose answers are missing, one entry for each.
type Owing = Rc<RefCell<Vec<Rank>>>;

/// The other end of a [`Pending`].
pub(super) struct Promise<T> {
    slot: Rc<RefCell<Slot<T>>>,
    ready: Ready,
}

impl<T: 'static> Promise<T> {
    /// One more answer of a rank is missing.
    pub fn owe(&self, rank: Rank) {
        self.slot.borrow().owing.borrow_mut().push(rank);
    }

    /// One of them has come.
    pub fn paid(&self, rank: Rank) {
        let slot = self.slot.borrow();
        let mut owing = slot.owing.borrow_mut();
        if let Some(place) = owing.iter().position(|&other| other == rank) {
            owing.swap_remove(place);
        }
    }

    pub fn complete(self, outcome: Outcome<T>) {
        let mut slot = self.slot.borrow_mut();
        match slot.next.take() {
            Some(next) => self.ready.borrow_mut().push_back(Box::new(move || next(outcome))),
            None => slot.outcome = Some(outcome),
        }
    }
}

/// A value that is still under way. Dropping it leaves the operation on its way; the next barrier waits for it.
#[must_use = "whether it has come, and whether it failed, is said by `wait`"]
pub struct Pending<T> {
    slot: Rc<RefCell<Slot<T>>>,
    active: Active,
    phase: &'static str,
}

impl<T: 'static> Pending<T> {
    pub(super) fn new(active: &Active, phase: &'static str) -> (Self, Promise<T>) {
        let slot = Rc::new(RefCell::new(Slot { outcome: None, next: None, owing: Owing::default() }));
        let promise = Promise { slot: Rc::clone(&slot), ready: active.ready() };
        (Self { slot, active: active.clone(), phase }, promise)
    }

    /// Whether [`Pending::wait`] would return at once. Looks at nothing new: [`super::Space::progress`] does.
    pub fn is_ready(&self) -> bool {
        self.slot.borrow().outcome.is_some()
    }

    /// Waits for the value. Meanwhile this rank answers the others, and runs what waits for other values.
    ///
    /// # Errors
    /// When a rank that it needs is gone, late or breaks the protocol; see [`CommError`].
    ///
    /// # Panics
    /// While a slice of [`super::Global::local`] or [`super::Global::local_mut`] is held, and in a handler.
    pub fn wait(self) -> Result<T, CommError> {
        let limit = self.active.timeout();
        self.wait_at_most(limit)
    }

    /// The same with a deadline of its own, which may be longer than the space's or shorter. What comes later is dropped.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    ///
    /// # Panics
    /// As [`Pending::wait`].
    pub fn wait_at_most(self, limit: Duration) -> Result<T, CommError> {
        if !self.is_ready() {
            self.active.until_within(limit, self.phase, || self.owing(), || self.is_ready())?;
        }
        self.slot.borrow_mut().outcome.take().expect("it is ready, and was not taken before")
    }

    /// Who is waited for.
    fn owing(&self) -> Party {
        self.slot.borrow().owing.borrow().first().map_or(Party::Anyone, |&rank| rank.into())
    }

    /// Has a function run on the value as soon as it is there: at once, or while this rank waits for anything. It may ask
    /// for more. If it waits itself, then for what messages bring: other such functions do not run meanwhile.
    pub fn then<U: 'static>(self, function: impl FnOnce(T) -> U + 'static) -> Pending<U> {
        let (pending, promise) = Pending::new(&self.active, self.phase);
        pending.slot.borrow_mut().owing = Rc::clone(&self.slot.borrow().owing);
        self.hand_on(move |outcome| promise.complete(outcome.map(function)));
        pending
    }

    /// The same for a function that begins something else, which is waited for too.
    pub fn and_then<U: 'static>(self, function: impl FnOnce(T) -> Pending<U> + 'static) -> Pending<U> {
        let (pending, promise) = Pending::new(&self.active, self.phase);
        pending.slot.borrow_mut().owing = Rc::clone(&self.slot.borrow().owing);
        self.hand_on(move |outcome| match outcome.map(function) {
            Ok(second) => {
                promise.slot.borrow_mut().owing = Rc::clone(&second.slot.borrow().owing);
                second.hand_on(move |outcome| promise.complete(outcome));
            }
            Err(error) => promise.complete(Err(error)),
        });
        pending
    }

    fn hand_on(self, next: impl FnOnce(Outcome<T>) + 'static) {
        let mut slot = self.slot.borrow_mut();
        let outcome = slot.outcome.take();
        match outcome {
            None => slot.next = Some(Box::new(next)),
            Some(outcome) => {
                drop(slot);
                next(outcome);
            }
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("phase", &self.phase).finish_non_exhaustive()
    }
}
