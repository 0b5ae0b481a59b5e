//! Arrays that all ranks of a space have together, each a block of rows. Made by [`super::Space::array`]; where elements are is
//! said by [`super::layout`], and what other ranks do with a block stands in [`super::blocks`].

use std::cell::{Ref, RefCell, RefMut};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use bytemuck::cast_slice;

use super::active::Active;
use super::blocks::{ACCUMULATE, Block, Blocks, Element, FETCH_ADD, GET, PUT, Target, count_max, from_bytes};
use super::layout::Layout;
use super::link::Request;
use super::message::Message;
use super::pending::{Pending, Promise};
use super::together::{Arrivals, meet};
use crate::error::CommError;
use crate::rank::Rank;

/// An array whose elements all ranks can reach. Clones are the same array.
///
/// Between two ranks operations happen in the order in which they were asked for. A get or a put of many elements is
/// several messages, between which others' may happen; a message is whole. Of three ranks nothing is said but by barriers.
pub struct Global<T> {
    active: Active,
    blocks: Rc<Blocks>,
    arrivals: Rc<RefCell<Arrivals>>,
    array: u64,
    layout: Rc<Layout>,
    block: Rc<Block<T>>,
}

impl<T> Clone for Global<T> {
    fn clone(&self) -> Self {
        Self {
            active: self.active.clone(),
            blocks: Rc::clone(&self.blocks),
            arrivals: Rc::clone(&self.arrivals),
            array: self.array,
            layout: Rc::clone(&self.layout),
            block: Rc::clone(&self.block),
        }
    }
}

impl<T: Element> fmt::Debug for Global<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { array, layout, .. } = self;
        f.debug_struct("Global").field("array", array).field("shape", &layout.shape()).finish_non_exhaustive()
    }
}

/// Answers that come one by one, and what is made of all of them.
struct Rest<W> {
    left: usize,
    whole: W,
    promise: Promise<W>,
}

/// That, until all have come or one has failed.
type Shared<W> = Rc<RefCell<Option<Rest<W>>>>;

impl<W: 'static> Rest<W> {
    /// One answer less is missing, which is `good` or an error.
    fn step(shared: &Shared<W>, from: Option<Rank>, outcome: Result<impl FnOnce(&mut W), CommError>) {
        let mut place = shared.borrow_mut();
        let Some(mut rest) = place.take() else { return };
        from.inspect(|&rank| rest.promise.paid(rank));
        rest.left -= 1;
        match outcome {
            Err(error) => rest.promise.complete(Err(error)),
            Ok(good) => {
                good(&mut rest.whole);
                match rest.left {
                    0 => rest.promise.complete(Ok(rest.whole)),
                    _ => *place = Some(rest),
                }
            }
        }
    }
}

impl<T: Element> Global<T> {
    pub(super) fn new(
        active: &Active,
        (blocks, arrivals): (&Rc<Blocks>, &Rc<RefCell<Arrivals>>),
        layout: Layout,
        values: Vec<T>,
    ) -> Self {
        let own = layout.block(active.rank());
        assert_eq!(own.len(), values.len(), "a rank brings the values of its block");
        let block = Rc::new(Block { start: own.start, values: RefCell::new(values) });
        let array = blocks.add(&block);
        let (blocks, arrivals) = (Rc::clone(blocks), Rc::clone(arrivals));
        Self { active: active.clone(), blocks, arrivals, array, layout: Rc::new(layout), block }
    }

    /// Where its elements are.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How many elements it has, on all ranks.
    pub fn length(&self) -> usize {
        self.layout.length()
    }

    /// The rank that has an element.
    ///
    /// # Panics
    /// When there is no such element.
    pub fn affinity(&self, index: usize) -> Rank {
        self.layout.affinity(index)
    }

    /// The elements of this rank.
    pub fn own(&self) -> Range<usize> {
        self.layout.block(self.active.rank())
    }

