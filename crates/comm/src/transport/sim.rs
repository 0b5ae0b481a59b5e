//! A network that does not exist: virtual time, seeded chance, a menu of faults. It moves real bytes, so results can be
//! checked, and runs the lists of a thousand ranks in one thread (`drive.rs`) with the interpreter that runs real ones.
//!
//! A rank has one card: its bytes leave one after the other at the link's bandwidth and arrive a latency later. What
//! is not modelled: contention at the receiver and inside switches.

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paceline_system::random::Random;

use crate::cost::Link;
use crate::rank::Rank;

mod drive;
mod fault;
#[cfg(test)]
mod tests;

pub use drive::{Finish, Part, Trial, drive, drive_groups};
pub use fault::Fault;

/// Bytes a rank may hand to its card before they have left.
const CARD_BYTES: f64 = 131_072.0;
/// Bytes that leave and arrive as one: small enough that passing them on overlaps with receiving.
const PACKET_BYTES: usize = 16 << 10;
/// What a lost packet costs before it is sent again: the usual floor of TCP's retransmission timer.
const RESEND_NS: u64 = 200_000_000;

/// Virtual nanoseconds.
pub(super) type Instant = u64;

#[derive(Debug, Default)]
struct Pipe {
    /// What is under way, by arrival.
    packets: VecDeque<(Instant, VecDeque<u8>)>,
}

/// The state of the virtual network.
#[derive(Debug)]
struct Network {
    link: Link,
    faults: Vec<Fault>,
    now: Instant,
    /// When each rank's card will have sent all it was given.
    card_free: Vec<Instant>,
    /// When each rank was last promised a turn because its card was full.
    card_call: Vec<Instant>,
    /// By context, source and target: messages of two groups do not meet.
    pipes: HashMap<(u64, u32, u32), Pipe>,
    /// How many groups there are.
    contexts: u64,
    /// Who has a reason to look again, and when; the earliest on top.
    calls: BinaryHeap<std::cmp::Reverse<(Instant, u32)>>,
    random: Random,
}

/// One rank's end in the world or in a group. All ends of a rank share its card.
#[derive(Clone, Debug)]
pub struct Port {
    rank: u32,
    context: u64,
    /// Numbers in the world.
    members: Arc<[Rank]>,
    network: Arc<Mutex<Network>>,
}

/// The ends of a virtual world, by rank.
pub(super) fn mesh(world: usize, link: Link, faults: &[Fault], seed: u64) -> Vec<Port> {
    let network = Network {
        link,
        faults: faults.to_vec(),
        now: 0,
        card_free: vec![0; world],
        card_call: vec![0; world],
        pipes: HashMap::new(),
        contexts: 0,
        calls: (0..world as u32).map(|rank| std::cmp::Reverse((0, rank))).collect(),
        random: Random::new(&[seed]),
    };
    let network = Arc::new(Mutex::new(network));
    let members: Arc<[Rank]> = (0..world).map(Rank::at).collect();
    let port = |rank| Port { rank, context: 0, members: Arc::clone(&members), network: Arc::clone(&network) };
    (0..world as u32).map(port).collect()
}

impl Network {
    fn call(&mut self, rank: u32, at: Instant) {
        self.calls.push(std::cmp::Reverse((at, rank)));
    }

    fn crashed(&self, rank: u32) -> bool {
        self.faults.iter().any(|fault| fault.crashes(rank, self.now))
    }

