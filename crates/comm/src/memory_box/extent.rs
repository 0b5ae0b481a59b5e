//! The memory of a region, at its box and where it is mapped: the only place of the memory box that holds pointers.
//!
//! Nothing here says who may write when. `state.rs` does: a place that is a page or that anybody looks at is not written,
//! and a draft's places belong to whoever has the draft, or to the box once it is committed. What is done with memory is
//! done with places that an answer of the box or a job has named, which its callers are handed here.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};

use rustix::io::retry_on_intr;

use super::state::{How, Job};
use super::talk::Span;
use crate::transport::shm::memory::Memory;

/// Memory of a region: a file without a name, of which only pages that were taken exist.
#[derive(Debug)]
pub(super) struct Extent {
    memory: Memory,
    file: OwnedFd,
    bytes: u64,
    /// Places that the system has given memory for, which stay as long as the region.
    ensured: Mutex<BTreeSet<u32>>,
}

fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

/// One stretch of a span: where it is in the extent, and how long it is.
type Run = (usize, usize);

/// A span of places as stretches that lie together.
fn runs(places: &[u32], page: u64, span: Span) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (nth, &place) in places.iter().enumerate() {
        let covered = span.of_page(page, nth);
        let (start, length) =
            ((u64::from(place) * page + covered.start) as usize, (covered.end - covered.start) as usize);
        match runs.last_mut() {
            Some(last) if last.0 + last.1 == start => last.1 += length,
            _ => runs.push((start, length)),
        }
    }
    runs
}

impl Extent {
    /// Room for so many bytes, none of which takes memory yet. Nobody can make it smaller.
    pub fn create(bytes: u64) -> rustix::io::Result<Self> {
        let file = memfd_create("paceline-region", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes)?;
        fcntl_add_seals(&file, seals())?;
        let memory = Memory::map(&file, 0, bytes as usize)?;
        Ok(Self { memory, file, bytes, ensured: Mutex::default() })
    }

    /// The memory that a box has sent: mapped only if it cannot shrink, since touching what is gone would end this process.
    pub fn open(file: OwnedFd, bytes: u64) -> Option<Self> {
        let sealed = fcntl_get_seals(&file).is_ok_and(|found| found.contains(seals()));
        let whole = fstat(&file).is_ok_and(|about| about.st_size as u64 == bytes && bytes > 0);
        let memory = (sealed && whole).then(|| Memory::map(&file, 0, bytes as usize).ok()).flatten()?;
        Some(Self { memory, file, bytes, ensured: Mutex::default() })
    }

    /// To be handed over.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Its length.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Has the system give memory for places now, rather than end the process when they are touched.
    pub fn ensure(&self, places: &[u32], page: u64) -> rustix::io::Result<()> {
        let mut ensured = self.ensured.lock().unwrap_or_else(PoisonError::into_inner);
        let new: Vec<u32> = places.iter().copied().filter(|place| !ensured.contains(place)).collect();
        let all = Span { at: 0, bytes: new.len() as u64 * page };
        for (start, length) in runs(&new, page, all) {
            retry_on_intr(|| fallocate(&self.file, FallocateFlags::empty(), start as u64, length as u64))?;
        }
        ensured.extend(new);
        Ok(())
    }
}

/// Places that an answer of the box has given: of a view, to be looked at, or of a draft, to be filled.
#[derive(Clone, Debug)]
pub(super) struct Places {
    extent: Arc<Extent>,
    page: u64,
    /// What the places are of.
    span: Span,
    places: Arc<[u32]>,
}

impl Places {
    /// As an answer says; none if they are not inside of the extent.
    pub fn new(extent: &Arc<Extent>, page: u64, span: Span, places: &Arc<[u32]>) -> Option<Self> {
        let end = span.at.checked_add(span.bytes)?;
        let pages = end.div_ceil(page) - span.at / page;
        let inside = |&place: &u32| (u64::from(place) + 1).checked_mul(page).is_some_and(|end| end <= extent.bytes);
        let fits = pages == places.len() as u64 && places.iter().all(inside);
        fits.then(|| Self { extent: Arc::clone(extent), page, span, places: Arc::clone(places) })
    }

