//! What happens when a peer dies, stalls, talks nonsense or does something else: an error that names it, within the
//! deadline, and nothing left behind. Every test asserts that its fault fired.

mod world;

use std::io::Write;
use std::net::TcpStream;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_comm::transport::{Membership, Transport, shm, tcp};
use paceline_comm::{CommError, Communicator, Generation, Rank, RunId, Stop, Token, Wait};
use world::{Carry, TIMEOUT, communicators, communicators_for, on_all, options};

const SHORT: Duration = Duration::from_millis(300);

#[test]
fn a_rank_that_leaves_is_named_by_those_who_need_it() {
    for carry in Carry::ALL {
        let mut ranks = communicators(carry, &options(3, None, TIMEOUT));
        on_all(&mut ranks, |comm| comm.barrier().unwrap());
        let started = Instant::now();
        drop(ranks.remove(1));
        let errors = on_all(&mut ranks, |comm| comm.all_reduce(&mut vec![1.0; 100_000]).unwrap_err());
        assert!(errors.iter().any(|error| error.peer() == Some(Rank(1))), "{carry:?}: {errors:?}");
        assert!(errors.iter().all(|error| matches!(error, CommError::PeerGone { .. })), "{carry:?}: {errors:?}");
        assert!(started.elapsed() < Duration::from_secs(5));
        let again = ranks[0].barrier().unwrap_err();
        assert!(matches!(again, CommError::Broken { .. }), "{again}");
    }
}

#[test]
fn a_rank_that_stalls_is_named_when_the_deadline_passes() {
    for carry in Carry::ALL {
        let mut ranks = communicators(carry, &options(2, None, SHORT));
        let started = Instant::now();
        let error = ranks[0].all_reduce(&mut vec![1.0; 1_000_000]).unwrap_err();
        assert!(matches!(error, CommError::DeadlinePassed { phase: "all_reduce", .. }), "{carry:?}: {error}");
        assert_eq!(error.peer(), Some(Rank(1)));
        assert!(started.elapsed() >= SHORT && started.elapsed() < SHORT + Duration::from_secs(2));
    }
}

#[test]
fn a_stop_ends_every_wait_within_a_slice() {
    for carry in Carry::ALL {
        let options = options(2, None, Duration::from_secs(1000));
        let mut ranks = communicators(carry, &options);
        let (mut first, _second) = (ranks.remove(0), ranks.remove(0));
        let (begun, begins) = mpsc::channel();
        let waiting = thread::spawn(move || {
            begun.send(Instant::now()).unwrap();
            first.barrier().unwrap_err()
        });
        // It waits for so long before the stop comes: long enough to be asleep.
        let began = begins.recv_timeout(TIMEOUT).unwrap();
        thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished(), "{carry:?}: nothing was waited for");
        let started = Instant::now();
        options.stop.set("rank 9 is gone");
        let error = waiting.join().unwrap();
        assert!(started.elapsed() < Duration::from_millis(500), "{carry:?}");
        assert!(began.elapsed() >= Duration::from_millis(100), "{carry:?}");
        assert!(matches!(&error, CommError::Stopped { reason, .. } if reason == "rank 9 is gone"), "{error}");
    }
}

#[test]
fn ranks_that_do_different_things_notice() {
    for carry in Carry::ALL {
        let mut ranks = communicators(carry, &options(2, None, TIMEOUT));
        let errors = on_all(&mut ranks, |comm| {
            let length = if comm.rank() == Rank(0) { 1000 } else { 1001 };
            comm.all_reduce(&mut vec![1.0; length]).err()
        });
        let violation = |error: &Option<CommError>| matches!(error, Some(CommError::Protocol { .. }));
        assert!(errors.iter().any(violation), "{carry:?}: {errors:?}");
        let mut ranks = communicators(carry, &options(2, None, SHORT));
        let errors = on_all(&mut ranks, |comm| match comm.rank() {
            Rank(0) => comm.send(Rank(1), 1, &[0; 10]).err(),
            _ => comm.recv(Rank(0), 2, &mut [0; 10]).err(),
        });
        assert!(violation(&errors[1]), "{carry:?}: {errors:?}");
    }
}

fn member(token: &Token, rank: u32, world: usize) -> Membership {
    Membership { token: token.clone(), run: RunId::UNKNOWN, rank: Rank(rank), world, generation: Generation(1) }
}

