//! Schedules: clients that read, write, add and die at any time, with every cell of every copy an event of its own, so that
//! anything that is half done would be seen. What a box holds is compared with a history that is made one change at a time.

use std::collections::BTreeMap;

use paceline_system::random::Random;
use proptest::prelude::*;

use super::*;

/// A page is looked at as so many cells.
const CELLS: u64 = 4;
const CELL: u64 = PAGE_BYTES / CELLS;
const PAGES: u64 = 3;

const LIMITS: Limits =
    Limits { bytes_max: 64 * PAGE_BYTES * PAGES, client_bytes_max: 4 * PAGE_BYTES * PAGES, regions_max: 8 };

fn key(number: u8) -> Key {
    Key { name: [number; 32], secret: [number + 1; 16] }
}

fn span_of(from: u64, to: u64) -> Span {
    Span { at: from * CELL, bytes: (to - from) * CELL }
}

/// What a client is in the middle of.
#[derive(Clone, Debug)]
enum Doing {
    /// Cells of a view that it has not looked at, and the version that they must be of.
    Reads {
        region: u64,
        view: u64,
        version: u64,
        cells: Vec<(u64, u32)>,
        closed: bool,
    },
    /// Cells of a draft that it has not written.
    Writes {
        region: u64,
        draft: u64,
        span: Span,
        cells: Vec<(u64, u32)>,
        adds: bool,
        value: u64,
        asked: bool,
    },
    /// It has asked for a change, and what that is.
    Waits,
    Idle,
}

/// A job, the cells that are not computed yet, and the other region as it was when the job began.
struct Running {
    call: Call,
    job: Job,
    cells: Vec<u64>,
    source: Vec<u64>,
}

/// A region, its cells and what is written there, and whether it is added.
type Effect = (u64, Vec<(u64, u64)>, bool);

