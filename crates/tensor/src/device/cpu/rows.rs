//! Walks over the rows of a matrix, one vector of columns at a time. A few rows are walked together, so that what belongs to
//! a column is loaded once for all of them. For kernels that are bound by memory: the walk is what they share.
#![allow(unsafe_code)]

use super::isa::Isa;
use super::simd::{Simd, Vectorised};
use crate::dtype::Float;

/// A result of at least this many bytes is written past the caches: whoever reads it next would not find it there, and a
/// line that is written whole need not be read first.
pub(super) const PAST_BYTES_MIN: usize = 16 << 20;

/// Some rows of some columns, as offsets into a matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    /// Where the first begins.
    pub start: usize,
    /// How many rows.
    pub count: usize,
    /// From one to the next.
    pub stride: usize,
    /// Elements of each.
    pub width: usize,
}

impl Rows {
    /// `length` elements in rows of `width`: the whole ones, and what is left.
    pub fn of(length: usize, width: usize) -> [Self; 2] {
        let (count, rest) = (length / width, length % width);
        let whole = Self { start: 0, count, stride: width, width };
        [whole, Self { start: count * width, count: usize::from(rest > 0), stride: width, width: rest }]
    }
}

/// How many lanes of a vector hold elements.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lanes {
    All,
    First(usize),
}

/// What is done to the elements.
pub(super) trait Body {
    /// Does the elements of one vector of columns in `R` rows: `column` is counted from the rows' first one, and the elements
    /// are at `starts[r] + column`. What is `ahead` of them will be needed soon.
    ///
    /// # Safety
    /// The machine has `S`; the elements lie within the length that [`walk`] was given.
    unsafe fn vector<S: Simd, const R: usize>(&mut self, column: usize, starts: [usize; R], ahead: usize, lanes: Lanes);
}

/// Walks over `rows`, `GROUP` of them together and the rest one by one. The order of a column's elements is that of the rows.
///
/// # Panics
/// When they do not lie within `length`, on which a body's accesses rely.
pub(super) fn walk<const GROUP: usize>(isa: Isa, rows: Rows, length: usize, body: impl Body) {
    let Rows { start, count, stride, width } = rows;
    assert!(count == 0 || start + (count - 1) * stride + width <= length, "rows lie inside their matrix");
    isa.run(Walk::<_, GROUP> { rows, body });
}

struct Walk<B, const GROUP: usize> {
    rows: Rows,
    body: B,
}

impl<B: Body, const GROUP: usize> Vectorised for Walk<B, GROUP> {
    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let Rows { start, count, stride, width } = self.rows;
        let whole = count / GROUP * GROUP;
        for first in (0..whole).step_by(GROUP) {
            let starts = std::array::from_fn(|row| start + (first + row) * stride);
            // SAFETY: the caller has seen the instructions, and `walk` that the rows lie inside.
            unsafe { columns::<S, B, GROUP>(&mut self.body, width, starts, GROUP * stride) };
        }
        for row in whole..count {
            // SAFETY: as above.
            unsafe { columns::<S, B, 1>(&mut self.body, width, [start + row * stride], stride) };
        }
    }
}

/// # Safety
/// As [`Body::vector`], for the first `width` columns.
#[inline(always)]
unsafe fn columns<S: Simd, B: Body, const R: usize>(body: &mut B, width: usize, starts: [usize; R], ahead: usize) {
    let whole = width / S::LANES * S::LANES;
    for column in (0..whole).step_by(S::LANES) {
        // SAFETY: the caller's promise.
        unsafe { body.vector::<S, R>(column, starts, ahead, Lanes::All) };
    }
    if whole < width {
        // SAFETY: the caller's promise.
        unsafe { body.vector::<S, R>(whole, starts, ahead, Lanes::First(width - whole)) };
    }
}

/// A vector of elements from `at` on; zeros where there are none.
///
/// # Safety
/// The machine has `S`; `source` has the elements.
#[inline(always)]
pub(super) unsafe fn get<S: Simd, E: Float>(source: *const E, at: usize, lanes: Lanes) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe {
        match lanes {
            Lanes::All => S::read(source.add(at)),
            Lanes::First(count) => S::read_first(source.add(at), count),
        }
    }
}

