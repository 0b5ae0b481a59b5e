//! Augmentation: what happens to an image between the file and the batch.
//!
//! An [`Augment`] is a list of operations on 8-bit images, ending in the one that makes numbers of them. Every random
//! choice is drawn from the stream named by (seed, epoch, sample), so an image is changed in the same way whichever
//! thread, rank or resumed run meets it.

mod view;

use paceline_system::random::Random;
use serde::{Deserialize, Serialize};

pub use view::View;

use crate::DataError;
use crate::dataset::{Info, SampleKind, Source};
use crate::own::Treatment;
use crate::pixels::{Pixels, Window};
use crate::resize::Resizer;

/// Names the stream of augmentation, apart from those of shuffles and generated data.
const AUGMENT: u64 = 0x4155_474D;

/// Names the stream that says in which epochs images are mirrored.
const ALTERNATE: u64 = 0x464C_4950;

/// The largest side images may be brought to: a bound on what a mistyped number can allocate.
const SIDE_MAX: usize = 8192;

/// The most a longer side may be of the shorter one when the shorter is resized. A crop follows that sees less; without
/// the bound, a strip of one pixel by thousands would become gigabytes.
const LONGER_MAX: usize = 4;

/// What the user can ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AugmentChoice {
    /// Training sees the images as evaluation does.
    None,
    /// Scaled to the size that is asked for, both sides and nothing cut off, and mirrored by chance; evaluation scales in the same way.
    Flip,
    /// What is customary for the set: see [`Augment::training`].
    #[default]
    Standard,
    /// For few epochs: as standard, but what lies outside is the image reflected, an image is mirrored in every other epoch instead of by
    /// chance (Jordan, 2024), and a square of a quarter of its side is painted over at a random place (DeVries and Taylor, 2017).
    Strong,
}

/// One operation on an image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// Adds `pad` black pixels on every side, then takes a random window of the old size.
    RandomCrop {
        /// Pixels per side.
        pad: usize,
    },
    /// The same, with the image reflected at its edges instead of black.
    ReflectedCrop {
        /// Pixels per side.
        pad: usize,
    },
    /// Takes a random window by area and aspect ratio and resizes it (Szegedy et al., 2014).
    RandomResizedCrop {
        /// Rows of the result.
        height: usize,
        /// Columns of the result.
        width: usize,
        /// Least and greatest part of the image's area.
        scale: [f32; 2],
        /// Least and greatest width ÷ height.
        ratio: [f32; 2],
    },
    /// Resizes to exactly this size.
    Resize {
        /// Rows of the result.
        height: usize,
        /// Columns of the result.
        width: usize,
    },
    /// Resizes so that the shorter side has this length; the other follows, cut to the middle four times that length.
    ResizeShorter {
        /// Pixels.
        side: usize,
    },
    /// Takes the middle; where the image is too small, black is added.
    CentreCrop {
        /// Rows of the result.
        height: usize,
        /// Columns of the result.
        width: usize,
    },
    /// Mirrors every other image, by chance.
    HorizontalFlip,
    /// Mirrors an image in every other epoch; a draw of its own says in which.
    AlternatingFlip,
    /// Paints a square around a random pixel in the mean colour; what reaches over the edge is cut off.
    Cutout {
        /// Its side in pixels.
        side: usize,
    },
    /// (value ÷ 255 − mean) ÷ std for each channel. The last operation of every list.
    Normalise {
        /// One mean per channel.
        mean: Vec<f32>,
        /// One standard deviation per channel.
        std: Vec<f32>,
    },
}

/// Which image, when: what names the stream of its random choices.
#[derive(Clone, Copy, Debug)]
pub struct SampleKey {
    /// The run's seed.
    pub seed: u64,
    /// The epoch.
    pub epoch: u64,
    /// The sample's number in its set.
    pub sample: usize,
}

impl SampleKey {
    fn random(self) -> Random {
        Random::new(&[AUGMENT, self.seed, self.epoch, self.sample as u64])
    }