struct World {
    state: MemoryBox,
    random: Random,
    /// Places of regions: cells.
    memory: BTreeMap<(u64, u32), [u64; CELLS as usize]>,
    /// Every version of every region.
    history: BTreeMap<u64, Vec<Vec<u64>>>,
    clients: BTreeMap<Client, Doing>,
    running: Vec<Running>,
    /// What a commit writes: by call.
    effects: BTreeMap<Call, Effect>,
    /// Whose call it is.
    calls: BTreeMap<Call, (Client, Ask)>,
    next: u64,
    reads: usize,
    changes: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            state: MemoryBox::new(LIMITS),
            random: Random::new(&[seed]),
            memory: BTreeMap::new(),
            history: BTreeMap::new(),
            clients: BTreeMap::new(),
            running: Vec::new(),
            effects: BTreeMap::new(),
            calls: BTreeMap::new(),
            next: 0,
            reads: 0,
            changes: 0,
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound as usize) as u64
    }

    fn event(&mut self, event: Event) {
        let actions = self.state.step(event, Duration::ZERO);
        assert!(self.state.used <= LIMITS.bytes_max);
        for action in actions {
            match action {
                Action::Run(call, job) => self.begin(call, job),
                Action::Answer(call, answer) => self.answered(call, &answer),
                Action::Discard(region) => {
                    self.memory.retain(|(of, _), _| *of != region);
                    self.history.remove(&region);
                }
            }
        }
    }

    fn ask(&mut self, client: Client, ask: Ask) -> Call {
        self.next += 1;
        let call = self.next;
        self.calls.insert(call, (client, ask));
        self.event(Event::Asked(client, call, ask));
        call
    }

    /// The cells of a span, by their number in the region, and the place of each.
    fn cells(span: Span, places: &[u32]) -> Vec<(u64, u32)> {
        let first = span.at / PAGE_BYTES;
        let of = |cell: u64| (cell, places[(cell / CELLS - first) as usize]);
        (span.at / CELL..(span.at + span.bytes) / CELL).map(of).collect()
    }

    fn cell(&mut self, region: u64, place: u32, cell: u64) -> &mut u64 {
        &mut self.memory.entry((region, place)).or_default()[(cell % CELLS) as usize]
    }

    fn now(&self, region: u64) -> Vec<u64> {
        self.history[&region].last().unwrap().clone()
    }

    fn begin(&mut self, call: Call, job: Job) {
        let pages = job.places.len() as u64;
        let first = job.span.at / PAGE_BYTES * CELLS;
        let source = if let How::Accumulate { source, .. } = job.how { self.now(source) } else { Vec::new() };
        self.running.push(Running { call, job, cells: (first..first + pages * CELLS).collect(), source });
    }

    /// Computes one cell of a job, and reports when it was the last.
    fn compute(&mut self, index: usize) {
        let Some(cell) = self.running[index].cells.pop() else {
            let Running { call, job, source, .. } = self.running.swap_remove(index);
            self.note_effect(call, &job, &source);
            return self.event(Event::Computed(call));
        };
        let Running { job, .. } = &self.running[index];
        let (span, region, how) = (job.span, job.region, job.how.clone());
        let (old, new) = job.places[(cell / CELLS - span.at / PAGE_BYTES) as usize];
        let inside = (span.at / CELL..(span.at + span.bytes) / CELL).contains(&cell);
        let before = *self.cell(region, old, cell);
        let value = match how {
            _ if !inside => before,
            How::Replace => return,
            How::Add(_) => before + *self.cell(region, new, cell),
            How::Count(by) => before + by as u64,
            How::Accumulate { source, span: from, places, .. } => {
                let other = from.at / CELL + cell - span.at / CELL;
                let place = places[(other / CELLS - from.at / PAGE_BYTES) as usize];
                before + *self.cell(source, place, other)
            }
        };
        *self.cell(region, new, cell) = value;
    }

    /// What a job of the box's own does to the history.
    fn note_effect(&mut self, call: Call, job: &Job, source: &[u64]) {
        if let How::Accumulate { span: from, .. } = job.how {
            let first = job.span.at / CELL;
            let values = (first..(job.span.at + job.span.bytes) / CELL)
                .map(|cell| (cell, source[(from.at / CELL + cell - first) as usize]));
            self.effects.insert(call, (job.region, values.collect(), true));
        }
    }

    fn answered(&mut self, call: Call, answer: &Answer) {
        let Some((client, ask)) = self.calls.remove(&call) else { return };
        let known = self.clients.contains_key(&client);
        let doing = match (ask, answer) {
            (Ask::Create { .. }, Answer::Region { region, bytes, .. }) => {
                self.history.insert(*region, vec![vec![0; (bytes / CELL) as usize]]);
                Doing::Idle
            }
            (Ask::Open { region, span }, Answer::Held { number, version, places }) => {
                self.state.enter(client, *number, false);
                let cells = Self::cells(span, places);
                Doing::Reads { region, view: *number, version: *version, cells, closed: false }
            }
            (Ask::Draft { region, span }, Answer::Held { number, places, .. }) => {
                let (adds, value) = (self.random.chance(0.5), self.random.next_u64() >> 32);
                self.state.enter(client, *number, true);
                let cells = Self::cells(span, places);
                Doing::Writes { region, draft: *number, span, cells, adds, value, asked: false }
            }
            (Ask::Commit { .. } | Ask::Accumulate { .. } | Ask::Count { .. }, Answer::Done { version }) => {
                self.changes += 1;
                let (region, cells, adds) = self.effects.remove(&call).unwrap_or_default();
                if let Some(history) = self.history.get_mut(&region) {
                    let mut now = history.last().unwrap().clone();
                    for (cell, value) in cells {
                        now[cell as usize] = value + if adds { now[cell as usize] } else { 0 };
                    }
                    history.push(now);
                    assert_eq!(*version as usize + 1, history.len(), "a change is a version");
                }
                Doing::Idle
            }
            _ => Doing::Idle,
        };
        if known {
            self.clients.insert(client, doing);
        }
    }

    /// One client does one thing more.
    fn act(&mut self, client: Client) {
        match self.clients.insert(client, Doing::Waits).unwrap() {
            Doing::Waits => {}
            Doing::Idle => self.ask_something(client),
            Doing::Reads { region, view, version, mut cells, closed } => {
                if let Some((cell, place)) = cells.pop() {
                    if let Some(history) = self.history.get(&region) {
                        let expected = history[version as usize][cell as usize];
                        assert_eq!(*self.cell(region, place, cell), expected, "cell {cell} of version {version}");
                    }
                    // Another connection of the client may close it while this one reads.
                    let closes = !closed && self.random.chance(0.1);
                    if closes {
                        self.ask(client, Ask::Close { held: view });
                    }
                    self.clients
                        .insert(client, Doing::Reads { region, view, version, cells, closed: closed || closes });
                    return;
                }
                self.reads += 1;
                self.clients.insert(client, Doing::Idle);
                self.event(Event::Done(client, view, 0));
                if !closed {
                    self.ask(client, Ask::Close { held: view });
                }
            }
            Doing::Writes { region, draft, span, mut cells, adds, value, asked } => {
                let left = cells.pop();
                // Another connection may ask for the commit while this one writes.
                let asks = !asked && (left.is_none() || self.random.chance(0.1));
                if asks {
                    let all = span.at / CELL..(span.at + span.bytes) / CELL;
                    self.effects.insert(self.next + 1, (region, all.map(|cell| (cell, value + cell)).collect(), adds));
                    self.ask(client, Ask::Commit { draft, bytes: 0, scale: adds.then_some(1.0) });
                }
                let Some((cell, place)) = left else {
                    return self.event(Event::Done(client, draft, 0));
                };
                *self.cell(region, place, cell) = value + cell;
                let asked = asked || asks;
                self.clients.insert(client, Doing::Writes { region, draft, span, cells, adds, value, asked });
            }
        }
    }

    fn ask_something(&mut self, client: Client) {
        let (from, length) = (self.below(PAGES * CELLS), 1 + self.below(PAGES * CELLS));
        let span = span_of(from, (from + length).min(PAGES * CELLS));
        let regions: Vec<u64> = self.history.keys().copied().collect();
        let any = |world: &mut Self| {
            let index = world.below(regions.len().max(1) as u64) as usize;
            regions.get(index).copied().unwrap_or(99)
        };
        let (region, other) = (any(self), any(self));
        let number = self.below(2) as u8;
        let ask = match self.below(20) {
            0 | 1 => Ask::Create { key: key(number), bytes: PAGES * PAGE_BYTES, keeps: false },
            2..=5 => Ask::Attach { key: key(number) },
            6 if self.random.chance(0.3) => Ask::Free { region },
            6..=10 => Ask::Open { region, span },
            11..=15 => Ask::Draft { region, span },
            16 => Ask::Notify { region: 0 },
            _ => Ask::Accumulate { target: (region, span), source: other, from: span.at, scale: 1.0 },
        };
        self.ask(client, ask);
    }

    fn run(mut self, steps: usize) -> (usize, usize) {
        for _ in 0..steps {
            let count = self.clients.len() as u64;
            match self.below(100) {
                0 | 1 if count < 5 => {
                    self.next += 1;
                    let client = self.next;
                    self.clients.insert(client, Doing::Idle);
                    self.event(Event::Came(client));
                }
                2 if count > 1 => {
                    let index = self.below(count) as usize;
                    let client = *self.clients.keys().nth(index).unwrap();
                    self.clients.remove(&client);
                    self.event(Event::Left(client));
                }
                3..=40 if !self.running.is_empty() => {
                    let index = self.below(self.running.len() as u64) as usize;
                    self.compute(index);
                }
                _ if count > 0 => {
                    let index = self.below(count) as usize;
                    let client = *self.clients.keys().nth(index).unwrap();
                    self.act(client);
                }
                _ => {}
            }
        }
        let left = |doing: &Doing| matches!(doing, Doing::Reads { .. } | Doing::Writes { .. });
        while !self.running.is_empty() || self.clients.values().any(left) {
            if !self.running.is_empty() {
                self.compute(0);
            }
            let busy = self.clients.iter().find(|(_, doing)| left(doing)).map(|(client, _)| *client);
            busy.into_iter().for_each(|client| self.act(client));
        }
        let unanswered = self.calls.iter().filter(|(_, (client, _))| self.clients.contains_key(client));
        assert_eq!(unanswered.count(), 0, "whoever asks is answered");
        let clients: Vec<Client> = self.clients.keys().copied().collect();
        self.clients.clear();
        clients.into_iter().for_each(|client| self.event(Event::Left(client)));
        assert_eq!((self.state.used, self.state.regions.len()), (0, 0), "what nobody has is given back");
        assert!(self.state.views.is_empty() && self.state.drafts.is_empty() && self.state.changes.is_empty());
        (self.reads, self.changes)
    }
}