#[test]
fn garbage_and_silence_at_the_port_keep_nobody_waiting() {
    let token = Token::random();
    let listeners: Vec<_> = (0..2).map(|rank| tcp::Listener::bind(Rank(rank), None).unwrap()).collect();
    let addresses: Vec<_> = listeners.iter().map(tcp::Listener::address).collect();
    let mut strangers: Vec<TcpStream> = (0..10).map(|_| TcpStream::connect(addresses[1]).unwrap()).collect();
    for (nth, stranger) in strangers.iter_mut().enumerate().take(8) {
        stranger.write_all(&vec![nth as u8; 1000]).unwrap();
    }
    let started = Instant::now();
    let joined: Vec<_> = thread::scope(|scope| {
        let ranks: Vec<_> = (0u32..)
            .zip(listeners)
            .map(|(rank, listener)| {
                let (member, addresses) = (member(&token, rank, 2), &addresses);
                scope.spawn(move || {
                    let wait = Wait::new(TIMEOUT, &Stop::new());
                    tcp::connect(listener, addresses, &member, tcp::Config::default(), &wait)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    });
    assert!(started.elapsed() < Duration::from_secs(4), "the strangers were waited for");
    let mut ranks: Vec<_> =
        joined.into_iter().map(|port| Communicator::new(Transport::Tcp(port), options(2, None, TIMEOUT))).collect();
    on_all(&mut ranks, |comm| comm.barrier().unwrap());
}

#[test]
fn a_wrong_token_is_refused_and_a_missing_rank_is_named() {
    let listener = tcp::Listener::bind(Rank(0), None).unwrap();
    let other = tcp::Listener::bind(Rank(1), None).unwrap();
    let addresses = [listener.address(), other.address()];
    thread::scope(|scope| {
        let wait = || Wait::new(Duration::from_millis(800), &Stop::new());
        let config = tcp::Config::default;
        let right = member(&Token::random(), 1, 2);
        let addresses = &addresses;
        let waiting = scope.spawn(move || tcp::connect(other, addresses, &right, config(), &wait()).unwrap_err());
        let wrong = member(&Token::random(), 0, 2);
        let refused = tcp::connect(listener, addresses, &wrong, config(), &wait()).unwrap_err();
        assert!(refused.is_refusal(), "{refused}");
        let late = waiting.join().unwrap();
        assert!(matches!(late, CommError::DeadlinePassed { .. }) && late.peer() == Some(Rank(0)), "{late}");
    });
}

#[test]
fn rank_0_dials_the_others_and_needs_no_port_that_they_know() {
    let token = Token::random();
    let mut listeners: Vec<_> = (0..3).map(|rank| tcp::Listener::bind(Rank(rank), None).unwrap()).collect();
    // The others listen where they were told to; rank 0's address leads nowhere.
    for rank in 1..3 {
        let told = listeners.remove(rank).address();
        listeners.insert(rank, tcp::Listener::at(Rank::at(rank), told).unwrap());
    }
    let mut addresses: Vec<_> = listeners.iter().map(tcp::Listener::address).collect();
    addresses[0].set_port(1);
    let taken = tcp::Listener::at(Rank(1), addresses[1]).unwrap_err().to_string();
    assert!(taken.contains("listen for other ranks"), "{taken}");
    thread::scope(|scope| {
        for (rank, listener) in (0u32..).zip(listeners) {
            let (member, addresses) = (member(&token, rank, 3), &addresses);
            scope.spawn(move || {
                let wait = Wait::new(TIMEOUT, &Stop::new());
                let port = tcp::connect(listener, addresses, &member, tcp::Config::default(), &wait).unwrap();
                Communicator::new(Transport::Tcp(port), options(3, None, TIMEOUT)).barrier().unwrap();
            });
        }
    });
}

#[test]
fn a_group_of_all_does_not_wait_for_the_others_messages() {
    let options = options(2, None, TIMEOUT);
    // Rank 0 sends more than a link takes, and rank 1 receives it only after both have met beside it.
    for carry in Carry::ALL {
        let mut ranks = communicators_for(carry, &options, 1);
        on_all(&mut ranks, |bulk| {
            let mut aside = bulk.group(&[Rank(0), Rank(1)]).unwrap();
            let mut bytes = vec![bulk.rank().0 as u8; 30 << 20];
            if bulk.rank() == Rank(0) {
                thread::scope(|scope| {
                    scope.spawn(|| bulk.send(Rank(1), 7, &bytes).unwrap());
                    aside.barrier().unwrap();
                });
            } else {
                aside.barrier().unwrap();
                bulk.recv(Rank(0), 7, &mut bytes).unwrap();
                assert!(bytes.iter().all(|&byte| byte == 0), "{carry:?}");
            }
        });
    }
}

#[test]
fn memory_is_not_shared_before_all_have_come() {
    let wait = Wait::new(SHORT, &Stop::new());
    let late = shm::connect(&member(&Token::random(), 0, 2), &wait).unwrap_err();
    assert!(matches!(late, CommError::DeadlinePassed { .. }) && late.peer() == Some(Rank(1)), "{late}");
    let wait = Wait::new(SHORT, &Stop::new());
    let alone = shm::connect(&member(&Token::random(), 1, 2), &wait).unwrap_err();
    assert!(matches!(alone, CommError::DeadlinePassed { .. }) && alone.peer() == Some(Rank(0)), "{alone}");
}
