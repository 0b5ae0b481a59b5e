//! Strangers on the machine and on the network while a run begins: they relay, replay, say nothing, or are ranks of another
//! run with the same token. The run begins all the same, at once, and trains as if nobody had come.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::place::{Place, has};
use crate::ranks::{Run, all_end_well, until};

/// Three steps of a small network with batch-norm.
const BRIEF: &str = "train --model cnn5 --data synthetic:16x16x3/10/64 --batch 12 --max-steps 3 --threads 1 --quiet";

/// A greeting's bytes, and where in it the role is said.
const GREETING: usize = 96;
const ROLE: usize = 12 + 17;

/// The rows of a table of the kernel's sockets that are a process's own; a column has the socket's number.
fn sockets(child: &Child, table: &str, column: usize) -> Vec<Vec<String>> {
    let Ok(files) = std::fs::read_dir(format!("/proc/{}/fd", child.id())) else { return Vec::new() };
    let own: Vec<PathBuf> = files.flatten().filter_map(|file| std::fs::read_link(file.path()).ok()).collect();
    let is_own = |row: &Vec<String>| own.contains(&PathBuf::from(format!("socket:[{}]", row[column])));
    let text = std::fs::read_to_string(table).unwrap();
    let rows = text.lines().skip(1).map(|line| line.split_whitespace().map(str::to_owned).collect());
    rows.filter(is_own).collect()
}

/// The ports at which a process listens.
fn listens(child: &Child) -> Vec<u16> {
    let listening = sockets(child, "/proc/net/tcp", 9).into_iter().filter(|row| row[3] == "0A");
    listening.filter_map(|row| u16::from_str_radix(row[1].split_once(':')?.1, 16).ok()).collect()
}

/// Where a rank above 0 listens for data.
fn data_port(child: &Child) -> u16 {
    until("a port for data", || listens(child).first().copied())
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    stream
}

/// Carries what comes from either to the other until both are silent; how many bytes it carried.
fn relay(left: TcpStream, right: TcpStream) -> usize {
    let carry = |mut from: TcpStream, mut to: TcpStream| {
        std::thread::spawn(move || {
            let (mut bytes, mut carried) = ([0; 512], 0);
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                carried += count;
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            carried
        })
    };
    let there = carry(left.try_clone().unwrap(), right.try_clone().unwrap());
    let back = carry(right, left);
    there.join().unwrap() + back.join().unwrap()
}

/// A listener's own greeting, made one of a dialler, for another listener.
fn made_over(from: &mut TcpStream, greeting: &[u8]) -> Option<Vec<u8>> {
    from.write_all(greeting).ok()?;
    let mut theirs = vec![0; GREETING];
    from.read_exact(&mut theirs).ok()?;
    theirs[ROLE] = 1;
    Some(theirs)
}

/// What a rank that dials says first: taken from one that dials this test.
fn recorded(place: &Place, rank: usize, world: usize) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let run = Run { port: listener.local_addr().unwrap().port(), world, line: BRIEF.into() };
    let mut child = run.rank(place, rank).spawn().unwrap();
    let mut greeting = vec![0; GREETING];
    listener.accept().unwrap().0.read_exact(&mut greeting).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    greeting
}

#[test]
fn a_stranger_who_relays_between_two_ranks_is_refused_by_both() {
    let place = Place::new();
    let run = Run::new(4, BRIEF);
    let start = |rank: usize| run.rank(&place, rank).spawn().unwrap();
    let mut ranks = vec![start(0), start(1), start(2)];
    let ports = [data_port(&ranks[1]), data_port(&ranks[2])];
    // Nobody is greeted for data before all have come, so the stranger is the first in both queues.
    let plain = ports.map(connect);
    let mut forged = [connect(ports[0]), connect(ports[1])];
    let greeting = recorded(&place, 2, 4);
    let relaying = std::thread::spawn(move || {
        let [left, right] = plain;
        relay(left, right)
    });
    let forging = std::thread::spawn(move || {
        let theirs = made_over(&mut forged[0], &greeting)?;
        let _ = forged[1].write_all(&theirs);
        let [left, right] = forged;
        Some(relay(left, right))
    });
    ranks.push(start(3));
    all_end_well(ranks);
    relaying.join().unwrap();
    forging.join().unwrap();
}

/// Between ranks and rank 0: keeps what each side says, by connection.
fn recorder(target: u16, connections: usize) -> (u16, std::thread::JoinHandle<Vec<[Vec<u8>; 2]>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let carry = |mut from: TcpStream, mut to: TcpStream| {
        std::thread::spawn(move || {
            let (mut bytes, mut said) = ([0; 4096], Vec::new());
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                said.extend_from_slice(&bytes[..count]);
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Write);
            said
        })
    };
    let body = move || {
        let mut threads = Vec::new();
        for _ in 0..connections {
            let (dialler, hub) = (listener.accept().unwrap().0, connect(target));
            hub.set_read_timeout(None).unwrap();
            let [there, back] = [dialler.try_clone().unwrap(), hub.try_clone().unwrap()];
            threads.push([carry(there, hub), carry(back, dialler)]);
        }
        threads.into_iter().map(|pair| pair.map(|thread| thread.join().unwrap())).collect()
    };
    (port, std::thread::spawn(body))
}

