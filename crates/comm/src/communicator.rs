//! What the rest of Paceline sees: one rank of a world, and what it does together with the others.
//!
//! All ranks must call the same things in the same order with the same lengths; where they do not, the first message
//! says so. After an error a communicator is broken, since messages may be lost in the middle, and says so at once.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::cast_slice_mut;
use paceline_system::memory;

use crate::choose::Choice;
use crate::collective::{Algorithm, Collective, transfers};
use crate::error::CommError;
use crate::rank::Rank;
use crate::reduce::Kind;
use crate::registered::RegisteredBuffer;
use crate::run::{Bytes, RunOptions, run};
use crate::stop::Stop;
use crate::transfer::{Action, Transfer, chunk};
use crate::transport::shm::{self, OneCopy};
use crate::transport::{Interest, Transport};
use crate::wait::Wait;

mod group;

/// The code of messages between two ranks; collectives have their own, from 1.
const MESSAGE: u16 = 0x100;

/// The code of lists that a caller made itself.
const EXCHANGE: u16 = 0x101;

/// The same of halves.
const EXCHANGE_BF16: u16 = 0x102;

/// How long the last word of a greeting may be under way, of a rank that has said elsewhere that it is through with it.
const GREETED: Duration = Duration::from_secs(5);

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
    /// The ranks' numbers in the world, by which errors name them.
    members: Arc<[Rank]>,
    transport: Transport,
    options: Options,
    /// Collectives begun so far.
    sequence: u64,
    broken: bool,
    /// Ranks that lists can do without, and those that were lost in one.
    spare: Range<usize>,
    missed: Vec<Rank>,
}

impl Communicator {
    /// A rank at the start of its conversation.
    ///
    /// # Panics
    /// When the options are for another world than the transport: a bug.
    pub fn new(transport: Transport, options: Options) -> Self {
        let (rank, world) = transport.place();
        assert_eq!(options.choice.links().nodes.world(), world, "the choice of algorithms is for another world");
        let members = (0..world).map(Rank::at).collect();
        Self { rank, members, transport, options, sequence: 0, broken: false, spare: 0..0, missed: Vec::new() }
    }

