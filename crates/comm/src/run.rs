//! The interpreter: runs one rank's list of transfers on any transport.
//!
//! A list says in which order ranges are touched; this machine keeps that order byte by byte and no stricter. A
//! transfer may move the bytes of its range that no earlier, unfinished transfer of the list still has to touch. So a
//! chunk is passed on while it still arrives, and receiving, adding and sending overlap without further planning.
//! Between two ranks bytes go first in, first out; no message needs a header. Each direction of a lane begins with one
//! frame header that names the collective, its number and its bytes: ranks that disagree notice before they add.

use std::collections::VecDeque;
use std::ops::Range;

use bytemuck::cast_slice_mut;

use crate::error::CommError;
use crate::rank::Rank;
use crate::reduce::Kind;
use crate::transfer::{Action, Transfer};
use crate::transport::{Interest, Transport};
use crate::wait::Wait;
use crate::wire::frame::{HEADER_BYTES, Header};
use crate::wire::stream::Talk;

/// Bytes moved at once: large enough to make a system call worth it. On loopback 512 KiB beat 64, 128 and 256 in every round.
const PORTION_BYTES: usize = 512 << 10;
/// Bytes that may travel with a header.
const WITH_HEADER_BYTES: usize = 8 << 10;
/// Looks at a lane without progress, over all lanes, before the transport is asked to sleep: each may be a system call, and others
/// may need the core.
const SPINS: usize = 200;

/// What is run, for whom, and until when.
#[derive(Clone, Debug)]
pub struct RunOptions<'a> {
    /// This rank.
    pub rank: Rank,
    /// What the elements are.
    pub kind: Kind,
    /// The name in errors.
    pub phase: &'static str,
    /// A number both ends of every lane know: what is done.
    pub code: u16,
    /// Which one of those it is, counted or tagged alike on all ranks.
    pub sequence: u64,
    /// How long it may take.
    pub wait: &'a Wait,
    /// Ranks whose loss leaves the rest of the list as it is: nothing more is sent to them or expected of them, and what
    /// they have sent stays.
    pub spare: Range<usize>,
}

impl RunOptions<'_> {
    /// The rank whose loss an error tells of, if the rest can go on without it.
    fn missed(&self, error: &CommError) -> Option<Rank> {
        error.peer().filter(|peer| matches!(error, CommError::PeerGone { .. }) && self.spare.contains(&peer.index()))
    }
}

/// What a list is run on. Where it only sends, the buffer may be fixed.
#[derive(Debug)]
pub enum Bytes<'a> {
    /// Read, never written.
    Fixed(&'a [u8]),
    /// Read and written.
    Open(&'a mut [u8]),
}

impl Bytes<'_> {
    fn read(&self) -> &[u8] {
        match self {
            Self::Fixed(bytes) => bytes,
            Self::Open(bytes) => bytes,
        }
    }

    fn write(&mut self) -> &mut [u8] {
        match self {
            Self::Fixed(_) => panic!("a list that receives needs a buffer that can be written"),
            Self::Open(bytes) => bytes,
        }
    }
}

/// The messages with one peer.
#[derive(Debug)]
struct Lane {
    peer: Rank,
    /// Transfers of the list that are not finished, in order.
    sends: VecDeque<usize>,
    receives: VecDeque<usize>,
    header_out: Option<[u8; HEADER_BYTES]>,
    header_sent: usize,
    header_due: Option<[u8; HEADER_BYTES]>,
    header_in: [u8; HEADER_BYTES],
    header_filled: usize,
    /// The bytes of an element that has not come whole.
    part: [u8; 4],
    part_bytes: usize,
}

/// A list on its way.
#[derive(Debug)]
pub struct Machine<'a> {
    list: &'a [Transfer],
    kind: Kind,
    /// Bytes of each transfer that are done.
    done: Vec<usize>,
    lanes: Vec<Lane>,
    scratch: Vec<f32>,
    /// Heads of the lanes' sends, sorted; kept between passes.
    order: Vec<(usize, usize)>,
}