    /// Whether this is one of the epochs in which an image that alternates is mirrored.
    fn is_mirrored(self) -> bool {
        Random::new(&[ALTERNATE, self.seed, self.sample as u64]).chance(0.5) ^ self.epoch.is_multiple_of(2)
    }
}

/// A checked list of operations.
#[derive(Clone, Debug)]
pub struct Augment {
    ops: Vec<Op>,
    /// What each byte becomes, per channel: a look-up per value, and exactly (v/255 − μ)/σ rounded once per step.
    tables: Vec<[f32; 256]>,
    /// The colour of holes: the byte nearest to the mean, per channel.
    hole: Vec<u8>,
}

impl Augment {
    /// Checks and prepares a list of operations.
    ///
    /// # Errors
    /// When `Normalise` is not the last operation and only there, or a number makes no sense.
    pub fn new(ops: Vec<Op>) -> Result<Self, DataError> {
        let Some((Op::Normalise { mean, std }, before)) = ops.split_last() else {
            return Err(DataError::refused("augmentation must end with normalise"));
        };
        for op in before {
            let problem = match op {
                Op::Normalise { .. } => "normalise stands before the end",
                Op::Resize { height: 0, .. } | Op::Resize { width: 0, .. } | Op::ResizeShorter { side: 0 } => {
                    "resizes to 0 pixels"
                }
                Op::CentreCrop { height: 0, .. } | Op::CentreCrop { width: 0, .. } => "crops to 0 pixels",
                Op::Cutout { side: 0 } => "cuts out nothing",
                Op::RandomResizedCrop { height, width, scale, ratio }
                    if *height == 0
                        || *width == 0
                        || !(0.0 < scale[0] && scale[0] <= scale[1] && scale[1] <= 1.0)
                        || !(0.0 < ratio[0] && ratio[0] <= ratio[1] && ratio[1].is_finite()) =>
                {
                    "crops to an impossible size"
                }
                _ => continue,
            };
            return Err(DataError::refused(format!("augmentation {op:?} {problem}")));
        }
        if mean.len() != std.len() || mean.is_empty() || std.iter().any(|&std| std.is_nan() || std <= 0.0) {
            return Err(DataError::refused("normalise needs one mean and one positive standard deviation per channel"));
        }
        let table = |(mean, std): (&f32, &f32)| std::array::from_fn(|byte| (byte as f32 / 255.0 - mean) / std);
        let tables = mean.iter().zip(std).map(table).collect();
        let hole = mean.iter().map(|mean| (mean * 255.0).round().clamp(0.0, 255.0) as u8).collect();
        Ok(Self { ops, tables, hole })
    }

    /// The list for training on a set, at its own size or at `size` × `size`.
    ///
    /// Standard is: CIFAR-10 pad 4, random crop, flip · shapes pad 2, random crop, flip · MNIST pad 2, random crop ·
    /// folders random resized crop and flip as torchvision's reference · synthetic nothing · a program's own what it asks for. Strong changes these as
    /// [`AugmentChoice::Strong`] says; flip is flip for every set of images.
    ///
    /// # Errors
    /// When the size is no size of an image.
    pub fn training(choice: AugmentChoice, info: &Info, size: Option<usize>) -> Result<Self, DataError> {
        check_size(size)?;
        match choice {
            AugmentChoice::None => return Self::evaluation(choice, info, size),
            AugmentChoice::Flip => return Self::flipping(info, size),
            AugmentChoice::Standard | AugmentChoice::Strong => {}
        }
        let mut ops = match info.source {
            Source::Cifar10 => vec![Op::RandomCrop { pad: 4 }, Op::HorizontalFlip],
            Source::Shapes => vec![Op::RandomCrop { pad: 2 }, Op::HorizontalFlip],
            Source::Mnist => vec![Op::RandomCrop { pad: 2 }],
            Source::Folder => {
                let [height, width] = target_size(info, size);
                let (scale, ratio) = ([0.08, 1.0], [3.0 / 4.0, 4.0 / 3.0]);
                vec![Op::RandomResizedCrop { height, width, scale, ratio }, Op::HorizontalFlip]
            }
            Source::Own(Treatment { pad, flip, numbers: false }) => {
                let crop = (pad > 0).then_some(Op::RandomCrop { pad });
                crop.into_iter().chain(flip.then_some(Op::HorizontalFlip)).collect()
            }
            Source::Synthetic | Source::Text | Source::Own(_) => Vec::new(),
        };
        if choice == AugmentChoice::Strong {
            strengthen(&mut ops, info, size);
        }
        if info.source != Source::Folder {
            ops.extend(resize_to(info, size));
        }
        Self::ending(ops, info)
    }

