//! Active messages: a rank asks another to run one of its handlers, which may answer. The lower layer of [`super::Space`];
//! it knows nothing of arrays.
//!
//! There is no thread behind it. Messages move while somebody of the rank waits, asks for something or says
//! [`Active::progress`], and all of it happens on that one thread: handlers run to their end, nothing is locked, and two
//! ranks that wait for each other answer each other. A rank that computes for long answers late; it can say `progress` in between.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use super::handlers::Handlers;
use super::link::{Awaiting, Done, Ended, Link, Request};
use super::message::{ARGUMENTS, Answer, Message, PAYLOAD_BYTES_MAX};
use super::pending::{Pending, Ready};
use crate::error::{CommError, Party};
use crate::rank::Rank;
use crate::stop::Stop;
use crate::transport::{Interest, Transport};
use crate::wait::Wait;

/// Looks at a link without progress, over all links, before the transport is asked to sleep.
const SPINS: usize = 200;

const ENDED: &str = "the space has ended";

/// One rank's end. Clones are the same end.
#[derive(Clone)]
pub struct Active(Rc<Inner>);

struct Inner {
    rank: Rank,
    world: usize,
    timeout: Duration,
    stop: Stop,
    /// Lent to one at a time; none once the space has ended.
    engine: RefCell<Option<Engine>>,
    ready: Ready,
    /// Whether a function of the caller's is running.
    running: Cell<bool>,
    /// Says whether messages may be handled now.
    at_rest: Box<dyn Fn() -> bool>,
}

struct Engine {
    transport: Transport,
    /// By rank; none for this one.
    links: Vec<Option<Link>>,
    handlers: Handlers,
    broken: Option<Violation>,
}

/// Who has broken the protocol, and how.
#[derive(Clone)]
struct Violation {
    peer: Rank,
    phase: &'static str,
    what: String,
}

impl Violation {
    fn error(self, rank: Rank) -> CommError {
        CommError::Protocol { rank, peer: self.peer.into(), phase: self.phase, what: self.what }
    }
}

impl Active {
    /// This rank's end at the start. `at_rest` is asked before anything moves.
    pub(super) fn new(
        transport: Transport,
        handlers: Handlers,
        (timeout, stop): (Duration, &Stop),
        at_rest: Box<dyn Fn() -> bool>,
    ) -> Self {
        let (rank, world) = transport.place();
        let link = |peer| (peer != rank).then(|| Link::new(peer));
        let links = (0..world).map(Rank::at).map(link).collect();
        let engine = RefCell::new(Some(Engine { transport, links, handlers, broken: None }));
        let (ready, running) = (Ready::default(), Cell::new(false));
        Self(Rc::new(Inner { rank, world, timeout, stop: stop.clone(), engine, ready, running, at_rest }))
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.0.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.0.world
    }

    pub(super) fn ready(&self) -> Ready {
        Rc::clone(&self.0.ready)
    }

    /// Asks a rank, or this one, to run a handler; the answer.
    ///
    /// # Panics
    /// When there is no such rank, and when the payload is longer than [`PAYLOAD_BYTES_MAX`]: a bug. And as [`Pending::wait`].
    pub fn request(&self, to: Rank, handler: u16, arguments: [u64; ARGUMENTS], payload: Vec<u8>) -> Pending<Answer> {
        assert!(payload.len() <= PAYLOAD_BYTES_MAX, "a message of {} bytes", payload.len());
        let (pending, promise) = Pending::new(self, "call");
        promise.owe(to);
        let mut promise = Some(promise);
        let request = Request::new("call", (handler, arguments, payload), move |outcome| {
            let owned =
                |message: Message<'_>| Answer { arguments: message.arguments, payload: message.payload.to_vec() };
            if let Some(promise) = promise.take() {
                promise.complete(outcome.map(owned));
            }
            Ok(())
        });
        self.ask(to, request);
        pending
    }

    /// The same with what becomes of the answer; waits where too many requests wait already.
    pub(super) fn ask(&self, to: Rank, mut request: Request) {
        assert!(to.index() < self.0.world, "there is no {to}");
        self.assert_at_rest();
        if to == self.0.rank {
            return self.ask_itself(request);
        }
        let phase = request.awaiting.phase;
        let has_room = || self.link(to, |link| link.gone().is_some() || link.has_room()).unwrap_or(true);
        let waited = if has_room() { Ok(()) } else { self.until(phase, || to.into(), has_room) };
        let refused = waited.err().or_else(|| self.refusal(to, phase));
        if let Some(error) = refused {
            // It has nothing to say against an error.
            let _ = (request.awaiting.done)(Err(error));
            return;
        }
        self.with(|engine| {
            let link = engine.links[to.index()].as_mut().expect("another rank has a link");
            link.push(request);
            link.send(&mut engine.transport);
        });
    }

