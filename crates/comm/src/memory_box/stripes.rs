//! Several boxes as one: a region's stripes go round them, so that their memory and their links add up.
//!
//! A stripe is whole or not there, as in one box; stripes of one call that different boxes have are each of a version of
//! their own. What is waited for is at the first box.

use std::net::SocketAddr;
use std::time::Duration;

use paceline_system::threads;

use super::client::{BoxClient, ClientOptions, LentRegion};
use super::talk::{Key, Usage};
use crate::error::CommError;

/// Bytes of a stripe: enough that a message is worth its latency.
const STRIPE_BYTES: u64 = 1 << 20;

/// Boxes that are used together.
#[derive(Debug)]
pub struct Stripes {
    boxes: Vec<BoxClient>,
}

/// A region that all of them have a part of.
#[derive(Clone, Debug)]
pub struct StripedRegion {
    parts: Vec<LentRegion>,
    bytes: u64,
}

impl StripedRegion {
    /// Its length.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Where a piece of a call is: at which box, where in its part of the region, and which bytes of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    at: u64,
    start: usize,
    length: usize,
}

/// A call's pieces for each box. Stripes of one box that follow each other there are one piece for each stripe.
fn pieces(boxes: usize, at: u64, bytes: usize) -> Vec<Vec<Piece>> {
    let mut all = vec![Vec::new(); boxes];
    let mut start = 0;
    while start < bytes {
        let position = at + start as u64;
        let (stripe, within) = (position / STRIPE_BYTES, position % STRIPE_BYTES);
        let length = ((STRIPE_BYTES - within) as usize).min(bytes - start);
        let local = stripe / boxes as u64 * STRIPE_BYTES + within;
        all[(stripe % boxes as u64) as usize].push(Piece { at: local, start, length });
        start += length;
    }
    all
}

/// Bytes of a region's part at a box. Of several, each has some, so that there is a region.
fn part_bytes(boxes: usize, index: usize, bytes: u64) -> u64 {
    if boxes == 1 {
        return bytes;
    }
    let (boxes, index) = (boxes as u64, index as u64);
    let (whole, rest) = (bytes / STRIPE_BYTES, bytes % STRIPE_BYTES);
    let of_rest = if whole % boxes == index { rest } else { 0 };
    let stripes = whole / boxes + u64::from(index < whole % boxes);
    (stripes * STRIPE_BYTES + of_rest).max(8)
}

impl Stripes {
    /// Reaches all boxes. Everybody who shares regions names them in the same order.
    ///
    /// # Errors
    /// When one of them does not answer.
    ///
    /// # Panics
    /// When there is none: a bug.
    pub fn connect(addresses: &[SocketAddr], options: &ClientOptions) -> Result<Self, CommError> {
        let boxes: Result<_, _> = addresses.iter().map(|address| BoxClient::connect(*address, options)).collect();
        Ok(Self::of(boxes?))
    }

    /// Boxes that have been reached, in the order in which everybody names them.
    ///
    /// # Panics
    /// When there is none: a bug.
    pub fn of(boxes: Vec<BoxClient>) -> Self {
        assert!(!boxes.is_empty(), "a memory box has an address");
        Self { boxes }
    }

    /// How many boxes there are.
    pub const fn count(&self) -> usize {
        self.boxes.len()
    }

    /// Whether all of them are on this host.
    pub fn is_mapped(&self) -> bool {
        self.boxes.iter().all(BoxClient::is_mapped)
    }

    fn on_all<T: Send, R: Send>(
        &self,
        shares: Vec<T>,
        work: impl Fn(usize, &BoxClient, T) -> Result<R, CommError> + Sync,
    ) -> Result<Vec<R>, CommError> {
        let with = |((index, client), share): ((usize, &BoxClient), T)| work(index, client, share);
        if self.boxes.len() == 1 {
            return self.boxes.iter().enumerate().zip(shares).map(with).collect();
        }
        threads::all(self.boxes.iter().enumerate().zip(shares), with).into_iter().collect()
    }

    /// Of all parts.
    fn lengths(&self, bytes: u64) -> Vec<u64> {
        (0..self.count()).map(|index| part_bytes(self.count(), index, bytes)).collect()
    }

    /// As [`BoxClient::create`].
    ///
    /// # Errors
    /// As there.
    pub fn create(&self, key: &Key, bytes: u64) -> Result<StripedRegion, CommError> {
        self.made(bytes, |client, length| client.create(key, length))
    }