    /// Scaled, and mirrored by chance where it has pixels that can be.
    fn flipping(info: &Info, size: Option<usize>) -> Result<Self, DataError> {
        let has_pixels = !matches!(info.source, Source::Text | Source::Own(Treatment { numbers: true, .. }))
            && matches!(info.kind, SampleKind::Image { .. });
        let flip = has_pixels.then_some(Op::HorizontalFlip);
        Self::ending(scaled(info, size).into_iter().chain(flip).collect(), info)
    }

    /// The list for evaluation of what was trained with this choice: resized where asked; folders by their shorter side to 256/224 of the
    /// size, then the middle, or all of the image where training saw all of it.
    ///
    /// # Errors
    /// When the size is no size of an image.
    pub fn evaluation(choice: AugmentChoice, info: &Info, size: Option<usize>) -> Result<Self, DataError> {
        check_size(size)?;
        if info.source != Source::Folder || choice == AugmentChoice::Flip {
            return Self::ending(scaled(info, size).into_iter().collect(), info);
        }
        let [height, width] = target_size(info, size);
        let side = (height * 256).div_ceil(224);
        Self::ending(vec![Op::ResizeShorter { side }, Op::CentreCrop { height, width }], info)
    }

    /// Adds the set's own normalisation.
    fn ending(mut ops: Vec<Op>, info: &Info) -> Result<Self, DataError> {
        // A text has no pixels: its list is never used, and any table will do.
        let (mean, std) =
            if info.mean.is_empty() { (vec![0.0], vec![1.0]) } else { (info.mean.clone(), info.std.clone()) };
        ops.push(Op::Normalise { mean, std });
        Self::new(ops)
    }

    /// The operations.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Whether images of any size come out in one size.
    pub fn fixes_size(&self) -> bool {
        let keeps = |op: &&Op| {
            use Op::{AlternatingFlip, Cutout, HorizontalFlip, Normalise, RandomCrop, ReflectedCrop};
            matches!(
                op,
                RandomCrop { .. }
                    | ReflectedCrop { .. }
                    | HorizontalFlip
                    | AlternatingFlip
                    | Cutout { .. }
                    | Normalise { .. }
            )
        };
        let last = self.ops.iter().rev().find(|op| !keeps(op));
        matches!(last, Some(Op::Resize { .. } | Op::CentreCrop { .. } | Op::RandomResizedCrop { .. }))
    }

    /// Height, width and channels of what comes out for images of `kind`, or nothing for tokens.
    pub fn output(&self, kind: SampleKind) -> Option<[usize; 3]> {
        let SampleKind::Image { mut height, mut width, channels } = kind else { return None };
        for op in &self.ops {
            match *op {
                Op::RandomResizedCrop { height: h, width: w, .. }
                | Op::Resize { height: h, width: w }
                | Op::CentreCrop { height: h, width: w } => (height, width) = (h, w),
                Op::ResizeShorter { side } => [height, width] = shorter_to(height, width, side),
                _ => {}
            }
        }
        Some([height, width, channels])
    }

