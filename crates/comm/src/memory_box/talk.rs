//! What a client and a box say to each other, and how it travels: pure functions over bytes.
//!
//! A message is a frame (`wire/frame.rs`): its kind says what is asked or answered, fields of fixed length come first, and
//! what is left of it is data. Whatever the bytes are, they decode to something in range or to a sentence.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::error::CommError;

/// The longest time that somebody may ask to wait.
pub const WATCH_MAX: Duration = Duration::from_secs(10);

/// A region's name and what opens it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// A digest of the name, which is known to many.
    pub name: [u8; 32],
    /// The access token, which is known to those who may.
    pub secret: [u8; 16],
}

/// A part of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it begins.
    pub at: u64,
    /// Its length.
    pub bytes: u64,
}

impl Span {
    pub(super) fn is_of_floats(self) -> bool {
        self.at.is_multiple_of(4) && self.bytes.is_multiple_of(4)
    }

    /// The bytes of the nth page that it touches, from that page's beginning.
    pub(super) fn of_page(self, page: u64, nth: usize) -> Range<u64> {
        let start = (self.at / page + nth as u64) * page;
        self.at.saturating_sub(start).min(page)..(self.at + self.bytes).saturating_sub(start).min(page)
    }
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ask {
    /// Memory under a key, full of zeros.
    Create {
        /// By which others find it.
        key: Key,
        /// How much.
        bytes: u64,
        /// Whether it stays when the last one who has it is gone.
        keeps: bool,
    },
    /// What is there under a key.
    Attach {
        /// The key.
        key: Key,
    },
    /// Takes the key away, and the memory once nobody looks at it.
    Free {
        /// The region.
        region: u64,
    },
    /// Holds on to a span as it is.
    Open {
        /// The region.
        region: u64,
        /// What of it.
        span: Span,
    },
    /// Places to write what a span is to become.
    Draft {
        /// The region.
        region: u64,
        /// What of it.
        span: Span,
    },
    /// Lets go of what was opened, or gives a draft up.
    Close {
        /// Its number.
        held: u64,
    },
    /// Makes a draft the region's pages once so many bytes of it have come, or adds it to them.
    Commit {
        /// Its number.
        draft: u64,
        /// As many as must have come.
        bytes: u64,
        /// How often it is added; it replaces what is there without.
        scale: Option<f32>,
    },
    /// Adds numbers of another region, in the box.
    Accumulate {
        /// The region that changes, and what of it.
        target: (u64, Span),
        /// The region that is added.
        source: u64,
        /// Where in it.
        from: u64,
        /// How often.
        scale: f32,
    },
    /// Adds to a number of 64 bits.
    Count {
        /// The region.
        region: u64,
        /// Where the number is.
        at: u64,
        /// What is added.
        by: i64,
    },
    /// Says that something has happened: a new version without a change.
    Notify {
        /// The region.
        region: u64,
    },
    /// Waits for a version.
    Watch {
        /// The region.
        region: u64,
        /// The version.
        version: u64,
        /// How long at most.
        limit: Duration,
    },
    /// How much is lent.
    Usage,
}

/// How much is lent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Regions.
    pub regions: u64,
    /// Clients.
    pub clients: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that may be.
    pub bytes_max: u64,
}

/// What a box answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// A region.
    Region {
        /// Its number.
        region: u64,
        /// Its length.
        bytes: u64,
        /// How often it has changed.
        version: u64,
    },
    /// What is held.
    Held {
        /// Its number.
        number: u64,
        /// Of a view, how often the region had changed.
        version: u64,
        /// Where its pages are.
        places: Arc<[u32]>,
    },
    /// It is done.
    Done {
        /// How often the region has changed.
        version: u64,
    },
    /// How much is lent.
    Usage(Usage),
    /// It is not.
    No(No),
}

/// Why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum No {
    /// Nothing is known of the client.
    #[error("this connection has not said who it is")]
    Stranger = 1,
    /// There is no such region, or the key is wrong.
    #[error("no region is open to this key or number")]
    Unknown = 2,
    /// A region of the name is there.
    #[error("a region of this name is there already")]
    Taken = 3,
    /// Outside of the region.
    #[error("this is not inside of the region, or not where numbers are")]
    Outside = 4,
    /// The box is full.
    #[error("the box is full: start it with a larger --limit")]
    Full = 5,
    /// The client has as much as it may.
    #[error("this client has as much memory as one may have: start the box with a larger --quota")]
    Quota = 6,
    /// Too much is held at the moment.
    #[error("so many versions of the region are being read or written that there is no place for another")]
    Busy = 7,
    /// The machine has no more memory.
    #[error("the machine has no more memory")]
    Memory = 8,
}

impl No {
    const ALL: [Self; 8] =
        [Self::Stranger, Self::Unknown, Self::Taken, Self::Outside, Self::Full, Self::Quota, Self::Busy, Self::Memory];

    /// What a box has said, of what a call of a client has failed with.
    pub fn of(error: &CommError) -> Option<Self> {
        let CommError::Failed { what, .. } = error else { return None };
        Self::ALL.into_iter().find(|no| no.to_string() == *what)
    }
}

mod codec;

pub use codec::{Message, Reply};