    /// Makes all parts, or none: one that is there although another cannot be would keep its name from everybody.
    fn made(
        &self,
        bytes: u64,
        make: impl Fn(&BoxClient, u64) -> Result<LentRegion, CommError> + Sync,
    ) -> Result<StripedRegion, CommError> {
        let tried = self.on_all(self.lengths(bytes), |_, client, length| Ok(make(client, length)))?;
        if tried.iter().any(Result::is_err) {
            for (client, part) in self.boxes.iter().zip(&tried) {
                // What went wrong first is what is told.
                let _ = part.as_ref().map(|part| client.free(part));
            }
        }
        Ok(StripedRegion { parts: tried.into_iter().collect::<Result<_, _>>()?, bytes })
    }

    /// As [`BoxClient::create_kept`].
    ///
    /// # Errors
    /// As there.
    pub fn create_kept(&self, key: &Key, bytes: u64) -> Result<StripedRegion, CommError> {
        self.made(bytes, |client, length| client.create_kept(key, length))
    }

    /// As [`BoxClient::attach`], of a region whose length is what its parts say.
    ///
    /// # Errors
    /// As there, and when it is so short that some parts only stand for it: then its length has to be said.
    pub fn find(&self, key: &Key) -> Result<StripedRegion, CommError> {
        let parts = self.on_all(vec![(); self.boxes.len()], |_, client, ()| client.attach(key))?;
        let bytes = parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes()));
        let fits = |(index, part): (usize, &LentRegion)| part.bytes() == part_bytes(parts.len(), index, bytes);
        if parts.iter().enumerate().all(fits) {
            return Ok(StripedRegion { parts, bytes });
        }
        let what = "how long the region is does not follow from its parts; say its length".into();
        Err(CommError::Failed { rank: super::BORROWER, phase: "memory box", what })
    }

    /// As [`BoxClient::attach`], of a region whose length is known.
    ///
    /// # Errors
    /// As there, and when it has another length.
    pub fn attach(&self, key: &Key, bytes: u64) -> Result<StripedRegion, CommError> {
        let parts = self.on_all(self.lengths(bytes), |_, client, length| {
            let part = client.attach(key)?;
            if part.bytes() == length {
                return Ok(part);
            }
            let what = format!("a region of {} bytes where {length} belong", part.bytes());
            Err(CommError::Failed { rank: super::BORROWER, phase: "borrowing memory", what })
        })?;
        Ok(StripedRegion { parts, bytes })
    }

    /// As [`BoxClient::free`].
    ///
    /// # Errors
    /// As there.
    pub fn free(&self, region: &StripedRegion) -> Result<(), CommError> {
        let shares = region.parts.iter().collect();
        self.on_all(shares, |_, client, part| client.free(part)).map(drop)
    }

    /// As [`BoxClient::read`]; the version of the first box's part.
    ///
    /// # Errors
    /// As there.
    pub fn read(&self, region: &StripedRegion, at: u64, bytes: &mut [u8]) -> Result<u64, CommError> {
        if let [client] = &self.boxes[..] {
            return client.read(&region.parts[0], at, bytes);
        }
        let mut shares: Vec<Vec<(u64, &mut [u8])>> = self.boxes.iter().map(|_| Vec::new()).collect();
        let mut order: Vec<(usize, Piece)> = Vec::new();
        for (index, pieces) in pieces(self.boxes.len(), at, bytes.len()).into_iter().enumerate() {
            order.extend(pieces.into_iter().map(|piece| (index, piece)));
        }
        order.sort_by_key(|(_, piece)| piece.start);
        let mut rest = bytes;
        for (index, piece) in order {
            let (now, later) = rest.split_at_mut(piece.length);
            shares[index].push((piece.at, now));
            rest = later;
        }
        let versions = self.on_all(shares, |index, client, share| {
            share.into_iter().try_fold(0, |_, (at, bytes)| client.read(&region.parts[index], at, bytes))
        })?;
        Ok(versions[0])
    }

    /// As [`BoxClient::write`], stripe by stripe.
    ///
    /// # Errors
    /// As there.
    pub fn write(&self, region: &StripedRegion, at: u64, bytes: &[u8]) -> Result<u64, CommError> {
        if let [client] = &self.boxes[..] {
            return client.write(&region.parts[0], at, bytes);
        }
        let shares = pieces(self.boxes.len(), at, bytes.len());
        let versions = self.on_all(shares, |index, client, share| {
            share.into_iter().try_fold(0, |_, Piece { at, start, length }| {
                client.write(&region.parts[index], at, &bytes[start..start + length])
            })
        })?;
        Ok(versions[0])
    }

    /// As [`BoxClient::add`], stripe by stripe.
    ///
    /// # Errors
    /// As there.
    pub fn add(&self, region: &StripedRegion, at: u64, numbers: &[f32], scale: f32) -> Result<u64, CommError> {
        if let [client] = &self.boxes[..] {
            return client.add(&region.parts[0], at, numbers, scale);
        }
        let shares = pieces(self.boxes.len(), at, size_of_val(numbers));
        let versions = self.on_all(shares, |index, client, share| {
            share.into_iter().try_fold(0, |_, Piece { at, start, length }| {
                client.add(&region.parts[index], at, &numbers[start / 4..(start + length) / 4], scale)
            })
        })?;
        Ok(versions[0])
    }

    /// As [`BoxClient::accumulate`], of equal places in two regions.
    ///
    /// # Errors
    /// As there.
    pub fn accumulate(
        &self,
        target: &StripedRegion,
        source: &StripedRegion,
        (at, bytes): (u64, u64),
        scale: f32,
    ) -> Result<u64, CommError> {
        let shares = pieces(self.boxes.len(), at, bytes as usize);
        let versions = self.on_all(shares, |index, client, share| {
            let Some((first, last)) = share.first().zip(share.last()) else { return Ok(0) };
            // Stripes that a box has of one call follow each other there.
            let bytes = last.at + last.length as u64 - first.at;
            client.accumulate((&target.parts[index], first.at), (&source.parts[index], first.at), bytes, scale)
        })?;
        Ok(versions[0])
    }

    /// As [`BoxClient::fetch_add`], at the box that has the number.
    ///
    /// # Errors
    /// As there.
    pub fn fetch_add(&self, region: &StripedRegion, at: u64, by: i64) -> Result<i64, CommError> {
        let boxes = self.boxes.len() as u64;
        let (stripe, within) = (at / STRIPE_BYTES, at % STRIPE_BYTES);
        let index = (stripe % boxes) as usize;
        self.boxes[index].fetch_add(&region.parts[index], stripe / boxes * STRIPE_BYTES + within, by)
    }

    /// As [`BoxClient::notify`], at the first box.
    ///
    /// # Errors
    /// As there.
    pub fn notify(&self, region: &StripedRegion) -> Result<u64, CommError> {
        self.boxes[0].notify(&region.parts[0])
    }

    /// As [`BoxClient::wait`], at the first box.
    ///
    /// # Errors
    /// As there.
    pub fn wait(&self, region: &StripedRegion, version: u64, limit: Duration) -> Result<u64, CommError> {
        self.boxes[0].wait(&region.parts[0], version, limit)
    }

    /// As [`BoxClient::usage`], of all boxes together.
    ///
    /// # Errors
    /// As there.
    pub fn usage(&self) -> Result<Usage, CommError> {
        let all = self.on_all(vec![(); self.boxes.len()], |_, client, ()| client.usage())?;
        let together = |sum: Usage, one: Usage| Usage {
            regions: sum.regions + one.regions,
            clients: sum.clients + one.clients,
            used: sum.used + one.used,
            bytes_max: sum.bytes_max + one.bytes_max,
        };
        Ok(all.into_iter().fold(Usage::default(), together))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_every_byte_once_and_follow_each_other_at_a_box() {
        for (boxes, at, bytes) in [(1, 0, 10), (2, 5, 3 << 20), (3, (1 << 20) - 1, (7 << 20) + 3), (4, 9 << 20, 100)] {
            let all = pieces(boxes, at, bytes);
            let mut seen: Vec<(usize, usize)> =
                all.iter().flatten().map(|piece| (piece.start, piece.start + piece.length)).collect();
            seen.sort_unstable();
            assert_eq!(seen.first().unwrap().0, 0);
            assert!(seen.windows(2).all(|pair| pair[0].1 == pair[1].0));
            assert_eq!(seen.last().unwrap().1, bytes);
            for of_box in &all {
                assert!(of_box.windows(2).all(|pair| pair[0].at + pair[0].length as u64 == pair[1].at));
            }
        }
    }

    #[test]
    fn parts_hold_every_piece_of_the_region() {
        for bytes in [1, 100, 1 << 20, (5 << 20) + 17] {
            for boxes in 1..4 {
                let all: u64 = pieces(boxes, 0, bytes).iter().flatten().map(|piece| piece.length as u64).sum();
                assert_eq!(all, bytes as u64);
                for (index, pieces) in pieces(boxes, 0, bytes).iter().enumerate() {
                    let part = part_bytes(boxes, index, bytes as u64);
                    let end = pieces.iter().map(|piece| piece.at + piece.length as u64).max().unwrap_or(0);
                    assert_eq!(part, if boxes == 1 { end } else { end.max(8) });
                }
            }
        }
    }
}
