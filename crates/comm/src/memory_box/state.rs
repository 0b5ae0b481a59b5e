//! Who has lent what, and whose turn it is: the memory box without memory, sockets or threads.
//!
//! A region is a list of pages, and a page is at a place of the region's memory. **A place is never written while it is a
//! page or anybody looks at it**: whoever changes a region gets places of its own (a draft), and when they are filled
//! they become the pages, all at once. Who reads holds on to the places that were the pages when it began (a view). So no
//! reader sees half of a change or waits for one, and a client that dies in the middle of a write has changed nothing.
//!
//! Changes of the same pages are made one after the other, in the order in which they were asked for; others do not wait.
//! What is to be computed for a change is a [`Job`], which the caller does wherever it likes and then reports.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::talk::{Answer, Ask, Key, No, Span, Usage};

mod changes;
mod region;
#[cfg(test)]
mod tests;

pub use region::Region;

/// Bytes of a page, of regions that are not smaller.
pub const PAGE_BYTES: u64 = 64 << 10;

/// How often all pages of a region may exist: as they are, as they are becoming, and as others still look at them.
pub const VERSIONS_MAX: u64 = 8;

/// Views and drafts that a client may hold.
const HELD_MAX: usize = 1024;

/// How long a commit waits for bytes that travel by other connections.
const LANDING_MAX: Duration = Duration::from_secs(60);

/// The longest region: its places, mapped, fit what a process may address.
const REGION_BYTES_MAX: u64 = 1 << 43;

/// Changes and watches that wait, of all clients.
const WAITING_MAX: usize = 1 << 16;

/// What may be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory of all regions, with the places of their drafts and views.
    pub bytes_max: u64,
    /// Bytes of the regions that one client has made.
    pub client_bytes_max: u64,
    /// Regions.
    pub regions_max: usize,
}

/// A client: all connections of one process.
pub type Client = u64;

/// Something that was asked, and will be answered once.
pub type Call = u64;

/// What happens to a box.
#[derive(Clone, Debug)]
pub enum Event {
    /// A client is here.
    Came(Client),
    /// It is gone, with all that it held.
    Left(Client),
    /// It asks for something.
    Asked(Client, Call, Ask),
    /// Somebody no longer reads a view, or fills a draft, of which so many bytes more have come in.
    Done(Client, u64, u64),
    /// What a job says has been done.
    Computed(Call),
    /// It could not be: there is no memory for it.
    Failed(Call),
    /// Time has passed.
    Passed,
}

/// What the caller does.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Answers.
    Answer(Call, Answer),
    /// Computes, for the change that was asked for, and reports.
    Run(Call, Job),
    /// Gives the memory of a region back.
    Discard(u64),
}

/// What a change makes of the pages: written to the places of a draft.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The region.
    pub region: u64,
    /// What changes.
    pub span: Span,
    /// Bytes of a page.
    pub page: u64,
    /// The pages of the span as they are, and the places where they are to be as they become.
    pub places: Vec<(u32, u32)>,
    /// What they become.
    pub how: How,
}

/// What becomes of the bytes of a span. Bytes of its pages outside of it stay.
#[derive(Clone, Debug, PartialEq)]
pub enum How {
    /// What is in the draft.
    Replace,
    /// What they were, and what is in the draft, so many times, as `f32`.
    Add(f32),
    /// What they were, and those of another region, so many times, as `f32`.
    Accumulate {
        /// The other region.
        source: u64,
        /// Its span.
        span: Span,
        /// Its pages there.
        places: Arc<[u32]>,
        /// Bytes of its pages.
        page: u64,
        /// How often they are added.
        scale: f32,
    },
    /// One number of 64 bits, and this.
    Count(i64),
}

/// A view or a draft.
#[derive(Debug)]
struct Held {
    client: Client,
    region: u64,
    span: Span,
    places: Arc<[u32]>,
    /// Bytes that have come in, of a draft.
    landed: u64,
    /// How many connections and jobs are at it: as long as there are any, its places are nobody else's.
    users: u32,
    /// Whether it is given back when they are through.
    closes: bool,
}