    fn ask_itself(&self, Request { handler, arguments, payload, mut awaiting }: Request) {
        let (rank, message) = (self.0.rank, Message { arguments, payload: &payload });
        let violation = |what| CommError::Protocol { rank, peer: rank.into(), phase: awaiting.phase, what };
        let answer = self.with(|engine| engine.handlers.run(handler, rank, message));
        let answer = answer.unwrap_or_else(|| Err(ENDED.into()));
        let said = (awaiting.done)(answer.as_ref().map(Answer::message).map_err(|what| violation(what.clone())));
        assert!(said.is_ok(), "{rank} cannot read its own answer: {said:?}");
    }

    /// Why nothing can be asked of a rank, if that is so.
    fn refusal(&self, to: Rank, phase: &'static str) -> Option<CommError> {
        if let Err(error) = self.unbroken() {
            return Some(error);
        }
        let reason = self.gone(to)?;
        Some(CommError::PeerGone { rank: self.0.rank, peer: to.into(), phase, reason })
    }

    /// Moves what can be moved now, and runs what became ready; whether anything was moved.
    ///
    /// # Errors
    /// When a rank has broken the protocol. The space cannot be used any more.
    ///
    /// # Panics
    /// As [`Pending::wait`].
    pub fn progress(&self) -> Result<bool, CommError> {
        self.assert_at_rest();
        let moved = self.pump();
        self.run_ready();
        self.unbroken()?;
        Ok(moved)
    }

    /// Makes progress until something is so, which is looked at first. The error names who is said to be missing.
    pub(super) fn until(
        &self,
        phase: &'static str,
        missing: impl Fn() -> Party,
        done: impl Fn() -> bool,
    ) -> Result<(), CommError> {
        self.until_within(self.0.timeout, phase, missing, done)
    }

    /// The same with another deadline.
    pub(super) fn until_within(
        &self,
        limit: Duration,
        phase: &'static str,
        missing: impl Fn() -> Party,
        done: impl Fn() -> bool,
    ) -> Result<(), CommError> {
        self.assert_at_rest();
        let wait = Wait::new(limit, &self.0.stop);
        let (mut idle, mut passes) = (0, 0usize);
        loop {
            self.run_ready();
            if done() {
                return Ok(());
            }
            self.unbroken()?;
            passes += 1;
            // Messages that go on for ever must not keep the deadline from being seen.
            if passes.is_multiple_of(64) {
                wait.check(self.0.rank, missing(), phase)?;
                wait.over();
            }
            if self.pump() {
                idle = 0;
                continue;
            }
            idle += 1;
            if idle * self.0.world < SPINS {
                std::hint::spin_loop();
                continue;
            }
            wait.check(self.0.rank, missing(), phase)?;
            self.with(|engine| engine.sleep(wait.slice()));
        }
    }

    /// Why a rank is gone, once it is.
    pub(super) fn gone(&self, peer: Rank) -> Option<String> {
        self.link(peer, |link| link.gone().map(str::to_owned)).flatten()
    }

    /// The first rank that has not answered all requests.
    pub(super) fn owing(&self) -> Option<Rank> {
        self.first(|link| link.owes())
    }

    /// The first rank to which something is still to be sent; this one, where the transport has still to send it.
    pub(super) fn sending(&self) -> Option<Rank> {
        let rest = |engine: &mut Engine| !engine.transport.has_sent().unwrap_or(true);
        self.first(|link| link.is_sending()).or_else(|| self.with(rest)?.then_some(self.0.rank))
    }

    fn first(&self, so: impl Fn(&Link) -> bool) -> Option<Rank> {
        self.with(|engine| engine.links.iter().position(|link| link.as_ref().is_some_and(&so)).map(Rank::at)).flatten()
    }

    /// A rank has done what must not be: nothing can be asked any more.
    pub(super) fn violation(&self, peer: Rank, phase: &'static str, what: String) -> CommError {
        let violation = Violation { peer, phase, what };
        self.with(|engine| engine.end_all(self.0.rank, violation.clone()));
        violation.error(self.0.rank)
    }

