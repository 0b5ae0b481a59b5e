//! What every rank of `bench collectives` does: check a result, then time it, together with all others.

use crate::comm::transfer::{Action, Transfer};
use crate::comm::{Algorithm, Choice, CommError, Communicator, Rank, RegisteredBuffer};
use crate::system::clock::Clock;
use serde_json::{Value, json};

use crate::arguments::BenchCollectives;
use crate::failure::Failure;

/// One measurement.
#[derive(Debug)]
pub struct Row {
    /// How bytes travelled.
    pub carry: String,
    /// Between how many ranks.
    pub workers: usize,
    /// Of the buffer.
    pub bytes: usize,
    /// By which algorithm.
    pub algorithm: String,
    /// Whether the buffer was in shared memory.
    pub shared: bool,
    /// How often it was timed.
    pub repeats: usize,
    /// The median time of one all-reduce.
    pub median_s: f64,
    /// The least.
    pub least_s: f64,
    /// What as many bytes a rank do at best without any sum; see [`Bound`].
    pub bound: Bound,
    /// In bytes a rank.
    pub bound_bytes_per_s: f64,
}

/// What an all-reduce is compared with: as many bytes, in the same minute, in the same caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Every rank copies a buffer to another in its own memory, all at the same time.
    Copy,
    /// Every rank sends a buffer to the next and receives one from the rank before, all at the same time.
    Stream,
}

impl Bound {
    /// The bound of ranks that are joined in this way.
    fn of(comm: &Communicator) -> Self {
        if ["shm", "thread"].contains(&comm.transport().name()) { Self::Copy } else { Self::Stream }
    }

    /// For people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Stream => "stream",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        [Self::Copy, Self::Stream].into_iter().find(|bound| bound.name() == name)
    }
}

impl Row {
    /// S/t·2(p−1)/p: comparable between numbers of ranks.
    pub fn bus_bytes_per_s(&self) -> f64 {
        let ranks = self.workers as f64;
        self.bytes as f64 / self.median_s * 2.0 * (ranks - 1.0) / ranks
    }

    /// For the parent process and for the user.
    pub fn to_json(&self) -> Value {
        json!({
            "carry": self.carry,
            "workers": self.workers,
            "bytes": self.bytes,
            "algorithm": self.algorithm,
            "shared": self.shared,
            "repeats": self.repeats,
            "median_s": self.median_s,
            "least_s": self.least_s,
            "bus_bytes_per_s": self.bus_bytes_per_s(),
            "bound": self.bound.name(),
            "bound_bytes_per_s": self.bound_bytes_per_s,
        })
    }

    /// What [`Row::to_json`] wrote.
    pub fn from_json(value: &Value) -> Option<Self> {
        let count = |name: &str| Some(value[name].as_u64()? as usize);
        Some(Self {
            carry: value["carry"].as_str()?.to_owned(),
            workers: count("workers")?,
            bytes: count("bytes")?,
            algorithm: value["algorithm"].as_str()?.to_owned(),
            shared: value["shared"].as_bool()?,
            repeats: count("repeats")?,
            median_s: value["median_s"].as_f64()?,
            least_s: value["least_s"].as_f64()?,
            bound: Bound::from_name(value["bound"].as_str()?)?,
            bound_bytes_per_s: value["bound_bytes_per_s"].as_f64()?,
        })
    }
}

/// Measures everything asked for; all ranks at once.
pub fn measure(comm: &mut Communicator, arguments: &BenchCollectives) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for &bytes in &arguments.bytes {
        let bound_bytes_per_s = bound(comm, bytes)?;
        let asked = |algorithm: &Algorithm| arguments.algorithm.is_empty() || arguments.algorithm.contains(algorithm);
        for algorithm in Algorithm::ALL.into_iter().filter(asked) {
            // On one machine there is one node, and two levels are one.
            if algorithm == Algorithm::Hierarchical && arguments.algorithm.is_empty() {
                continue;
            }
            comm.set_choice(Choice::by_cost(comm.choice().links().clone()).forced(Some(algorithm)));
            let mut buffers = vec![RegisteredBuffer::from(vec![0.0; bytes / 4])];
            if comm.transport().name() == "shm" && algorithm == Algorithm::Direct {
                buffers.push(comm.register_buffer(bytes / 4)?);
            }
            for mut buffer in buffers {
                check(comm, &mut buffer)?;
                let mut row = time(comm, &mut buffer)?;
                (row.algorithm, row.bound_bytes_per_s) = (algorithm.to_string(), bound_bytes_per_s);
                rows.push(row);
            }
        }
    }
    Ok(rows)
}

