//! A worker's end: adds up the gradients of the portions that count, and gives the sum away where all meet. The first
//! worker's also coordinates.

use std::ops::Range;

use paceline_comm::error::Party;
use paceline_comm::{CommError, Communicator, Rank};
use paceline_system::memory;

use super::super::center::message::Layout;
use super::super::parameter_server::talk::Call;
use super::super::{Agreement, Join, Protocol, Reach, Settled, StepReport, Target, Wait};
use super::lbfgs::{Lbfgs, Vector, Vectors};
use super::message::{Command, Gathered, Said, TOTALS, Totals};
use super::{PHASE, history};

/// A worker's end.
#[derive(Debug)]
pub(super) struct Worker {
    servers: Servers,
    protocol: Protocol,
    /// Where the gradients of each bucket stand.
    buckets: Vec<Range<usize>>,
    /// The point that is tried.
    point: Vec<f32>,
    /// The gradients of the portion that was computed last, and what is to be said of them.
    portion: Vec<f32>,
    report: StepReport,
    /// The sum of those that count, and what is in it.
    sum: Vec<f32>,
    totals: Totals,
    /// Portions of the batch under way.
    expected: u64,
    /// Whether another point is to be fetched.
    stale: bool,
    gathered: Gathered,
    /// Whether a point was taken before: one that is tried may be given up.
    has_taken: bool,
    /// Decides, at the first worker.
    coordinator: Option<Lbfgs>,
}

/// The way to all servers.
#[derive(Debug)]
struct Servers {
    communicator: Communicator,
    layout: Layout,
    /// Counts messages to and from each of them.
    tag: u64,
}

impl Worker {
    pub fn start(join: Join<'_>, protocol: Protocol) -> Self {
        let Join { communicator, roles, shape, options, .. } = join;
        let zeros =
            || memory::zeros(shape.parameters, "sums of gradients").unwrap_or_else(|refused| refused.unwind());
        let coordinates = communicator.rank() == Rank(0);
        let layout = Layout { roles, elements: shape.parameters, pieces: 1 };
        Self {
            servers: Servers { communicator, layout, tag: 0 },
            protocol,
            buckets: shape.buckets.iter().map(|bucket| bucket.start..bucket.start + bucket.elements).collect(),
            point: zeros(),
            portion: zeros(),
            report: StepReport::default(),
            sum: zeros(),
            totals: Totals::default(),
            expected: 0,
            stale: false,
            gathered: Gathered::default(),
            has_taken: false,
            coordinator: coordinates.then(|| Lbfgs::new(history(&options))),
        }
    }
}

impl Servers {
    fn rank(&self) -> Rank {
        self.communicator.rank()
    }

    fn all(&self) -> impl Iterator<Item = Rank> + use<> {
        let roles = self.layout.roles;
        (0..roles.servers).map(move |server| roles.server(server))
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), CommError> {
        self.tag += 1;
        self.all().try_for_each(|server| self.communicator.send(server, self.tag, bytes))
    }

    fn say(&mut self, said: Said) -> Result<(), CommError> {
        self.send(&said.to_bytes())
    }

    /// What each of them answers.
    fn answers<const N: usize>(&mut self) -> Result<Vec<[u8; N]>, CommError> {
        self.tag += 1;
        let all = self.all();
        let receive = |server| {
            let mut bytes = [0; N];
            self.communicator.recv(server, self.tag, &mut bytes).map(|()| bytes)
        };
        all.map(receive).collect()
    }

    /// Takes a vector of which each has a part.
    fn take(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.tag += 1;
        let list = self.layout.takes(self.rank().index(), false);
        self.communicator.exchange(&list, self.tag, numbers)
    }

    /// Gives each its part.
    fn give(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.tag += 1;
        let list = self.layout.pushes(self.rank().index());
        self.communicator.exchange(&list, self.tag, numbers)
    }

    /// Decides what becomes of the point whose gradients all have given.
    fn coordinate(&mut self, lbfgs: &mut Lbfgs, expected: u64) -> Result<(), CommError> {
        self.send(&Command::Totals.to_bytes())?;
        let totals: Vec<Totals> = self.answers::<TOTALS>()?.iter().map(Totals::from_bytes).collect();
        let is_whole = |totals: &Totals| totals.portions == expected && totals.rows > 0;
        let gathered = match totals.first() {
            // Of a lost worker one server may have what another has not.
            Some(all) if totals.iter().all(is_whole) => {
                let share = 1.0 / all.rows as f64;
                self.scale(share, Vector::TrialGradient)?;
                let taken = lbfgs.advance(share * all.loss, self)?;
                if taken { Gathered::Taken } else { Gathered::GivenUp }
            }
            _ => Gathered::Missing,
        };
        self.send(&Command::End(gathered).to_bytes())
    }
}