    /// Ends it: peers notice, and whatever is asked from now on fails.
    pub(super) fn end(&self) {
        let engine = self.0.engine.try_borrow_mut().ok().and_then(|mut engine| engine.take());
        let ready = std::mem::take(&mut *self.0.ready.borrow_mut());
        // What they hold may hold this end.
        drop((engine, ready));
    }

    pub(super) fn unbroken(&self) -> Result<(), CommError> {
        let broken = self.with(|engine| engine.broken.clone());
        match broken {
            Some(None) => Ok(()),
            Some(Some(violation)) => Err(violation.error(self.0.rank)),
            None => Err(CommError::Failed { rank: self.0.rank, phase: "global", what: ENDED.into() }),
        }
    }

    /// Something is done with the engine, unless the space has ended.
    fn with<T>(&self, what: impl FnOnce(&mut Engine) -> T) -> Option<T> {
        let mut engine = self.0.engine.try_borrow_mut().expect("a handler only computes: it asks for nothing");
        engine.as_mut().map(what)
    }

    fn link<T>(&self, peer: Rank, what: impl FnOnce(&Link) -> T) -> Option<T> {
        self.with(|engine| engine.links[peer.index()].as_ref().map(what)).flatten()
    }

    fn assert_at_rest(&self) {
        assert!(
            (self.0.at_rest)(),
            "a slice of a global array is held while others may ask for it: let go of it first"
        );
    }

    /// How long a call may take.
    pub(super) fn timeout(&self) -> Duration {
        self.0.timeout
    }

    fn pump(&self) -> bool {
        let rank = self.0.rank;
        self.with(|engine| engine.pump(rank)).unwrap_or(false)
    }

    /// Runs functions of the caller's whose values have come, unless one of them is what waits.
    fn run_ready(&self) {
        if self.0.running.replace(true) {
            return;
        }
        let _over = Over(&self.0.running);
        loop {
            let next = self.0.ready.borrow_mut().pop_front();
            let Some(next) = next else { return };
            next();
        }
    }
}

/// Nothing of the caller's runs any more, whether it returned or panicked.
struct Over<'a>(&'a Cell<bool>);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Engine {
    fn pump(&mut self, rank: Rank) -> bool {
        let mut moved = false;
        for place in 0..self.links.len() {
            let Some(link) = self.links[place].as_mut().filter(|link| link.gone().is_none()) else { continue };
            if self.broken.is_some() {
                break;
            }
            let received = link.receive(&mut self.transport, &mut self.handlers);
            let peer = Rank::at(place);
            match received {
                Ok(came) => moved |= came | link.send(&mut self.transport),
                Err(Ended::Gone(reason)) => {
                    moved = true;
                    link.end(&reason, |phase| CommError::PeerGone {
                        rank,
                        peer: peer.into(),
                        phase,
                        reason: reason.clone(),
                    });
                }
                Err(Ended::Violation(what)) => {
                    moved = true;
                    self.end_all(rank, Violation { peer, phase: "global", what });
                }
            }
        }
        moved
    }

    /// Whatever is due fails with this, and so does whatever is asked later.
    fn end_all(&mut self, rank: Rank, violation: Violation) {
        for link in self.links.iter_mut().flatten() {
            link.end("it is not listened to any more", |_| violation.clone().error(rank));
        }
        self.broken.get_or_insert(violation);
    }

    fn sleep(&mut self, limit: Duration) {
        let links = self.links.iter().enumerate().filter_map(|(place, link)| Some((place, link.as_ref()?)));
        let there = links.filter(|(_, link)| link.gone().is_none());
        let interest =
            |(place, link): (usize, &Link)| Interest { peer: Rank::at(place), receive: true, send: link.is_sending() };
        let interests: Vec<Interest> = there.map(interest).collect();
        self.transport.sleep(&interests, limit);
    }
}

impl fmt::Debug for Active {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Active").field("rank", &self.0.rank).field("world", &self.0.world).finish_non_exhaustive()
    }
}

impl Request {
    /// A request of this phase.
    pub(super) fn new(
        phase: &'static str,
        (handler, arguments, payload): (u16, [u64; ARGUMENTS], Vec<u8>),
        done: impl FnMut(Result<Message<'_>, CommError>) -> Result<(), String> + 'static,
    ) -> Self {
        let done: Done = Box::new(done);
        Self { handler, arguments, payload, awaiting: Awaiting { phase, done } }
    }
}
