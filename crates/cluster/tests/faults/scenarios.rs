//! The faults, one function each.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use paceline_comm::wire::stream::Talk;
use paceline_comm::wire::{Framed, Identity, Purpose, Role, greet};
use paceline_comm::{Rank, Stop, Token, Wait};
use paceline_system::process::{Tell, tell};

use super::processes::{Process, Run, status, with_mark};
use super::proxy::Proxy;

/// By when every survivor has named the culprit and ended.
const NAMED: Duration = Duration::from_secs(5);

/// For things that need no detection.
const SOON: Duration = Duration::from_secs(15);

fn microseconds(milliseconds: u64) -> String {
    (milliseconds * 1000).to_string()
}

/// Every survivor ends within 5 s of the fault with exit code 1, naming the culprit, its phase and its step.
fn survivors_name(members: &mut [Process], culprit: usize, struck: Instant, survivors: &[usize]) {
    for &survivor in survivors {
        let left = NAMED.saturating_sub(struck.elapsed());
        let ended = members[survivor].ends(left + Duration::from_millis(100));
        let said = members[survivor].said();
        let error =
            said.lines().find(|line| line.starts_with("error: ")).unwrap_or_else(|| panic!("no error:\n{said}"));
        assert!(error.starts_with(&format!("error: rank {culprit} on ")), "{survivor} said {error}");
        assert!(error.contains("it was last in phase exchange after step "), "{error}");
        assert_eq!(ended.code(), Some(1), "{error}");
    }
}

fn others(world: usize, culprit: usize) -> Vec<usize> {
    (0..world).filter(|rank| *rank != culprit).collect()
}

/// Heartbeats have carried every member's first steps to those who will name it.
fn warm_up(members: &[Process]) {
    members.iter().for_each(|member| member.says("all step", SOON));
}

pub fn killed(repetition: usize, mark: &str) {
    let (world, culprit) = (2 + repetition % 3, repetition % 2);
    let mut members = Run::new(world, mark).start_all(&[]);
    warm_up(&members);
    let struck = Instant::now();
    tell(members[culprit].pid(), Tell::Kill);
    survivors_name(&mut members, culprit, struck, &others(world, culprit));
    assert_eq!(members[culprit].ends(SOON).signal(), Some(9), "the fault fired");
}

pub fn stopped(repetition: usize, mark: &str) {
    let (world, culprit) = (3, repetition % 3);
    let mut members = Run::new(world, mark).start_all(&[]);
    warm_up(&members);
    let struck = Instant::now();
    tell(members[culprit].pid(), Tell::Stop);
    survivors_name(&mut members, culprit, struck, &others(world, culprit));
    let state = status(members[culprit].pid(), "State");
    assert!(state.starts_with('T'), "the fault fired: {state}");
    for &survivor in &others(world, culprit) {
        let said = members[survivor].said();
        // Only those who hear a rank themselves can warn before the verdict.
        assert!(said.contains("is late: in phase exchange") || (culprit != 0 && survivor != 0), "{said}");
    }
    // Told to go on, it finds out that the run went on without it, and ends as well.
    tell(members[culprit].pid(), Tell::Continue);
    assert_eq!(members[culprit].ends(SOON).code(), Some(1));
}

/// A run of three in which rank 1 reaches rank 0 only through a proxy.
fn through_proxy(mark: &str) -> (Vec<Process>, Proxy) {
    let run = Run::new(3, mark);
    let proxy = Proxy::new(run.port);
    let first = run.start(0, &[]);
    first.says("listens", SOON);
    let members = vec![first, run.start(1, &[("MASTER_PORT", proxy.port.to_string())]), run.start(2, &[])];
    members.iter().for_each(|member| member.says("joined", Duration::from_secs(20)));
    warm_up(&members);
    (members, proxy)
}

pub fn cut(_: usize, mark: &str) {
    let (mut members, proxy) = through_proxy(mark);
    let struck = Instant::now();
    assert!(proxy.cut() > 0, "the fault fired");
    survivors_name(&mut members, 1, struck, &[0, 2]);
    survivors_name(&mut members, 0, struck, &[1]);
}

pub fn swallowed(_: usize, mark: &str) {
    let (mut members, proxy) = through_proxy(mark);
    let struck = Instant::now();
    proxy.swallow();
    survivors_name(&mut members, 1, struck, &[0, 2]);
    survivors_name(&mut members, 0, struck, &[1]);
    assert!(proxy.swallowed.load(Ordering::SeqCst) > 0, "the fault fired");
}