impl Vectors for Servers {
    fn dot(&mut self, a: Vector, b: Vector) -> Result<f64, CommError> {
        self.send(&Command::Dot(a, b).to_bytes())?;
        let parts = self.answers::<8>()?;
        Ok(parts.into_iter().map(|bytes| f64::from_bits(u64::from_le_bytes(bytes))).sum())
    }

    fn axpy(&mut self, alpha: f64, x: Vector, y: Vector) -> Result<(), CommError> {
        self.send(&Command::Axpy(alpha, x, y).to_bytes())
    }

    fn scale(&mut self, alpha: f64, x: Vector) -> Result<(), CommError> {
        self.send(&Command::Scale(alpha, x).to_bytes())
    }

    fn copy(&mut self, source: Vector, target: Vector) -> Result<(), CommError> {
        self.send(&Command::Copy(source, target).to_bytes())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A server that is gone needs no goodbye, and one that was left in the middle hears of the failure.
        let _ = self.servers.say(Said::Goodbye);
    }
}

impl Agreement for Worker {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        self.servers.rank()
    }

    fn workers(&self) -> usize {
        self.servers.layout.roles.workers
    }

    fn shares_steps(&self) -> bool {
        false
    }

    fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.servers.communicator.broadcast(Rank(0), numbers)
    }

    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        let Servers { layout, .. } = self.servers;
        let (length, roles, worker) = (numbers.len(), layout.roles, self.rank().index());
        self.servers.say(Said::Sum(length))?;
        // A word for every server stands behind them.
        let mut all = numbers.to_vec();
        all.resize(length + roles.servers, 0.0);
        for call in Call::pair(length) {
            self.servers.tag += 1;
            self.servers.communicator.exchange(&call.worker(roles, worker), self.servers.tag, &mut all)?;
        }
        numbers.copy_from_slice(&all[..length]);
        Ok(())
    }

    fn begin_step(&mut self, report: StepReport) -> Result<(), CommError> {
        self.report = report;
        Ok(())
    }

    fn total(&mut self) -> Result<StepReport, CommError> {
        Ok(self.report)
    }

    fn send(&mut self, bucket: usize, gradients: &[f32]) -> Result<(), CommError> {
        self.portion[self.buckets[bucket].clone()].copy_from_slice(gradients);
        Ok(())
    }

    fn settle(&mut self, bucket: usize, wait: Wait, target: &mut dyn Target) -> Result<Settled, CommError> {
        // Where the gradients are looked at together, weights that are replaced by themselves keep them from being applied.
        if wait == Wait::Block {
            let _ = target.replace_weights(bucket, &self.point[self.buckets[bucket].clone()]);
        }
        Ok(Settled::NotYet)
    }

    fn begin_batch(&mut self, portions: u64) {
        (self.expected, self.stale) = (portions, true);
        self.totals = Totals::default();
        self.sum.fill(0.0);
    }

    fn count_portion(&mut self) {
        let Self { portion, sum, totals, report: StepReport { rows, loss, .. }, .. } = self;
        totals.add(Totals { portions: 1, rows: *rows, loss: *loss });
        if *rows > 0 {
            let rows = *rows as f32;
            sum.iter_mut().zip(portion).for_each(|(sum, gradient)| *sum += rows * *gradient);
        }
    }

    fn gathered(&self) -> Gathered {
        self.gathered
    }

    fn tries_points(&self) -> bool {
        self.has_taken
    }

    fn exchanges_before(&self, _: u64) -> bool {
        self.stale
    }

    fn begin_exchange(&mut self, _: u64, weights: &mut [f32], _: Option<(&[f32], f32)>) -> Result<bool, CommError> {
        self.servers.say(Said::Fetch)?;
        self.servers.take(weights)?;
        self.point.copy_from_slice(weights);
        self.stale = false;
        Ok(true)
    }

    fn exchange_weights(&mut self, _: Reach, weights: &mut [f32], _: &mut [Vec<f32>]) -> Result<(), CommError> {
        let Self { servers, sum, totals, expected, coordinator, .. } = self;
        servers.say(Said::Meet(*totals))?;
        servers.give(sum)?;
        if let Some(lbfgs) = coordinator {
            servers.coordinate(lbfgs, *expected)?;
        }
        servers.take(weights)?;
        let said = servers.answers::<1>()?;
        let gathered = said.first().and_then(|[byte]| Gathered::from_byte(*byte));
        self.gathered = gathered.ok_or_else(|| CommError::Protocol {
            rank: self.servers.rank(),
            peer: Party::from(self.servers.layout.roles.server(0)),
            phase: PHASE,
            what: "an outcome that does not exist".into(),
        })?;
        self.has_taken |= self.gathered == Gathered::Taken;
        Ok(())
    }
}
