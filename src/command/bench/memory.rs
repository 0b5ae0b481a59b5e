//! `paceline bench memory`: a memory box in a process of its own, read, written and added to from this one, beside what
//! memory and a socket can do at best and what a parameter server's two-sided messages take.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, ExitCode, Stdio};

use serde_json::{Value, json};

use crate::comm::CommError;
use crate::comm::memory_box::{BoxClient, ClientOptions, Key, LentRegion};
use crate::system::clock::Clock;
use crate::system::host::Host;
use crate::system::threads;

use super::super::{Outcome, print, print_json};
use crate::arguments::BenchMemory;
use crate::failure::Failure;
use crate::run::elsewhere;

#[cfg(feature = "mpi")]
mod over_mpi;
mod two_sided;

/// Measurements of a size, of which the median counts.
const REPEATS_MIN: usize = 5;
const REPEATS_MAX: usize = 20_000;

/// Small messages are measured so many in a row: what a thread takes to be woken after a pause is seen in one of them.
const BURST: usize = 16;
const BURST_BYTES_MAX: usize = 64 << 10;

/// What is measured at a size, in the order of the table's columns.
#[derive(Clone, Debug)]
struct Row {
    bytes: usize,
    /// The name, seconds of the median, and the bytes that are moved.
    cells: Vec<(&'static str, f64, usize)>,
}

impl Row {
    fn seconds(&self, name: &str) -> Option<f64> {
        self.cells.iter().find(|(found, ..)| *found == name).map(|(_, seconds, _)| *seconds)
    }

    /// How many times as fast as its bound.
    fn share(&self, name: &str, bound: &str) -> Option<f64> {
        Some(self.seconds(bound)? / self.seconds(name)?)
    }
}

/// The box's process; it ends with this value.
struct Lender {
    child: Child,
    address: SocketAddr,
}

impl Drop for Lender {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Lender {
    fn start(largest: usize) -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(Failure::failed)?;
        let pool = (8 * largest as u64).max(64_000_000);
        let mut child = Command::new(program)
            .args(["serve", "memory", "--listen", "127.0.0.1:0", "--json", "--pool"])
            .arg(format!("{}MB", pool / 1_000_000))
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Failure::failed)?;
        let mut line = String::new();
        let read = child.stdout.take().map(|output| BufReader::new(output).read_line(&mut line));
        let said: Option<Value> = read.and_then(|_| serde_json::from_str(&line).ok());
        let address = said.and_then(|said| said["address"].as_str()?.parse().ok());
        let lender = address.map(|address| Self { child, address });
        lender.ok_or_else(|| Failure::failed("the memory box did not start; its error is above"))
    }
}

/// One thing that is measured: its name, the bytes that it moves, and how to do it once.
type Measure<'a> = (&'static str, usize, Box<dyn FnMut() -> Result<(), Failure> + 'a>);

/// Runs the command.
pub fn run(arguments: &BenchMemory) -> Outcome {
    let largest = arguments.bytes.iter().copied().max().unwrap_or(8);
    #[cfg(feature = "mpi")]
    let mut over_mpi = match over_mpi::join(largest)? {
        // Another rank has measured.
        Some(None) => return Ok(ExitCode::SUCCESS),
        joined => joined.flatten(),
    };
    let lender = Lender::start(largest)?;
    let secrets = elsewhere::options(None)?;
    let options = ClientOptions { sockets: usize::from(arguments.sockets), ..ClientOptions::new(&secrets.token) };
    let mapped = BoxClient::connect(lender.address, &options)?;
    let remote = BoxClient::connect(lender.address, &ClientOptions { maps: false, ..options })?;
    let [mine, sum, delta] = ["mine", "sum", "delta"].map(|name| Key::derive(&secrets.token, name));
    let mut rows = Vec::new();
    if !arguments.json {
        let host = Host::look();
        print(&format!("{} cores of {}\n", host.cores, host.cpu));
    }
    let mut two_sided = two_sided::Peers::start(largest)?;
    let mut socket = Echo::start()?;
    for &bytes in &arguments.bytes {
        let regions = [mine, sum, delta].map(|key| mapped.create(&key, bytes.max(8) as u64));
        let [mine_region, sum_region, delta_region] = regions;
        let (mine_region, sum_region, delta_region) = (mine_region?, sum_region?, delta_region?);
        let far = [remote.attach(&mine)?, remote.attach(&sum)?, remote.attach(&delta)?];
        check(&mapped, &remote, (&mine_region, &far[0]), bytes)?;
        #[allow(unused_mut, reason = "without MPI nothing is added")]
        let mut row = measure(
            arguments,
            bytes,
            (&mapped, [&mine_region, &sum_region, &delta_region]),
            (&remote, &far),
            (&mut socket, &mut two_sided),
        )?;
        #[cfg(feature = "mpi")]
        if let Some(over_mpi) = &mut over_mpi {
            row.cells.extend(measure_mpi(arguments, bytes, over_mpi)?);
        }
        if !arguments.json {
            print(&table(&row, rows.is_empty()));
        }
        rows.push(row);
        [mine_region, sum_region, delta_region].iter().try_for_each(|region| mapped.free(region))?;
    }
    #[cfg(feature = "mpi")]
    if let Some(over_mpi) = over_mpi {
        over_mpi.end()?;
    }
    if arguments.json {
        print_json(&document(&rows));
    } else {
        print(&verdict(&rows));
    }
    Ok(ExitCode::SUCCESS)
}

