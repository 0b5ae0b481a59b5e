//! Messages and replies as bytes: a kind, fields of a length that follows from it, and data.

use std::sync::Arc;
use std::time::Duration;

use super::{Answer, Ask, Key, No, Span, Usage, WATCH_MAX};

/// The longest list of places that a reply may have: of a region of 256 GB.
const PLACES_MAX: usize = 1 << 22;

/// What a client sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Message {
    /// Who it is: nobody yet, or one who has other connections.
    Hello {
        /// What a welcome said, or zeros.
        secret: [u8; 16],
    },
    /// Something that the box decides.
    Ask(Ask),
    /// Opens, reads and closes; data comes back.
    Read {
        /// The region.
        region: u64,
        /// What of it.
        span: Span,
    },
    /// Drafts, writes and commits; data follows.
    Write {
        /// The region.
        region: u64,
        /// What of it: as much as follows.
        span: Span,
        /// How often it is added; it replaces what is there without.
        scale: Option<f32>,
    },
    /// Reads a part of a view; data comes back.
    Look {
        /// The view.
        held: u64,
        /// Which part, from the beginning of the region.
        span: Span,
    },
    /// Fills a part of a draft; data follows, and nothing comes back.
    Land {
        /// The draft.
        held: u64,
        /// Which part, from the beginning of the region.
        span: Span,
    },
    /// Asks for a region's memory itself, on the box's host.
    Map {
        /// The region.
        region: u64,
    },
}

/// What a box sends.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// To a hello.
    Welcome {
        /// Which client it is.
        client: u64,
        /// What its other connections say.
        secret: [u8; 16],
        /// The box.
        name: [u8; 16],
    },
    /// What the box has decided.
    Answer(Answer),
    /// Data follows.
    Data {
        /// How often the region had changed.
        version: u64,
    },
    /// A number as it was before it was added to.
    Counted {
        /// How often the region has changed.
        version: u64,
        /// The number.
        before: i64,
    },
    /// A file comes with it.
    Mapped {
        /// Its length.
        bytes: u64,
        /// Bytes of a page.
        page: u64,
    },
}

/// Kinds of messages, and the bytes of their fields.
const FIELDS: [usize; 18] = [16, 57, 48, 8, 24, 24, 8, 21, 44, 24, 8, 24, 0, 24, 29, 24, 24, 8];

/// Kinds of replies.
const WELCOME: u16 = 101;
const REGION: u16 = 102;
const HELD: u16 = 103;
const DONE: u16 = 104;
const USAGE: u16 = 105;
const NO: u16 = 106;
const DATA: u16 = 107;
const COUNTED: u16 = 108;
const MAPPED: u16 = 109;

/// Writes fields one after the other.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn word(mut self, word: u64) -> Self {
        self.0.extend_from_slice(&word.to_le_bytes());
        self
    }

    fn span(self, span: Span) -> Self {
        self.word(span.at).word(span.bytes)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn scale(self, scale: Option<f32>) -> Self {
        self.bytes(&[u8::from(scale.is_some())]).bytes(&scale.unwrap_or_default().to_le_bytes())
    }

    fn key(self, key: &Key) -> Self {
        self.bytes(&key.name).bytes(&key.secret)
    }
}

/// Reads them; nothing is there behind the end.
struct Read<'a>(&'a [u8]);

impl Read<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn span(&mut self) -> Option<Span> {
        Some(Span { at: self.word()?, bytes: self.word()? })
    }

    fn float(&mut self) -> Option<f32> {
        self.take().map(f32::from_le_bytes)
    }

    fn scale(&mut self) -> Option<Option<f32>> {
        let [has] = self.take()?;
        let scale = self.float()?;
        match has {
            0 => Some(None),
            1 => Some(Some(scale)),
            _ => None,
        }
    }

    fn key(&mut self) -> Option<Key> {
        Some(Key { name: self.take()?, secret: self.take()? })
    }

    fn end<T>(self, read: T) -> Option<T> {
        self.0.is_empty().then_some(read)
    }
}