impl<'a> Machine<'a> {
    /// A machine at the start of a list.
    pub fn new(list: &'a [Transfer], options: &RunOptions<'_>) -> Self {
        let mut lanes: Vec<Lane> = Vec::new();
        let mut lane_of: Vec<(Rank, usize)> = Vec::new();
        for (index, transfer) in list.iter().enumerate() {
            let place = match lane_of.binary_search_by_key(&transfer.peer, |&(peer, _)| peer) {
                Ok(found) => lane_of[found].1,
                Err(missing) => {
                    lane_of.insert(missing, (transfer.peer, lanes.len()));
                    lanes.push(Lane::new(transfer.peer));
                    lanes.len() - 1
                }
            };
            let lane = &mut lanes[place];
            if transfer.action == Action::Send { &mut lane.sends } else { &mut lane.receives }.push_back(index);
        }
        let bytes = |queue: &VecDeque<usize>| -> usize { queue.iter().map(|&index| list[index].length).sum() };
        for lane in &mut lanes {
            // The low half of the length will do to tell two buffers apart.
            let header = |queue: &VecDeque<usize>| {
                let length = (bytes(queue) * options.kind.bytes()) as u32;
                Header { kind: options.code, sequence: options.sequence, length }.encode()
            };
            lane.header_out = (!lane.sends.is_empty()).then(|| header(&lane.sends));
            lane.header_due = (!lane.receives.is_empty()).then(|| header(&lane.receives));
        }
        let longest = list.iter().filter(|transfer| transfer.action == Action::Reduce).map(|transfer| transfer.length);
        let scratch_bytes = (longest.max().unwrap_or(0) * options.kind.bytes()).min(PORTION_BYTES) + 8;
        let scratch = vec![0.0; scratch_bytes.max(WITH_HEADER_BYTES + HEADER_BYTES).div_ceil(4)];
        Self { list, kind: options.kind, done: vec![0; list.len()], lanes, scratch, order: Vec::new() }
    }

    /// Nothing more is sent to a peer, or expected of it.
    fn leave(&mut self, peer: Rank) {
        self.lanes.retain(|lane| lane.peer != peer);
    }

    /// Whether every transfer is done.
    pub fn is_finished(&self) -> bool {
        self.lanes.iter().all(|lane| lane.sends.is_empty() && lane.receives.is_empty())
    }

    /// The peer that holds things up: the other end of the earliest unfinished transfer, a receive if there is one.
    pub fn holding_up(&self) -> Option<Rank> {
        let head = |queue: fn(&Lane) -> &VecDeque<usize>| {
            self.lanes.iter().filter_map(|lane| Some((queue(lane).front()?, lane.peer))).min().map(|(_, peer)| peer)
        };
        head(|lane| &lane.receives).or_else(|| head(|lane| &lane.sends))
    }

    /// What a sleeping transport should wake up for.
    pub fn interests(&self) -> Vec<Interest> {
        let sending = |lane: &Lane| lane.sends.front().is_some_and(|&index| self.allowance(index) > 0);
        let interest =
            |lane: &Lane| Interest { peer: lane.peer, receive: !lane.receives.is_empty(), send: sending(lane) };
        self.lanes.iter().map(interest).filter(|interest| interest.receive || interest.send).collect()
    }

    /// How many further bytes of a transfer no earlier one has still to touch.
    fn allowance(&self, index: usize) -> usize {
        let element = self.kind.bytes();
        let transfer = &self.list[index];
        let start = transfer.start * element;
        let (from, mut to) = (start + self.done[index], start + transfer.length * element);
        for lane in &self.lanes {
            let writes = transfer.action != Action::Send;
            // Two sends may read the same bytes; everything else keeps its order.
            let earlier_sends = lane.sends.iter().filter(|_| writes);
            for &other in earlier_sends.take_while(|&&other| other < index) {
                to = to.min(self.open_until(other, from, to));
            }
            for &other in lane.receives.iter().take_while(|&&other| other < index) {
                to = to.min(self.open_until(other, from, to));
            }
        }
        to - from
    }

