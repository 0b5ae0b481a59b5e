//! What the rest of Paceline sees: one rank of a world, and what it does together with the others.
//!
//! All ranks must call the same things in the same order with the same lengths; where they do not, the first message
//! says so. After an error a communicator is broken, since messages may be lost in the middle, and says so at once.

use std::ops::Range;
use std::time::Duration;

use bytemuck::cast_slice_mut;
use paceline_system::memory;

use crate::choose::Choice;
use crate::collective::{Algorithm, Collective, transfers};
use crate::error::{CommError, Party};
use crate::rank::Rank;
use crate::reduce::Kind;
use crate::run::{Bytes, Job, run};
use crate::shared::SharedBuffer;
use crate::stop::Stop;
use crate::transfer::{Action, Transfer, chunk};
use crate::transport::shm::{self, Common};
use crate::transport::{Interest, Transport};
use crate::wait::Wait;

/// The code of messages between two ranks; collectives have their own, from 1.
const MESSAGE: u16 = 0x100;

/// The code of lists that a caller made itself.
const EXCHANGE: u16 = 0x101;

/// How a communicator behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long one call may take.
    pub timeout: Duration,
    /// What ends every call early.
    pub stop: Stop,
    /// Which algorithm when. The same on all ranks.
    pub choice: Choice,
}

/// One rank and its links to all others.
#[derive(Debug)]
pub struct Communicator {
    rank: Rank,
    world: usize,
    transport: Transport,
    options: Options,
    /// Collectives begun so far.
    sequence: u64,
    broken: bool,
}

impl Communicator {
    /// A rank at the start of its conversation.
    ///
    /// # Panics
    /// When the options are for another world than the transport: a bug.
    pub fn new(transport: Transport, options: Options) -> Self {
        let (rank, world) = match &transport {
            Transport::Thread(port) => (port.rank(), port.world()),
            Transport::Shm(port) => (port.rank(), port.world()),
            Transport::Tcp(port) => (port.rank(), port.world()),
            #[cfg(feature = "mpi")]
            Transport::Mpi(port) => (port.rank(), port.world()),
            Transport::Sim(port) => (port.rank(), port.world()),
        };
        assert_eq!(options.choice.links().nodes.world(), world, "the choice of algorithms is for another world");
        Self { rank, world, transport, options, sequence: 0, broken: false }
    }

