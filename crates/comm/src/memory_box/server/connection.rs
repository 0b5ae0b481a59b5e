//! One connection of a box: hears what is asked, has the state machine decide, and moves the data.

use std::sync::Arc;
use std::time::Duration;

use paceline_system::{clock, entropy};

use super::super::extent::{Extent, Places, compute};
use super::super::line::{DATA_BYTES_MAX, Head, Line, MESSAGE_MAX};
use super::super::state::{How, Job};
use super::super::talk::{Message, Reply, Span};
use super::{Action, Answer, Ask, CALL_BITS, Call, Client, CommError, Event, Mailbox, No, Shared, locked};

/// A connection may be silent for as long as the other end is there, which the system looks after (`server.rs`).
const SILENT_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// How long somebody is kept waiting for places while all versions are looked at.
const BUSY_MAX: Duration = Duration::from_secs(10);

/// How often one who waits looks up, and the clock of the state machine goes on.
const TICK: Duration = Duration::from_millis(20);

/// A connection and whose it is.
pub(super) struct Connection<'a> {
    line: Line,
    shared: &'a Shared,
    client: Client,
    secret: [u8; 16],
    mailbox: Arc<Mailbox>,
    number: u64,
    calls: u64,
    /// What was counted up last, as it was.
    before: i64,
}

impl<'a> Connection<'a> {
    /// Serves until the connection ends.
    pub fn run(mut line: Line, shared: &'a Shared) -> Result<(), CommError> {
        let (message, _) = hear(&mut line, MESSAGE_MAX)?;
        let Message::Hello { secret } = message else {
            return Err(line.talk.violation("a connection that does not begin with a hello"));
        };
        let Some((client, secret)) = Self::admit(shared, secret) else {
            return line.say(Reply::Answer(Answer::No(No::Stranger)).encode());
        };
        let (number, mailbox) = (shared.number(), Arc::new(Mailbox::default()));
        locked(&shared.mail).insert(number, Arc::clone(&mailbox));
        let mut connection = Self { line, shared, client, secret, mailbox, number, calls: 0, before: 0 };
        connection.line.say(Reply::Welcome { client, secret, name: shared.name }.encode())?;
        // Whoever asks again and again would never let it wait, and so see that the box has ended.
        while shared.stop.reason().is_none() {
            connection.turn()?;
        }
        Ok(())
    }

    /// One more connection of a client, or of a new one.
    fn admit(shared: &Shared, secret: [u8; 16]) -> Option<(Client, [u8; 16])> {
        let mut clients = locked(&shared.clients);
        if secret != [0; 16] {
            let (client, connections) = clients.get_mut(&secret)?;
            *connections += 1;
            return Some((*client, secret));
        }
        let (client, secret) = (shared.number(), entropy::bytes());
        clients.insert(secret, (client, 1));
        drop(clients);
        shared.step(Event::Came(client));
        Some((client, secret))
    }

    /// Hears one message and does what it asks for.
    fn turn(&mut self) -> Result<(), CommError> {
        let (message, data) = hear(&mut self.line, SILENT_MAX)?;
        match message {
            Message::Hello { .. } => Err(self.line.talk.violation("a second hello")),
            Message::Ask(Ask::Close { held }) => {
                self.ask(Ask::Close { held });
                Ok(())
            }
            Message::Ask(ask) => self.decide(ask),
            Message::Read { region, span } => self.read(region, span),
            Message::Write { region, span, scale } => self.write((region, span), data, scale),
            Message::Look { held, span } => self.look(held, span),
            Message::Land { held, span } => self.land(held, span, data),
            Message::Map { region } => self.map(region),
        }
    }

    /// Asks the state machine, and computes what it wants to have computed for the answer.
    fn ask(&mut self, ask: Ask) -> Answer {
        self.calls += 1;
        let call = self.number << CALL_BITS | self.calls;
        self.shared.step(Event::Asked(self.client, call, ask));
        let mut ready = Vec::new();
        loop {
            {
                let actions = locked(&self.mailbox.actions);
                let (mut actions, timeout) = self
                    .mailbox
                    .has_come
                    .wait_timeout_while(actions, TICK, |actions| actions.is_empty())
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                ready.append(&mut actions);
                drop(actions);
                if timeout.timed_out() && ready.is_empty() {
                    self.shared.step(Event::Passed);
                    if self.shared.stop.reason().is_some() {
                        return Answer::No(No::Stranger);
                    }
                }
            }
            for action in std::mem::take(&mut ready) {
                match action {
                    Action::Answer(answered, answer) if answered == call => return answer,
                    Action::Run(call, job) => self.compute(call, &job),
                    Action::Answer(..) | Action::Discard(_) => {}
                }
            }
        }
    }