#[test]
fn what_was_recorded_of_a_run_opens_no_other_one() {
    let place = Place::new();
    let run = Run::new(3, BRIEF);
    let hub = run.rank(&place, 0).spawn().unwrap();
    until("rank 0", || (!listens(&hub).is_empty()).then_some(()));
    let (port, recording) = recorder(run.port, 2);
    let through = Run { port, world: 3, line: BRIEF.into() };
    let others = [1, 2].map(|rank| through.rank(&place, rank).spawn().unwrap());
    all_end_well(std::iter::once(hub).chain(others).collect());
    let recorded = recording.join().unwrap();
    // Another run with the same token: every recorded side is said to every side that is there.
    let run = Run::new(3, BRIEF);
    let hub = run.rank(&place, 0).spawn().unwrap();
    until("rank 0", || (!listens(&hub).is_empty()).then_some(()));
    for said in recorded.iter().flatten() {
        let mut stream = connect(run.port);
        stream.write_all(&said[..said.len().min(GREETING + 34)]).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() <= GREETING + 2, "a greeting and a refusal, and no proof: {} bytes", answer.len());
        // A rank that dials takes no old answer either.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let lost = Run { port: listener.local_addr().unwrap().port(), world: 3, line: BRIEF.into() };
        let rank = lost.rank(&place, 1).spawn().unwrap();
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(&said[..said.len().min(GREETING + 34)]).unwrap();
        drop(listener);
        let output = rank.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let others = [1, 2].map(|rank| run.rank(&place, rank).spawn().unwrap());
    all_end_well(std::iter::once(hub).chain(others).collect());
}

#[test]
fn two_hundred_silent_connections_cost_a_run_nothing() {
    let place = Place::new();
    let run = Run::new(3, &format!("{BRIEF} --carry tcp"));
    let start = |rank: usize| run.rank(&place, rank).spawn().unwrap();
    let hub = start(0);
    until("rank 0", || listens(&hub).contains(&run.port).then_some(()));
    let mut silent: Vec<TcpStream> = (0..200).map(|_| connect(run.port)).collect();
    let began = Instant::now();
    let first = start(1);
    let port = data_port(&first);
    let met = began.elapsed();
    silent.extend((0..200).map(|_| connect(port)));
    let began = Instant::now();
    all_end_well(vec![hub, first, start(2)]);
    let trained = began.elapsed();
    assert!(met < Duration::from_secs(4), "rank 1 took {met:?} to be let in");
    assert!(trained < Duration::from_secs(8), "the run took {trained:?}");
    drop(silent);
}

/// A command under `strace`, which holds up a system call; what it did to it goes into a file.
fn held_up(place: &Place, run: &Run, rank: usize, (call, trace): (&str, &str)) -> Command {
    let plain = run.rank(place, rank);
    let mut command = Command::new("strace");
    command
        .args(["-f", "-qq", "-o"])
        .arg(place.path(trace))
        .args(["-e", &format!("trace={}", &call[..call.find(':').unwrap()])]);
    command.args(["-e", &format!("inject={call}")]).arg(plain.get_program()).args(plain.get_args());
    command.current_dir(place.path("")).env("PACELINE_CACHE", place.cache());
    run.describe(&mut command, rank);
    command
}

#[test]
fn silent_connections_to_the_shared_memory_socket_cost_nothing() {
    if !has("strace", "silent_connections_to_the_shared_memory_socket_cost_nothing") {
        return;
    }
    let place = Place::new();
    let run = Run::new(2, &format!("{BRIEF} --carry shm"));
    let hub = run.rank(&place, 0).stdin(Stdio::null()).spawn().unwrap();
    // Rank 1 is late by a second for every connection it opens, so that strangers are there first.
    let late = held_up(&place, &run, 1, ("connect:delay_enter=1000000", "late.txt")).spawn().unwrap();
    let name = until("the socket", || {
        sockets(&hub, "/proc/net/unix", 6).into_iter().find_map(|row| Some(row.get(7)?.strip_prefix('@')?.to_owned()))
    });
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let silent: Vec<UnixStream> = (0..100).filter_map(|_| UnixStream::connect_addr(&address).ok()).collect();
    assert!(silent.len() > 50, "{} came in", silent.len());
    let began = Instant::now();
    all_end_well(vec![hub, late]);
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert!(place.read_text("late.txt").contains("DELAYED"), "the delay was there");
}

#[test]
fn runs_of_one_user_never_take_each_others_ranks() {
    if !has("strace", "runs_of_one_user_never_take_each_others_ranks") {
        return;
    }
    let place = Place::new();
    let line = |seed: usize, run: &str| format!("{BRIEF} --calibrate off --seed {seed} --run {run}");
    for seed in [1, 2] {
        place.run(&format!("{} --workers 2", line(seed, &format!("alone-{seed}"))));
    }
    // Rank 0 of the first run of each pair is late with every socket that it names, so that ranks of both look for one.
    let mut children = Vec::new();
    for pair in 0..20 {
        let runs = [1, 2].map(|seed| Run::new(2, &line(seed, &format!("pair-{pair}-{seed}"))));
        let delay = format!("bind:delay_enter={}", 100_000 + 20_000 * pair);
        children.push(held_up(&place, &runs[0], 0, (&delay, &format!("bind-{pair}.txt"))).spawn().unwrap());
        children.extend(
            [(0, 1), (1, 0), (1, 1)].map(|(run, rank): (usize, usize)| runs[run].rank(&place, rank).spawn().unwrap()),
        );
        if pair % 5 == 4 {
            all_end_well(std::mem::take(&mut children));
        }
    }
    for pair in 0..20 {
        assert!(place.read_text(&format!("bind-{pair}.txt")).contains("DELAYED"), "the delay was there");
        for seed in [1, 2] {
            let found = place.weights(&format!("pair-{pair}-{seed}"), 3);
            assert!(found == place.weights(&format!("alone-{seed}"), 3), "pair {pair}, seed {seed}: other weights");
        }
    }
}