    /// This rank.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub const fn world(&self) -> usize {
        self.world
    }

    /// How bytes travel.
    pub const fn transport(&self) -> &Transport {
        &self.transport
    }

    /// How algorithms are chosen.
    pub const fn choice(&self) -> &Choice {
        &self.options.choice
    }

    /// Chooses algorithms by this from now on; all ranks at the same point.
    pub fn set_choice(&mut self, choice: Choice) {
        self.options.choice = choice;
    }

    /// The part of a buffer of so many elements that belongs to this rank after a reduce-scatter.
    pub const fn own_chunk(&self, length: usize) -> Range<usize> {
        chunk(length, self.world, self.rank.index())
    }

    /// The algorithm that a collective on so many bytes will take.
    pub fn algorithm(&self, collective: Collective, bytes: usize) -> Algorithm {
        match &self.transport {
            // Adding straight from mapped memory beats every exchange of copies, at any size.
            Transport::Shm(_) if collective == Collective::AllReduce && !self.options.choice.is_forced() => {
                Algorithm::Direct
            }
            _ => self.options.choice.algorithm(collective, bytes),
        }
    }

    /// Leaves the sum of all ranks' buffers in each.
    ///
    /// # Errors
    /// When a peer is gone, late or does something else; see [`CommError`]. So for all calls below.
    pub fn all_reduce(&mut self, buffer: &mut [f32]) -> Result<(), CommError> {
        self.collective(Collective::AllReduce, Kind::F32, cast_slice_mut(buffer))
    }

    /// The same for upper halves of numbers, with sums made in `f32`.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_bf16(&mut self, buffer: &mut [u16]) -> Result<(), CommError> {
        self.collective(Collective::AllReduce, Kind::Bf16, cast_slice_mut(buffer))
    }

    /// Leaves the sum of all ranks' buffers in each, for part of a buffer that may be in shared memory: then nothing is
    /// copied. All ranks name the same part of buffers made by the same call of [`Communicator::shared_buffer`].
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_shared(&mut self, buffer: &mut SharedBuffer, range: Range<usize>) -> Result<(), CommError> {
        let direct = self.algorithm(Collective::AllReduce, range.len() * 4) == Algorithm::Direct;
        if let (Transport::Shm(port), Some(mapped), true) = (&mut self.transport, buffer.mapped_mut(), direct) {
            self.sequence += 1;
            let wait = Wait::new(self.options.timeout, &self.options.stop);
            let result = if self.broken {
                Err(CommError::Broken { rank: self.rank, phase: Collective::AllReduce.name() })
            } else {
                port.all_reduce_mapped(mapped, range, self.sequence, &wait)
            };
            self.broken |= result.is_err();
            return result;
        }
        self.all_reduce(&mut buffer.as_mut_slice()[range])
    }

    /// A buffer of zeros that peers can add from directly where the transport shares memory, and a plain one elsewhere.
    /// All ranks call this in the same order with the same length.
    ///
    /// # Errors
    /// When the system has no memory to map.
    pub fn shared_buffer(&mut self, length: usize) -> Result<SharedBuffer, CommError> {
        match &mut self.transport {
            Transport::Shm(port) => port.shared_buffer(length).map(SharedBuffer::Mapped),
            _ => memory::zeros(length, "messages").map(SharedBuffer::Heap).map_err(|refused| CommError::System {
                rank: self.rank,
                what: "take memory for messages",
                source: std::io::Error::new(std::io::ErrorKind::OutOfMemory, refused),
            }),
        }
    }

    /// Numbers that are no rank's own: each of the mappings leads to the same ones, on all ranks. None where the transport does not
    /// share memory. Who may write which when, the callers agree on by the stages of shared buffers.
    ///
    /// # Errors
    /// As [`Communicator::shared_buffer`].
    pub fn common<const N: usize>(&mut self, length: usize) -> Result<Option<[Common; N]>, CommError> {
        match &mut self.transport {
            Transport::Shm(port) => port.common(length).map(Some),
            _ => Ok(None),
        }
    }

    /// Whether ranks can work on shared buffers by stages: where they map the same memory. See [`Communicator::come_to`].
    pub const fn shares_memory(&self) -> bool {
        matches!(self.transport, Transport::Shm(_))
    }

    /// Says that this rank has come to a stage with a shared buffer: it has filled its numbers. Once all have
    /// ([`Communicator::are_at`]), ranks take pieces of what is to be done with them ([`Communicator::take`]), and nobody fills its
    /// numbers again before all pieces are finished. Stages and pieces count on from round to round. No call but
    /// [`Communicator::watch`] waits.
    ///
    /// # Panics
    /// Here and below, when the buffer is not in shared memory.
    pub fn come_to(&mut self, buffer: &mut SharedBuffer, stage: u64) {
        let (port, mapped) = self.mapped_mut(buffer);
        port.come_to(mapped, stage);
    }

    /// Whether all other ranks have come to a stage.
    pub fn are_at(&mut self, buffer: &mut SharedBuffer, stage: u64) -> bool {
        let (port, mapped) = self.mapped_mut(buffer);
        port.are_at(mapped, stage)
    }

    /// The furthest stage of another rank.
    pub fn furthest(&mut self, buffer: &mut SharedBuffer) -> u64 {
        let (port, mapped) = self.mapped_mut(buffer);
        port.furthest(mapped)
    }

    /// The number of a piece of work that this rank is to do, if there is one left below `end`.
    pub fn take(&mut self, buffer: &mut SharedBuffer, end: u64) -> Option<u64> {
        let (port, mapped) = self.mapped_mut(buffer);
        port.take(mapped, end)
    }

    /// Says that a piece is done: what was written for it, in shared or common memory, can be read by all.
    pub fn finish(&mut self, buffer: &mut SharedBuffer) {
        let (port, mapped) = self.mapped_mut(buffer);
        port.finish(mapped);
    }

    /// How many pieces are done.
    pub fn finished(&mut self, buffer: &mut SharedBuffer) -> u64 {
        let (port, mapped) = self.mapped_mut(buffer);
        port.finished(mapped)
    }

    /// How long a call of this communicator may wait, from now on.
    pub fn wait(&self) -> Wait {
        Wait::new(self.options.timeout, &self.options.stop)
    }

    /// Waits until all others have come to a stage, if they had not, or so many pieces are done; comes back earlier when anything else
    /// has happened, so that the caller can look whether there is something to do.
    ///
    /// # Errors
    /// When another rank is gone, or too late.
    pub fn watch(&mut self, buffer: &mut SharedBuffer, what: (u64, u64), wait: &Wait) -> Result<(), CommError> {
        let (port, mapped) = self.mapped_mut(buffer);
        port.watch(mapped, what, wait)
    }

    /// Writes the sum of a range of all ranks' numbers, added in the order of ranks, which they have written when they came to a stage
    /// with a `board`: a shared buffer that only counts stages and pieces, for a part of a larger one.
    ///
    /// # Panics
    /// When not all are there.
    pub fn sum_into(
        &mut self,
        buffer: &mut SharedBuffer,
        range: Range<usize>,
        (board, stage): (&mut SharedBuffer, u64),
        sums: &mut [f32],
    ) {
        let (port, mapped) = self.mapped_mut(buffer);
        let board = board.mapped_mut().expect("a board is in shared memory");
        port.sum_into(mapped, range, (board, stage), sums);
    }

    /// The same of a whole buffer that is its own board.
    ///
    /// # Panics
    /// When not all are there.
    pub fn sum_here(&mut self, buffer: &mut SharedBuffer, stage: u64, sums: &mut [f32]) {
        let (port, mapped) = self.mapped_mut(buffer);
        port.sum_into(mapped, 0..sums.len(), (mapped, stage), sums);
    }

    /// Another way to this rank's own numbers in a shared buffer, for those who write them without asking for the buffer. None where
    /// the transport does not share memory.
    ///
    /// # Errors
    /// As [`Communicator::shared_buffer`].
    pub fn own_again(&mut self, buffer: &mut SharedBuffer) -> Result<Option<Common>, CommError> {
        match (&mut self.transport, buffer.mapped_mut()) {
            (Transport::Shm(port), Some(mapped)) => port.own_again(mapped).map(Some),
            _ => Ok(None),
        }
    }

    fn mapped_mut<'a, 'b>(&'a mut self, buffer: &'b mut SharedBuffer) -> (&'a mut shm::Port, &'b mut shm::Mapped) {
        match (&mut self.transport, buffer.mapped_mut()) {
            (Transport::Shm(port), Some(mapped)) => (port, mapped),
            _ => panic!("only ranks that share memory work on it by stages"),
        }
    }

    /// Leaves the sum of this rank's chunk ([`Communicator::own_chunk`]) in it; the rest of the buffer is spoilt.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce_scatter(&mut self, buffer: &mut [f32]) -> Result<(), CommError> {
        self.collective(Collective::ReduceScatter, Kind::F32, cast_slice_mut(buffer))
    }

    /// Fills every chunk from the rank it belongs to.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_gather(&mut self, buffer: &mut [f32]) -> Result<(), CommError> {
        self.collective(Collective::AllGather, Kind::F32, cast_slice_mut(buffer))
    }

    /// Fills every buffer from the root's.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn broadcast(&mut self, root: Rank, buffer: &mut [f32]) -> Result<(), CommError> {
        self.collective(Collective::Broadcast { root }, Kind::F32, cast_slice_mut(buffer))
    }

    /// The same for bytes.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn broadcast_bytes(&mut self, root: Rank, buffer: &mut [u8]) -> Result<(), CommError> {
        self.collective(Collective::Broadcast { root }, Kind::Byte, buffer)
    }

    /// Exchanges chunk j of this rank's buffer, for every j, with this rank's chunk of rank j's buffer.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    ///
    /// # Panics
    /// When the length is not a multiple of the world's size.
    pub fn all_to_all(&mut self, buffer: &mut [f32]) -> Result<(), CommError> {
        self.collective(Collective::AllToAll, Kind::F32, cast_slice_mut(buffer))
    }

    /// Returns once all ranks have come here.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&mut self) -> Result<(), CommError> {
        self.collective(Collective::Barrier, Kind::Byte, &mut [0])
    }

    /// Sends bytes to one rank, which receives them with the same tag and length.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send(&mut self, to: Rank, tag: u64, bytes: &[u8]) -> Result<(), CommError> {
        self.message(to, tag, Bytes::Fixed(bytes))
    }

    /// Receives the next message of one rank, which must have this tag and length.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn recv(&mut self, from: Rank, tag: u64, bytes: &mut [u8]) -> Result<(), CommError> {
        self.message(from, tag, Bytes::Open(bytes))
    }

    /// Runs this rank's part of transfers that fit together by the callers' own doing; both ends name the same tag.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn exchange(&mut self, list: &[Transfer], tag: u64, buffer: &mut [f32]) -> Result<(), CommError> {
        self.run(list, ("exchange", EXCHANGE, tag), Kind::F32, Bytes::Open(cast_slice_mut(buffer)))
    }

    /// The same for upper halves of numbers, with sums made in `f32`.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn exchange_bf16(&mut self, list: &[Transfer], tag: u64, buffer: &mut [u16]) -> Result<(), CommError> {
        self.run(list, ("exchange", EXCHANGE, tag), Kind::Bf16, Bytes::Open(cast_slice_mut(buffer)))
    }

    /// Waits until one of these ranks has sent something, and says which: the first in the order of `peers`.
    ///
    /// # Errors
    /// When none does in time, or one of them is gone.
    pub fn wait_any(&mut self, peers: &[Rank]) -> Result<Rank, CommError> {
        const PHASE: &str = "wait_any";
        let wait = Wait::new(self.options.timeout, &self.options.stop);
        let rank = self.rank;
        let interest = |&peer: &Rank| Interest { peer, receive: true, send: false };
        let interests: Vec<Interest> = peers.iter().map(interest).collect();
        loop {
            for &peer in peers {
                let has = self.transport.has_bytes(peer);
                if has.map_err(|reason| CommError::PeerGone { rank, peer: peer.into(), phase: PHASE, reason })? {
                    return Ok(peer);
                }
            }
            wait.check(rank, Party::Anyone, PHASE)?;
            self.transport.sleep(&interests, wait.slice());
        }
    }

    fn message(&mut self, peer: Rank, tag: u64, bytes: Bytes<'_>) -> Result<(), CommError> {
        let (phase, action, length) = match &bytes {
            Bytes::Fixed(bytes) => ("send", Action::Send, bytes.len()),
            Bytes::Open(bytes) => ("recv", Action::Receive, bytes.len()),
        };
        assert!(peer != self.rank && peer.index() < self.world, "{} has no link to {peer}", self.rank);
        if length == 0 {
            return Ok(());
        }
        let list = [Transfer { step: 0, action, peer, start: 0, length }];
        self.run(&list, (phase, MESSAGE, tag), Kind::Byte, bytes)
    }

    fn collective(&mut self, collective: Collective, kind: Kind, buffer: &mut [u8]) -> Result<(), CommError> {
        let algorithm = self.algorithm(collective, buffer.len());
        self.sequence += 1;
        if self.world == 1 {
            return Ok(());
        }
        if let (Collective::AllReduce, Algorithm::Direct, Transport::Shm(port), false) =
            (collective, algorithm, &mut self.transport, self.broken)
        {
            let wait = Wait::new(self.options.timeout, &self.options.stop);
            let result = port.all_reduce_staged(kind, buffer, self.sequence, &wait);
            self.broken |= result.is_err();
            return result;
        }
        #[cfg(feature = "mpi")]
        if let (Transport::Mpi(port), false, false) =
            (&mut self.transport, self.options.choice.is_forced(), self.broken)
        {
            let wait = Wait::new(self.options.timeout, &self.options.stop);
            let result = port.collective(collective, kind, buffer, &wait);
            self.broken |= result.is_err();
            return result;
        }
        let nodes = &self.options.choice.links().nodes;
        let list = transfers(collective, algorithm, self.rank, nodes, buffer.len() / kind.bytes());
        let code = 1 + collective.code() * 8 + algorithm as u16;
        self.run(&list, (collective.name(), code, self.sequence), kind, Bytes::Open(buffer))
    }

    fn run(
        &mut self,
        list: &[Transfer],
        (phase, code, sequence): (&'static str, u16, u64),
        kind: Kind,
        buffer: Bytes<'_>,
    ) -> Result<(), CommError> {
        let rank = self.rank;
        if self.broken {
            return Err(CommError::Broken { rank, phase });
        }
        let wait = Wait::new(self.options.timeout, &self.options.stop);
        let job = Job { rank, kind, phase, code, sequence, wait: &wait };
        let result = run(list, &job, &mut self.transport, buffer);
        self.broken |= result.is_err();
        result
    }
}
