//! What a worker and the servers of a centre say to each other: pure.
//!
//! A worker begins with a header to every server, numbers that `f32` holds exactly. What follows is known from it. The
//! elements of all parameters are divided among the servers, in parts that differ by at most one, and every part into
//! as many pieces as an agreement sends apart; with one piece everything travels at once.

use std::ops::Range;

use paceline_comm::Rank;
use paceline_comm::transfer::{Action, Transfer, chunk};

use super::super::{Roles, Votes};

/// Numbers of a header.
pub(super) const HEADER: usize = 10;

/// Numbers that every server says behind what it sends.
pub(super) const TOLD: usize = 5;

/// Where the count of what all do together begins: apart from each worker's own.
pub(super) const MEETS: u64 = 1 << 48;

/// Bits of the lower of two numbers that one is sent as; the upper has 24.
const LOW_BITS: u32 = 20;

/// What follows a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// A worker exchanges a piece with the centre, by itself.
    Exchange {
        /// Whether it pushes.
        pushes: bool,
        /// Whether it is answered.
        pulls: bool,
    },
    /// All push what is left, and take the centre.
    Meet,
    /// All add up numbers.
    Sum,
    /// Nothing any more.
    Goodbye,
    /// The first worker: one that was lost takes part again.
    Readmit,
    /// A worker that was lost asks for what it has missed.
    ComeBack,
    /// A worker asks where the centre lies, and is answered.
    Whereabouts,
    /// A worker has changed the centre itself, in the memory where it lies.
    Changed,
}

const COMMANDS: [Command; 10] = [
    Command::Exchange { pushes: true, pulls: true },
    Command::Exchange { pushes: true, pulls: false },
    Command::Exchange { pushes: false, pulls: true },
    Command::Meet,
    Command::Sum,
    Command::Goodbye,
    Command::Readmit,
    Command::ComeBack,
    Command::Whereabouts,
    Command::Changed,
];

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub command: Command,
    /// Which piece, how many numbers are added up, how many buffers of the agreement's own the first worker is given, or
    /// who is back.
    pub number: u64,
    /// Steps that the worker has made.
    pub steps: u64,
    /// What it was told of the centre that a push was computed from; of a change of its own, how many it had missed.
    pub version: u64,
    /// Its wishes.
    pub votes: Votes,
}

impl Header {
    pub fn new(command: Command) -> Self {
        Self { command, number: 0, steps: 0, version: 0, votes: Votes::default() }
    }

    pub fn to_words(self) -> [f32; HEADER] {
        let Self { command, number, steps, version, votes } = self;
        let command = COMMANDS.iter().position(|&known| known == command).unwrap_or_default() as f32;
        let ([a, b], [c, d], [e, f]) = (pair(number), pair(steps), pair(version));
        let [g, h, i] = votes_to_words(votes);
        [command, a, b, c, d, e, f, g, h, i]
    }

    /// Of numbers that a worker sent; none if there is no such command.
    pub fn from_words(words: &[f32; HEADER]) -> Option<Self> {
        let [command, a, b, c, d, e, f, g, h, i] = *words;
        let known = |index: usize| COMMANDS.get(index).filter(|_| index as f32 == command).copied();
        let [number, steps, version] = [[a, b], [c, d], [e, f]].map(unpair);
        Some(Self { command: known(command as usize)?, number, steps, version, votes: votes_from_words([g, h, i]) })
    }
}

/// What a server says behind what it sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// Updates of others that the centre contains.
    pub version: u64,
    /// Wishes of all workers that it has heard.
    pub votes: Votes,
}

impl Told {
    pub fn to_words(self) -> [f32; TOLD] {
        let ([a, b], [c, d, e]) = (pair(self.version), votes_to_words(self.votes));
        [a, b, c, d, e]
    }

    pub fn from_words(words: &[f32; TOLD]) -> Self {
        let [a, b, c, d, e] = *words;
        Self { version: unpair([a, b]), votes: votes_from_words([c, d, e]) }
    }

    /// What either of two servers has said.
    pub fn merge(self, other: Self) -> Self {
        Self { version: self.version.min(other.version), votes: self.votes.merge(other.votes) }
    }
}

fn pair(number: u64) -> [f32; 2] {
    [(number >> LOW_BITS) as f32, (number & ((1 << LOW_BITS) - 1)) as f32]
}

fn unpair([high, low]: [f32; 2]) -> u64 {
    let word = |word: f32, bits: u32| (word as u64).min((1 << bits) - 1);
    word(high, 24) << LOW_BITS | word(low, LOW_BITS)
}

fn votes_to_words(Votes { interrupted, time_limit, checkpoint }: Votes) -> [f32; 3] {
    [interrupted, time_limit, checkpoint].map(|votes| votes as f32)
}

fn votes_from_words(words: [f32; 3]) -> Votes {
    let [interrupted, time_limit, checkpoint] = words.map(|votes| votes as u32);
    Votes { interrupted, time_limit, checkpoint }
}