#[test]
fn nothing_is_torn_and_nothing_is_lost_in_any_order() {
    let (mut reads, mut changes) = (0, 0);
    for seed in 0..60 {
        let (read, changed) = World::new(seed).run(4000);
        (reads, changes) = (reads + read, changes + changed);
    }
    assert!(reads > 2000 && changes > 2000, "the schedules did something: {reads} reads, {changes} changes");
}

/// A box with one client that has one region.
fn with_region(bytes: u64) -> (MemoryBox, u64) {
    let mut state = MemoryBox::new(LIMITS);
    state.step(Event::Came(1), Duration::ZERO);
    let region = match answer(&mut state, 1, Ask::Create { key: key(1), bytes, keeps: false }) {
        Answer::Region { region, .. } => region,
        other => panic!("{other:?}"),
    };
    (state, region)
}

/// What is answered at once.
fn answer(state: &mut MemoryBox, client: Client, ask: Ask) -> Answer {
    let actions = state.step(Event::Asked(client, 7, ask), Duration::ZERO);
    actions
        .into_iter()
        .find_map(|action| if let Action::Answer(7, answer) = action { Some(answer) } else { None })
        .unwrap_or_else(|| panic!("{ask:?} is not answered"))
}

#[test]
fn a_stranger_and_whoever_has_another_key_learn_nothing() {
    let (mut state, region) = with_region(PAGE_BYTES);
    let span = Span { at: 0, bytes: 8 };
    assert_eq!(answer(&mut state, 2, Ask::Open { region, span }), Answer::No(No::Stranger));
    state.step(Event::Came(2), Duration::ZERO);
    let wrong = Key { secret: [9; 16], ..key(1) };
    assert_eq!(answer(&mut state, 2, Ask::Attach { key: wrong }), Answer::No(No::Unknown));
    assert_eq!(answer(&mut state, 2, Ask::Attach { key: key(5) }), Answer::No(No::Unknown));
    for ask in [
        Ask::Open { region, span },
        Ask::Draft { region, span },
        Ask::Free { region },
        Ask::Notify { region },
        Ask::Count { region, at: 0, by: 1 },
        Ask::Accumulate { target: (region, span), source: region, from: 0, scale: 1.0 },
        Ask::Watch { region, version: 1, limit: Duration::from_secs(1) },
    ] {
        assert_eq!(answer(&mut state, 2, ask), Answer::No(No::Unknown), "{ask:?}");
    }
    assert!(matches!(answer(&mut state, 2, Ask::Attach { key: key(1) }), Answer::Region { .. }));
    assert!(matches!(answer(&mut state, 2, Ask::Open { region, span }), Answer::Held { .. }));
    // What one client holds, another does not.
    assert_eq!(answer(&mut state, 1, Ask::Close { held: 2 }), Answer::No(No::Unknown));
}

