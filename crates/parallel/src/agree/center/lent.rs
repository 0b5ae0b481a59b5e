//! A centre that lies in a memory box (ShmCaffe's SEASGD): workers read it and add to it by themselves, and the server,
//! whose memory it is or who has borrowed it, takes no part in that.
//!
//! In a box there is one region for every server's part of the centre Wg, and one for each worker's increment ΔWx of it.
//! A worker at Wx reads Wg; ΔWx = a(Wx − Wg); Wx −= ΔWx; it writes ΔWx and has the box add it to Wg. All of that is done
//! by a thread beside its steps, and the last of it behind the worker's back, while later steps are computed.
//!
//! How often Wg has changed between reading and adding is what an increment has missed: the box tells both versions.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use paceline_comm::error::Party;
use paceline_comm::memory_box::{Lending, OwnBox, StripedRegion, Stripes, Whereabouts};
use paceline_comm::{CommError, Rank};
use paceline_system::memory;

use super::super::Votes;
use super::link::PHASE;
use super::message::Layout;

/// A server's end.
pub(super) struct Lent {
    client: Option<Stripes>,
    center: StripedRegion,
    /// Votes, as the server has heard them.
    board: StripedRegion,
    told: Votes,
    whereabouts: Whereabouts,
    own: Option<OwnBox>,
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("whereabouts", &self.whereabouts).field("is_own", &self.own.is_some()).finish()
    }
}

/// Bytes of the votes.
const BOARD: usize = 12;

impl Lent {
    /// Lays a server's part of the centre into a box: one of its own, or those that the run has been given.
    pub fn start(rank: Rank, lending: &Lending, center: &[f32]) -> Result<Self, CommError> {
        let failed = |source| CommError::System { rank, what: "lend memory", source };
        let own = lending.is_own().then(|| OwnBox::start(lending)).transpose().map_err(failed)?;
        let whereabouts = Whereabouts::new(own.as_ref());
        let client = lending.connect(rank, &whereabouts)?;
        let bytes = size_of_val(center).max(4) as u64;
        let center_region = client.create(&lending.key(&whereabouts, "centre"), bytes)?;
        let board = client.create(&lending.key(&whereabouts, "board"), BOARD as u64)?;
        let lent =
            Self { client: Some(client), center: center_region, board, told: Votes::default(), whereabouts, own };
        lent.put(center)?;
        Ok(lent)
    }

    fn client(&self) -> &Stripes {
        self.client.as_ref().expect("it is there until it is dropped")
    }

    pub fn whereabouts(&self) -> Whereabouts {
        self.whereabouts
    }

    /// The centre as it is.
    pub fn get(&self, center: &mut [f32]) -> Result<(), CommError> {
        if center.is_empty() {
            return Ok(());
        }
        self.client().read(&self.center, 0, cast_slice_mut(center)).map(|_| ())
    }

    /// The centre as it shall be.
    pub fn put(&self, center: &[f32]) -> Result<(), CommError> {
        if center.is_empty() {
            return Ok(());
        }
        self.client().write(&self.center, 0, cast_slice(center)).map(|_| ())
    }

    /// What all wish, for those who read it there.
    pub fn tell(&mut self, votes: Votes) -> Result<(), CommError> {
        if std::mem::replace(&mut self.told, votes) == votes {
            return Ok(());
        }
        let Votes { interrupted, time_limit, checkpoint } = votes;
        let words: [u32; 3] = [interrupted, time_limit, checkpoint];
        self.client().write(&self.board, 0, cast_slice(&words)).map(|_| ())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Connections end before the box does.
        self.client = None;
        drop(self.own.take());
    }
}

/// A worker's end.
pub(super) struct Borrowed {
    parts: Vec<Part>,
    /// a
    rate: f32,
    room: Vec<f32>,
}