/// Rank 1 is this test: it holds the token, joins, says that it is alive, and never reads.
pub fn full_socket_buffer(_: usize, mark: &str) {
    let run = Run::new(3, mark);
    // Heartbeats without a pause fill the few megabytes that the kernel buffers within seconds.
    let mut hub = run.start(0, &[("MEMBER_BEAT_US", "0".into())]);
    hub.says("listens", SOON);
    let mut stream = TcpStream::connect(("127.0.0.1", run.port)).unwrap();
    let identity = Identity::new(&run.token, Purpose::Control, Role::Dialler, Rank(1), 3);
    let wait = Wait::new(Duration::from_secs(30), &Stop::new());
    let met = greet(&mut stream, &identity, &wait).unwrap();
    let talk = Talk { rank: Rank(1), peer: Rank(0).into(), phase: "test" };
    let mut framed = Framed::new(stream, 1 << 20);
    let entry = r#"{"data":null,"host":"deaf","node":"n","pid":1,"version":"0"}"#;
    let join = format!(r#"{{"message":"join","entry":{entry},"config":"same = true","run":"{}"}}"#, met.run);
    framed.send(1, join.as_bytes(), &talk, &wait).unwrap();
    let mut other = run.start(2, &[]);
    other.says("joined", Duration::from_secs(20));
    let beat = br#"{"message":"beat","position":{"step":7,"phase":"exchange"}}"#;
    let until = Instant::now() + Duration::from_secs(25);
    while !hub.said().contains("error: ") && Instant::now() < until {
        // Once the hub has given up on it, the connection is gone.
        let _ = framed.send(1, beat, &talk, &wait);
        // The pause between two heartbeats.
        std::thread::sleep(Duration::from_millis(50));
    }
    for member in [&mut hub, &mut other] {
        assert_eq!(member.ends(NAMED).code(), Some(1));
        let said = member.said();
        assert!(
            said.contains("rank 1 on deaf is gone (it does not read: ") || said.contains("it has read nothing"),
            "{said}"
        );
    }
}

/// A run of two that goes well although something else happens at its port first.
fn unharmed(mark: &str, more: impl FnOnce(&Run)) -> String {
    let run = Run::new(2, mark);
    let mut hub = run.start(0, &[("MEMBER_US", microseconds(300))]);
    hub.says("listens", SOON);
    more(&run);
    let mut member = run.start(1, &[("MEMBER_US", microseconds(300))]);
    for process in [&mut hub, &mut member] {
        let ended = process.ends(SOON);
        assert_eq!(ended.code(), Some(0), "{}", process.said());
    }
    hub.said()
}

pub fn wrong_token(repetition: usize, mark: &str) {
    let said = unharmed(mark, |run| {
        let other = if repetition.is_multiple_of(2) { Token::random().to_hex() } else { "0".repeat(64) };
        let mut stranger = run.start(1, &[("PACELINE_TOKEN", other)]);
        assert_eq!(stranger.ends(SOON).code(), Some(2), "{}", stranger.said());
        assert!(stranger.said().contains("token"), "the fault fired: {}", stranger.said());
    });
    assert!(said.contains("refused") && said.contains("wrong token"), "{said}");
}

/// A greeting as another version of Paceline would send it, or another version of the protocol.
pub fn other_version(repetition: usize, mark: &str) {
    let other_protocol = repetition % 2 == 1;
    let said = unharmed(mark, |run| {
        let mut greeting = Vec::new();
        greeting.extend_from_slice(b"PACELINE");
        greeting.extend_from_slice(&[if other_protocol { 9 } else { 2 }, 0, 84, 0]);
        greeting.extend_from_slice(b"99.0.0\0\0\0\0\0\0\0\0\0\0");
        greeting.extend_from_slice(&[1, 1, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
        greeting.extend_from_slice(&[0; 56]);
        let mut stream = TcpStream::connect(("127.0.0.1", run.port)).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.write_all(&greeting).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let refusal = if other_protocol { 2 } else { 3 };
        assert_eq!(answer[answer.len() - 2..], [0xA3, refusal], "the fault fired");
    });
    let words = if repetition % 2 == 1 { "ours is version 2, theirs 9" } else { "Paceline versions differ" };
    assert!(said.contains(words), "{said}");
}

pub fn port_taken(_: usize, mark: &str) {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let run = Run { port: taken.local_addr().unwrap().port(), ..Run::new(2, mark) };
    let mut hub = run.start(0, &[]);
    assert_eq!(hub.ends(SOON).code(), Some(2));
    assert!(hub.said().contains("is taken; choose a free one with MASTER_PORT"), "the fault fired: {}", hub.said());
}

pub fn never_arrives(repetition: usize, mark: &str) {
    let run = Run::new(4, mark);
    let missing = 1 + repetition % 3;
    let gather = [("MEMBER_GATHER_US", microseconds(1000))];
    let mut members: Vec<Process> =
        (0..4).filter(|rank| *rank != missing).map(|rank| run.start(rank, &gather)).collect();
    for member in &mut members {
        assert_eq!(member.ends(SOON).code(), Some(1), "{}", member.said());
        let words = format!("error: rank {missing} did not arrive within 1.0 s");
        // A member that was slow to start finds rank 0 gone with its verdict.
        let said = member.said();
        assert!(said.contains(&words) || said.contains("did not reach rank 0"), "the fault fired: {said}");
    }
    assert!(members[0].said().contains(&format!("error: rank {missing} did not arrive")), "{}", members[0].said());
}

/// Noise, a greeting cut off in the middle, nothing at all, and more connections than are greeted at once.
pub fn garbage(repetition: usize, mark: &str) {
    let mut held = Vec::new();
    let said = unharmed(mark, |run| {
        let knock = || TcpStream::connect(("127.0.0.1", run.port)).unwrap();
        held.extend((0..40).map(|_| knock()));
        for number in 0..60u64 {
            let key = paceline_system::random::key(&[repetition as u64, number]);
            let noise: Vec<u8> = (0..2000).map(|at| paceline_system::random::at(key, at) as u8).collect();
            let _ = knock().write_all(&noise);
        }
        knock().write_all(b"PACELINE\x02\x00\x54\x00half a greeting").unwrap();
        knock().write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    });
    assert!(said.contains("refused"), "the fault fired: {said}");
    assert!(said.lines().filter(|line| line.contains("refused")).count() < 20, "refusals are limited:\n{said}");
}

/// A launcher with two members that have met; the pids of the members.
fn launched(mark: &str) -> (Process, Vec<u32>) {
    let launcher = Process::start("launcher", mark, &[]);
    launcher.says("[0] joined", SOON);
    launcher.says("[1] joined", SOON);
    let members: Vec<u32> = with_mark(mark).into_iter().filter(|pid| *pid != launcher.pid()).collect();
    assert_eq!(members.len(), 2);
    (launcher, members)
}

fn gone(mark: &str, limit: Duration) {
    let until = Instant::now() + limit;
    while !with_mark(mark).is_empty() {
        assert!(Instant::now() < until, "processes {:?} are left", with_mark(mark));
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn launcher_killed(_: usize, mark: &str) {
    let (mut launcher, members) = launched(mark);
    for pid in &members {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let words = String::from_utf8_lossy(&environment).into_owned();
        assert!(words.contains("PACELINE_TOKEN=stdin"), "the token is nowhere to be listed");
    }
    let cores: Vec<String> = members.iter().map(|pid| status(*pid, "Cpus_allowed_list")).collect();
    if paceline_system::threads::available() >= 2 {
        assert_ne!(cores[0], cores[1], "each has cores of its own");
    }
    tell(launcher.pid(), Tell::Kill);
    assert_eq!(launcher.ends(SOON).signal(), Some(9), "the fault fired");
    gone(mark, Duration::from_secs(2));
}

pub fn launcher_interrupted(_: usize, mark: &str) {
    let (mut launcher, _) = launched(mark);
    tell(launcher.pid(), Tell::Interrupt);
    assert_eq!(launcher.ends(SOON).code(), Some(1));
    let said = launcher.said();
    for words in ["[0] saved", "[1] saved", "interrupted"] {
        assert!(said.contains(words), "{said}");
    }
}

pub fn launched_killed(_: usize, mark: &str) {
    let (mut launcher, members) = launched(mark);
    ["[0] all step", "[1] all step"].iter().for_each(|words| launcher.says(words, SOON));
    let victim = members[1];
    tell(victim, Tell::Kill);
    assert_eq!(launcher.ends(SOON).code(), Some(1));
    let said = launcher.said();
    let named = |rank: usize| said.contains(&format!("error: rank {rank} on this machine was killed by signal 9"));
    assert!(named(0) || named(1), "{said}");
    assert!(said.contains("error: rank 0 on ") || said.contains("error: rank 1 on "), "{said}");
}