    /// This rank's block, to read. Let go of it before anything is asked for or waited for.
    pub fn local(&self) -> Ref<'_, [T]> {
        Ref::map(self.block.values.borrow(), Vec::as_slice)
    }

    /// This rank's block, to write. Let go of it before anything is asked for or waited for.
    pub fn local_mut(&self) -> RefMut<'_, [T]> {
        RefMut::map(self.block.values.borrow_mut(), Vec::as_mut_slice)
    }

    /// The values of these elements.
    ///
    /// # Panics
    /// When the range is outside the array; and while a slice of a block is held. So for all operations below.
    pub fn get(&self, range: Range<usize>) -> Pending<Vec<T>> {
        self.get_all(&[range])
    }

    /// The values of a tile of an array with two axes, row by row.
    ///
    /// # Panics
    /// As [`Global::get`].
    pub fn get_tile(&self, rows: Range<usize>, columns: Range<usize>) -> Pending<Vec<T>> {
        self.get_all(&self.layout.tile(rows, columns))
    }

    fn get_all(&self, ranges: &[Range<usize>]) -> Pending<Vec<T>> {
        let spans = self.spans(ranges);
        let zeros = vec![T::default(); ranges.iter().map(Range::len).sum()];
        let (pending, shared) = self.rest("get", zeros, &spans);
        let mut start = 0;
        for (rank, elements) in spans {
            let place = start..start + elements.len();
            start = place.end;
            if rank == self.active.rank() {
                let values = &self.block.values.borrow()[self.block.place(elements)];
                Rest::step(&shared, None, Ok(|whole: &mut Vec<T>| whole[place].copy_from_slice(values)));
                continue;
            }
            self.ask(rank, ("get", GET, elements, Vec::new()), &shared, move |message, whole| {
                whole[place.clone()].iter_mut().zip(from_bytes(message.payload)).for_each(|(value, new)| *value = new);
            });
        }
        pending
    }

    /// Sets these elements.
    ///
    /// # Panics
    /// As [`Global::get`], and when there are not as many values.
    pub fn put(&self, range: Range<usize>, values: &[T]) -> Pending<()> {
        self.put_all("put", PUT, &[range], values)
    }

    /// Sets a tile of an array with two axes, row by row.
    ///
    /// # Panics
    /// As [`Global::put`].
    pub fn put_tile(&self, rows: Range<usize>, columns: Range<usize>, values: &[T]) -> Pending<()> {
        self.put_all("put", PUT, &self.layout.tile(rows, columns), values)
    }

    /// Adds to these elements. What several ranks add is all there, in the order in which it came.
    ///
    /// # Panics
    /// As [`Global::put`].
    pub fn accumulate(&self, range: Range<usize>, values: &[T]) -> Pending<()> {
        self.put_all("accumulate", ACCUMULATE, &[range], values)
    }

    fn put_all(&self, phase: &'static str, handler: u16, ranges: &[Range<usize>], values: &[T]) -> Pending<()> {
        let count: usize = ranges.iter().map(Range::len).sum();
        assert_eq!(count, values.len(), "there are as many values as elements");
        let spans = self.spans(ranges);
        let (pending, shared) = self.rest(phase, (), &spans);
        let mut rest = values;
        for (rank, elements) in spans {
            let values = rest.split_off(..elements.len()).expect("there are as many values as elements");
            if rank == self.active.rank() {
                match handler {
                    PUT => self.block.write(elements, values.iter().copied()),
                    _ => self.block.accumulate(elements, values.iter().copied()),
                }
                Rest::step(&shared, None, Ok(|(): &mut ()| ()));
                continue;
            }
            self.ask(rank, (phase, handler, elements, cast_slice(values).to_vec()), &shared, |_, ()| ());
        }
        pending
    }

    /// Adds to one element, and gives what it was before. Every one of many such additions gets another value.
    ///
    /// # Panics
    /// As [`Global::get`].
    pub fn fetch_add(&self, index: usize, delta: T) -> Pending<T> {
        let spans = self.spans(std::slice::from_ref(&(index..index + 1)));
        let (pending, shared) = self.rest("fetch_add", T::default(), &spans);
        for (rank, elements) in spans {
            if rank == self.active.rank() {
                let value = &mut self.block.values.borrow_mut()[self.block.place(elements)][0];
                let before = std::mem::replace(value, value.plus(delta));
                Rest::step(&shared, None, Ok(|whole: &mut T| *whole = before));
                continue;
            }
            let payload = bytemuck::bytes_of(&delta).to_vec();
            self.ask(rank, ("fetch_add", FETCH_ADD, elements, payload), &shared, |message, whole| {
                from_bytes(message.payload).for_each(|before| *whole = before);
            });
        }
        pending
    }

    /// The sum of all elements, on all ranks with the same bits. All call this at the same point.
    ///
    /// # Errors
    /// As [`super::Space::barrier`].
    ///
    /// # Panics
    /// As [`Global::get`].
    pub fn sum(&self, space: &super::Space) -> Result<T, CommError> {
        let mut sum = [self.local().iter().fold(T::default(), |sum, &value| sum.plus(value))];
        space.all_reduce(&mut sum)?;
        Ok(sum[0])
    }

    /// Ends it: all ranks meet, and then nobody can reach it any more. All call this at the same point.
    ///
    /// # Errors
    /// As [`super::Space::barrier`].
    pub fn release(self) -> Result<(), CommError> {
        meet(&self.active, &self.arrivals, self.array + 1)?;
        self.blocks.release(self.array);
        Ok(())
    }

    fn spans(&self, ranges: &[Range<usize>]) -> Vec<(Rank, Range<usize>)> {
        // Even where nothing has to be sent: what is a bug with four ranks is one with one.
        assert!(self.blocks.are_at_rest(), "a slice of a global array is held: let go of it first");
        ranges.iter().flat_map(|range| self.layout.spans(range.clone(), count_max::<T>())).collect()
    }

    /// A value that is there when all spans are.
    fn rest<W: 'static>(
        &self,
        phase: &'static str,
        whole: W,
        spans: &[(Rank, Range<usize>)],
    ) -> (Pending<W>, Shared<W>) {
        let (pending, promise) = Pending::new(&self.active, phase);
        if spans.is_empty() {
            promise.complete(Ok(whole));
            return (pending, Rc::default());
        }
        let others = spans.iter().filter(|(rank, _)| *rank != self.active.rank());
        others.for_each(|(rank, _)| promise.owe(*rank));
        (pending, Rc::new(RefCell::new(Some(Rest { left: spans.len(), whole, promise }))))
    }

    fn ask<W: 'static>(
        &self,
        rank: Rank,
        (phase, handler, elements, payload): (&'static str, u16, Range<usize>, Vec<u8>),
        shared: &Shared<W>,
        good: impl Fn(&Message<'_>, &mut W) + 'static,
    ) {
        let expected = if matches!(handler, GET | FETCH_ADD) { elements.len() * size_of::<T>() } else { 0 };
        let arguments = Target { array: self.array, elements, code: T::CODE }.arguments();
        let shared = Rc::clone(shared);
        let request = Request::new(phase, (handler, arguments, payload), move |outcome| {
            if let Ok(message) = &outcome
                && message.payload.len() != expected
            {
                return Err(format!("{} bytes, where {expected} must come", message.payload.len()));
            }
            let good = &good;
            Rest::step(&shared, Some(rank), outcome.map(|message| move |whole: &mut W| good(&message, whole)));
            Ok(())
        });
        self.active.ask(rank, request);
    }
}
