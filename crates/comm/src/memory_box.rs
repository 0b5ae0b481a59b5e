//! The memory box: a server lends memory to processes of its own and of other hosts.
//!
//! A client makes a *region* under a *key* (a name, and an access token that opens it), and others with the key attach it.
//! They read it, write it, have one region added to another by the box, count in it, and wait for its next version.
//! Processes on the box's host map a region's memory; others send messages over TCP, which one side begins and no other
//! program has to take part in.
//!
//! | file | what it is |
//! |---|---|
//! | `state.rs` | whose turn it is: a pure state machine, in which nothing is ever half written |
//! | `talk.rs` | what is said, as bytes |
//! | `extent.rs` | a region's memory |
//! | `pool.rs` | memory that the system has given in advance |
//! | `server.rs`, `server/` | the shell around the state machine: connections, threads |
//! | `client.rs` | one box |
//! | `stripes.rs` | several boxes as one |
//! | `lending.rs` | the boxes of a run |

mod client;
mod extent;
mod lending;
mod line;
mod pool;
pub mod server;
pub mod state;
mod stripes;
pub mod talk;

pub use client::{BoxClient, ClientOptions, LentRegion};
pub use lending::{Lending, OwnBox, WHEREABOUTS, Whereabouts};
pub use server::{BoxServer, ServerOptions};
pub use state::Limits;
pub use stripes::{StripedRegion, Stripes};
pub use talk::{Key, No, Usage};

use crate::rank::Rank;
use crate::token::Token;
use crate::wire::{Identity, Purpose, Role};

/// The two ends, as a greeting calls them: the box, and whoever borrows.
const BOX: Rank = Rank(0);
const BORROWER: Rank = Rank(1);

/// Who one end is. A box belongs to no run, so that several can use it.
fn identity(token: &Token, role: Role) -> Identity {
    let (own, other) = if role == Role::Listener { (BOX, BORROWER) } else { (BORROWER, BOX) };
    Identity::new(token, Purpose::MemoryBox, role, own, 2).expecting(other)
}

/// The name of the socket at which a box hands out memory on its own host.
fn local_name(name: &[u8; 16]) -> String {
    let digits: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("paceline-box-{digits}")
}