    /// Where the part of an earlier transfer that is not done begins to be in the way of `from..to`.
    fn open_until(&self, other: usize, from: usize, to: usize) -> usize {
        let element = self.kind.bytes();
        let other_transfer = &self.list[other];
        let start = other_transfer.start * element;
        let (pending, end) = (start + self.done[other], start + other_transfer.length * element);
        if pending < to && end > from { pending.max(from) } else { to }
    }

    /// Moves what can be moved now. Whether anything was.
    ///
    /// # Errors
    /// When a peer is gone or sent something else than expected.
    pub fn pass(&mut self, transport: &mut Transport, buffer: &mut Bytes<'_>, talk: &Talk) -> Result<bool, CommError> {
        let mut moved = false;
        // Sends of the earliest step that moves go first: others wait for them, and links may share a card.
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        let heads = self.lanes.iter().enumerate().filter_map(|(lane, queues)| Some((*queues.sends.front()?, lane)));
        order.extend(heads);
        order.sort_unstable();
        let mut step = u32::MAX;
        for &(index, lane) in &order {
            if self.list[index].step > step {
                break;
            }
            if self.send(lane, transport, buffer.read(), talk)? {
                step = self.list[index].step;
                moved = true;
            }
        }
        self.order = order;
        for lane in 0..self.lanes.len() {
            moved |= self.lanes[lane].expects() && self.receive(lane, transport, buffer.write(), talk)?;
        }
        Ok(moved)
    }

    fn send(&mut self, lane: usize, transport: &mut Transport, buffer: &[u8], talk: &Talk) -> Result<bool, CommError> {
        let Some(&index) = self.lanes[lane].sends.front() else { return Ok(false) };
        let allowed = self.allowance(index).min(PORTION_BYTES);
        if allowed == 0 {
            return Ok(false);
        }
        let total = self.list[index].length * self.kind.bytes();
        let from = self.list[index].start * self.kind.bytes() + self.done[index];
        let Lane { peer, sends, header_out, header_sent, .. } = &mut self.lanes[lane];
        let gone = |reason| Talk { peer: (*peer).into(), ..talk.clone() }.gone(reason);
        let mut count = match header_out {
            Some(header) => {
                let head = &header[*header_sent..];
                let payload = &buffer[from..from + allowed.min(WITH_HEADER_BYTES)];
                let first: &mut [u8] = cast_slice_mut(&mut self.scratch);
                first[..head.len()].copy_from_slice(head);
                first[head.len()..head.len() + payload.len()].copy_from_slice(payload);
                transport.try_send(*peer, &first[..head.len() + payload.len()]).map_err(gone)?
            }
            None => transport.try_send(*peer, &buffer[from..from + allowed]).map_err(gone)?,
        };
        if count == 0 {
            return Ok(false);
        }
        if header_out.is_some() {
            let of_header = count.min(HEADER_BYTES - *header_sent);
            *header_sent += of_header;
            count -= of_header;
            if *header_sent == HEADER_BYTES {
                *header_out = None;
            }
        }
        self.done[index] += count;
        if self.done[index] == total {
            sends.pop_front();
        }
        Ok(true)
    }

    fn receive(
        &mut self,
        lane: usize,
        transport: &mut Transport,
        buffer: &mut [u8],
        talk: &Talk,
    ) -> Result<bool, CommError> {
        let Some(&index) = self.lanes[lane].receives.front() else { return Ok(false) };
        let peer = self.lanes[lane].peer;
        let talk = || Talk { peer: peer.into(), ..talk.clone() };
        if self.lanes[lane].header_due.is_some() && !self.lanes[lane].take_header(transport, &talk)? {
            return Ok(false);
        }
        let allowed = self.allowance(index).min(PORTION_BYTES);
        if allowed == 0 {
            return Ok(false);
        }
        let element = self.kind.bytes();
        let total = self.list[index].length * element;
        let from = self.list[index].start * element + self.done[index];
        let Lane { receives, part, part_bytes, .. } = &mut self.lanes[lane];
        let (count, done) = if self.list[index].action == Action::Receive {
            let count =
                transport.try_receive(peer, &mut buffer[from..from + allowed]).map_err(|why| talk().gone(why))?;
            (count, count)
        } else {
            let scratch: &mut [u8] = cast_slice_mut(&mut self.scratch);
            scratch[..*part_bytes].copy_from_slice(&part[..*part_bytes]);
            let room = allowed.min(scratch.len() / element * element);
            let count = transport.try_receive(peer, &mut scratch[*part_bytes..room]).map_err(|why| talk().gone(why))?;
            let filled = *part_bytes + count;
            let whole = filled / element * element;
            self.kind.add(&mut buffer[from..from + whole], &scratch[..whole]);
            *part_bytes = filled - whole;
            part[..*part_bytes].copy_from_slice(&scratch[whole..filled]);
            (count, whole)
        };
        self.done[index] += done;
        if self.done[index] == total {
            receives.pop_front();
        }
        Ok(count > 0)
    }
}

