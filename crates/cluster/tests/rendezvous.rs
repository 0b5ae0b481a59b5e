//! Members in threads of one process, over real sockets: they meet, they end together, and strangers are kept out.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use paceline_cluster::launch::local;
use paceline_cluster::membership::Cause;
use paceline_cluster::spec::{ClusterFile, Variables, from_environment};
use paceline_cluster::{ClusterError, Control, Job, JoinOptions, Limits, Log, Phase, Position, join};
use paceline_comm::wire::stream::Talk;
use paceline_comm::wire::{Framed, Identity, Purpose, Role, Tls, greet};
use paceline_comm::{Rank, Stop, Token, Wait};

type Said = Arc<Mutex<Vec<String>>>;

/// Waits for something that happens soon.
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited 20 s for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn has_said(said: &Said, words: &str) -> bool {
    said.lock().unwrap().iter().any(|line| line.contains(words))
}

fn free_port() -> u16 {
    local::free_port().unwrap()
}

fn options(rank: usize, world: usize, port: u16, token: &Token) -> (JoinOptions, Said) {
    let pairs = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", world.to_string()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port.to_string()),
    ];
    let variables: Variables = pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let member = from_environment(&variables).unwrap().unwrap();
    let said = Said::default();
    let log = Log::new({
        let said = said.clone();
        move |notice| said.lock().unwrap().push(notice.text)
    });
    let limits = Limits { gather: Duration::from_secs(20), ..Limits::default() };
    (JoinOptions { log, limits, ..JoinOptions::new(member, token.clone(), "batch = 8\nseed = 1".into()) }, said)
}

fn enter(options: JoinOptions) -> JoinHandle<Result<Control, ClusterError>> {
    let data = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 7000 + options.member.rank.0 as u16);
    thread::spawn(move || {
        join(options, |address| {
            assert_eq!(address, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), "loopback unless asked");
            Ok(Some(data))
        })
    })
}