    /// Stretches of a part of the span; none if it is no part of it.
    fn part(&self, part: Span) -> Option<Vec<Run>> {
        let end = part.at.checked_add(part.bytes)?;
        if part.bytes == 0 || part.at < self.span.at || end > self.span.at + self.span.bytes {
            return None;
        }
        let first = (part.at / self.page - self.span.at / self.page) as usize;
        let last = (end.div_ceil(self.page) - self.span.at / self.page) as usize;
        Some(runs(&self.places[first..last], self.page, part))
    }

    /// Shows the bytes of a part, stretch by stretch; `None` if it is no part.
    pub fn look<E>(&self, part: Span, mut show: impl FnMut(&[u8]) -> Result<(), E>) -> Option<Result<(), E>> {
        let runs = self.part(part)?;
        Some(runs.into_iter().try_for_each(|(start, length)| {
            // SAFETY: nobody writes places that somebody looks at, which is what a view is.
            show(unsafe { self.extent.memory.view::<u8>(start, length) })
        }))
    }

    /// Has the bytes of a part filled, stretch by stretch; `None` if it is no part.
    pub fn fill<E>(&self, part: Span, mut fill: impl FnMut(&mut [u8]) -> Result<(), E>) -> Option<Result<(), E>> {
        let runs = self.part(part)?;
        Some(runs.into_iter().try_for_each(|(start, length)| {
            // SAFETY: a draft's places are nobody else's until it is committed. Parts of it that come by several connections
            // are apart, or what is there in the end is one of those that were sent.
            fill(unsafe { self.extent.memory.bytes_mut(start, length) })
        }))
    }
}

/// Does what a job says, and tells the number that was counted up, as it was. `source` is the other region of a sum.
pub(super) fn compute(job: &Job, target: &Extent, source: Option<&Extent>) -> i64 {
    let mut before = 0;
    let page = job.page as usize;
    for (nth, &(old, new)) in job.places.iter().enumerate() {
        let covered = job.covered(nth);
        let (start, end) = (covered.start as usize, covered.end as usize);
        let (old, new) = (old as usize * page, new as usize * page);
        // What is outside of the span stays.
        copy(&target.memory, old, new, start);
        copy(&target.memory, old + end, new + end, page - end);
        match job.how {
            How::Replace => {}
            How::Add(scale) => add_draft(&target.memory, (old + start, new + start), end - start, scale),
            How::Accumulate { span, ref places, page: of_source, scale, .. } => {
                let Some(source) = source else { continue };
                let begin = span.at + ((job.span.at / job.page + nth as u64) * job.page + covered.start - job.span.at);
                let part = Span { at: begin, bytes: covered.end - covered.start };
                let first = (part.at / of_source - span.at / of_source) as usize;
                let mut at = start;
                for (from, length) in runs(pages_from(places, first, part, of_source), of_source, part) {
                    add(&target.memory, (old + at, new + at), (&source.memory, from), length, scale);
                    at += length;
                }
            }
            How::Count(by) => {
                // SAFETY: a page, which nobody writes.
                let found = unsafe { target.memory.view::<u8>(old + start, 8) };
                before = i64::from_le_bytes(*found.first_chunk().expect("a number has eight bytes"));
                // SAFETY: a draft's place, which is this change's own.
                unsafe { target.memory.write(new + start, &before.wrapping_add(by).to_le_bytes()) };
            }
        }
    }
    before
}

/// The places of a part, from the page where it begins.
fn pages_from(places: &[u32], first: usize, part: Span, page: u64) -> &[u32] {
    let count = ((part.at + part.bytes).div_ceil(page) - part.at / page) as usize;
    &places[first..first + count]
}

fn copy(memory: &Memory, from: usize, to: usize, length: usize) {
    if length > 0 {
        // SAFETY: a page, which nobody writes, and a draft's place, which is this change's own.
        unsafe { memory.write(to, memory.view::<u8>(from, length)) };
    }
}

/// new = old + scale · new
fn add_draft(memory: &Memory, (old, new): (usize, usize), length: usize, scale: f32) {
    let count = length / size_of::<f32>();
    // SAFETY: a page, which nobody writes, and a draft's place, which is this change's own.
    let (old, new) = unsafe { (memory.view::<f32>(old, count), memory.view_mut(new, count)) };
    old.iter().zip(new).for_each(|(old, new)| *new = old + scale * *new);
}