    fn compute(&mut self, call: Call, job: &Job) {
        let source = match job.how {
            How::Accumulate { source, .. } => self.shared.extent(source),
            _ => None,
        };
        let new: Vec<u32> = job.places.iter().map(|&(_, new)| new).collect();
        let target = self.shared.extent(job.region);
        let done = target.ok_or(No::Unknown).and_then(|target: Arc<Extent>| {
            self.shared.ensure(&target, &new, job.page)?;
            self.before = compute(job, &target, source.as_deref());
            Ok(())
        });
        self.shared.step(if done.is_ok() { Event::Computed(call) } else { Event::Failed(call) });
    }

    /// The same, as long as there is no place for another version and somebody may let go of one.
    fn ask_patiently(&mut self, ask: Ask) -> Answer {
        let began = self.shared.clock.now();
        loop {
            let answer = self.ask(ask);
            let is_over = self.shared.clock.now() > began + BUSY_MAX || self.shared.stop.reason().is_some();
            if answer != Answer::No(No::Busy) || is_over {
                return answer;
            }
            clock::sleep(Duration::from_millis(1));
        }
    }

    fn decide(&mut self, ask: Ask) -> Result<(), CommError> {
        let answer = match ask {
            Ask::Create { .. } => self.create(ask),
            Ask::Attach { .. } => self.attach(ask),
            Ask::Draft { region, span } => self.draft(region, span).map_or_else(Answer::No, |(answer, _)| answer),
            Ask::Accumulate { .. } | Ask::Count { .. } => self.ask_patiently(ask),
            _ => self.ask(ask),
        };
        let reply = match (ask, answer) {
            (Ask::Count { .. }, Answer::Done { version }) => Reply::Counted { version, before: self.before },
            (_, answer) => Reply::Answer(answer),
        };
        self.line.say(reply.encode())
    }

    /// A region, and its memory.
    fn create(&mut self, ask: Ask) -> Answer {
        let answer = self.ask(ask);
        let Answer::Region { region, .. } = answer else { return answer };
        let made = || {
            let (bytes, places, page) = {
                let state = locked(&self.shared.state);
                let found = state.region(region)?;
                (found.extent_bytes(), found.first_places().collect::<Vec<u32>>(), found.page)
            };
            let extent = Extent::create(bytes).ok()?;
            self.shared.ensure(&extent, &places, page).ok()?;
            locked(&self.shared.extents).insert(region, Arc::new(extent));
            // Somebody else with the key may have freed it meanwhile.
            let is_there = locked(&self.shared.state).region(region).is_some();
            if !is_there {
                locked(&self.shared.extents).remove(&region);
            }
            is_there.then_some(())
        };
        if made().is_some() {
            return answer;
        }
        self.ask(Ask::Free { region });
        Answer::No(No::Memory)
    }

    /// A region that another is making may be known before its memory is there.
    fn attach(&mut self, ask: Ask) -> Answer {
        let answer = self.ask(ask);
        let Answer::Region { region, .. } = answer else { return answer };
        while self.shared.extent(region).is_none() {
            let is_there = locked(&self.shared.state).region(region).is_some();
            if !is_there || self.shared.stop.reason().is_some() {
                return Answer::No(No::Unknown);
            }
            clock::sleep(Duration::from_millis(1));
        }
        answer
    }

    /// Places to write to, and that they are there.
    fn draft(&mut self, region: u64, span: Span) -> Result<(Answer, Places), No> {
        let answer = self.ask_patiently(Ask::Draft { region, span });
        let Answer::Held { number, ref places, .. } = answer else {
            return Err(if let Answer::No(no) = answer { no } else { No::Unknown });
        };
        let found = self.places(region, span, places).and_then(|held| {
            let extent = self.shared.extent(region).ok_or(No::Unknown)?;
            self.shared.ensure(&extent, places, self.page(region)?)?;
            Ok(held)
        });
        match found {
            Ok(held) => Ok((answer, held)),
            Err(no) => {
                self.ask(Ask::Close { held: number });
                Err(no)
            }
        }
    }

    fn page(&self, region: u64) -> Result<u64, No> {
        locked(&self.shared.state).region(region).map(|found| found.page).ok_or(No::Unknown)
    }

    fn places(&self, region: u64, span: Span, places: &Arc<[u32]>) -> Result<Places, No> {
        let (page, extent) = (self.page(region)?, self.shared.extent(region).ok_or(No::Unknown)?);
        Places::new(&extent, page, span, places).ok_or(No::Outside)
    }

    fn refuse(&mut self, no: No) -> Result<(), CommError> {
        self.line.say(Reply::Answer(Answer::No(no)).encode())
    }

    fn read(&mut self, region: u64, span: Span) -> Result<(), CommError> {
        if span.bytes > DATA_BYTES_MAX {
            return self.refuse(No::Outside);
        }
        let answer = self.ask_patiently(Ask::Open { region, span });
        let Answer::Held { number, version, places } = answer else {
            return self.line.say(Reply::Answer(answer).encode());
        };
        drop(places);
        let sent = match self.enter(number, false) {
            Ok(places) => {
                let sent = self.send(&places, span, version);
                self.done(number, 0);
                sent
            }
            Err(no) => self.refuse(no),
        };
        self.ask(Ask::Close { held: number });
        sent
    }