fn number(rank: usize, index: usize) -> f32 {
    ((rank * 31 + index * 7) % 64) as f32
}

fn reduce(comm: &mut Communicator, buffer: &mut RegisteredBuffer) -> Result<(), CommError> {
    let length = buffer.as_slice().len();
    comm.all_reduce_registered(buffer, 0..length)
}

/// Sums of small whole numbers are exact, whoever adds them in whatever order.
fn check(comm: &mut Communicator, buffer: &mut RegisteredBuffer) -> Result<(), Failure> {
    let (rank, world) = (comm.rank().index(), comm.world());
    buffer.as_mut_slice().iter_mut().enumerate().for_each(|(index, value)| *value = number(rank, index));
    reduce(comm, buffer)?;
    // The numbers repeat every 64, and so do their sums.
    let sum = |index: usize| (0..world).map(|rank| number(rank, index)).sum::<f32>();
    let sums: Vec<f32> = (0..64).map(sum).collect();
    let wrong = buffer.as_slice().iter().enumerate().find(|(index, value)| **value != sums[index % 64]);
    match wrong {
        Some((index, value)) => {
            Err(Failure::failed(format!("element {index} is {value} and not {}", sums[index % 64])))
        }
        None => Ok(()),
    }
}

fn time(comm: &mut Communicator, buffer: &mut RegisteredBuffer) -> Result<Row, Failure> {
    buffer.as_mut_slice().fill(0.0);
    let bytes = size_of_val(buffer.as_slice());
    let seconds = rounds(comm, bytes, |comm| reduce(comm, buffer))?;
    let bound = Bound::of(comm);
    Ok(Row {
        carry: comm.transport().name().to_owned(),
        workers: comm.world(),
        bytes,
        algorithm: String::new(),
        shared: buffer.is_shared(),
        repeats: seconds.len(),
        median_s: seconds[seconds.len() / 2],
        least_s: seconds[0],
        bound,
        bound_bytes_per_s: 0.0,
    })
}

/// The seconds of rounds in which all ranks do something at the same time, sorted.
fn rounds(
    comm: &mut Communicator,
    bytes: usize,
    mut body: impl FnMut(&mut Communicator) -> Result<(), CommError>,
) -> Result<Vec<f64>, Failure> {
    // About a second at a gigabyte per second, within reason.
    let repeats = (1_000_000_000 / bytes.max(1)).clamp(10, 2000);
    let clock = Clock::real();
    let mut seconds = Vec::with_capacity(repeats);
    for round in 0..repeats + 3 {
        comm.barrier()?;
        let start = clock.seconds();
        body(comm)?;
        // The first rounds warm up caches, buffers and the system's own guesses.
        if round >= 3 {
            seconds.push(clock.seconds() - start);
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}

/// What as many bytes do without a sum, by the median; rank 0's figure is everybody's. Of as many bytes, because a buffer that
/// fits a cache is ten times as fast as one that does not.
fn bound(comm: &mut Communicator, bytes: usize) -> Result<f64, Failure> {
    let (world, rank, elements) = (comm.world(), comm.rank().index(), bytes / size_of::<f32>());
    if world == 1 || elements == 0 {
        return Ok(0.0);
    }
    let mut buffer = vec![0f32; 2 * elements];
    let seconds = match Bound::of(comm) {
        Bound::Copy => rounds(comm, bytes, |_| {
            let (source, target) = buffer.split_at_mut(elements);
            std::hint::black_box(target).copy_from_slice(std::hint::black_box(source));
            Ok(())
        })?,
        Bound::Stream => {
            let next = Transfer {
                step: 0,
                action: Action::Send,
                peer: Rank::at((rank + 1) % world),
                start: 0,
                length: elements,
            };
            let before = Rank::at((rank + world - 1) % world);
            let before = Transfer { action: Action::Receive, peer: before, start: elements, ..next };
            // Two ranks list what passes between them in the same order: by who sends it.
            let list = if rank == 0 { [next, before] } else { [before, next] };
            rounds(comm, bytes, |comm| comm.exchange(&list, 0, &mut buffer))?
        }
    };
    let mut found = [(bytes as f64 / seconds[seconds.len() / 2]) as f32];
    comm.broadcast(Rank(0), &mut found)?;
    Ok(f64::from(found[0]))
}
