//! Single decisions, then thousands of simulated runs: each with one fault from a menu, random delays and jitter, in
//! virtual time. Whatever the interleaving, every survivor names the rank at fault within 5 s.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use paceline_system::random::Random;

use super::*;
use crate::phase::Phase;

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn rank(index: usize) -> Rank {
    Rank::at(index)
}

fn at(step: u64, phase: Phase) -> Position {
    Position { step, phase }
}

/// A hub of three that all have arrived.
fn hub() -> Membership {
    let mut hub = Membership::hub(3, "a", Limits::default(), ms(0));
    let first = hub.on(Event::Arrived { rank: rank(1), host: "b".into() }, ms(10));
    assert_eq!((first.reason.as_ref(), first.actions), ("rank 1 arrived from b; 2 of 3 are there", vec![]));
    assert_eq!(hub.missing(), [2]);
    let last = hub.on(Event::Arrived { rank: rank(2), host: "c".into() }, ms(20));
    assert_eq!((last.reason.as_ref(), last.actions), ("rank 2 arrived from c; all 3 are there", vec![Action::Start]));
    hub
}

/// Lets everybody beat and the hub tick until `until`, and returns what was said.
fn run(hub: &mut Membership, from: u64, until: u64, beats: &[(usize, Position)]) -> Vec<String> {
    let mut said = Vec::new();
    for now in (from..until).step_by(100) {
        for &(index, position) in beats {
            said.push(hub.on(Event::Beat { rank: rank(index), position }, ms(now)).reason.into_owned());
        }
        said.push(hub.on(Event::Tick, ms(now)).reason.into_owned());
    }
    said.retain(|reason| !reason.is_empty());
    said
}

#[test]
fn whoever_does_not_arrive_is_named() {
    let mut hub = Membership::hub(4, "a", Limits { gather: ms(5000), ..Limits::default() }, ms(0));
    hub.on(Event::Arrived { rank: rank(2), host: "c".into() }, ms(10));
    let said = run(&mut hub, 100, 5200, &[]);
    assert_eq!(said, ["ranks 1 and 3 did not arrive within 5.0 s; look at the output and the host of each"]);
    assert!(hub.ended());
}

#[test]
fn whoever_leaves_before_the_start_is_waited_for_again() {
    let mut hub = Membership::hub(2, "a", Limits::default(), ms(0));
    hub.on(Event::Arrived { rank: rank(1), host: "b".into() }, ms(10));
    let mut hub = Membership::hub(3, "a", Limits::default(), ms(0));
    hub.on(Event::Arrived { rank: rank(1), host: "b".into() }, ms(10));
    let left = hub.on(Event::Lost { rank: rank(1), why: "closed".into() }, ms(20));
    assert_eq!(left.reason, "rank 1 left again before the run began (closed); waiting for it");
    assert_eq!(hub.missing(), [1, 2]);
}

#[test]
fn a_silent_rank_is_late_and_then_stalled() {
    let mut hub = hub();
    let exchange = at(41, Phase::Exchange);
    run(&mut hub, 100, 1000, &[(0, exchange), (1, exchange), (2, exchange)]);
    let said = run(&mut hub, 1000, 9000, &[(0, exchange), (1, exchange)]);
    assert_eq!(
        said,
        [
            "rank 2 on c is late: in phase exchange after step 41, silent for 1.5 s; the run ends at 3.0 s",
            "rank 2 on c is stalled: silent for 3.0 s; it was last in phase exchange after step 41",
        ]
    );
}

#[test]
fn a_rank_that_is_heard_again_is_forgiven() {
    let mut hub = hub();
    let data = at(0, Phase::Data);
    run(&mut hub, 100, 500, &[(1, data), (2, data)]);
    let said = run(&mut hub, 500, 2500, &[(1, data)]);
    assert_eq!(said.len(), 1);
    assert_eq!(run(&mut hub, 2500, 9000, &[(1, data), (2, data)]), ["rank 2 on c is heard again"]);
    assert!(!hub.ended());
}

