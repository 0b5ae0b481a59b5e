//! Samples that lie on another machine: a server hands out a listing and items by number, each as bytes whose meaning is the caller's.
//!
//! A connection opens with the greeting of all others (token, roles, TLS where both ends say so), for [`Purpose::Samples`]. Then questions
//! and answers alternate. A dialler that wants several items at once opens several connections: a loader's threads have one each. Nothing
//! here knows what a sample is; `data` reads the bytes, and what comes is held against bounds before memory is taken for it.

mod client;
mod server;
mod talk;

use std::time::Duration;

pub use client::Client;
pub use server::{Server, ServerOptions};
pub use talk::{Answer, Question, What, challenge};

use paceline_comm::wire::{Identity, Purpose, Role};
use paceline_comm::{Rank, Token};

/// The most bytes of a listing: two million names of thirty letters.
pub const LISTING_BYTES_MAX: u64 = 64 << 20;

/// The most bytes of any answer: a server holds one for each connection.
pub const ANSWER_BYTES_MAX: u64 = 1 << 30;

/// How long a greeting and how long each piece of an answer may take.
const GREETING_MAX: Duration = Duration::from_secs(10);
const PIECE_MAX: Duration = Duration::from_secs(60);

/// The two ends, as a greeting calls them: the server, and whoever asks it.
const SERVER: Rank = Rank(0);
const ASKER: Rank = Rank(1);

/// Who one end is. A server belongs to no run, so that several can ask it.
fn identity(token: &Token, role: Role) -> Identity {
    let (own, other) = if role == Role::Listener { (SERVER, ASKER) } else { (ASKER, SERVER) };
    Identity::new(token, Purpose::Samples, role, own, 2).expecting(other)
}
