//! The queues between this rank and one peer. Moves bytes and runs handlers; never waits. [`super::active`] has one for
//! every peer.
//!
//! Every request is answered, in order, and at most [`CREDITS`] of them go unanswered. So what waits to leave is bounded
//! on both sides by the peer's credits and one's own, a rank can take in messages whatever else it does, and no two ranks
//! wait for each other's queues.

use std::collections::VecDeque;

use super::handlers::Handlers;
use super::message::{self, BODY_BYTES_MAX, FRAME_BYTES_MAX, Message, Way};
use crate::error::CommError;
use crate::rank::Rank;
use crate::transport::Transport;
use crate::wire::frame::{Decoded, Decoder};

/// Requests to one peer that are not answered: some hide the way there and back, more would only wait there.
pub(super) const CREDITS: usize = 16;
/// Requests that wait for credits; who has more waits too.
const WAITING_MAX: usize = 64;

/// What becomes of an answer, or of an error. It says what is wrong with an answer that it has not taken, and is then told
/// of the error that this is.
pub(super) type Done = Box<dyn FnMut(Result<Message<'_>, CommError>) -> Result<(), String>>;

/// A request on its way, or that is being answered.
pub(super) struct Awaiting {
    pub phase: &'static str,
    pub done: Done,
}

/// A request that has not left.
pub(super) struct Request {
    pub handler: u16,
    pub arguments: [u64; message::ARGUMENTS],
    pub payload: Vec<u8>,
    pub awaiting: Awaiting,
}

/// Why no message comes from a peer any more.
#[derive(Debug)]
pub(super) enum Ended {
    Gone(String),
    Violation(String),
}

/// See the module.
pub(super) struct Link {
    peer: Rank,
    waiting: VecDeque<Request>,
    awaiting: VecDeque<Awaiting>,
    /// Frames, and whether they are answers.
    out: VecDeque<(Vec<u8>, bool)>,
    /// Bytes of the first frame that have left.
    sent: usize,
    unsent_answers: usize,
    sequence: u64,
    decoder: Decoder,
    input: Vec<u8>,
    filled: usize,
    /// Nothing can be sent; what had come before is still read.
    deaf: bool,
    gone: Option<String>,
}

impl Link {
    pub fn new(peer: Rank) -> Self {
        Self {
            peer,
            waiting: VecDeque::new(),
            awaiting: VecDeque::new(),
            out: VecDeque::new(),
            sent: 0,
            unsent_answers: 0,
            sequence: 0,
            decoder: Decoder::new(BODY_BYTES_MAX as u32),
            input: Vec::new(),
            filled: 0,
            deaf: false,
            gone: None,
        }
    }

    /// Why the peer is gone, once it is.
    pub fn gone(&self) -> Option<&str> {
        self.gone.as_deref()
    }

    /// Whether another request may be handed over.
    pub fn has_room(&self) -> bool {
        self.waiting.len() < WAITING_MAX
    }

    /// Whether answers of the peer are due.
    pub fn owes(&self) -> bool {
        !(self.waiting.is_empty() && self.awaiting.is_empty())
    }

    /// Whether something is left to hand to the transport.
    pub fn is_sending(&self) -> bool {
        !self.out.is_empty()
    }

    pub fn push(&mut self, request: Request) {
        self.waiting.push_back(request);
        self.promote();
    }

    /// Requests for which there are credits may leave.
    fn promote(&mut self) {
        while self.awaiting.len() < CREDITS
            && let Some(Request { handler, arguments, payload, awaiting }) = self.waiting.pop_front()
        {
            self.frame(Way::Request(handler), &Message { arguments, payload: &payload });
            self.awaiting.push_back(awaiting);
        }
    }

    fn frame(&mut self, way: Way, message: &Message<'_>) {
        let is_answer = way == Way::Answer;
        if !self.deaf {
            self.out.push_back((message::encode(way, self.sequence, message), is_answer));
            self.unsent_answers += usize::from(is_answer);
        }
        self.sequence += 1;
    }

    /// Sends what the transport takes; whether that was anything.
    pub fn send(&mut self, transport: &mut Transport) -> bool {
        let mut moved = false;
        while let Some((frame, is_answer)) = self.out.front() {
            let Ok(count) = transport.try_send(self.peer, &frame[self.sent..]) else {
                // Reading says what had come before the end, and then why it came.
                self.deaf = true;
                self.out.clear();
                (self.sent, self.unsent_answers) = (0, 0);
                return true;
            };
            if count == 0 {
                break;
            }
            moved = true;
            self.sent += count;
            if self.sent == frame.len() {
                self.unsent_answers -= usize::from(*is_answer);
                self.out.pop_front();
                self.sent = 0;
            }
        }
        moved
    }

    /// Reads what has come, runs handlers and completes requests; whether anything came.
    pub fn receive(&mut self, transport: &mut Transport, handlers: &mut Handlers) -> Result<bool, Ended> {
        let mut input = std::mem::take(&mut self.input);
        // Room for the rest of any frame, always.
        input.resize(2 * FRAME_BYTES_MAX, 0);
        let taken = transport.try_receive(self.peer, &mut input[self.filled..]);
        let (count, mut start) = (taken.map_err(Ended::Gone)?, 0);
        self.filled += count;
        loop {
            match self.decoder.decode(&input[start..self.filled]) {
                Ok(Decoded::Needs(_)) => break,
                Ok(Decoded::Frame { kind, payload, taken }) => {
                    start += taken;
                    self.take(kind, payload, handlers).map_err(Ended::Violation)?;
                }
                Err(error) => return Err(Ended::Violation(error.to_string())),
            }
        }
        input.copy_within(start..self.filled, 0);
        self.filled -= start;
        self.input = input;
        self.promote();
        Ok(count > 0)
    }

    fn take(&mut self, kind: u16, body: &[u8], handlers: &mut Handlers) -> Result<(), String> {
        match message::decode(kind, body)? {
            (Way::Answer, message) => {
                let awaiting = self.awaiting.front_mut().ok_or("an answer to nothing")?;
                (awaiting.done)(Ok(message)).map_err(|what| format!("answer to {}: {what}", awaiting.phase))?;
                self.awaiting.pop_front();
                Ok(())
            }
            (Way::Request(number), message) => {
                // Who keeps to the credits has no more than these that it was not answered.
                if self.unsent_answers >= CREDITS {
                    return Err(format!("more than {CREDITS} requests at once"));
                }
                let answer = handlers.run(number, self.peer, message)?;
                self.frame(Way::Answer, &answer.message());
                Ok(())
            }
        }
    }

    /// Ends it: nothing more is sent, and whatever was due fails with this error.
    pub fn end(&mut self, reason: &str, error: impl Fn(&'static str) -> CommError) {
        self.gone = Some(reason.to_owned());
        self.deaf = true;
        self.out.clear();
        let waiting = self.waiting.drain(..).map(|request| request.awaiting);
        for Awaiting { phase, mut done } in self.awaiting.drain(..).chain(waiting) {
            // It has nothing to say against an error.
            let _ = done(Err(error(phase)));
        }
    }
}