#[test]
fn a_rank_that_others_wait_for_is_named_with_its_phase_again_and_again_and_then_ends_the_run() {
    let mut hub = hub();
    hub.limits.stalled = Some(ms(60_000));
    let (ahead, behind) = (at(7, Phase::Exchange), at(7, Phase::Data));
    let said = run(&mut hub, 100, 70_000, &[(0, ahead), (1, behind), (2, ahead)]);
    let late = "rank 1 on b is late: in phase data after step 7, others wait for it since";
    assert_eq!(
        said,
        [
            format!("{late} 10.0 s; the run ends at 60.0 s"),
            format!("{late} 20.0 s; the run ends at 60.0 s"),
            format!("{late} 40.0 s; the run ends at 60.0 s"),
            "rank 1 on b is stalled: others wait since 60.0 s; it was last in phase data after step 7".into(),
        ]
    );
}

#[test]
fn ranks_that_move_are_never_late() {
    let mut hub = hub();
    for step in 0..300 {
        let beats = [(0, at(step, Phase::Exchange)), (1, at(step, Phase::Compute)), (2, at(step, Phase::Compute))];
        assert!(run(&mut hub, 100 + step * 200, 300 + step * 200, &beats).is_empty());
    }
}

#[test]
fn the_first_verdict_stands() {
    let mut hub = hub();
    let lost = |index: usize| Event::Lost { rank: rank(index), why: "closed".into() };
    assert_eq!(hub.on(lost(2), ms(100)).actions.len(), 1);
    assert_eq!(hub.on(lost(1), ms(101)), Decision::default());
}

#[test]
fn a_complaint_waits_for_the_suspects_end() {
    let complaint = Event::Failed { rank: rank(1), why: "reset by rank 2".into(), suspect: Some(rank(2)) };
    let mut first = hub();
    assert_eq!(first.on(complaint.clone(), ms(100)).actions, []);
    assert_eq!(first.on(Event::Lost { rank: rank(1), why: "closed".into() }, ms(150)).actions, []);
    let gone = first.on(Event::Lost { rank: rank(2), why: "closed".into() }, ms(200));
    assert!(gone.reason.starts_with("rank 2 on c is gone (closed)"), "{}", gone.reason);
    let mut second = hub();
    second.on(complaint, ms(100));
    let said = run(&mut second, 100, 1200, &[(1, Position::default()), (2, Position::default())]);
    assert_eq!(said, ["rank 1 on b failed: reset by rank 2; it was last in phase setup after step 0"]);
}

#[test]
fn a_process_that_slept_itself_does_not_blame_the_others() {
    let mut hub = hub();
    let wake = ms(60_000);
    assert_eq!(hub.on(Event::Tick, wake), Decision::default());
    assert_eq!(run(&mut hub, 60_000, 61_000, &[(1, Position::default()), (2, Position::default())]), [""; 0]);
}

/// What goes wrong in a simulated run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    Killed(usize),
    Frozen(usize),
    Cut(usize),
    Fails(usize),
    /// The first is killed and the second sees it first, complains and leaves.
    Complains(usize, usize),
    /// The same, and the second does not wait for the verdict.
    Flees(usize, usize),
}

#[derive(Clone, Debug)]
enum Message {
    Event(Event),
    Tick,
    Beat,
    Strike,
    Notice(usize),
    Flee,
    Through,
}

struct Simulation {
    random: Random,
    members: Vec<Option<Membership>>,
    frozen: Vec<bool>,
    cut: Vec<bool>,
    verdicts: BTreeMap<usize, (Verdict, u64)>,
    finished: usize,
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    messages: Vec<Option<Message>>,
    /// When the last message of a link arrives: links keep the order.
    last: BTreeMap<(usize, usize), u64>,
}

impl Simulation {
    fn new(seed: u64, world: usize) -> Self {
        let mut random = Random::new(&[seed, 77]);
        let mut hub = Membership::hub(world, "host0", Limits::default(), ms(0));
        let hosts: Vec<String> = (0..world).map(|index| format!("host{index}")).collect();
        for (index, host) in hosts.iter().enumerate().skip(1) {
            hub.on(Event::Arrived { rank: rank(index), host: host.clone() }, ms(0));
        }
        let spoke = |index| Some(Membership::spoke(rank(index), hosts.clone(), Limits::default(), ms(0)));
        let members = std::iter::once(Some(hub)).chain((1..world).map(spoke)).collect();
        let mut simulation = Self {
            members,
            frozen: vec![false; world],
            cut: vec![false; world],
            verdicts: BTreeMap::new(),
            finished: 0,
            queue: BinaryHeap::new(),
            messages: Vec::new(),
            last: BTreeMap::new(),
            random: random.clone(),
        };
        for index in 0..world {
            simulation.post(random.below(100) as u64, index, Message::Tick);
            simulation.post(random.below(500) as u64, index, Message::Beat);
        }
        simulation
    }

