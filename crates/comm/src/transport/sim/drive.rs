//! Runs all ranks' lists over the virtual network, in one thread: whoever has a reason to look is given a turn, and
//! when nobody has, time jumps.

use std::cmp::Reverse;
use std::time::Duration;

use super::{Fault, Instant, mesh};
use crate::cost::Link;
use crate::error::CommError;
use crate::rank::Rank;
use crate::reduce::Kind;
use crate::run::{Bytes, Job, Machine};
use crate::stop::Stop;
use crate::transfer::Transfer;
use crate::transport::Transport;
use crate::wait::Wait;
use crate::wire::stream::Talk;

/// What to try.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Every link of the network.
    pub link: Link,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// The source of chance.
    pub seed: u64,
    /// How long a rank waits, in virtual seconds.
    pub deadline_s: f64,
    /// The name in errors.
    pub phase: &'static str,
}

impl Trial {
    /// A network without faults.
    pub const fn quiet(link: Link, phase: &'static str) -> Self {
        Self { link, faults: Vec::new(), seed: 0, deadline_s: 3600.0, phase }
    }
}

/// How one rank ended: when it was done, or what it says went wrong.
pub type Finish = Result<f64, CommError>;

/// Runs every rank's list on its buffer. A crashed rank says nothing: its entry is none.
///
/// # Panics
/// When there are not as many buffers as lists: a bug.
pub fn drive(trial: &Trial, lists: &[Vec<Transfer>], kind: Kind, buffers: &mut [Vec<u8>]) -> Vec<Option<Finish>> {
    assert_eq!(lists.len(), buffers.len(), "every rank has a list and a buffer");
    let world = lists.len();
    let mut ports = mesh(world, trial.link, &trial.faults, trial.seed);
    let network = ports.first().map(|port| std::sync::Arc::clone(&port.network));
    let mut transports: Vec<Transport> = ports.drain(..).map(Transport::Sim).collect();
    // The real clock plays no part; the machines are stepped and never sleep.
    let wait = Wait::new(Duration::MAX, &Stop::new());
    let job = |rank| Job { rank, kind, phase: trial.phase, code: 1, sequence: 0, wait: &wait };
    let mut machines: Vec<Machine<'_>> =
        lists.iter().enumerate().map(|(rank, list)| Machine::new(list, &job(Rank::at(rank)))).collect();
    let mut finishes: Vec<Option<Finish>> = (0..world).map(|_| None).collect();
    let deadline = (trial.deadline_s * 1e9) as Instant;
    let lock = || network.as_ref().map(|network| network.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    let next = || lock().and_then(|mut network| network.calls.pop());
    while let Some(Reverse((at, rank))) = next() {
        if at > deadline {
            break;
        }
        let crashed = lock().is_some_and(|mut network| {
            network.now = network.now.max(at);
            network.crashed(rank)
        });
        let place = rank as usize;
        if crashed || finishes[place].is_some() {
            continue;
        }
        let talk = Talk { rank: Rank(rank), peer: Rank(rank).into(), phase: trial.phase };
        let mut buffer = Bytes::Open(&mut buffers[place]);
        let outcome = loop {
            match machines[place].pass(&mut transports[place], &mut buffer, &talk) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        match outcome {
            Err(error) => finishes[place] = Some(Err(error)),
            Ok(()) if machines[place].is_finished() => finishes[place] = Some(Ok(at as f64 / 1e9)),
            Ok(()) => {}
        }
    }
    conclude(trial, &machines, finishes)
}

/// Whoever is not done when nothing happens any more, waits until the deadline.
fn conclude(trial: &Trial, machines: &[Machine<'_>], mut finishes: Vec<Option<Finish>>) -> Vec<Option<Finish>> {
    let crashes = |rank: u32| trial.faults.iter().any(|fault| fault.crashes(rank, Instant::MAX));
    for (rank, (finish, machine)) in finishes.iter_mut().zip(machines).enumerate() {
        let rank = Rank::at(rank);
        if finish.is_none() && !crashes(rank.0) {
            let peer = machine.holding_up().unwrap_or(rank).into();
            let waited = Duration::from_secs_f64(trial.deadline_s);
            *finish = Some(Err(CommError::DeadlinePassed { rank, peer, phase: trial.phase, waited }));
        }
    }
    finishes
}