/// A change that was asked for and has not become the pages.
#[derive(Debug)]
struct Change {
    call: Call,
    client: Client,
    region: u64,
    span: Span,
    draft: Arc<[u32]>,
    how: How,
    /// A view of the other region.
    source: Option<u64>,
    runs: bool,
}

/// A commit that waits for bytes which travel by other connections.
#[derive(Debug)]
struct Waiting {
    call: Call,
    client: Client,
    draft: u64,
    bytes: u64,
    scale: Option<f32>,
    /// Not longer than this.
    until: Duration,
}

/// One who waits for a version.
#[derive(Debug)]
struct Watch {
    call: Call,
    client: Client,
    region: u64,
    version: u64,
    until: Duration,
}

#[derive(Debug, Default)]
struct Guest {
    regions: BTreeSet<u64>,
    /// Bytes of regions that it made and that are there.
    bytes: u64,
    held: usize,
}

/// A box.
#[derive(Debug)]
pub struct MemoryBox {
    limits: Limits,
    keys: BTreeMap<[u8; 32], u64>,
    regions: BTreeMap<u64, Region>,
    clients: BTreeMap<Client, Guest>,
    views: BTreeMap<u64, Held>,
    drafts: BTreeMap<u64, Held>,
    changes: VecDeque<Change>,
    waiting: Vec<Waiting>,
    watches: Vec<Watch>,
    /// Counts regions, views and drafts.
    named: u64,
    used: u64,
    actions: Vec<Action>,
}

