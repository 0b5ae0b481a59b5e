//! The table of what messages may start: written before a space begins, the same on all ranks, and closed from then on.
//! Calls with types of the caller's own are in [`super::function`].

use std::fmt;

use paceline_system::random;

use super::message::{Answer, HANDLERS_MAX, Message, PAYLOAD_BYTES_MAX};
use crate::rank::Rank;

/// What runs where a message arrives. It only computes: it waits for nothing and sends nothing but its answer. The error
/// says what is wrong with the message, and ends the space of who got it.
type Handler = Box<dyn FnMut(Rank, Message<'_>) -> Result<Answer, String>>;

/// Handlers by number.
#[derive(Default)]
pub struct Handlers(Vec<(String, Handler)>);

impl Handlers {
    /// A table without any.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a handler under a name that is the same on all ranks, and gives its number.
    ///
    /// # Panics
    /// When there is another one of this name, or there are too many: a bug.
    pub fn add(
        &mut self,
        name: &str,
        handler: impl FnMut(Rank, Message<'_>) -> Result<Answer, String> + 'static,
    ) -> u16 {
        assert!(self.0.iter().all(|(other, _)| other != name), "there are two handlers `{name}`");
        assert!(self.0.len() < HANDLERS_MAX, "there are too many handlers");
        self.0.push((name.to_owned(), Box::new(handler)));
        (self.0.len() - 1) as u16
    }

    /// A number that two tables share only if they have the same names in the same order.
    pub(super) fn key(&self) -> u64 {
        random::key(&self.0.iter().map(|(name, _)| random::key_of_text(name)).collect::<Vec<_>>())
    }

    /// Runs the handler of this number on what a rank has sent.
    pub(super) fn run(&mut self, number: u16, from: Rank, message: Message<'_>) -> Result<Answer, String> {
        let count = self.0.len();
        let Some((name, handler)) = self.0.get_mut(usize::from(number)) else {
            return Err(format!("handler {number}, where there are {count}"));
        };
        let answer = handler(from, message).map_err(|what| format!("`{name}`: {what}"))?;
        if answer.payload.len() > PAYLOAD_BYTES_MAX {
            return Err(format!("`{name}`: its answer would take {} bytes", answer.payload.len()));
        }
        Ok(answer)
    }
}

impl fmt::Debug for Handlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}
