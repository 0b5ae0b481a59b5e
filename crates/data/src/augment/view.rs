//! What an augmentation comes to that only moves whole pixels and paints some over: numbers instead of an image, for a device that has the
//! images and looks at them itself.

use super::{Augment, Op, SampleKey, shift, square};
use crate::pixels::Window;

/// How an image of a set is looked at. The pixel at (row, column) of the result is the one at (row + `top`, column + `left`) of the image,
/// with the column counted from the right if it is `mirrored`; outside it is black or `reflected`, and inside the `hole` it has the holes' colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Which image.
    pub sample: usize,
    /// Rows that the result begins below the image's first.
    pub top: isize,
    /// Columns that it begins right of the image's first.
    pub left: isize,
    /// Whether left and right are swapped.
    pub mirrored: bool,
    /// Whether the image is reflected at its edges.
    pub reflected: bool,
    /// What is painted over, in the result.
    pub hole: Option<Window>,
}

impl View {
    /// The view as eight numbers: sample, top, left, 1 if mirrored and 2 more if reflected, and the hole's first and last row and column, the last excluded.
    pub fn words(&self) -> [i32; 8] {
        let hole = self.hole.unwrap_or(Window { top: 0, left: 0, height: 0, width: 0 });
        let ends = [hole.top + hole.height as isize, hole.left + hole.width as isize];
        let [sample, mirrored] = [self.sample as i32, i32::from(self.mirrored) + 2 * i32::from(self.reflected)];
        let small = |number: isize| number as i32;
        [
            sample,
            small(self.top),
            small(self.left),
            mirrored,
            small(hole.top),
            small(hole.left),
            small(ends[0]),
            small(ends[1]),
        ]
    }
}

impl Augment {
    /// Whether all it does is a view: a shift, then a mirror, then a hole, each at most once.
    pub fn is_view(&self) -> bool {
        let order = |op: &Op| match op {
            Op::RandomCrop { .. } | Op::ReflectedCrop { .. } => Some(0),
            Op::HorizontalFlip | Op::AlternatingFlip => Some(1),
            Op::Cutout { .. } => Some(2),
            Op::Normalise { .. } => Some(3),
            _ => None,
        };
        let orders: Option<Vec<i32>> = self.ops.iter().map(order).collect();
        orders.is_some_and(|orders| orders.is_sorted_by(|a, b| a < b))
    }

    /// What [`Augment::apply`] would do to an image of this height and width.
    ///
    /// # Panics
    /// When it does more than a view: see [`Augment::is_view`].
    pub fn view(&self, [height, width]: [usize; 2], key: SampleKey) -> View {
        assert!(self.is_view(), "{:?} do more than a view", self.ops);
        let mut random = key.random();
        let mut view = View { sample: key.sample, top: 0, left: 0, mirrored: false, reflected: false, hole: None };
        for op in &self.ops {
            match *op {
                Op::RandomCrop { pad } => (view.top, view.left) = shift(pad, &mut random),
                Op::ReflectedCrop { pad } => {
                    (view.top, view.left) = shift(pad, &mut random);
                    view.reflected = true;
                }
                Op::AlternatingFlip => view.mirrored = key.is_mirrored(),
                Op::HorizontalFlip => view.mirrored = random.chance(0.5),
                Op::Cutout { side } => view.hole = Some(square(side, height, width, &mut random)),
                _ => {}
            }
        }
        view
    }

    /// What each byte becomes, per channel.
    pub fn tables(&self) -> &[[f32; 256]] {
        &self.tables
    }

    /// The byte that stands in holes, per channel.
    pub fn hole(&self) -> &[u8] {
        &self.hole
    }
}
