//! A centre in a memory box: the rule against a script's numbers in a box without sockets, whatever happens in which order;
//! and workers, servers and real boxes, one step after the other.

use std::collections::BTreeMap;
use std::sync::Arc;

use paceline_comm::memory_box::Key;
use paceline_comm::memory_box::Limits;
use paceline_comm::memory_box::state::{Action, Event, How, MemoryBox};
use paceline_comm::memory_box::talk::{Answer, Ask, Span};

use super::super::super::shm_async;
use super::super::lent::increment;
use super::expected::{Expected, expected};
use super::*;

const ELEMENTS: usize = 4;
const SPAN: Span = Span { at: 0, bytes: 4 * ELEMENTS as u64 };

/// A box whose memory is a map from places to numbers.
struct Simulated {
    state: MemoryBox,
    memory: BTreeMap<(u64, u32), [f32; ELEMENTS]>,
    calls: u64,
}

impl Simulated {
    fn new(workers: u64) -> Self {
        let limits = Limits { bytes_max: 1 << 20, client_bytes_max: 1 << 20, regions_max: 10 };
        let mut state = MemoryBox::new(limits);
        (1..=workers).for_each(|client| drop(state.step(Event::Came(client), Duration::ZERO)));
        Self { state, memory: BTreeMap::new(), calls: 0 }
    }

    /// Asks, and does whatever the box wants to have computed.
    fn ask(&mut self, client: u64, ask: Ask) -> Answer {
        self.calls += 1;
        let call = self.calls;
        let mut events = vec![Event::Asked(client, call, ask)];
        let mut answered = None;
        while let Some(event) = events.pop() {
            for action in self.state.step(event, Duration::ZERO) {
                match action {
                    Action::Answer(of, answer) if of == call => answered = Some(answer),
                    Action::Run(call, job) => {
                        let How::Accumulate { source, ref places, scale, .. } = job.how else { continue };
                        let added = self.memory[&(source, places[0])];
                        let (old, new) = job.places[0];
                        let old = self.memory.get(&(job.region, old)).copied().unwrap_or_default();
                        let sum = std::array::from_fn(|index| old[index] + scale * added[index]);
                        self.memory.insert((job.region, new), sum);
                        events.push(Event::Computed(call));
                    }
                    Action::Answer(..) | Action::Discard(_) => {}
                }
            }
        }
        answered.expect("what is asked is answered")
    }

    fn region(&mut self, client: u64, name: u8) -> u64 {
        let key = Key { name: [name; 32], secret: [0; 16] };
        let bytes = SPAN.bytes;
        let ask = if client == 1 || name > 0 { Ask::Create { key, bytes, keeps: false } } else { Ask::Attach { key } };
        match self.ask(client, ask) {
            Answer::Region { region, .. } => region,
            other => panic!("{other:?}"),
        }
    }

    fn held(&mut self, client: u64, ask: Ask) -> (u64, u64, Arc<[u32]>) {
        match self.ask(client, ask) {
            Answer::Held { number, version, places } => (number, version, places),
            other => panic!("{other:?}"),
        }
    }

    fn read(&mut self, client: u64, region: u64) -> ([f32; ELEMENTS], u64) {
        let (number, version, places) = self.held(client, Ask::Open { region, span: SPAN });
        let numbers = self.memory.get(&(region, places[0])).copied().unwrap_or_default();
        self.ask(client, Ask::Close { held: number });
        (numbers, version)
    }

    fn write(&mut self, client: u64, region: u64, numbers: [f32; ELEMENTS]) {
        let (number, _, places) = self.held(client, Ask::Draft { region, span: SPAN });
        self.memory.insert((region, places[0]), numbers);
        // All of what such a small region's page holds is in the draft.
        let commit = Event::Asked(client, 1 << 40, Ask::Commit { draft: number, bytes: 0, scale: None });
        let mut actions = self.state.step(commit, Duration::ZERO);
        if let Some(Action::Run(call, _)) = actions.pop() {
            self.state.step(Event::Computed(call), Duration::ZERO);
        }
    }
}

