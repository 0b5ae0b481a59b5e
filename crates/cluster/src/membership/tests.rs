//! Single decisions, then thousands of simulated runs: each with one fault from a menu, random delays and jitter, in
//! virtual time. Whatever the interleaving, every survivor names the rank at fault within 5 s.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use paceline_system::phase::Phase;
use paceline_system::progress::Message as Awaited;
use paceline_system::random::Random;

use super::*;
use crate::waiting::Peer;

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn rank(index: usize) -> Rank {
    Rank::at(index)
}

fn at(step: u64, phase: Phase) -> Position {
    Position { step, phase, message: None }
}

fn beat(index: usize, position: Position) -> Event {
    Event::Beat { rank: rank(index), position, waiting: Waiting::default() }
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
            said.push(hub.on(beat(index, position), ms(now)).reason.into_owned());
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
fn a_silent_rank_ends_the_run() {
    let mut hub = hub();
    let exchange = at(41, Phase::Exchange);
    run(&mut hub, 100, 1000, &[(0, exchange), (1, exchange), (2, exchange)]);
    let said = run(&mut hub, 1000, 17_000, &[(0, exchange), (1, exchange)]);
    assert_eq!(said, ["rank 2 on c is stalled: silent for 15.0 s; it was last in phase exchange after step 41"]);
}

#[test]
fn the_others_go_on_without_a_rank_that_they_can_do_without() {
    let mut hub = hub();
    hub.spare(1..2);
    let lost = hub.on(Event::Lost { rank: rank(1), why: "closed".into() }, ms(100));
    let [Action::GoOn(verdict)] = &lost.actions[..] else { panic!("{lost:?}") };
    assert_eq!((verdict.rank, hub.ended()), (1, false));
    assert!(lost.reason.ends_with("; the others go on without it"), "{}", lost.reason);
    // It is told once, and is not waited for at the end.
    assert_eq!(hub.on(Event::Lost { rank: rank(1), why: "closed".into() }, ms(110)), Decision::default());
    hub.on(Event::Goodbye { rank: rank(2) }, ms(120));
    assert_eq!(hub.on(Event::Goodbye { rank: rank(0) }, ms(130)).actions, [Action::Finish]);
}

#[test]
fn a_rank_that_fails_by_itself_and_one_that_is_silent_are_lost_alike_and_any_other_ends_the_run() {
    let mut hub = hub();
    hub.spare(1..2);
    let failed = Event::Failed { rank: rank(1), why: "no memory".into(), suspect: None, in_vain: false };
    assert!(matches!(hub.on(failed, ms(100)).actions[..], [Action::GoOn(_)]));
    let lost = hub.on(Event::Lost { rank: rank(2), why: "closed".into() }, ms(200));
    assert!(matches!(lost.actions[..], [Action::End(_)]) && hub.ended());
    let mut hub = self::hub();
    hub.spare(2..3);
    let position = at(41, Phase::Exchange);
    run(&mut hub, 100, 1000, &[(0, position), (1, position), (2, position)]);
    let said = run(&mut hub, 1000, 17_000, &[(0, position), (1, position)]);
    assert!(said.len() == 1 && said[0].contains("rank 2 on c is stalled") && !hub.ended(), "{said:?}");
}

/// What a rank does in a scene: where it is, whom it waits for if for anybody, and since when.
#[derive(Clone, Copy)]
struct Act {
    position: Position,
    peer: Option<Peer>,
    since: u64,
}

fn computes(step: u64, phase: Phase) -> Act {
    Act { position: at(step, phase), peer: None, since: 0 }
}

fn waits_for(peer: usize, step: u64, since: u64) -> Act {
    let position = Position { step, phase: Phase::Exchange, message: Some(Awaited::Bucket(3)) };
    Act { position, peer: Some(Peer::Rank(peer as u32)), since }
}

/// Lets those who are there beat twice a second, and gives what the hub says, with the time.
fn scene(hub: &mut Membership, from: u64, until: u64, acts: impl Fn(usize, u64) -> Option<Act>) -> Vec<(u64, String)> {
    let mut said = Vec::new();
    for now in (from..until).step_by(100) {
        for index in (0..3).filter(|index| now % 500 == 100 * (*index as u64)) {
            let Some(Act { position, peer, since }) = acts(index, now) else { continue };
            let waited = now.saturating_sub(since);
            let lately_ms = peer.map(|peer| (peer, waited.min(500))).into_iter().collect();
            let waiting = Waiting { peer, for_ms: if peer.is_some() { waited } else { 0 }, lately_ms };
            said.push((now, hub.on(Event::Beat { rank: rank(index), position, waiting }, ms(now)).reason));
        }
        said.push((now, hub.on(Event::Tick, ms(now)).reason));
    }
    said.into_iter().filter(|(_, reason)| !reason.is_empty()).map(|(now, reason)| (now, reason.into_owned())).collect()
}

#[test]
fn a_rank_that_others_wait_for_is_named_once_and_again_when_it_has_caught_up() {
    let mut hub = hub();
    // Rank 2 waits for rank 0, which waits for rank 1, which computes until 9 s.
    let said = scene(&mut hub, 100, 20_000, |index, now| {
        Some(match index {
            _ if now >= 9000 => computes(now / 100, Phase::Forward),
            1 => computes(7, Phase::Backward),
            other => waits_for(if other == 0 { 1 } else { 0 }, 7, 1000),
        })
    });
    let sentences: Vec<&str> = said.iter().map(|(_, sentence)| sentence.as_str()).collect();
    assert_eq!(sentences.len(), 2, "{said:?}");
    assert!(sentences[0].starts_with("rank 1 on b is late: others have waited 1."), "{said:?}");
    assert!(sentences[0].ends_with(" s for it, for bucket 3; it is in phase backward after step 7"), "{said:?}");
    assert!((2000..2600).contains(&said[0].0), "{said:?}");
    assert!(sentences[1].starts_with("rank 1 on b has caught up: others waited 7."), "{said:?}");
    assert!((9000..15_000).contains(&said[1].0), "{said:?}");
}

#[test]
fn a_stopped_rank_that_was_last_seen_in_a_short_wait_is_named() {
    let mut hub = hub();
    scene(&mut hub, 100, 1000, |index, now| Some(waits_for((index + 1) % 3, 7, now)));
    // Rank 1 says nothing more; its last word was that it waited for rank 2.
    let said = scene(&mut hub, 1000, 6000, |index, _| {
        (index != 1).then(|| waits_for(if index == 0 { 1 } else { 0 }, 7, 1000))
    });
    assert_eq!(said.len(), 1, "{said:?}");
    let sentence = &said[0].1;
    assert!(sentence.starts_with("rank 1 on b is late: others have waited "), "{sentence}");
    assert!(sentence.contains(", and silent for ") && sentence.ends_with("; the run ends at 15.0 s"), "{sentence}");
}

#[test]
fn a_rank_at_a_tenth_of_its_processor_is_late_although_no_wait_is_long() {
    let mut hub = hub();
    // Of every second rank 1 runs for 100 ms, in which all make some steps.
    let said = scene(&mut hub, 100, 20_000, |index, now| {
        let runs = (100..200).contains(&(now % 1000));
        let stopped = (now.saturating_sub(200)) / 1000 * 1000 + 200;
        match index {
            1 if now < 12_000 => runs.then(|| computes(now / 100, Phase::Forward)),
            _ if runs || now >= 12_000 => Some(computes(now / 100, Phase::Forward)),
            _ => Some(waits_for(1, stopped / 100, stopped)),
        }
    });
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].1.starts_with("rank 1 on b is late: others have waited 2."), "{said:?}");
    assert!(said[0].1.contains(" of the last 5.0 s for it; it is in phase forward after step "), "{said:?}");
    assert!(said[1].1.starts_with("rank 1 on b has caught up: "), "{said:?}");
}

