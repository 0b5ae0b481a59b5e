//! Greetings over real sockets: who is let in, who is refused, and that both sides learn why.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::handshake::REFUSED;
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
    let run = RunId::random();
    let identity = |role, rank| Identity { run, ..Identity::new(&token, Purpose::Data, role, Rank(rank), 4) };
    (identity(Role::Listener, 0), identity(Role::Dialler, 1))
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
    assert_eq!(of_a.unwrap(), Peer { rank: Rank(1), lane: 7, run: a.run });
    assert_eq!(of_b.unwrap(), Peer { rank: Rank(0), lane: 0, run: a.run });
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
    both_know(&a, &Identity { run: RunId::random(), ..b.clone() }, Refusal::Run);
    both_know(&a, &Identity { run: RunId::UNKNOWN, ..b.clone() }, Refusal::Run);
    both_know(&Identity { role: Role::Dialler, ..a.clone() }, &b, Refusal::Role);
    both_know(&a.clone().expecting(Rank(2)), &b, Refusal::Rank);
    both_know(&Identity { taken: vec![Rank(1)], ..a }, &b, Refusal::Rank);
}

#[test]
fn who_comes_to_the_rendezvous_learns_the_run() {
    let (a, b) = two();
    let control = |identity: Identity| Identity { purpose: Purpose::Control, ..identity };
    let (a, b) = (control(a), Identity { run: RunId::UNKNOWN, ..control(b) });
    let (of_a, of_b) = meet(&a, &b);
    assert_eq!((of_a.unwrap().rank, of_b.unwrap().run), (Rank(1), a.run));
    both_know(&a, &Identity { run: RunId::random(), ..b.clone() }, Refusal::Run);
    // Only the one who dials may not know it.
    both_know(&Identity { run: RunId::UNKNOWN, ..a }, &Identity { run: RunId::random(), ..b }, Refusal::Run);
}

/// Two listeners, and a stranger who carries what one says to the other: they find out, and neither has proven anything.
#[test]
fn what_one_listener_says_is_worth_nothing_to_another() {
    let (a, b) = two();
    let listeners = [Identity { rank: Rank(2), role: Role::Listener, ..a }, Identity { role: Role::Listener, ..b }];
    for role_changed in [false, true] {
        let ((mut left, mut of_left), (mut right, mut of_right)) = (pair(), pair());
        let (said, outcomes) = thread::scope(|scope| {
            let hands = [scope.spawn(|| greet(&mut left, &listeners[0], &wait())), {
                let (right, listener) = (&mut right, &listeners[1]);
                scope.spawn(move || greet(right, listener, &wait()))
            }];
            // Listeners say nothing first, so the stranger begins with a greeting of its own making.
            let first = Greeting::of(&Identity { role: Role::Dialler, ..listeners[1].clone() }, [3; 32]);
            of_left.write_all(&first.encode()).unwrap();
            let mut theirs = [0; greeting::GREETING_BYTES];
            of_left.read_exact(&mut theirs).unwrap();
            if role_changed {
                theirs[greeting::PREFIX_BYTES + 17] = Role::Dialler as u8;
            }
            of_right.write_all(&theirs).unwrap();
            let mut answer = [0; greeting::GREETING_BYTES];
            of_right.read_exact(&mut answer).unwrap();
            // Whatever either says from here on goes to the other, for as long as they talk.
            let mut said = Vec::new();
            for (mut from, mut to) in [(&of_left, &of_right), (&of_right, &of_left)] {
                from.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
                let mut rest = [0; 64];
                let count = from.read(&mut rest).unwrap_or(0);
                said.extend_from_slice(&rest[..count]);
                let _ = to.write_all(&rest[..count]);
            }
            drop((of_left, of_right));
            (said, hands.map(|hand| hand.join().unwrap()))
        });
        assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
        assert!(said.len() <= 4, "a refusal is all that was said: {said:x?}");
    }
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
    let (_, a) = two();
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