#[test]
fn increments_in_a_box_go_where_a_script_says_in_any_order() {
    let lines = expected().into_iter().filter(|line| line.method == "seasgd");
    let mut cases = 0;
    for Expected { numbers, order, weights, .. } in lines {
        cases += 1;
        let workers = weights.len() - 1;
        let mut world = Simulated::new(workers as u64);
        let center = world.region(1, 0);
        (2..=workers as u64).for_each(|client| assert_eq!(world.region(client, 0), center));
        let begin: Vec<f32> = start(ELEMENTS).into_iter().map(|x| x as f32).collect();
        world.write(1, center, std::array::from_fn(|index| 0.25 * begin[index]));
        let mut x: Vec<[f32; ELEMENTS]> = vec![std::array::from_fn(|index| begin[index]); workers];
        let regions: Vec<u64> = (1..=workers).map(|client| world.region(client as u64, client as u8)).collect();
        let (mut increments, mut versions) = (x.clone(), vec![0; workers]);
        let mut added = 1;
        for event in order {
            let (what, worker) = (event / 10, event % 10);
            let client = worker as u64 + 1;
            match what {
                0 => {
                    let (found, version) = world.read(client, center);
                    (increments[worker], versions[worker]) = (x[worker], version);
                    increment(numbers[0] as f32, &found, &mut increments[worker]);
                    world.write(client, regions[worker], increments[worker]);
                }
                1 => {
                    let target = (center, SPAN);
                    let ask = Ask::Accumulate { target, source: regions[worker], from: 0, scale: 1.0 };
                    let Answer::Done { version } = world.ask(client, ask) else { panic!("nothing was added") };
                    added += 1;
                    assert_eq!(version, added, "every addition is a version");
                    assert!(version > versions[worker]);
                }
                _ => {
                    for (x, moved) in x[worker].iter_mut().zip(increments[worker]) {
                        *x -= (RATE * gradient(worker, f64::from(*x))) as f32 + moved;
                    }
                }
            }
        }
        x.push(world.read(1, center).0);
        for (found, expected) in x.iter().flatten().zip(weights.iter().flatten()) {
            assert!((f64::from(*found) - expected).abs() < 2e-6, "{found} for {expected}");
        }
    }
    assert_eq!(cases, 2);
}

/// Where each exchange is over before the next begins, that is elastic averaging.
#[test]
fn workers_of_a_box_come_to_where_a_script_says() {
    for Expected { numbers, order, weights, .. } in expected().into_iter().filter(|line| line.method == "easgd") {
        for servers in [1, 2] {
            let period = Some(numbers[0] as u64);
            let rounds = RoundOptions { period, elastic_rate: Some(numbers[1]), ..RoundOptions::default() };
            let (counts, elements) = (Counts::default(), weights[0].len());
            let told = || counts.missed.lock().unwrap().len();
            let all = (weights.len(), servers, elements);
            let missed = world_that_counts(&shm_async::RECIPE, options(rounds, None), all, &counts, |mut workers| {
                let mut exchanges = 0;
                for &worker in &order {
                    let driven = &mut workers[worker];
                    let exchanges_now = driven.steps > 0 && driven.steps.is_multiple_of(numbers[0] as u64);
                    driven.step(1);
                    exchanges += usize::from(exchanges_now) * servers;
                    let clock = Clock::real();
                    while told() < exchanges {
                        assert!(clock.now() < LIMIT, "the servers have heard of {} of {exchanges}", told());
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                workers.iter().zip(&weights).for_each(|(worker, weights)| worker.assert_at(weights));
                all_meet(&mut workers, 0);
            });
            let before_they_meet = &missed[..missed.len() - weights.len() * servers];
            assert!(before_they_meet.iter().all(|(_, missed)| *missed == 0), "nobody was in between: {missed:?}");
        }
    }
}

#[test]
fn one_worker_of_a_box_that_has_stepped_alone_meets_where_it_is_tied_to() {
    let rounds = RoundOptions { period: Some(2), elastic_rate: Some(0.3), ..RoundOptions::default() };
    world(&shm_async::RECIPE, options(rounds, None), (1, 1, 3), |mut workers| {
        workers[0].step(5);
        all_meet(&mut workers, 0);
        workers[0].step(5);
    });
}
