//! Changes, one after the other where they touch the same pages: from what was asked to what the pages become.

use std::sync::Arc;

use super::super::talk::{Answer, No, Span};
use super::{Action, Call, Change, Client, Held, How, Job, MemoryBox, Waiting};

impl MemoryBox {
    /// Makes changes of the drafts that are whole.
    pub(super) fn begin_commits(&mut self) {
        for waiting in std::mem::take(&mut self.waiting) {
            let Waiting { call, client, draft, bytes, scale } = waiting;
            let Some(held) = self.drafts.get(&draft) else {
                self.actions.push(Action::Answer(call, Answer::No(No::Unknown)));
                continue;
            };
            if held.landed < bytes {
                self.waiting.push(waiting);
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
        let draft = self.places(client, target, span)?;
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
        let Change { call, client, region, span, ref draft, ref how, .. } = self.changes[index];
        let (draft, mut how) = (Arc::clone(draft), how.clone());
        let gone = match self.regions.get(&region) {
            Some(found) if !found.is_freed => None,
            _ => Some(No::Unknown),
        };
        if let (None, How::Accumulate { source, span, places, .. }) = (gone, &mut how) {
            match self.open(client, *source, *span) {
                Ok(Answer::Held { number, places: found, .. }) => {
                    *places = found;
                    self.changes[index].source = Some(number);
                }
                Ok(_) => {}
                Err(no) => return self.refuse(index, no),
            }
        }
        if let Some(no) = gone {
            return self.refuse(index, no);
        }
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
        if let Some(view) = change.source {
            self.close_view(view);
        }
        let Some(region) = self.regions.get_mut(&change.region) else { return };
        region.replace(change.span, &change.draft);
        region.version += 1;
        let version = region.version;
        self.actions.push(Action::Answer(call, Answer::Done { version }));
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