impl Lane {
    const fn new(peer: Rank) -> Self {
        Self {
            peer,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            header_out: None,
            header_sent: 0,
            header_due: None,
            header_in: [0; HEADER_BYTES],
            header_filled: 0,
            part: [0; 4],
            part_bytes: 0,
        }
    }

    fn expects(&self) -> bool {
        !self.receives.is_empty()
    }

    /// Reads the header that opens the lane; whether it is there.
    fn take_header(&mut self, transport: &mut Transport, talk: &impl Fn() -> Talk) -> Result<bool, CommError> {
        let rest = &mut self.header_in[self.header_filled..];
        self.header_filled += transport.try_receive(self.peer, rest).map_err(|why| talk().gone(why))?;
        if self.header_filled < HEADER_BYTES {
            return Ok(false);
        }
        if self.header_due != Some(self.header_in) {
            let describe = |bytes: &[u8; HEADER_BYTES]| match Header::decode(bytes) {
                Ok(Header { kind, sequence, length }) => format!("kind {kind}, number {sequence}, {length} bytes"),
                Err(error) => error.to_string(),
            };
            let due = self.header_due.as_ref().map(describe).unwrap_or_default();
            return Err(talk().violation(format!("{}, where this rank expects {due}", describe(&self.header_in))));
        }
        self.header_due = None;
        Ok(true)
    }
}

/// Runs a list to its end, or until the wait ends. Gives the ranks that were lost meanwhile and can be done without.
///
/// # Errors
/// When a peer is gone, stalls beyond the deadline, or does something else than this rank.
pub fn run(
    list: &[Transfer],
    options: &RunOptions<'_>,
    transport: &mut Transport,
    mut buffer: Bytes<'_>,
) -> Result<Vec<Rank>, CommError> {
    let mut missed = Vec::new();
    let mut machine = Machine::new(list, options);
    let talk = Talk { rank: options.rank, peer: options.rank.into(), phase: options.phase };
    let check = |machine: &Machine<'_>| {
        options.wait.check(options.rank, machine.holding_up().unwrap_or(options.rank), options.phase)
    };
    // Whether something was done: a rank that is lost holds nothing up any more.
    let mut or_without = |machine: &mut Machine<'_>, done: Result<bool, CommError>| match done {
        Err(error) => {
            let peer = options.missed(&error).ok_or(error)?;
            machine.leave(peer);
            missed.push(peer);
            Ok::<_, CommError>(true)
        }
        done => done,
    };
    let (mut idle, mut passes) = (0, 0usize);
    while !(machine.is_finished() && transport.has_sent().map_err(|why| talk.gone(why))?) {
        passes += 1;
        // Bytes that drip in must not keep the deadline from being seen.
        if passes.is_multiple_of(64) {
            let checked = check(&machine).map(|()| false);
            or_without(&mut machine, checked)?;
            options.wait.over();
        }
        let moved = machine.pass(transport, &mut buffer, &talk);
        if or_without(&mut machine, moved)? {
            idle = 0;
            options.wait.over();
            continue;
        }
        idle += 1;
        if idle * machine.lanes.len() < SPINS {
            std::hint::spin_loop();
            continue;
        }
        let checked = check(&machine).map(|()| false);
        if !or_without(&mut machine, checked)? {
            transport.sleep(&machine.interests(), options.wait.slice());
        }
    }
    Ok(missed)
}
