//! Questions and answers as bytes. An answer is a head, which says how long it is, and pieces of at most [`PIECE_BYTES`]; memory is taken
//! as pieces come.

use std::time::Duration;

use paceline_comm::CommError;
use paceline_comm::wire::stream::Talk;
use paceline_comm::wire::{Framed, Socket};
use paceline_comm::{Stop, Wait};
use paceline_system::printable::printable;

use super::{ANSWER_BYTES_MAX, PIECE_MAX};

/// The longest frame of an answer.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// Frame kinds.
pub(super) const QUESTION: u16 = 1;
pub(super) const HEAD: u16 = 2;
pub(super) const PIECE: u16 = 3;

/// The longest sentence that is sent, and shown.
const TEXT_BYTES_MAX: usize = 2048;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The listing.
    Listing,
    /// An item of the training half, by number.
    Train(u64),
    /// An item of the validation half.
    Val(u64),
}

/// What is asked for, and how many bytes may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// What.
    pub what: What,
    /// A longer answer is none.
    pub bytes_max: u64,
    /// The checksum of the listing that numbers are of: whoever lends something else by now does not answer. 0 where the listing is asked
    /// for.
    pub list: u32,
}

/// What comes back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// What was asked for.
    Bytes(Vec<u8>),
    /// The item itself is wrong, as it would be for whoever read it in its place.
    Damaged(String),
    /// It cannot be had.
    Failed(String),
}

impl Question {
    /// Bytes of one.
    pub const BYTES: usize = 21;

    /// As it travels: what (0, 1, 2), number (8), most bytes (8), checksum (4).
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let (what, number) = match self.what {
            What::Listing => (0, 0),
            What::Train(number) => (1, number),
            What::Val(number) => (2, number),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[0] = what;
        bytes[1..9].copy_from_slice(&number.to_le_bytes());
        bytes[9..17].copy_from_slice(&self.bytes_max.to_le_bytes());
        bytes[17..].copy_from_slice(&self.list.to_le_bytes());
        bytes
    }

    /// Reads one, whatever the bytes are.
    ///
    /// # Errors
    /// What is wrong with them, in words.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let Some((what, number, bytes_max, list)) = words(bytes) else {
            return Err(format!("a question of {} bytes", bytes.len()));
        };
        if bytes_max > ANSWER_BYTES_MAX {
            return Err(format!("a question for {bytes_max} bytes, where at most {ANSWER_BYTES_MAX} are given"));
        }
        let what = match (what, number) {
            (0, 0) => What::Listing,
            (1, number) => What::Train(number),
            (2, number) => What::Val(number),
            _ => return Err("a question for something unknown".into()),
        };
        Ok(Self { what, bytes_max, list })
    }
}

fn words(bytes: &[u8]) -> Option<(u8, u64, u64, u32)> {
    let bytes: &[u8; Question::BYTES] = bytes.try_into().ok()?;
    let word = |at: usize| Some(u64::from_le_bytes(*bytes[at..].first_chunk()?));
    Some((bytes[0], word(1)?, word(9)?, u32::from_le_bytes(*bytes.last_chunk()?)))
}

/// What an answer begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// So many bytes follow, in pieces.
    Bytes(u64),
    /// A sentence.
    Damaged(String),
    /// A sentence.
    Failed(String),
}

