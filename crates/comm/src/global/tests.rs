//! What a hostile rank may say, and what this rank then says of it; and what callers must not do.

use std::time::Duration;

use super::message::{ARGUMENTS, Message, PAYLOAD_BYTES_MAX, Way, encode};
use super::{Functions, Global, Layout, Space, challenge};
use crate::error::CommError;
use crate::rank::Rank;
use crate::stop::Stop;
use crate::transport::{Transport, thread};
use crate::wire::frame::Header;

const TIMEOUT: Duration = Duration::from_secs(30);

/// The elements 10..20 of type `u64`, on rank 1 of two, which has not met the other; and that one's links.
fn opened() -> (Transport, Space, Global<u64>) {
    let mut ports = thread::mesh(2).into_iter().map(Transport::Thread);
    let (peer, own) = (ports.next().unwrap(), ports.next().unwrap());
    let space = Space::open(own, Functions::new(), TIMEOUT, &Stop::new());
    let array = Global::new(&space.active, (&space.blocks, &space.arrivals), Layout::new(&[20], 2), vec![5; 10]);
    (peer, space, array)
}

fn send(peer: &mut Transport, bytes: &[u8]) {
    assert_eq!(peer.try_send(Rank(1), bytes), Ok(bytes.len()));
}

fn request(handler: u16, arguments: [u64; ARGUMENTS], payload: &[u8]) -> Vec<u8> {
    encode(Way::Request(handler), 0, &Message { arguments, payload })
}

/// What rank 1 says of these bytes.
fn said_of(bytes: &[u8]) -> String {
    let (mut peer, space, array) = opened();
    send(&mut peer, bytes);
    let error = space.progress().unwrap_err();
    assert_eq!(error.peer(), Some(Rank(0)), "{error}");
    assert!(matches!(error, CommError::Protocol { .. }), "{error}");
    // It stays broken, and says the same.
    assert_eq!(array.get(0..1).wait().unwrap_err().to_string(), error.to_string());
    assert!(space.barrier().is_err() && array.local().iter().all(|&value| value == 5));
    error.to_string()
}

#[test]
fn a_hostile_message_is_an_error_that_names_its_rank() {
    let (get, put, fetch_add, u64_code) = (0, 1, 3, 4);
    let cases = [
        (request(99, [0; 4], &[]), "handler 99, where there are 5"),
        (request(get, [7, 10, 1, u64_code], &[]), "array 7, which there is not"),
        (request(get, [u64::MAX, 10, 1, u64_code], &[]), "which there is not"),
        (request(get, [0, 9, 2, u64_code], &[]), "elements 9..11 of array 0, of which this rank has 10..20"),
        (request(get, [0, 19, 2, u64_code], &[]), "elements 19..21"),
        (request(get, [0, 12, u64::MAX, u64_code], &[]), "of which this rank has"),
        (request(get, [0, u64::MAX, 1, u64_code], &[]), "of which this rank has"),
        (request(get, [0, 10, 1, 1], &[]), "elements of type 1 of array 0, which has type 4"),
        (request(get, [0, 10, 1, u64_code], &[0]), "with 1 in the request"),
        (request(put, [0, 10, 2, u64_code], &[0; 8]), "8 bytes for 2 elements of 8 bytes"),
        (request(put, [0, 10, 2, u64_code], &[0; 17]), "17 bytes for 2 elements"),
        (request(fetch_add, [0, 10, 1, u64_code], &[]), "0 bytes for 1 elements"),
        (encode(Way::Answer, 0, &Message { arguments: [0; 4], payload: &[] }), "an answer to nothing"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), "no frame begins here"),
        (Header { kind: 0, sequence: 0, length: u32::MAX }.encode().to_vec(), "where at most"),
        (Header { kind: 0, sequence: 1, length: 32 }.encode().to_vec(), "frame number 1 where number 0 must come"),
        ([&Header { kind: 0, sequence: 0, length: 9 }.encode()[..], &[0; 9]].concat(), "which end in its arguments"),
        (
            [&Header { kind: 0x9000, sequence: 0, length: 32 }.encode()[..], &[0; 32]].concat(),
            "a message of kind 36864",
        ),
    ];
    for (bytes, expected) in cases {
        let said = said_of(&bytes);
        assert!(said.contains(expected) && said.starts_with("rank 1 got a message from rank 0"), "{said}: {expected}");
    }
}

