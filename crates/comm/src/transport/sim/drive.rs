//! Runs all ranks' lists over the virtual network, in one thread: whoever has a reason to look is given a turn, and
//! when nobody has, time jumps.

use std::cmp::Reverse;
use std::time::Duration;

use super::{Fault, Instant, mesh};
use crate::cost::Link;
use crate::error::CommError;
use crate::rank::Rank;
use crate::reduce::Kind;
use crate::run::{Bytes, Machine, RunOptions};
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

/// What a group does: a list and a buffer for each of its ranks.
#[derive(Clone, Debug)]
pub struct Part {
    /// Their numbers in the world, in the order of their ranks in the group.
    pub members: Vec<Rank>,
    /// What the buffers hold.
    pub kind: Kind,
    /// By rank in the group.
    pub lists: Vec<Vec<Transfer>>,
    /// By rank in the group.
    pub buffers: Vec<Vec<u8>>,
}

/// Runs every rank's list on its buffer. A crashed rank says nothing: its entry is none.
///
/// # Panics
/// When there are not as many buffers as lists: a bug.
pub fn drive(trial: &Trial, lists: &[Vec<Transfer>], kind: Kind, buffers: &mut [Vec<u8>]) -> Vec<Option<Finish>> {
    let members = (0..lists.len()).map(Rank::at).collect();
    let taken = buffers.iter_mut().map(std::mem::take).collect();
    let mut world = [Part { members, kind, lists: lists.to_vec(), buffers: taken }];
    let finishes = drive_groups(trial, lists.len(), &mut world);
    let [Part { buffers: filled, .. }] = world;
    buffers.iter_mut().zip(filled).for_each(|(buffer, filled)| *buffer = filled);
    finishes.into_iter().next().unwrap_or_default()
}

/// A rank's list in one of the parts, on its way.
struct Rider<'a> {
    place: usize,
    machine: Machine<'a>,
    transport: Transport,
    buffer: &'a mut Vec<u8>,
}

/// Runs what several groups of a world do at the same time: by group, how each of its ranks ended. A rank
/// that is in several does all of it at once, and its card carries all of it.
///
/// # Panics
/// When a part has not as many buffers and lists as members: a bug.
pub fn drive_groups(trial: &Trial, world: usize, parts: &mut [Part]) -> Vec<Vec<Option<Finish>>> {
    let ports = mesh(world, trial.link, &trial.faults, trial.seed);
    let Some(network) = ports.first().map(|port| std::sync::Arc::clone(&port.network)) else { return Vec::new() };
    // The real clock plays no part; the machines are stepped and never sleep.
    let wait = Wait::new(Duration::MAX, &Stop::new());
    let mut finishes: Vec<Vec<Option<Finish>>> = Vec::new();
    let mut members: Vec<&[Rank]> = Vec::new();
    // By rank of the world: the parts it has to do, each with its number.
    let mut riders: Vec<Vec<(usize, Rider<'_>)>> = (0..world).map(|_| Vec::new()).collect();
    for (number, part) in parts.iter_mut().enumerate() {
        let Part { members: ranks, kind, lists, buffers } = part;
        assert!(lists.len() == ranks.len() && buffers.len() == ranks.len(), "every rank has a list and a buffer");
        finishes.push(ranks.iter().map(|_| None).collect());
        for (place, ((rank, list), buffer)) in ranks.iter().zip(&*lists).zip(buffers).enumerate() {
            let options = RunOptions {
                rank: Rank::at(place),
                kind: *kind,
                phase: trial.phase,
                code: 1,
                sequence: 0,
                wait: &wait,
                spare: 0..0,
            };
            let transport = Transport::Sim(ports[rank.index()].group(ranks, number as u64));
            let rider = Rider { place, machine: Machine::new(list, &options), transport, buffer };
            riders[rank.index()].push((number, rider));
        }
        members.push(ranks);
    }
    let deadline = (trial.deadline_s * 1e9) as Instant;
    let lock = || network.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let next = || lock().calls.pop();
    while let Some(Reverse((at, rank))) = next() {
        if at > deadline {
            break;
        }
        let crashed = {
            let mut network = lock();
            network.now = network.now.max(at);
            network.crashed(rank)
        };
        for (number, rider) in &mut riders[rank as usize] {
            let finish = &mut finishes[*number][rider.place];
            if !crashed && finish.is_none() {
                *finish =
                    turn(rider, trial.phase, at).map(|done| done.map_err(|error| error.renumbered(members[*number])));
            }
        }
    }
    conclude(trial, &riders, &members, &mut finishes);
    finishes
}

/// Gives a rank's list a turn; how it ended, if it did.
fn turn(rider: &mut Rider<'_>, phase: &'static str, at: Instant) -> Option<Finish> {
    let rank = Rank::at(rider.place);
    let talk = Talk { rank, peer: rank.into(), phase };
    let mut buffer = Bytes::Open(rider.buffer);
    loop {
        match rider.machine.pass(&mut rider.transport, &mut buffer, &talk) {
            Ok(true) => {}
            Ok(false) => return rider.machine.is_finished().then_some(Ok(at as f64 / 1e9)),
            Err(error) => return Some(Err(error)),
        }
    }
}

/// Whoever is not done when nothing happens any more, waits until the deadline.
fn conclude(
    trial: &Trial,
    riders: &[Vec<(usize, Rider<'_>)>],
    members: &[&[Rank]],
    finishes: &mut [Vec<Option<Finish>>],
) {
    let crashes = |rank: u32| trial.faults.iter().any(|fault| fault.crashes(rank, Instant::MAX));
    for (rank, riders) in riders.iter().enumerate() {
        let rank = Rank::at(rank);
        for (number, Rider { place, machine, .. }) in riders {
            let finish = &mut finishes[*number][*place];
            if finish.is_none() && !crashes(rank.0) {
                let peer = machine.holding_up().map_or(rank, |peer| members[*number][peer.index()]).into();
                let waited = Duration::from_secs_f64(trial.deadline_s);
                *finish = Some(Err(CommError::DeadlinePassed { rank, peer, phase: trial.phase, waited }));
            }
        }
    }
}
