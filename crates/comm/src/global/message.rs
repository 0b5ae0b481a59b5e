//! What travels between ranks of a space: an active message, in a frame. Pure functions over bytes; `link.rs` keeps the queues.
//!
//! The frame's kind is the handler's number, or says that this is an answer; its payload is [`ARGUMENTS`] words, little
//! endian, and then at most [`PAYLOAD_BYTES_MAX`] bytes. Answers come in the order of their requests, so nothing names
//! the request that an answer belongs to, and nothing can be named that was never asked for.

use crate::wire::frame::{HEADER_BYTES, Header, array};

/// Words that a message has beside its payload.
pub const ARGUMENTS: usize = 4;
/// Bytes of the longest payload: as many as make a system call worth it, few enough that a queue of them is small.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 10;
/// Handlers that a table may have.
pub const HANDLERS_MAX: usize = 1 << 12;

const WORDS_BYTES: usize = ARGUMENTS * size_of::<u64>();
/// Bytes of the longest payload of a frame.
pub(super) const BODY_BYTES_MAX: usize = WORDS_BYTES + PAYLOAD_BYTES_MAX;
/// Bytes of the longest frame.
pub(super) const FRAME_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX;
/// The kind of frames that are answers.
const ANSWER: u16 = 0x8000;

/// What a handler is given, and what comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Numbers, whose meaning is the handler's.
    pub arguments: [u64; ARGUMENTS],
    /// Bytes, whose meaning is the handler's.
    pub payload: &'a [u8],
}

/// What a handler answers; nothing in particular by default, which still says that it has run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Numbers.
    pub arguments: [u64; ARGUMENTS],
    /// Bytes, at most [`PAYLOAD_BYTES_MAX`].
    pub payload: Vec<u8>,
}

impl Answer {
    /// The same as it travels.
    pub fn message(&self) -> Message<'_> {
        Message { arguments: self.arguments, payload: &self.payload }
    }
}

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the handler of this number.
    Request(u16),
    /// Back to who asked.
    Answer,
}

impl Way {
    const fn kind(self) -> u16 {
        match self {
            Self::Request(handler) => handler,
            Self::Answer => ANSWER,
        }
    }
}

/// A whole frame.
///
/// # Panics
/// When the payload is too long: a bug.
pub fn encode(way: Way, sequence: u64, message: &Message<'_>) -> Vec<u8> {
    assert!(message.payload.len() <= PAYLOAD_BYTES_MAX, "a message of {} bytes", message.payload.len());
    let length = (WORDS_BYTES + message.payload.len()) as u32;
    let mut bytes = Vec::with_capacity(HEADER_BYTES + length as usize);
    bytes.extend(Header { kind: way.kind(), sequence, length }.encode());
    message.arguments.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    bytes.extend(message.payload);
    bytes
}

/// Reads what was in a frame, whatever the bytes are. Whether there is such a handler is the table's to say.
///
/// # Errors
/// What is wrong with it.
pub fn decode(kind: u16, body: &[u8]) -> Result<(Way, Message<'_>), String> {
    let way = match kind {
        ANSWER => Way::Answer,
        handler if usize::from(handler) < HANDLERS_MAX => Way::Request(handler),
        other => return Err(format!("a message of kind {other}")),
    };
    let Some((words, payload)) = body.split_at_checked(WORDS_BYTES) else {
        return Err(format!("a message of {} bytes, which end in its arguments", body.len()));
    };
    if payload.len() > PAYLOAD_BYTES_MAX {
        return Err(format!("a payload of {} bytes, where at most {PAYLOAD_BYTES_MAX} may come", payload.len()));
    }
    let word = |nth: usize| u64::from_le_bytes(array(&words[nth * size_of::<u64>()..][..size_of::<u64>()]));
    Ok((way, Message { arguments: std::array::from_fn(word), payload }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::frame::{Decoded, Decoder};

    proptest! {
        #[test]
        fn a_message_comes_out_as_it_went_in(
            handler in 0..HANDLERS_MAX as u16,
            arguments: [u64; ARGUMENTS],
            payload in prop::collection::vec(any::<u8>(), 0..100),
        ) {
            for way in [Way::Request(handler), Way::Answer] {
                let message = Message { arguments, payload: &payload };
                let bytes = encode(way, 0, &message);
                let Ok(Decoded::Frame { kind, payload: body, taken }) = Decoder::new(1000).decode(&bytes) else {
                    panic!("no frame");
                };
                prop_assert_eq!(taken, bytes.len());
                prop_assert_eq!(decode(kind, body), Ok((way, message)));
            }
        }

        #[test]
        fn garbage_never_panics(kind: u16, body: Vec<u8>) {
            if let Ok((way, message)) = decode(kind, &body) {
                prop_assert!(way.kind() == kind && message.payload.len() + WORDS_BYTES == body.len());
            }
        }
    }
}
