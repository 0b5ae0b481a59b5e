//! Greetings over real sockets: who is let in, who is refused, and that both sides learn why.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::stop::Stop;

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (dialled, listener.accept().unwrap().0)
}

fn wait() -> Wait {
    Wait::new(Duration::from_secs(5), &Stop::new())
}

fn meet(left: &Identity, right: &Identity) -> (Result<Peer, CommError>, Result<Peer, CommError>) {
    let (mut a, mut b) = pair();
    thread::scope(|scope| {
        let left = scope.spawn(move || greet(&mut a, left, &wait()));
        let right = scope.spawn(move || greet(&mut b, right, &wait()));
        (left.join().unwrap(), right.join().unwrap())
    })
}

fn two() -> (Identity, Identity) {
    let token = Token::random();
    let identity = |rank| Identity::new(&token, Purpose::Data, Rank(rank), 4);
    (identity(0), identity(1))
}

/// Each side either refused for this reason or was refused for it.
fn both_know(left: &Identity, right: &Identity, expected: Refusal) {
    let (a, b) = meet(left, right);
    for outcome in [a, b] {
        match outcome {
            Err(CommError::Refused { reason, .. } | CommError::RefusedBy { reason, .. }) => {
                assert_eq!(reason, expected);
            }
            other => panic!("{expected:?} expected, not {other:?}"),
        }
    }
}

#[test]
fn two_ranks_of_one_run_meet() {
    let (a, b) = two();
    let b = Identity { lane: 7, ..b };
    let (of_a, of_b) = meet(&a, &b);
    assert_eq!(of_a.unwrap(), Peer { rank: Rank(1), lane: 7 });
    assert_eq!(of_b.unwrap(), Peer { rank: Rank(0), lane: 0 });
}

#[test]
fn whoever_does_not_belong_is_refused_and_told_why() {
    let (a, b) = two();
    both_know(&a, &Identity { token: Token::random(), ..b.clone() }, Refusal::Token);
    both_know(&a, &Identity { world: 5, ..b.clone() }, Refusal::World);
    both_know(&a, &Identity { generation: Generation(1), ..b.clone() }, Refusal::Generation);
    both_know(&a, &Identity { purpose: Purpose::Control, ..b.clone() }, Refusal::Purpose);
    both_know(&a, &Identity { rank: Rank(0), ..b.clone() }, Refusal::Rank);
    both_know(&a, &Identity { rank: Rank(4), ..b.clone() }, Refusal::Rank);
    both_know(&Identity { expected: Some(Rank(2)), ..a.clone() }, &b, Refusal::Rank);
    both_know(&Identity { taken: vec![Rank(1)], ..a }, &b, Refusal::Rank);
}

#[test]
fn another_version_is_refused_and_told_why() {
    let (a, b) = two();
    for (at, reason) in [(8, Refusal::Protocol), (12, Refusal::Version)] {
        let (mut here, mut there) = pair();
        let mut bytes = Greeting::of(&b, [1; 32]).encode();
        bytes[at] ^= 1;
        there.write_all(&bytes).unwrap();
        let refused = thread::scope(|scope| scope.spawn(|| greet(&mut here, &a, &wait())).join().unwrap());
        assert!(matches!(refused, Err(CommError::Refused { reason: found, .. }) if found == reason), "{refused:?}");
        drop(here);
        let mut answer = Vec::new();
        there.read_to_end(&mut answer).unwrap();
        assert_eq!(answer[bytes.len()..], [REFUSED, reason as u8]);
    }
}

#[test]
fn our_own_words_sent_back_are_refused() {
    let (a, _) = two();
    let (mut here, mut there) = pair();
    let echo = thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok(count @ 1..) = there.read(&mut buffer) {
            if there.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
    });
    let refused = greet(&mut here, &a, &wait());
    assert!(matches!(refused, Err(CommError::Refused { reason: Refusal::Rank, .. })), "{refused:?}");
    drop(here);
    echo.join().unwrap();
}

#[test]
fn silence_ends_with_the_deadline_and_a_stop_ends_it_sooner() {
    let (a, _) = two();
    let (mut here, _there) = pair();
    let started = Instant::now();
    let error = greet(&mut here, &a, &Wait::new(Duration::from_millis(120), &Stop::new())).unwrap_err();
    assert!(matches!(error, CommError::DeadlinePassed { phase: "greeting", .. }), "{error}");
    let stop = Stop::new();
    stop.set("enough");
    let error = greet(&mut here, &a, &Wait::new(Duration::from_secs(60), &stop)).unwrap_err();
    assert!(matches!(error, CommError::Stopped { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_half_closed_connection_is_an_error_at_once() {
    let (a, _) = two();
    let (mut here, there) = pair();
    there.shutdown(std::net::Shutdown::Write).unwrap();
    let error = greet(&mut here, &a, &wait()).unwrap_err();
    assert!(matches!(error, CommError::PeerGone { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn garbage_is_an_error(bytes: Vec<u8>, as_greeting: bool) {
        let (a, b) = two();
        let (mut here, mut there) = pair();
        if as_greeting {
            there.write_all(&Greeting::of(&b, [1; 32]).encode()).unwrap();
        }
        there.write_all(&bytes).unwrap();
        there.shutdown(std::net::Shutdown::Write).unwrap();
        prop_assert!(greet(&mut here, &a, &wait()).is_err());
    }
}
