//! Faults on real processes that were started by hand: killed, stopped, cut off, started wrongly, knocked at by strangers.
//! Each test asserts that its fault fired, that every survivor named who was at fault in one sentence, and that it ended
//! with exit code 1.

mod members;
mod proxy;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use paceline::comm::Token;
use paceline::system::process::{Tell, tell};
use paceline::system::random;

use members::{Process, Run};
use proxy::Proxy;

/// By when a survivor has named the culprit and ended: silence takes two seconds to show here.
const NAMED: Duration = Duration::from_secs(2 + 5);

/// For things that need no detection, on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// Each has ended with exit code 1 and one sentence, which names the culprit, its phase and its step.
fn name(survivors: &mut [Process<'_>], culprit: usize) {
    for survivor in survivors {
        let ended = survivor.ends(NAMED);
        let said = survivor.said();
        let errors: Vec<&str> = said.lines().filter(|line| line.contains("error: ")).collect();
        assert_eq!((ended.code(), errors.len()), (Some(1), 1), "{said}");
        assert!(errors[0].starts_with(&format!("error: rank {culprit} on ")), "{said}");
        assert!(errors[0].contains("; it was last in phase ") && errors[0].contains(" after step "), "{said}");
    }
}

#[test]
fn those_that_are_left_name_one_that_was_killed() {
    for culprit in [0, 2] {
        let run = Run::new(3);
        let mut members = run.start_all();
        let mut victim = members.remove(culprit);
        tell(victim.pid(), Tell::Kill);
        name(&mut members, culprit);
        assert_eq!(victim.ends(SOON).signal(), Some(9), "the fault fired");
    }
}

#[test]
fn those_that_are_left_name_one_that_was_stopped() {
    let run = Run::new(3);
    let mut members = run.start_all();
    let mut victim = members.remove(1);
    tell(victim.pid(), Tell::Stop);
    members[0].says("rank 1 on ", NAMED);
    name(&mut members, 1);
    assert!(members[0].said().contains(" is late: "), "{}", members[0].said());
    let state = std::fs::read_to_string(format!("/proc/{}/stat", victim.pid())).unwrap();
    assert!(state.contains(") T "), "the fault fired: {state}");
    // Told to go on, it finds out that the run went on without it, and ends as well.
    tell(victim.pid(), Tell::Continue);
    assert_eq!(victim.ends(SOON).code(), Some(1));
}

/// Rank 1 reaches rank 0 for heartbeats only through a link that breaks.
fn through_proxy(breaks: impl FnOnce(&Proxy) -> bool) {
    let run = Run::new(3);
    let proxy = Proxy::new(run.port);
    let variables = [("MASTER_PORT", proxy.port.to_string())];
    let mut members = vec![run.start(0, "", &[]), run.start(2, "", &[])];
    let mut behind = vec![run.start(1, "", &variables)];
    run.steps(&members[0]);
    assert!(breaks(&proxy), "the fault fired");
    name(&mut members, 1);
    name(&mut behind, 0);
}

#[test]
fn a_link_that_is_cut_is_named_by_both_ends() {
    through_proxy(|proxy| proxy.cut() > 0);
}

#[test]
fn a_link_that_swallows_everything_is_named_by_both_ends() {
    let swallowed = std::sync::OnceLock::new();
    through_proxy(|proxy| {
        proxy.swallow();
        swallowed.set(proxy.swallowed.clone()).is_ok()
    });
    assert!(swallowed.get().unwrap().load(Ordering::SeqCst) > 0, "the fault fired");
}

/// Whether somebody listens on a port, without knocking at it.
fn listens(port: u16) -> bool {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let local = format!(":{port:04X}");
    table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .any(|fields| fields.len() > 3 && fields[1].ends_with(&local) && fields[3] == "0A")
}

/// A run of two that goes well although something else happens at its port first; what rank 0 said.
fn unharmed(happens: impl FnOnce(&Run)) -> String {
    let run = Run::new(2);
    let few = "--max-steps 20";
    let mut hub = run.start(0, few, &[]);
    crate::running::within(SOON, "rank 0 listens", || listens(run.port), || hub.said());
    happens(&run);
    let mut member = run.start(1, few, &[]);
    for process in [&mut hub, &mut member] {
        let ended = process.ends(SOON);
        assert_eq!(ended.code(), Some(0), "{}", process.said());
    }
    hub.said()
}

#[test]
fn a_rank_with_another_token_is_refused_and_harms_nobody() {
    let said = unharmed(|run| {
        let mut stranger = run.start(1, "", &[("PACELINE_TOKEN", Token::random().to_hex())]);
        assert_eq!(stranger.ends(SOON).code(), Some(2), "{}", stranger.said());
        assert!(stranger.said().contains("token"), "the fault fired: {}", stranger.said());
    });
    assert!(said.contains("refused") && said.contains("wrong token"), "{said}");
}

/// A greeting as another version of Paceline would send it, or another version of the protocol.
#[test]
fn other_versions_are_refused_and_harm_nobody() {
    for (protocol, refusal, words) in [(2, 3, "Paceline versions differ"), (9, 2, "ours is version 2, theirs 9")] {
        let said = unharmed(|run| {
            let mut greeting = Vec::new();
            greeting.extend_from_slice(b"PACELINE");
            greeting.extend_from_slice(&[protocol, 0, 84, 0]);
            greeting.extend_from_slice(b"99.0.0\0\0\0\0\0\0\0\0\0\0");
            greeting.extend_from_slice(&[1, 1, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
            greeting.extend_from_slice(&[0; 56]);
            let mut stream = TcpStream::connect(("127.0.0.1", run.port)).unwrap();
            stream.set_read_timeout(Some(SOON)).unwrap();
            stream.write_all(&greeting).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert_eq!(answer[answer.len() - 2..], [0xA3, refusal], "the fault fired");
        });
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn a_port_that_is_taken_is_refused_with_what_to_set() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let run = Run { port: taken.local_addr().unwrap().port(), ..Run::new(2) };
    let mut hub = run.start(0, "", &[]);
    assert_eq!(hub.ends(SOON).code(), Some(2));
    assert!(hub.said().contains("is taken; choose a free one with MASTER_PORT"), "{}", hub.said());
}

#[test]
fn a_rank_that_never_comes_is_named_by_all() {
    let run = Run::new(3);
    let mut hub = run.start(0, "--gather 2s", &[]);
    let mut member = run.start(2, "--gather 2s", &[]);
    for process in [&mut hub, &mut member] {
        assert_eq!(process.ends(SOON).code(), Some(1), "{}", process.said());
        let said = process.said();
        // A member that was slow to start finds rank 0 gone with its verdict.
        assert!(
            said.contains("error: rank 1 did not arrive within 2.0 s") || said.contains("did not reach rank 0"),
            "{said}"
        );
    }
    assert!(hub.said().contains("error: rank 1 did not arrive"), "{}", hub.said());
}

/// Noise, a greeting cut off in the middle, nothing at all, and more connections than are greeted at once.
#[test]
fn garbage_at_the_port_harms_nobody() {
    let mut held = Vec::new();
    let said = unharmed(|run| {
        let knock = || TcpStream::connect(("127.0.0.1", run.port)).unwrap();
        held.extend((0..40).map(|_| knock()));
        for number in 0..60u64 {
            let key = random::key(&[7, number]);
            let noise: Vec<u8> = (0..2000).map(|at| random::at(key, at) as u8).collect();
            let _ = knock().write_all(&noise);
        }
        knock().write_all(b"PACELINE\x02\x00\x54\x00half a greeting").unwrap();
        knock().write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    });
    assert!(said.contains("refused"), "the fault fired: {said}");
    assert!(said.lines().filter(|line| line.contains("refused")).count() < 20, "refusals are limited:\n{said}");
}