#[test]
fn an_answer_of_another_length_is_an_error_of_whoever_asked() {
    let (mut peer, space, array) = opened();
    let asked = array.get(0..3);
    send(&mut peer, &encode(Way::Answer, 0, &Message { arguments: [0; 4], payload: &[0; 23] }));
    let said = asked.wait().unwrap_err().to_string();
    assert!(said.contains("answer to get: 23 bytes, where 24 must come"), "{said}");
    assert!(space.progress().is_err());
}

#[test]
fn who_arrives_again_and_again_without_the_others_is_refused() {
    let (mut peer, space, _array) = opened();
    for sequence in 0..3 {
        send(&mut peer, &encode(Way::Request(4), sequence, &Message { arguments: [0; 4], payload: &[] }));
    }
    let said = space.progress().unwrap_err().to_string();
    assert!(said.contains("without this rank"), "{said}");
}

#[test]
fn who_takes_no_answers_may_not_ask_on_for_ever() {
    let (mut peer, space, array) = opened();
    let bytes = array.own().len() * 8;
    let mut sequence = 0;
    let error = loop {
        let arguments = [0, 10, 10, 4];
        let one = encode(Way::Request(0), sequence, &Message { arguments, payload: &[] });
        sequence += 1;
        send(&mut peer, &one);
        if let Err(error) = space.progress() {
            break error.to_string();
        }
        // Answers that nobody reads fill the pipe, of a mebibyte, and then wait here.
        assert!(sequence as usize * bytes < 4 << 20, "nobody objects");
    };
    assert!(error.contains("more than 16 requests at once"), "{error}");
}

#[test]
fn the_longest_message_is_taken_and_no_longer_one_is_sent() {
    let (mut peer, space, _array) = opened();
    let bytes = request(1, [0, 10, 10, 4], &vec![0; PAYLOAD_BYTES_MAX]);
    send(&mut peer, &bytes);
    let said = space.progress().unwrap_err().to_string();
    assert!(said.contains("65536 bytes for 10 elements"), "{said}");
}

#[test]
#[should_panic(expected = "let go of it first")]
fn a_slice_that_is_held_while_others_may_ask_for_it_is_a_bug() {
    let (_peer, space, array) = opened();
    let _held = array.local();
    let _ = space.progress();
}

#[test]
#[should_panic(expected = "let go of it first")]
fn so_it_is_where_nobody_is_asked() {
    let (_peer, _space, array) = opened();
    let _held = array.local_mut();
    let _own = array.get(10..11);
}

#[test]
#[should_panic(expected = "a handler only computes")]
fn a_function_that_asks_for_something_is_a_bug() {
    let (_peer, own) = {
        let mut ports = thread::mesh(2).into_iter().map(Transport::Thread);
        (ports.next().unwrap(), ports.next().unwrap())
    };
    let place = std::rc::Rc::new(std::cell::OnceCell::<Global<u64>>::new());
    let mut functions = Functions::new();
    let held = std::rc::Rc::clone(&place);
    let asks = functions.add("asks", move |_, ()| drop(held.get().unwrap().get(0..1)));
    let space = Space::open(own, functions, TIMEOUT, &Stop::new());
    let array = Global::new(&space.active, (&space.blocks, &space.arrivals), Layout::new(&[2], 2), vec![1]);
    place.set(array).unwrap();
    let _ = space.call(Rank(1), asks, &());
}

#[test]
fn any_bytes_are_a_question_an_answer_or_an_error() {
    let mut state = 1u64;
    for _ in 0..2000 {
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let length = next() % 200;
        let mut bytes: Vec<u8> = (0..length).map(|_| [next() % 8, next()][next() % 2] as u8).collect();
        bytes.insert(0, (next() % 4 == 0).into());
        challenge(&bytes);
    }
}