impl Head {
    pub(super) fn encode(&self) -> Vec<u8> {
        let sentence = |kind: u8, text: &str| {
            let end = (0..=text.len().min(TEXT_BYTES_MAX)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
            [&[kind], &text.as_bytes()[..end]].concat()
        };
        match self {
            Self::Bytes(length) => [&[0][..], &length.to_le_bytes()].concat(),
            Self::Damaged(text) => sentence(1, text),
            Self::Failed(text) => sentence(2, text),
        }
    }

    /// Reads one; nothing longer than was asked for is announced.
    pub(super) fn decode(bytes: &[u8], bytes_max: u64) -> Result<Self, String> {
        let Some((&kind, rest)) = bytes.split_first() else { return Err("an empty answer".into()) };
        let text = || {
            let text = std::str::from_utf8(rest).ok().filter(|text| text.len() <= TEXT_BYTES_MAX);
            text.map(printable).ok_or_else(|| "an answer that is no sentence".to_owned())
        };
        match kind {
            0 => {
                let length = rest.try_into().map(u64::from_le_bytes).map_err(|_| "an answer without a length")?;
                match length <= bytes_max {
                    true => Ok(Self::Bytes(length)),
                    false => Err(format!("an answer of {length} bytes, where at most {bytes_max} may come")),
                }
            }
            1 => Ok(Self::Damaged(text()?)),
            2 => Ok(Self::Failed(text()?)),
            _ => Err(format!("an answer of the unknown kind {kind}")),
        }
    }
}

/// Reads an answer whole, from frames as they come: kind and payload.
pub(super) fn gather(
    bytes_max: u64,
    mut next: impl FnMut() -> Result<(u16, Vec<u8>), CommError>,
    violation: impl Fn(String) -> CommError,
) -> Result<Answer, CommError> {
    let (kind, payload) = next()?;
    if kind != HEAD {
        return Err(violation(format!("a frame of kind {kind} where an answer begins")));
    }
    let length = match Head::decode(&payload, bytes_max).map_err(&violation)? {
        Head::Damaged(text) => return Ok(Answer::Damaged(text)),
        Head::Failed(text) => return Ok(Answer::Failed(text)),
        Head::Bytes(length) => length,
    };
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < length {
        let (kind, piece) = next()?;
        let wanted = (length - bytes.len() as u64).min(PIECE_BYTES as u64);
        if kind != PIECE || piece.len() as u64 != wanted {
            let found = piece.len();
            return Err(violation(format!(
                "a frame of kind {kind} with {found} bytes where a piece of {wanted} belongs"
            )));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(Answer::Bytes(bytes))
}

/// A connection after its greeting.
pub(super) struct Line {
    pub(super) framed: Framed<Socket>,
    pub(super) talk: Talk,
}

impl Line {
    /// The next frame, if it comes in time.
    pub(super) fn next(&mut self, limit: Duration, stop: &Stop) -> Result<(u16, Vec<u8>), CommError> {
        let frame = self.framed.receive(&self.talk, &Wait::new(limit, stop))?;
        Ok((frame.kind, frame.payload))
    }

    /// Sends a frame within a piece's time.
    pub(super) fn send(&mut self, kind: u16, payload: &[u8], stop: &Stop) -> Result<(), CommError> {
        self.framed.send(kind, payload, &self.talk, &Wait::new(PIECE_MAX, stop))
    }
}

/// Any bytes as a question and as an answer, for the fuzzer: frames are two bytes of length, one of kind, and so many bytes.
///
/// # Panics
/// When a promise is broken: what was taken would be taken again, and nothing is longer than was asked for.
pub fn challenge(bytes: &[u8]) {
    const BYTES_MAX: u64 = 3 << 20;
    if let Ok(question) = Question::decode(bytes) {
        assert_eq!(question.encode(), bytes);
    }
    if let Ok(head) = Head::decode(bytes, BYTES_MAX) {
        assert!(!matches!(head, Head::Bytes(length) if length > BYTES_MAX));
        assert!(Head::decode(&head.encode(), BYTES_MAX).is_ok());
    }
    let mut rest = bytes;
    let talk = Talk { rank: super::ASKER, peer: super::SERVER.into(), phase: "samples" };
    let next = || {
        let Some((&[low, high, kind], behind)) = rest.split_first_chunk() else { return Err(talk.gone("the end")) };
        let (payload, behind) = behind.split_at(behind.len().min(usize::from(u16::from_le_bytes([low, high]))));
        rest = behind;
        Ok((kind.into(), payload.to_vec()))
    };
    if let Ok(Answer::Bytes(found)) = gather(BYTES_MAX, next, |what| talk.violation(what)) {
        assert!(found.len() as u64 <= BYTES_MAX && found.len() <= bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(frames: Vec<(u16, Vec<u8>)>, bytes_max: u64) -> Result<Answer, String> {
        let talk = Talk { rank: super::super::ASKER, peer: super::super::SERVER.into(), phase: "samples" };
        let mut frames = frames.into_iter();
        let next = || frames.next().ok_or_else(|| talk.gone("the end"));
        gather(bytes_max, next, |what| talk.violation(what)).map_err(|error| error.to_string())
    }

    #[test]
    fn questions_survive_the_wire_and_others_are_refused() {
        for what in [What::Listing, What::Train(7), What::Val(u64::MAX)] {
            let question = Question { what, bytes_max: 1 << 28, list: 0xfeed };
            assert_eq!(Question::decode(&question.encode()), Ok(question));
        }
        let greedy = Question { what: What::Train(1), bytes_max: u64::MAX, list: 1 };
        assert!(Question::decode(&greedy.encode()).unwrap_err().contains("at most"));
        for bytes in [&[][..], &[3; Question::BYTES], &[0; Question::BYTES - 1], &[0; Question::BYTES + 1]] {
            assert!(Question::decode(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn an_answer_comes_in_pieces_and_never_longer_than_was_asked_for() {
        let head = |length: u64| (HEAD, Head::Bytes(length).encode());
        let bytes: Vec<u8> = (0..PIECE_BYTES + 5).map(|at| at as u8).collect();
        let pieces = vec![
            head(bytes.len() as u64),
            (PIECE, bytes[..PIECE_BYTES].to_vec()),
            (PIECE, bytes[PIECE_BYTES..].to_vec()),
        ];
        assert_eq!(gathered(pieces.clone(), 2 << 20), Ok(Answer::Bytes(bytes)));
        assert_eq!(gathered(vec![head(0)], 10), Ok(Answer::Bytes(Vec::new())));
        for (frames, words) in [
            (pieces[..2].to_vec(), "the end"),
            (pieces[1..].to_vec(), "where an answer begins"),
            (vec![head(11)], "at most 10 may come"),
            (vec![head(4), (PIECE, vec![0; 5])], "a piece of 4 belongs"),
            (vec![head(4), (PIECE, vec![])], "a piece of 4 belongs"),
            (vec![head(4), (HEAD, vec![0; 4])], "a piece of 4 belongs"),
            (vec![(HEAD, vec![])], "an empty answer"),
            (vec![(HEAD, vec![0, 1])], "without a length"),
            (vec![(HEAD, vec![9])], "unknown kind 9"),
            (vec![(HEAD, vec![1, 0xff])], "no sentence"),
        ] {
            let limit = if words.starts_with("the end") { 2 << 20 } else { 10 };
            let error = gathered(frames, limit).unwrap_err();
            assert!(error.contains(words), "{error} without {words}");
        }
    }

    #[test]
    fn sentences_are_cut_and_made_printable() {
        let long = "ä".repeat(5000);
        let Ok(Head::Failed(text)) = Head::decode(&Head::Failed(long).encode(), 0) else { panic!("a sentence") };
        assert_eq!(text.chars().count(), 1024);
        let Ok(Answer::Damaged(text)) = gathered(vec![(HEAD, b"\x01\x1b[31mred".to_vec())], 0) else {
            panic!("a sentence")
        };
        assert!(!text.contains('\x1b'), "{text}");
    }
}