fn done<T>(outcome: Result<T, CommError>) -> Result<(), Failure> {
    outcome.map(|_| ()).map_err(Failure::from)
}

/// What is written by one way is read by the other.
fn check(
    mapped: &BoxClient,
    remote: &BoxClient,
    (near, far): (&LentRegion, &LentRegion),
    bytes: usize,
) -> Result<(), Failure> {
    let written: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
    let mut found = vec![0; bytes];
    mapped.write(near, 0, &written)?;
    remote.read(far, 0, &mut found)?;
    let same = found == written;
    remote.write(far, 0, &vec![7; bytes])?;
    mapped.read(near, 0, &mut found)?;
    if same && found.iter().all(|&byte| byte == 7) {
        return Ok(());
    }
    Err(Failure::failed("what was read is not what was written"))
}

fn measure(
    arguments: &BenchMemory,
    bytes: usize,
    (mapped, near): (&BoxClient, [&LentRegion; 3]),
    (remote, far): (&BoxClient, &[LentRegion; 3]),
    (socket, two_sided): (&mut Echo, &mut two_sided::Peers),
) -> Result<Row, Failure> {
    let floats = bytes / 4;
    let (source, ones) = (vec![1u8; bytes], vec![1f32; floats]);
    let buffers: Vec<std::cell::RefCell<Vec<u8>>> = (0..4).map(|_| vec![0u8; bytes].into()).collect();
    let (mut sums, old) = (vec![0f32; floats], vec![2f32; floats]);
    let both = std::cell::RefCell::new((socket, two_sided));
    let mut all: Vec<Measure<'_>> = vec![
        (
            "copy",
            bytes,
            Box::new(|| {
                buffers[0].borrow_mut().copy_from_slice(&source);
                Ok(())
            }),
        ),
        (
            "add",
            3 * bytes,
            Box::new(|| {
                sums.iter_mut().zip(&old).zip(&ones).for_each(|((sum, old), one)| *sum = old + 0.5 * one);
                Ok(())
            }),
        ),
        ("mapped read", bytes, Box::new(|| done(mapped.read(near[0], 0, &mut buffers[1].borrow_mut())))),
        ("mapped write", bytes, Box::new(|| done(mapped.write(near[0], 0, &source)))),
        (
            "mapped accumulate",
            3 * bytes,
            Box::new(|| done(mapped.accumulate((near[1], 0), (near[2], 0), bytes as u64, 0.5))),
        ),
        ("socket read", bytes, Box::new(|| both.borrow_mut().0.read(&mut buffers[2].borrow_mut()))),
        ("socket write", bytes, Box::new(|| both.borrow_mut().0.write(&source))),
        ("tcp read", bytes, Box::new(|| done(remote.read(&far[0], 0, &mut buffers[3].borrow_mut())))),
        ("tcp write", bytes, Box::new(|| done(remote.write(&far[0], 0, &source)))),
        ("tcp add", bytes, Box::new(|| done(remote.add(&far[1], 0, &ones, 0.5)))),
        ("server tcp", 2 * bytes, Box::new(|| both.borrow_mut().1.push_pull(two_sided::Way::Tcp, floats))),
        ("server shm", 2 * bytes, Box::new(|| both.borrow_mut().1.push_pull(two_sided::Way::Shm, floats))),
    ];
    let cells = in_turns((arguments, bytes), &mut all)?;
    Ok(Row { bytes, cells })
}

/// Medians, measured in turns, so that what else the machine does falls on all of them.
fn in_turns(
    (arguments, bytes): (&BenchMemory, usize),
    all: &mut [Measure<'_>],
) -> Result<Vec<(&'static str, f64, usize)>, Failure> {
    let clock = Clock::real();
    let mut seconds = vec![Vec::new(); all.len()];
    let begin = clock.seconds();
    let burst = if bytes <= BURST_BYTES_MAX { BURST } else { 1 };
    let limit = arguments.seconds * all.len() as f64;
    while seconds[0].len() < REPEATS_MIN || (clock.seconds() - begin < limit && seconds[0].len() < REPEATS_MAX) {
        for ((_, _, once), seconds) in all.iter_mut().zip(&mut seconds) {
            for _ in 0..burst {
                let start = clock.seconds();
                once()?;
                seconds.push(clock.seconds() - start);
            }
        }
    }
    let median = |seconds: &mut Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let cells = all.iter().zip(&mut seconds).map(|((name, moved, _), seconds)| (*name, median(seconds), *moved));
    Ok(cells.collect())
}

/// The same by MPI.
#[cfg(feature = "mpi")]
fn measure_mpi(
    arguments: &BenchMemory,
    bytes: usize,
    over_mpi: &mut over_mpi::OverMpi,
) -> Result<Vec<(&'static str, f64, usize)>, Failure> {
    let over_mpi::OverMpi { window, worker } = over_mpi;
    let (source, ones) = (vec![1u8; bytes], vec![1f32; bytes / 4]);
    let mut target = vec![0u8; bytes];
    let failed = |why: String| Failure::failed(why);
    let mut all: Vec<Measure<'_>> = vec![
        ("mpi get", bytes, Box::new(|| window.get(1, 0, &mut target).map_err(failed))),
        ("mpi put", bytes, Box::new(|| window.put(1, 0, &source).map_err(failed))),
        ("mpi accumulate", bytes, Box::new(|| window.accumulate(1, 0, &ones).map_err(failed))),
        ("mpi messages", 2 * bytes, Box::new(|| worker.push_pull(bytes / 4).map_err(Failure::from))),
    ];
    in_turns((arguments, bytes), &mut all)
}

