//! A region's pages and places: which place is which page, who looks at which place, which are free.

use std::ops::Range;
use std::sync::Arc;

use super::super::talk::{Key, No, Span};
use super::{Client, PAGE_BYTES, VERSIONS_MAX};

/// Bytes of the smallest page.
const PAGE_BYTES_MIN: u64 = 4096;

/// Lent memory.
#[derive(Debug)]
pub struct Region {
    secret: [u8; 16],
    /// Its length, as it was asked for.
    pub bytes: u64,
    /// Bytes of a page.
    pub page: u64,
    /// How often it has changed.
    pub version: u64,
    pub(super) maker: Client,
    pub(super) keeps: bool,
    pub(super) is_freed: bool,
    pub(super) attached: u64,
    /// The place of every page.
    pages: Vec<u32>,
    /// How many look at each place that was ever taken, beside its being a page.
    pins: Vec<u32>,
    /// Whether a place is a page.
    is_page: Vec<bool>,
    free: Vec<u32>,
}

impl Region {
    pub(super) fn new(key: &Key, bytes: u64, maker: Client, keeps: bool) -> Self {
        let page = if bytes >= PAGE_BYTES { PAGE_BYTES } else { bytes.next_multiple_of(PAGE_BYTES_MIN) };
        let pages = bytes.div_ceil(page) as u32;
        Self {
            secret: key.secret,
            bytes,
            page,
            version: 0,
            maker,
            keeps,
            is_freed: false,
            attached: 1,
            pages: (0..pages).collect(),
            pins: vec![0; pages as usize],
            is_page: vec![true; pages as usize],
            free: Vec::new(),
        }
    }

    /// Compares all bytes, so that the time tells nothing.
    pub(super) fn opens_with(&self, key: &Key) -> bool {
        !self.is_freed && self.secret.iter().zip(&key.secret).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }

    /// Bytes of all places that were ever taken.
    pub(super) fn allocated(&self) -> u64 {
        self.pins.len() as u64 * self.page
    }

    /// Bytes of all places that there can be.
    pub fn extent_bytes(&self) -> u64 {
        self.pages.len() as u64 * VERSIONS_MAX * self.page
    }

    /// Places of the pages that it begins with.
    pub fn first_places(&self) -> Range<u32> {
        0..self.pages.len() as u32
    }

    /// The pages that a span touches; none if it is not inside.
    pub(super) fn page_range(&self, span: Span) -> Option<Range<usize>> {
        let end = span.at.checked_add(span.bytes).filter(|&end| end <= self.bytes && span.bytes > 0)?;
        Some((span.at / self.page) as usize..end.div_ceil(self.page) as usize)
    }

    pub(super) fn pages_of(&self, span: Span) -> Option<Arc<[u32]>> {
        Some(self.pages[self.page_range(span)?].into())
    }

    /// Whether two spans touch a page in common.
    pub(super) fn share(&self, one: Span, other: Span) -> bool {
        let (Some(one), Some(other)) = (self.page_range(one), self.page_range(other)) else { return true };
        one.start < other.end && other.start < one.end
    }

    /// So many places that nobody has, if that takes no more memory than there is room.
    pub(super) fn take(&mut self, count: usize, room: u64) -> Result<Arc<[u32]>, No> {
        let new = count.saturating_sub(self.free.len());
        if (self.pins.len() + new) as u64 > self.pages.len() as u64 * VERSIONS_MAX {
            return Err(No::Busy);
        }
        if new as u64 * self.page > room {
            return Err(No::Full);
        }
        let begin = self.pins.len() as u32;
        self.pins.resize(self.pins.len() + new, 0);
        self.is_page.resize(self.pins.len(), false);
        let kept = self.free.split_off(self.free.len() - (count - new));
        // In rising order, so that neighbours in a region are neighbours in memory wherever possible.
        let mut places: Vec<u32> = kept.into_iter().chain(begin..begin + new as u32).collect();
        places.sort_unstable();
        Ok(places.into())
    }

    pub(super) fn give_back(&mut self, places: &[u32]) {
        self.free.extend_from_slice(places);
    }

    pub(super) fn pin(&mut self, places: &[u32]) {
        places.iter().for_each(|&place| self.pins[place as usize] += 1);
    }

    pub(super) fn unpin(&mut self, places: &[u32]) {
        for &place in places {
            self.pins[place as usize] -= 1;
            self.free_if_unused(place);
        }
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.pins.iter().any(|&pins| pins > 0)
    }

    /// Places become the pages of a span.
    pub(super) fn replace(&mut self, span: Span, places: &[u32]) {
        let Some(range) = self.page_range(span) else { return };
        for (page, &place) in range.zip(places) {
            let before = std::mem::replace(&mut self.pages[page], place);
            self.is_page[before as usize] = false;
            self.is_page[place as usize] = true;
            self.free_if_unused(before);
        }
    }

    fn free_if_unused(&mut self, place: u32) {
        if self.pins[place as usize] == 0 && !self.is_page[place as usize] {
            self.free.push(place);
        }
    }
}
