//! Heat that spreads on a plate, on a global address space: `cargo run --release --example stencil [ROWS COLUMNS STEPS RANKS]`
//!
//! Each rank, a thread here, has some rows of the plate. In every step it asks for the row above its own and the one below,
//! computes the rows that need neither meanwhile, and its first and its last one when the answers are there. Every
//! point becomes the mean of itself and its four neighbours; the edge keeps its temperature. It ends by comparing the plate with that
//! of one rank, bit by bit.

use std::process::ExitCode;
use std::time::Duration;

use paceline::comm::global::{Functions, Global, Pending, Space};
use paceline::comm::transport::{Transport, thread};
use paceline::comm::{CommError, Rank, Stop};

/// No step waits longer for another rank.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A plate and how long it is watched.
#[derive(Clone, Copy)]
struct Task {
    rows: usize,
    columns: usize,
    steps: usize,
}

/// A row after a step, given the rows around it.
fn spread(above: &[f64], own: &[f64], below: &[f64]) -> Vec<f64> {
    let inside = 1..own.len() - 1;
    let mean = |at: usize| (own[at] + own[at - 1] + own[at + 1] + above[at] + below[at]) / 5.0;
    (0..own.len()).map(|at| if inside.contains(&at) { mean(at) } else { own[at] }).collect()
}

/// Rows of a block.
fn row(block: &[f64], columns: usize, row: usize) -> &[f64] {
    &block[row * columns..][..columns]
}

/// One step of this rank's rows, from `now` to `next`.
fn step(space: &Space, task: Task, now: &Global<f64>, next: &Global<f64>) -> Result<(), CommError> {
    let columns = task.columns;
    let rows = now.layout().rows_of(space.rank());
    let last = rows.len() - 1;
    // The outermost rows of the plate stay as they are, and need no neighbours.
    let (has_above, has_below) = (rows.start > 0, rows.end < task.rows);
    let two = |first: usize| now.local()[first * columns..][..2 * columns].to_vec();
    let (top, bottom) = (two(0), two(last - 1));

    let halo = |row: usize| now.get(now.layout().elements(row..row + 1));
    let mut halos: Vec<Pending<()>> = Vec::new();
    if has_above {
        let next = next.clone();
        halos.push(halo(rows.start - 1).then(move |above| {
            let new = spread(&above, row(&top, columns, 0), row(&top, columns, 1));
            next.local_mut()[..columns].copy_from_slice(&new);
        }));
    }
    if has_below {
        let next = next.clone();
        halos.push(halo(rows.end).then(move |below| {
            let new = spread(row(&bottom, columns, 0), row(&bottom, columns, 1), &below);
            next.local_mut()[last * columns..].copy_from_slice(&new);
        }));
    }
    let (block, mut new) = (now.local(), next.local_mut());
    for inside in 1..last {
        let [above, own, below] = [inside - 1, inside, inside + 1].map(|at| row(&block, columns, at));
        new[inside * columns..][..columns].copy_from_slice(&spread(above, own, below));
    }
    drop((block, new));
    halos.into_iter().try_for_each(Pending::wait)?;
    // Nobody reads rows that are not there yet, or writes over rows that somebody still reads.
    space.barrier()
}

/// What a rank does; the whole plate at the end, and the mean temperature as all ranks have added it up.
fn watch(transport: Transport, task: Task) -> Result<(Vec<f64>, f64), CommError> {
    let space = Space::meet(transport, Functions::new(), TIMEOUT, &Stop::new())?;
    let shape = [task.rows, task.columns];
    let (mut now, mut next) = (space.array::<f64>(&shape)?, space.array::<f64>(&shape)?);
    for plate in [&now, &next] {
        if space.rank() == Rank(0) {
            // The upper edge is hot, and one point inside.
            plate.put_tile(0..1, 0..task.columns, &vec![100.0; task.columns]).wait()?;
            let spot = plate.layout().index(&[task.rows / 2, task.columns / 3]);
            plate.put(spot..spot + 1, &[1000.0]).wait()?;
        }
    }
    space.barrier()?;
    for _ in 0..task.steps {
        step(&space, task, &now, &next)?;
        std::mem::swap(&mut now, &mut next);
    }
    let whole = now.get(0..now.length()).wait()?;
    let mean = now.sum(&space)? / now.length() as f64;
    space.barrier()?;
    Ok((whole, mean))
}

/// The plate and the mean as the last of so many ranks sees them.
fn run(task: Task, ranks: usize) -> Result<(Vec<f64>, f64), CommError> {
    std::thread::scope(|scope| {
        let start = |port| scope.spawn(move || watch(Transport::Thread(port), task));
        let running: Vec<_> = thread::mesh(ranks).into_iter().map(start).collect();
        let results: Result<Vec<_>, _> = running.into_iter().map(|rank| rank.join().expect("a rank returns")).collect();
        Ok(results?.pop().expect("there is a rank"))
    })
}

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map_while(|word| word.parse().ok());
    let mut next = |usual: usize| numbers.next().unwrap_or(usual);
    let task = Task { rows: next(200).max(2), columns: next(200).max(2), steps: next(500) };
    // Two rows for each rank, at the least.
    let ranks = next(4).clamp(1, task.rows / 2);
    match (run(task, 1), run(task, ranks)) {
        (Ok((expected, _)), Ok((found, mean))) => {
            let same = expected.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
            let Task { rows, columns, steps } = task;
            println!("{rows}x{columns} points, {steps} steps by {ranks} ranks: mean {mean:.6}");
            println!("{} bits as by one rank", if same { "the same" } else { "OTHER" });
            ExitCode::from(u8::from(!same))
        }
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