#[test]
fn members_of_a_cluster_file_listen_for_data_where_it_says() {
    let [port, data] = [free_port(), free_port()];
    let file = format!(r#"{{"worker": ["127.0.0.1:{port}", "localhost:{data}"]}}"#);
    let file = ClusterFile::parse(&file).unwrap();
    let token = Token::random();
    let enter = |task: usize, taken: bool| {
        let member = file.member(Job::Worker, task).unwrap();
        let limits = Limits { gather: Duration::from_secs(3), ..Limits::default() };
        let options = JoinOptions { limits, ..JoinOptions::new(member, token.clone(), String::new()) };
        thread::spawn(move || {
            join(options, |address| {
                let asked = address.port();
                assert_eq!(asked, if task == 0 { 0 } else { data });
                if taken { Err(ErrorKind::AddrInUse.into()) } else { Ok(Some(address)) }
            })
        })
    };
    let [first, second] = [enter(0, false), enter(1, false)].map(|thread| thread.join().unwrap().unwrap());
    assert_eq!(first.table().entry(Rank(1)).data.unwrap().port(), data);
    let leaving = thread::spawn(move || second.finish(Duration::from_secs(5)));
    first.finish(Duration::from_secs(5)).unwrap();
    leaving.join().unwrap().unwrap();
    let [first, second] = [enter(0, false), enter(1, true)].map(|thread| thread.join().unwrap().unwrap_err());
    let said = second.to_string();
    assert!(
        said.contains(&format!("rank 1 cannot listen for data at localhost:{data}, as the cluster file")),
        "{said}"
    );
    assert!(first.to_string().contains("rank 1"), "{first}");
}

fn meet(world: usize) -> (Vec<Control>, Vec<Said>) {
    let (port, token) = (free_port(), Token::random());
    // In reverse, so that others knock before rank 0 has opened.
    let entered: Vec<_> = (0..world)
        .rev()
        .map(|rank| {
            let (options, said) = options(rank, world, port, &token);
            (enter(options), said)
        })
        .collect();
    let mut met: Vec<_> = entered.into_iter().map(|(thread, said)| (thread.join().unwrap().unwrap(), said)).collect();
    met.reverse();
    met.into_iter().unzip()
}

#[test]
fn members_meet_learn_the_table_and_leave_together() {
    let (controls, _) = meet(5);
    for (rank, control) in controls.iter().enumerate() {
        assert_eq!(control.rank(), Rank::at(rank));
        assert_eq!(control.table(), controls[0].table());
        assert_eq!(control.table().nodes(), [0; 5]);
        let own = control.table().entry(Rank::at(rank));
        assert_eq!(own.data.unwrap().to_string(), format!("127.0.0.1:{}", 7000 + rank));
        assert_eq!(own.pid, std::process::id());
    }
    let leaving: Vec<_> =
        controls.into_iter().map(|control| thread::spawn(move || control.finish(Duration::from_secs(10)))).collect();
    for thread in leaving {
        thread.join().unwrap().unwrap();
    }
}

/// More than are greeted at once.
#[test]
fn a_hundred_members_meet_and_leave() {
    let (controls, said) = meet(100);
    // Whoever is not heard for so long is called late; this is the time in which nobody may be.
    thread::sleep(Limits::default().late + 2 * Limits::default().beat);
    let leaving: Vec<_> =
        controls.into_iter().map(|control| thread::spawn(move || control.finish(Duration::from_secs(10)))).collect();
    for thread in leaving {
        thread.join().unwrap().unwrap();
    }
    assert!(!has_said(&said[0], "late"), "{:?}", said[0]);
}

#[test]
fn one_member_alone_is_a_run() {
    let (mut controls, _) = meet(1);
    controls.remove(0).finish(Duration::from_secs(5)).unwrap();
}

#[test]
fn a_member_that_fails_is_named_by_all_with_its_own_words() {
    let (controls, _) = meet(3);
    controls[1].progress().enter(Phase::Checkpoint, 12);
    let named = Position { step: 12, phase: Phase::Checkpoint, message: None };
    until("a heartbeat with the position that will be named", || controls[0].position_of(Rank(1)) == Some(named));
    let own = controls[1].fail("the disk is full", None).unwrap();
    assert_eq!((own.rank, own.position.step, own.position.phase), (1, 12, Phase::Checkpoint));
    for control in &controls {
        until("the verdict", || control.stop().reason().is_some());
        let reason = control.stop().reason().unwrap();
        let host = &control.table().entry(Rank(1)).host;
        let expected =
            format!("rank 1 on {host} failed: the disk is full; it was last in phase checkpoint after step 12");
        assert_eq!(reason, expected);
        assert!(matches!(control.verdict().unwrap().cause, Cause::Failed { .. }));
    }
}

#[test]
fn a_member_that_drops_its_place_has_failed() {
    let (mut controls, _) = meet(2);
    drop(controls.pop());
    let error = controls.pop().unwrap().finish(Duration::from_secs(5)).unwrap_err();
    assert!(error.to_string().contains("rank 1") && error.to_string().contains("ended before"), "{error}");
}

#[test]
fn configurations_that_differ_are_refused_by_both_sides() {
    let (port, token) = (free_port(), Token::random());
    let (hub, said) = options(0, 3, port, &token);
    let (hub, third) = (enter(hub), enter(options(2, 3, port, &token).0));
    until("rank 2", || has_said(&said, "rank 2 arrived"));
    let (mut other, _) = options(1, 3, port, &token);
    other.config = "batch = 16\nseed = 1".into();
    let other = enter(other);
    for thread in [hub, other] {
        let error = thread.join().unwrap().unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains("`batch = 8` and rank 1 on"), "{error}");
    }
    assert!(third.join().unwrap().unwrap_err().to_string().contains("configurations differ"));
}

#[test]
fn a_wrong_token_is_refused_and_the_right_ones_meet_anyway() {
    let (port, token) = (free_port(), Token::random());
    let (hub, said) = options(0, 2, port, &token);
    let hub = enter(hub);
    let (stranger, _) = options(1, 2, port, &Token::random());
    let error = enter(stranger).join().unwrap().unwrap_err();
    assert!(error.is_refusal() && error.to_string().contains("token"), "{error}");
    let (member, _) = options(1, 2, port, &token);
    let member = enter(member).join().unwrap().unwrap();
    let hub = hub.join().unwrap().unwrap();
    let said = said.lock().unwrap().join("\n");
    assert!(said.contains("refused 127.0.0.1:") && said.contains("token"), "{said}");
    let member = thread::spawn(move || member.finish(Duration::from_secs(5)));
    hub.finish(Duration::from_secs(5)).unwrap();
    member.join().unwrap().unwrap();
}