    /// This rank.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.members.len()
    }

    /// The number of a rank of this communicator in the world of all processes: what a user is told.
    ///
    /// # Panics
    /// When there is no such rank: a bug.
    pub fn world_rank(&self, rank: Rank) -> Rank {
        self.members[rank.index()]
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

    /// From now on a call may take so long.
    pub const fn set_timeout(&mut self, timeout: Duration) {
        self.options.timeout = timeout;
    }

    /// The part of a buffer of so many elements that belongs to this rank after a reduce-scatter.
    pub fn own_chunk(&self, length: usize) -> Range<usize> {
        chunk(length, self.world(), self.rank.index())
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

    /// Leaves the sum of all ranks' buffers in each, for part of a registered buffer: where the transport
    /// can, nothing is copied. All ranks name the same part of buffers made by the same call of
    /// [`Communicator::register_buffer`].
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    ///
    /// # Panics
    /// When the part is outside the buffer.
    pub fn all_reduce_registered(
        &mut self,
        buffer: &mut RegisteredBuffer,
        range: Range<usize>,
    ) -> Result<(), CommError> {
        let direct = self.algorithm(Collective::AllReduce, range.len() * 4) == Algorithm::Direct;
        if let (Transport::Shm(port), Some(shared), true) = (&mut self.transport, buffer.shared_mut(), direct)
            && port.has_registered(shared)
        {
            self.sequence += 1;
            let wait = Wait::among(&self.members, self.options.timeout, &self.options.stop);
            let result = if self.broken {
                Err(CommError::Broken { rank: self.rank, phase: Collective::AllReduce.name() })
            } else {
                port.all_reduce_registered(shared, range, self.sequence, &wait)
            };
            return self.ended(result);
        }
        self.all_reduce(&mut buffer.as_mut_slice()[range])
    }

    /// A buffer of zeros that the transport knows beforehand. All ranks call this in the same order with the
    /// same length.
    ///
    /// # Errors
    /// When the system has no memory to map.
    pub fn register_buffer(&mut self, length: usize) -> Result<RegisteredBuffer, CommError> {
        let registered = match &mut self.transport {
            Transport::Shm(port) => port.register(length).map(RegisteredBuffer::from),
            _ => memory::zeros(length, "messages").map(RegisteredBuffer::from).map_err(|refused| CommError::System {
                rank: self.rank,
                what: "take memory for messages",
                source: std::io::Error::new(std::io::ErrorKind::OutOfMemory, refused),
            }),
        };
        self.named(registered)
    }

    /// One copy of weights that all ranks step together, where the transport shares memory; none elsewhere.
    /// All ranks call this in the same order with the same shape.
    ///
    /// # Errors
    /// When the system has no memory to map.
    ///
    /// # Panics
    /// When buckets meet, or lie outside the weights.
    pub fn one_copy(&mut self, shape: &shm::Shape<'_>) -> Result<Option<OneCopy>, CommError> {
        let made = match &mut self.transport {
            Transport::Shm(port) => port.one_copy(shape, &self.members).map(Some),
            _ => Ok(None),
        };
        self.named(made)
    }

    /// Whether ranks can have one copy of weights ([`Communicator::one_copy`]): where they map the same
    /// memory.
    pub const fn shares_memory(&self) -> bool {
        matches!(self.transport, Transport::Shm(_))
    }

    /// How long a call of this communicator may wait, from now on.
    pub fn wait(&self) -> Wait {
        Wait::new(self.options.timeout, &self.options.stop)
    }

    /// Leaves the sum of this rank's chunk ([`Communicator::own_chunk`]) in it; the rest of the buffer is spoilt.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce_scatter(&mut self, buffer: &mut [f32]) -> Result<(), CommError> {
        self.collective(Collective::ReduceScatter, Kind::F32, cast_slice_mut(buffer))
    }

    /// The same for upper halves of numbers, with sums made in `f32`.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce_scatter_bf16(&mut self, buffer: &mut [u16]) -> Result<(), CommError> {
        self.collective(Collective::ReduceScatter, Kind::Bf16, cast_slice_mut(buffer))
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
        self.run(list, ("exchange", EXCHANGE_BF16, tag), Kind::Bf16, Bytes::Open(cast_slice_mut(buffer)))
    }

    /// What failed was with a rank that is lost, and with no other: what others send is whole, and is waited for as before.
    pub const fn go_on(&mut self) {
        self.broken = false;
    }

    /// From now on the loss of one of these ranks ends no list of the caller's own ([`Communicator::exchange`]): the rest of
    /// it goes on, what the rank had sent stays, and [`Communicator::take_missed`] tells of it.
    pub const fn spare(&mut self, ranks: Range<usize>) {
        self.spare = ranks;
    }

    /// The ranks that were lost in a list, once.
    pub fn take_missed(&mut self) -> Vec<Rank> {
        std::mem::take(&mut self.missed)
    }

    /// Whether a rank is lost and the others go on without it ([`Stop::lose`]).
    pub fn has_lost(&self, rank: Rank) -> bool {
        self.options.stop.has_lost(self.members[rank.index()])
    }

    /// Has links to a rank that was lost and has come back, for the so-manieth time, instead of those that it had; from here
    /// on it is not lost. Whether that is so: it may have been lost again, or the transport lets nobody come back.
    pub fn readmit(&mut self, rank: Rank, life: u16) -> bool {
        let (stop, member) = (&self.options.stop, self.members[rank.index()]);
        let Transport::Tcp(port) = &mut self.transport else { return false };
        stop.returning(member) == Some(life) && port.replace(rank, life, GREETED) && stop.readmit(member, life)
    }

    /// Waits until one of these ranks has sent something, and says which: the first in the order of `peers`.
    ///
    /// # Errors
    /// When none does in time, or one of them is gone.
    pub fn wait_any(&mut self, peers: &[Rank]) -> Result<Rank, CommError> {
        let found = self.first_to_send(peers);
        self.named(found)
    }

    fn first_to_send(&mut self, peers: &[Rank]) -> Result<Rank, CommError> {
        const PHASE: &str = "wait_any";
        let wait = Wait::among(&self.members, self.options.timeout, &self.options.stop);
        let rank = self.rank;
        let interest = |&peer: &Rank| Interest { peer, receive: true, send: false };
        let interests: Vec<Interest> = peers.iter().map(interest).collect();
        loop {
            for &peer in peers {
                let has = self.transport.has_bytes(peer);
                if has.map_err(|reason| CommError::PeerGone { rank, peer: peer.into(), phase: PHASE, reason })? {
                    return Ok(peer);
                }
                if wait.has_lost(peer) {
                    let reason = "it is lost".to_owned();
                    return Err(CommError::PeerGone { rank, peer: peer.into(), phase: PHASE, reason });
                }
            }
            // Of several, whoever comes first is served: none of them is waited for.
            match peers {
                [peer] => wait.check(rank, *peer, PHASE)?,
                _ => wait.check_idle(rank, PHASE)?,
            }
            self.transport.sleep(&interests, wait.slice());
        }
    }

    fn message(&mut self, peer: Rank, tag: u64, bytes: Bytes<'_>) -> Result<(), CommError> {
        let (phase, action, length) = match &bytes {
            Bytes::Fixed(bytes) => ("send", Action::Send, bytes.len()),
            Bytes::Open(bytes) => ("recv", Action::Receive, bytes.len()),
        };
        assert!(peer != self.rank && peer.index() < self.world(), "{} has no link to {peer}", self.rank);
        if length == 0 {
            return Ok(());
        }
        let list = [Transfer { step: 0, action, peer, start: 0, length }];
        self.run(&list, (phase, MESSAGE, tag), Kind::Byte, bytes)
    }

    fn collective(&mut self, collective: Collective, kind: Kind, buffer: &mut [u8]) -> Result<(), CommError> {
        let algorithm = self.algorithm(collective, buffer.len());
        self.sequence += 1;
        if self.world() == 1 {
            return Ok(());
        }
        if let (Collective::AllReduce, Algorithm::Direct, Transport::Shm(port), false) =
            (collective, algorithm, &mut self.transport, self.broken)
        {
            let wait = Wait::among(&self.members, self.options.timeout, &self.options.stop);
            let result = port.all_reduce_staged(kind, buffer, self.sequence, &wait);
            return self.ended(result);
        }
        #[cfg(feature = "mpi")]
        if let (Transport::Mpi(port), false, false) =
            (&mut self.transport, self.options.choice.is_forced(), self.broken)
        {
            let wait = Wait::among(&self.members, self.options.timeout, &self.options.stop);
            let result = port.collective(collective, kind, buffer, &wait);
            return self.ended(result);
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
            return self.named(Err(CommError::Broken { rank, phase }));
        }
        let wait = Wait::among(&self.members, self.options.timeout, &self.options.stop);
        let options = RunOptions { rank, kind, phase, code, sequence, wait: &wait, spare: self.spare.clone() };
        let result = run(list, &options, &mut self.transport, buffer).map(|missed| self.missed.extend(missed));
        self.ended(result)
    }

    /// What a call ends with. After a failure messages may be lost in the middle.
    fn ended(&mut self, result: Result<(), CommError>) -> Result<(), CommError> {
        self.broken |= result.is_err();
        self.named(result)
    }

    /// The same with ranks by their numbers in the world.
    fn named<T>(&self, result: Result<T, CommError>) -> Result<T, CommError> {
        result.map_err(|error| error.renumbered(&self.members))
    }
}
