//! The blocks of global arrays that this rank has, and what other ranks may do with them. Handlers of [`super::active`]; the
//! callers' end is [`super::array`].

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use bytemuck::Pod;

use super::handlers::Handlers;
use super::message::{ARGUMENTS, Answer, Message, PAYLOAD_BYTES_MAX};

/// The handlers of these, by number.
pub(super) const GET: u16 = 0;
pub(super) const PUT: u16 = 1;
pub(super) const ACCUMULATE: u16 = 2;
pub(super) const FETCH_ADD: u16 = 3;

/// What a global array is made of.
pub trait Element: Pod + Default + Send + fmt::Debug {
    /// Which type it is, for those who ask for the same.
    const CODE: u64;
    /// The sum; of whole numbers, round the end.
    #[must_use]
    fn plus(self, other: Self) -> Self;
}

macro_rules! elements {
    ($($number:ty, $code:literal, $plus:expr;)*) => {$(
        impl Element for $number {
            const CODE: u64 = $code;

            fn plus(self, other: Self) -> Self {
                $plus(self, other)
            }
        }
    )*};
}

elements! {
    f32, 1, std::ops::Add::add;
    f64, 2, std::ops::Add::add;
    u32, 3, u32::wrapping_add;
    u64, 4, u64::wrapping_add;
    i32, 5, i32::wrapping_add;
    i64, 6, i64::wrapping_add;
    u8, 7, u8::wrapping_add;
}

/// Elements of so many bytes, whatever their alignment there.
pub(super) fn from_bytes<T: Element>(bytes: &[u8]) -> impl Iterator<Item = T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned)
}

/// How many elements a message may carry.
pub(super) const fn count_max<T>() -> usize {
    PAYLOAD_BYTES_MAX / size_of::<T>()
}

/// What a message says of the elements that it is for.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// The array's number.
    pub array: u64,
    pub elements: Range<usize>,
    /// Their type.
    pub code: u64,
}

impl Target {
    pub fn arguments(&self) -> [u64; ARGUMENTS] {
        [self.array, self.elements.start as u64, self.elements.len() as u64, self.code]
    }
}

/// The elements of an array that a rank has.
pub(super) struct Block<T> {
    /// Where it begins in the array.
    pub start: usize,
    pub values: RefCell<Vec<T>>,
}

impl<T: Element> Block<T> {
    /// The place of elements of the array.
    pub fn place(&self, elements: Range<usize>) -> Range<usize> {
        elements.start - self.start..elements.end - self.start
    }

    pub fn write(&self, elements: Range<usize>, values: impl Iterator<Item = T>) {
        let place = self.place(elements);
        self.values.borrow_mut()[place].iter_mut().zip(values).for_each(|(value, new)| *value = new);
    }

    pub fn accumulate(&self, elements: Range<usize>, values: impl Iterator<Item = T>) {
        let place = self.place(elements);
        self.values.borrow_mut()[place].iter_mut().zip(values).for_each(|(value, more)| *value = value.plus(more));
    }
}

/// A block of any type.
trait AnyBlock {
    fn code(&self) -> u64;
    fn element_bytes(&self) -> usize;
    fn range(&self) -> Range<usize>;
    fn is_lent(&self) -> bool;
    fn read(&self, elements: Range<usize>) -> Vec<u8>;
    fn write(&self, elements: Range<usize>, bytes: &[u8]);
    fn accumulate(&self, elements: Range<usize>, bytes: &[u8]);
}

impl<T: Element> AnyBlock for Block<T> {
    fn code(&self) -> u64 {
        T::CODE
    }

    fn element_bytes(&self) -> usize {
        size_of::<T>()
    }

    fn range(&self) -> Range<usize> {
        self.start..self.start + self.values.borrow().len()
    }

    fn is_lent(&self) -> bool {
        self.values.try_borrow_mut().is_err()
    }

    fn read(&self, elements: Range<usize>) -> Vec<u8> {
        bytemuck::cast_slice(&self.values.borrow()[self.place(elements)]).to_vec()
    }

    fn write(&self, elements: Range<usize>, bytes: &[u8]) {
        self.write(elements, from_bytes(bytes));
    }