    fn send(&mut self, (context, from, to): (u64, u32, u32), bytes: &[u8]) -> Result<usize, String> {
        if self.crashed(to) {
            return Err("its process ended".into());
        }
        let slowness: f64 = self.faults.iter().map(|fault| fault.slowness(from, to)).product();
        let ns_per_byte = self.link.seconds_per_byte * 1e9 * slowness;
        let free = self.card_free[from as usize].max(self.now);
        let room = CARD_BYTES - (free - self.now) as f64 / ns_per_byte.max(1e-9);
        let count = bytes.len().min(PACKET_BYTES).min(room.max(0.0) as usize);
        if count == 0 {
            // As soon as half of the card is empty; one promise at a time.
            if self.card_call[from as usize] <= self.now {
                let at = self.now + ((CARD_BYTES / 2.0 * ns_per_byte) as Instant).max(1);
                self.card_call[from as usize] = at;
                self.call(from, at);
            }
            return Ok(0);
        }
        let departed = free + (count as f64 * ns_per_byte).ceil() as Instant;
        self.card_free[from as usize] = departed;
        if self.faults.iter().any(|fault| fault.cuts(from, to, self.now)) {
            return Ok(count);
        }
        let extra: Instant = self.faults.iter().map(|fault| fault.delay_ns(from, to)).sum();
        let loss: f32 = self.faults.iter().map(|fault| fault.loss(from, to)).fold(0.0, f32::max);
        let mut arrival = departed + (self.link.latency_s * 1e9 * slowness) as Instant + extra;
        while loss > 0.0 && self.random.chance(loss) {
            arrival += RESEND_NS;
        }
        let pipe = self.pipes.entry((context, from, to)).or_default();
        let arrival = pipe.packets.back().map_or(arrival, |(last, _)| arrival.max(*last));
        pipe.packets.push_back((arrival, bytes[..count].iter().copied().collect()));
        self.call(to, arrival);
        Ok(count)
    }

    fn receive(&mut self, (context, from, to): (u64, u32, u32), bytes: &mut [u8]) -> Result<usize, String> {
        let mut count = 0;
        if let Some(pipe) = self.pipes.get_mut(&(context, from, to)) {
            while let Some((_, packet)) = pipe.packets.front_mut().filter(|(arrival, _)| *arrival <= self.now) {
                let taken = packet.len().min(bytes.len() - count);
                packet.drain(..taken).zip(&mut bytes[count..]).for_each(|(byte, target)| *target = byte);
                count += taken;
                if !packet.is_empty() {
                    break;
                }
                pipe.packets.pop_front();
            }
        }
        if count == 0 && !bytes.is_empty() && self.crashed(from) {
            return Err("its process ended".into());
        }
        Ok(count)
    }
}

impl Port {
    /// This rank.
    pub fn rank(&self) -> Rank {
        let own = self.members.iter().position(|member| member.0 == self.rank);
        Rank::at(own.expect("a rank is one of its own"))
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.members.len()
    }

    fn network(&self) -> MutexGuard<'_, Network> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that no group of this world has had.
    pub(super) fn new_context(&self) -> u64 {
        let mut network = self.network();
        network.contexts += 1;
        network.contexts
    }

    /// This rank's end in a group of these ranks, of which it is one, by the number that they have agreed on.
    pub(super) fn group(&self, members: &[Rank], context: u64) -> Self {
        let members: Arc<[Rank]> = members.iter().map(|member| self.members[member.index()]).collect();
        Self { rank: self.rank, context, members, network: Arc::clone(&self.network) }
    }

    /// The pipe to a rank.
    fn to(&self, peer: Rank) -> (u64, u32, u32) {
        (self.context, self.rank, self.members[peer.index()].0)
    }

    /// The pipe from a rank.
    fn from(&self, peer: Rank) -> (u64, u32, u32) {
        (self.context, self.members[peer.index()].0, self.rank)
    }

    pub(super) fn try_send(&mut self, peer: Rank, bytes: &[u8]) -> Result<usize, String> {
        self.network().send(self.to(peer), bytes)
    }

    pub(super) fn try_receive(&mut self, peer: Rank, bytes: &mut [u8]) -> Result<usize, String> {
        self.network().receive(self.from(peer), bytes)
    }

    pub(super) fn has_bytes(&mut self, peer: Rank) -> Result<bool, String> {
        let network = self.network();
        let pipe = network.pipes.get(&self.from(peer));
        Ok(pipe.and_then(|pipe| pipe.packets.front()).is_some_and(|(arrival, _)| *arrival <= network.now))
    }
}