    /// Applies the list to the image in `scratch` and writes height × width × channels numbers to `out`.
    ///
    /// # Panics
    /// When `out` has another length, or the image other channels than the list was made for.
    pub fn apply(&self, scratch: &mut Scratch, key: SampleKey, out: &mut [f32]) {
        let mut random = key.random();
        for op in &self.ops {
            apply_one(op, scratch, (&mut random, key), &self.hole);
        }
        let image = &scratch.image;
        assert_eq!(
            image.data.len(),
            out.len(),
            "augmentation gives {}×{}×{}",
            image.height,
            image.width,
            image.channels
        );
        assert_eq!(image.channels, self.tables.len(), "one mean and one std per channel");
        if let [red, green, blue] = &self.tables[..] {
            for (out, pixel) in out.as_chunks_mut::<3>().0.iter_mut().zip(image.data.as_chunks::<3>().0) {
                *out = [red[pixel[0] as usize], green[pixel[1] as usize], blue[pixel[2] as usize]];
            }
        } else {
            for ((out, &value), table) in out.iter_mut().zip(&image.data).zip(self.tables.iter().cycle()) {
                *out = table[value as usize];
            }
        }
    }
}

impl Augment {
    /// Normalises numbers of channels that alternate, as they are: (value − mean) ÷ std.
    pub fn normalise(&self, values: &mut [f32]) {
        let Some(Op::Normalise { mean, std }) = self.ops.last() else { return };
        for pixel in values.chunks_exact_mut(mean.len()) {
            for ((value, mean), std) in pixel.iter_mut().zip(mean).zip(std) {
                *value = (*value - mean) / std;
            }
        }
    }
}

/// One thread's working memory: the image being changed, room for the next version of it, the resizer's buffers.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The image.
    pub image: Pixels,
    next: Pixels,
    resizer: Resizer,
}

impl Scratch {
    fn crop(&mut self, window: Window) {
        self.next.window_of(&self.image, window);
        std::mem::swap(&mut self.image, &mut self.next);
    }

    fn resize(&mut self, window: Window, height: usize, width: usize) {
        let whole = Window { top: 0, left: 0, height: self.image.height, width: self.image.width };
        if window == whole && (height, width) == (whole.height, whole.width) {
            return;
        }
        self.resizer.resize(&self.image, window, height, width, &mut self.next);
        std::mem::swap(&mut self.image, &mut self.next);
    }
}

fn apply_one(op: &Op, scratch: &mut Scratch, (random, key): (&mut Random, SampleKey), hole: &[u8]) {
    let (rows, columns) = (scratch.image.height, scratch.image.width);
    let whole = Window { top: 0, left: 0, height: rows, width: columns };
    match *op {
        Op::RandomCrop { pad } => {
            let (top, left) = shift(pad, random);
            if (top, left) != (0, 0) {
                scratch.crop(Window { top, left, ..whole });
            }
        }
        Op::ReflectedCrop { pad } => {
            let (top, left) = shift(pad, random);
            if (top, left) != (0, 0) {
                scratch.next.reflected_window_of(&scratch.image, (top, left));
                std::mem::swap(&mut scratch.image, &mut scratch.next);
            }
        }
        Op::RandomResizedCrop { height, width, scale, ratio } => {
            let window = random_window(rows, columns, scale, ratio, random);
            scratch.resize(window, height, width);
        }
        Op::Resize { height, width } => scratch.resize(whole, height, width),
        Op::ResizeShorter { side } => {
            let window = middle_of(rows, columns);
            let [height, width] = shorter_to(rows, columns, side);
            scratch.resize(window, height, width);
        }
        Op::CentreCrop { height, width } => {
            let middle = |long: usize, short: usize| (long as isize - short as isize) / 2;
            if (height, width) != (rows, columns) {
                scratch.crop(Window { top: middle(rows, height), left: middle(columns, width), height, width });
            }
        }
        Op::HorizontalFlip => {
            if random.chance(0.5) {
                scratch.image.flip();
            }
        }
        Op::AlternatingFlip => {
            if key.is_mirrored() {
                scratch.image.flip();
            }
        }
        Op::Cutout { side } => scratch.image.paint(square(side, rows, columns, random), hole),
        Op::Normalise { .. } => {}
    }
}