#[test]
fn members_meet_in_secret_and_whoever_does_not_encrypt_is_refused() {
    let (port, token) = (free_port(), Token::random());
    let secret = |rank| {
        let (options, said) = options(rank, 2, port, &token);
        (JoinOptions { tls: Some(Tls::from_token(&token)), ..options }, said)
    };
    let (hub, said) = secret(0);
    let hub = enter(hub);
    let error = enter(options(1, 2, port, &token).0).join().unwrap().unwrap_err();
    assert!(error.is_refusal() && error.to_string().contains("--tls"), "{error}");
    let member = enter(secret(1).0).join().unwrap().unwrap();
    let hub = hub.join().unwrap().unwrap();
    let said = said.lock().unwrap().join("\n");
    assert!(said.contains("refused 127.0.0.1:") && said.contains("do not encrypt alike"), "{said}");
    // Heartbeats go both ways, and both leave.
    hub.progress().enter(Phase::Exchange, 7);
    member.progress().enter(Phase::Exchange, 8);
    let heard = |by: &Control, rank, step| {
        by.position_of(rank) == Some(Position { step, phase: Phase::Exchange, message: None })
    };
    until("heartbeats", || heard(&hub, Rank(1), 8) && heard(&member, Rank(0), 7));
    let member = thread::spawn(move || member.finish(Duration::from_secs(5)));
    hub.finish(Duration::from_secs(5)).unwrap();
    member.join().unwrap().unwrap();
    // The other way round: a plain rank 0.
    let port = free_port();
    let plain = enter(options(0, 2, port, &token).0);
    let (member, _) = options(1, 2, port, &token);
    let error = enter(JoinOptions { tls: Some(Tls::from_token(&token)), ..member }).join().unwrap().unwrap_err();
    assert!(error.is_refusal() && error.to_string().contains("--tls"), "{error}");
    let (member, hub) = (enter(options(1, 2, port, &token).0).join().unwrap().unwrap(), plain.join().unwrap().unwrap());
    let member = thread::spawn(move || member.finish(Duration::from_secs(5)));
    hub.finish(Duration::from_secs(5)).unwrap();
    member.join().unwrap().unwrap();
}

#[test]
fn whoever_does_not_come_is_named_to_those_who_did() {
    let (port, token) = (free_port(), Token::random());
    let limits = Limits { gather: Duration::from_millis(1500), ..Limits::default() };
    let enter = |rank| enter(JoinOptions { limits, ..options(rank, 4, port, &token).0 });
    let (hub, member) = (enter(0), enter(2));
    for thread in [hub, member] {
        let error = thread.join().unwrap().unwrap_err();
        assert!(error.to_string().starts_with("ranks 1 and 3 did not arrive within 1.5 s"), "{error}");
        assert!(!error.is_refusal());
    }
}

#[test]
fn a_taken_port_is_refused_with_what_to_set() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let (hub, _) = options(0, 2, taken.local_addr().unwrap().port(), &Token::random());
    let error = enter(hub).join().unwrap().unwrap_err();
    assert!(
        error.is_refusal() && error.to_string().contains("is taken; choose a free one with MASTER_PORT"),
        "{error}"
    );
}

#[test]
fn the_same_rank_twice_is_refused() {
    let (port, token) = (free_port(), Token::random());
    let (hub, said) = options(0, 3, port, &token);
    let hub = enter(JoinOptions { limits: Limits { gather: Duration::from_secs(3), ..Limits::default() }, ..hub });
    let first = enter(options(1, 3, port, &token).0);
    until("rank 1", || has_said(&said, "rank 1 arrived"));
    let error = enter(options(1, 3, port, &token).0).join().unwrap().unwrap_err();
    assert!(error.is_refusal() && error.to_string().contains("taken"), "{error}");
    for thread in [hub, first] {
        assert!(thread.join().unwrap().unwrap_err().to_string().starts_with("rank 2 did not arrive"));
    }
}

