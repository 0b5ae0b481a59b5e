//! Changes, one after the other where they touch the same pages: from what was asked to what the pages become.

use std::sync::Arc;
use std::time::Duration;

use super::super::talk::{Answer, No, Span};
use super::{Action, Call, Change, Client, Held, How, Job, MemoryBox, Waiting};

impl MemoryBox {
    /// Makes changes of the drafts that are whole, and that nobody fills any more.
    pub(super) fn begin_commits(&mut self, now: Duration) {
        for waiting in std::mem::take(&mut self.waiting) {
            let Waiting { call, client, draft, bytes, scale, until } = waiting;
            let Some(held) = self.drafts.get(&draft) else {
                self.actions.push(Action::Answer(call, Answer::No(No::Unknown)));
                continue;
            };
            if held.users > 0 || (held.landed < bytes && now < until) {
                self.waiting.push(waiting);
                continue;
            }
            if held.landed < bytes || held.closes {
                self.drop_draft(draft);
                self.actions.push(Action::Answer(call, Answer::No(No::Unknown)));
                continue;
            }
            let how = scale.map_or(How::Replace, How::Add);
            let Some(Held { region, span, places, .. }) = self.drafts.remove(&draft) else { continue };
            self.let_go(client);
            if self.own(client, region).is_err() {
                self.give_back(region, &places);
                self.reap(region);
                self.actions.push(Action::Answer(call, Answer::No(No::Unknown)));
                continue;
            }
            let change = Change { call, client, region, span, draft: places, how, source: None, runs: false };
            self.changes.push_back(change);
        }
    }

    pub(super) fn accumulate(
        &mut self,
        (client, call): (Client, Call),
        (target, span): (u64, Span),
        (source, at): (u64, u64),
        scale: f32,
    ) -> Result<(), No> {
        let from = Span { at, bytes: span.bytes };
        let page = self.own(client, source)?.page;
        // The pages are those at the time when the change begins: then the view is opened again.
        if self.own(client, source)?.page_range(from).is_none() {
            return Err(No::Outside);
        }
        if !span.is_of_floats() || !from.is_of_floats() {
            return Err(No::Outside);
        }
        self.own(client, target)?.page_range(span).ok_or(No::Outside)?;
        // So are the places for what they become.
        let draft = Arc::from([]);
        let how = How::Accumulate { source, span: from, places: Arc::from([]), page, scale };
        let region = target;
        self.changes.push_back(Change { call, client, region, span, draft, how, source: None, runs: false });
        Ok(())
    }

    /// Begins every change before which no other of the same pages stands.
    pub(super) fn begin_changes(&mut self) {
        let mut index = 0;
        while index < self.changes.len() {
            let change = &self.changes[index];
            let overlaps = |earlier: &Change| {
                earlier.region == change.region
                    && self.regions.get(&change.region).is_some_and(|region| region.share(earlier.span, change.span))
            };
            if change.runs || self.changes.range(..index).any(overlaps) {
                index += 1;
                continue;
            }
            if self.begin(index) {
                index += 1;
            }
        }
    }

    /// Whether the change at an index is still there.
    fn begin(&mut self, index: usize) -> bool {
        let Change { call, client, region, span, ref how, .. } = self.changes[index];
        let mut how = how.clone();
        if self.regions.get(&region).is_none_or(|found| found.is_freed) {
            return self.refuse(index, No::Unknown);
        }
        if self.changes[index].draft.is_empty() {
            match self.places(client, region, span) {
                Ok(places) => self.changes[index].draft = places,
                Err(no) => return self.refuse(index, no),
            }
        }
        if let How::Accumulate { source, span, places, .. } = &mut how {
            match self.open(client, *source, *span) {
                Ok(Answer::Held { number, places: found, .. }) => {
                    *places = found;
                    self.changes[index].source = Some(number);
                    // Its client cannot close what it has not opened.
                    self.views.get_mut(&number).iter_mut().for_each(|held| held.users = 1);
                }
                Ok(_) => {}
                Err(no) => return self.refuse(index, no),
            }
        }
        let draft = Arc::clone(&self.changes[index].draft);
        let found = &self.regions[&region];
        let pages = found.pages_of(span).unwrap_or_else(|| Arc::from([]));
        let places = pages.iter().copied().zip(draft.iter().copied()).collect();
        let job = Job { region, span, page: found.page, places, how };
        self.changes[index].runs = true;
        if job.is_nothing() {
            self.install(call);
            return false;
        }
        self.actions.push(Action::Run(call, job));
        true
    }

    fn refuse(&mut self, index: usize, no: No) -> bool {
        if let Some(change) = self.changes.remove(index) {
            self.give_back(change.region, &change.draft);
            self.reap(change.region);
            self.actions.push(Action::Answer(change.call, Answer::No(no)));
        }
        false
    }

    /// A draft becomes the pages.
    pub(super) fn install(&mut self, call: Call) {
        let Some(index) = self.changes.iter().position(|change| change.call == call && change.runs) else { return };
        let Some(change) = self.changes.remove(index) else { return };
        let Some(region) = self.regions.get_mut(&change.region) else { return };
        region.replace(change.span, &change.draft);
        region.version += 1;
        let version = region.version;
        self.actions.push(Action::Answer(call, Answer::Done { version }));
        // The region itself may be what was added, and be given back with the last that holds it.
        if let Some(view) = change.source {
            self.close_view(view);
        }
        self.reap(change.region);
    }

    /// A change comes to nothing.
    pub(super) fn fail(&mut self, call: Call) {
        let Some(index) = self.changes.iter().position(|change| change.call == call && change.runs) else { return };
        if let Some(view) = self.changes[index].source {
            self.close_view(view);
        }
        self.refuse(index, No::Memory);
    }
}