    fn post(&mut self, time: u64, target: usize, message: Message) {
        self.queue.push(Reverse((time, self.messages.len() as u64, target)));
        self.messages.push(Some(message));
    }

    /// Sends over the link between a spoke and the hub, with a delay; a cut link swallows it.
    fn send(&mut self, now: u64, source: usize, target: usize, event: Event) {
        if self.cut[source.max(target)] {
            return;
        }
        let arrival =
            (now + 1 + self.random.below(150) as u64).max(self.last.get(&(source, target)).copied().unwrap_or(0));
        self.last.insert((source, target), arrival);
        self.post(arrival, target, Message::Event(event));
    }

    fn neighbours(&self, member: usize) -> Vec<usize> {
        if member == 0 { (1..self.members.len()).collect() } else { vec![0] }
    }

    /// A process ends, and its connections with it.
    fn close(&mut self, now: u64, member: usize) {
        self.members[member] = None;
        for neighbour in self.neighbours(member) {
            self.send(now, member, neighbour, Event::Lost { rank: rank(member), why: "closed".into() });
        }
    }

    fn feed(&mut self, now: u64, member: usize, event: Event) {
        let Some(state) = &mut self.members[member] else { return };
        let decision = state.on(event, ms(now));
        for action in decision.actions {
            assert!(!decision.reason.is_empty(), "each action has its reason");
            match action {
                Action::Start | Action::Warn(_) => {}
                Action::Complain { why, suspect } => {
                    self.send(now, member, 0, Event::Failed { rank: rank(member), why, suspect });
                }
                Action::End(verdict) => {
                    for neighbour in self.neighbours(member) {
                        self.send(now, member, neighbour, Event::Told(verdict.clone()));
                    }
                    assert!(self.verdicts.insert(member, (verdict, now)).is_none(), "one verdict each");
                    self.close(now, member);
                }
                Action::Finish => {
                    if member == 0 {
                        for neighbour in self.neighbours(0) {
                            self.send(now, 0, neighbour, Event::Goodbye { rank: rank(0) });
                        }
                    }
                    self.finished += 1;
                    self.close(now, member);
                }
            }
        }
    }

    fn strike(&mut self, now: u64, fault: Fault) {
        match fault {
            Fault::Nothing => {}
            Fault::Killed(victim) => self.close(now, victim),
            Fault::Frozen(victim) => self.frozen[victim] = true,
            Fault::Cut(victim) => {
                for (source, target) in [(0, victim), (victim, 0)] {
                    self.send(now, source, target, Event::Lost { rank: rank(source), why: "reset".into() });
                }
                self.cut[victim] = true;
            }
            Fault::Fails(victim) => {
                self.feed(now, victim, Event::Failed { rank: rank(victim), why: "disk full".into(), suspect: None });
            }
            Fault::Complains(victim, witness) => {
                self.close(now, victim);
                self.post(now, witness, Message::Notice(victim));
            }
            Fault::Flees(victim, witness) => {
                self.close(now, victim);
                self.post(now, witness, Message::Notice(victim));
                let later = now + self.random.below(100) as u64;
                self.post(later, witness, Message::Flee);
            }
        }
    }

    fn beat(&mut self, now: u64, member: usize) {
        let position = at(now / 1000, Phase::Exchange);
        self.feed(now, member, Event::Beat { rank: rank(member), position });
        for neighbour in self.neighbours(member) {
            self.send(now, member, neighbour, Event::Beat { rank: rank(member), position });
        }
    }