    fn send(&mut self, places: &Places, span: Span, version: u64) -> Result<(), CommError> {
        let reply = Reply::Data { version }.encode();
        // Inside: the places are of this span.
        self.line.send(reply, span.bytes, |piece| places.look(span, piece).unwrap_or(Ok(())))
    }

    /// What comes is put where it is to be, and nobody sees it before all of it is there.
    fn write(&mut self, (region, span): (u64, Span), data: u64, scale: Option<f32>) -> Result<(), CommError> {
        let drafted = if data == span.bytes { self.draft(region, span) } else { Err(No::Outside) };
        let (answer, places) = match drafted {
            Ok(drafted) => drafted,
            Err(no) => {
                self.line.skip(data)?;
                return self.refuse(no);
            }
        };
        let Answer::Held { number, .. } = answer else { return self.refuse(No::Unknown) };
        drop(places);
        let Ok(places) = self.enter(number, true) else {
            self.line.skip(data)?;
            return self.refuse(No::Unknown);
        };
        let Self { line, .. } = self;
        let filled = places.fill(span, |bytes| line.receive(bytes)).unwrap_or(Ok(()));
        self.done(number, 0);
        if let Err(error) = filled {
            self.ask(Ask::Close { held: number });
            return Err(error);
        }
        let answer = self.ask(Ask::Commit { draft: number, bytes: 0, scale });
        if matches!(answer, Answer::No(_)) {
            self.ask(Ask::Close { held: number });
        }
        self.line.say(Reply::Answer(answer).encode())
    }

    /// A view's or a draft's places, which stay what they are until this connection is through with them.
    fn enter(&self, number: u64, is_draft: bool) -> Result<Places, No> {
        let entered = locked(&self.shared.state).enter(self.client, number, is_draft);
        let (region, span, places) = entered.ok_or(No::Unknown)?;
        self.places(region, span, &places).inspect_err(|_| self.done(number, 0))
    }

    fn done(&self, number: u64, landed: u64) {
        self.shared.step(Event::Done(self.client, number, landed));
    }

    fn look(&mut self, number: u64, span: Span) -> Result<(), CommError> {
        let places = match self.enter(number, false) {
            Ok(places) => places,
            Err(no) => return self.refuse(no),
        };
        let fits = span.bytes <= DATA_BYTES_MAX && places.look(span, |_| Ok::<(), ()>(())).is_some();
        let sent = if fits { self.send(&places, span, 0) } else { self.refuse(No::Outside) };
        self.done(number, 0);
        sent
    }

    /// Nothing is answered: who commits hears of what went wrong.
    fn land(&mut self, number: u64, span: Span, data: u64) -> Result<(), CommError> {
        let Ok(places) = self.enter(number, true) else { return self.line.skip(data) };
        let Self { line, .. } = self;
        let filled = if data == span.bytes { places.fill(span, |bytes| line.receive(bytes)) } else { None };
        let landed = if matches!(filled, Some(Ok(()))) { data } else { 0 };
        self.done(number, landed);
        filled.unwrap_or_else(|| self.line.skip(data))
    }

    /// Hands a region's memory itself to a client on this host that has its key.
    fn map(&mut self, region: u64) -> Result<(), CommError> {
        let page = {
            let state = locked(&self.shared.state);
            state.may(self.client, region).then(|| state.region(region).map(|found| found.page)).flatten()
        };
        let extent = self.shared.extent(region).filter(|_| self.line.is_local());
        let (Some(page), Some(extent)) = (page, extent) else { return self.refuse(No::Unknown) };
        self.line.say(Reply::Mapped { bytes: extent.bytes(), page }.encode())?;
        self.line.send_file(extent.file())
    }
}

/// The next message, and how much data follows.
fn hear(line: &mut Line, limit: Duration) -> Result<(Message, u64), CommError> {
    let fields = |kind, length: usize| {
        let fields = Message::fields(kind)?;
        (Message::has_data(kind) || fields == length).then_some(fields)
    };
    let Head { kind, fields, data } = line.hear(limit, fields)?;
    let message = Message::decode(kind, &fields).map_err(|what| line.talk.violation(what))?;
    Ok((message, data))
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        locked(&self.shared.mail).remove(&self.number);
        let mut clients = locked(&self.shared.clients);
        let is_last = clients.get_mut(&self.secret).is_some_and(|(_, connections)| {
            *connections -= 1;
            *connections == 0
        });
        if is_last {
            clients.remove(&self.secret);
            drop(clients);
            self.shared.step(Event::Left(self.client));
        }
    }
}
