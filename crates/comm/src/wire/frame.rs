//! Frames: a fixed header, then at most `limit` bytes. Pure functions over bytes; sockets are in `framed.rs`.
//!
//! Header, little endian, 24 bytes: magic (4), kind (2), zero (2), sequence (8), length (4), zero (4). The sequence
//! counts the frames of one direction of one connection from 0, so a frame that comes twice, late or from another
//! connection is noticed. The length is compared with the limit before anything is allocated.

/// Bytes of a header.
pub const HEADER_BYTES: usize = 24;

const MAGIC: [u8; 4] = *b"PCLF";

/// Why bytes are not a frame that may come here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first bytes are not those of a frame.
    #[error("no frame begins here")]
    Magic,
    /// A field that must be zero is not.
    #[error("a reserved field is set")]
    Reserved,
    /// The payload would be longer than allowed.
    #[error("a frame of {length} bytes, where at most {limit} may come")]
    TooLong {
        /// As its header says.
        length: u32,
        /// As the receiver allows.
        limit: u32,
    },
    /// Not the next frame of this connection.
    #[error("frame number {found} where number {expected} must come")]
    Sequence {
        /// Its number.
        found: u64,
        /// The next one's.
        expected: u64,
    },
}

/// The fixed part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the payload is; the meaning is the receiver's.
    pub kind: u16,
    /// The number of the frame in its direction of the connection.
    pub sequence: u64,
    /// Bytes of payload.
    pub length: u32,
}

impl Header {
    /// The header as it travels.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads a header, whatever the bytes are.
    ///
    /// # Errors
    /// When they are not a header. Neither limit nor sequence is looked at: see [`Decoder::check`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        if bytes[..4] != MAGIC {
            return Err(WireError::Magic);
        }
        if bytes[6..8] != [0; 2] || bytes[20..] != [0; 4] {
            return Err(WireError::Reserved);
        }
        Ok(Self {
            kind: u16::from_le_bytes(array(&bytes[4..6])),
            sequence: u64::from_le_bytes(array(&bytes[8..16])),
            length: u32::from_le_bytes(array(&bytes[16..20])),
        })
    }
}

/// The bytes of a slice whose length is known to be right.
pub(crate) fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the slice has the length of the array")
}

/// A frame whose header has passed every check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What the payload is.
    pub kind: u16,
    /// The payload.
    pub payload: Vec<u8>,
}

/// A frame at the start of some bytes, or how many bytes must be there before more can be said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// Nothing is wrong so far; this many bytes, counted from the frame's start, are needed.
    Needs(usize),
    /// A frame, and how many bytes it took.
    Frame {
        /// What the payload is.
        kind: u16,
        /// The payload, in place.
        payload: &'a [u8],
        /// Bytes of header and payload.
        taken: usize,
    },
}

/// The receiving end of one direction of a connection: the longest payload it takes, and the number of the next frame.
#[derive(Clone, Copy, Debug)]
pub struct Decoder {
    limit: u32,
    expected: u64,
}

impl Decoder {
    /// A decoder at the start of a connection that takes payloads up to `limit` bytes.
    pub const fn new(limit: u32) -> Self {
        Self { limit, expected: 0 }
    }

    /// Checks the next header and counts it.
    ///
    /// # Errors
    /// When no frame may begin with it here. The connection cannot be used any more.
    pub fn check(&mut self, bytes: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
        let header = self.peek(bytes)?;
        self.expected += 1;
        Ok(header)
    }

    fn peek(&self, bytes: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
        let header = Header::decode(bytes)?;
        if header.length > self.limit {
            return Err(WireError::TooLong { length: header.length, limit: self.limit });
        }
        if header.sequence != self.expected {
            return Err(WireError::Sequence { found: header.sequence, expected: self.expected });
        }
        Ok(header)
    }

    /// Looks for the next frame at the start of `bytes`.
    ///
    /// # Errors
    /// When no frame may begin there.
    pub fn decode<'a>(&mut self, bytes: &'a [u8]) -> Result<Decoded<'a>, WireError> {
        let Some((head, rest)) = bytes.split_first_chunk() else { return Ok(Decoded::Needs(HEADER_BYTES)) };
        let header = self.peek(head)?;
        let length = header.length as usize;
        let Some(payload) = rest.get(..length) else { return Ok(Decoded::Needs(HEADER_BYTES + length)) };
        self.expected += 1;
        Ok(Decoded::Frame { kind: header.kind, payload, taken: HEADER_BYTES + length })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u16, sequence: u64, payload: &[u8]) -> Vec<u8> {
        let header = Header { kind, sequence, length: payload.len() as u32 };
        [&header.encode()[..], payload].concat()
    }

    #[test]
    fn frames_come_out_in_order() {
        let bytes = [frame(7, 0, b"one"), frame(8, 1, b"")].concat();
        let mut decoder = Decoder::new(10);
        let first = decoder.decode(&bytes).unwrap();
        assert_eq!(first, Decoded::Frame { kind: 7, payload: b"one", taken: 27 });
        let second = decoder.decode(&bytes[27..]).unwrap();
        assert_eq!(second, Decoded::Frame { kind: 8, payload: b"", taken: 24 });
    }

    #[test]
    fn a_replayed_frame_is_refused() {
        let bytes = frame(7, 0, b"one");
        let mut decoder = Decoder::new(10);
        decoder.decode(&bytes).unwrap();
        assert_eq!(decoder.decode(&bytes), Err(WireError::Sequence { found: 0, expected: 1 }));
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_from_the_header_alone() {
        let header = Header { kind: 1, sequence: 0, length: u32::MAX }.encode();
        assert_eq!(Decoder::new(100).decode(&header), Err(WireError::TooLong { length: u32::MAX, limit: 100 }));
    }

    proptest! {
        #[test]
        fn garbage_never_panics_and_never_asks_for_more_than_the_limit(bytes: Vec<u8>, limit in 0u32..1000) {
            if let Ok(Decoded::Needs(bytes)) = Decoder::new(limit).decode(&bytes) {
                prop_assert!(bytes <= HEADER_BYTES + limit as usize);
            }
        }

        #[test]
        fn a_frame_with_any_bits_flipped_is_whole_short_or_refused(
            payload in prop::collection::vec(any::<u8>(), 0..64), at in 0usize..HEADER_BYTES, flip in 1u8..,
        ) {
            let mut bytes = frame(3, 0, &payload);
            bytes[at] ^= flip;
            match Decoder::new(64).decode(&bytes) {
                Ok(Decoded::Needs(count)) => prop_assert!(count > bytes.len() && count <= HEADER_BYTES + 64),
                Ok(Decoded::Frame { kind, payload: found, .. }) => {
                    prop_assert!(kind != 3 || found.len() < payload.len());
                }
                Err(_) => {}
            }
        }

        #[test]
        fn every_truncation_asks_for_more(payload in prop::collection::vec(any::<u8>(), 0..64), cut in 0usize..88) {
            let bytes = frame(3, 0, &payload);
            let cut = cut.min(bytes.len().saturating_sub(1));
            let needs = matches!(Decoder::new(64).decode(&bytes[..cut]), Ok(Decoded::Needs(count)) if count > cut);
            prop_assert!(needs);
        }
    }
}