    fn accumulate(&self, elements: Range<usize>, bytes: &[u8]) {
        self.accumulate(elements, from_bytes(bytes));
    }
}

/// What is done for another rank with elements that this one has, given the request's payload; the answer's.
type Service = fn(&dyn AnyBlock, Range<usize>, &[u8]) -> Result<Vec<u8>, String>;

/// All blocks of a rank, by the number of their array; none where one was released.
#[derive(Default)]
pub(super) struct Blocks(RefCell<Vec<Option<Rc<dyn AnyBlock>>>>);

impl Blocks {
    /// Other ranks may ask for this block from now on; the number of its array, which is the same on all ranks.
    pub fn add<T: Element>(&self, block: &Rc<Block<T>>) -> u64 {
        let mut blocks = self.0.borrow_mut();
        blocks.push(Some(Rc::clone(block) as Rc<dyn AnyBlock>));
        blocks.len() as u64 - 1
    }

    /// Nobody may ask for it any more.
    pub fn release(&self, array: u64) {
        self.0.borrow_mut()[array as usize] = None;
    }

    /// Whether no slice of any block is held, so that handlers may run.
    pub fn are_at_rest(&self) -> bool {
        !self.0.borrow().iter().flatten().any(|block| block.is_lent())
    }

    /// Adds the handlers of all arrays, in the order of their numbers.
    pub fn serve(blocks: &Rc<Self>, handlers: &mut Handlers) {
        let mut add = |number, name, handler: Service| {
            let blocks = Rc::clone(blocks);
            let added = handlers.add(name, move |_, message| {
                let (block, elements) = blocks.find(&message)?;
                let payload = handler(&*block, elements, message.payload)?;
                Ok(Answer { arguments: [0; ARGUMENTS], payload })
            });
            assert_eq!(added, number, "{name} has its number");
        };
        add(GET, "get", |block, elements, payload| {
            let bytes = elements.len() * block.element_bytes();
            if bytes > PAYLOAD_BYTES_MAX || !payload.is_empty() {
                return Err(format!("{bytes} bytes in one message, with {} in the request", payload.len()));
            }
            Ok(block.read(elements))
        });
        add(PUT, "put", |block, elements, payload| {
            are_these(block, &elements, payload)?;
            block.write(elements, payload);
            Ok(Vec::new())
        });
        add(ACCUMULATE, "accumulate", |block, elements, payload| {
            are_these(block, &elements, payload)?;
            block.accumulate(elements, payload);
            Ok(Vec::new())
        });
        add(FETCH_ADD, "fetch_add", |block, elements, payload| {
            are_these(block, &elements, payload)?;
            let before = block.read(elements.clone());
            block.accumulate(elements, payload);
            Ok(before)
        });
    }

    /// The elements that a message is for, if this rank has them.
    fn find(&self, message: &Message<'_>) -> Result<(Rc<dyn AnyBlock>, Range<usize>), String> {
        let [array, start, count, code] = message.arguments;
        let blocks = self.0.borrow();
        let block = usize::try_from(array).ok().and_then(|array| blocks.get(array)?.clone());
        let Some(block) = block else { return Err(format!("array {array}, which there is not")) };
        let (range, own) = (start..start.saturating_add(count), block.range());
        if code != block.code() {
            return Err(format!("elements of type {code} of array {array}, which has type {}", block.code()));
        }
        // Within the block all numbers fit.
        if count > own.len() as u64 || range.start < own.start as u64 || range.end > own.end as u64 {
            return Err(format!("elements {range:?} of array {array}, of which this rank has {own:?}"));
        }
        Ok((block, range.start as usize..range.end as usize))
    }
}

/// Whether a payload is as long as the elements that it is for.
fn are_these(block: &dyn AnyBlock, elements: &Range<usize>, payload: &[u8]) -> Result<(), String> {
    if payload.len() / block.element_bytes() == elements.len() && payload.len().is_multiple_of(block.element_bytes()) {
        return Ok(());
    }
    Err(format!("{} bytes for {} elements of {} bytes", payload.len(), elements.len(), block.element_bytes()))
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("arrays", &self.0.borrow().len()).finish()
    }
}
