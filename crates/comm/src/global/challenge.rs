//! Any bytes as what a peer says, for the fuzzer: the peer is named or nothing is wrong, and nobody waits or panics.

use std::time::Duration;

use super::message::{Message, Way, encode};
use super::{Functions, Global, Layout, Pending, Space};
use crate::error::CommError;
use crate::rank::Rank;
use crate::stop::Stop;
use crate::transport::{Transport, thread};
use crate::wire::frame::array;

/// Bytes of what a record says of its message: kind, four arguments, length.
const RECORD_BYTES: usize = 10;

/// Bytes as they come, or, where the first one is even, records of messages in frames that are in order: of one byte the kind (the
/// highest bit says an answer), of two bytes each argument, of one the length.
///
/// # Panics
/// When a promise is broken.
pub fn challenge(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let said = if first % 2 == 0 { framed(bytes) } else { bytes.to_vec() };
    let mut ports = thread::mesh(2).into_iter().map(Transport::Thread);
    let (Some(mut peer), Some(own)) = (ports.next(), ports.next()) else { return };
    let mut functions = Functions::new();
    functions.add("length", |_, words: Vec<(u8, Option<String>)>| words.len() as u64);
    let space = Space::open(own, functions, Duration::from_secs(2), &Stop::new());
    let meeting = (&space.blocks, &space.arrivals);
    let array = Global::new(&space.active, meeting, Layout::new(&[20, 3], 2), vec![7i64; 30]);
    let asked: Vec<Pending<Vec<i64>>> = (0..3).map(|nth| array.get(nth..2 * nth + 1)).collect();
    let (mut sent, mut heard) = (0, vec![0; 1 << 16]);
    loop {
        sent += peer.try_send(Rank(1), &said[sent..]).expect("this rank is there");
        let moved = space.progress();
        let _ = peer.try_receive(Rank(1), &mut heard).expect("this rank is there");
        match moved {
            Err(CommError::Protocol { peer, .. }) => {
                assert_eq!(peer, Rank(0).into());
                assert!(asked.iter().all(Pending::is_ready), "what was asked for has failed or was answered");
                break;
            }
            Err(error) => panic!("{error}, which nobody has caused"),
            Ok(false) if sent == said.len() => break,
            Ok(_) => {}
        }
    }
    assert_eq!(array.local().len(), 30);
    // Who asks on is refused at once.
    drop(peer);
    drop(space);
    assert!(array.get(0..1).wait().is_err());
}

fn framed(mut records: &[u8]) -> Vec<u8> {
    let (mut said, mut sequence) = (Vec::new(), 0);
    while let Some((head, rest)) = records.split_at_checked(RECORD_BYTES) {
        let payload;
        (payload, records) = rest.split_at(rest.len().min(head[9].into()));
        let kind = u16::from(head[0] & 0x7F);
        let way = if head[0] < 0x80 { Way::Request(kind) } else { Way::Answer };
        // Small numbers, and those below zero as the largest.
        let argument = |nth: usize| i64::from(i16::from_le_bytes(array(&head[1 + 2 * nth..][..2]))) as u64;
        let message = Message { arguments: std::array::from_fn(argument), payload };
        said.extend(encode(way, sequence, &message));
        sequence += 1;
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::frame::{Decoded, Decoder};

    #[test]
    fn records_become_messages_in_order() {
        let request = [&[3, 0, 0, 59, 0, 1, 0, 0xFF, 0xFF, 2][..], b"ab"].concat();
        let answer = [0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let (mut said, mut decoder) = (&*framed(&[&request[..], &answer].concat()), Decoder::new(100));
        let mut next = || match decoder.decode(said) {
            Ok(Decoded::Frame { kind, payload, taken }) => {
                said = &said[taken..];
                super::super::message::decode(kind, payload).unwrap()
            }
            other => panic!("{other:?}"),
        };
        let message = Message { arguments: [0, 59, 1, u64::MAX], payload: b"ab" };
        assert_eq!(next(), (Way::Request(3), message));
        assert_eq!(next(), (Way::Answer, Message { arguments: [0; 4], payload: &[] }));
        assert!(said.is_empty());
    }
}