#[test]
fn quotas_and_limits_hold() {
    let (mut state, _) = with_region(PAGE_BYTES);
    let create = |number, bytes| Ask::Create { key: key(number), bytes, keeps: false };
    assert_eq!(answer(&mut state, 1, create(1, 8)), Answer::No(No::Taken));
    assert_eq!(answer(&mut state, 1, create(2, LIMITS.client_bytes_max)), Answer::No(No::Quota));
    assert_eq!(answer(&mut state, 1, create(2, u64::MAX)), Answer::No(No::Full));
    assert_eq!(answer(&mut state, 1, create(2, 0)), Answer::No(No::Full));
    for number in 2..2 + LIMITS.regions_max as u8 - 1 {
        assert!(matches!(answer(&mut state, 1, create(number, 8)), Answer::Region { .. }));
    }
    assert_eq!(answer(&mut state, 1, create(60, 8)), Answer::No(No::Full));
}

#[test]
fn views_are_bounded_by_versions_and_by_client() {
    let (mut state, region) = with_region(PAGE_BYTES);
    let span = Span { at: 0, bytes: PAGE_BYTES };
    for _ in 1..VERSIONS_MAX {
        assert!(matches!(answer(&mut state, 1, Ask::Draft { region, span }), Answer::Held { .. }));
    }
    assert_eq!(answer(&mut state, 1, Ask::Draft { region, span }), Answer::No(No::Busy));
    for _ in VERSIONS_MAX as usize - 1..HELD_MAX {
        assert!(matches!(answer(&mut state, 1, Ask::Open { region, span }), Answer::Held { .. }));
    }
    assert_eq!(answer(&mut state, 1, Ask::Open { region, span }), Answer::No(No::Busy));
}