/// Makes a standard list a strong one.
fn strengthen(ops: &mut Vec<Op>, info: &Info, size: Option<usize>) {
    if ops.is_empty() {
        return;
    }
    for op in &mut *ops {
        *op = match op.clone() {
            Op::RandomCrop { pad } => Op::ReflectedCrop { pad },
            Op::HorizontalFlip => Op::AlternatingFlip,
            op => op,
        };
    }
    let [height, width] = match (info.source, info.kind) {
        (Source::Folder, _) => target_size(info, size),
        (_, SampleKind::Image { height, width, .. }) => [height, width],
        (_, SampleKind::Tokens { .. }) => [0, 0],
    };
    ops.push(Op::Cutout { side: (height.min(width) / 4).max(1) });
}

/// Where a random crop begins.
fn shift(pad: usize, random: &mut Random) -> (isize, isize) {
    let mut draw = || random.below(2 * pad + 1) as isize - pad as isize;
    (draw(), draw())
}

/// A square around a random pixel.
fn square(side: usize, rows: usize, columns: usize, random: &mut Random) -> Window {
    let mut start = |most: usize| random.below(most.max(1)) as isize - (side / 2) as isize;
    Window { top: start(rows), left: start(columns), height: side, width: side }
}

/// A window of random area and aspect ratio, ten times tried as torchvision does; then the largest allowed middle.
fn random_window(rows: usize, columns: usize, scale: [f32; 2], ratio: [f32; 2], random: &mut Random) -> Window {
    let area = (rows * columns) as f32;
    for _ in 0..10 {
        let target = area * random.range(scale[0], scale[1]);
        let aspect = random.range(ratio[0].ln(), ratio[1].ln()).exp();
        let width = (target * aspect).sqrt().round() as usize;
        let height = (target / aspect).sqrt().round() as usize;
        if (1..=columns).contains(&width) && (1..=rows).contains(&height) {
            let top = random.below(rows - height + 1) as isize;
            let left = random.below(columns - width + 1) as isize;
            return Window { top, left, height, width };
        }
    }
    let aspect = (columns as f32 / rows as f32).clamp(ratio[0], ratio[1]);
    let width = columns.min((rows as f32 * aspect).round() as usize).max(1);
    let height = rows.min((columns as f32 / aspect).round() as usize).max(1);
    Window { top: ((rows - height) / 2) as isize, left: ((columns - width) / 2) as isize, height, width }
}

/// The middle of an image, no longer than [`LONGER_MAX`] times its shorter side.
fn middle_of(rows: usize, columns: usize) -> Window {
    let (height, width) = (rows.min(LONGER_MAX * columns), columns.min(LONGER_MAX * rows));
    Window { top: ((rows - height) / 2) as isize, left: ((columns - width) / 2) as isize, height, width }
}

/// Height and width of [`middle_of`] an image with the shorter of them brought to `side`.
fn shorter_to(rows: usize, columns: usize, side: usize) -> [usize; 2] {
    let Window { height, width, .. } = middle_of(rows, columns);
    if height <= width { [side, (width * side / height).max(1)] } else { [(height * side / width).max(1), side] }
}

fn check_size(size: Option<usize>) -> Result<(), DataError> {
    match size {
        Some(side) if !(1..=SIDE_MAX).contains(&side) => Err(DataError::refused(format!(
            "no image is {side} pixels wide; type --size with a number from 1 to {SIDE_MAX}"
        ))),
        _ => Ok(()),
    }
}

fn target_size(info: &Info, size: Option<usize>) -> [usize; 2] {
    match (size, info.kind) {
        (Some(size), _) => [size, size],
        (None, SampleKind::Image { height, width, .. }) => [height, width],
        (None, SampleKind::Tokens { .. }) => [1, 1],
    }
}

/// Brings an image to its size with nothing cut off; those of a folder come in any size.
fn scaled(info: &Info, size: Option<usize>) -> Option<Op> {
    let [height, width] = target_size(info, size);
    if info.source == Source::Folder { Some(Op::Resize { height, width }) } else { resize_to(info, size) }
}

fn resize_to(info: &Info, size: Option<usize>) -> Option<Op> {
    let [height, width] = target_size(info, size);
    match info.kind {
        SampleKind::Image { height: h, width: w, .. } if [h, w] != [height, width] => {
            Some(Op::Resize { height, width })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