/// One server's part.
struct Part {
    /// Its server, and the box that is that server's own.
    at: (Rank, bool),
    client: Arc<Stripes>,
    range: Range<usize>,
    center: StripedRegion,
    increment: StripedRegion,
    board: StripedRegion,
    /// Of the centre when it was read.
    version: u64,
}

impl Borrowed {
    /// Finds all parts of the centre, and makes a place for this worker's increment beside each.
    pub fn find(
        lending: &Lending,
        (rank, layout): (Rank, &Layout),
        rate: f32,
        told: impl Fn(usize) -> (Whereabouts, Rank),
    ) -> Result<Self, CommError> {
        let mut parts = Vec::new();
        for server in 0..layout.roles.servers {
            let ((whereabouts, at), range) = (told(server), layout.part(server));
            let find = || {
                let client = Arc::new(lending.connect(rank, &whereabouts)?);
                let bytes = 4 * range.len().max(1) as u64;
                let center = client.attach(&lending.key(&whereabouts, "centre"), bytes)?;
                let board = client.attach(&lending.key(&whereabouts, "board"), BOARD as u64)?;
                let increment = client.create(&lending.key_of_nobody(), bytes)?;
                Ok(Part {
                    at: (at, whereabouts.is_own()),
                    client,
                    range: range.clone(),
                    center,
                    increment,
                    board,
                    version: 0,
                })
            };
            parts.push(find().map_err(|error| whose(error, (at, whereabouts.is_own())))?);
        }
        let longest = parts.iter().map(|part| part.range.len()).max().unwrap_or(0);
        let room = memory::zeros(longest, "the centre, as it was read").unwrap_or_else(|refused| refused.unwind());
        Ok(Self { parts, rate, room })
    }

    /// Reads the centre, makes of a worker's weights its increment, and writes that. What all wish is told.
    pub fn read_and_write(&mut self, weights: &mut [f32]) -> Result<Votes, CommError> {
        let Self { parts, rate, room } = self;
        for part in parts.iter_mut().filter(|part| !part.range.is_empty()) {
            let (center, weights) = (&mut room[..part.range.len()], &mut weights[part.range.clone()]);
            let mut exchange = || {
                part.version = part.client.read(&part.center, 0, cast_slice_mut(center))?;
                increment(*rate, center, weights);
                part.client.write(&part.increment, 0, cast_slice(weights))
            };
            exchange().map_err(|error| whose(error, part.at))?;
        }
        let mut words = [0u32; 3];
        if let Some(part) = parts.first() {
            let read = part.client.read(&part.board, 0, cast_slice_mut(&mut words));
            read.map_err(|error| whose(error, part.at))?;
        }
        let [interrupted, time_limit, checkpoint] = words;
        Ok(Votes { interrupted, time_limit, checkpoint })
    }

    /// Has what was written added to the centre; how many other increments that has missed.
    pub fn accumulate(&mut self) -> Result<u64, CommError> {
        let mut missed = 0;
        for part in self.parts.iter().filter(|part| !part.range.is_empty()) {
            let all = (0, 4 * part.range.len() as u64);
            let added = part.client.accumulate(&part.center, &part.increment, all, 1.0);
            let version = added.map_err(|error| whose(error, part.at))?;
            missed = missed.max(version.saturating_sub(part.version + 1));
        }
        Ok(missed)
    }
}

/// ΔWx = a(Wx − Wg), in the place of Wx.
pub(super) fn increment(rate: f32, center: &[f32], weights: &mut [f32]) {
    weights.iter_mut().zip(center).for_each(|(x, center)| *x = rate * (*x - center));
}

/// A server's own box is gone with the server.
fn whose(error: CommError, (server, own): (Rank, bool)) -> CommError {
    match error {
        CommError::PeerGone { rank, peer: Party::Address(place), reason, .. } if own => {
            CommError::PeerGone { rank, peer: server.into(), phase: PHASE, reason: format!("{place}: {reason}") }
        }
        other => other,
    }
}