#[test]
fn ranks_that_wait_for_each_other_in_turn_are_not_late() {
    let mut hub = hub();
    // Two share a core: one computes for half a second while the other waits, then the other way round.
    let said = scene(&mut hub, 100, 30_000, |index, now| {
        let turn = now / 500 * 500;
        let other = if index == 0 { 1 } else { 0 };
        let computing = (now / 500 % 2) as usize;
        Some(if index == computing { computes(now / 1000, Phase::Forward) } else { waits_for(other, now / 1000, turn) })
    });
    assert_eq!(said, []);
}

#[test]
fn a_slow_link_is_nobodys_fault() {
    let mut hub = hub();
    let said = scene(&mut hub, 100, 20_000, |index, _| Some(waits_for((index + 1) % 3, 7, 1000)));
    assert_eq!(said, []);
    // One of the cycle is a step behind: it is the one.
    let said = scene(&mut hub, 20_000, 24_000, |index, _| {
        Some(waits_for((index + 1) % 3, if index == 2 { 6 } else { 7 }, 1000))
    });
    assert!(said.len() == 1 && said[0].1.starts_with("rank 2 on c is late"), "{said:?}");
}

#[test]
fn whoever_saves_has_time_but_not_for_ever() {
    let mut hub = hub();
    let said = scene(&mut hub, 100, 14_000, |index, _| {
        Some(if index == 0 { computes(7, Phase::Checkpoint) } else { waits_for(0, 7, 1000) })
    });
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].0 >= 11_000 && said[0].1.contains("rank 0 on a is late"), "{said:?}");
    assert!(said[0].1.ends_with("it is in phase checkpoint after step 7"), "{said:?}");
}