#[test]
fn whoever_waits_for_a_version_hears_of_it_or_of_the_end_of_its_time() {
    let (mut state, region) = with_region(PAGE_BYTES);
    let watch = |version| Ask::Watch { region, version, limit: Duration::from_secs(2) };
    assert_eq!(answer(&mut state, 1, watch(0)), Answer::Done { version: 0 });
    assert_eq!(state.step(Event::Asked(1, 8, watch(1)), Duration::from_secs(1)), []);
    assert_eq!(state.step(Event::Passed, Duration::from_secs(2)), []);
    let told = state.step(Event::Asked(1, 9, Ask::Notify { region }), Duration::from_secs(2));
    assert!(told.contains(&Action::Answer(8, Answer::Done { version: 1 })));
    assert_eq!(state.step(Event::Asked(1, 10, watch(5)), Duration::from_secs(3)), []);
    assert_eq!(state.step(Event::Passed, Duration::from_secs(5)), [Action::Answer(10, Answer::Done { version: 1 })]);
}

proptest! {
    #[test]
    fn spans_anywhere_are_inside_or_refused(at: u64, bytes: u64, page_at in 0u64..4, near in 0u64..3) {
        let (mut state, region) = with_region(3 * PAGE_BYTES + 100);
        let near = Span { at: page_at * PAGE_BYTES + near, bytes: bytes % (2 * PAGE_BYTES) };
        for span in [Span { at, bytes }, near] {
            let inside = span.at.checked_add(span.bytes).is_some_and(|end| end <= 3 * PAGE_BYTES + 100) && span.bytes > 0;
            let opened = answer(&mut state, 1, Ask::Open { region, span });
            prop_assert_eq!(matches!(opened, Answer::Held { .. }), inside);
            if let Answer::Held { places, .. } = opened {
                let covered: u64 = (0..places.len()).map(|nth| {
                    let range = span.of_page(PAGE_BYTES, nth);
                    range.end - range.start
                }).sum();
                prop_assert_eq!(covered, span.bytes);
            }
        }
    }
}