impl Message {
    /// Its kind and its fields.
    pub fn encode(&self) -> (u16, Vec<u8>) {
        let fields = Fields::default();
        let (kind, fields) = match *self {
            Self::Hello { secret } => (1, fields.bytes(&secret)),
            Self::Ask(ask) => encode_ask(ask, fields),
            Self::Read { region, span } => (14, fields.word(region).span(span)),
            Self::Write { region, span, scale } => (15, fields.word(region).span(span).scale(scale)),
            Self::Look { held, span } => (16, fields.word(held).span(span)),
            Self::Land { held, span } => (17, fields.word(held).span(span)),
            Self::Map { region } => (18, fields.word(region)),
        };
        (kind, fields.0)
    }

    /// Bytes of the fields of a kind; none if there is no such kind.
    pub fn fields(kind: u16) -> Option<usize> {
        (1..=18).contains(&kind).then(|| FIELDS[usize::from(kind) - 1])
    }

    /// Whether data follows.
    pub const fn has_data(kind: u16) -> bool {
        matches!(kind, 15 | 17)
    }

    /// Reads the fields of a kind, whatever they are.
    ///
    /// # Errors
    /// What is wrong with them, in words.
    pub fn decode(kind: u16, fields: &[u8]) -> Result<Self, String> {
        let read = Read(fields);
        let message = match kind {
            1 => decode_hello_fields(read),
            14..=18 => decode_data(kind, read),
            _ => decode_ask(kind, read).map(Self::Ask),
        };
        message.ok_or_else(|| format!("a message of kind {kind} with {} bytes that mean nothing", fields.len()))
    }
}

fn encode_ask(ask: Ask, fields: Fields) -> (u16, Fields) {
    match ask {
        Ask::Create { key, bytes, keeps } => (2, fields.key(&key).word(bytes).bytes(&[u8::from(keeps)])),
        Ask::Attach { key } => (3, fields.key(&key)),
        Ask::Free { region } => (4, fields.word(region)),
        Ask::Open { region, span } => (5, fields.word(region).span(span)),
        Ask::Draft { region, span } => (6, fields.word(region).span(span)),
        Ask::Close { held } => (7, fields.word(held)),
        Ask::Commit { draft, bytes, scale } => (8, fields.word(draft).word(bytes).scale(scale)),
        Ask::Accumulate { target: (target, span), source, from, scale } => {
            (9, fields.word(target).span(span).word(source).word(from).bytes(&scale.to_le_bytes()))
        }
        Ask::Count { region, at, by } => (10, fields.word(region).word(at).bytes(&by.to_le_bytes())),
        Ask::Notify { region } => (11, fields.word(region)),
        Ask::Watch { region, version, limit } => {
            let limit = u64::try_from(limit.as_micros()).unwrap_or(u64::MAX);
            (12, fields.word(region).word(version).word(limit))
        }
        Ask::Usage => (13, fields),
    }
}

fn decode_hello_fields(mut read: Read<'_>) -> Option<Message> {
    let secret = read.take()?;
    read.end(Message::Hello { secret })
}

fn decode_data(kind: u16, mut read: Read<'_>) -> Option<Message> {
    let number = read.word()?;
    let message = match kind {
        14 => Message::Read { region: number, span: read.span()? },
        15 => Message::Write { region: number, span: read.span()?, scale: read.scale()? },
        16 => Message::Look { held: number, span: read.span()? },
        17 => Message::Land { held: number, span: read.span()? },
        _ => Message::Map { region: number },
    };
    read.end(message)
}