/// new = old + scale · source
fn add(target: &Memory, (old, new): (usize, usize), (source, from): (&Memory, usize), length: usize, scale: f32) {
    let count = length / size_of::<f32>();
    // SAFETY: pages, which nobody writes: of the region, and of the view that the change has of the other.
    let (old, added) = unsafe { (target.view::<f32>(old, count), source.view::<f32>(from, count)) };
    // SAFETY: a draft's place, which is this change's own.
    let new = unsafe { target.view_mut(new, count) };
    past_caches::add(old, added, new, scale);
}

/// Writing that goes past the caches: what is written is longer than they are and is read by somebody else, so it need not
/// be read before it is written.
pub(super) mod past_caches {
    /// Numbers that one store takes.
    const LANES: usize = 4;

    /// Shorter pieces are of changes that caches hold.
    const BYTES_MIN: usize = 64 << 10;

    /// new = old + scale · added
    pub fn add(old: &[f32], added: &[f32], new: &mut [f32], scale: f32) {
        assert!(old.len() == new.len() && added.len() == new.len(), "three of one length");
        #[cfg(target_arch = "x86_64")]
        if is_long(new.len(), size_of::<f32>(), new.as_ptr().addr()) {
            use std::arch::x86_64::{_mm_add_ps, _mm_loadu_ps, _mm_mul_ps, _mm_set1_ps, _mm_sfence, _mm_stream_ps};
            // SAFETY: every x86-64 has these instructions; all indices are inside of the three slices, and what is stored
            // to is on a boundary of sixteen bytes. The fence puts these stores before whatever tells of them.
            unsafe {
                let scale = _mm_set1_ps(scale);
                for at in (0..new.len()).step_by(LANES) {
                    let sum = _mm_mul_ps(scale, _mm_loadu_ps(added.as_ptr().add(at)));
                    _mm_stream_ps(new.as_mut_ptr().add(at), _mm_add_ps(_mm_loadu_ps(old.as_ptr().add(at)), sum));
                }
                _mm_sfence();
            }
            return;
        }
        old.iter().zip(added).zip(new).for_each(|((old, added), new)| *new = old + scale * added);
    }

    /// Copies.
    pub fn copy(from: &[u8], to: &mut [u8]) {
        assert_eq!(from.len(), to.len(), "two of one length");
        #[cfg(target_arch = "x86_64")]
        if is_long(to.len() / LANES, LANES, to.as_ptr().addr()) && to.len().is_multiple_of(16) {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
            // SAFETY: as above.
            unsafe {
                for at in (0..to.len()).step_by(16) {
                    let bytes = _mm_loadu_si128(from.as_ptr().add(at).cast::<__m128i>());
                    _mm_stream_si128(to.as_mut_ptr().add(at).cast::<__m128i>(), bytes);
                }
                _mm_sfence();
            }
            return;
        }
        to.copy_from_slice(from);
    }

    #[cfg(target_arch = "x86_64")]
    fn is_long(count: usize, bytes: usize, address: usize) -> bool {
        count * bytes >= BYTES_MIN && count.is_multiple_of(LANES) && address.is_multiple_of(16)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn long_and_short_ones_are_what_a_loop_makes() {
            for count in [0, 1, 7, 16_384, 16_387, 40_000] {
                let numbers = |seed: f32| (0..count).map(|index| seed + index as f32).collect::<Vec<f32>>();
                let (old, added, mut new) = (numbers(0.5), numbers(-3.0), vec![9.0; count]);
                add(&old, &added, &mut new, 0.25);
                let expected: Vec<f32> = old.iter().zip(&added).map(|(old, added)| old + 0.25 * added).collect();
                assert!(new == expected, "{count}");
                let bytes: Vec<u8> = (0..4 * count + 3).map(|index| (index % 251) as u8).collect();
                for length in [bytes.len(), 4 * count] {
                    let mut copied = vec![0; length];
                    copy(&bytes[..length], &mut copied);
                    assert!(copied == bytes[..length]);
                }
            }
        }
    }
}