    fn run(&mut self, struck: u64, fault: Fault) {
        self.post(struck, usize::MAX, Message::Strike);
        if fault == Fault::Nothing {
            for member in 0..self.members.len() {
                let through = struck + self.random.below(8000) as u64;
                self.post(through, member, Message::Through);
            }
        }
        while let Some(Reverse((now, number, target))) = self.queue.pop() {
            let message = self.messages[number as usize].take().unwrap();
            if matches!(message, Message::Strike) {
                self.strike(now, fault);
                continue;
            }
            if now > struck + 20_000 || self.frozen[target] || self.members[target].is_none() {
                continue;
            }
            match message {
                Message::Event(event) => self.feed(now, target, event),
                Message::Notice(suspect) => {
                    let why = "connection reset".into();
                    self.feed(now, target, Event::Failed { rank: rank(target), why, suspect: Some(rank(suspect)) });
                }
                Message::Flee => self.close(now, target),
                Message::Through => {
                    self.feed(now, target, Event::Goodbye { rank: rank(target) });
                    if target != 0 {
                        self.send(now, target, 0, Event::Goodbye { rank: rank(target) });
                    }
                }
                Message::Tick => {
                    self.feed(now, target, Event::Tick);
                    let next = now + 80 + self.random.below(60) as u64;
                    self.post(next, target, Message::Tick);
                }
                Message::Beat => {
                    self.beat(now, target);
                    let next = now + 450 + self.random.below(100) as u64;
                    self.post(next, target, Message::Beat);
                }
                Message::Strike => unreachable!("handled above"),
            }
        }
    }
}

fn choose(random: &mut Random, world: usize) -> Fault {
    let victim = random.below(world);
    let spoke = 1 + random.below(world - 1);
    let witness = 1 + (spoke + random.below((world - 1).max(2) - 1)) % (world - 1);
    match random.below(7) {
        0 => Fault::Nothing,
        1 => Fault::Killed(victim),
        2 => Fault::Frozen(victim),
        3 => Fault::Cut(spoke),
        4 => Fault::Fails(victim),
        5 if spoke != witness => Fault::Flees(spoke, witness),
        _ => Fault::Complains(victim, (victim + 1 + random.below(world - 1)) % world),
    }
}

#[test]
fn in_every_interleaving_every_survivor_names_the_culprit_within_five_seconds() {
    let mut counted = BTreeMap::new();
    for seed in 0..3000 {
        let mut random = Random::new(&[seed]);
        let world = 2 + random.below(7);
        let (fault, struck) = (choose(&mut random, world), 2000 + random.below(3000) as u64);
        let mut simulation = Simulation::new(seed, world);
        simulation.run(struck, fault);
        let name = format!("{fault:?}");
        *counted.entry(name.split('(').next().unwrap().to_owned()).or_insert(0) += 1;
        if fault == Fault::Nothing {
            assert_eq!((simulation.finished, simulation.verdicts.len()), (world, 0), "seed {seed}");
            continue;
        }
        let (culprit, silenced) = match fault {
            Fault::Killed(victim) | Fault::Frozen(victim) | Fault::Complains(victim, _) => (victim, vec![victim]),
            Fault::Flees(victim, witness) => (victim, vec![victim, witness]),
            Fault::Cut(victim) | Fault::Fails(victim) => (victim, vec![]),
            Fault::Nothing => unreachable!(),
        };
        for member in (0..world).filter(|member| !silenced.contains(member)) {
            let (verdict, when) =
                simulation.verdicts.get(&member).unwrap_or_else(|| panic!("seed {seed}, {fault:?}: {member} goes on"));
            // Behind a cut link it is the other end that is gone.
            let expected = if matches!(fault, Fault::Cut(cut) if cut == member) { 0 } else { culprit };
            assert_eq!(verdict.rank, expected, "seed {seed}, {fault:?}, told by {member}: {verdict}");
            assert_eq!(verdict.host, format!("host{expected}"));
            assert!(*when <= struck + 5000, "seed {seed}, {fault:?}: {member} took {} ms", when - struck);
            let past = struck.saturating_sub(2000) / 1000;
            assert!(verdict.position.step >= past, "seed {seed}: {verdict} at {struck}");
        }
    }
    assert_eq!(counted.len(), 7, "every fault was struck: {counted:?}");
}