fn decode_ask(kind: u16, mut read: Read<'_>) -> Option<Ask> {
    let ask = match kind {
        2 => {
            let (key, bytes, [keeps]) = (read.key()?, read.word()?, read.take()?);
            Ask::Create { key, bytes, keeps: keeps != 0 }
        }
        3 => Ask::Attach { key: read.key()? },
        4 => Ask::Free { region: read.word()? },
        5 => Ask::Open { region: read.word()?, span: read.span()? },
        6 => Ask::Draft { region: read.word()?, span: read.span()? },
        7 => Ask::Close { held: read.word()? },
        8 => Ask::Commit { draft: read.word()?, bytes: read.word()?, scale: read.scale()? },
        9 => {
            let target = (read.word()?, read.span()?);
            Ask::Accumulate { target, source: read.word()?, from: read.word()?, scale: read.float()? }
        }
        10 => Ask::Count { region: read.word()?, at: read.word()?, by: i64::from_le_bytes(read.take()?) },
        11 => Ask::Notify { region: read.word()? },
        12 => {
            let (region, version) = (read.word()?, read.word()?);
            let limit = Duration::from_micros(read.word()?).min(WATCH_MAX);
            Ask::Watch { region, version, limit }
        }
        13 => Ask::Usage,
        _ => return None,
    };
    read.end(ask)
}

impl Reply {
    /// Its kind and its fields.
    pub fn encode(&self) -> (u16, Vec<u8>) {
        let fields = Fields::default();
        let (kind, fields) = match self {
            Self::Welcome { client, secret, name } => (WELCOME, fields.word(*client).bytes(secret).bytes(name)),
            Self::Answer(Answer::Region { region, bytes, version }) => {
                (REGION, fields.word(*region).word(*bytes).word(*version))
            }
            Self::Answer(Answer::Held { number, version, places }) => {
                let fields = fields.word(*number).word(*version);
                (HELD, fields.bytes(&places.iter().flat_map(|place| place.to_le_bytes()).collect::<Vec<u8>>()))
            }
            Self::Answer(Answer::Done { version }) => (DONE, fields.word(*version)),
            Self::Answer(Answer::Usage(usage)) => {
                (USAGE, fields.word(usage.regions).word(usage.clients).word(usage.used).word(usage.bytes_max))
            }
            Self::Answer(Answer::No(no)) => (NO, fields.bytes(&[*no as u8])),
            Self::Data { version } => (DATA, fields.word(*version)),
            Self::Counted { version, before } => (COUNTED, fields.word(*version).bytes(&before.to_le_bytes())),
            Self::Mapped { bytes, page } => (MAPPED, fields.word(*bytes).word(*page)),
        };
        (kind, fields.0)
    }

    /// Bytes of the fields of a reply of a kind and a length; what is left of it is data.
    pub const fn fields(kind: u16, length: usize) -> usize {
        if kind == DATA { 8 } else { length }
    }

    /// Reads a reply, whatever the bytes are.
    ///
    /// # Errors
    /// What is wrong with them, in words.
    pub fn decode(kind: u16, fields: &[u8]) -> Result<Self, String> {
        let wrong = || format!("a reply of kind {kind} with {} bytes that mean nothing", fields.len());
        Self::read(kind, Read(fields)).ok_or_else(wrong)
    }