/// As [`get`] from a tensor that is read from end to end; asks for what comes `ahead` elements later.
///
/// # Safety
/// As [`get`].
#[inline(always)]
pub(super) unsafe fn take<S: Simd, E: Float>(source: *const E, at: usize, ahead: usize, lanes: Lanes) -> S::Vector {
    // SAFETY: the caller's promise; what is asked for ahead need not exist.
    unsafe {
        S::prefetch(source.wrapping_add(at + ahead).cast());
        get::<S, E>(source, at, lanes)
    }
}

/// Writes a vector from `at` on, if asked past the caches.
///
/// # Safety
/// The machine has `S`; `target` has the elements and, for writing past the caches, [`may_pass`].
#[inline(always)]
pub(super) unsafe fn put<S: Simd, E: Float>(target: *mut E, at: usize, lanes: Lanes, vector: S::Vector, past: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        match lanes {
            Lanes::All if past => S::write_past(target.add(at), vector),
            Lanes::All => S::write(target.add(at), vector),
            Lanes::First(count) => S::write_first(target.add(at), vector, count),
        }
    }
}

/// Whether a result may be written past the caches in rows of `width`: every vector then starts on a multiple of its size.
pub(super) fn may_pass<E: Float>(isa: Isa, target: &[E], width: usize) -> bool {
    let lanes = isa.lanes();
    width.is_multiple_of(lanes) && target.as_ptr().addr().is_multiple_of(lanes * size_of::<E>())
}

/// Ends a task that wrote past the caches: the pool's word that it is done must not overtake the elements.
pub(super) fn fence(isa: Isa) {
    isa.run(Fence);
}

struct Fence;

impl Vectorised for Fence {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller has seen the instructions.
        unsafe { S::fence() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16::Bf16;
    use crate::buffer::Buffer;

    /// Adds a number per column to every element, in place.
    struct AddColumn<'a, E> {
        data: *mut E,
        column: &'a [f32],
        past: bool,
    }

    impl<E: Float> Body for AddColumn<'_, E> {
        #[inline(always)]
        unsafe fn vector<S: Simd, const R: usize>(
            &mut self,
            column: usize,
            starts: [usize; R],
            _: usize,
            lanes: Lanes,
        ) {
            // SAFETY: `walk` has seen that the elements lie inside.
            unsafe {
                let added = get::<S, _>(self.column.as_ptr(), column, lanes);
                for start in starts {
                    let sum = S::add(get::<S, E>(self.data, start + column, lanes), added);
                    put::<S, E>(self.data, start + column, lanes, sum, self.past);
                }
            }
        }
    }

    fn check<E: Float + PartialEq + std::fmt::Debug>(isa: Isa, rows: Rows, past: bool) {
        let mut buffer = Buffer::zeroed(4000);
        let data = crate::buffer::elements_mut::<E>(&mut buffer, 0, 3000);
        data.iter_mut().enumerate().for_each(|(index, x)| *x = E::from_f32((index % 100) as f32));
        let column: Vec<f32> = (0..rows.width).map(|column| (column % 7) as f32).collect();
        let past = past && may_pass(isa, data, rows.stride) && rows.start.is_multiple_of(16);
        walk::<3>(isa, rows, data.len(), AddColumn { data: data.as_mut_ptr(), column: &column, past });
        fence(isa);
        for (index, &found) in data.iter().enumerate() {
            let inside = index.checked_sub(rows.start).map(|from| (from / rows.stride, from % rows.stride));
            let added = match inside {
                Some((row, column)) if row < rows.count && column < rows.width => (column % 7) as f32,
                _ => 0.0,
            };
            assert_eq!(found, E::from_f32((index % 100) as f32 + added), "{isa:?} {rows:?} at {index}");
        }
    }

    #[test]
    fn every_element_of_the_rows_is_done_once_and_no_other() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for (start, count, stride, width) in
                [(0, 1, 1, 1), (5, 7, 33, 20), (16, 11, 64, 64), (3, 0, 9, 9), (0, 4, 48, 47)]
            {
                for past in [false, true] {
                    check::<f32>(isa, Rows { start, count, stride, width }, past);
                    check::<Bf16>(isa, Rows { start, count, stride, width }, past);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "rows lie inside their matrix")]
    fn rows_beyond_the_matrix_are_refused() {
        let mut data = [0.0f32; 10];
        let rows = Rows { start: 0, count: 2, stride: 6, width: 5 };
        walk::<2>(Isa::Portable, rows, 10, AddColumn { data: data.as_mut_ptr(), column: &[0.0; 5], past: false });
    }
}
