//! Real processes: ranks that are started, killed and stopped. The child is this test program itself, told by the
//! environment which rank to be.

mod world;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use paceline_comm::global::{Functions, Pending, Space};
use paceline_comm::transport::{Membership, Transport, shm, tcp};
use paceline_comm::{Communicator, Generation, Rank, RunId, Stop, Token, Wait};
use world::options;

const TIMEOUT: Duration = Duration::from_secs(3);

/// Not a test of its own: the body of a child. Reads the addresses, then reduces, or reaches into the others' memory, until that fails.
#[test]
fn child() {
    let Ok(role) = std::env::var("PACELINE_TEST_RANK") else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let (carry, rank, world) = (words[0], words[1].parse().unwrap(), words[2].parse().unwrap());
    let token = Token::from_hex(words[3]).unwrap();
    let listener = tcp::Listener::bind(Rank(rank), None).unwrap();
    println!("\naddress {}", listener.address());
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    let addresses: Vec<_> = line.split_whitespace().map(|address| address.parse().unwrap()).collect();
    let wait = Wait::new(Duration::from_secs(20), &Stop::new());
    let member = Membership { token, run: RunId::UNKNOWN, rank: Rank(rank), world, generation: Generation(0) };
    let transport = match carry {
        "shm" => Transport::Shm(shm::connect(&member, &wait).unwrap()),
        _ => Transport::Tcp(tcp::connect(listener, &addresses, &member, tcp::Config::default(), &wait).unwrap()),
    };
    match words[4] {
        "reduce" => reduce(transport, world),
        _ => reach(transport, world),
    }
}

/// Adds up until that fails.
fn reduce(transport: Transport, world: usize) {
    let mut comm = Communicator::new(transport, options(world, None, TIMEOUT));
    let rank = comm.rank().0;
    let sum: f32 = (0..world).map(|rank| rank as f32).sum();
    let mut buffer = vec![0.0; 300_000];
    for round in 0.. {
        buffer.fill(rank as f32);
        if let Err(error) = comm.all_reduce(&mut buffer) {
            println!("\nfailed {:?} {error}", error.peer().map(|peer| peer.0));
            return;
        }
        assert!(buffer.iter().all(|&value| value == sum));
        if round == 20 {
            println!("\nrunning");
        }
    }
}

/// Counts in the memory of all ranks until that fails.
fn reach(transport: Transport, world: usize) {
    let space = Space::meet(transport, Functions::new(), Duration::from_secs(30), &Stop::new()).unwrap();
    let counters = space.array::<u64>(&[world]).unwrap();
    for round in 0.. {
        let additions: Vec<Pending<u64>> = (0..world).map(|rank| counters.fetch_add(rank, 1)).collect();
        let failed = additions.into_iter().find_map(|addition| addition.wait().err());
        if let Some(error) = failed.or_else(|| space.barrier().err()) {
            println!("\nfailed {:?} {error}", error.peer().map(|peer| peer.0));
            return;
        }
        // Others are a round ahead, at the most.
        let own = counters.local()[0];
        assert!((world as u64 * (round + 1)..world as u64 * (round + 2)).contains(&own), "{own} in round {round}");
        if round == 20 {
            println!("\nrunning");
        }
    }
}

struct Started {
    process: Child,
    output: BufReader<ChildStdout>,
}

impl Started {
    fn start((carry, what): (&str, &str), rank: usize, world: usize, token: &Token) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture"])
            .env("PACELINE_TEST_RANK", format!("{carry} {rank} {world} {} {what}", token.to_hex()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, output }
    }

    /// The rest of the next line that begins with this word.
    fn line(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("a rank ended without saying {word}");
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(carry: &str, what: &str, world: usize) -> Vec<Started> {
    let token = Token::random();
    let mut ranks: Vec<_> = (0..world).map(|rank| Started::start((carry, what), rank, world, &token)).collect();
    let addresses: Vec<String> = ranks.iter_mut().map(|rank| rank.line("address")).collect();
    for rank in &mut ranks {
        writeln!(rank.process.stdin.as_mut().unwrap(), "{}", addresses.join(" ")).unwrap();
    }
    ranks.iter_mut().for_each(|rank| drop(rank.line("running")));
    ranks
}

fn shared_memory_left() -> usize {
    let names = std::fs::read_dir("/dev/shm").map(|entries| {
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().contains("paceline")).count()
    });
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    names.unwrap_or(0) + sockets.lines().filter(|line| line.contains("@paceline-")).count()
}

#[test]
fn a_killed_process_is_named_by_the_survivors_and_leaves_nothing() {
    for carry in ["shm", "tcp"] {
        let mut ranks = start(carry, "reduce", 3);
        let started = Instant::now();
        ranks[2].process.kill().unwrap();
        let failures: Vec<String> = ranks[..2].iter_mut().map(|rank| rank.line("failed")).collect();
        assert!(started.elapsed() < TIMEOUT + Duration::from_secs(2), "{carry}: {:?}", started.elapsed());
        assert!(failures.iter().any(|failure| failure.starts_with("Some(2)")), "{carry}: {failures:?}");
        for rank in &mut ranks[..2] {
            assert!(rank.process.wait().unwrap().success());
        }
        drop(ranks);
        // Worlds of other tests may just be meeting; what is left behind stays.
        let deadline = Instant::now() + Duration::from_secs(10);
        while shared_memory_left() > 0 {
            assert!(Instant::now() < deadline, "{carry}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_killed_process_is_named_by_those_who_reach_into_its_memory() {
    for carry in ["shm", "tcp"] {
        let mut ranks = start(carry, "reach", 3);
        ranks[2].process.kill().unwrap();
        let failures: Vec<String> = ranks[..2].iter_mut().map(|rank| rank.line("failed")).collect();
        assert!(failures.iter().any(|failure| failure.starts_with("Some(2)")), "{carry}: {failures:?}");
        for rank in &mut ranks[..2] {
            assert!(rank.process.wait().unwrap().success());
        }
    }
}

#[test]
fn a_stopped_process_is_named_when_the_deadline_passes() {
    for carry in ["shm", "tcp"] {
        let mut ranks = start(carry, "reduce", 2);
        let pid = rustix::process::Pid::from_child(&ranks[1].process);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        let started = Instant::now();
        let failure = ranks[0].line("failed");
        assert!(failure.starts_with("Some(1)") && failure.contains("deadline passed"), "{carry}: {failure}");
        assert!(started.elapsed() < TIMEOUT + Duration::from_secs(2), "{carry}");
    }
}