    fn read(kind: u16, mut read: Read<'_>) -> Option<Self> {
        let reply = match kind {
            WELCOME => Self::Welcome { client: read.word()?, secret: read.take()?, name: read.take()? },
            REGION => Self::Answer(Answer::Region { region: read.word()?, bytes: read.word()?, version: read.word()? }),
            HELD => {
                let (number, version) = (read.word()?, read.word()?);
                let (places, rest) = read.0.as_chunks::<4>();
                if !rest.is_empty() || places.len() > PLACES_MAX {
                    return None;
                }
                let places: Arc<[u32]> = places.iter().map(|place| u32::from_le_bytes(*place)).collect();
                return Some(Self::Answer(Answer::Held { number, version, places }));
            }
            DONE => Self::Answer(Answer::Done { version: read.word()? }),
            USAGE => Self::Answer(Answer::Usage(Usage {
                regions: read.word()?,
                clients: read.word()?,
                used: read.word()?,
                bytes_max: read.word()?,
            })),
            NO => {
                let [code] = read.take()?;
                Self::Answer(Answer::No(*No::ALL.iter().find(|no| **no as u8 == code)?))
            }
            DATA => Self::Data { version: read.word()? },
            COUNTED => Self::Counted { version: read.word()?, before: i64::from_le_bytes(read.take()?) },
            MAPPED => Self::Mapped { bytes: read.word()?, page: read.word()? },
            _ => return None,
        };
        read.end(reply)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(byte: u8) -> Key {
        Key { name: [byte; 32], secret: [byte ^ 0xff; 16] }
    }

    fn messages() -> Vec<Message> {
        let span = Span { at: 1 << 40, bytes: 12 };
        let asks = [
            Ask::Create { key: key(3), bytes: 1 << 33, keeps: true },
            Ask::Attach { key: key(4) },
            Ask::Free { region: 9 },
            Ask::Open { region: 9, span },
            Ask::Draft { region: 9, span },
            Ask::Close { held: 5 },
            Ask::Commit { draft: 5, bytes: 12, scale: Some(-0.5) },
            Ask::Commit { draft: 5, bytes: 12, scale: None },
            Ask::Accumulate { target: (1, span), source: 2, from: 8, scale: 0.25 },
            Ask::Count { region: 1, at: 8, by: -3 },
            Ask::Notify { region: 1 },
            Ask::Watch { region: 1, version: 7, limit: Duration::from_millis(1500) },
            Ask::Usage,
        ];
        let rest = [
            Message::Hello { secret: [7; 16] },
            Message::Read { region: 1, span },
            Message::Write { region: 1, span, scale: Some(2.0) },
            Message::Look { held: 1, span },
            Message::Land { held: 1, span },
            Message::Map { region: 1 },
        ];
        asks.into_iter().map(Message::Ask).chain(rest).collect()
    }

    fn replies() -> Vec<Reply> {
        let no = No::ALL.into_iter().map(|no| Reply::Answer(Answer::No(no)));
        let usage = Usage { regions: 1, clients: 2, used: 3, bytes_max: 4 };
        let answers = [
            Reply::Answer(Answer::Region { region: 1, bytes: 2, version: 3 }),
            Reply::Answer(Answer::Held { number: 1, version: 2, places: [5, 6, 7].into() }),
            Reply::Answer(Answer::Done { version: 3 }),
            Reply::Answer(Answer::Usage(usage)),
            Reply::Welcome { client: 1, secret: [2; 16], name: [3; 16] },
            Reply::Data { version: 8 },
            Reply::Counted { version: 8, before: -1 },
            Reply::Mapped { bytes: 1, page: 4096 },
        ];
        no.chain(answers).collect()
    }

    #[test]
    fn what_is_said_survives_being_sent() {
        for message in messages() {
            let (kind, fields) = message.encode();
            assert_eq!(Message::fields(kind), Some(fields.len()), "{message:?}");
            assert_eq!(Message::decode(kind, &fields), Ok(message));
        }
        for reply in replies() {
            let (kind, fields) = reply.encode();
            assert_eq!(Reply::fields(kind, fields.len()), fields.len());
            assert_eq!(Reply::decode(kind, &fields), Ok(reply));
        }
    }

    #[test]
    fn fields_that_are_short_or_long_mean_nothing() {
        for message in messages() {
            let (kind, mut fields) = message.encode();
            fields.push(0);
            assert!(Message::decode(kind, &fields).is_err(), "{message:?}");
            fields.truncate(fields.len().saturating_sub(2));
            assert!(fields.is_empty() || Message::decode(kind, &fields).is_err(), "{message:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_something_or_refused(kind in 0u16..120, bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(message) = Message::decode(kind, &bytes) {
                prop_assert_eq!(message.encode().0, kind);
            }
            if let Ok(reply) = Reply::decode(kind, &bytes) {
                prop_assert_eq!(reply.encode().0, kind);
            }
        }
    }
}