/// A plain socket: a thread of this process that sends as many bytes as it is asked for, or takes them.
struct Echo {
    stream: TcpStream,
}

impl Echo {
    fn start() -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(Failure::failed)?;
        let address = listener.local_addr().map_err(Failure::failed)?;
        let body = move || -> std::io::Result<()> {
            let (mut stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            let mut room: Vec<u8> = Vec::new();
            let mut head = [0; 8];
            // Until the other end is dropped.
            while stream.read_exact(&mut head).is_ok() {
                let asked = i64::from_le_bytes(head);
                room.resize(asked.unsigned_abs() as usize, 1);
                if asked >= 0 {
                    stream.write_all(&room)?;
                } else {
                    stream.read_exact(&mut room)?;
                    stream.write_all(&[1])?;
                }
            }
            Ok(())
        };
        threads::spawn("socket", body).map_err(Failure::failed)?;
        let stream = TcpStream::connect(address).map_err(Failure::failed)?;
        stream.set_nodelay(true).map_err(Failure::failed)?;
        Ok(Self { stream })
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), Failure> {
        self.stream.write_all(&(bytes.len() as i64).to_le_bytes()).map_err(Failure::failed)?;
        self.stream.read_exact(bytes).map_err(Failure::failed)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.stream.write_all(&(-(bytes.len() as i64)).to_le_bytes()).map_err(Failure::failed)?;
        self.stream.write_all(bytes).map_err(Failure::failed)?;
        self.stream.read_exact(&mut [0]).map_err(Failure::failed)
    }
}

/// What is compared with what.
const BOUNDS: [(&str, &str); 6] = [
    ("mapped read", "copy"),
    ("mapped write", "copy"),
    ("mapped accumulate", "add"),
    ("tcp read", "socket read"),
    ("tcp write", "socket write"),
    ("tcp add", "socket write"),
];

fn table(row: &Row, is_first: bool) -> String {
    let mut text = String::new();
    if is_first {
        text += &format!("{:>10}  {:<18}{:>12}{:>10}  {}\n", "bytes", "what", "median µs", "GB/s", "of its bound");
    }
    for (name, seconds, moved) in &row.cells {
        let bound = BOUNDS.iter().find(|(found, _)| found == name);
        let share = bound.and_then(|(_, bound)| Some((row.share(name, bound)?, bound)));
        let share = share.map_or(String::new(), |(share, bound)| format!("{:>4.0}% of {bound}", 100.0 * share));
        let (bytes, micro, speed) = (row.bytes, seconds * 1e6, *moved as f64 / seconds / 1e9);
        text += &format!("{bytes:>10}  {name:<18}{micro:>12.1}{speed:>10.3}  {share}\n");
    }
    text
}

/// Whether one-sided wins for small messages, as measured just now.
fn verdict(rows: &[Row]) -> String {
    let mut text = String::from("one-sided beside two-sided, an add in the box and a push with its answer, by TCP:\n");
    for row in rows {
        let Some((one, two)) = row.seconds("tcp add").zip(row.seconds("server tcp")) else { continue };
        let word = if one < 0.95 * two {
            "one-sided is quicker"
        } else if two < 0.95 * one {
            "two-sided is quicker"
        } else {
            "the same"
        };
        text += &format!("{:>10}  {:>10.1} µs {:>10.1} µs  {word}\n", row.bytes, one * 1e6, two * 1e6);
    }
    text
}

fn document(rows: &[Row]) -> Value {
    let cell = |row: &Row, (name, seconds, moved): &(&'static str, f64, usize)| {
        let bound = BOUNDS.iter().find(|(found, _)| found == name).and_then(|(_, bound)| row.share(name, bound));
        json!({ "what": name, "bytes": row.bytes, "seconds": seconds, "bytes_per_s": *moved as f64 / seconds, "of_bound": bound })
    };
    let rows: Vec<Value> = rows.iter().flat_map(|row| row.cells.iter().map(move |found| cell(row, found))).collect();
    json!({ "host": Host::look(), "rows": rows })
}