#[test]
fn where_all_wait_for_all_the_one_that_does_not_is_late() {
    let mut hub = hub();
    let said = scene(&mut hub, 100, 4000, |index, _| {
        Some(if index == 2 { computes(7, Phase::Data) } else { Act { peer: Some(Peer::All), ..waits_for(0, 7, 1000) } })
    });
    assert!(said.len() == 1 && said[0].1.contains("rank 2 on c is late"), "{said:?}");
    assert!(said[0].1.ends_with("it is in phase data after step 7"), "{said:?}");
}

#[test]
fn a_server_that_waits_for_whoever_comes_is_not_late_and_nobody_is() {
    let mut hub = hub();
    let said = scene(&mut hub, 100, 9000, |index, _| {
        Some(match index {
            2 => Act { peer: Some(Peer::Anyone), ..waits_for(0, 7, 1000) },
            0 => waits_for(2, 7, 1000),
            _ => computes(7, Phase::Forward),
        })
    });
    assert_eq!(said, []);
}

#[test]
fn a_rank_that_is_late_again_and_again_is_told_of_ever_more_rarely() {
    let mut hub = hub();
    // Two of every ten seconds.
    let said = scene(&mut hub, 100, 400_000, |index, now| {
        let late = now % 10_000 < 2000;
        Some(if late && index != 1 {
            waits_for(1, now / 1000, now / 10_000 * 10_000)
        } else {
            computes(now / 100, Phase::Forward)
        })
    });
    let late = said.iter().filter(|(_, sentence)| sentence.contains("is late")).count();
    assert!((3..=6).contains(&late), "{late} times in 40: {said:?}");
    assert_eq!(said.len(), 2 * late, "each has its end: {said:?}");
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
    let complaint =
        Event::Failed { rank: rank(1), why: "reset by rank 2".into(), suspect: Some(rank(2)), in_vain: false };
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

/// Faults show within 5 s where silence is one after 3 s.
fn limits() -> Limits {
    Limits { silent: ms(3000), ..Limits::default() }
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
        let mut hub = Membership::hub(world, "host0", limits(), ms(0));
        let hosts: Vec<String> = (0..world).map(|index| format!("host{index}")).collect();
        for (index, host) in hosts.iter().enumerate().skip(1) {
            hub.on(Event::Arrived { rank: rank(index), host: host.clone() }, ms(0));
        }
        let spoke = |index| Some(Membership::spoke(rank(index), hosts.clone(), limits(), ms(0)));
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
                Action::Start | Action::Late(_) | Action::CaughtUp(_) => {}
                Action::Complain { why, suspect, .. } => {
                    self.send(now, member, 0, Event::Failed { rank: rank(member), why, suspect, in_vain: false });
                }
                Action::End(verdict) => {
                    for neighbour in self.neighbours(member) {
                        self.send(now, member, neighbour, Event::Told(verdict.clone()));
                    }
                    assert!(self.verdicts.insert(member, (verdict, now)).is_none(), "one verdict each");
                    self.close(now, member);
                }
                Action::GoOn(_) | Action::LetReturn(..) | Action::Readmit(_) => {
                    panic!("no rank can be done without here")
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
                self.feed(
                    now,
                    victim,
                    Event::Failed { rank: rank(victim), why: "disk full".into(), suspect: None, in_vain: false },
                );
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
        self.feed(now, member, beat(member, position));
        for neighbour in self.neighbours(member) {
            self.send(now, member, neighbour, beat(member, position));
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
                    self.feed(
                        now,
                        target,
                        Event::Failed { rank: rank(target), why, suspect: Some(rank(suspect)), in_vain: false },
                    );
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