impl MemoryBox {
    /// With nothing lent.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            keys: BTreeMap::new(),
            regions: BTreeMap::new(),
            clients: BTreeMap::new(),
            views: BTreeMap::new(),
            drafts: BTreeMap::new(),
            changes: VecDeque::new(),
            waiting: Vec::new(),
            watches: Vec::new(),
            named: 0,
            used: 0,
            actions: Vec::new(),
        }
    }

    /// What is lent.
    pub fn usage(&self) -> Usage {
        Usage {
            regions: self.regions.len() as u64,
            clients: self.clients.len() as u64,
            used: self.used,
            bytes_max: self.limits.bytes_max,
        }
    }

    /// A region.
    pub fn region(&self, region: u64) -> Option<&Region> {
        self.regions.get(&region)
    }

    /// The places of a client's view, or of its draft, for somebody who looks at them, or fills them, until it says
    /// [`Event::Done`].
    pub fn enter(&mut self, client: Client, number: u64, is_draft: bool) -> Option<(u64, Span, Arc<[u32]>)> {
        let all = if is_draft { &mut self.drafts } else { &mut self.views };
        let held = all.get_mut(&number).filter(|held| held.client == client && !held.closes)?;
        held.users += 1;
        Some((held.region, held.span, Arc::clone(&held.places)))
    }

    fn leave_held(&mut self, client: Client, number: u64, landed: u64) {
        let is_draft = self.drafts.contains_key(&number);
        let all = if is_draft { &mut self.drafts } else { &mut self.views };
        let Some(held) = all.get_mut(&number).filter(|held| held.client == client) else { return };
        held.users = held.users.saturating_sub(1);
        held.landed += landed;
        if held.closes && held.users == 0 {
            if is_draft { self.drop_draft(number) } else { self.close_view(number) }
        }
    }

    /// Whether a client has the key of a region.
    pub fn may(&self, client: Client, region: u64) -> bool {
        self.own(client, region).is_ok()
    }

    /// What has to be done because of an event.
    pub fn step(&mut self, event: Event, now: Duration) -> Vec<Action> {
        match event {
            Event::Came(client) => drop(self.clients.entry(client).or_default()),
            Event::Left(client) => self.leave(client),
            Event::Asked(client, call, ask) => {
                if let Some(answer) = self.ask(client, call, ask, now).unwrap_or_else(|no| Some(Answer::No(no))) {
                    self.actions.push(Action::Answer(call, answer));
                }
            }
            Event::Done(client, number, landed) => self.leave_held(client, number, landed),
            Event::Computed(call) => self.install(call),
            Event::Failed(call) => self.fail(call),
            Event::Passed => {}
        }
        self.begin_commits(now);
        self.begin_changes();
        self.answer_watches(now);
        std::mem::take(&mut self.actions)
    }

    fn name(&mut self) -> u64 {
        self.named += 1;
        self.named
    }

    /// An answer, if there is one at once.
    fn ask(&mut self, client: Client, call: Call, ask: Ask, now: Duration) -> Result<Option<Answer>, No> {
        if !self.clients.contains_key(&client) {
            return Err(No::Stranger);
        }
        let waiting = self.changes.len() + self.waiting.len() + self.watches.len();
        if waiting >= WAITING_MAX {
            return Err(No::Busy);
        }
        Ok(Some(match ask {
            Ask::Create { key, bytes, keeps } => self.create(client, &key, bytes, keeps)?,
            Ask::Attach { key } => self.attach(client, &key)?,
            Ask::Free { region } => {
                self.own(client, region)?;
                self.forget(region);
                Answer::Done { version: 0 }
            }
            Ask::Open { region, span } => self.open(client, region, span)?,
            Ask::Draft { region, span } => self.draft(client, region, span)?,
            Ask::Close { held } => self.close(client, held)?,
            Ask::Commit { draft, bytes, scale } => {
                let held = self.drafts.get(&draft).filter(|held| held.client == client).ok_or(No::Unknown)?;
                if scale.is_some() && !held.span.is_of_floats() {
                    return Err(No::Outside);
                }
                self.waiting.push(Waiting { call, client, draft, bytes, scale, until: now + LANDING_MAX });
                return Ok(None);
            }
            Ask::Accumulate { target, source, from, scale } => {
                self.accumulate((client, call), target, (source, from), scale)?;
                return Ok(None);
            }
            Ask::Count { at, .. } if !at.is_multiple_of(8) => return Err(No::Outside),
            Ask::Count { region, at, by } => {
                let span = Span { at, bytes: 8 };
                self.own(client, region)?.page_range(span).ok_or(No::Outside)?;
                let draft = Arc::from([]);
                let how = How::Count(by);
                self.changes.push_back(Change { call, client, region, span, draft, how, source: None, runs: false });
                return Ok(None);
            }
            Ask::Notify { region } => {
                let found = self.own_mut(client, region)?;
                found.version += 1;
                Answer::Done { version: found.version }
            }
            Ask::Watch { region, version, limit } => {
                self.own(client, region)?;
                self.watches.push(Watch { call, client, region, version, until: now.saturating_add(limit) });
                return Ok(None);
            }
            Ask::Usage => Answer::Usage(self.usage()),
        }))
    }

    /// A region that a client has the key of.
    fn own(&self, client: Client, region: u64) -> Result<&Region, No> {
        let attached = self.clients.get(&client).is_some_and(|guest| guest.regions.contains(&region));
        self.regions.get(&region).filter(|found| attached && !found.is_freed).ok_or(No::Unknown)
    }

    fn own_mut(&mut self, client: Client, region: u64) -> Result<&mut Region, No> {
        self.own(client, region)?;
        self.regions.get_mut(&region).ok_or(No::Unknown)
    }

    fn create(&mut self, client: Client, key: &Key, bytes: u64, keeps: bool) -> Result<Answer, No> {
        let limits = self.limits;
        if self.keys.contains_key(&key.name) {
            return Err(No::Taken);
        }
        let room = limits.bytes_max.min(REGION_BYTES_MAX).saturating_sub(self.used);
        if bytes == 0 || bytes > room || self.regions.len() >= limits.regions_max {
            return Err(No::Full);
        }
        let made = self.clients.get(&client).map_or(0, |guest| guest.bytes);
        if made.saturating_add(bytes) > limits.client_bytes_max {
            return Err(No::Quota);
        }
        let region = Region::new(key, bytes, client, keeps);
        if self.used + region.allocated() > limits.bytes_max {
            return Err(No::Full);
        }
        let number = self.name();
        let guest = self.clients.get_mut(&client).ok_or(No::Stranger)?;
        guest.bytes += bytes;
        guest.regions.insert(number);
        self.used += region.allocated();
        self.keys.insert(key.name, number);
        self.regions.insert(number, region);
        Ok(Answer::Region { region: number, bytes, version: 0 })
    }

    /// Whoever has no key and whoever has a wrong one are told the same.
    fn attach(&mut self, client: Client, key: &Key) -> Result<Answer, No> {
        let region = *self.keys.get(&key.name).ok_or(No::Unknown)?;
        let found = self.regions.get_mut(&region).filter(|found| found.opens_with(key)).ok_or(No::Unknown)?;
        let guest = self.clients.get_mut(&client).ok_or(No::Stranger)?;
        if guest.regions.insert(region) {
            found.attached += 1;
        }
        Ok(Answer::Region { region, bytes: found.bytes, version: found.version })
    }

    fn open(&mut self, client: Client, region: u64, span: Span) -> Result<Answer, No> {
        let found = self.own_mut(client, region)?;
        let places = found.pages_of(span).ok_or(No::Outside)?;
        let version = found.version;
        let view = self.hold(client, region, span, places, true)?;
        Ok(Answer::Held { number: view.0, version, places: view.1 })
    }

    fn draft(&mut self, client: Client, region: u64, span: Span) -> Result<Answer, No> {
        let places = self.places(client, region, span)?;
        match self.hold(client, region, span, Arc::clone(&places), false) {
            Ok((number, places)) => Ok(Answer::Held { number, version: 0, places }),
            Err(no) => {
                self.give_back(region, &places);
                Err(no)
            }
        }
    }

    fn hold(
        &mut self,
        client: Client,
        region: u64,
        span: Span,
        places: Arc<[u32]>,
        is_view: bool,
    ) -> Result<(u64, Arc<[u32]>), No> {
        let guest = self.clients.get_mut(&client).ok_or(No::Stranger)?;
        if guest.held >= HELD_MAX {
            return Err(No::Busy);
        }
        guest.held += 1;
        let number = self.name();
        let held = Held { client, region, span, places: Arc::clone(&places), landed: 0, users: 0, closes: false };
        if is_view {
            self.regions.get_mut(&region).ok_or(No::Unknown)?.pin(&places);
            self.views.insert(number, held);
        } else {
            self.drafts.insert(number, held);
        }
        Ok((number, places))
    }

    /// New places for the pages of a span.
    fn places(&mut self, client: Client, region: u64, span: Span) -> Result<Arc<[u32]>, No> {
        let room = self.limits.bytes_max - self.used;
        let found = self.own_mut(client, region)?;
        let pages = found.page_range(span).ok_or(No::Outside)?.len();
        let before = found.allocated();
        let places = found.take(pages, room)?;
        let grown = found.allocated() - before;
        self.used += grown;
        Ok(places)
    }

    fn close(&mut self, client: Client, number: u64) -> Result<Answer, No> {
        let is_draft = self.drafts.contains_key(&number);
        let all = if is_draft { &mut self.drafts } else { &mut self.views };
        let held = all.get_mut(&number).filter(|held| held.client == client).ok_or(No::Unknown)?;
        match held.users {
            0 if is_draft => self.drop_draft(number),
            0 => self.close_view(number),
            _ => held.closes = true,
        }
        Ok(Answer::Done { version: 0 })
    }

    fn close_view(&mut self, number: u64) {
        let Some(held) = self.views.remove(&number) else { return };
        self.let_go(held.client);
        if let Some(region) = self.regions.get_mut(&held.region) {
            region.unpin(&held.places);
        }
        self.reap(held.region);
    }

    fn drop_draft(&mut self, number: u64) {
        let Some(held) = self.drafts.remove(&number) else { return };
        self.let_go(held.client);
        self.give_back(held.region, &held.places);
        self.reap(held.region);
    }

    fn let_go(&mut self, client: Client) {
        if let Some(guest) = self.clients.get_mut(&client) {
            guest.held -= 1;
        }
    }

    fn give_back(&mut self, region: u64, places: &[u32]) {
        if let Some(region) = self.regions.get_mut(&region) {
            region.give_back(places);
        }
    }

    fn answer_watches(&mut self, now: Duration) {
        let regions = &self.regions;
        let actions = &mut self.actions;
        self.watches.retain(|watch| {
            let answer = match regions.get(&watch.region).filter(|region| !region.is_freed) {
                None => Answer::No(No::Unknown),
                Some(region) if region.version >= watch.version || now >= watch.until => {
                    Answer::Done { version: region.version }
                }
                Some(_) => return true,
            };
            actions.push(Action::Answer(watch.call, answer));
            false
        });
    }

    /// A client is gone: what it held is given back, what it had begun to write was never there. What the box computes
    /// for it already is finished.
    fn leave(&mut self, client: Client) {
        let Some(guest) = self.clients.remove(&client) else { return };
        self.waiting.retain(|waiting| waiting.client != client);
        self.watches.retain(|watch| watch.client != client);
        let computed: Vec<u64> = self.changes.iter().filter_map(|change| change.source).collect();
        let of = |held: &BTreeMap<u64, Held>| -> Vec<u64> {
            held.iter().filter(|(_, held)| held.client == client).map(|(number, _)| *number).collect()
        };
        let views = of(&self.views);
        views.into_iter().filter(|view| !computed.contains(view)).for_each(|view| self.close_view(view));
        of(&self.drafts).into_iter().for_each(|draft| self.drop_draft(draft));
        let (gone, left) =
            std::mem::take(&mut self.changes).into_iter().partition(|change| change.client == client && !change.runs);
        self.changes = left;
        let gone: VecDeque<Change> = gone;
        gone.iter().for_each(|change| self.give_back(change.region, &change.draft));
        for region in guest.regions {
            let Some(found) = self.regions.get_mut(&region) else { continue };
            found.attached -= 1;
            if found.attached == 0 && !found.keeps {
                self.forget(region);
            }
        }
    }

    /// The key opens nothing any more, and the memory goes once nobody looks at it.
    fn forget(&mut self, region: u64) {
        let Some(found) = self.regions.get_mut(&region) else { return };
        if !std::mem::replace(&mut found.is_freed, true) {
            self.keys.retain(|_, of| *of != region);
            let maker = found.maker;
            let bytes = found.bytes;
            if let Some(guest) = self.clients.get_mut(&maker) {
                guest.bytes -= bytes;
            }
        }
        self.reap(region);
    }

    fn reap(&mut self, region: u64) {
        let idle = |found: &Region| found.is_freed && !found.is_pinned();
        if !self.regions.get(&region).is_some_and(idle)
            || self.changes.iter().any(|change| change.region == region)
            || self.drafts.values().any(|held| held.region == region)
        {
            return;
        }
        if let Some(found) = self.regions.remove(&region) {
            self.used -= found.allocated();
            for guest in self.clients.values_mut() {
                guest.regions.remove(&region);
            }
            self.actions.push(Action::Discard(region));
        }
    }
}

impl Job {
    /// Whether the draft is already what the pages become.
    fn is_nothing(&self) -> bool {
        let Span { at, bytes } = self.span;
        self.how == How::Replace && at.is_multiple_of(self.page) && bytes.is_multiple_of(self.page)
    }

    /// The bytes of the nth page that the span covers.
    pub fn covered(&self, nth: usize) -> Range<u64> {
        self.span.of_page(self.page, nth)
    }
}