/// Which elements are where.
#[derive(Clone, Copy, Debug)]
pub(in crate::agree) struct Layout {
    pub roles: Roles,
    /// Of all parameters.
    pub elements: usize,
    /// Of every server's part.
    pub pieces: usize,
}

impl Layout {
    /// A server's part.
    pub fn part(&self, server: usize) -> Range<usize> {
        self.roles.part(self.elements, server)
    }

    /// A piece of a server's part, from the part's beginning.
    pub fn piece_of(&self, server: usize, piece: usize) -> Range<usize> {
        chunk(self.part(server).len(), self.pieces, piece)
    }

    /// The same, among all parameters.
    fn at(&self, server: usize, piece: usize) -> Range<usize> {
        let (part, piece) = (self.part(server), self.piece_of(server, piece));
        part.start + piece.start..part.start + piece.end
    }

    /// A piece of all servers' parts.
    pub fn piece(&self, piece: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.roles.servers).map(move |server| self.at(server, piece)).filter(|range| !range.is_empty())
    }

    /// Elements of a worker's messages: all parameters, and behind them what every server says.
    pub fn message(&self) -> usize {
        self.elements + TOLD * self.roles.servers
    }

    /// Where a worker's message has what a server says.
    pub fn told(&self, server: usize) -> Range<usize> {
        let start = self.elements + TOLD * server;
        start..start + TOLD
    }

    /// A worker's part of an exchange: what it pushes of a piece, and what comes in its place.
    pub fn exchange(&self, worker: usize, piece: usize, pushes: bool, pulls: bool) -> Vec<Transfer> {
        let of = |server: usize| {
            let (peer, at) = (self.roles.server(server), self.at(server, piece));
            let pushed = pushes.then(|| transfer(worker, Action::Send, peer, at.clone()));
            let pulled = pulls.then(|| transfer(worker, Action::Receive, peer, at));
            let told = pulls.then(|| transfer(worker, Action::Receive, peer, self.told(server)));
            [pushed, pulled, told].into_iter().flatten().flatten()
        };
        (0..self.roles.servers).flat_map(of).collect()
    }

    /// A worker's part when it pushes everything.
    pub fn pushes(&self, worker: usize) -> Vec<Transfer> {
        let of = |server: usize| transfer(worker, Action::Send, self.roles.server(server), self.part(server));
        (0..self.roles.servers).filter_map(of).collect()
    }

    /// A worker's part when it takes everything.
    pub fn takes(&self, worker: usize, with_told: bool) -> Vec<Transfer> {
        let of = |server: usize| {
            let peer = self.roles.server(server);
            let part = transfer(worker, Action::Receive, peer, self.part(server));
            let told = with_told.then(|| transfer(worker, Action::Receive, peer, self.told(server)));
            [part, told.flatten()].into_iter().flatten()
        };
        (0..self.roles.servers).flat_map(of).collect()
    }
}

/// One end of what passes between a worker and a server; none of nothing.
pub(in crate::agree) fn transfer(worker: usize, action: Action, peer: Rank, range: Range<usize>) -> Option<Transfer> {
    let step = worker as u32;
    (!range.is_empty()).then_some(Transfer { step, action, peer, start: range.start, length: range.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_being_sent() {
        for command in COMMANDS {
            let votes = Votes { interrupted: 1, time_limit: 0, checkpoint: 2 };
            let header = Header { command, number: 123_456_789, steps: 1 << 30, version: 7, votes };
            assert_eq!(Header::from_words(&header.to_words()), Some(header));
        }
        let told = Told { version: 1 << 40, votes: Votes { time_limit: 3, ..Votes::default() } };
        assert_eq!(Told::from_words(&told.to_words()), told);
    }

    #[test]
    fn a_command_that_does_not_exist_is_none() {
        for word in [-1.0, 0.5, 10.0, f32::NAN, f32::INFINITY] {
            let mut words = Header::new(Command::Meet).to_words();
            words[0] = word;
            assert_eq!(Header::from_words(&words), None, "{word}");
        }
        let header =
            Header::from_words(&[0.0, f32::NAN, -1.0, f32::INFINITY, 1e30, 0.5, 2.5, -3.0, 1e38, 0.0]).unwrap();
        assert!(header.steps < 1 << 44, "numbers that make no sense are numbers in range");
    }

    #[test]
    fn pieces_of_parts_are_all_parameters_once() {
        for (servers, pieces, elements) in [(1, 1, 10), (2, 3, 100), (3, 4, 5), (2, 1, 1)] {
            let layout = Layout { roles: Roles { workers: 2, servers }, elements, pieces };
            let mut seen = vec![0; elements];
            for piece in 0..pieces {
                layout.piece(piece).flatten().for_each(|index| seen[index] += 1);
            }
            assert_eq!(seen, vec![1; elements]);
            let all: usize = layout.exchange(0, 0, true, true).iter().map(|transfer| transfer.length).sum();
            let piece: usize = layout.piece(0).map(|range| range.len()).sum();
            assert_eq!(all, 2 * piece + TOLD * servers);
        }
    }
}