/// Garbage, half a greeting, silence, a flood and a replayed greeting, all while a run gathers.
#[test]
fn strangers_hold_up_nobody() {
    let (port, token) = (free_port(), Token::random());
    let (hub, said) = options(0, 2, port, &token);
    let hub = enter(hub);
    let knock = || loop {
        if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
            stream.set_read_timeout(Some(Duration::from_secs(8))).unwrap();
            return stream;
        }
    };
    let mut silent: Vec<TcpStream> = (0..20).map(|_| knock()).collect();
    for round in 0..30u8 {
        let mut stream = knock();
        let _ = stream.write_all(&[round; 4000]);
    }
    let mut half = knock();
    half.write_all(b"PACELINE\x01\x00").unwrap();
    // What a member says first, recorded and said again: the nonce is old, so the proof that would have to follow is not
    // known to whoever replays it.
    let recorder = TcpListener::bind("127.0.0.1:0").unwrap();
    let member = enter(JoinOptions {
        limits: Limits { gather: Duration::from_millis(500), ..Limits::default() },
        ..options(1, 2, recorder.local_addr().unwrap().port(), &token).0
    });
    let mut greeting = [0; 80];
    recorder.accept().unwrap().0.read_exact(&mut greeting).unwrap();
    let mut replay = knock();
    replay.write_all(&greeting).unwrap();
    replay.write_all(&[0xA1; 33]).unwrap();
    let mut answer = Vec::new();
    let _ = replay.read_to_end(&mut answer);
    assert!(answer.len() < 200, "a replay gets a greeting and a refusal, nothing else");
    drop(recorder);
    assert!(member.join().unwrap().is_err());
    let member = enter(options(1, 2, port, &token).0).join().unwrap().unwrap();
    let hub = hub.join().unwrap().unwrap();
    assert!(said.lock().unwrap().iter().any(|line| line.contains("refused")), "{said:?}");
    assert!(said.lock().unwrap().len() < 20, "refusals are limited: {said:?}");
    // The port is closed once all are there, and whoever still hung on it is let go.
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    for stream in &mut silent {
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let member = thread::spawn(move || member.finish(Duration::from_secs(5)));
    hub.finish(Duration::from_secs(5)).unwrap();
    member.join().unwrap().unwrap();
}

/// Rank 1 is this test: it holds the token, joins, says that it is alive, and never reads.
#[test]
fn a_member_that_never_reads_is_named_by_those_that_do() {
    let (port, token) = (free_port(), Token::random());
    // Heartbeats without a pause fill the few megabytes that the kernel buffers within seconds.
    let (hub, said) = options(0, 3, port, &token);
    let hub = enter(JoinOptions { limits: Limits { beat: Duration::ZERO, ..hub.limits }, ..hub });
    until("the hub", || has_said(&said, "listens"));
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let identity = Identity::new(&token, Purpose::Control, Role::Dialler, Rank(1), 3);
    let wait = Wait::new(Duration::from_secs(30), &Stop::new());
    let met = greet(&mut stream, &identity, &wait).unwrap();
    let talk = Talk { rank: Rank(1), peer: Rank(0).into(), phase: "test" };
    let mut framed = Framed::new(stream, 1 << 20);
    let entry = r#"{"data":null,"host":"deaf","node":"n","pid":1,"version":"0"}"#;
    let config = "batch = 8\\nseed = 1";
    let join = format!(r#"{{"message":"join","entry":{entry},"config":"{config}","run":"{}"}}"#, met.run);
    framed.send(1, join.as_bytes(), &talk, &wait).unwrap();
    let other = enter(options(2, 3, port, &token).0);
    let (hub, other) = (hub.join().unwrap().unwrap(), other.join().unwrap().unwrap());
    let beat = br#"{"message":"beat","position":{"step":7,"phase":"exchange"},"waiting":{}}"#;
    until("the verdict", || {
        // Once the hub has given up on it, the connection is gone.
        let _ = framed.send(1, beat, &talk, &wait);
        hub.verdict().is_some() && other.verdict().is_some()
    });
    for control in [&hub, &other] {
        let verdict = control.verdict().unwrap().to_string();
        let gone = verdict.starts_with("rank 1 on deaf is gone (it does not read: ");
        assert!(gone || verdict.contains("it has read nothing"), "{verdict}");
    }
}
